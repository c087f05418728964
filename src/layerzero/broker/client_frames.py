"""What clients' frames say, against what the broker knows of their lanes, as events for the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import frame_codec
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.queries.incremental import IncrementalAnswers
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.vocabulary.worker_codes import mark


class ClientFrames:
    """`answers` takes what is asked besides calls. `executing`: what control pages say, by backend and generation."""

    def __init__(
        self,
        state: BrokerState,
        lanes: LanePages,
        answers: IncrementalAnswers,
        executing: Callable[[], Mapping[tuple[str, int], int]],
    ) -> None:
        self._state = state
        self._lanes = lanes
        self._answers = answers
        self._executing = executing

    def event_of(self, identity: bytes, frame: bytes) -> ev.Event | None:
        """The event that a client's frame is; None when it is no matter of the core. Raises ProtocolError."""
        event = frame_codec.of_client(identity, frame)
        if isinstance(event, frame_codec.Asked):
            self._answers.take(identity, event)
            return None
        if isinstance(event, ev.LaneOverdue):
            try:
                if self._lanes.has_ended(event.lane, event.call):
                    return None  # just now
            except ProtocolError as exc:
                return replace(event, is_running=False, nonsense=str(exc))
            return replace(event, is_running=self._is_running(event))
        return event

    def _is_running(self, overdue: ev.LaneOverdue) -> bool:
        """The worker is in this very call, as its control page says."""
        lane = self._state.leases.lanes.get(overdue.lane)
        if lane is None:
            return False
        return self._executing().get((lane.worker.backend, lane.generation)) == mark(overdue.lane, overdue.call)
