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

SOONEST = 16  # that are asked for at once, to be held
PAUSE_S, WITHIN_S = 0.02, 20.0  # between questions after calls that are not ready, and how long they are asked
REST = 1.0  # times as long as one has taken, after it


class Prefetch:
    """Of one connection. `ask` asks the broker, and `hold` has a call launched from now on."""

    def __init__(self, ask: Callable[..., Mapping[str, Any]], hold: Callable[[Asked, LoadedLift, Leave], None]) -> None:
        self._ask, self._hold = ask, hold

    def work(self, ahead: Ahead, load: Callable[[str, bytes], LoadedLift]) -> Callable[[], float | None]:
        """Has the calls that come next lifted, holds those that are, and says in how many seconds to be called again
        for the others; None: never. `load`: by digest, and packed form."""
        left = list(range(ahead.first, ahead.first + WINDOW))
        until_s, is_first = time.monotonic() + WITHIN_S, True

        def work() -> float | None:
            nonlocal left, is_first
            reached = ahead.reached()
            if reached is None or time.monotonic() >= until_s:
                return None
            left = [n for n in left if n > reached]
            try:
                if is_first and left:
                    self._question(ahead, left, forms=False)  # which has all of them lifted
                    is_first = False
                    return 0.0
                pending = self._hold_soonest(ahead, left[:SOONEST], load) if left else []
            except (LayerZeroError, KeyError, TypeError, ValueError):  # then they are lifted when they come
                return None
            left = pending + left[SOONEST:]
            return (PAUSE_S if pending else 0.0) if left else None

        return work

    def _question(self, ahead: Ahead, wanted: list[int], *, forms: bool) -> dict[int, Mapping[str, Any]]:
        numbers, base = range(wanted[0], wanted[-1] + 1), ahead.base
        answer = self._ask(
            "lift_ahead",
            route=base.route.number,
            alignments=base.alignments,
            grows=ahead.grows,
            first=numbers.start,
            count=len(numbers),
            forms=forms,
        )
        return {n: one for n, one in zip(numbers, answer["calls"], strict=False) if n in wanted}

    def _hold_soonest(self, ahead: Ahead, wanted: list[int], load: Callable[[str, bytes], LoadedLift]) -> list[int]:
        """The numbers of those that are not ready yet."""
        answers = self._question(ahead, wanted, forms=True)
        for n, one in answers.items():
            if one["state"] == "ready" and n > (ahead.reached() or 0):
                start_s = time.monotonic()
                asked = ahead.call(n)
                if asked is not None:
                    self._hold(asked, load(str(one["digest"]), one["form"]), Leave.of(one))
                time.sleep(REST * (time.monotonic() - start_s))
        return [n for n, one in answers.items() if one["state"] == "pending"]
