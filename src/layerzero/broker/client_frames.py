"""What clients' frames say, against what the broker knows of their lanes, as events for the core."""

from __future__ import annotations

from dataclasses import replace

from layerzero.broker.core import events as ev
from layerzero.broker.io import frame_codec
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.queries.incremental import IncrementalAnswers
from layerzero.ipc.errors import ProtocolError


class ClientFrames:
    """`answers` takes what is asked besides calls."""

    def __init__(self, lanes: LanePages, answers: IncrementalAnswers) -> None:
        self._lanes = lanes
        self._answers = answers

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
                return replace(event, nonsense=str(exc))
        return event
