"""Rules of the shapes of quantized numbers and their products, as in test_shape_refusals.py."""

from __future__ import annotations

import pytest
from tests.unit.ipc.vocabulary.calls import Change, outputs, refusal

QUANTIZED = "float8_e4m3fn or float8_e5m2 or int8 or uint8"

ACCEPTED: list[tuple[str, Change, str]] = [
    ("quantize", {"x": "bfloat16 6", "scale": "float32 1", "dtype": "float8_e5m2"}, "float8_e5m2 6"),
    ("quantize", {"scale": "float32 1 6", "dtype": "float8_e4m3fn"}, "float8_e4m3fn 4 6"),
    (
        "dequantize",
        {"x": "float4_e2m1fn_x2 3", "scale": "float32 2", "zero_point": None, "dtype": "bfloat16"},
        "bfloat16 6",
    ),
    (
        "dequantize",
        {"x": "float8_e4m3fn 2 3 5", "scale": "float32 1 3 5", "zero_point": None, "dtype": "float32"},
        "float32 2 3 5",
    ),
    ("dynamic_quantize", {"groups": 0}, "int8 3 4"),
    (
        "dynamic_quantize",
        {"x": "float16 3 64", "format": "nvfp4", "groups": 4, "symmetric": True},
        "float4_e2m1fn_x2 3 32",
    ),
    ("int_matmul", {"a": "uint8 2 3", "b": "int8 3 5", "a_zero_point": "int32 1 1", "b_zero_point": None}, "int32 2 5"),
    (
        "scaled_linear",
        {"x": "float16 3 12", "x_scale": None, "x_zero_point": None, "dtype": "", "bias": None},
        "float16 3 10",
    ),
    ("scaled_linear", {"weight": "uint8 10 6", "weight_format": "int4"}, "bfloat16 3 10"),
]


@pytest.mark.parametrize(("op", "change", "first"), ACCEPTED)
def test_what_just_does_not_break_a_rule_is_served(op: str, change: Change, first: str) -> None:
    assert outputs(op, change)[0] == first


