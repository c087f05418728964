"""Which memory holds what which call has made."""

from __future__ import annotations

import bisect
from typing import NamedTuple


class Written(NamedTuple):
    """A part of what a call has written, which begins at `origin`."""

    start: int
    stop: int
    call: int
    name: str
    origin: int


class MemoryMap:
    """Ranges of addresses, none of which overlap: the newest wins."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[Written] = []

    def find(self, address: int) -> Written | None:
        """What lies at an address."""
        at = bisect.bisect_right(self._starts, address) - 1
        found = self._ranges[at] if at >= 0 else None
        return found if found is not None and address < found.stop else None

    def write(self, start: int, nbytes: int, call: int, name: str) -> None:
        """From now on it is this result."""
        self.forget(start, nbytes)
        if nbytes:
            self._insert(Written(start, start + nbytes, call, name, start))

    def forget(self, start: int, nbytes: int) -> None:
        """From now on it is nobody's. What lies only partly in it keeps its other part."""
        stop = start + nbytes
        first = bisect.bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first].stop <= start:
            first += 1
        last = bisect.bisect_left(self._starts, stop)
        cut = self._ranges[first:last]
        del self._starts[first:last], self._ranges[first:last]
        for one in cut:
            if one.start < start:
                self._insert(one._replace(stop=start))
            if one.stop > stop:
                self._insert(one._replace(start=stop))

    def _insert(self, one: Written) -> None:
        at = bisect.bisect_left(self._starts, one.start)
        self._starts.insert(at, one.start)
        self._ranges.insert(at, one)
