"""Workers that nobody has called for long, as clients launch their calls themselves, give their GPU's memory back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState


class Spared:
    """For the broker's own thread. `handle` takes what the core must hear."""

    def __init__(self, state: BrokerState, handle: Callable[[ev.Event], None], rest_s: float) -> None:
        self._state, self._handle, self._rest_s = state, handle, rest_s
        self._uses: dict[str, tuple[tuple[int, int, int], float]] = {}  # and since when they are the same

    def look(self, backends: Iterable[str], now_s: float) -> None:
        """To be called once a second or so, with those whose calls are lifted or run by their callers."""
        for backend in backends:
            worker = self._state.workers[backend]
            uses = (worker.generation, worker.answered, worker.failed)
            before, since_s = self._uses.get(backend, (None, now_s))
            if uses != before:
                self._uses[backend] = (uses, now_s)
            elif now_s - since_s >= self._rest_s and worker.state is WorkerState.READY:
                self._handle(ev.WorkerSpared(backend))
