"""Turns: which calls on a GPU are open in each lane of each client's order page, and in which order they may end.

Decides nothing about kernels. A lane is one stream of a client (docs/protocol.md, section 13). Its turns end in their
order: so one that is refused early is held back here until those before it have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from layerzero.broker import events as ev
from layerzero.broker.records import Call, Client, Worker
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.order import LANES, MASK, Turn

MAX_OPEN = 4096  # in one lane; ours keeps to 256 that the GPU is not done with
STICKY_EXIT = 70  # of a worker whose GPU context is lost: what its GPU was in is to blame


@dataclass(eq=False)
class OpenTurn:
    """A place in a lane that nobody has ended yet."""

    client: Client
    gpu: str
    turn: Turn
    call: Call | None = None  # none for one that was refused as it came
    worker: Worker | None = None  # that has enqueued it
    began_s: float = math.inf  # when the GPU was seen to be able to run it: inputs ready, first in its lane
    refusal: ev.Refuse | None = None  # held back

    @property
    def due_s(self) -> float:
        return self.began_s + self.call.timeout_s if self.call is not None else math.inf


@dataclass(eq=False)
class _Lane:
    last: int  # number of the newest turn
    turns: deque[OpenTurn] = field(default_factory=deque)


class Turns:
    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str, int], _Lane] = {}  # client's number, GPU, lane
        self._held: set[OpenTurn] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to see a call's end: a client for the word that a later one failed, or
        the next call of a client that has left."""
        return bool(self._held) or any(turn.client.has_left for turn in self.first())

    def begin(self, client: Client, gpu: str, turn: Turn) -> OpenTurn:
        """Raises ProtocolError for a turn that does not come after those of its lane."""
        key = (client.number, gpu, turn.lane)
        lane = self._lanes.get(key)
        if lane is None:
            if not 0 <= turn.lane < LANES:
                raise ProtocolError(f"turn {turn.number} of lane {turn.lane}; allowed: lanes below {LANES}")
            lane = self._lanes[key] = _Lane(turn.number - 1 & MASK)
        if not 0 < turn.number - lane.last & MASK < 1 << 31:
            raise ProtocolError(f"turn {turn.number} of lane {turn.lane} comes after {lane.last}; numbers must grow")
        if len(lane.turns) >= MAX_OPEN:
            raise ProtocolError(f"more than {MAX_OPEN} open turns in lane {turn.lane}")
        lane.last = turn.number
        opened = OpenTurn(client, gpu, turn)
        lane.turns.append(opened)
        return opened

    def fail(self, turn: OpenTurn, refusal: ev.Refuse) -> list[OpenTurn]:
        """A turn ends in an error. Returns those that have ended in one and may be told now, in their order."""
        turn.refusal = refusal
        self._held.add(turn)
        return self._told(self._lane_of(turn))

    def end(self, turn: OpenTurn) -> list[OpenTurn]:
        """A turn is done, or nobody waits for it. Returns as `fail` does."""
        lane = self._lane_of(turn)
        if turn not in lane.turns:
            return []  # it was told
        lane.turns.remove(turn)
        self._held.discard(turn)
        return self._told(lane)

    def drop_held(self, client: Client) -> list[OpenTurn]:
        """A client has left: nobody waits to be told of what failed."""
        dropped = [turn for turn in self._held if turn.client is client]
        for turn in dropped:
            self._lane_of(turn).turns.remove(turn)
        self._held.difference_update(dropped)
        return dropped

    def first(self) -> Iterator[OpenTurn]:
        """The oldest open turn of each lane: the only one that a GPU can be in."""
        for lane in self._lanes.values():
            if lane.turns:
                yield lane.turns[0]

    def is_first(self, turn: OpenTurn) -> bool:
        lane = self._lane_of(turn)
        return bool(lane.turns) and lane.turns[0] is turn

    def of(self, client: Client, gpu: str | None = None) -> list[OpenTurn]:
        """All open ones of a client, on one GPU or on all."""
        return [
            turn
            for (number, uuid, _), lane in self._lanes.items()
            if number == client.number and gpu in (None, uuid)
            for turn in lane.turns
        ]

    def forget(self, client: Client, gpu: str) -> None:
        """The page is closed, or another takes its place: numbers begin anew."""
        for key in [key for key in self._lanes if key[:2] == (client.number, gpu)]:
            del self._lanes[key]

    def _lane_of(self, turn: OpenTurn) -> _Lane:
        return self._lanes[turn.client.number, turn.gpu, turn.turn.lane]

    def _told(self, lane: _Lane) -> list[OpenTurn]:
        told = []
        while lane.turns and lane.turns[0].refusal is not None:
            told.append(lane.turns.popleft())
        self._held.difference_update(told)
        return told
