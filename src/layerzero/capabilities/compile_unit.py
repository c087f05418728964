"""Compile units: which calls of a kernel one compilation serves. A kernel's descriptor says in what such calls agree
(`compiled_for`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from layerzero.ipc.vocabulary.ops import OPS, heads
from layerzero.ipc.vocabulary.signature import CallSignature
from layerzero.ipc.vocabulary.tensors import TensorSpec

Facet = Literal["dtypes", "attrs", "heads", "head_dims", "row", "steps", "shapes", "strides"]
EXACT: tuple[Facet, ...] = ("dtypes", "shapes", "strides", "attrs")
_STEP = 16  # Triton compiles anew where an integer stops or starts being a multiple of it, being 1, or fitting 32 bits


class Unit(NamedTuple):
    """One kernel, and the calls that one compilation of it serves, as `unit_of` describes them."""

    kernel_id: str
    calls: str


def unit_of(kernel_id: str, facets: Sequence[Facet] | None, call: CallSignature, sm_version: int | None = None) -> Unit:
    """What a kernel is compiled for when it is compiled for this call on a GPU of this compute capability. Its calls
    are described as in "sm_90 dtypes=bfloat16,bfloat16,bfloat16,-,bfloat16 head_dims=128,128". `facets`: compiled_for
    of its descriptor."""
    facets = EXACT if facets is None else facets
    words = [] if sm_version is None else [f"sm_{sm_version}"]
    words += [f"{facet}={_FACETS[facet](call)}" for facet in facets]
    if any(spec is not None and not spec.numel for spec in _tensors(call)):
        words.append("empty")  # it may end before it compiles anything
    return Unit(kernel_id, " ".join(words) or "any call")


def _tensors(call: CallSignature) -> list[TensorSpec | None]:
    return [*call.inputs, *call.outputs]


def _each(call: CallSignature, describe: Callable[[TensorSpec], str]) -> str:
    """A word for each tensor, "-" for one that is left out."""
    return ",".join("-" if spec is None else describe(spec) for spec in _tensors(call))


def _joined(numbers: Sequence[object]) -> str:
    return "x".join(map(str, numbers))


def _attrs(call: CallSignature) -> str:
    return ",".join(f"{name}:{call.attrs[name]}" for name in sorted(call.attrs))


def _heads(call: CallSignature) -> str:
    found = heads(call.op, _given(call))
    return "-" if found is None else f"{found.query},{found.key}"


def _head_dims(call: CallSignature) -> str:
    found = heads(call.op, _given(call))
    return "-" if found is None else ",".join(str(extent) for _, extent in found.dims)


def _given(call: CallSignature) -> dict[str, TensorSpec]:
    pairs = zip(OPS[call.op].inputs, call.inputs, strict=True)
    return {name: spec for name, spec in pairs if spec is not None}


def _row(call: CallSignature) -> str:
    """Elements that are normalized together, or of the last dimension, of the first tensor; "-" where a client's call
    makes no sense, which no kernel takes anyway."""
    first, ndim = call.inputs[0], call.attrs.get("ndim", 1)
    if first is None or not isinstance(ndim, int):
        return "-"
    return str(math.prod(first.shape[max(first.ndim - ndim, 0) :]))


def _steps(call: CallSignature) -> str:
    return _each(call, lambda spec: _joined([_step(n) for n in (*spec.shape, *spec.strides)]))


def _step(number: int) -> str:
    if number >> 31:
        return "wide"
    return str(number) if number < 2 else "n" if number % _STEP else str(_STEP)


_FACETS: dict[Facet, Callable[[CallSignature], str]] = {
    "dtypes": lambda call: _each(call, lambda spec: spec.dtype),
    "attrs": _attrs,
    "heads": _heads,
    "head_dims": _head_dims,
    "row": _row,
    "steps": _steps,
    "shapes": lambda call: _each(call, lambda spec: _joined(spec.shape)),
    "strides": lambda call: _each(call, lambda spec: _joined(spec.strides)),
}
assert set(_FACETS) == set(get_args(Facet))
