"""Neighbours of a call: the same call with other extents, within ranges that are known to change no decision.

Equal extents of a call count as one *symbol*: they grow together, as the length of keys and values does. What a
neighbour differs in is the value of each symbol, and nothing else. Used by every process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES, MAX_NDIM, TensorSpec, contiguous_strides

MAX_SYMBOLS = 8
MAX_TENSORS = 16
CONSTANT = -1
VALUE_BYTES = 8  # of a symbol's value behind the references of a call, u64, little-endian
Specs: TypeAlias = Sequence[TensorSpec | None]


@dataclass(frozen=True)
class Neighbourhood:
    """`ranges`: the least and the greatest value of each symbol. `places`: for each input and output of the call, in
    order, the symbol that each of its dimensions has, or CONSTANT; None for a tensor that is left out."""

    ranges: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, ...] | None, ...]

    def values(self, specs: Specs) -> tuple[int, ...]:
        """Each symbol's value in these tensors, as its first place says. `apply` tells whether the others agree."""
        found = [0] * len(self.ranges)
        for spec, places in zip(specs, self.places, strict=True):
            if spec is not None and places is not None and len(places) == spec.ndim:
                for extent, symbol in zip(spec.shape, places, strict=True):
                    if symbol != CONSTANT and not found[symbol]:
                        found[symbol] = extent
        return tuple(found)

    def apply(self, base: Specs, values: Sequence[int]) -> tuple[TensorSpec | None, ...] | None:
        """The tensors of the neighbour of a call with tensors `base` whose symbols have these values; None for values
        out of range, for two symbols with one value, and where a view becomes dense: those are other kinds of calls."""
        if len(values) != len(self.ranges) or len(set(values)) != len(values):
            return None
        if not all(low <= value <= high for value, (low, high) in zip(values, self.ranges, strict=True)):
            return None
        found = tuple(
            None if spec is None or places is None else _resized(spec, places, values)
            for spec, places in zip(base, self.places, strict=True)
        )
        for one, its in zip(found, base, strict=True):
            if one is not its and one is not None and its is not None and one.is_contiguous != its.is_contiguous:
                return None  # a slice that has become all of its memory
        return found

    def to_wire(self) -> list[Any]:
        places = [None if its is None else list(its) for its in self.places]
        return [[list(its) for its in self.ranges], places]

    @classmethod
    def from_wire(cls, value: Any, base: Specs) -> Neighbourhood:
        """What another process says of a call with tensors `base`. Raises ProtocolError."""
        try:
            ranges, places = value
            made = cls(
                tuple((low, high) for low, high in ranges), tuple(None if p is None else tuple(p) for p in places)
            )
        except (TypeError, ValueError) as exc:
            raise ProtocolError(f"a neighbourhood must be [ranges, places], got {value!r:.200}") from exc
        if not 0 < len(made.ranges) <= MAX_SYMBOLS or len(made.places) != len(base) or len(base) > MAX_TENSORS:
            raise ProtocolError(f"a neighbourhood of {len(made.ranges)} symbols and {len(made.places)} tensors")
        for low, high in made.ranges:
            if type(low) is not int or type(high) is not int or not 0 < low <= high <= MAX_NBYTES:
                raise ProtocolError(f"a symbol ranges from {low!r:.40} to {high!r:.40}")
        known = range(CONSTANT, len(made.ranges))
        for spec, its in zip(base, made.places, strict=True):
            if (spec is None) != (its is None):
                raise ProtocolError("a neighbourhood has other tensors than its call")
            if spec is not None and its is not None:
                is_odd = len(its) != spec.ndim or any(type(n) is not int or n not in known for n in its)
                if is_odd or spec.ndim > MAX_NDIM:
                    raise ProtocolError(f"a neighbourhood has {its!r:.80} for {spec}")
        return made


def _resized(spec: TensorSpec, places: Sequence[int], values: Sequence[int]) -> TensorSpec:
    """The tensor with other extents: dense in the order of its dimensions where it was, else with the same strides. The
    very same where it has no symbol."""
    if max(places, default=CONSTANT) == CONSTANT:
        return spec
    shape = tuple(
        extent if symbol == CONSTANT else values[symbol] for extent, symbol in zip(spec.shape, places, strict=True)
    )
    if spec.strides == contiguous_strides(spec.shape):
        return TensorSpec(spec.dtype, shape, contiguous_strides(shape))
    order = sorted(range(spec.ndim), key=lambda dim: (-spec.strides[dim], dim))
    if _dense_strides(spec.shape, order) == spec.strides:
        return TensorSpec(spec.dtype, shape, _dense_strides(shape, order))
    return TensorSpec(spec.dtype, shape, spec.strides)


def _dense_strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, the first dimension of `order` outermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def pack_values(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def unpack_values(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // VALUE_BYTES}Q", data)


def check_sizes(specs: Specs) -> None:
    """Raises InvalidArgument for a tensor that is larger than any may be."""
    for spec in specs:
        if spec is not None and spec.span_bytes > MAX_NBYTES:
            raise InvalidArgument(f"tensor of {spec.span_bytes} bytes is above the limit of {MAX_NBYTES}")
