"""The backends numba and openblas beside torch, on the CPU: small and large arrays. Writes results/cpu_kernels.md.

    python bench/cpu_kernels.py [--quick]

Both are called through their workers, in turn, on arrays in shared memory with a place for the result, and so
share what a call costs. The last column: what the engine takes, unpinned, once it has measured all backends.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import backend_versions, finish, own_broker, parser

import layerzero as lz

SIZES = ((8, 1024), (2048, 1024))
LEAD = 3  # rounds that do not count


def arrays(*shape: int) -> Any:
    return lz.share(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))


def calls(rows: int, width: int) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Backends, ops and their arguments."""
    x, y, weight = arrays(rows, width), arrays(rows, width), arrays(width)
    yield "numba", "add", (x, y)
    for op in ("relu", "silu", "gelu", "mish"):
        yield "numba", op, (x,)
    yield "numba", "swiglu", (x, y)
    yield "numba", "geglu", (x, y)
    yield "numba", "softmax", (x, -1)
    yield "numba", "layer_norm", (x, (width,), weight, weight)
    yield "numba", "rms_norm", (x, (width,), weight)
    square = arrays(width, width)
    yield "openblas", "matmul", (x, square)
    yield "openblas", "linear", (x, square, weight)


def rows(rounds: int) -> Iterator[list[str]]:
    for height, width in SIZES:
        for backend, op, given in calls(height, width):
            yield row(rounds, f"{op}, {height:,} x {width:,}", backend, op, given)


def row(rounds: int, name: str, backend: str, op: str, given: tuple[Any, ...], **more: Any) -> list[str]:
    """Of a call whose result has the shape of its first argument."""
    call, out = getattr(lz, op), arrays(*given[0].shape)
    times: dict[str, list[float]] = {backend: [], "torch": []}
    for number in range(rounds + LEAD):
        for one, found in times.items():
            began_ns = time.perf_counter_ns()
            call(*given, out=out, backend=one, **more)
            if number >= LEAD:
                found.append((time.perf_counter_ns() - began_ns) / 1e3)
    lz.tune(op, *given, budget_s=0.5, **more)
    ours_us, torchs_us = map(statistics.median, times.values())
    ratio = statistics.median(map(operator.truediv, times["torch"], times[backend]))
    chosen = lz.explain(op, *given, **more).kernel_id
    assert chosen is not None
    return [name, backend, f"{ours_us:,.0f} us", f"{torchs_us:,.0f} us", f"{ratio:.2f}", chosen]


def main() -> None:
    args = parser(__doc__, "ten rounds").parse_args()
    with own_broker():
        found = list(rows(10 if args.quick else 50))
        versions = backend_versions()
    finish(
        "cpu_kernels",
        "numba and openblas beside torch, on the CPU, in float32",
        versions,
        ["call", "by", "its", "torch's", "torch's / its", "chosen after tuning"],
        found,
        ["Medians; the ratio is the median of those of the rounds. Below 1 torch is faster."],
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
