"""The broker's hold on express lanes and rings: it can take their leases back, end them and see what they carried."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from layerzero.broker.core import events as ev
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring_words import ENQUEUED, REPLAYED, RingCall
from layerzero.ipc.shm.timeline_page import TimelinePage

MAX_CALLS = 1 << 32  # that a worker may claim to have run between two looks


_fence = threading.Lock()


@dataclass
class _End:
    page: lane.Page
    page_fd: int
    doorbell: int
    ringing: socket.socket  # of the answer bell
    hearing: socket.socket | None  # until the client has it
    seen: int = 0

    @property
    def fds(self) -> tuple[int, ...]:
        """The worker's."""
        return self.page_fd, self.doorbell, self.ringing.fileno()

    @property
    def client_fds(self) -> tuple[int, ...]:
        return (self.doorbell,) if self.hearing is None else (self.doorbell, self.hearing.fileno())

    def let_go(self) -> None:
        """What is the client's alone."""
        if self.hearing is not None:
            self.hearing.close()
            self.hearing = None

    def close(self) -> None:
        self.let_go()
        self.ringing.close()
        os.close(self.doorbell)
        self.page.close()
        os.close(self.page_fd)

    def tell_end(self) -> None:
        self.page.end()
        lane.ring_back(self.ringing)

    def last_time(self) -> tuple[int, int, int]:
        return self.page.last_time()


@dataclass
class _RingEnd:
    page: Ring
    page_fd: int
    doorbell: int
    seen: int = 0
    timed: int = 0
    first: int = 1  # no call before it is open

    @property
    def fds(self) -> tuple[int, ...]:
        """The worker's."""
        return self.page_fd, self.doorbell

    @property
    def client_fds(self) -> tuple[int, ...]:
        return (self.doorbell,)

    def let_go(self) -> None:
        """What is the client's alone: nothing."""

    def close(self) -> None:
        os.close(self.doorbell)
        self.page.close()
        os.close(self.page_fd)

    def tell_end(self) -> None:
        self.page.end()
        with _fence:  # a locked instruction: the store comes before what is read from now on
            pass

    def last_time(self) -> tuple[int, int, int]:
        timed, plan, kernel_ns = self.page.times
        is_new, self.timed = timed != self.timed, timed
        return self.page.taken, plan if is_new else 0, kernel_ns

    def look(self, order: TimelinePage) -> ev.RingSnapshot:
        """`order`: the client's page for the ring's GPU."""
        put = self.page.left(self.first)
        calls = [call for call in put if _is_open(order, call)]
        self.first = calls[0].call if calls else put[-1].call + 1 if put else self.first
        ready = {call.call for call in calls if order.is_ready(call.point)}
        enqueued = {call.call for call in calls if self.page.status(call.call) in (ENQUEUED, REPLAYED)}
        return ev.RingSnapshot(put[-1].call if put else self.first - 1, self.page.taken, calls, ready, enqueued)


class LanePages:
    def __init__(self) -> None:
        self._ends: dict[int, _End | _RingEnd] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, number: int) -> bool:
        return number in self._ends

    def add(self, number: int, fds: list[int], *, is_ring: bool = False) -> None:
        """Take a lane's page over, and make its bells. Raises ProtocolError and OSError; then `fds` are still the
        caller's."""
        if len(fds) != 1:
            raise ProtocolError(f"add_lane carries one descriptor, got {len(fds)}")
        if number in self._ends:
            raise ProtocolError(f"lane {number} is open already")
        fd = fds[0]
        if is_ring:
            ring = Ring(fd)
            self._ends[number] = _RingEnd(ring, fd, lane.create_doorbell())
            return
        memory.check_memfd(fd, lane.PAGE_BYTES)
        page, doorbell = lane.Page(fd), lane.create_doorbell(counts=True)
        try:
            ringing, hearing = lane.create_answer_bell()
        except BaseException:
            os.close(doorbell)
            raise
        self._ends[number] = _End(page, fd, doorbell, ringing, hearing)

    def fds(self, number: int) -> tuple[int, ...]:
        """What its worker is lent."""
        return self._ends[number].fds

    def client_fds(self, number: int) -> tuple[int, ...]:
        """The bells, for its client; none when the lane has ended."""
        end = self._ends.get(number)
        return () if end is None else end.client_fds

    def let_go(self, number: int) -> None:
        """The client has been sent its bells."""
        end = self._ends.get(number)
        if end is not None:
            end.let_go()

    def revoke(self, number: int, epoch: int) -> None:
        """A lane that its client has not opened yet has nothing to revoke: it learns the epoch when it opens."""
        end = self._ends.get(number)
        if end is not None:
            end.page.revoke(epoch)

    def has_ended(self, number: int, call: int) -> bool:
        """Whether a call of a lane is over, or of a ring enqueued. Raises ProtocolError when the worker gave it an end
        that makes no sense."""
        end = self._ends.get(number)
        if isinstance(end, _RingEnd):
            return end.page.is_over(call)
        return end is None or end.page.get_end(call) is not None

    def call(self, number: int, call: int) -> RingCall | None:
        """What the client put into a ring; None when it has written over it. Raises ProtocolError when the worker that
        names it cannot have it from there: there is no such ring, or the call was never put or was done long ago."""
        end = self._ends.get(number)
        if not isinstance(end, _RingEnd):
            raise ProtocolError(f"there is no call {call} on lane {number}, which is no ring")
        found, head = end.page.call(call) if call else None, end.page.head
        if found is None and not end.first <= call <= head:
            raise ProtocolError(f"there is no call {call} on lane {number}, which has {end.first} to {head}")
        return found

    def look(self, number: int, order: TimelinePage) -> ev.RingSnapshot | None:
        """What is on a ring; None for a lane that is no ring or is not open. `order`: the client's page for its GPU."""
        end = self._ends.get(number)
        return end.look(order) if isinstance(end, _RingEnd) else None

    def is_unheard(self, number: int) -> bool:
        """Whether there are calls on a ring whose worker sleeps: its client may have left before it rang."""
        end = self._ends.get(number)
        return isinstance(end, _RingEnd) and end.page.is_asleep and end.page.head > end.page.taken

    def tell_end(self, number: int) -> None:
        """Tell the client that the worker is gone."""
        end = self._ends.get(number)
        if end is not None:
            end.tell_end()

    def end(self, number: int) -> None:
        """Tell the client that the worker is gone, and let go."""
        self.tell_end(number)
        self.drop(number)

    def drop(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end.close()

    def seen(self) -> Iterator[ev.LanePolled]:
        """What lanes carried since the last look."""
        for number, end in self._ends.items():
            call, plan, kernel_ns = end.last_time()
            calls = call - end.seen
            if 0 < calls < MAX_CALLS:
                end.seen = call
                yield ev.LanePolled(number, calls, plan, kernel_ns)

    def close(self) -> None:
        for number in list(self._ends):
            self.drop(number)


def _is_open(order: TimelinePage, call: RingCall) -> bool:
    """One whose turn makes no sense is nobody's: its client breaks the protocol, which is noticed when it is left."""
    try:
        return not order.is_done(call.point)
    except ProtocolError:
        return False
