"""Which backend the calls of a plan prefer, all together: found by timing whole runs.

A kernel that is the fastest by itself may not be in its place: crossing to another worker takes time, and libraries
that keep their threads spinning take cores from each other. So each call's own best, and each backend that serves some
of the calls, preferred for all of them, are tried in turn, in runs that their caller wanted anyway; the fastest stays.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from layerzero.client.connection.overlay import Overlay
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.passes import Program

RUNS, UNTIMED = 7, 2  # of each candidate, after as many with all leases there that are not timed
MAX_WAITED = 64  # runs until all leases are there; a candidate that takes longer is none
LEAST_GAIN = 0.97  # of the time of each call's own best, for another candidate to be chosen
BONUS = 5_000.0  # above measured times and dispatch tables, below what lz.prefer asks for


@dataclass(eq=False)
class Candidate:
    """`backend` is "" for each call's own best. `us`: the median of its runs, 0 for one that was not timed."""

    backend: str
    us: float = 0.0
    times: list[int] = field(default_factory=list)

    @functools.cached_property
    def wish(self) -> Overlay | None:
        """What it asks of selection."""
        return _wish(self.backend) if self.backend else None


class Choices:
    """Of one variant of a plan. `chosen` is what is tried, and in the end what stays."""

    def __init__(self, program: Program) -> None:
        served = {step.kernel.partition(".")[0] for step in program.steps if step.number in program.chained}
        others = [Candidate(name) for name in sorted(served - {""})] if len(served - {""}) > 1 else []
        self.candidates: Sequence[Candidate] = (Candidate(""), *others)
        self._left = list(self.candidates) if others else []
        self._waited = 0
        self.chosen = self.candidates[0]

    def settle(self, candidates: Sequence[Candidate], chosen: str) -> None:
        """It was timed before: these were tried, and this one of them was chosen."""
        self.candidates, self._left = candidates, []
        self.chosen = next(one for one in candidates if one.backend == chosen)

    @property
    def is_done(self) -> bool:
        return not self._left

    def note(self, plan: FrozenPlan, elapsed_ns: int) -> None:
        """A run of the chosen one's plan took so long."""
        if self.is_done:
            return
        if not plan.is_linked:
            self._waited += 1
            if self._waited > MAX_WAITED:
                self._next()
            return
        self.chosen.times.append(elapsed_ns)
        if len(self.chosen.times) == UNTIMED + RUNS:
            self.chosen.us = statistics.median(self.chosen.times[UNTIMED:]) / 1e3
            self._next()

    def _next(self) -> None:
        self._waited = 0
        del self._left[0]
        self.chosen = self._left[0] if self._left else self._best()

    def _best(self) -> Candidate:
        own = self.candidates[0]
        timed = [one for one in self.candidates if one.us]
        best = min(timed, key=lambda one: one.us, default=own)
        return best if not own.us or best.us < LEAST_GAIN * own.us else own

    def __str__(self) -> str:
        """Empty where there was nothing to choose."""
        if len(self.candidates) == 1:
            return ""
        shown = [f"{one.backend or 'each call its own best'} {one.us:,.0f} us" for one in self.candidates if one.us]
        state = f"{self.chosen.backend or 'each call its own best'} for all" if self.is_done else "being timed"
        return f"backend: {state} ({', '.join(shown)})" if shown else f"backend: {state}"


@functools.lru_cache(maxsize=256)
def _wish(backend: str) -> Overlay:
    return Overlay.of({"origin": "lz.plan", "values": {"rules": [{"prefer": [backend], "bonus": BONUS}]}})
