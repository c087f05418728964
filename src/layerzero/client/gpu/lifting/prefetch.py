"""Calls that are lifted and loaded before they are made: those that a growing call leads to.

Loading one is a millisecond of Python, and the program's own thread waits for the interpreter meanwhile, more than once
a call. So there is a pause after each, and only what comes soonest is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from layerzero.client.gpu.lifting.growth import WINDOW, Ahead, name_of
from layerzero.client.gpu.lifting.loaded import LoadedLift
from layerzero.client.gpu.lifting.sites import Asked, Leave
from layerzero.ipc.errors import LayerZeroError

MAX_KEPT = 1024
SOONEST = 16  # that are asked for again while they are not ready
PAUSE_S, WITHIN_S = 0.02, 20.0  # between questions after calls that are not ready, at least; how long they are asked
REST = 2.0  # times as long as a load has taken, after it


class Prefetched(NamedTuple):
    """A call that waits to be made."""

    leave: Leave
    loaded: LoadedLift


class Prefetch:
    """Of one connection. Threads may share it. `ask` asks the broker."""

    def __init__(self, ask: Callable[..., Mapping[str, Any]]) -> None:
        self._ask = ask
        self._kept: dict[Hashable, Prefetched] = {}
        self._lock = threading.Lock()

    def take(self, asked: Asked) -> Prefetched | None:
        """What was loaded for a call that is made now for the first time."""
        if not self._kept:
            return None
        with self._lock:
            return self._kept.pop(name_of(asked), None)

    def work(self, ahead: Ahead, load: Callable[[str], LoadedLift]) -> Callable[[], float | None]:
        """Asks for the calls that come next, loads those that are ready, and says in how many seconds to be called
        again for the others; None: never."""
        left = list(range(ahead.first, ahead.first + WINDOW))
        until_s, at_once = time.monotonic() + WITHIN_S, WINDOW  # all are asked for once, which has them lifted

        def work() -> float | None:
            nonlocal left, at_once
            start_s, reached = time.monotonic(), ahead.reached()
            if reached is None:
                return None
            left = [n for n in left if n > reached]
            try:
                left = self._fetch(ahead, left[:at_once], load) + left[at_once:] if left else []
            except (LayerZeroError, KeyError, TypeError, ValueError):  # then they are lifted when they come
                return None
            now_s, at_once = time.monotonic(), SOONEST
            return max(PAUSE_S, now_s - start_s) if left and now_s < until_s else None

        return work

    def _fetch(self, ahead: Ahead, wanted: list[int], load: Callable[[str], LoadedLift]) -> list[int]:
        """The numbers of those that are not ready yet."""
        numbers = range(wanted[0], wanted[-1] + 1)
        answer = self._ask(
            "lift_ahead",
            route=ahead.base.route.number,
            alignments=ahead.base.alignments,
            grows=ahead.grows,
            first=numbers.start,
            count=len(numbers),
        )
        answers = {n: one for n, one in zip(numbers, answer["calls"], strict=False) if n in wanted}
        for n, one in answers.items():
            if one["state"] == "ready" and n > (ahead.reached() or 0):
                start_s = time.monotonic()
                found = Prefetched(Leave.of(one), load(str(one["digest"])))
                with self._lock:
                    if len(self._kept) >= MAX_KEPT:
                        self._kept.clear()
                    self._kept[ahead.name(n)] = found
                time.sleep(REST * (time.monotonic() - start_s))
        return [n for n, one in answers.items() if one["state"] == "pending"]
