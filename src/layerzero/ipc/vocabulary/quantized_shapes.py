"""Shape functions of ops on quantized numbers. As ipc/vocabulary/shapes.py, which has them all."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.ipc.vocabulary.ops import BLOCKS, QUANTIZED_FORMATS
from layerzero.ipc.vocabulary.shape_checks import (
    Attrs,
    Inputs,
    Output,
    broadcast,
    choice,
    flag,
    integer,
    least_ndim,
    of_ndim,
    refuse,
    required,
    scale,
)
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES, TensorSpec

QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
SCALED_DTYPES = ("float32", "bfloat16", "float16")
BYTES = ("int8", "uint8")
NARROW_FLOATS = ("float8_e4m3fn", "float8_e5m2")
PACKED = "float4_e2m1fn_x2"
INT4 = "int4"
# What a quantized x of scaled_linear takes for a weight; a float takes any.
WEIGHTS_OF = {**dict.fromkeys(BYTES, BYTES), **dict.fromkeys(NARROW_FLOATS, NARROW_FLOATS), PACKED: (PACKED,)}


def _quantize(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, steps = required(inputs, 2)
    if x.dtype not in SCALED_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(SCALED_DTYPES))
    least_ndim(op, "x", x, 1)
    scale(op, "scale", steps, x.shape)
    dtype = choice(op, attrs, "dtype", QUANTIZED_DTYPES)
    _zero_point(op, "zero_point", inputs[2], steps, dtype)
    return ((dtype, x.shape),)


def _dequantize(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, steps = required(inputs, 2)
    if x.dtype not in (*QUANTIZED_DTYPES, PACKED):
        refuse(op, f"x is {x.dtype}", ", ".join((*QUANTIZED_DTYPES, PACKED)))
    least_ndim(op, "x", x, 1)
    shape = (*x.shape[:-1], x.shape[-1] * (2 if x.dtype == PACKED else 1))
    scale(op, "scale", steps, shape)
    _zero_point(op, "zero_point", inputs[2], steps, x.dtype)
    return ((choice(op, attrs, "dtype", SCALED_DTYPES), shape),)


def _zero_point(op: str, name: str, spec: TensorSpec | None, steps: TensorSpec | None, dtype: str) -> None:
    """Of integers, one for each scale."""
    if spec is None:
        return
    if spec.dtype != "int32":
        refuse(op, f"{name} is {spec.dtype}", "int32")
    if dtype not in BYTES:
        refuse(op, f"{name} is given for {dtype}", "zero points of int8 and uint8 alone")
    if steps is None or spec.shape != steps.shape:
        found = "no scale" if steps is None else f"a scale of {list(steps.shape)}"
        refuse(op, f"{name} has shape {list(spec.shape)} for {found}", "that of the scale")


def _dynamic(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    if x.dtype not in SCALED_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(SCALED_DTYPES))
    least_ndim(op, "x", x, 1)
    kind = choice(op, attrs, "format", QUANTIZED_FORMATS)
    groups = integer(op, attrs, "groups", 0, MAX_NBYTES)
    if groups and x.shape[-1] % groups:
        refuse(op, f"groups is {groups} for rows of {x.shape[-1]}", "0, or a divisor of them")
    if kind in BLOCKS and groups * BLOCKS[kind] != x.shape[-1]:
        refuse(op, f"{kind} in {groups} groups of rows of {x.shape[-1]}", f"groups of {BLOCKS[kind]} elements")
    is_symmetric = flag(op, attrs, "symmetric")
    if is_symmetric != (kind != "uint8") and kind != "int8":
        refuse(op, f"{kind} is {'' if is_symmetric else 'not '}symmetric", "uint8 asymmetric, 8-bit floats and fp4 not")
    dtype, extent = (PACKED, x.shape[-1] // 2) if kind in BLOCKS else (kind, x.shape[-1])
    steps = (*x.shape[:-1], groups) if groups else (1,) * x.ndim
    return (dtype, (*x.shape[:-1], extent)), ("float32", steps), ("int32", steps)


def _int_matmul(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    a, b = required(inputs, 2)
    for name, spec in (("a", a), ("b", b)):
        if spec.dtype not in BYTES:
            refuse(op, f"{name} is {spec.dtype}", " or ".join(BYTES))
        least_ndim(op, name, spec, 2)
    if a.shape[-1] != b.shape[-2]:
        refuse(op, f"a has shape {list(a.shape)} and b {list(b.shape)}", "a's last extent, b's second to last")
    rows, columns = a.shape[-2], b.shape[-1]
    for name, points, shapes in (
        ("a_zero_point", inputs[2], ((1, 1), (rows, 1))),
        ("b_zero_point", inputs[3], ((1, 1), (1, columns))),
    ):
        if points is None:
            continue
        if points.dtype != "int32":
            refuse(op, f"{name} is {points.dtype}", "int32")
        if points.shape not in shapes:
            refuse(op, f"{name} has shape {list(points.shape)}", " or ".join(str(list(shape)) for shape in shapes))
    return (("int32", (*broadcast(op, a.shape[:-2], b.shape[:-2]), rows, columns)),)


def _scaled_linear(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, weight, steps = required(inputs, 3)
    x_scale, bias, x_zero, weight_zero = inputs[3:]
    least_ndim(op, "x", x, 2)
    of_ndim(op, "weight", weight, 2)
    is_int4 = attrs["weight_format"] != "" and bool(choice(op, attrs, "weight_format", (INT4,)))
    allowed: tuple[str, ...] = (*QUANTIZED_DTYPES, PACKED)
    dtype = x.dtype
    if x.dtype not in SCALED_DTYPES:
        dtype = choice(op, attrs, "dtype", SCALED_DTYPES)
    if x.dtype in SCALED_DTYPES:
        if x_scale is not None or attrs["dtype"] != "":
            found = "x_scale is given" if x_scale is not None else f"dtype is {attrs['dtype']!r:.80}"
            refuse(op, f"{found} for x of {x.dtype}", "neither a scale nor a dtype: x is not quantized")
    elif x.dtype in allowed:
        allowed = WEIGHTS_OF[x.dtype]
        if x_scale is None:
            refuse(op, f"x is {x.dtype} and x_scale is None", "a scale")
    else:
        refuse(op, f"x is {x.dtype}", ", ".join((*SCALED_DTYPES, *allowed)))
    if weight.dtype not in allowed or (is_int4 and weight.dtype != "uint8"):
        refuse(op, f"x is {x.dtype} and weight {weight.dtype}", "uint8" if is_int4 else ", ".join(allowed))
    k, wide = x.shape[-1] * (1 + (x.dtype == PACKED)), weight.shape[1] * (1 + (is_int4 or weight.dtype == PACKED))
    if k != wide:
        refuse(op, f"x has rows of {k} numbers and weight of {wide}", "equal ones")
    if x_scale is not None:
        scale(op, "x_scale", x_scale, (*x.shape[:-1], k))
    if steps.dtype != "float32":
        refuse(op, f"weight_scale is {steps.dtype}", "float32")
    of_ndim(op, "weight_scale", steps, 2)
    if not steps.numel or weight.shape[0] % steps.shape[0] or k % steps.shape[1]:
        refuse(op, f"weight_scale has shape {list(steps.shape)}", f"divisors of [{weight.shape[0]}, {k}]")
    _zero_point(op, "x_zero_point", x_zero, x_scale, x.dtype)
    _zero_point(op, "weight_zero_point", weight_zero, steps, weight.dtype)
    if bias is not None and (bias.dtype, bias.shape) != ("float32", weight.shape[:1]):
        refuse(op, f"bias is {bias}", f"float32{list(weight.shape[:1])}")
    return ((dtype, (*x.shape[:-1], weight.shape[0])),)


QUANTIZED: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "dynamic_quantize": _dynamic,
    "int_matmul": _int_matmul,
    "scaled_linear": _scaled_linear,
}
