"""A tensor in plain Python."""

from __future__ import annotations

import itertools
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


def row_of(values: Values, number: int) -> Sequence[Any]:
    """A row of the last dimension."""
    width = values.shape[-1]
    return values.flat[number * width : (number + 1) * width]


def rows_of(flat: Sequence[Any], width: int, first: int, count: int) -> list[Sequence[Any]]:
    """So many rows of a width, from the number `first` on."""
    return [flat[(first + i) * width : (first + i + 1) * width] for i in range(count)]


def broadcast_shape(one: Shape, other: Shape) -> Shape:
    pairs = itertools.zip_longest(reversed(one), reversed(other), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


def offset(shape: Shape, index: Sequence[int]) -> int:
    """The flat position of a broadcast index; extra leading dimensions of the index do not count."""
    place = 0
    for extent, i in zip(shape, index[len(index) - len(shape) :], strict=True):
        place = place * extent + (0 if extent == 1 else i)
    return place


def broadcast_value(values: Values, index: Sequence[int]) -> Any:
    return values.flat[offset(values.shape, index)]
