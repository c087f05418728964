"""A thread that ends NCCL's calls once a rank has gone, where nobody waits for them."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from layerzero.groups.ending import LOOK_MS

GRACE_S = 0.1  # for calls whose ranks may all have done their part when one goes
_log = logging.getLogger("layerzero.groups")


class Watch:
    """Aborts NCCL's calls that nobody waits for once a rank has gone, if they do not end by themselves: a thread that
    sleeps meanwhile, but for looks now and then."""

    def __init__(
        self,
        ends: Iterable[tuple[int, int]],
        is_done: Callable[[], bool],
        abort: Callable[[], None],
        is_ending: Callable[[], bool],
    ) -> None:
        """`ends`: descriptors that tell of a rank's end, with what they are polled for; they are this one's own.
        `is_ending`: whether a rank's process is about to, which those tell of late."""
        self.has_aborted = self.is_over = False
        self._is_done, self._abort, self._is_ending = is_done, abort, is_ending
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._ends = list(ends)
        self._thread = threading.Thread(target=self._run, name="nccl-watch", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Where `is_over`."""
        self._thread.join()

    def close(self) -> None:
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for fd in (self._bell, *(fd for fd, _ in self._ends)):
            os.close(fd)

    def _run(self) -> None:
        gone, bell = select.poll(), select.poll()
        for poll in (gone, bell):
            poll.register(self._bell, select.POLLIN)
        for fd, events in self._ends:
            gone.register(fd, events)
        while not (told := gone.poll(LOOK_MS)) and not self._is_ending():
            pass
        if any(fd == self._bell for fd, _ in told):
            return
        end_s = time.monotonic() + GRACE_S
        while not self._is_done() and time.monotonic() < end_s:
            if bell.poll(1):
                return
        self.is_over = True  # before the last look: what is left open behind that has another watch
        if not self._is_done():
            self.has_aborted = True
            self._abort()
            _log.error("a rank went during calls that nobody has waited for: what they gave is void")
