"""Ops on quantized numbers: to them, from them, and products of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import quantized_plans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from layerzero.client.arrays.array_types import AnyArray


@overload
def quantize(
    x: NDArray[Any],
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float8_e4m3fn",
    out: NDArray[Any] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> NDArray[Any]: ...


@overload
def quantize(
    x: ArrayT,
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float8_e4m3fn",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT: ...


def quantize(
    x: ArrayT,
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float8_e4m3fn",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """x / scale + zero_point as 8-bit numbers: rounded to nearest, ties to even, and cut to the dtype's finite range.

    x: (..., n), float32, bfloat16 or float16; the division is one of float32. scale: float32, one number, or (..., 1)
    with one of each row, or (..., groups) with one of each n / groups elements. zero_point: int32, like scale; of
    integers alone. dtype: "float8_e4m3fn", "float8_e5m2", "int8" or "uint8". NaN stays NaN, and is zero_point in
    integers. Returns an array of x's shape; NumPy needs ml_dtypes for those of 8-bit floats. dynamic_quantize finds
    scales for x. Source: OCP 8-bit floating point specification 1.0, 5.2 (saturating); ONNX QuantizeLinear.
    """
    args, params = (x, scale, zero_point), {"dtype": dtype}
    return perform(Request("quantize", args, params, quantized_plans.plan_quantize, out, backend, timeout_s))


@overload
def dequantize(
    x: NDArray[Any],
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float32",
    out: NDArray[Any] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> NDArray[Any]: ...


@overload
def dequantize(
    x: ArrayT,
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float32",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT: ...


def dequantize(
    x: ArrayT,
    scale: AnyArray,
    zero_point: AnyArray | None = None,
    *,
    dtype: str = "float32",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(x - zero_point) * scale, in float32, rounded to `dtype`: "float32", "bfloat16" or "float16".

    x: (..., n) of float8_e4m3fn, float8_e5m2, int8 or uint8, or (..., n / 2) of float4_e2m1fn_x2, which has two numbers
    in a byte, the first in its low bits. scale and zero_point: as for quantize, for the n numbers of a row. Returns
    (..., n). Source: ONNX DequantizeLinear.
    """
    args, params = (x, scale, zero_point), {"dtype": dtype}
    return perform(Request("dequantize", args, params, quantized_plans.plan_dequantize, out, backend, timeout_s))


def dynamic_quantize(
    x: ArrayT,
    *,
    dtype: str = "int8",
    group_size: int = -1,
    symmetric: bool = True,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any, Any]:
    """x as quantized numbers with scales that fit it: (numbers, scale, zero_point).

    x: (..., n), float32, bfloat16 or float16. dtype: "int8", "uint8" (never symmetric), "float8_e4m3fn",
    "float8_e5m2", "mxfp4" (blocks of 32, scales that are powers of two) or "nvfp4" (blocks of 16, scales that are
    float8_e4m3fn times one number for all of x). group_size: so many elements of a row share a scale; -1 for a row, 0
    for all of x. symmetric: zero points of 0; False is for int8 and uint8, whose range then goes from the least number
    to the greatest, 0 included. Returns numbers of x's shape, those of fp4 two in a byte; scale, float32: (..., groups
    of a row), or 1 in each dimension with group_size 0; zero_point: int32, like scale. What dequantize takes. Where a
    scale comes out as 0, numbers and zero point are 0; where a group has NaN or infinity its scale is NaN.
    Sources: ONNX DynamicQuantizeLinear; OCP microscaling formats 1.0, 6.3; NVIDIA's NVFP4.
    """
    params = {"dtype": dtype, "group_size": group_size, "symmetric": symmetric}
    plan = quantized_plans.plan_dynamic_quantize
    return perform(Request("dynamic_quantize", (x,), params, plan, None, backend, timeout_s))


def int_matmul(
    a: ArrayT,
    b: AnyArray,
    a_zero_point: AnyArray | None = None,
    b_zero_point: AnyArray | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(a - a_zero_point) @ (b - b_zero_point) in 32 bits: int8 and uint8 to int32, exact.

    a: (..., m, k), b: (..., k, n), each int8 or uint8; leading dimensions broadcast. a_zero_point: int32, one number or
    (m,); b_zero_point: int32, one number or (n,). Sums beyond int32 wrap, which takes k above 33,000. Returns int32
    (..., m, n). Source: ONNX MatMulInteger; torch._int_mm.
    """
    args = (a, b, a_zero_point, b_zero_point)
    return perform(Request("int_matmul", args, {}, quantized_plans.plan_int_matmul, out, backend, timeout_s))


def scaled_linear(
    x: ArrayT,
    weight: AnyArray,
    weight_scale: AnyArray,
    x_scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    x_zero_point: AnyArray | None = None,
    weight_zero_point: AnyArray | None = None,
    *,
    dtype: str | None = None,
    weight_format: str = "",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """((x - x_zero_point) * x_scale) @ ((weight - weight_zero_point) * weight_scale)^T + bias, of quantized numbers.

    x: (..., k) of int8 or uint8, of 8-bit floats, or packed fp4, with x_scale as dequantize takes it; or float32,
    bfloat16 or float16 without a scale, which leaves the weight alone quantized. weight: (n, k), of integers where x is
    of integers, of floats where it is of those, any where x is not quantized. weight_scale: float32, one number, (n,),
    or (rows, groups), where rows divides n and groups k: a scale for each block. Zero points: int32 in the shapes of
    the scales, of integers alone. bias: float32 (n,). weight_format: "int4" for a uint8 weight (n, k / 2) of numbers
    from 0 to 15, two in a byte, the first in its low bits, whose zero point is 8 where none is given.
    dtype: of the result; x's where x is not quantized, else "float32" (default), "bfloat16" or "float16". Integers are
    multiplied exactly where each has one scale a row. Returns (..., n). Source: torch._scaled_mm, ONNX MatMulInteger
    and com.microsoft MatMulNBits.
    """
    args = (x, weight, weight_scale, x_scale, bias, x_zero_point, weight_zero_point)
    params = {"dtype": dtype, "weight_format": weight_format}
    plan = quantized_plans.plan_scaled_linear
    return perform(Request("scaled_linear", args, params, plan, out, backend, timeout_s))
