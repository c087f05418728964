"""The two ends of ipc/shm/timeline_page.py's page that have a GPU: streams write and wait for its words."""

from __future__ import annotations

import os
import threading
from typing import Any

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import Busy, CudaError, ProtocolError
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import (
    DONE,
    MASK,
    PAGE_BYTES,
    READY,
    RUNG,
    TIMELINE_BYTES,
    TIMELINES,
    TimelinePoint,
    graph_slot_words,
    index,
)

_point = TimelinePoint._make
PER_THREAD = 2  # CU_STREAM_PER_THREAD: a stream of its own in each thread, by one handle


class _Words:
    """A page that is registered with a GPU. Methods that take a stream need its context to be current."""

    def __init__(self, context: Context, fd: int, *, has_memops: bool) -> None:
        """`has_memops`: of both sides, as `probe` found. Without, CPUs wait in place of streams.

        Raises ProtocolError for what is no page, CudaError when it cannot be registered.
        """
        self.page = TimelinePage(fd)
        self._driver, self._context, self._has_memops = context.driver, context, has_memops
        if has_memops:
            try:
                with context:
                    self.base = context.driver.host_register(self.page.address, PAGE_BYTES, self.page)
            except CudaError:
                self.page.close()
                raise

    @property
    def has_memops(self) -> bool:
        return self._has_memops

    def _at(self, point: TimelinePoint, word: int) -> int:
        return self.base + index(point, word) * 4

    def close(self) -> None:
        """To be called once no stream waits for a word of the page."""
        if self._has_memops:
            with self._context:
                self._driver.host_unregister(self.page.address)
        self.page.close()


class ClientOrder(_Words):
    """The client's end. Thread-safe."""

    def __init__(self, context: Context, fd: int, *, has_memops: bool, first: int = 1) -> None:
        """`first`: number of the first call of each timeline."""
        super().__init__(context, fd, has_memops=has_memops)
        self._lock = threading.Lock()
        self.timelines: dict[Any, int] = {}  # by stream
        self.next_numbers = [first] * TIMELINES
        self.failures_seen = [0] * TIMELINES
        for timeline in range(TIMELINES):  # cyclically, zero is ahead of half of all numbers
            self.page.store_ready(TimelinePoint(timeline, first - 1 & MASK))
            self.page.store_done(TimelinePoint(timeline, first - 1 & MASK))

    def begin(self, stream: int) -> TimelinePoint:
        """Tell the worker's stream when all that this stream did so far is done: the call's inputs are there.

        Every point is to be finished by somebody: `done` of a worker, or `fail`. Without memops this waits for the
        stream. Raises Busy when too many streams have open calls.
        """
        with self._lock:
            point = self._next_point(stream)
            if self._has_memops:
                self._driver.write_value(stream, self._at(point, READY), point.value)
            else:
                self._driver.synchronize_stream(stream)
                self.page.store_ready(point)
            self.next_numbers[point.timeline] = point.value + 1 & MASK
        return point

    def reserve(self, stream: int) -> TimelinePoint:
        """The number of the stream's next call; nothing is enqueued. `enter` follows, or `abandon`, in the order of the
        numbers, and one thread at a time. Needs memops. Raises Busy as `begin` does."""
        key = stream if stream != PER_THREAD else stream_key(stream)
        timeline = self.timelines.get(key)
        if timeline is None:
            timeline = self.timelines[key] = self._free_timeline()
        point = _point((timeline, self.next_numbers[timeline]))
        self.next_numbers[timeline] = point[1] + 1 & MASK  # last: an interrupt before it has reserved nothing
        return point

    def enter(self, stream: int, point: TimelinePoint) -> None:
        """What `begin` and `await_done` do for a point that was reserved, in one call of the driver. Needs memops.

        When it raises, nothing of it is on the stream: `abandon` ends the point, or the page's `store_ready` and
        whoever has been told of it.
        """
        ready, number = self.base + point[0] * TIMELINE_BYTES, point[1]
        self._driver.write_and_wait(stream, ready, number, ready + DONE, number)

    def ring(self, stream: int, graph_slot: int) -> None:
        """Ring a graph slot and hold the stream until that call is done: at each replay, when the stream is captured.
        Needs memops. Raises ProtocolError for a graph slot that is none."""
        at, done = graph_slot_words(graph_slot)
        self._driver.ring_and_wait(stream, self.base + at, self.base + done)

    def await_graph_slot(self, stream: int, graph_slot: int) -> None:
        """As `ring`, for a graph slot that somebody else rings."""
        self._driver.wait_value(stream, self.base + graph_slot_words(graph_slot)[1], 1, equal=True)

    def await_done(self, stream: int, point: TimelinePoint) -> None:
        """Hold the stream until the call is done or has failed; the caller goes on at once.

        Without memops to be called after the worker's reply. Raises ProtocolError when that was not true.
        """
        if self._has_memops:
            self._driver.wait_value(stream, self._at(point, DONE), point.value)
        elif not self.page.is_done(point):
            raise ProtocolError(
                f"the worker replied, but has not finished call {point.value} of timeline {point.timeline}"
            )

    def abandon(self, stream: int, point: TimelinePoint) -> None:
        """End a point whose caller goes without. The timeline's later ones are not held up by it, and nor is a worker
        that was told of it."""
        if self._has_memops:
            self._driver.write_value(stream, self._at(point, READY), point.value)
            self._driver.write_value(stream, self._at(point, DONE), point.value)
        else:
            self.page.store_done(point)

    def has_news(self, stream: int) -> bool:
        """Whether a call of the stream has failed since `take_news`."""
        timeline = self.timelines.get(stream_key(stream))
        return timeline is not None and self.page.last_error(timeline) != self.failures_seen[timeline]

    def take_news(self) -> None:
        """What has failed so far is known."""
        self.failures_seen[:] = [self.page.last_error(timeline) for timeline in range(TIMELINES)]

    def last_points(self) -> list[TimelinePoint]:
        """The last one of each timeline. Takes no lock: `begin` may wait for a full stream with it."""
        return [
            TimelinePoint(timeline, self.next_numbers[timeline] - 1 & MASK)
            for timeline in list(self.timelines.values())
        ]

    def take_timeline(self, stream: int) -> int:
        """The stream's, which it has from now on. One thread at a time, as `reserve`. Raises Busy as `begin` does."""
        key = stream_key(stream)
        timeline = self.timelines.get(key)
        if timeline is None:
            timeline = self.timelines[key] = self._free_timeline()
        return timeline

    def timeline(self, stream: int) -> int:
        """The stream's; -1 while it has none."""
        return self.timelines.get(stream_key(stream), -1)

    def _next_point(self, stream: int) -> TimelinePoint:
        timeline = self.take_timeline(stream)
        return TimelinePoint(timeline, self.next_numbers[timeline])

    def _free_timeline(self) -> int:
        taken = set(self.timelines.values())
        for timeline in range(TIMELINES):
            if timeline not in taken:
                return timeline
        for stream, timeline in self.timelines.items():
            if self.page.is_done(TimelinePoint(timeline, self.next_numbers[timeline] - 1 & MASK)):
                del self.timelines[stream]
                return timeline
        raise Busy(f"{TIMELINES} streams have open calls to one worker; no more can", limit=TIMELINES)


