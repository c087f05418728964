"""The broker's hold on express lanes and rings: it can take their leases back, end them and see what they carried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from layerzero.broker.core import events as ev
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_page import TimelinePage

MAX_CALLS = 1 << 32  # that a worker may claim to have run between two looks


@dataclass
class _End:
    page: lane.Page
    fds: tuple[int, int, int]  # page, doorbell, answer bell
    seen: int = 0

    def tell_end(self) -> None:
        self.page.end()
        lane.ring(self.fds[2])

    def last_time(self) -> tuple[int, int, int]:
        return self.page.last_time()


@dataclass
class _RingEnd:
    page: Ring
    fds: tuple[int, int]  # page, doorbell
    seen: int = 0
    timed: int = 0
    first: int = 1  # no call before it is open

    def tell_end(self) -> None:
        self.page.end()
        lane.ring(self.fds[1])  # a system call orders the store before what is read from now on

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
        return ev.RingSnapshot(put[-1].call if put else self.first - 1, self.page.taken, calls, ready)


class LanePages:
    def __init__(self) -> None:
        self._ends: dict[int, _End | _RingEnd] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, number: int) -> bool:
        return number in self._ends

    def add(self, number: int, fds: list[int], *, is_ring: bool = False) -> None:
        """Take a lane's descriptors over. Raises ProtocolError; then they are still the caller's."""
        if len(fds) != (2 if is_ring else 3):
            raise ProtocolError(f"add_lane carries three descriptors, two for a GPU; got {len(fds)}")
        if number in self._ends:
            raise ProtocolError(f"lane {number} is open already")
        for doorbell in fds[1:]:
            lane.check_doorbell(doorbell)
        if is_ring:
            self._ends[number] = _RingEnd(Ring(fds[0]), (fds[0], fds[1]))
        else:
            memory.check_memfd(fds[0], memory.PAGE_BYTES)
            self._ends[number] = _End(lane.Page(fds[0]), (fds[0], fds[1], fds[2]))

    def fds(self, number: int) -> tuple[int, ...]:
        return self._ends[number].fds

    def revoke(self, number: int, epoch: int) -> None:
        """A lane that its client has not opened yet has nothing to revoke: it learns the epoch when it opens."""
        end = self._ends.get(number)
        if end is not None:
            end.page.revoke(epoch)

    def has_ended(self, number: int, call: int) -> bool:
        """Whether a call of a lane is over; the broker itself looks after those of rings. Raises ProtocolError when the
        worker gave it an end that makes no sense."""
        end = self._ends.get(number)
        return not isinstance(end, _End) or end.page.get_end(call) is not None

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

    def wake(self, number: int) -> None:
        """Ring for a client that may have left before it did."""
        end = self._ends.get(number)
        if isinstance(end, _RingEnd):
            lane.ring(end.fds[1])

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
            end.page.close()
            for fd in end.fds:
                os.close(fd)

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
