"""What a call of torch.ops.layerzero costs beside lz's own and torch's: forward, with gradients, and compiled.

    python bench/frameworks.py

Needs torch in this interpreter (pip install 'layerzero-broker[torch]') and the environment torch (lz env build torch).
All columns of a row are measured in turns in one run; quote the ratios. `added`: what torch's dispatcher and autograd
add to the same call by lz.
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

import layerzero as lz
import layerzero.torch as lzt

ops = torch.ops.layerzero


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
    from layerzero.torch.table import ANY, OpEntry

    entry = OpEntry("bench_stub", "Tensor input", fake, formula, {"input": ANY})
    call: Callable[..., torch.Tensor] = lambda input, **_: torch.empty_like(input)  # noqa: E731
    registration.register(entry, call)
    return ops.bench_stub.default, call


def main() -> None:
    args = parser(__doc__, "a tenth of the rounds").parse_args()
    load = os.getloadavg()[0]
    rounds, repeat = (6, 10) if args.quick else (60, 20)
    torch.set_num_threads(1)
    x = torch.randn(4, 512)
    leaf = torch.randn(4, 512, requires_grad=True)
    wide, weight = torch.randn(64, 512), torch.randn(512, 512)
    rows: list[tuple[str, ...]] = []

    def row(name: str, native: Callable[[], Any], plain: Callable[[], Any], ours: Callable[[], Any]) -> None:
        base, by_lz, by_op = in_turns((native, plain, ours), rounds, repeat)
        cells = (f"{base:.1f} us", f"{by_lz:.1f} us", f"{by_op:.1f} us", f"{by_op - by_lz:+.1f} us")
        rows.append((name, *cells, f"{by_op / by_lz:.2f}", f"{by_op / base:.1f}"))

    op, call = stub()
    with torch.no_grad():
        row("an op that does nothing, no gradients", lambda: torch.relu(x), lambda: call(x), lambda: op(x))
    row(
        "an op that does nothing, its input needs gradients",
        lambda: torch.relu(leaf),
        lambda: call(x),
        lambda: op(leaf),
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
        ("call", "torch", "lz", "torch.ops.layerzero", "added", "over lz", "over torch"),
        rows,
        (
            "The first two rows have no worker: `lz` makes the result and returns. In the last it has no backward.",
            f"Load average of the machine at the start: {load:.1f}; of a busy one the ratios alone say something.",
        ),
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
