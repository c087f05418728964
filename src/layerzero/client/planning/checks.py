"""What client/planning/plans.py and client/planning/token_plans.py check of an op's arguments. Each raises
InvalidArgument, which names the value, what is allowed and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NoReturn

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, MAX_NBYTES, MAX_NDIM, TensorSpec

Shape = tuple[int, ...]


def refuse(op: str, found: str, allowed: str, remedy: str) -> NoReturn:
    raise InvalidArgument(f"{op}: {found}; allowed: {allowed}; {remedy}")


def listed(names: Iterable[str], values: Iterable[object]) -> str:
    return ", ".join(f"{name} is {value}" for name, value in zip(names, values, strict=True))


def flag(op: str, name: str, value: object) -> bool:
    if not isinstance(value, bool) and type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, bool):
        refuse(op, f"{name} is {value!r}", "True or False", "pass a bool")
    return value


def choice(op: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        refuse(op, f"{name} is {value!r}", " or ".join(map(repr, allowed)), "pass one of them")


def number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(op, f"{name} is {value!r}", "a number", "pass a float")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite(op: str, name: str, value: object, otherwise: str) -> float:
    found = number(op, name, value)
    if not math.isfinite(found):
        refuse(op, f"{name} is {value!r}", "a finite number", f"pass one, or {otherwise}")
    return found


def attention_scale(op: str, scale: object, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0  # nothing to scale in a head of size 0
    return finite(op, "scale", scale, "None for 1/sqrt(head_dim)")


def epsilon(op: str, value: object) -> float:
    eps = finite(op, "eps", value, "leave it out")
    if eps < 0.0:
        refuse(op, f"eps is {value!r}", "0.0 or more", "pass a small positive number such as 1e-5")
    return eps


def floating(op: str, name: str, spec: TensorSpec) -> None:
    if spec.dtype not in FLOAT_DTYPES:
        refuse(op, f"{name} is {spec.dtype}", ", ".join(sorted(FLOAT_DTYPES)), "convert it to float32")


def same_dtype(op: str, **specs: TensorSpec | None) -> None:
    given = {name: spec.dtype for name, spec in specs.items() if spec is not None}
    first = next(iter(given))
    if any(dtype != given[first] for dtype in given.values()):
        refuse(
            op,
            listed(given, given.values()),
            "one dtype for all",
            f"convert them to {given[first]}, the dtype of {first}",
        )


def same_float_dtype(op: str, **specs: TensorSpec | None) -> None:
    first, spec = next(iter(specs.items()))
    assert spec is not None
    floating(op, first, spec)
    same_dtype(op, **specs)


def extents(op: str, shape: Any) -> Shape:
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        dtype = getattr(shape, "dtype", None)
        found = f"normalized_shape is {repr(shape)[:40] if dtype is None else f'an array of {dtype}'}"
        refuse(op, found, "a tuple of integers", "pass (n,) for the last dimension of size n, and weights as weight=")
    return shape if type(shape) is tuple else tuple(shape)


def normalized(op: str, x: TensorSpec, shape: Shape, **params: TensorSpec | None) -> int:
    """How many trailing dimensions `shape` covers, checked against x and the parameters."""
    ndim = len(shape)
    if ndim == 0 or x.shape[-ndim:] != shape:
        refuse(
            op,
            f"normalized_shape is {list(shape)} and x has shape {list(x.shape)}",
            "one or more of x's last dimensions",
            f"pass {list(x.shape[-1:])} for the last one" if x.ndim else "unsqueeze x",
        )
    for name, spec in params.items():
        if spec is not None and spec.shape != shape:
            refuse(op, f"{name} has shape {list(spec.shape)}", f"normalized_shape, {list(shape)}", "reshape it")
    return ndim


def broadcast(op: str, a: Shape, b: Shape) -> Shape:
    """NumPy's and torch's rule for leading dimensions."""
    ndim = max(len(a), len(b))
    a, b = (1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        refuse(op, f"leading dimensions {list(a)} and {list(b)}", "equal extents, or 1", "expand or index one of them")
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def fresh(op: str, dtype: str, shape: Shape) -> TensorSpec:
    """Row-major memory for a result."""
    if len(shape) > MAX_NDIM:
        refuse(op, f"the result has {len(shape)} dimensions", f"at most {MAX_NDIM}", "flatten some of them")
    spec = TensorSpec.contiguous(dtype, shape)
    if spec.span_bytes > MAX_NBYTES:  # broadcasting can ask for any size
        refuse(op, f"the result {spec} has {spec.span_bytes} bytes", f"at most {MAX_NBYTES}", "split the call")
    return spec
