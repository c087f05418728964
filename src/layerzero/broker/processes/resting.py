"""Workers of functions that nobody has called for long are ended; they start when they are needed again. One that keeps
something for a client, an object for one, stays."""

from __future__ import annotations

import math
from collections.abc import Callable

from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.ipc.vocabulary.ops import FUNCTION


class Resting:
    """For the broker's own thread. `handle` takes what the core must hear; `is_free` tells of a worker, by backend and
    generation, that it is in no call and keeps nothing."""

    def __init__(
        self,
        state: BrokerState,
        handle: Callable[[ev.Event], None],
        is_free: Callable[[str, int], bool],
        rest_s: float,
    ) -> None:
        """`rest_s`: 0 for never."""
        self._state, self._handle, self._is_free = state, handle, is_free
        self._rest_s = rest_s or math.inf
        self._uses: dict[str, tuple[tuple[int, int, int], float]] = {}  # and since when they are the same
        self.due_s = math.inf  # when to look next

    def look(self, now_s: float) -> None:
        """Whatever is due. What lanes have told must have been read."""
        self.due_s = math.inf
        if self._rest_s == math.inf:
            return
        for backend, worker in self._state.workers.items():
            if worker.state is not WorkerState.READY or worker.is_joined or FUNCTION not in self._ops(backend):
                self._uses.pop(backend, None)
                continue
            uses = (worker.generation, worker.answered, worker.failed)
            before, since_s = self._uses.get(backend, (None, now_s))
            if uses != before or not self._is_free(backend, worker.generation):
                since_s = now_s
                self._uses[backend] = (uses, now_s)
            elif now_s - since_s >= self._rest_s:
                self._handle(ev.WorkerSpared(backend))
            self.due_s = min(self.due_s, max(since_s + self._rest_s, now_s + 1))

    def _ops(self, backend: str) -> frozenset[str]:
        return frozenset(self._state.capabilities[backend].ops)
