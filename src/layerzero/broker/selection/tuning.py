"""What background tuning should measure next. Decides only: the engine runs it beside a call and notes the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from layerzero.broker.selection.timings import ENOUGH, PerfTable, Stat

REFRESH_S = 3600.0  # a measurement older than this is worth another run
HOPELESS = 8.0  # times slower than the best: no more runs until it is due for a refresh
A_FEW = 4  # runs before a kernel can be hopeless


@dataclass(frozen=True)
class Usage:
    """A signature in use. `others`: accepted kernels that calls do not go to, so that nothing measures them."""

    signature: bytes
    key: str  # of the perf table
    calls: int
    chosen: str
    others: tuple[str, ...]


@dataclass
class Spending:
    """What background tuning took since `since_s`, by the times that were known when each run was granted."""

    since_s: float
    spent_s: float = 0.0


@dataclass(frozen=True)
class Sample:
    signature: bytes
    kernel_id: str


def next_sample(
    usages: Iterable[Usage], table: PerfTable, now_s: float, *, share: float, spent_s: float, elapsed_s: float
) -> Sample | None:
    """The run that would teach most: little known about the kernel, many calls that could use it. None: nothing is
    worth a run, or none that fits the budget is.

    share: of `elapsed_s` that all runs together may take; `spent_s` is what they took so far. A kernel nobody has run
    is expected to take as long as the chosen one.
    """
    left_us = (share * elapsed_s - spent_s) * 1e6
    if left_us <= 0.0:
        return None
    best, most = None, 0.0
    for usage in usages:
        chosen = table.stat(usage.chosen, usage.key)
        fastest_us = chosen.median_us if chosen else 0.0
        for kernel_id in usage.others:
            stat = table.stat(kernel_id, usage.key)
            worth = usage.calls * _ignorance(stat, fastest_us, now_s)
            if worth > most and (stat.median_us if stat else fastest_us) <= left_us:
                best, most = Sample(usage.signature, kernel_id), worth
    return best


def _ignorance(stat: Stat | None, fastest_us: float, now_s: float) -> float:
    """1 for a kernel that never ran, falling to 0 with the runs it has; a little for one whose figures are old."""
    if stat is None:
        return 1.0
    if now_s - stat.measured_at_s > REFRESH_S:
        return 1.0 / ENOUGH
    if stat.count >= A_FEW and fastest_us and stat.median_us > HOPELESS * fastest_us:
        return 0.0
    return 0.0 if stat.is_stable else max(1.0 - stat.count / ENOUGH, 0.0)
