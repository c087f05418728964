"""What ops mean that work element by element, and cat. As workers/certify/reference.py, which has them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES
from layerzero.workers.certify.values import Attrs, Shape, Values, broadcast_shape, broadcast_value, given


def _by_elements(function: Callable[..., Any]) -> Callable[[Sequence[Values | None], Attrs], Values]:
    """Of the elements at each place, with broadcasting."""

    def op(inputs: Sequence[Values | None], _: Attrs) -> Values:
        tensors = given(inputs)
        shape: Shape = ()
        for values in tensors:
            shape = broadcast_shape(shape, values.shape)
        places = itertools.product(*map(range, shape))
        return Values(shape, [function(*(broadcast_value(one, place) for one in tensors)) for place in places])

    return op


def clamp(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    low = -math.inf if attrs["min"] is None else attrs["min"]
    high = math.inf if attrs["max"] is None else attrs["max"]
    return Values(x.shape, [min(max(v, low), high) for v in x.flat])


def cat(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Runs of each tensor in turn: all that lies below one place of the dimensions before."""
    tensors, dim = given(inputs), attrs["dim"]
    runs = [math.prod(values.shape[dim:]) for values in tensors]
    out: list[Any] = []
    for n in range(math.prod(tensors[0].shape[:dim])):
        for values, run in zip(tensors, runs, strict=True):
            out += values.flat[n * run : (n + 1) * run]
    shape = list(tensors[0].shape)
    shape[dim] = sum(values.shape[dim] for values in tensors)
    return Values(tuple(shape), out)


def cast(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Integers are wrapped by the caller, as everywhere."""
    (x,) = given(inputs)
    dtype = attrs["dtype"]
    convert: Callable[[Any], Any] = float if dtype in FLOAT_DTYPES else bool if dtype == "bool" else math.trunc
    return Values(x.shape, [convert(v) for v in x.flat])


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values]] = {
    "add": _by_elements(lambda a, b: a + b),
    "mul": _by_elements(lambda a, b: a * b),
    "clamp": clamp,
    "where": _by_elements(lambda c, a, b: a if c else b),
    "cat": cat,
    "cast": cast,
}
