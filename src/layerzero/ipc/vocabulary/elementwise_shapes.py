"""Shape functions of ops that work element by element, and of cat. As ipc/vocabulary/shapes.py, which has them all."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.ipc.vocabulary.ops import CAST_DTYPES
from layerzero.ipc.vocabulary.shape_checks import (
    Attrs,
    Inputs,
    Output,
    Shape,
    broadcast,
    choice,
    integer,
    least_ndim,
    refuse,
    required,
    same_dtype,
)
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec


def range_of(dtype: str) -> tuple[int, int]:
    """The least and the greatest number of an integer dtype."""
    bits = 8 * TensorSpec.contiguous(dtype, ()).itemsize
    return (0, (1 << bits) - 1) if dtype[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _pair(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, other = required(inputs, 2)
    return ((_numeric(op, (x, other), ("x", "other")), broadcast(op, x.shape, other.shape)),)


def _clamp(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    dtype = _numeric(op, (x,), ("x",))
    if attrs["min"] is None and attrs["max"] is None:
        refuse(op, "min and max are None", "one of them, or both")
    for name in ("min", "max"):
        value = attrs[name]
        if value is None:
            continue
        if dtype not in FLOAT_DTYPES:
            integer(op, attrs, name, *range_of(dtype))
        elif type(value) is not float or value != value or value in (float("inf"), -float("inf")):
            refuse(op, f"{name} is {value!r:.80}", "a finite float, or None")
    return ((dtype, x.shape),)


def _where(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    condition, x, other = required(inputs, 3)
    if condition.dtype != "bool":
        refuse(op, f"condition is {condition.dtype}", "bool")
    dtype = same_dtype(op, (x, other), ("x", "other"))
    return ((dtype, broadcast(op, condition.shape, broadcast(op, x.shape, other.shape))),)


def _cat(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    required(inputs, 1)
    specs = [spec for spec in inputs if spec is not None]
    if any(spec is not None for spec in inputs[len(specs) :]):
        refuse(op, "a tensor is left out before another", "those that are given, first")
    names = [f"t{n}" for n in range(len(specs))]
    dtype = same_dtype(op, specs, names)
    least_ndim(op, "t0", specs[0], 1)
    dim = integer(op, attrs, "dim", 0, specs[0].ndim - 1)
    rest = [_without(spec.shape, dim) for spec in specs]
    for name, spec, its in zip(names, specs, rest, strict=True):
        if spec.ndim != specs[0].ndim or its != rest[0]:
            refuse(op, f"{name} has shape {list(spec.shape)} and t0 {list(specs[0].shape)}", f"equal but for {dim}")
    shape = list(specs[0].shape)
    shape[dim] = sum(spec.shape[dim] for spec in specs)
    return ((dtype, tuple(shape)),)


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _cast(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    if x.dtype not in CAST_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(CAST_DTYPES))
    return ((choice(op, attrs, "dtype", CAST_DTYPES), x.shape),)


def _numeric(op: str, inputs: Inputs, names: tuple[str, ...]) -> str:
    dtype = same_dtype(op, inputs, names)
    if dtype == "bool" or dtype not in CAST_DTYPES:
        refuse(op, f"{names[0]} is {dtype}", ", ".join(CAST_DTYPES[1:]))
    return dtype


ELEMENTWISE: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "add": _pair,
    "mul": _pair,
    "clamp": _clamp,
    "where": _where,
    "cat": _cat,
    "cast": _cast,
}
