"""Objects of isolated classes in a worker: whose they are, and what is done with them (docs/functions.md)."""

from __future__ import annotations

import contextlib
import faulthandler
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Reference
from layerzero.ipc.functions.surface import SPECIAL

MAX_OBJECTS = 1024  # of a client


@dataclass(frozen=True)
class Held:
    value: Any
    code: Code  # of its class, or of the function that returned it


class Objects:
    """The objects of all clients. A reference is [nonce of this worker's start, id]: what another client or another
    start has given is found nowhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nonce = secrets.randbits(64)
        self._of: dict[int, dict[int, Held]] = {}

    @property
    def count(self) -> int:
        """Of all clients."""
        return sum(map(len, self._of.values()))

    def demand_room(self, client: int) -> None:
        """Raises InvalidArgument."""
        if len(self._of.get(client, ())) >= MAX_OBJECTS:
            text = f"{self._name} has {MAX_OBJECTS:,} objects of this program, the most that it keeps for one"
            raise InvalidArgument(f"{text}; close() some, or use them in with blocks")

    def add(self, client: int, held: Held) -> list[int]:
        """Its reference."""
        number = secrets.randbits(64)
        self._of.setdefault(client, {})[number] = held
        return [self._nonce, number]

    def find(self, client: int, reference: Any) -> Held | None:
        """Raises ProtocolError."""
        return self._of.get(client, {}).get(self._number(reference))

    def code_of(self, client: int, reference: Any) -> Code | None:
        """What it is of; None for one that is not there. Raises ProtocolError."""
        held = self.find(client, reference)
        return None if held is None else held.code

    def release(self, client: int, reference: Any) -> Held | None:
        """What is to be let go of. Raises ProtocolError; one that is not there is none."""
        return self._of.get(client, {}).pop(self._number(reference), None)

    def forget(self, client: int) -> Iterator[Held]:
        """All that a client has, to be let go of."""
        yield from self._of.pop(client, {}).values()

    def _number(self, reference: Any) -> int:
        """-1, which no object has, for one of another start."""
        nonce, number, _ = Reference.from_tree(reference)
        return number if nonce == self._nonce else -1


def demand_use(how: int, name: str, count: int) -> None:
    """`count`: of arguments. Raises ProtocolError for what no call may ask of an object."""
    is_special = how == frames.METHOD and name in SPECIAL
    if name.startswith("_") and not is_special:
        raise ProtocolError(f"{name:.80} is private")
    counts = {frames.METHOD: count, frames.GET: 0, frames.SET: 1, frames.ITSELF: 0}
    if counts.get(how) != count:
        raise ProtocolError(f"no use of an object is {how} with {count} arguments")


def use(value: Any, how: int, name: str, given: list[Any], named: dict[str, Any]) -> Any:
    """What a call that may be asks of an object. Raises what the object raises."""
    if how == frames.ITSELF:
        return value
    if how == frames.GET:
        return getattr(value, name)
    if how == frames.SET:
        setattr(value, name, given[0])
        return None
    if name == "__iter__":
        is_async = hasattr(type(value), "__aiter__") and not hasattr(type(value), "__iter__")
        return aiter(value) if is_async else iter(value)
    if name == "__enter__":
        found = type(value).__enter__(value)
        return [True, None] if found is value else [False, found]
    if name == "__exit__":
        return bool(type(value).__exit__(value, *_failure(given)))
    return getattr(value, name)(*given, **named)


def _failure(given: list[Any]) -> tuple[Any, Any, Any]:
    """What an `__exit__` is told: exceptions of the caller's come as their text."""
    if not given:
        return None, None, None
    error = RuntimeError(*given)
    return RuntimeError, error, None


def use_of(value: Any, how: int, name: str) -> Callable[..., Any]:
    """As `use`, as a function of the arguments."""
    return lambda *given, **named: use(value, how, name, list(given), named)


@contextlib.contextmanager
def ended_within(limit_s: float) -> Iterator[None]:
    """This process ends where the block does not; its stacks are then in its log. It may hold the GIL."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
