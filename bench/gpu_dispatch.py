"""What calls on a GPU cost through the broker, beside the same kernels in this process. Writes results/gpu_dispatch.md.

    python bench/gpu_dispatch.py [--quick] [--only ROW ...] [--without NAME ...] [--out FILE]

Needs an NVIDIA GPU, torch, and built environments for torch-cuda and, for the layer, triton and cupy or liger
(`LAYERZERO_VARIANT=cu13 lz env build ...`), for `deaths` another one with attention, for `faults` the repository on
PYTHONPATH. Rounds alternate between ours and the floor; a figure is the median of the rounds, a ratio the median of
their ratios.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, at_most, finish, parser
from gpu_common import F, Row, attention, kernel, pipelined, qkv, torch, versions
from gpu_deaths import RESTARTS, deaths, faults
from gpu_sweep import sweep

import layerzero as lz

COUNT, ROUNDS = 200, 9
BACKEND = "torch-cuda"
LAYER_BACKENDS = ("triton", "liger", "cupy", "flashinfer")


def synchronous(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """As `pipelined`, each call waited for."""
    start_ns = time.perf_counter_ns()
    for _ in range(count):
        call()
        torch.cuda.synchronize()
    each = (time.perf_counter_ns() - start_ns) / count / 1e3
    return each, each


Measure = Callable[[Callable[[], Any], int], tuple[float, float]]


class Figures(NamedTuple):
    """Medians in us, and of the rounds' ratios."""

    ours_host: float
    ours_wall: float
    floor_host: float
    floor_wall: float
    host_ratio: float
    wall_ratio: float


