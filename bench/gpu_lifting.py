"""What a lifted call costs its caller, beside torch's own and one that a worker runs. Writes results/gpu_lifting.md.

    python bench/gpu_lifting.py [--quick] [--only ROW ...]

Needs an NVIDIA GPU, torch, and built environments for torch-cuda and cudnn (`LAYERZERO_VARIANT=cu13 lz env build ...`).
Rounds alternate between the three; a figure is the median of the rounds. Host time is until the last of COUNT calls has
returned, wall time until the GPU is through, both a call. In a graph: of GRAPH_CALLS of them, captured by torch.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common import at_most, finish, own_broker, parser
from gpu_common import F, kernel, pipelined, qkv, served, torch, versions

import layerzero as lz

COUNT, ROUNDS = 200, 3
GRAPH_CALLS = 20
IN_GRAPH = 1.02  # the aim there
SETTLE_S = 60.0
ISOLATIONS = {"lifted": "lifted", "express": "subprocess"}  # path of a call: what policy is asked for (docs/policy.md)


class Case(NamedTuple):
    """A call of ours, torch's own that computes the same, and what part of its host time ours should take."""

    name: str
    ours: Callable[[], Any]
    eager: Callable[[], Any]
    aim: float = 0.9


class Timed(NamedTuple):
    """us a call."""

    host: float
    wall: float

    def __str__(self) -> str:
        return f"{self.host:.1f} ({self.wall:.1f})"


# --- rows


def rms_norm() -> Iterator[Case]:
    for rows in (1, 1024):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        for backend in ("torch-cuda", "triton"):
            yield Case(
                f"rms_norm ({rows}, 4096)",
                lambda x=x, weight=weight, b=backend: lz.rms_norm(x, (4096,), weight, backend=b),
                lambda x=x, weight=weight: F.rms_norm(x, (4096,), weight),
            )


def norm_backward(norm: str) -> Callable[[], Iterator[Case]]:
    """Against what torch's autograd calls, whose forward pass has kept means and deviations."""

    def rows() -> Iterator[Case]:
        x, grad = (torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        ours, aten = getattr(lz, f"{norm}_backward"), torch.ops.aten
        if norm == "rms_norm":
            _, factor = aten._fused_rms_norm(x, (4096,), weight, 1e-5)
            eager = functools.partial(aten._fused_rms_norm_backward, grad, x, (4096,), factor, weight, [True, True])
        else:
            _, mean, factor = aten.native_layer_norm(x, (4096,), weight, weight, 1e-5)
            eager = functools.partial(
                aten.native_layer_norm_backward, grad, x, (4096,), mean, factor, weight, weight, [True, True, True]
            )
        for backend in ("torch-cuda", "triton"):
            call = functools.partial(ours, grad, x, (4096,), weight, 1e-5, backend=backend)
            yield Case(f"{norm}_backward (1024, 4096)", call, eager)

    return rows


def silu() -> Iterator[Case]:
    x = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    yield Case("silu (1024, 4096)", lambda: lz.silu(x, backend="torch-cuda"), lambda: F.silu(x))


def attention() -> Iterator[Case]:
    """By cuDNN and by torch's flash; prefill, and a decode step that flash splits into two kernels and scratch."""
    for backend in ("cudnn", "torch-cuda"):
        for q, k, v, is_causal, name in (
            (*qkv(2, 16, 1024, 128), True, "(2, 16, 1024, 128), causal"),
            (*qkv(1, 32, 1, 128, keys=4096), False, "(1, 32, 1, 128), 4,096 keys"),
        ):
            yield Case(
                f"attention {name}",
                lambda q=q, k=k, v=v, c=is_causal, b=backend: lz.attention(q, k, v, is_causal=c, backend=b),
                lambda q=q, k=k, v=v, c=is_causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
                aim=0.35,
            )


def linear() -> Iterator[Case]:
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    yield Case("linear (4, 4096) x (4096, 4096)", lambda: lz.linear(x, weight), lambda: F.linear(x, weight))


ROWS: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": rms_norm,
    "rms_norm_backward": norm_backward("rms_norm"),
    "layer_norm_backward": norm_backward("layer_norm"),
    "silu": silu,
    "attention": attention,
    "linear": linear,
}