REFUSED: list[tuple[str, Change, str, str]] = [
    ("quantize", {"x": "float64 4 6"}, "x is float64", "float32, bfloat16, float16"),
    ("quantize", {"x": "float32"}, "x has shape []", "at least 1 dimensions"),
    ("quantize", {"scale": "float16 4 3"}, "scale is float16", "float32"),
    ("quantize", {"scale": "float32 3"}, "scale has shape [3]", "2 dimensions"),
    (
        "quantize",
        {"scale": "float32 2 3"},
        "scale has shape [2, 3]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"scale": "float32 4 4"},
        "scale has shape [4, 4]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"scale": "float32 4 0"},
        "scale has shape [4, 0]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"x": "float32 4 2 6", "scale": "float32 1 1 4"},
        "scale has shape [1, 1, 4]",
        "1 or [4, 2, 6], and last a divisor of 6",
    ),
    ("quantize", {"dtype": "uint16"}, "dtype is 'uint16'", QUANTIZED),
    ("quantize", {"zero_point": "int8 4 3"}, "zero_point is int8", "int32"),
    ("quantize", {"zero_point": "int32 4 1"}, "zero_point has shape [4, 1] for a scale of [4, 3]", "that of the scale"),
    (
        "quantize",
        {"zero_point": "int32 4 3", "dtype": "float8_e5m2"},
        "zero_point is given for float8_e5m2",
        "zero points of int8 and uint8 alone",
    ),
    ("dequantize", {"x": "uint16 4 6"}, "x is uint16", "float8_e4m3fn, float8_e5m2, int8, uint8, float4_e2m1fn_x2"),
    ("dynamic_quantize", {"x": "float64 3 4"}, "x is float64", "float32, bfloat16, float16"),
    ("dynamic_quantize", {"x": "float32"}, "x has shape []", "at least 1 dimensions"),
    (
        "dynamic_quantize",
        {"format": "int4"},
        "format is 'int4'",
        "int8 or uint8 or float8_e4m3fn or float8_e5m2 or mxfp4 or nvfp4",
    ),
    ("dynamic_quantize", {"groups": 3}, "groups is 3 for rows of 4", "0, or a divisor of them"),
    ("dynamic_quantize", {"groups": -1}, "groups is -1", "an integer from 0 to 70368744177664"),
    (
        "dynamic_quantize",
        {"format": "mxfp4", "symmetric": True},
        "mxfp4 in 2 groups of rows of 4",
        "groups of 32 elements",
    ),
    (
        "dynamic_quantize",
        {"format": "uint8", "symmetric": True},
        "uint8 is symmetric",
        "uint8 asymmetric, 8-bit floats and fp4 not",
    ),
    (
        "dynamic_quantize",
        {"format": "float8_e5m2"},
        "float8_e5m2 is not symmetric",
        "uint8 asymmetric, 8-bit floats and fp4 not",
    ),
    ("dynamic_quantize", {"symmetric": 1}, "symmetric is 1", "True or False"),
    ("int_matmul", {"a": "int16 4 1 2 3"}, "a is int16", "int8 or uint8"),
    ("int_matmul", {"b": "int8 3"}, "b has shape [3]", "at least 2 dimensions"),
    (
        "int_matmul",
        {"b": "uint8 6 4 5"},
        "a has shape [4, 1, 2, 3] and b [6, 4, 5]",
        "a's last extent, b's second to last",
    ),
    ("int_matmul", {"a": "int8 4 5 2 3"}, "leading dimensions [4, 5] and [1, 6]", "equal extents, or 1"),
    ("int_matmul", {"a_zero_point": "int8 2 1"}, "a_zero_point is int8", "int32"),
    ("int_matmul", {"a_zero_point": "int32 1 2"}, "a_zero_point has shape [1, 2]", "[1, 1] or [2, 1]"),
    ("int_matmul", {"b_zero_point": "int32 5 1"}, "b_zero_point has shape [5, 1]", "[1, 1] or [1, 5]"),
    ("scaled_linear", {"x": "int8 12"}, "x has shape [12]", "at least 2 dimensions"),
    ("scaled_linear", {"weight": "uint8 1 10 12"}, "weight has shape [1, 10, 12]", "2 dimensions"),
    (
        "scaled_linear",
        {"x": "int32 3 12"},
        "x is int32",
        "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, uint8, float4_e2m1fn_x2",
    ),
    (
        "scaled_linear",
        {"x": "float32 3 12"},
        "x_scale is given for x of float32",
        "neither a scale nor a dtype: x is not quantized",
    ),
    (
        "scaled_linear",
        {"x": "float32 3 12", "x_scale": None, "x_zero_point": None},
        "dtype is 'bfloat16' for x of float32",
        "neither a scale nor a dtype: x is not quantized",
    ),
    ("scaled_linear", {"x_scale": None, "x_zero_point": None}, "x is int8 and x_scale is None", "a scale"),
    ("scaled_linear", {"weight": "float8_e5m2 10 12"}, "x is int8 and weight float8_e5m2", "int8, uint8"),
    ("scaled_linear", {"weight_format": "int4", "weight": "int8 10 6"}, "x is int8 and weight int8", "uint8"),
    ("scaled_linear", {"weight_format": "int3"}, "weight_format is 'int3'", "int4"),
    ("scaled_linear", {"weight": "uint8 10 6"}, "x has rows of 12 numbers and weight of 6", "equal ones"),
    ("scaled_linear", {"x_scale": "float16 3 2"}, "x_scale is float16", "float32"),
    ("scaled_linear", {"x_scale": "float32 3 5"}, "x_scale has shape [3, 5]", "1 or [3, 12], and last a divisor of 12"),
    ("scaled_linear", {"weight_scale": "float16 5 3"}, "weight_scale is float16", "float32"),
    ("scaled_linear", {"weight_scale": "float32 4 3"}, "weight_scale has shape [4, 3]", "divisors of [10, 12]"),
    ("scaled_linear", {"weight_scale": "float32 5 5"}, "weight_scale has shape [5, 5]", "divisors of [10, 12]"),
    (
        "scaled_linear",
        {"weight_zero_point": "int32 5 1"},
        "weight_zero_point has shape [5, 1] for a scale of [5, 3]",
        "that of the scale",
    ),
    ("scaled_linear", {"bias": "float16 10"}, "bias is float16[10]", "float32[10]"),
    ("scaled_linear", {"dtype": "float64"}, "dtype is 'float64'", "float32 or bfloat16 or float16"),
    ("dequantize", {"x": "int8"}, "x has shape []", "at least 1 dimensions"),
    ("dequantize", {"scale": "int8 4 3"}, "scale is int8", "float32"),
    (
        "dequantize",
        {"x": "float4_e2m1fn_x2 4 3", "scale": "float32 4 4"},
        "scale has shape [4, 4]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    ("dequantize", {"dtype": "float64"}, "dtype is 'float64'", "float32 or bfloat16 or float16"),
]


@pytest.mark.parametrize(("op", "change", "found", "allowed"), REFUSED)
def test_what_breaks_a_rule_is_refused_with_what_is_there_and_what_is_allowed(
    op: str, change: Change, found: str, allowed: str
) -> None:
    assert refusal(op, change) == f"{op}: {found}; allowed: {allowed}"
