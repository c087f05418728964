"""What a class shows: the names that calls may use, as the program finds them here or a worker tells them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import ProtocolError

MAX_NAMES = 4096
# Bits of a name. STREAM: a generator; OF_CLASS: without an object; COROUTINE: calls are awaited.
CALLABLE, STREAM, OF_CLASS, PROPERTY, COROUTINE = 1, 2, 4, 8, 16
ALL = CALLABLE | STREAM | OF_CLASS | PROPERTY | COROUTINE
OPERATORS = frozenset({"__call__", "__len__", "__bool__", "__getitem__", "__setitem__", "__delitem__", "__contains__"})
CONTEXT = frozenset({"__enter__", "__exit__"})
SPECIAL = OPERATORS | CONTEXT | {"__iter__"}


@dataclass(frozen=True)
class Surface:
    """`names`: the public ones with their bits; `special`: those of SPECIAL that the class defines."""

    names: Mapping[str, int]
    special: frozenset[str]

    def is_method(self, name: str) -> bool:
        return bool(self.names.get(name, 0) & CALLABLE)

    def to_tree(self) -> list[Any]:
        return [dict(self.names), sorted(self.special)]

    @classmethod
    def from_tree(cls, tree: Any) -> Surface:
        """Raises ProtocolError."""
        match tree:
            case [dict(names), list(special)] if len(names) <= MAX_NAMES and len(special) <= len(SPECIAL):
                is_good = all(type(one) is str and one.isidentifier() and one[0] != "_" for one in names)
                is_good = is_good and all(type(bits) is int and not bits & ~ALL for bits in names.values())
                if is_good and all(type(one) is str and one in SPECIAL for one in special):
                    return cls(names, frozenset(special))
        raise ProtocolError("no names of a class")


def surface_of(cls: type) -> Surface:
    """As the class defines it; nothing of its own code runs."""
    names = {name: _bits(value) for name, value in reversed(list(_public(cls)))}  # of a base last, so first here
    special = {name for name in SPECIAL if _defined(cls, name) is not None}
    return Surface(dict(sorted(names.items())[:MAX_NAMES]), frozenset(special))


def is_stream(function: Any) -> bool:
    """Whether its results are to be had one by one."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def is_coroutine(function: Any) -> bool:
    """Whether calls of it are awaited."""
    return inspect.iscoroutinefunction(function)


def _defined(cls: type, name: str) -> Any:
    """What a class or a base of it has under a name, its metaclass aside; None for nothing."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if not name.startswith("_") and name.isidentifier():
                yield name, value


def _bits(value: Any) -> int:
    is_own = isinstance(value, (staticmethod, classmethod))
    function = value.__func__ if is_own else value
    if isinstance(function, functools.partialmethod):
        return CALLABLE
    if callable(function) and not isinstance(function, type):
        kind = STREAM if is_stream(function) else COROUTINE if is_coroutine(function) else 0
        return CALLABLE | (OF_CLASS if is_own else 0) | kind
    is_property = hasattr(type(value), "__get__") and not isinstance(value, type)
    return PROPERTY if is_property else 0
