"""Calls that come next when tensors grow, as a client says that they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_AHEAD, MAX_FIRST = 64, 1 << 20  # calls of one question, and how far ahead they begin


def numbers_of(params: Mapping[str, Any]) -> range:
    """Of the calls that `lift_ahead` is asked for. Raises InvalidArgument."""
    first, count = params.get("first", 1), params.get("count")
    if type(first) is not int or not 0 < first <= MAX_FIRST:
        raise InvalidArgument(f"lift_ahead takes `first` from 1 to {MAX_FIRST}, got {first!r:.40}")
    if type(count) is not int or not 0 < count <= MAX_AHEAD:
        raise InvalidArgument(f"lift_ahead needs `count`, 1 to {MAX_AHEAD}, got {count!r:.40}")
    return range(first, first + count)


def grown(base: CallSpec, grows: Any, n: int) -> CallSpec:
    """The call `n` steps further; `grows` as of `lift_ahead` (broker/queries/methods.py). Raises LayerZeroError for
    what is no call."""
    specs = [*base.inputs, *base.outputs]
    if not isinstance(grows, list) or len(grows) != len(specs):
        raise InvalidArgument(f"`grows` must be a list of {len(specs)}, one for each tensor")
    further = [None if spec is None else _grown_tensor(spec, more, n) for spec, more in zip(specs, grows, strict=True)]
    inputs, outputs = further[: len(base.inputs)], [spec for spec in further[len(base.inputs) :] if spec is not None]
    check_call(base.op, inputs, outputs, base.attrs)
    return replace(base, inputs=tuple(inputs), outputs=tuple(outputs))


def _grown_tensor(spec: TensorSpec, more: Any, n: int) -> TensorSpec:
    if more is None:
        return spec
    if not isinstance(more, list) or len(more) != 2 or any(not isinstance(one, list) for one in more):
        raise InvalidArgument("an entry of `grows` must be nothing, or [shape, strides]")
    parts = [spec.shape, spec.strides]
    if any(len(one) != spec.ndim or any(type(step) is not int for step in one) for one in more):
        raise InvalidArgument(f"an entry of `grows` must have {spec.ndim} whole numbers for shape and strides")
    shape, strides = (
        [a + n * b for a, b in zip(part, one, strict=True)] for part, one in zip(parts, more, strict=True)
    )
    return TensorSpec.from_wire([spec.dtype, shape, strides])
