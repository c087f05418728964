"""File descriptors that the broker's loop sleeps on, and whom it calls when one of them has something."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress


class Poller:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` when there is something to read."""
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._handlers[fd]

    def want_room(self, fd: int, is_wanted: bool) -> None:
        """Whether to call the handler, too, when there is room to write."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT if is_wanted else select.EPOLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until one has something, and call the handlers of those that have."""
        for fd, _ in self._epoll.poll(timeout_s):
            handler = self._handlers.get(fd)  # an earlier one may have closed it
            if handler is not None:
                handler()

    def close(self) -> None:
        self._epoll.close()


def drain_pipe(fd: int) -> None:
    """Take what is in a non-blocking pipe of signals."""
    with suppress(BlockingIOError):
        os.read(fd, 512)
