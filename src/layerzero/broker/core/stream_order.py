"""Turns: which calls on a GPU the broker has in each timeline of each client's timeline page.

Decides nothing about kernels. A timeline is one stream of a client (docs/protocol.md, section 13). The broker does not
know of calls that are on rings (section 14), and may hear of one after later ones of its timeline. But the client's
stream writes READY of a turn only when all before it have ended: so that is when a point that was refused may be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core.model import Call, Client
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.timeline_words import TIMELINES, TimelinePoint, is_before

MAX_OPEN = 4096  # in one timeline; ours keeps to 256 that the GPU is not done with

Key = tuple[int, str, TimelinePoint]  # client's number, GPU, place


@dataclass(eq=False)
class OpenPoint:
    """A place in a timeline that nobody has ended yet."""

    client: Client
    gpu: str
    point: TimelinePoint
    call: Call | None = None  # none for one that was refused as it came
    began_s: float = math.inf  # when the GPU was seen to be able to run it: its READY was there
    refusal: act.Refuse | None = None  # held back

    @property
    def has_begun(self) -> bool:
        return self.began_s < math.inf

    @property
    def due_s(self) -> float:
        return self.began_s + self.call.timeout_s if self.call is not None else math.inf

    @property
    def key(self) -> Key:
        return self.client.number, self.gpu, self.point


class StreamOrder:
    def __init__(self) -> None:
        self._timelines: dict[
            tuple[int, str, int], list[OpenPoint]
        ] = {}  # client's number, GPU, timeline; in their order
        self._held: dict[Key, OpenPoint] = {}

    @property
    def held(self) -> tuple[Key, ...]:
        """Those that were refused, and that their clients' streams have not come to."""
        return tuple(self._held)

    @property
    def pages(self) -> set[tuple[int, str]]:
        """Clients, by their numbers, and GPUs, of whose timeline pages timelines are known."""
        return {(number, gpu) for number, gpu, _ in self._timelines}

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to see a word of a page: a client for its error, or the next call of a
        client that has left."""
        return bool(self._held) or any(point.client.has_left for point in self.first())

    def begin(self, client: Client, gpu: str, point: TimelinePoint) -> OpenPoint:
        """Raises ProtocolError for a place that is not there or is taken."""
        if not 0 <= point.timeline < TIMELINES:
            raise ProtocolError(
                f"point {point.value} of timeline {point.timeline}; allowed: timelines below {TIMELINES}"
            )
        timeline = self._timelines.setdefault((client.number, gpu, point.timeline), [])
        at = len(timeline)
        while at and is_before(point.value, timeline[at - 1].point.value):
            at -= 1
        if at and timeline[at - 1].point.value == point.value:
            raise ProtocolError(f"point {point.value} of timeline {point.timeline} is open already")
        if len(timeline) >= MAX_OPEN:
            raise ProtocolError(f"more than {MAX_OPEN} open points in timeline {point.timeline}")
        opened = OpenPoint(client, gpu, point)
        timeline.insert(at, opened)
        return opened

    def fail(self, point: OpenPoint, refusal: act.Refuse) -> None:
        """A point ends in an error, which is told when its client's stream has come to it."""
        point.refusal = refusal
        self._held[point.key] = point

    def reach(self, keys: Iterable[Key]) -> list[OpenPoint]:
        """Streams have come to these. Returns those of them that were refused: they are over."""
        reached = [point for key in keys if (point := self._held.get(key)) is not None]
        for point in reached:
            self.end(point)
        return reached

    def end(self, point: OpenPoint) -> None:
        """A point is done, or was told of, or nobody waits for it. More than once does no harm."""
        timeline = self._timelines.get((point.client.number, point.gpu, point.point.timeline), [])
        if point in timeline:
            timeline.remove(point)
        if self._held.get(point.key) is point:
            del self._held[point.key]

    def drop_held(self, client: Client | None = None) -> list[OpenPoint]:
        """A client has left, or without any all workers have ended: no stream will come to what was refused. Returns
        those, in their order."""
        held = [point for timeline in self._timelines.values() for point in timeline if point.refusal is not None]
        dropped = [point for point in held if client is None or point.client is client]
        for point in dropped:
            self.end(point)
        return dropped

    def first(self) -> Iterator[OpenPoint]:
        """The oldest open point of each timeline that the broker knows of."""
        for timeline in self._timelines.values():
            if timeline:
                yield timeline[0]

    def of(self, client: Client, gpu: str | None = None) -> list[OpenPoint]:
        """All open ones of a client, on one GPU or on all."""
        return [
            point
            for (number, uuid, _), timeline in self._timelines.items()
            if number == client.number and gpu in (None, uuid)
            for point in timeline
        ]

    def forget(self, client: Client, gpu: str) -> None:
        """The page is closed, or another takes its place."""
        for key in [key for key in self._timelines if key[:2] == (client.number, gpu)]:
            for point in self._timelines.pop(key):
                self._held.pop(point.key, None)
