"""When calls on a GPU ran there: two events around each in the caller's stream, brought to the clock of all calls by a
third, of which the CPU knows when it was."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.gpu.arrays import current_stream
from layerzero.client.gpu.memory import GpuMemory, memory_of
from layerzero.ipc.errors import LayerZeroError

MAX_OPEN = 2048  # calls of one GPU whose times have not been read
REBASED_NS = 5_000_000_000  # times since an event are told in float milliseconds: after 5 s to half a microsecond


class GpuTimes:
    """Of one GPU. Threads may share it. Nothing here waits but for an event in a stream that has nothing else."""

    def __init__(self, memory: GpuMemory) -> None:
        """Needs a current context, as all that is here."""
        self.memory, self.driver = memory, memory.context.driver
        self._stream = self.driver.create_stream()
        self._free: list[int] = []
        self._open: deque[Span] = deque()
        self._lock = threading.Lock()
        self._base: tuple[int, int] | None = None  # an event, and when it was on the CPU's clock

    def event(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self.driver.create_event(is_timed=True)

    def give_back(self, *events: int) -> None:
        with self._lock:
            self._free += events

    def base(self) -> tuple[int, int]:
        now_ns = time.perf_counter_ns()
        base = self._base
        if base is None or now_ns - base[1] > REBASED_NS:
            event = self.driver.create_event(is_timed=True)  # one in five seconds; spans refer to it
            before_ns = time.perf_counter_ns()
            self.driver.record_event(event, self._stream)
            self.driver.synchronize_event(event)
            base = self._base = (event, (before_ns + time.perf_counter_ns()) // 2)
        return base

    def has_room(self) -> bool:
        """Reads what is done, where too much is open."""
        while len(self._open) >= MAX_OPEN:
            oldest = self._open[0]
            if not oldest.read(waits=False):
                return False
            with suppress(IndexError):
                self._open.popleft()
        return True

    def keep(self, span: Span) -> None:
        self._open.append(span)


class Span:
    """The GPU's time of one call; `found` once it was read, on the clock of time.perf_counter_ns."""

    def __init__(self, times: GpuTimes, stream: int) -> None:
        self._times, self._stream = times, stream
        self._base = times.base()
        self._start, self._end = times.event(), 0
        self._lock = threading.Lock()
        self.found: tuple[int, int] | None = None
        times.driver.record_event(self._start, stream)

    def end(self) -> None:
        """The call is enqueued. A GPU that was lost is the next call's to tell of."""
        times = self._times
        with suppress(LayerZeroError), times.memory.context:
            end = times.event()
            times.driver.record_event(end, self._stream)
            self._end = end
            times.keep(self)

    def drop(self) -> None:
        """The call has failed."""
        self._times.give_back(self._start)

    def read(self, *, waits: bool = True) -> bool:
        """Whether `found` is there. With `waits` until the call is done."""
        with self._lock:
            if self.found is not None or not self._end:
                return self.found is not None
            times = self._times
            driver = times.driver
            with times.memory.context:
                if waits:
                    driver.synchronize_event(self._end)
                elif not driver.is_event_done(self._end):
                    return False
                event, at_ns = self._base
                took_ns = driver.elapsed_ns(self._start, self._end)
                self.found = at_ns + driver.elapsed_ns(event, self._start), took_ns
            times.give_back(self._start, self._end)
        return True


_times: dict[GpuMemory, GpuTimes] = {}
_lock = threading.Lock()


def begin(args: Sequence[Any]) -> tuple[int, Span | None]:
    """The device of a call with these arguments, and a span that has begun on its GPU; None on the CPU, while a stream
    is captured, and where the driver gives none: a call is not to fail of it."""
    like = _first(args)
    if like is None or like.device == CPU:
        return CPU, None
    with suppress(LayerZeroError):
        memory = memory_of(like.device)
        stream = current_stream(like)
        with memory.context as context:
            if context.driver.is_capturing(stream):
                return like.device, None
            times = _times.get(memory)
            if times is None:
                with _lock:
                    times = _times.setdefault(memory, GpuTimes(memory))
            if times.has_room():
                return like.device, Span(times, stream)
    return like.device, None


def device_of(args: Sequence[Any]) -> int:
    """Of a call with these arguments: the ordinal of a GPU, or CPU."""
    like = _first(args)
    return CPU if like is None else like.device


def _first(args: Sequence[Any]) -> Array | None:
    for arg in args:
        if arg is not None:
            with suppress(LayerZeroError):
                return describe(arg)
    return None
