"""Records of which there are dozens of kinds, in modules that every process imports: dataclasses, quickly defined.

A frozen dataclass compiles seven functions of its own, which takes a millisecond; one of these compiles one, in a fifth
of that. For the messages and the core's events and actions it is 60 ms of a broker's start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_):
        """typing's, which Python has since 3.11."""
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a record: with slots, and frozen to the type checker, which reports every assignment to a field.

    Not while it runs: a frozen dataclass takes 2 to 5 us to make where this takes 0.6, each call makes four of them in
    the broker's core, and the core spends 18 us on a call.
    """
    return dataclass(slots=True, eq=False, repr=False)(_with_shared(cls))


@dataclass_transform(eq_default=False, frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def named_record(cls: type[T]) -> type[T]:
    """The same with fields that are given by name, and without slots."""
    return dataclass(kw_only=True, eq=False, repr=False)(_with_shared(cls))


def _with_shared(cls: type[T]) -> type[T]:
    """What dataclass() would write for each class anew."""
    for name, method in (("__eq__", _equals), ("__repr__", _show), ("__hash__", None)):
        setattr(cls, name, method)
    return cls


def _values(record: Any) -> tuple[Any, ...]:
    return tuple(getattr(record, one.name) for one in fields(record))


def _equals(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _show(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))
    return f"{type(self).__qualname__}({', '.join(shown)})"
