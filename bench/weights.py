"""What a call costs whose weight lies in an arena, outside of one, where it is copied at each call, or is written
before each. Writes results/weights.md.

    python bench/weights.py [--quick]

`lz.linear` of NumPy arrays by torch's kernel, on the CPU. A weight that is memory shared with other processes is copied
at each call, whatever is kept of others. Floor: the kernel's own time in the worker, of the call that copies nothing.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from common import at_most, backend_versions, finish, own_broker, parser
from dispatch import wait_quiet

import layerzero as lz

SIZES = ((1, 384, 384), (1, 384, 1536), (32, 384, 1536), (1, 1024, 4096))


def outside(values: np.ndarray) -> np.ndarray:
    return values.copy()


def shared_with_others(values: np.ndarray) -> np.ndarray:
    made = np.frombuffer(mmap.mmap(-1, values.nbytes), values.dtype).reshape(values.shape)
    made[...] = values
    return made


def call_of(x: np.ndarray, w: np.ndarray, *, is_written: bool = False) -> Callable[[], float]:
    """Its time in us, without that of writing."""

    def call() -> float:
        if is_written:
            w[:, 0] += 1.0
        start = time.perf_counter_ns()
        lz.linear(x, w, backend="torch")
        return (time.perf_counter_ns() - start) / 1e3

    return call


def rows(rounds: int) -> Iterator[list[str]]:
    for count, inner, outer in SIZES:
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((count, inner), (outer, inner)))
        calls = {
            "arena": call_of(x, lz.share(w)),
            "kept": call_of(x, outside(w)),
            "copied": call_of(x, shared_with_others(w)),
            "written": call_of(x, outside(w), is_written=True),
        }
        for call in calls.values():
            for _ in range(40):
                call()
        wait_quiet()
        found: dict[str, list[float]] = {name: [] for name in calls}
        kernel_us = []
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                found[name].append(statistics.median(call() for _ in range(20)))
                if name == "arena":
                    report = lz.last_report()
                    assert report is not None
                    assert report.kernel_us is not None
                    kernel_us.append(report.kernel_us)
        kept, copied, written = (
            statistics.median(a / b for a, b in zip(found[name], found["arena"], strict=True))
            for name in ("kept", "copied", "written")
        )
        yield [
            f"{count} x {inner} by {outer}: {w.nbytes / 1e6:.1f} MB",
            f"{statistics.median(kernel_us):,.0f} us",
            f"{statistics.median(found['arena']):,.0f} us",
            f"{statistics.median(found['kept']):,.0f} us, {at_most(kept, 1.1)}",
            f"{statistics.median(found['copied']):,.0f} us, {copied:.2f}",
            f"{statistics.median(found['written']):,.0f} us, {written:.2f}",
        ]


def main() -> None:
    args = parser(__doc__, "five rounds").parse_args()
    with own_broker():
        found = list(rows(5 if args.quick else 25))
        versions = backend_versions()
    finish(
        "weights",
        "Weights in arenas and outside of them, on the CPU",
        versions,
        ["linear", "kernel", "in an arena", "outside", "copied at each call", "written before each"],
        found,
        ["Ratios are to the call whose weight lies in an arena."],
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
