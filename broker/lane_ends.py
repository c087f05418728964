"""The broker's hold on express lanes: it can take their leases back, end them and see how many calls they carried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from layerzero.broker import events as ev
from layerzero.ipc import lane, memory
from layerzero.ipc.errors import ProtocolError

MAX_CALLS = 1 << 32  # that a worker may claim to have run between two looks


@dataclass
class _End:
    page: lane.Page
    fds: tuple[int, int, int]  # page, doorbell, answer bell
    seen: int = 0


class LaneEnds:
    def __init__(self) -> None:
        self._ends: dict[int, _End] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, number: int) -> bool:
        return number in self._ends

    def add(self, number: int, fds: list[int]) -> None:
        """Take a lane's descriptors over. Raises ProtocolError; then they are still the caller's."""
        if len(fds) != 3:
            raise ProtocolError(f"add_lane carries three descriptors, got {len(fds)}")
        if number in self._ends:
            raise ProtocolError(f"lane {number} is open already")
        page, doorbell, answer = fds
        memory.check_memfd(page, memory.PAGE_BYTES)
        lane.check_doorbell(doorbell)
        lane.check_doorbell(answer)
        self._ends[number] = _End(lane.Page(page), (page, doorbell, answer))

    def fds(self, number: int) -> tuple[int, int, int]:
        return self._ends[number].fds

    def revoke(self, number: int, epoch: int) -> None:
        """A lane that its client has not opened yet has nothing to revoke: it learns the epoch when it opens."""
        end = self._ends.get(number)
        if end is not None:
            end.page.revoke(epoch)

    def has_ended(self, number: int, call: int) -> bool:
        """Whether a call of a lane is over. Raises ProtocolError when the worker gave it an end that makes no sense."""
        end = self._ends.get(number)
        return end is None or end.page.get_end(call) is not None

    def end(self, number: int) -> None:
        """Tell the client that the worker is gone, and let go."""
        end = self._ends.get(number)
        if end is not None:
            end.page.end()
            lane.ring(end.fds[2])
            self.drop(number)

    def drop(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None:
            end.page.close()
            for fd in end.fds:
                os.close(fd)

    def seen(self) -> Iterator[ev.LaneSeen]:
        """What lanes carried since the last look."""
        for number, end in self._ends.items():
            call, plan, kernel_ns = end.page.last_time()
            calls = call - end.seen
            if 0 < calls < MAX_CALLS:
                end.seen = call
                yield ev.LaneSeen(number, calls, plan, kernel_ns)

    def close(self) -> None:
        for number in list(self._ends):
            self.drop(number)
