"""Calls that are lifted and loaded before they are made: those that a growing call leads to."""

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
PAUSE_S, WITHIN_S = 0.05, 20.0  # between questions after calls that are not ready, at least; how long they are asked


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
        until_s = time.monotonic() + WITHIN_S

        def work() -> float | None:
            nonlocal left
            start_s = time.monotonic()
            try:
                left = self._fetch(ahead, left, load)
            except (LayerZeroError, KeyError, TypeError, ValueError):  # then they are lifted when they come
                return None
            now_s = time.monotonic()
            # The broker ranks each call that is asked for: it has twice as long for others.
            return max(PAUSE_S, 2 * (now_s - start_s)) if left and now_s < until_s else None

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
            if one["state"] == "ready":
                found = Prefetched(Leave.of(one), load(str(one["digest"])))
                with self._lock:
                    if len(self._kept) >= MAX_KEPT:
                        self._kept.clear()
                    self._kept[ahead.name(n)] = found
        return [n for n, one in answers.items() if one["state"] == "pending"]
