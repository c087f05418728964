"""Plans on a GPU: a run as one CUDA graph, beside its calls, torch, and torch's own graph. Writes results/gpu_plans.md.

    python bench/gpu_plans.py [--quick] [--only CASE ...] [--toys] [--out FILE]

Needs an NVIDIA GPU, torch, and built environments of GPU backends; or, with --toys, the repository on PYTHONPATH and
nothing built: the tests' backend of torch serves then, whose kernels are torch's own. A Llama-like decoding and prompt
layer (bfloat16, hidden 2,048) and a MiniLM-like layer (float16, hidden 384). All modes run in turn in each round; a
figure is the median of the rounds: of the host's time until the call returns, of the wall's until the GPU is through.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, at_most, finish, parser
from gpu_common import F, connected, pipelined, torch, versions

import layerzero as lz

ROUNDS, COUNT = 20, 20
SETTLE_S = 15.0


class Case(NamedTuple):
    name: str
    ours: Callable[[Any], Any]
    floor: Callable[[Any], Any]
    x: Any


def randn(*shape: int, dtype: Any) -> Any:
    return torch.randn(shape, device="cuda", dtype=dtype)


def llama(tokens: int) -> Case:
    """Attention and a gated MLP with residuals; lz has linear layers, silu and attention, torch the rest."""
    hidden, heads, inner, dtype = 2048, 16, 5632, torch.bfloat16
    width = hidden // heads
    w_qkv, w_o = randn(hidden, 3 * hidden, dtype=dtype) / 64, randn(hidden, hidden, dtype=dtype) / 64
    w_gate, w_up = (randn(hidden, inner, dtype=dtype) / 64 for _ in "gu")
    w_down, scale = randn(inner, hidden, dtype=dtype) / 64, torch.ones(hidden, device="cuda", dtype=dtype)

    def norm(x: Any) -> Any:
        return F.layer_norm(x, (hidden,), scale)

    def run(matmul: Any, silu: Any, attention: Any) -> Callable[[Any], Any]:
        def layer(x: Any) -> Any:
            parts = matmul(norm(x), w_qkv).reshape(1, tokens, 3, heads, width)
            q, k, v = (parts[:, :, n].transpose(1, 2).contiguous() for n in range(3))
            a = attention(q, k, v, is_causal=True).transpose(1, 2).reshape(tokens, hidden)
            h = x + matmul(a, w_o)
            n = norm(h)
            return h + matmul(silu(matmul(n, w_gate)) * matmul(n, w_up), w_down)

        return layer

    return Case(
        f"Llama-like layer, {tokens} tokens",
        run(lz.matmul, lz.silu, lz.attention),
        run(torch.matmul, F.silu, F.scaled_dot_product_attention),
        randn(tokens, hidden, dtype=dtype),
    )


def minilm(tokens: int, *, has_weights: bool) -> Case:
    """An encoder's layer; lz has linear layers, gelu, layer norm (with weights, or without) and attention, torch the
    residuals."""
    hidden, heads, dtype = 384, 12, torch.float16
    width = hidden // heads
    w_qkv, w_o = randn(hidden, 3 * hidden, dtype=dtype) / 20, randn(hidden, hidden, dtype=dtype) / 20
    w_up, w_down = randn(hidden, 4 * hidden, dtype=dtype) / 20, randn(4 * hidden, hidden, dtype=dtype) / 40
    scale, shift = torch.ones(hidden, device="cuda", dtype=dtype), torch.zeros(hidden, device="cuda", dtype=dtype)
    weights = (scale, shift) if has_weights else ()

    def run(ops: Any, attention: Any, matmul: Any) -> Callable[[Any], Any]:
        def layer(x: Any) -> Any:
            parts = matmul(x, w_qkv).reshape(1, tokens, 3, heads, width)
            q, k, v = (parts[:, :, n].transpose(1, 2).contiguous() for n in range(3))
            a = attention(q, k, v).transpose(1, 2).reshape(tokens, hidden)
            h = ops.layer_norm(x + matmul(a, w_o), (hidden,), *weights)
            return ops.layer_norm(h + matmul(ops.gelu(matmul(h, w_up)), w_down), (hidden,), *weights)

        return layer

    return Case(
        f"MiniLM-like layer, {tokens} tokens",
        run(lz, lz.attention, lz.matmul),
        run(F, F.scaled_dot_product_attention, torch.matmul),
        randn(tokens, hidden, dtype=dtype),
    )


CASES = {
    "decode": lambda toys: llama(1),
    "prompt": lambda toys: llama(512),
    "sentence": lambda toys: minilm(16, has_weights=not toys),
    "batch": lambda toys: minilm(2048, has_weights=not toys),
}


def graph_of(work: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    """What torch alone does with a captured graph: the argument copied in, the result copied out."""
    own = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work(own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(own)

    def replay() -> Any:
        own.copy_(x)
        graph.replay()
        return result.clone()

    return replay


def settle(plan: Any, x: Any) -> str:
    """Until all its calls are lifted and its graph is replayed, or time is up. What the plan is then."""
    for _ in range(3):  # the first one starts workers
        plan(x)
    torch.cuda.synchronize()
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        before = plan.counters()["replays"]
        for _ in range(20):
            plan(x)
        torch.cuda.synchronize()
        told = plan.explain()
        is_lifted = (
            told.graph is not None and told.graph.is_captured and set(told.graph.calls) <= {"lifted", "in_process"}
        )
        if plan.phase == "CALLS" or (is_lifted and plan.counters()["replays"] >= before + 20):
            break
    return str(plan.explain())


def measure(case: Case, rounds: int) -> Iterator[tuple[str, ...]]:
    plan = lz.plan(case.ours)
    modes: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        expected = case.floor(case.x)
        print(settle(plan, case.x), flush=True)
        others = [case.x + 0 for _ in range(2)]  # arguments in changing memory: copied
        turn = iter(range(1 << 62))
        modes["calls"] = lambda: case.ours(case.x)
        modes["plan"] = lambda: plan(others[next(turn) % 2])
        modes["plan, same memory"] = lambda: plan(case.x)
        modes["torch"] = lambda: case.floor(case.x)
        modes["graph of torch"] = graph_of(case.floor, case.x)
        for name, call in modes.items():
            found = call()
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=5e-2, atol=0.1, msg=lambda m, n=name: n + m
            )
            pipelined(call, COUNT)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
        for _ in range(rounds):
            for name, call in modes.items():
                times[name].append(pipelined(call, COUNT))
    print(plan.explain(), flush=True)
    medians = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in times.items()}
    for name, (host, wall) in medians.items():
        ratios = [
            statistics.median(mine[1] / its[1] for mine, its in zip(times[name], times[floor], strict=True))
            for floor in ("calls", "torch", "graph of torch")
        ]
        aimed = at_most(ratios[2], 1.15) if name.startswith("plan") else f"{ratios[2]:.2f}"
        yield case.name, name, f"{host:.1f}", f"{wall:.1f}", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", aimed


def main() -> None:
    arguments = parser(__doc__, "three rounds")
    arguments.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    arguments.add_argument(
        "--toys", action="store_true", help="with the tests' backend of torch; nothing need be built"
    )
    arguments.add_argument("--out", type=Path, help="write the table here, too")
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU")
    torch.manual_seed(0)
    rows: list[tuple[str, ...]] = []
    with connected(with_toys=args.toys):
        for name in args.only:
            start_s = time.monotonic()
            for row in measure(CASES[name](args.toys), 3 if args.quick else ROUNDS):
                print(" | ".join(row), flush=True)
                rows.append(row)
            print(f"{name}: {time.monotonic() - start_s:.0f} s", flush=True)
        facts = versions()
    headings = ("what", "by", "host, us", "wall, us", "of calls", "of torch", "of a graph of torch, wall")
    finish("gpu_plans", "Plans on a GPU, us a run", facts, headings, rows, is_quick=args.quick)
    if args.out and not args.quick:
        args.out.write_text((RESULTS / "gpu_plans.md").read_text())


if __name__ == "__main__":
    main()
