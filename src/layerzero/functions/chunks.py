"""Maps of a function, and calls that cross as one: a chunk of the items of a map."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from layerzero.client.arrays.recognition import Array
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
MAX_OPEN, MAX_CHUNKS = 32, 3  # of a map
OF_CHUNK = -(-MAX_OPEN // MAX_CHUNKS)  # so many calls a chunk counts for
ALONE = "an array on a GPU is among the arguments of its chunk, each call of which crossed by itself"
OF_DEVICE = "results of calls with device= may be on a GPU, and each of them crossed by itself"
Results: TypeAlias = "tuple[list[Any], LayerZeroError | None]"


class ChunkCall(Call):
    """One message for a call with each tuple of arguments. Its result: those of the calls, up to the first that failed,
    and the error of that. It has the time of so many calls."""

    def __init__(self, owner: Owner, given: Arguments, items: Sequence[tuple[Any, ...]]) -> None:
        super().__init__(owner, given, items, {}, owner._options, f"{owner._label} ({len(items)} calls as one)")

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


class _OnGpuError(Exception):
    """An array on a GPU is among the arguments."""


class _OfChunk(Arguments):
    """Those of a chunk. One with an array on a GPU is none: a message lends few allocations there, and what a call
    returns of them has to be copied before the next one runs."""

    def _put_on_gpu(self, array: Array) -> NoReturn:
        raise _OnGpuError


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
                _note_items(exc, label, number + len(ahead))
                raise
        if not ahead:
            return
        try:
            result = ahead.popleft().result()
        except Exception as exc:
            _note_items(exc, label, number)
            raise
        yield result
        number += 1


def in_chunks(
    owner: Owner,
    size: int,
    calls: Iterator[tuple[Any, ...]],
    submit: Callable[..., FunctionFuture],
    demand_fit: Callable[[tuple[Any, ...]], None],
) -> Iterator[Any]:
    """As `each`, so many calls as one; those of a chunk with an array on a GPU are submitted. `demand_fit` raises
    InvalidArgument for arguments that do not fit."""
    parts = _parts(owner, size, calls, demand_fit)
    ahead: deque[tuple[FunctionFuture, int]] = deque()  # of how many calls; 0: of one that crosses by itself
    sent = number = 0
    while True:
        while (
            sum(OF_CHUNK if count else 1 for _, count in ahead) < MAX_OPEN and (part := next(parts, None)) is not None
        ):
            count = len(part.args) if isinstance(part, ChunkCall) else 0
            with _items(owner._label, sent, count or 1):
                if isinstance(part, ChunkCall):
                    part.send()
                ahead.append((FunctionFuture(part) if isinstance(part, ChunkCall) else submit(*part), count))
            sent += count or 1
        if not ahead:
            return
        future, count = ahead.popleft()
        with _items(owner._label, number, count or 1):
            results, error = future.result() if count else ([_alone(owner, future)], None)
        yield from results
        if error is not None:
            _note_items(error, owner._label, number + len(results))
            raise error
        number += count or 1


def _parts(
    owner: Owner, size: int, calls: Iterator[tuple[Any, ...]], demand_fit: Callable[[tuple[Any, ...]], None]
) -> Iterator[ChunkCall | tuple[Any, ...]]:
    """What is sent: chunks, and the arguments of single calls, which are not taken before they are. Raises
    InvalidArgument."""
    number = 0
    for first in calls:
        with _items(owner._label, number):
            demand_fit(first)
        if _given(owner, [first], number) is None:
            yield first
            number += 1
            continue
        items, start = [first, *itertools.islice(calls, size - 1)], number
        try:
            for args in items:
                demand_fit(args)
                number += 1
        except Exception as exc:
            _note_items(exc, owner._label, number)
            raise
        given = _given(owner, items, start)
        if given is None:
            yield from items
        else:
            yield ChunkCall(owner, given, items)


def _given(owner: Owner, items: list[tuple[Any, ...]], number: int) -> Arguments | None:
    """The arguments of a chunk, the first of which has this number; None where calls with arrays on a GPU, or results
    there, cross by themselves. Raises InvalidArgument."""
    if owner._options.device is not None:
        return None
    try:
        return _OfChunk(items, {}, owner._places.backends)
    except _OnGpuError:
        return None
    except InvalidArgument as exc:
        found = [n for n, args in enumerate(items, number) if len(items) == 1 or not _is_sendable(owner, args)]
        _note_items(exc, owner._label, *((found[0],) if found else (number, len(items))))
        raise


def _is_sendable(owner: Owner, args: tuple[Any, ...]) -> bool:
    try:
        _OfChunk([args], {}, owner._places.backends)
    except InvalidArgument:
        return False
    except _OnGpuError:
        pass
    return True


def _alone(owner: Owner, future: FunctionFuture) -> Any:
    """The result of a call that crossed by itself, which its report says."""
    try:
        return future.result()
    finally:
        if future.done():
            owner._last.alone = getattr(owner._last, "call", None)


def why_alone(owner: Owner, call: object) -> str:
    """Why this thread's last call did not cross with others of its chunk; empty where nobody wanted that."""
    if getattr(owner._last, "alone", None) is not call:
        return ""
    return ALONE if owner._options.device is None else OF_DEVICE


def demand_size(size: object, label: str, options: Options, *, is_plain: bool) -> int:
    """How many items cross as one. `is_plain`: neither a generator nor a coroutine function. Raises
    InvalidArgument."""
    if type(size) is not int or not 1 <= size <= MAX_SIZE:
        raise InvalidArgument(f"{label}.map: chunksize is {size!r:.40}; allowed: 1 to {MAX_SIZE:,}")
    if size > 1 and (not is_plain or options.keep or options.shapes is not None or options.shadow):
        text = "allowed: 1 for generators and coroutine functions, and with keep, shapes or shadow"
        raise InvalidArgument(f"{label}.map: chunksize is {size}; {text}")
    return size


@contextmanager
def _items(label: str, first: int, count: int = 1) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        _note_items(exc, label, first, count)
        raise


def _note_items(exc: Exception, label: str, first: int, count: int = 1) -> None:
    """Say of which items of a map an error is."""
    its = f"item {first}" if count == 1 else f"items {first} to {first + count - 1}"
    exc.add_note(f"in {its} of {label}.map" + ("" if count == 1 else ", one call"))
