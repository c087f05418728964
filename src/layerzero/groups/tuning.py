"""What a group's calls take by each backend of the CPU, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerzero.groups import choices
from layerzero.groups.choices import Measured
from layerzero.ipc.errors import InvalidArgument

BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
_TRIES = 5


def measured(
    group: Any, sizes: Sequence[int], ops: Sequence[str], timeout_s: float | None
) -> dict[tuple[str, int], Measured]:
    """By all ranks, of float32; by op and number of bytes. Raises InvalidArgument, EnvError, and as calls do."""
    wrong = [op for op in ops if op not in choices.MEASURED_OPS]
    if wrong:
        raise InvalidArgument(f"ops has {wrong[0]!r:.40}; allowed: {', '.join(choices.MEASURED_OPS)}")
    found: dict[tuple[str, int], Measured] = {}
    for op in ops:
        for nbytes in sizes:
            values = np.zeros((group.size, max(nbytes // 4 // group.size, 1)), np.float32)
            times = [_median_us(group, op, values, timeout_s, name) for name in choices.BACKENDS]
            found[op, nbytes] = Measured(*times)
    return found


def _median_us(group: Any, op: str, values: Any, timeout_s: float | None, backend: str) -> float:
    times = []
    for _ in range(_TRIES + 1):
        start_ns = time.perf_counter_ns()
        getattr(group, op)(values, timeout_s=timeout_s, backend=backend)
        times.append((time.perf_counter_ns() - start_ns) / 1e3)
    return statistics.median(times[1:])
