"""Calls that are lifted, loaded and held before they are made: those that a growing call leads to.

That is a millisecond of Python for each, and the program's own thread waits for the interpreter meanwhile, more than
once a call. So there is a pause after each, and only what comes soonest is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.client.gpu.lifting.growth import WINDOW, Ahead
from layerzero.client.gpu.lifting.loaded import LoadedLift
from layerzero.client.gpu.lifting.sites import Asked, Leave
from layerzero.ipc.errors import LayerZeroError

SOONEST = 16  # that are asked for again while they are not ready
PAUSE_S, WITHIN_S = 0.02, 20.0  # between questions after calls that are not ready, at least; how long they are asked
REST = 2.0  # times as long as one has taken, after it


class Prefetch:
    """Of one connection. `ask` asks the broker, and `hold` has a call launched from now on."""

    def __init__(self, ask: Callable[..., Mapping[str, Any]], hold: Callable[[Asked, LoadedLift, Leave], None]) -> None:
        self._ask, self._hold = ask, hold

    def work(self, ahead: Ahead, load: Callable[[str], LoadedLift]) -> Callable[[], float | None]:
        """Asks for the calls that come next, holds those that are ready, and says in how many seconds to be called
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
                asked = ahead.call(n)
                if asked is not None:
                    self._hold(asked, load(str(one["digest"])), Leave.of(one))
                time.sleep(REST * (time.monotonic() - start_s))
        return [n for n, one in answers.items() if one["state"] == "pending"]
