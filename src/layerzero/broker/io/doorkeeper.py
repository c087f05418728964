"""ZeroMQ's listeners, closed while file descriptors are short and opened again when there are some.

libzmq accepts in a thread of its own, faster than the broker's loop may look, and ends the process when it finds no
descriptor. Its sockets say what they have accepted; a thread hears that, and takes the path of a listener away at once.
The loop binds it again when there is room. To unbind a listener is to hang up on all that it has accepted, so that is
done with tcp alone: on a path those who are connected go on, and the old listener stays, which nobody finds any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import zmq

from layerzero.broker.io import fd_reserve
from layerzero.ipc.logs import log
from layerzero.ipc.transport import sockets

LOOK_S = 0.2  # while one is closed
MAX_PAUSE_S = 60.0  # an old listener is a descriptor, too: who shuts doors again and again waits longer each time
_ENDS_LISTENING = (zmq.EVENT_CLOSED, zmq.EVENT_CLOSE_FAILED)
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | sum(_ENDS_LISTENING)


@dataclass(eq=False)
class Door:
    """One listener. `bind` makes it anew. `keeps`: so many descriptors must be free while it is open. `most`:
    connections that it takes at a time."""

    sock: zmq.Socket[bytes]
    endpoint: str
    bind: Callable[[], None]
    keeps: Callable[[], int]
    most: int = 1 << 30
    connected: set[int] = field(default_factory=set)
    is_shut: bool = False  # nobody new comes in: set by the thread
    is_unbound: bool = False  # nobody listens there any more: set by the thread
    is_told: bool = False  # the loop knows
    opened_s: float = 0.0
    opens_s: float = 0.0  # not before
    pause_s: float = LOOK_S

    @property
    def path(self) -> Path | None:
        return Path(self.endpoint.removeprefix("ipc://")) if self.endpoint.startswith("ipc://") else None

    @property
    def is_full(self) -> bool:
        return len(self.connected) >= self.most or fd_reserve.free() < self.keeps()

    @property
    def has_room(self) -> bool:
        return len(self.connected) <= self.most * 3 // 4 and fd_reserve.free() >= self.keeps() * 5 // 4


class Doorkeeper:
    """`wake` is called from the thread when the loop is to call `look`."""

    def __init__(self, doors: Sequence[Door], wake: Callable[[], None]) -> None:
        self._doors = list(doors)
        self._wake = wake
        monitors = {cast(Any, door.sock.get_monitor_socket(int(_EVENTS))): door for door in self._doors}
        self._thread = threading.Thread(target=self._watch, args=(monitors,), name="doors", daemon=True)
        self._thread.start()

    @property
    def is_shut(self) -> bool:
        """Whether one of them is: then `look` wants to be called each LOOK_S."""
        return any(door.is_shut for door in self._doors)

    def look(self) -> None:
        """In the loop's thread, whose sockets they are."""
        now_s = time.monotonic()
        for door in self._doors:
            if door.is_shut and not door.is_told:
                door.is_told = True
                door.pause_s = LOOK_S if now_s - door.opened_s > MAX_PAUSE_S else min(2 * door.pause_s, MAX_PAUSE_S)
                door.opens_s = now_s + door.pause_s
                log("listener.closed", endpoint=door.endpoint, connections=len(door.connected), free=fd_reserve.free())
                if door.path is None:
                    with suppress(zmq.ZMQError):
                        door.sock.unbind(door.endpoint)
            if door.is_unbound and now_s >= door.opens_s and door.has_room:
                try:
                    door.bind()
                except (zmq.ZMQError, OSError):
                    continue  # its address is another's for now, or there is no descriptor after all
                door.is_unbound = door.is_told = door.is_shut = False
                door.opened_s = now_s
                log("listener.opened", endpoint=door.endpoint, free=fd_reserve.free())

    def close(self) -> None:
        """Before the sockets are closed."""
        for door in self._doors:
            door.sock.disable_monitor()
        self._thread.join()

    def _watch(self, monitors: dict[Any, Door]) -> None:
        poller = zmq.Poller()
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        while monitors:
            for monitor, _ in poller.poll():
                door, (event, fd) = monitors[monitor], sockets.read_event(monitor)
                if event == zmq.EVENT_ACCEPTED:
                    door.connected.add(fd)
                    self._shut_full()
                elif event == zmq.EVENT_DISCONNECTED:
                    door.connected.discard(fd)
                elif event in _ENDS_LISTENING and door.is_shut and door.path is None:
                    door.is_unbound = True
                    self._wake()
                elif event == zmq.EVENT_MONITOR_STOPPED:
                    poller.unregister(monitor)
                    monitor.close(linger=0)
                    del monitors[monitor]

    def _shut_full(self) -> None:
        for door in self._doors:
            if not door.is_shut and door.is_full:
                door.is_shut = True
                if door.path is not None:
                    with suppress(OSError):
                        os.unlink(door.path)
                    door.is_unbound = True
                self._wake()
