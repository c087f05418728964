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

    def first(self, may_send: Callable[[Call], bool]) -> Call | None:
        """The oldest call of the first client whose oldest one may be sent."""
        return next((line[0] for line in self._lines.values() if may_send(line[0])), None)

    def serve(self, call: Call) -> None:
        """Remove a call that is sent now: the next turn is another client's."""
        line = self._lines.pop(call.client.number)
        line.remove(call)
        if line:
            self._lines[call.client.number] = line  # at the end

    def holds(self, number: int) -> bool:
        """Whether calls of this client wait."""
        return number in self._lines

    def remove(self, call: Call) -> None:
        """The turns stay as they are. Raises KeyError or ValueError when the call does not wait."""
        line = self._lines[call.client.number]
        line.remove(call)
        if not line:
            del self._lines[call.client.number]

    def __iter__(self) -> Iterator[Call]:
        return chain.from_iterable(self._lines.values())

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)
