"""Maps of a function, and calls that cross as one: a chunk of the items of a map."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from layerzero.client.capsules.of_function import MANY
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call, Owner
from layerzero.functions.capsules import Asked
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.options import Options
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame

MAX_SIZE = 65_536
MAX_OPEN, MAX_CHUNKS = 32, 3  # on their way
Results: TypeAlias = "tuple[list[Any], LayerZeroError | None]"


class ChunkCall(Call):
    """One message for a call with each tuple of arguments. Its result: those of the calls, up to the first that failed,
    and the error of that. It has the time of so many calls."""

    def __init__(self, owner: Owner, items: Sequence[tuple[Any, ...]], options: Options) -> None:
        """Raises InvalidArgument."""
        given = Arguments(items, {}, owner._places.backends)
        if given.on_gpu is not None:
            raise InvalidArgument(f"{owner._label}.map: leave chunksize out: arrays on a GPU cross call by call")
        super().__init__(owner, given, items, {}, options, f"{owner._label} ({len(items)} calls as one)")

    def _frame(self, given: Arguments) -> Frame:
        return given.frame(frames.MANY, self.owner._places.tree(given.backends))

    def _asked(self) -> tuple[Sequence[Asked], str]:
        assert self.given is not None
        return [Asked(MANY, "", frames.NOTHING, self.given)], ""

    def _timeout_s(self) -> float:
        one_s = self.options.timeout_s
        return len(self.args) * (self._session.link.welcome.timeout_s if one_s is None else one_s)

    def _value_of(self, fallback: Callable[..., Any]) -> Results:
        return [fallback(*args) for args in self.args], None


def demand_size(size: object, label: str, options: Options, *, is_plain: bool) -> int:
    """How many items cross as one. `is_plain`: neither a generator nor a coroutine function. Raises
    InvalidArgument."""
    if type(size) is not int or not 1 <= size <= MAX_SIZE:
        raise InvalidArgument(f"{label}.map: chunksize is {size!r:.40}; allowed: 1 to {MAX_SIZE:,}")
    if size > 1 and (not is_plain or options.keep or options.shapes is not None or options.shadow):
        text = "allowed: 1 for generators and coroutine functions, and with keep, shapes or shadow"
        raise InvalidArgument(f"{label}.map: chunksize is {size}; {text}")
    return size


def each(submit: Callable[..., FunctionFuture], calls: Iterator[tuple[Any, ...]], label: str) -> Iterator[Any]:
    """Results of calls with these arguments, some of which are on their way ahead. An error says of which item it is,
    counted from 0."""
    ahead: deque[FunctionFuture] = deque()
    number = 0
    while True:
        while len(ahead) < MAX_OPEN and (items := list(itertools.islice(calls, 1))):
            try:
                ahead.append(submit(*items[0]))
            except Exception as exc:
                _note_item(exc, label, number + len(ahead))
                raise
        if not ahead:
            return
        try:
            result = ahead.popleft().result()
        except Exception as exc:
            _note_item(exc, label, number)
            raise
        yield result
        number += 1


def in_chunks(
    owner: Owner, size: int, calls: Iterator[tuple[Any, ...]], demand_fit: Callable[[Sequence[Any]], None]
) -> Iterator[Any]:
    """As `each`, so many calls as one. `demand_fit` raises InvalidArgument for arguments that do not fit."""
    ahead: deque[tuple[FunctionFuture, int]] = deque()
    sent = number = 0
    while True:
        while len(ahead) < MAX_CHUNKS and (items := list(itertools.islice(calls, size))):
            ahead.append((_sent(owner, items, sent, demand_fit), len(items)))
            sent += len(items)
        if not ahead:
            return
        future, count = ahead.popleft()
        try:
            results, error = future.result()
        except Exception as exc:
            _note_item(exc, owner._label, number, count)
            raise
        yield from results
        if error is not None:
            _note_item(error, owner._label, number + len(results))
            raise error
        number += count


def _sent(
    owner: Owner, items: Sequence[tuple[Any, ...]], first: int, demand_fit: Callable[[Sequence[Any]], None]
) -> FunctionFuture:
    number, count = first, 1
    try:
        for args in items:
            demand_fit(args)
            number += 1
        number, count = first, len(items)
        call = ChunkCall(owner, items, owner._options)
        call.send()
    except Exception as exc:
        _note_item(exc, owner._label, number, count)
        raise
    return FunctionFuture(call)


def _note_item(exc: Exception, label: str, first: int, count: int = 1) -> None:
    its = f"item {first}" if count == 1 else f"items {first} to {first + count - 1}"
    exc.add_note(f"in {its} of {label}.map" + ("" if count == 1 else ", one call"))