def stream_key(stream: int) -> Any:
    """What stands for a stream: a handle may be another stream in each thread."""
    return (stream, threading.get_ident()) if stream == PER_THREAD else stream


class WorkerOrder(_Words):
    """A worker's end: of its own page, or of a dead worker's whose calls it takes over. For one thread."""

    def await_ready(self, stream: int, point: TimelinePoint) -> None:
        """Hold the stream until the call's inputs are there. Without memops they are, when the message is."""
        if self._has_memops:
            self._driver.wait_value(stream, self._at(point, READY), point.value)
        elif not self.page.is_ready(point):
            raise ProtocolError(f"call {point.value} of timeline {point.timeline} came before its inputs were ready")

    def done(self, stream: int, point: TimelinePoint) -> None:
        """Let the client's stream go on after all that this stream did so far. In a timeline, in the order of its
        points.

        Without memops this waits for the stream; the reply to the client comes after it.
        """
        if self._has_memops:
            self._driver.write_value(stream, self._at(point, DONE), point.value)
        else:
            self._driver.synchronize_stream(stream)
            self.page.store_done(point)

    def answer_graph_slot(self, stream: int, graph_slot: int) -> None:
        """Let the client's graph go on after all that this stream did so far. Needs memops."""
        self._driver.write_value(stream, self.base + graph_slot_words(graph_slot)[1], 1)

    def ring(self, stream: int, graph_slot: int) -> None:
        """Ring another worker's graph slot after all that this stream did so far. Needs memops."""
        self._driver.write_value(stream, self.base + graph_slot_words(graph_slot)[0], RUNG)


def probe(context: Context) -> str:
    """Why streams cannot wait for words in host memory here; empty when they can. Found by doing it."""
    point = TimelinePoint(TIMELINES - 1, 1)
    fd = create_page()
    driver = context.driver
    try:
        words = _Words(context, fd, has_memops=True)
        try:
            with context:
                stream = driver.create_stream()
                try:
                    driver.write_value(stream, words._at(point, READY), point.value)
                    driver.synchronize_stream(stream)
                    if not words.page.is_ready(point):
                        return "a stream's write to host memory was not seen by the CPU"
                    driver.wait_value(stream, words._at(point, READY), point.value)  # true already: it cannot hang
                    driver.synchronize_stream(stream)
                finally:
                    driver.destroy_stream(stream)
        finally:
            words.close()
    except CudaError as exc:
        if exc.is_sticky:
            raise
        return exc.message
    finally:
        os.close(fd)
    return ""
