"""Work that no call waits for, on one thread that begins with the first of it."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.driver import Driver

Work = Callable[[], float | None]  # in how many seconds to do it again; None: never
JOIN_S = 5.0


class Background:
    """Of one connection. Threads may share it."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Work]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def put(self, driver: Driver, work: Work, in_s: float = 0.0) -> None:
        """Do it then, or later. `driver`: of the GPU's that it is about."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + in_s, next(self._count), work))
            if self._thread is None and not self._is_ending:
                self._thread = threading.Thread(target=self._run, args=(driver,), name="lz-lift", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self, driver: Driver) -> None:
        driver.exchange_capture_mode(CAPTURE_RELAXED)  # nothing here breaks the application's captures
        while True:
            with self._changed:
                while not self._is_ending and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._is_ending:
                    return
                work = heapq.heappop(self._due)[2]
            again_s = work()
            if again_s is not None:
                self.put(driver, work, again_s)

    def end(self) -> None:
        """Nothing is begun any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def join(self) -> None:
        """After `end`, until what is under way is over."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
