"""Records that nobody changes after they are made: what goes into the broker's core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def plain(cls: type[T]) -> type[T]:
    """A dataclass with slots that is frozen to the type checker, which reports every assignment to a field.

    Not while it runs: a frozen dataclass takes 2 to 5 us to make where this takes 0.6, each call makes four of them,
    and the core spends 18 us on a call.
    """
    return dataclass(slots=True)(cls)
