"""A tensor in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Values:
    """A tensor: its shape and its elements in row-major order, or how to make those when they are first looked at."""

    shape: Shape
    _flat: Sequence[Any] | Callable[[], Sequence[Any]]

    @cached_property
    def flat(self) -> Sequence[Any]:
        return self._flat() if callable(self._flat) else self._flat


Attrs = Mapping[str, Any]


def given(inputs: Sequence[Values | None]) -> list[Values]:
    """Those that are not left out."""
    return [values for values in inputs if values is not None]


def rows_of(flat: Sequence[Any], width: int, first: int, count: int) -> list[Sequence[Any]]:
    """So many rows of a width, from the number `first` on."""
    return [flat[(first + i) * width : (first + i + 1) * width] for i in range(count)]