def compare(ours: Callable[[], Any], floor: Callable[[], Any], measure: Measure, count: int, rounds: int) -> Figures:
    for call in (ours, floor):
        measure(call, max(count // 4, 5))
        lz.status()  # what the broker has sent meanwhile, such as leases, is here when this returns
        measure(call, max(count // 4, 5))
    samples = [(*measure(ours, count), *measure(floor, count)) for _ in range(rounds)]
    columns = [statistics.median(column) for column in zip(*samples, strict=True)]
    host = statistics.median(ours_host / floor_host for ours_host, _, floor_host, _ in samples)
    wall = statistics.median(ours_wall / floor_wall for _, ours_wall, _, floor_wall in samples)
    return Figures._make((*columns, host, wall))


def learnt(tensors: Any) -> Any:
    """Run each kernel that takes causal attention of these tensors, so that the broker knows which is the fastest."""
    q, k, v = tensors
    for candidate in lz.explain(lz.attention, q, k, v, is_causal=True).candidates:
        if candidate.accepted:
            with lz.prefer(candidate.kernel_id, only=True):
                synchronous(lambda: lz.attention(q, k, v, is_causal=True), 40)  # one run is timed at a time
    return tensors


# --- rows


def small(quick: bool) -> Iterator[Row]:
    for length in (1, 1024):
        ours, floor = attention(*learnt(qkv(1, 16, length, 128)))
        found = compare(ours, floor, pipelined, COUNT, 3 if quick else ROUNDS)
        yield Row(
            f"attention, bf16, causal, (1,16,{length},128), pipelined, host time a call; served by {kernel()}",
            f"{found.ours_host:.1f} us (wall {found.ours_wall:.1f} us)",
            f"{found.floor_host:.1f} us (wall {found.floor_wall:.1f} us)",
            f"{at_most(found.host_ratio, 1.0)}; wall {found.wall_ratio:.2f}",
        )


def large(quick: bool) -> Iterator[Row]:
    ours, floor = attention(*learnt(qkv(4, 32, 4096, 128)))
    found = compare(ours, floor, pipelined, 20, 3 if quick else ROUNDS)
    yield Row(
        f"the same, (4,32,4096,128), wall; served by {kernel()}",
        f"{found.ours_wall:,.0f} us",
        f"{found.floor_wall:,.0f} us",
        at_most(found.wall_ratio, 1.03),
    )


def waited(quick: bool) -> Iterator[Row]:
    ours, floor = attention(*learnt(qkv(1, 16, 1, 128)))
    found = compare(ours, floor, synchronous, COUNT, 3 if quick else ROUNDS)
    yield Row(
        "attention (1,16,1,128), synchronous",
        f"{found.ours_wall:.1f} us",
        f"{found.floor_wall:.1f} us",
        at_most(found.wall_ratio, 2.0),
    )


def captured(quick: bool) -> Iterator[Row]:
    """Calls in a CUDA graph of the application, one after the other, against a loop of eager ones."""
    count = 16
    ours, floor = attention(*learnt(qkv(1, 16, 1, 128)))
    repeat(ours, count)
    graph, own = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [ours() for _ in range(count)]
    with torch.cuda.graph(own):
        repeat(floor, count)
    graph.replay()
    torch.testing.assert_close(results[-1], floor())
    found = compare(graph.replay, lambda: repeat(floor, count), synchronous, 40, 3 if quick else ROUNDS)
    local = compare(own.replay, own.replay, synchronous, 40, 3)
    yield Row(
        f"{count} remote attentions (1,16,1,128) in the caller's CUDA graph, per op, against the eager loop in process",
        f"{found.ours_wall / count:.1f} us",
        f"{found.floor_wall / count:.1f} us; as a graph {local.ours_wall / count:.1f} us",
        at_most(found.wall_ratio, 0.9),
    )


def repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def layer(quick: bool) -> Iterator[Row]:
    """Llama-shaped layers with their ops on three environments."""
    built = {b["name"] for b in lz.status()["backends"] if b.get("built")}
    norms = next((name for name in ("triton", "liger", "flashinfer") if name in built), None)
    if norms is None or "cupy" not in built:
        yield Row(
            "Llama-shaped layers over three environments", "", "", f"not run: built are {', '.join(sorted(built))}"
        )
        return
    for tokens in (1024,) if quick else (1024, 4096, 16384):
        yield one_layer(tokens, norms, 3 if quick else ROUNDS)


class Eager:
    """The layer's ops as torch has them."""

    rms_norm, linear = staticmethod(F.rms_norm), staticmethod(F.linear)

    @staticmethod
    def attention(q: Any, k: Any, v: Any, *, is_causal: bool, layout: str) -> Any:
        assert layout == "BSHD"
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=is_causal).transpose(1, 2)

    @staticmethod
    def rope(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    @staticmethod
    def swiglu(gate: Any, up: Any) -> Any:
        return F.silu(gate) * up


def one_layer(tokens: int, norms: str, rounds: int) -> Row:
    hidden, heads, inner = 4096, 32, 11008
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(1, tokens, hidden, **bf16)
    first, second = torch.ones(hidden, **bf16), torch.ones(hidden, **bf16)
    w_qkv, w_o = torch.randn(3 * hidden, hidden, **bf16) / 64, torch.randn(hidden, hidden, **bf16) / 64
    w_gate_up, w_down = torch.randn(2 * inner, hidden, **bf16) / 64, torch.randn(hidden, inner, **bf16) / 64
    width = hidden // heads
    turns = 1e4 ** (-torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.arange(tokens, device="cuda")[:, None] * turns
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def run(ops: Any, at: Callable[[str], dict[str, str]]) -> Any:
        n = ops.rms_norm(x, (hidden,), first, **at(norms))
        qkv = ops.linear(n, w_qkv, **at(BACKEND)).view(1, tokens, 3 * heads, width)
        q, k = ops.rope(qkv[:, :, : 2 * heads], cos, sin, **at(norms)).chunk(2, 2)
        a = ops.attention(q, k, qkv[:, :, 2 * heads :], is_causal=True, layout="BSHD", **at(BACKEND))
        h = x + ops.linear(a.reshape(1, tokens, hidden), w_o, **at(BACKEND))
        n = ops.rms_norm(h, (hidden,), second, **at(norms))
        gate, up = ops.linear(n, w_gate_up, **at(BACKEND)).chunk(2, -1)
        return h + ops.linear(ops.swiglu(gate, up, **at("cupy")), w_down, **at(BACKEND))

    def ours() -> Any:
        return run(lz, lambda name: {"backend": name})

    def floor() -> Any:
        return run(Eager, lambda name: {})

    torch.testing.assert_close(ours().float(), floor().float(), rtol=5e-2, atol=0.5)
    found = compare(ours, floor, pipelined, 20, rounds)
    return Row(
        f"a Llama-shaped layer, {tokens} tokens, hidden {hidden}, 9 ops on {BACKEND}, {norms} and cupy, wall",
        f"{found.ours_wall:,.0f} us",
        f"{found.floor_wall:,.0f} us",
        at_most(found.wall_ratio, 1.25),
    )


ROWS = {row.__name__: row for row in (small, large, waited, captured, layer, sweep, deaths, faults)}


def main() -> None:
    arguments = parser(__doc__, "fewer rounds and shapes")
    arguments.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    arguments.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="backends or kernels that sweep leaves out"
    )
    arguments.add_argument("--out", type=Path, help="write the table here, too")
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU")
    for name, value in RESTARTS.items():
        os.environ.setdefault(name, value)  # `deaths` kills more workers than ever die
    lz.connect()
    rows: list[Row] = []
    for name in args.only:
        for row in sweep(args.quick, args.without) if name == "sweep" else ROWS[name](args.quick):
            rows.append(row)
            print(" | ".join(row), flush=True)
    headings = ("figure", "LayerZero", "in process", "ratio")
    finish("gpu_dispatch", "Calls on a GPU", versions(), headings, rows, is_quick=args.quick)
    if args.out and not args.quick:
        args.out.write_text((RESULTS / "gpu_dispatch.md").read_text())


if __name__ == "__main__":
    main()
