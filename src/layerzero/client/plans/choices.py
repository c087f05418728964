"""Which backend the calls of a plan prefer, all together: found by timing whole runs.

A kernel that is the fastest by itself may not be in its place: crossing to another worker takes time, and libraries
that keep their threads spinning take cores from each other. So each call's own best, and each backend that serves some
of the calls, preferred for all of them, are tried in turn, in runs that their caller wanted anyway; the fastest stays.
With that backend the plan is then tried without the fusions that were made: one that does not pay is undone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from layerzero.client.connection.overlay import Overlay
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.passes import Program

RUNS, UNTIMED = 7, 2  # of each candidate, after as many with all leases there that are not timed
MAX_WAITED = 64  # runs until all leases are there; a candidate that takes longer is none
LEAST_GAIN = 0.97  # of the first candidate's time, for another one to be chosen
BONUS = 5_000.0  # above measured times and dispatch tables, below what lz.prefer asks for


@dataclass(eq=False)
class Candidate:
    """`backend` is "" for each call's own best. `us`: the second fastest of its runs, 0 for one that was not timed;
    what other processes do in between makes runs slower, of some candidates alone. `program`:
    which one runs, of those that the plan has."""

    backend: str
    us: float = 0.0
    times: list[int] = field(default_factory=list)
    program: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.backend, self.program

    @functools.cached_property
    def wish(self) -> Overlay | None:
        """What it asks of selection."""
        return _wish(self.backend) if self.backend else None


class Choices:
    """Of one variant of a plan. `chosen` is what is tried, and in the end what stays."""

    def __init__(self, programs: Sequence[Program]) -> None:
        """`programs`: the one with all fusions, and those that lack some (preparing.py)."""
        program = programs[0]
        self._without = [one.without for one in programs]
        served = {step.kernel.partition(".")[0] for step in program.steps if step.number in program.chained}
        others = [Candidate(name) for name in sorted(served - {""})] if len(served - {""}) > 1 else []
        self.candidates: Sequence[Candidate] = (Candidate(""), *others)
        self._left = list(self.candidates) if others else []
        self._waited = 0
        self.chosen = self.candidates[0]
        self.fused: Sequence[Candidate] = ()  # of the chosen backend: with all fusions, and without some
        if not others:
            self._try_fusions()

    def settle(self, candidates: Sequence[Candidate], chosen: str) -> None:
        """It was timed before: these were tried, and this one of them was chosen."""
        self.candidates = candidates
        self.chosen = next(one for one in candidates if one.backend == chosen)
        self.fused = ()
        self._try_fusions()

    @property
    def is_done(self) -> bool:
        return not self._left

    @property
    def has_backend(self) -> bool:
        """Whether it is known which backend is preferred; fusions may still be tried."""
        return self.is_done or bool(self.fused)

    @property
    def backend(self) -> str:
        """The one that is preferred, as long as it is tried or in the end."""
        return self.chosen.backend

    def _try_fusions(self) -> None:
        """Once it is known which backend is preferred. Its times of before may be another process's."""
        numbers = range(len(self._without)) if len(self._without) > 1 else ()
        self.fused = [Candidate(self.chosen.backend, program=number) for number in numbers]
        self._left = list(self.fused)
        self._waited = 0
        if self.fused:
            self.chosen = self.fused[0]

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
            self.chosen.us = sorted(self.chosen.times[UNTIMED:])[1] / 1e3
            self._next()

    def _next(self) -> None:
        self._waited = 0
        del self._left[0]
        if self._left:
            self.chosen = self._left[0]
        elif self.fused:
            self.chosen = _best(self.fused)
        else:
            self.chosen = _best(self.candidates)
            self._try_fusions()

    def __str__(self) -> str:
        """Empty where there was nothing to choose."""
        lines = []
        if len(self.candidates) > 1:
            lines.append(self._told("backend", self._name(self.backend), self.candidates, self.has_backend))
        if self.fused:
            what = self._kept(self.chosen)
            lines.append(self._told("fusions", what, self.fused, self.is_done))
        return "\n  ".join(lines)

    def _told(self, what: str, chosen: str, candidates: Sequence[Candidate], is_done: bool) -> str:
        names = [self._name(one.backend) if what == "backend" else self._kept(one) for one in candidates]
        shown = [f"{name} {one.us:,.0f} us" for name, one in zip(names, candidates, strict=True) if one.us]
        state = f"{chosen} for all" if what == "backend" else chosen
        state = state if is_done else "being timed"
        return f"{what}: {state} ({', '.join(shown)})" if shown else f"{what}: {state}"

    @staticmethod
    def _name(backend: str) -> str:
        return backend or "each call its own best"

    def _kept(self, one: Candidate) -> str:
        without = self._without[one.program]
        return f"without {' and '.join(without)}" if without else "all"


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; the first one unless another gains something. The first one where none was timed."""
    first = candidates[0]
    best = min((one for one in candidates if one.us), key=lambda one: one.us, default=first)
    return best if not first.us or best.us < LEAST_GAIN * first.us else first


@functools.lru_cache(maxsize=256)
def _wish(backend: str) -> Overlay:
    return Overlay.of({"origin": "lz.plan", "values": {"rules": [{"prefer": [backend], "bonus": BONUS}]}})
