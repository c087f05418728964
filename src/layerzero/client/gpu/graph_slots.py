"""Calls in CUDA graphs of the application: each is bound to a graph slot, which a worker answers at every replay.

Nobody tells this process when a graph is replayed. That one is gone, Python tells of torch's (torch_graphs.py), and
the driver of others: it counts a semaphore up. When no worker is left for a graph slot, or the broker is gone, a
thread of ours ends what its graph waits for, with an error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from layerzero.client.connection import retained
from layerzero.client.gpu import torch_graphs
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.streams import ClientOrder
from layerzero.ipc.errors import Busy, CudaError
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, MASK, RUNG, SILENT, TAKEN

if TYPE_CHECKING:
    from layerzero.client.gpu.capture import Captured

_COUNTER_BYTES = 32  # a sem_t


class GraphSlots:
    """Of one timeline page. Threads may share it."""

    def __init__(self, order: ClientOrder, context: Context) -> None:
        self._page, self._context = order.page, context
        self._lock = threading.Lock()
        self._bound: dict[int, Captured] = {}
        self._failed: dict[int, Captured] = {}
        self._free = list(range(GRAPH_SLOTS - 1, -1, -1))
        self._counters: ctypes.Array[ctypes.c_char] | None = None
        self._let_go: deque[Captured] = deque()  # a replay may be under way
        self._leaving: list[Captured] = []  # until this event
        self._event = 0
        torch_graphs.before_captures(self)

    def __bool__(self) -> bool:
        """Whether graphs of this process may wait for a graph slot."""
        return bool(self._bound)

    def take(self) -> tuple[int, int]:
        """A graph slot that nobody uses, and the number of its binding. Raises Busy."""
        with self._lock:
            if self._counters is None:
                self._counters = ctypes.create_string_buffer(_COUNTER_BYTES * GRAPH_SLOTS)
                retained.keep(self._counters)  # the driver counts when the process ends, too
            if not self._free:
                raise Busy(
                    f"{GRAPH_SLOTS} calls are in CUDA graphs of this process on one GPU; no more can", limit=GRAPH_SLOTS
                )
            graph_slot = self._free.pop()
            binding = self._page.binding(graph_slot) + 1 & MASK
            self._page.set_graph_slot(graph_slot, SILENT)
            self._page.set_binding(graph_slot, binding)
            self._page.unlink_graph_slot(graph_slot)
        ctypes.memset(self.counter(graph_slot), 0, _COUNTER_BYTES)
        return graph_slot, binding

    def counter(self, graph_slot: int) -> int:
        """The address of the semaphore that says when the graph slot's graph is gone."""
        assert self._counters is not None
        return ctypes.addressof(self._counters) + _COUNTER_BYTES * graph_slot

    def give_back(self, graph_slot: int) -> None:
        """Nobody answers it any more, and nobody rings it."""
        with self._lock:
            self._bound.pop(graph_slot, None)
            self._failed.pop(graph_slot, None)
            self._free.append(graph_slot)

    def bind(self, graph_slot: int, enqueued: Captured) -> None:
        """A worker answers it, or did a moment ago."""
        with self._lock:
            self._bound[graph_slot] = enqueued
            if enqueued.has_failed:
                self._failed[graph_slot] = enqueued

    def let_go(self, enqueued: Captured) -> None:
        """Its graph is not replayed anew. Takes no lock: the garbage collector may call it."""
        self._let_go.append(enqueued)

    def gone(self, *, is_capturing: bool = False) -> list[Captured]:
        """Calls whose graphs are gone since the last look. Their graph slots are free again when they are given back:
        the broker must not hear of another call with one before it has heard that this one is over. `is_capturing`:
        this thread captures, so that nothing may be enqueued."""
        if not self._bound:
            return []
        with self._lock:
            gone = [graph_slot for graph_slot in self._bound if self._count(graph_slot)]
            gone += [one.graph_slot for one in self._left() if self._bound.get(one.graph_slot) is one]
            if not is_capturing:
                self._mark()
            for graph_slot in gone:
                self._failed.pop(graph_slot, None)
            return [self._bound.pop(graph_slot) for graph_slot in gone]

    def fail(self, graph_slot: int) -> None:
        """No worker answers this one any more."""
        with self._lock:
            if graph_slot in self._bound:
                self._failed[graph_slot] = self._bound[graph_slot]

    def answered(self, graph_slot: int) -> None:
        """A worker answers it again."""
        with self._lock:
            self._failed.pop(graph_slot, None)

    def fail_all(self) -> None:
        with self._lock:
            self._failed.update(self._bound)

    @property
    def has_failed(self) -> bool:
        return bool(self._failed)

    def end_failed(self) -> list[Captured]:
        """Let the graphs go on that wait for graph slots which nobody answers. Returns what has failed by that."""
        page, ended = self._page, []
        for graph_slot, enqueued in list(self._failed.items()):
            before, following = page.previous_graph_slot(graph_slot), page.next_graph_slot(graph_slot)
            has_point = before is None or page.is_graph_slot_done(before)  # first, as a worker looks
            value = page.graph_slot(graph_slot)
            if value == RUNG or (has_point and value >= TAKEN and not page.is_graph_slot_done(graph_slot)):
                page.set_graph_slot(graph_slot, TAKEN)
                if following is not None:
                    page.clear_graph_slot_done(following)
                    page.set_graph_slot(following, SILENT)
                page.store_graph_slot_done(graph_slot)
                if following is not None:
                    page.set_graph_slot(following, RUNG)
                ended.append(enqueued)
        return ended

    def _left(self) -> list[Captured]:
        """Those that were let go of and whose last replay is over."""
        left: list[Captured] = []
        with contextlib.suppress(CudaError), self._context:  # later
            if self._leaving and self._context.driver.is_event_done(self._event):
                left, self._leaving = self._leaving, []
        return left

    def mark(self) -> None:
        """Have an event follow the last replays of those that were let go of."""
        if self._let_go:
            with self._lock:
                self._mark()

    def _mark(self) -> None:
        """The driver's event of a context breaks what is captured there."""
        count = len(self._let_go)  # their replays were enqueued before; those of others may come after the event
        if self._leaving or not count:
            return
        driver = self._context.driver
        with torch_graphs.between_captures() as may_mark, contextlib.suppress(CudaError):
            if may_mark:
                with self._context:
                    self._event = self._event or driver.create_event()
                    driver.record_context(self._context.handle, self._event)
                    self._leaving = [self._let_go.popleft() for _ in range(count)]

    def _count(self, graph_slot: int) -> int:
        return ctypes.c_uint32.from_address(self.counter(graph_slot)).value


def tell_orphans() -> None:
    """Onto the process's stderr: there is nobody left to raise it. Graphs go on where that is closed."""
    text = "layerzero: a CUDA graph was replayed with calls of a session that was closed; their results are undefined\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
