"""Descriptors that another process has sent and nobody wants.

The last close of a descriptor may wait: a TCP socket with unsent data for as long as its sender chose (SO_LINGER), a
file for the server of its file system, a socket for those in its queue. A memfd never does.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress

_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what is unsent is lost
_closer: queue.SimpleQueue[int] | None = None
_lock = threading.Lock()


def close_all(fds: Iterable[int]) -> None:
    """Never waits: descriptors other than memfds are closed in a thread."""
    for fd in fds:
        if _is_memfd(fd):
            os.close(fd)
        else:
            _give_to_closer(fd)


def _is_memfd(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _give_to_closer(fd: int) -> None:
    global _closer
    with suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        finally:
            sock.detach()
    with _lock:
        if _closer is None:
            _closer = queue.SimpleQueue()
            threading.Thread(target=_close_those_of, args=(_closer,), name="closer", daemon=True).start()
    _closer.put(fd)


def _close_those_of(fds: queue.SimpleQueue[int]) -> None:
    while True:
        with suppress(OSError):
            os.close(fds.get())
