"""Activations, element by element; those that silu, gelu and swiglu are not (ops.py). Any float16, bfloat16, float32 or
float64 array of any shape, to the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning.activation_plans import PLANS, plan_geglu, plan_reglu

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def relu(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """max(x, 0). Source: Nair and Hinton 2010."""
    return perform(Request("relu", (input,), {}, PLANS["relu"], out, backend, timeout_s))


def sigmoid(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """1 / (1 + exp(-x))."""
    return perform(Request("sigmoid", (input,), {}, PLANS["sigmoid"], out, backend, timeout_s))


def tanh(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """(exp(x) - exp(-x)) / (exp(x) + exp(-x))."""
    return perform(Request("tanh", (input,), {}, PLANS["tanh"], out, backend, timeout_s))


def quick_gelu(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """x / (1 + exp(-1.702 x)), an approximation of gelu. Source: Hendrycks and Gimpel 2016, section 2."""
    return perform(Request("quick_gelu", (input,), {}, PLANS["quick_gelu"], out, backend, timeout_s))


def hardswish(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """x min(max(x + 3, 0), 6) / 6. Source: Howard et al. 2019, section 5.2."""
    return perform(Request("hardswish", (input,), {}, PLANS["hardswish"], out, backend, timeout_s))


def mish(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """x tanh(log(1 + exp(x))). Source: Misra 2019, eq. 1."""
    return perform(Request("mish", (input,), {}, PLANS["mish"], out, backend, timeout_s))


def geglu(
    gate: ArrayT,
    up: AnyArray,
    approximate: str = "none",
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """gelu(gate, approximate) * up; equal shapes. Source: Shazeer 2020, eq. 5."""
    params = {"approximate": approximate}
    return perform(Request("geglu", (gate, up), params, plan_geglu, out, backend, timeout_s))


def reglu(
    gate: ArrayT, up: AnyArray, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """relu(gate) * up; equal shapes. Source: Shazeer 2020, eq. 5."""
    return perform(Request("reglu", (gate, up), {}, plan_reglu, out, backend, timeout_s))
