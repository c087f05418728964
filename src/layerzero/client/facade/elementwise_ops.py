"""Ops that work element by element, with broadcasting, and cat. Between others of a plan or a program they keep what
those give in shared memory; by themselves a program's own library is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import elementwise_plans as plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def add(
    input: ArrayT,
    other: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input + other, of shapes that broadcast; one dtype for both, any but bool. Integers wrap. Source: torch.add."""
    return perform(Request("add", (input, other), {}, plans.plan_add, out, backend, timeout_s))


def mul(
    input: ArrayT,
    other: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input * other, of shapes that broadcast; one dtype for both, any but bool. Integers wrap. Source: torch.mul."""
    return perform(Request("mul", (input, other), {}, plans.plan_mul, out, backend, timeout_s))


def clamp(
    input: ArrayT,
    min: float | None = None,
    max: float | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Each element, but not below min and not above max; max counts where min is above it, and NaN stays.

    input: any dtype but bool. min, max: numbers, of an integer dtype integers that it has; one may be None. Source:
    torch.clamp.
    """
    params = {"min": min, "max": max}
    return perform(Request("clamp", (input,), params, plans.plan_clamp, out, backend, timeout_s))


def where(
    condition: AnyArray,
    input: ArrayT,
    other: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input where the condition holds, else other. condition: bool; input and other: of one dtype, any; shapes that
    broadcast. The result is of the kind of `condition`'s array. Source: torch.where."""
    return perform(Request("where", (condition, input, other), {}, plans.plan_where, out, backend, timeout_s))


def cat(
    t0: ArrayT,
    t1: AnyArray | None = None,
    t2: AnyArray | None = None,
    t3: AnyArray | None = None,
    t4: AnyArray | None = None,
    t5: AnyArray | None = None,
    t6: AnyArray | None = None,
    t7: AnyArray | None = None,
    *,
    dim: int = 0,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Up to eight arrays, one after the other along `dim`: cat(*arrays, dim=1).

    Shapes are equal but for that dimension; one dtype for all, any. dim: from -t0.ndim on. Source: torch.cat.
    """
    args = (t0, t1, t2, t3, t4, t5, t6, t7)
    return perform(Request("cat", args, {"dim": dim}, plans.plan_cat, out, backend, timeout_s))


def cast(
    input: ArrayT,
    dtype: str,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input in another dtype: "bool", "int8" to "int64", "uint8" to "uint64", "float16", "bfloat16", "float32" or
    "float64".

    Floats are rounded to the nearest, ties to even; to integers they are cut towards 0, and what the dtype does not
    have may become anything. Integers wrap. True is all but 0. Source: torch.Tensor.to.
    """
    return perform(Request("cast", (input,), {"dtype": dtype}, plans.plan_cast, out, backend, timeout_s))
