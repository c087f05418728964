"""What a call of torch.ops.layerzero costs beside lz's own and torch's: forward, with gradients, and compiled.

    python bench/frameworks.py

Needs torch in this interpreter (pip install 'layerzero-broker[torch]') and the environment torch (lz env build torch).
All columns of a row are measured in turns in one run; quote the ratios. `added`: what torch's dispatcher and autograd
add to the same call by lz. `floor`: what they add at least to an op whose kernels are in Python: to one of
Library.define with one kernel, and where gradients are needed with a torch.autograd.Function that keeps its input; with
`out` to one that says in its schema that it writes there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import finish, own_broker, parser
from torch.library import Library

import layerzero as lz
import layerzero.torch as lzt

ops = torch.ops.layerzero
NOTHING = "an op that does nothing, no gradients"


def in_turns(calls: Sequence[Callable[[], Any]], rounds: int, repeat: int) -> list[float]:
    """Microseconds a call of each, the median of rounds."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(20):  # a route, a lane, a compilation
            call()
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            found.append((time.perf_counter_ns() - start) / repeat / 1e3)
    return [statistics.median(found) for found in times]


def stub() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """An op that is registered as ours are, whose call does nothing but make its result; and that call."""
    from layerzero.torch import registration
    from layerzero.torch.fakes import silu as fake
    from layerzero.torch.gradients import silu as formula
    from layerzero.torch.op_entry import ANY, OpEntry

    entry = OpEntry("bench_stub", "Tensor input", fake, formula, {"input": ANY})
    call: Callable[..., torch.Tensor] = lambda input, **_: torch.empty_like(input)  # noqa: E731
    registration.register(entry, call)
    return ops.bench_stub.default, call


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * ctx.saved_tensors[0]


def empty_ops(library: Library) -> tuple[Any, Any, Any]:
    """Ops that do as little as an op can with kernels in Python: one without gradients, one with them, and one that
    writes into an argument."""
    library.define("empty(Tensor input) -> Tensor")
    library.impl("empty", torch.empty_like, "CompositeExplicitAutograd")
    library.define("kept(Tensor input) -> Tensor")
    library.impl("kept", torch.empty_like, "CompositeExplicitAutograd")
    library.impl("kept", Keeping.apply, "Autograd")
    library.define("written(Tensor input, *, Tensor(a!) out) -> ()")
    library.impl("written", _written, "CompositeExplicitAutograd")
    found = torch.ops.layerzero_bench
    return found.empty.default, found.kept.default, found.written.default


def _written(input: torch.Tensor, *, out: torch.Tensor) -> None:
    torch.empty_like(input)


def main() -> None:
    args = parser(__doc__, "a tenth of the rounds").parse_args()
    load = os.getloadavg()[0]
    rounds, repeat = (20, 10) if args.quick else (200, 10)
    torch.set_num_threads(1)
    x = torch.randn(4, 512)
    leaf = torch.randn(4, 512, requires_grad=True)
    wide, weight = torch.randn(64, 512), torch.randn(512, 512)
    rows: list[tuple[str, ...]] = []

    def row(
        name: str,
        native: Callable[[], Any],
        plain: Callable[[], Any],
        ours: Callable[[], Any],
        least: Callable[[], Any] | None = None,
    ) -> None:
        calls = (native, plain, ours) if least is None else (native, plain, ours, least)
        base, by_lz, by_op, *floor = in_turns(calls, rounds, repeat)
        cells = (f"{base:.1f} us", f"{by_lz:.1f} us", f"{by_op:.1f} us", f"{by_op - by_lz:+.1f} us")
        floors = f"{floor[0] - by_lz:+.1f} us" if floor else ""
        rows.append((name, *cells, floors, f"{by_op / by_lz:.2f}", f"{by_op / base:.1f}"))

    op, call = stub()
    library = Library("layerzero_bench", "DEF")
    empty, kept, written = empty_ops(library)
    buffer = torch.empty(4, 512)
    with torch.no_grad():
        row(NOTHING, lambda: torch.relu(x), lambda: call(x), lambda: op(x), lambda: empty(x))
        row(
            "the same, out=",
            lambda: torch.relu(x),
            lambda: call(x),
            lambda: ops.bench_stub.out(x, out=buffer),
            lambda: written(x, out=buffer),
        )
    with torch.inference_mode():
        y = torch.randn(4, 512)
        row(
            "the same, inference mode and its tensors",
            lambda: torch.relu(y),
            lambda: call(y),
            lambda: op(y),
            lambda: empty(y),
        )
    row(
        "the same, its input needs gradients",
        lambda: torch.relu(leaf),
        lambda: call(x),
        lambda: op(leaf),
        lambda: kept(leaf),
    )
    with own_broker():
        with torch.no_grad():
            row("silu 4 x 512", lambda: F.silu(x), lambda: lz.silu(x), lambda: ops.silu(x))
            compiled = torch.compile(lzt.silu, fullgraph=True)
            row("silu 4 x 512, compiled", lambda: F.silu(x), lambda: lz.silu(x), lambda: compiled(x))
            row(
                "linear 64 x 512 by 512 x 512",
                lambda: F.linear(wide, weight),
                lambda: lz.linear(wide, weight),
                lambda: ops.linear(wide, weight),
            )
        row(
            "silu 4 x 512, forward and backward",
            lambda: F.silu(leaf).backward(x),
            lambda: lz.silu(x),
            lambda: ops.silu(leaf).backward(x),
        )
    finish(
        "frameworks",
        "Ops of torch: what a call costs",
        {"here": {"torch": torch.__version__}},
        ("call", "torch", "lz", "torch.ops.layerzero", "added", "floor", "over lz", "over torch"),
        rows,
        (
            "The first four rows have no worker: `lz` makes the result and returns. In the last it has no backward.",
            f"Load average of the machine at the start: {load:.1f}; of a busy one the ratios alone say something.",
        ),
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
