"""client/planning/quantized_plans.py: canonical forms, and what makes no sense is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.client.planning import quantized_plans
from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


NUMBERS = t(4, 3, 64)


@pytest.mark.parametrize(
    ("shape", "canonical"),
    [((), (1, 1, 1)), ((1,), (1, 1, 1)), ((4, 3, 1), (4, 3, 1)), ((1, 3, 4), (1, 3, 4)), ((4, 3, 64), (4, 3, 64))],
)
def test_a_scale_gets_the_dimensions_of_what_it_is_for(shape: tuple[int, ...], canonical: tuple[int, ...]) -> None:
    """Kernels broadcast it without asking what was meant."""
    plan = quantized_plans.plan_quantize(NUMBERS, t(*shape), dtype="int8")
    assert (plan.inputs[1], plan.results) == (t(*canonical), (t(4, 3, 64, dtype="int8"),))
    packed = quantized_plans.plan_dequantize(t(4, 3, 32, dtype="float4_e2m1fn_x2"), t(*shape), dtype="float16")
    assert (packed.inputs[1], packed.results) == (t(*canonical), (t(4, 3, 64, dtype="float16"),))


@pytest.mark.parametrize(
    ("x", "scale", "dtype", "says"),
    [
        (NUMBERS, t(4, 3), "int8", r"scale has shape \[4, 3\] for numbers of shape \[4, 3, 64\]"),
        (NUMBERS, t(4, 2, 1), "int8", r"scale has shape \[4, 2, 1\]"),
        (NUMBERS, t(4, 3, 5), "int8", "last a divisor of the numbers' last extent"),
        (NUMBERS, t(4, 3, 0), "int8", r"scale has shape \[4, 3, 0\]"),
        (NUMBERS, t(1, dtype="float16"), "int8", "scale is float16; allowed: float32"),
        (NUMBERS, t(1), "uint16", "dtype is 'uint16'; allowed: 'float8_e4m3fn' or"),
        (t(4, dtype="float64"), t(1), "int8", "x is float64; allowed: float32, bfloat16, float16"),
    ],
)
def test_quantizations_that_make_no_sense_are_refused(x: TensorSpec, scale: TensorSpec, dtype: str, says: str) -> None:
    """A scale of the wrong row would not be seen in any result."""
    with pytest.raises(InvalidArgument, match=says):
        quantized_plans.plan_quantize(x, scale, dtype=dtype)


I8, I32 = {"dtype": "int8"}, {"dtype": "int32"}


def checked(plan: Plan) -> Plan:
    """The canonical form is one that the broker takes."""
    check_call(plan.op, plan.inputs, plan.outputs, plan.attrs)
    return plan


@pytest.mark.parametrize(
    ("size", "scales"), [(-1, (4, 3, 1)), (0, (1, 1, 1)), (16, (4, 3, 4)), (64, (4, 3, 1)), (1, (4, 3, 64))]
)
def test_a_group_size_says_how_many_scales_there_are(size: int, scales: tuple[int, ...]) -> None:
    made = checked(quantized_plans.plan_dynamic_quantize(NUMBERS, dtype="int8", group_size=size))
    assert made.results == (t(4, 3, 64, **I8), t(*scales), t(*scales, **I32))


@pytest.mark.parametrize(("dtype", "groups"), [("mxfp4", 2), ("nvfp4", 4)])
def test_formats_of_fp4_have_blocks_of_their_own(dtype: str, groups: int) -> None:
    made = checked(quantized_plans.plan_dynamic_quantize(NUMBERS, dtype=dtype))
    assert made.results == (t(4, 3, 32, dtype="float4_e2m1fn_x2"), t(4, 3, groups), t(4, 3, groups, **I32))


def test_zero_points_become_a_column_and_a_row() -> None:
    made = checked(quantized_plans.plan_int_matmul(t(2, 4, 8, **I8), t(8, 5, **I8), t(4, **I32), t(**I32)))
    assert made.inputs[2:] == (t(4, 1, **I32), t(1, 1, **I32))
    assert made.results == (t(2, 4, 5, **I32),)


@pytest.mark.parametrize(("scale", "canonical"), [((), (1, 1)), ((6,), (6, 1)), ((1,), (1, 1)), ((3, 4), (3, 4))])
def test_a_weight_has_a_matrix_of_scales(scale: tuple[int, ...], canonical: tuple[int, ...]) -> None:
    """Of which rows and groups are told apart by where they stand alone."""
    made = checked(
        quantized_plans.plan_scaled_linear(t(8), t(6, 8, **I8), t(*scale), weight_zero_point=t(*scale, **I32))
    )
    assert (made.inputs[2], made.inputs[6]) == (t(*canonical), t(*canonical, **I32))
    assert (made.attrs, made.results) == ({"dtype": "", "weight_format": ""}, (t(6),))


def _linear(*args: Any, **kwargs: Any) -> Any:
    return lambda: quantized_plans.plan_scaled_linear(*args, **kwargs)


def _dynamic(*args: Any, **kwargs: Any) -> Any:
    return lambda: quantized_plans.plan_dynamic_quantize(*args, **kwargs)


ONE, X, W = t(1), t(4, 8, **I8), t(6, 8, **I8)
FP4 = {"dtype": "float4_e2m1fn_x2"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (_dynamic(t(4, dtype="float64"), dtype="int8"), "x is float64; allowed: float32"),
        (_dynamic(t(4), dtype="int4"), "dtype is 'int4'; allowed: 'int8' or 'uint8'"),
        (_dynamic(t(4), dtype="mxfp4"), "x has rows of 4; allowed: multiples of 32, the block of mxfp4; pad it"),
        (_dynamic(t(64), dtype="nvfp4", group_size=32), "group_size is 32 for nvfp4; allowed: 16"),
        (_dynamic(t(64), dtype="int8", group_size=48), "group_size is 48 for rows of 64; allowed: -1 for a row"),
        (_dynamic(t(64), dtype="int8", group_size=-2), "group_size is -2"),
        (_dynamic(t(4, 0), dtype="int8", group_size=2), "group_size is 2 for rows of 0"),
        (_dynamic(t(64), dtype="float8_e5m2", symmetric=False), "symmetric is False for float8_e5m2"),
        (_linear(X, W, ONE), "x is int8 and x_scale is None; allowed: a scale; pass that which x was quantized with"),
        (_linear(t(4, 8), W, ONE, ONE), "x_scale is given for x of float32; allowed: None"),
        (_linear(t(4, 8), W, ONE, dtype="float16"), "dtype is 'float16' for x of float32"),
        (_linear(t(4, 8), t(6, 8), ONE), "x is float32 and weight float32; allowed: float8_e4m3fn"),
        (_linear(X, t(6, 8, dtype="float8_e5m2"), ONE, ONE), "weight float8_e5m2; allowed: int8, uint8"),
        (_linear(X, t(6, 4, **I8), ONE, ONE, weight_format="int4"), "weight int8 of int4; allowed: uint8"),
        (_linear(X, t(6, 4, dtype="uint8"), ONE, ONE), "x has rows of 8 numbers and weight rows of 4"),
        (_linear(t(4, 4, **FP4), t(6, 8, **FP4), ONE, ONE), "x has rows of 8 numbers and weight rows of 16"),
        (_linear(X, W, t(5), ONE), r"weight_scale has shape \[5\] for a weight of 6 rows of 8"),
        (_linear(X, W, t(6, 3), ONE), r"a divisor of 6 and one of 8"),
        (_linear(X, W, t(6, 1, dtype="float16"), ONE), "weight_scale is float16; allowed: float32"),
        (_linear(X, W, ONE, t(3, 1)), r"x_scale has shape \[3, 1\] for numbers of shape \[4, 8\]"),
        (_linear(X, W, ONE, ONE, t(6, dtype="float16")), r"bias is float16\[6\]; allowed: float32\[6\]"),
        (_linear(X, W, ONE, ONE, None, t(1, **I8)), "x_zero_point is int8; allowed: int32"),
        (_linear(X, W, ONE, ONE, None, None, t(6, **I32)), r"weight_zero_point has shape \[6\] for a scale of shape"),
        (_linear(t(4, 8), t(6, 4, **FP4), ONE, None, None, None, t(1, **I32)), "given for float4_e2m1fn_x2"),
        (_linear(t(**I8), W, ONE, ONE), r"x has shape \[\] and weight \[6, 8\]; allowed: \(..., in_features\)"),
        (lambda: quantized_plans.plan_int_matmul(t(4, 8), W), "a is float32; allowed: int8 or uint8; quantize it"),
        (lambda: quantized_plans.plan_int_matmul(X, W), r"a has shape \[4, 8\] and b \[6, 8\]"),
        (lambda: quantized_plans.plan_int_matmul(t(8, **I8), W), r"a has shape \[8\]; allowed: at least 2 dimensions"),
        (
            lambda: quantized_plans.plan_int_matmul(X, t(8, 6, **I8), t(6, **I32)),
            r"a_zero_point has shape \[6\]; allowed: one number, or \[4\]; pass one for each row of a",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    """By name, with what to do: a scale in the wrong place would not be seen in any result."""
    with pytest.raises(InvalidArgument, match=says):
        call()
