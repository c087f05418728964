"""Streams of the GPU of threads, and what is captured of them."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerzero.ipc.cuda.nodes import Node

if TYPE_CHECKING:
    from tests.soft_gpu.soft_gpu import SoftDriver


class Stream:
    """Runs what is enqueued, in order, on its own thread."""

    def __init__(self, driver: SoftDriver) -> None:
        self._driver = driver
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._enqueued = itertools.count(1)
        self.last, self.done = 0, 0
        threading.Thread(target=self._run, daemon=True, name="soft-gpu").start()

    def put(self, work: Callable[[], None]) -> None:
        self._driver.check()
        self.last = next(self._enqueued)
        self._work.put(work)

    def end(self) -> None:
        """After what is enqueued."""
        self._work.put(None)

    def _run(self) -> None:
        import numpy as np

        with np.errstate(all="ignore"):  # a GPU warns of no number
            while (work := self._work.get()) is not None:
                if not self._driver.is_lost:
                    work()
                self.done += 1


class Capture:
    """What a stream was told while it was captured; then a graph."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.work: list[Callable[[], None]] = []
        self.nodes: list[Node] = []  # the same, as the driver tells of it
        self.counters: list[int] = []
        self.is_broken = False

    def end(self) -> None:
        for counter in self.counters:
            ctypes.c_uint32.from_address(counter).value += 1
