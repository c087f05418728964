"""The express lane for calls on a GPU: calls of a settled route go into a ring that their worker reads, and nobody
answers. What does not go well there, the broker brings to an end."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from layerzero.client.connection.call import Route
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link
from layerzero.client.gpu.device import Gpu
from layerzero.ipc.shm import lane, ring
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring_words import ENQUEUED, REPLAYED, SLOTS
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.spinning import Spin, limit_ns

LOOK_S = 50e-6
PATIENCE = 4  # times as long as elsewhere it is looked: a function on a GPU takes longer than a kernel of the CPU


class Awaited(Protocol):
    """A call whose caller waits for it."""

    def see(self) -> bool:
        """Whether it is over, and its slot may have another call: then that is known, and it is awaited no more."""


class GpuLane:
    """This process's end of a ring to one start of a worker. The GPU's lock is held by who uses it."""

    def __init__(self, link: Link, number: int, gpu: Gpu) -> None:
        """Raises OutOfMemory, and OSError when the process has no file descriptors left."""
        self.number, self._link = number, link
        self.gpu, self._page = gpu, gpu.order.page
        self.points: list[TimelinePoint | None] = [None] * SLOTS
        self.routes: list[Route | None] = [None] * SLOTS  # the broker must know them as long as a call is open
        self.awaited: dict[int, Awaited] = {}  # calls whose callers have not seen yet what their slots say
        self.spin = Spin(PATIENCE * limit_ns(os.environ))
        self._barrier = threading.Lock()
        self.is_closed = False
        self.doorbell = -1
        fd = ring.create_page()
        try:
            self._ring = Ring(fd)
            bells = link.add_lane(number, fd, gpu.uuid)
        finally:
            os.close(fd)
        self.is_open = bells is not None
        if bells:
            self.doorbell = bells[0]

    def holds(self, lease: Lease) -> bool:
        """Whether calls may be put under this lease now."""
        return self._ring.holds(lease.epoch) and self.is_open and self.doorbell >= 0 and not self.is_closed

    @property
    def is_ended(self) -> bool:
        return self.is_closed or not self.is_open or self._ring.is_ended

    def put(self, route: Route, plan: int, seq: int, point: TimelinePoint, refs: bytes, timeout_s: float = 0.0) -> bool:
        """Put the next call, number `head` from now on. False: the worker is gone, and the broker may not have seen
        the call. Waits while the ring is full. `timeout_s`: the call's own."""
        call = self._ring.head + 1  # what an interrupt left half done is not there
        slot = call % SLOTS
        before = self.points[(call + 1) % SLOTS]  # one slot stays free: the broker may be reading it
        if before is not None and not self._page.is_done(before):
            self.gpu.wait_for(before)
        while (late := self.awaited.get(call + 1 - SLOTS)) is not None and not late.see() and not self._ring.is_ended:
            self._link.read_nowait()
            time.sleep(LOOK_S)
        self.points[slot], self.routes[slot] = point, route
        ring = self._ring
        ring.put(call, route.number, plan, seq, point, refs, timeout_s)
        with self._barrier:  # a locked instruction: what was put is seen before what follows is read
            pass
        if ring.is_asleep:
            lane.ring(self.doorbell)
        return not ring.is_ended

    def see_awaited(self, most: int | None = None) -> None:
        """See which of the awaited calls are over, of the oldest ones."""
        if self.awaited:
            for one in list(self.awaited.values())[:most]:
                one.see()

    @property
    def address(self) -> int:
        """Of the ring's page in this process."""
        return self._ring.address

    @property
    def head(self) -> int:
        """The last call that was put."""
        return self._ring.head

    def status(self, call: int) -> int:
        """As Ring.status."""
        return 0 if self.is_closed else self._ring.status(call)

    def is_enqueued(self, call: int) -> bool:
        """Whether the worker has said so; also of a ring that is closed."""
        return self._ring.status(call) in (ENQUEUED, REPLAYED)

    def is_taken(self, call: int) -> bool:
        """Whether the worker has come to it."""
        return self._ring.taken >= call

    def close(self) -> None:
        """The page stays mapped while something refers to this."""
        if not self.is_closed:
            self.is_closed = True
            if self.doorbell >= 0:
                os.close(self.doorbell)
