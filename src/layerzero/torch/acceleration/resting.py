"""Ops that rest: where each call of an op stayed with torch for some calls of the model, its calls are not looked at
for a while, so that to leave them costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable

QUIET = 3  # calls of the model, without one of the op that was ours or timed: then it rests
FIRST, LONGEST = 16, 1024  # calls of the model for which it rests: twice as many each time


class Resting:
    """Of one accelerated model. Threads may share it."""

    def __init__(self, ops: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._quiet = dict.fromkeys(ops, 0)
        self._pause = dict.fromkeys(self._quiet, FIRST)
        self._left: dict[str, int] = {}  # of those that rest: so many calls of the model
        self._busy: set[str] = set()
        self.awake = frozenset(self._quiet)

    @property
    def ops(self) -> tuple[str, ...]:
        """Those that rest now."""
        awake = self.awake
        return tuple(op for op in self._quiet if op not in awake)

    def note(self, op: str) -> None:
        """A call of it is ours, or timed."""
        self._busy.add(op)

    def end(self) -> bool:
        """The model has been called. Whether other ops are `awake` now."""
        with self._lock:
            busy, self._busy = self._busy, set()
            for op in self.awake:
                if op in busy:
                    self._quiet[op], self._pause[op] = 0, FIRST
                    continue
                self._quiet[op] += 1
                if self._quiet[op] >= QUIET:
                    self._left[op] = self._pause[op]
                    self._pause[op] = min(2 * self._pause[op], LONGEST)
                    self._quiet[op] = QUIET - 1  # after its rest one call of the model says enough
            resting = set(self._left)
            for op in resting - self.awake:
                self._left[op] -= 1
                if self._left[op] <= 0:
                    del self._left[op]
            awake = frozenset(self._quiet.keys() - self._left.keys())
            is_other = awake != self.awake
            self.awake = awake
            return is_other
