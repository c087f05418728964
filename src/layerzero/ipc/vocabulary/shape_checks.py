"""What several shape functions want of tensors and attributes. Each raises InvalidArgument, which names what does not
fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

Shape = tuple[int, ...]
Output = tuple[str, Shape]  # dtype and shape
Inputs = Sequence["TensorSpec | None"]
Attrs = Mapping[str, Any]

INDEX_DTYPES = ("int32", "int64")
MAX_TEXT = 256  # characters of an attribute


def refuse(op: str, found: str, allowed: str) -> NoReturn:
    raise InvalidArgument(f"{op}: {found}; allowed: {allowed}")


def required(inputs: Inputs, count: int) -> list[TensorSpec]:
    """The first `count` inputs, which a call cannot lack."""
    specs = [spec for spec in inputs[:count] if spec is not None]
    if len(specs) != count:
        raise InvalidArgument("a required tensor is missing")
    return specs


def same_dtype(op: str, inputs: Sequence[TensorSpec | None], names: Sequence[str]) -> str:
    """The one dtype of the first inputs, of those that are given."""
    dtypes = {name: spec.dtype for name, spec in zip(names, inputs, strict=False) if spec is not None}
    if len(set(dtypes.values())) > 1:
        refuse(op, ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items()), "one dtype for all")
    return next(iter(dtypes.values()))


def float_dtype(op: str, inputs: Sequence[TensorSpec | None], names: Sequence[str]) -> str:
    dtype = same_dtype(op, inputs, names)
    if dtype not in FLOAT_DTYPES:
        refuse(op, f"{names[0]} is {dtype}", ", ".join(sorted(FLOAT_DTYPES)))
    return dtype


def of_ndim(op: str, name: str, spec: TensorSpec, allowed: int) -> None:
    if len(spec.shape) != allowed:
        refuse(op, f"{name} has shape {list(spec.shape)}", f"{allowed} dimensions")


def least_ndim(op: str, name: str, spec: TensorSpec, least: int) -> None:
    if len(spec.shape) < least:
        refuse(op, f"{name} has shape {list(spec.shape)}", f"at least {least} dimensions")


def equal(op: str, what: str, **extents: object) -> None:
    if len(set(extents.values())) > 1:
        refuse(op, ", ".join(f"{name} has {what} {extent}" for name, extent in extents.items()), "equal ones")


def grouped_heads(op: str, q: int, k: int) -> None:
    if q != k and (k == 0 or q % k):
        refuse(op, f"{q} query heads and {k} key heads", "a multiple of the key heads")


def indices(op: str, name: str, spec: TensorSpec, ndim: int, dtypes: Sequence[str] = ("int32",)) -> None:
    if spec.dtype not in dtypes:
        refuse(op, f"{name} is {spec.dtype}", " or ".join(dtypes))
    of_ndim(op, name, spec, ndim)


def flag(op: str, attrs: Mapping[str, Any], name: str) -> bool:
    value = attrs[name]
    if type(value) is not bool:
        refuse(op, f"{name} is {value!r:.80}", "True or False")
    return value


def number(op: str, attrs: Mapping[str, Any], name: str, least: float = -math.inf) -> None:
    value = attrs[name]
    if type(value) is not float or not math.isfinite(value) or value < least:
        refuse(op, f"{name} is {value!r:.80}", f"a finite float{'' if least == -math.inf else f' from {least} on'}")


def integer(op: str, attrs: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = attrs[name]
    if type(value) is not int or not least <= value <= most:
        refuse(op, f"{name} is {value!r:.80}", f"an integer from {least} to {most}")
    return value


def choice(op: str, attrs: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    value = attrs[name]
    if type(value) is not str or value not in allowed:
        refuse(op, f"{name} is {value!r:.80}", " or ".join(allowed))
    return value


def short_text(op: str, attrs: Mapping[str, Any], name: str) -> None:
    value = attrs[name]
    if type(value) is not str or len(value) > MAX_TEXT:
        refuse(op, f"{name} is {value!r:.80}", f"a text of at most {MAX_TEXT} characters")


def broadcast(op: str, a: Shape, b: Shape) -> Shape:
    """NumPy's rule."""
    ndim = max(len(a), len(b))
    a, b = (1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        refuse(op, f"leading dimensions {list(a)} and {list(b)}", "equal extents, or 1")
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def scale(op: str, name: str, spec: TensorSpec, shape: Shape) -> None:
    """Of numbers of this shape: extents of 1 or theirs, the last a divisor of their last."""
    if spec.dtype != "float32":
        refuse(op, f"{name} is {spec.dtype}", "float32")
    of_ndim(op, name, spec, len(shape))
    is_fit = all(n in (1, wanted) for n, wanted in zip(spec.shape[:-1], shape[:-1], strict=True))
    if not is_fit or not spec.shape[-1] or shape[-1] % spec.shape[-1]:
        refuse(op, f"{name} has shape {list(spec.shape)}", f"1 or {list(shape)}, and last a divisor of {shape[-1]}")
