"""Calls that wait for one worker. Clients take turns, so that one with a thousand open calls delays each of another
client's by no more than one of its own; a client's own calls keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.broker.core.model import Call


class FairQueue:
    """A queue as `deque` is one, of calls."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Call]] = {}  # by client, the one whose turn it is first; none is empty

    def append(self, call: Call) -> None:
        self._lines.setdefault(call.client.number, deque()).append(call)

    def popleft(self) -> Call:
        """Raises StopIteration when nothing waits."""
        return self._take(next(iter(self._lines)))

    def take(self, may_send: Callable[[int], bool]) -> Call | None:
        """Of the first client, by its number, that may send one."""
        number = next(filter(may_send, self._lines), None)
        return None if number is None else self._take(number)

    def _take(self, number: int) -> Call:
        line = self._lines.pop(number)
        call = line.popleft()
        if line:
            self._lines[number] = line  # at the end
        return call

    def holds(self, number: int) -> bool:
        """Whether calls of this client wait."""
        return number in self._lines

    def remove(self, call: Call) -> None:
        """Raises KeyError or ValueError when it does not wait."""
        line = self._lines[call.client.number]
        line.remove(call)
        if not line:
            del self._lines[call.client.number]

    def clear(self) -> None:
        self._lines.clear()

    def __iter__(self) -> Iterator[Call]:
        return chain.from_iterable(self._lines.values())

    def __contains__(self, call: object) -> bool:
        return any(call is one for one in self)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)
