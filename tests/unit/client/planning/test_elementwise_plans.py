"""client/planning/elementwise_plans.py: what ops on each element refuse, and what they make of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from layerzero.client.planning.elementwise_plans import (
    plan_add,
    plan_cast,
    plan_cat,
    plan_clamp,
    plan_mul,
    plan_where,
)
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


LEFT_OUT = [None] * 6


@pytest.mark.parametrize(
    ("made", "attrs", "result"),
    [
        (plan_add(t(2, 1, 3), t(5, 3)), {}, t(2, 5, 3)),
        (plan_add(t(), t()), {}, t()),
        (plan_add(t(0, 1), t(4)), {}, t(0, 4)),
        (plan_mul(t(3, dtype="int8"), t(dtype="int8")), {}, t(3, dtype="int8")),
        (plan_clamp(t(3), -1, np.float64(2)), {"min": -1.0, "max": 2.0}, t(3)),
        (plan_clamp(t(3, dtype="uint8"), max=np.int64(255)), {"min": None, "max": 255}, t(3, dtype="uint8")),
        (plan_where(t(2, 1, dtype="bool"), t(3), t()), {}, t(2, 3)),
        (plan_where(t(dtype="bool"), t(dtype="bool"), t(4, dtype="bool")), {}, t(4, dtype="bool")),
        (plan_cat(t(2, 3), t(2, 1), *LEFT_OUT, dim=-1), {"dim": 1}, t(2, 4)),
        (plan_cat(t(2, 3), t(0, 3), *LEFT_OUT), {"dim": 0}, t(2, 3)),
        (plan_cat(*[t(1, dtype="bool")] * 8), {"dim": 0}, t(8, dtype="bool")),
        (plan_cast(t(2, 3), "bool"), {"dtype": "bool"}, t(2, 3, dtype="bool")),
    ],
)
def test_plan_is_what_the_broker_admits(made: Any, attrs: dict[str, Any], result: TensorSpec) -> None:
    assert {name: (value, type(value)) for name, value in made.attrs.items()} == {
        name: (value, type(value)) for name, value in attrs.items()
    }
    assert made.results == (result,)
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_add(t(2), t(3)), r"x has shape \[2\] and other has shape \[3\]; allowed: equal extents, or 1"),
        (lambda: plan_add(t(2), t(2, dtype="float64")), "x is float32, other is float64; allowed: one dtype"),
        (lambda: plan_mul(t(2, dtype="bool"), t(2, dtype="bool")), "x is bool; allowed: int8, .*; convert it"),
        (lambda: plan_mul(*[t(2, dtype="float8_e5m2")] * 2), "x is float8_e5m2; allowed: int8"),
        (lambda: plan_clamp(t(2)), "min and max are None; allowed: one of them, or both"),
        (lambda: plan_clamp(t(2), math.nan), "min is nan; allowed: a finite number"),
        (lambda: plan_clamp(t(2), "1"), "min is '1'; allowed: a number"),  # type: ignore[arg-type]
        (
            lambda: plan_clamp(t(2, dtype="int8"), 1.5),
            "min is 1.5; allowed: an integer from -128 to 127, since x is int8",
        ),
        (lambda: plan_clamp(t(2, dtype="uint8"), max=-1), "max is -1; allowed: an integer from 0 to 255"),
        (lambda: plan_where(t(2), t(2), t(2)), "condition is float32; allowed: bool; compare it"),
        (lambda: plan_where(t(2, dtype="bool"), t(3), t()), r"condition has shape \[2\] and x has shape \[3\]"),
        (lambda: plan_cat(t(2, 3), None, t(2, 3)), "t1 is None and t2 is not; allowed: arrays one after the other"),
        (lambda: plan_cat(t(2, 3), t(2)), r"t1 has shape \[2\] and t0 \[2, 3\]; allowed: the same but for dimension 0"),
        (lambda: plan_cat(t(2, 3), t(2, 4)), r"t1 has shape \[2, 4\] and t0 \[2, 3\]"),
        (lambda: plan_cat(t(2, 3), dim=2), r"dim is 2 for shape \[2, 3\]; allowed: -2 to 1"),
        (lambda: plan_cat(t(2, 3), dim=True), "dim is True"),
        (lambda: plan_cat(t(), t()), "allowed: arrays of 1 or more dimensions"),
        (lambda: plan_cat(t(2), t(2, dtype="int8")), "t0 is float32, t1 is int8; allowed: one dtype"),
        (lambda: plan_cast(t(2), "float8_e5m2"), "dtype is 'float8_e5m2'; allowed: 'bool' or"),
        (lambda: plan_cast(t(2), np.float16), "dtype is <class 'numpy.float16'>"),  # type: ignore[arg-type]
        (lambda: plan_cast(t(2, dtype="float8_e5m2"), "float32"), "x is float8_e5m2; .*use dequantize"),
        (lambda: plan_add(t(1 << 40, 1), t(1, 1 << 40)), "at most"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
