"""Telling the broker of a GPU that was lost to this process, and which lifted calls it had launched last: what a fault
may be of is not lifted again."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.lifting.loaded import relaxed
from layerzero.ipc.errors import CudaError, LayerZeroError

TELL_S = 1.0  # so long may it take


class Faults:
    """Of one connection. Threads may share it."""

    def __init__(self, ask: Callable[..., Any], is_own: Callable[[], bool]) -> None:
        """`ask` puts a question to the broker. `is_own`: whether this is the process that is connected."""
        self._ask, self._is_own = ask, is_own
        self._used: dict[str, Gpu] = {}
        self._captured: dict[str, set[int]] = {}
        self._told: set[str] = set()
        _all.add(self)

    def watch(self, gpu: Gpu) -> None:
        """From now on lifted calls may be launched there, by the C, which tells the page alone."""
        self._used[gpu.uuid] = gpu

    def note_captured(self, gpu: Gpu, number: int) -> None:
        """A lifted call is about to be in a graph, of whose launches nobody hears."""
        self._captured.setdefault(gpu.uuid, set()).add(number)

    def tell(self, gpu: Gpu) -> None:
        """The GPU is lost; once."""
        if gpu.uuid in self._told:
            return
        self._told.add(gpu.uuid)
        numbers = gpu.order.page.last_lifted() | self._captured.get(gpu.uuid, set())
        if numbers:
            with contextlib.suppress(LayerZeroError):  # it may be gone, and can read the page
                self._ask("lift_fault", within_s=TELL_S, numbers=sorted(numbers))

    def look(self) -> None:
        """Whether a GPU is lost; for the last time."""
        if not self._is_own():
            return
        used, self._used = self._used, {}
        for gpu in used.values():
            try:
                with relaxed(gpu.memory) as driver:
                    driver.is_stream_idle(gpu.memory.own_stream())  # a lost context says so on each of its streams
                gpu.order.page.clear_lifted()
            except CudaError as exc:
                if exc.is_sticky:
                    self.tell(gpu)


_all: weakref.WeakSet[Faults] = weakref.WeakSet()


@atexit.register
def _look_at_exit() -> None:
    for faults in list(_all):
        faults.look()
