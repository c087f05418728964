"""Plans of ops that work element by element, and of cat. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from numbers import Integral

from layerzero.client.planning.checks import Shape, choice, finite, fresh, number, refuse, same_dtype
from layerzero.client.planning.plans import Plan, Scalar, remember, same_shape
from layerzero.ipc.vocabulary.elementwise_shapes import range_of
from layerzero.ipc.vocabulary.ops import CAST_DTYPES
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec


@remember
def plan_add(x: TensorSpec, other: TensorSpec) -> Plan:
    """torch.add."""
    return _pair("add", x, other)


@remember
def plan_mul(x: TensorSpec, other: TensorSpec) -> Plan:
    """torch.mul."""
    return _pair("mul", x, other)


def _pair(op: str, x: TensorSpec, other: TensorSpec) -> Plan:
    same_dtype(op, x=x, other=other)
    _numeric(op, x)
    result = fresh(op, x.dtype, _broadcast(op, x=x, other=other))
    return Plan(op, (x, other), {}, (result,), (result,))


@remember
def plan_clamp(x: TensorSpec, min: float | None = None, max: float | None = None) -> Plan:  # torch's names
    """torch.clamp by numbers."""
    _numeric("clamp", x)
    if min is None and max is None:
        refuse("clamp", "min and max are None", "one of them, or both", "pass a number")
    return same_shape("clamp", (x,), {name: _bound(x, name, value) for name, value in (("min", min), ("max", max))})


def _bound(x: TensorSpec, name: str, value: float | None) -> Scalar:
    if value is None:
        return None
    if x.dtype in FLOAT_DTYPES:
        return finite("clamp", name, value, "leave it out")
    low, high = range_of(x.dtype)
    number("clamp", name, value)
    if not isinstance(value, Integral) or not low <= value <= high:
        refuse("clamp", f"{name} is {value!r}", f"an integer from {low} to {high}, since x is {x.dtype}", "convert one")
    return int(value)


@remember
def plan_where(condition: TensorSpec, x: TensorSpec, other: TensorSpec) -> Plan:
    """torch.where."""
    op = "where"
    if condition.dtype != "bool":
        refuse(op, f"condition is {condition.dtype}", "bool", "compare it, such as with != 0")
    same_dtype(op, x=x, other=other)
    result = fresh(op, x.dtype, _broadcast(op, condition=condition, x=x, other=other))
    return Plan(op, (condition, x, other), {}, (result,), (result,))


@remember
def plan_cat(t0: TensorSpec, *more: TensorSpec | None, dim: int = 0) -> Plan:
    """torch.cat."""
    op = "cat"
    last = max([n for n, spec in enumerate(more, 1) if spec is not None], default=0)
    given: dict[str, TensorSpec] = {"t0": t0}
    for n, spec in enumerate(more[:last], 1):
        if spec is None:
            refuse(op, f"t{n} is None and t{last} is not", "arrays one after the other", "leave out what is None")
        given[f"t{n}"] = spec
    same_dtype(op, **given)
    if isinstance(dim, bool) or not isinstance(dim, Integral) or not -t0.ndim <= dim < t0.ndim:
        allowed = f"{-t0.ndim} to {t0.ndim - 1}" if t0.ndim else "arrays of 1 or more dimensions"
        refuse(op, f"dim is {dim!r} for shape {list(t0.shape)}", allowed, "pass one of them")
    dim = int(dim) % t0.ndim
    for name, spec in given.items():
        if spec.ndim != t0.ndim or any(
            n != m for d, (n, m) in enumerate(zip(spec.shape, t0.shape, strict=True)) if d != dim
        ):
            refuse(
                op,
                f"{name} has shape {list(spec.shape)} and t0 {list(t0.shape)}",
                f"the same but for dimension {dim}",
                "reshape or expand one of them",
            )
    extent = sum(spec.shape[dim] for spec in given.values())
    result = fresh(op, t0.dtype, (*t0.shape[:dim], extent, *t0.shape[dim + 1 :]))
    return Plan(op, (t0, *more), {"dim": dim}, (result,), (result,))


@remember
def plan_cast(x: TensorSpec, dtype: str) -> Plan:
    """To another dtype."""
    op = "cast"
    choice(op, "dtype", dtype, CAST_DTYPES)
    if x.dtype not in CAST_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(CAST_DTYPES), "use dequantize for 8-bit floats and fp4")
    result = fresh(op, dtype, x.shape)
    return Plan(op, (x,), {"dtype": dtype}, (result,), (result,))


def _numeric(op: str, x: TensorSpec) -> None:
    if x.dtype == "bool" or x.dtype not in CAST_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(CAST_DTYPES[1:]), "convert it to an integer or float dtype")


def _broadcast(op: str, **specs: TensorSpec) -> Shape:
    """NumPy's and torch's rule."""
    ndim = max(spec.ndim for spec in specs.values())
    padded = [(1,) * (ndim - spec.ndim) + spec.shape for spec in specs.values()]
    found = [{n for n in extents if n != 1} for extents in zip(*padded, strict=True)]
    if any(len(extents) > 1 for extents in found):
        shapes = " and ".join(f"{name} has shape {list(spec.shape)}" for name, spec in specs.items())
        refuse(op, shapes, "equal extents, or 1, counted from the last", "reshape or expand one of them")
    return tuple(extents.pop() if extents else 1 for extents in found)
