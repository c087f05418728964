"""What a worker has of one client on one GPU: its timeline page, and streams of ours for each timeline of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import Key
from layerzero.ipc.cuda.streams import WorkerOrder
from layerzero.ipc.shm.timeline_words import MASK, READY, TimelinePoint, index

_HALF = 1 << 31


@dataclass(eq=False)
class Queue:
    """A stream of ours, and the last call of a timeline that was enqueued in it."""

    stream: int
    last: int


@dataclass(eq=False)
class Link:
    """Calls that another worker could not finish come out of order: behind a later call of its timeline, which the
    client's stream lets begin only after it, such a call would wait for ever. In each stream the numbers of a timeline
    grow."""

    client: int
    context: Context
    order: WorkerOrder
    offer: Key
    timelines: dict[int, list[Queue]] = field(default_factory=dict)
    graph_slot_stream: int = 0  # once there are graph slots

    @property
    def streams(self) -> list[int]:
        streams = [queue.stream for queues in self.timelines.values() for queue in queues]
        return [*streams, self.graph_slot_stream] if self.graph_slot_stream else streams

    def stream(self, point: TimelinePoint, new: Callable[[Context], int]) -> int:
        """The stream for a call; `new` makes one, or finds a free one. Raises ProtocolError for a point that is
        none."""
        queues = self.timelines.get(point.timeline)
        if queues is None:
            index(point, READY)  # which raises
            queues = self.timelines[point.timeline] = []
        number = point.value
        for queue in queues:
            if number - queue.last & MASK < _HALF:
                queue.last = number
                return queue.stream
        queues.append(Queue(new(self.context), number))
        return queues[-1].stream

    def is_behind(self, point: TimelinePoint) -> bool:
        """Whether a stream of ours holds later calls of its timeline, which wait for it."""
        return any(point.value - queue.last & MASK >= _HALF for queue in self.timelines.get(point.timeline, ()))

    def release(self) -> None:
        """The client is gone: its streams will not write READY any more, for which ours wait. What they compute nobody
        reads. To be repeated while they work: a last write of the client's GPU may come yet, with a smaller number."""
        page = self.order.page
        for timeline, queues in self.timelines.items():
            for queue in queues:
                point = TimelinePoint(timeline, queue.last)
                if not page.is_ready(point):
                    page.store_ready(point)