# --- measuring


def settle(call: Callable[[], Any], path: str) -> str:
    """Make calls until they take that path; why they do not, after SETTLE_S."""
    lz.configure(backend_isolation={"*": ISOLATIONS[path]})
    end_s = time.monotonic() + SETTLE_S
    while True:
        for _ in range(16):
            call()
        torch.cuda.synchronize()
        if served().path == path:
            return ""
        if time.monotonic() > end_s:
            return "; ".join(note for note in served().notes if "lifted" in note) or f"path {served().path}"
        time.sleep(0.01)


def launch() -> float:
    """us of the host for one kernel by torch's lightest call: a fill of one element."""
    word = torch.zeros(1, device="cuda")
    return statistics.median(pipelined(word.zero_, COUNT)[0] for _ in range(ROUNDS))


def in_graph(call: Callable[[], Any]) -> Callable[[], float]:
    """us of such a call on the GPU, in a captured graph of GRAPH_CALLS."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    graph.replay()
    return lambda: pipelined(graph.replay, 10)[1] / GRAPH_CALLS


def measured(case: Case, rounds: int) -> list[str]:
    """A row of the table."""
    torch.testing.assert_close(case.ours(), case.eager(), rtol=2e-2, atol=2e-2)
    name = f"{case.name}, {kernel()}"
    samples: dict[str, list[Timed]] = {"eager": []}
    why: dict[str, str] = {}
    for _ in range(rounds):
        pipelined(case.eager, COUNT // 4)
        samples["eager"].append(Timed(*pipelined(case.eager, COUNT)))
        for path in ISOLATIONS:
            if why.setdefault(path, ""):
                continue
            why[path] = settle(case.ours, path)
            if not why[path]:
                pipelined(case.ours, COUNT // 4)
                samples.setdefault(path, []).append(Timed(*pipelined(case.ours, COUNT)))
                if served().path != path:
                    why[path] = f"calls went by {served().path} meanwhile"
    graphs = "-"
    if not settle(case.ours, "lifted"):
        ours, torchs = in_graph(case.ours), in_graph(case.eager)
        pairs = [(ours(), torchs()) for _ in range(rounds)]
        us = [statistics.median(pair) for pair in zip(*pairs, strict=True)]
        graphs = f"{us[0]:.1f}, {us[1]:.1f}: {at_most(us[0] / us[1], IN_GRAPH)}"
    found = {path: Timed(*map(statistics.median, zip(*timed, strict=True))) for path, timed in samples.items()}
    cells = [str(found[path]) if path in found else f"- ({why[path]})" for path in ("lifted", "eager", "express")]
    ratio = at_most(found["lifted"].host / found["eager"].host, case.aim) if "lifted" in found else "-"
    return [name, *cells[:2], ratio, cells[2], graphs]


def main() -> None:
    options = parser(__doc__, "one round")
    options.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="these rows alone")
    args = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench needs an NVIDIA GPU")
    with own_broker(), torch.inference_mode():
        rows = [measured(case, 1 if args.quick else ROUNDS) for name in args.only for case in ROWS[name]()]
        floor, told = launch(), versions()
    headings = ["us a call: host (wall)", "lifted", "torch eager", "host's ratio", "by a worker (ring)"]
    headings.append("in a graph: lifted, torch's")
    note = f"torch's lightest call, a fill of one element, takes the host {floor:.1f} us"
    finish("gpu_lifting", "Lifted calls", told, headings, rows, (note,), is_quick=args.quick)


if __name__ == "__main__":
    main()
