"""What schedules have led to, and what they may lead to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from layerzero.broker.core.worker_fsm import Signal, WorkerState


class Violation(AssertionError):
    """The core broke a promise. The message begins with the seed that shows it again."""


@dataclass
class Coverage:
    """What schedules have led to."""

    transitions: Counter[tuple[WorkerState, Signal]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)  # of errors that clients got
    reasons: Counter[str] = field(default_factory=Counter)  # of rejected candidates
    events: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)

    def update(self, other: Coverage) -> None:
        for name, counter in vars(self).items():
            counter.update(getattr(other, name))


# Of a call at a worker.
CRASHES = "crashes"  # why a backend is disabled that must be tried again
FATES = (
    "runs",
    "raises",
    "refuses",
    "too_small",
    "dies_before",
    "dies_running",
    "dies_written",
    "dies_sent",
    "hangs",
    "is_slow",
    "lies_dispatch",
    "lies_attempt",
    "answers_twice",
    "sends_garbage",
    "hangs_up",
)
# How calls of express lanes end, and what becomes of the lanes.
LANE_FATES = {
    "blamed",
    "broken",
    "called",
    "declined",
    "ended_unopened",
    "head_waited",
    "left",
    "lost",
    "opened_late",
    "overdue",
    "poison",
    "raised",
    "ran",
    "withdrawn",
}
# What becomes of calls on rings.
RING_FATES = {
    "again",
    "after_end",
    "blamed",
    "called",
    "late",
    "left",
    "raised",
    "ran",
    "stranded",
    "survived_client",
}
# What becomes of calls in graphs.
GRAPH_SLOT_FATES = {"bound", "bound_again", "failed", "late", "muted", "replayed", "taken_over", "unbound", "unsafe"}
# What a GPU makes of a call, and what else becomes of points.
GPU_FATES = ("gpu_runs", "gpu_is_slow", "gpu_hangs", "gpu_dies")
POINT_FATES = {
    "point_failed",
    "point_held",
    "point_released",
    "point_rerun",
    "point_late",
    "point_renewed",
    "deaf",
    "offered_again",
}
RETRY_FATES = {"tried_again", "went_back"}
COMPILE_FATES = {"compiled", "compile_failed", "compile_awaited"}
LANE_ENDS = {"sends_garbage": "broken", "lies_dispatch": "broken", "lies_attempt": ""}  # the last one never says
LANE_ENDS |= dict.fromkeys(("raises", "refuses", "too_small"), "raised")
WRITES = {"runs", "dies_written", "dies_sent", "is_slow", "lies_dispatch", "lies_attempt", "answers_twice"}
