"""Plans of ops on quantized numbers. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from numbers import Integral

from layerzero.client.planning.checks import Shape, broadcast, choice, flag, fresh, refuse
from layerzero.client.planning.plans import Plan, Scalar, remember
from layerzero.ipc.vocabulary.ops import BLOCKS, QUANTIZED_FORMATS
from layerzero.ipc.vocabulary.quantized_shapes import (
    BYTES,
    INT4,
    PACKED,
    QUANTIZED_DTYPES,
    SCALED_DTYPES,
    WEIGHTS_OF,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_quantize(x: TensorSpec, scale: TensorSpec, zero_point: TensorSpec | None = None, *, dtype: str) -> Plan:
    """To 8 bits."""
    op = "quantize"
    choice(op, "dtype", dtype, QUANTIZED_DTYPES)
    _scaled(op, x)
    x1 = x if x.ndim else x.unsqueeze(0)
    output = TensorSpec.contiguous(dtype, x1.shape)
    steps, zeros = _scale(op, "scale", scale, x1.shape), _zeros(op, "zero_point", zero_point, scale, dtype, x1.shape)
    return Plan(op, (x1, steps, zeros), {"dtype": dtype}, (output,), (fresh(op, dtype, x.shape),))


@remember
def plan_dequantize(x: TensorSpec, scale: TensorSpec, zero_point: TensorSpec | None = None, *, dtype: str) -> Plan:
    """From 8 bits, or from packed fp4."""
    op = "dequantize"
    choice(op, "dtype", dtype, SCALED_DTYPES)
    allowed = (*QUANTIZED_DTYPES, PACKED)
    if x.dtype not in allowed:
        refuse(op, f"x is {x.dtype}", ", ".join(allowed), "quantize it first")
    x1 = x if x.ndim else x.unsqueeze(0)
    pairs = 2 if x.dtype == PACKED else 1
    shape = (*x1.shape[:-1], pairs * x1.shape[-1])
    output = TensorSpec.contiguous(dtype, shape)
    result = fresh(op, dtype, shape if x.ndim or pairs == 2 else ())
    steps, zeros = _scale(op, "scale", scale, shape), _zeros(op, "zero_point", zero_point, scale, x.dtype, shape)
    return Plan(op, (x1, steps, zeros), {"dtype": dtype}, (output,), (result,))


@remember
def plan_dynamic_quantize(x: TensorSpec, *, dtype: str, group_size: int = -1, symmetric: bool = True) -> Plan:
    """With scales that are taken from the data."""
    op = "dynamic_quantize"
    choice(op, "dtype", dtype, QUANTIZED_FORMATS)
    _scaled(op, x)
    is_symmetric = flag(op, "symmetric", symmetric)
    if not is_symmetric and dtype not in BYTES:
        refuse(op, f"symmetric is False for {dtype}", "True", "quantize to int8 or uint8 with zero points")
    x1 = x if x.ndim else x.unsqueeze(0)
    groups = _groups(op, dtype, group_size, x1.shape[-1])
    made = PACKED if dtype in BLOCKS else dtype
    shape = (*x1.shape[:-1], x1.shape[-1] // 2) if dtype in BLOCKS else x1.shape
    steps = (*x1.shape[:-1], groups) if groups else (1,) * x1.ndim
    outputs = tuple(TensorSpec.contiguous(*one) for one in ((made, shape), ("float32", steps), ("int32", steps)))
    results = (fresh(op, made, shape if x.ndim else x.shape), *outputs[1:])
    attrs: dict[str, Scalar] = {"format": dtype, "groups": groups, "symmetric": is_symmetric and dtype != "uint8"}
    return Plan(op, (x1,), attrs, outputs, results)


def _groups(op: str, dtype: str, size: int, extent: int) -> int:
    """How many there are in a row; 0 for one scale of the whole tensor."""
    block = BLOCKS.get(dtype)
    if block is not None:
        if size not in (-1, block):
            refuse(op, f"group_size is {size!r} for {dtype}", str(block), "leave it out")
        if not extent or extent % block:
            refuse(op, f"x has rows of {extent}", f"multiples of {block}, the block of {dtype}", "pad it with zeros")
        return extent // block
    is_number = isinstance(size, Integral) and not isinstance(size, bool) and size >= -1
    if not is_number or (size > 0 and (not extent or extent % size)):
        allowed = "-1 for a row, 0 for all of x, or a divisor of a row"
        refuse(op, f"group_size is {size!r} for rows of {extent}", allowed, "pass one of these")
    return 1 if size == -1 else extent // size if size else 0


@remember
def plan_int_matmul(
    a: TensorSpec, b: TensorSpec, a_zero_point: TensorSpec | None = None, b_zero_point: TensorSpec | None = None
) -> Plan:
    """a @ b of 8-bit integers in 32 bits."""
    op = "int_matmul"
    for name, spec in (("a", a), ("b", b)):
        if spec.dtype not in BYTES:
            refuse(op, f"{name} is {spec.dtype}", " or ".join(BYTES), "quantize it first")
        if spec.ndim < 2:
            refuse(op, f"{name} has shape {list(spec.shape)}", "at least 2 dimensions", "unsqueeze it")
    if a.shape[-1] != b.shape[-2]:
        refuse(
            op,
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            f"a's last dimension ({a.shape[-1]}) equal to b's second to last ({b.shape[-2]})",
            "transpose one of them",
        )
    rows, columns = a.shape[-2], b.shape[-1]
    zeros = [
        _points(op, "a_zero_point", a_zero_point, rows, is_column=True),
        _points(op, "b_zero_point", b_zero_point, columns, is_column=False),
    ]
    result = fresh(op, "int32", (*broadcast(op, a.shape[:-2], b.shape[:-2]), rows, columns))
    return Plan(op, (a, b, *zeros), {}, (result,), (result,))


def _points(op: str, name: str, spec: TensorSpec | None, count: int, *, is_column: bool) -> TensorSpec | None:
    """One zero point, or one for each row or column, as a matrix that broadcasts."""
    if spec is None:
        return None
    if spec.dtype != "int32":
        refuse(op, f"{name} is {spec.dtype}", "int32", "convert it")
    if spec.ndim > 1 or spec.shape not in ((), (1,), (count,)):
        of = "row of a" if is_column else "column of b"
        refuse(op, f"{name} has shape {list(spec.shape)}", f"one number, or [{count}]", f"pass one for each {of}")
    flat = spec if spec.ndim else spec.unsqueeze(0)
    return flat.unsqueeze(1 if is_column else 0)


@remember
def plan_scaled_linear(
    x: TensorSpec,
    weight: TensorSpec,
    weight_scale: TensorSpec,
    x_scale: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    x_zero_point: TensorSpec | None = None,
    weight_zero_point: TensorSpec | None = None,
    *,
    dtype: str | None = None,
    weight_format: str = "",
) -> Plan:
    """x @ weight.T of quantized numbers."""
    op = "scaled_linear"
    choice(op, "weight_format", weight_format, ("", INT4))
    made = dtype or (x.dtype if x.dtype in SCALED_DTYPES else "float32")
    choice(op, "dtype", made, SCALED_DTYPES)
    _check_kinds(op, x, weight, x_scale, made, weight_format)
    if x.ndim == 0 or weight.ndim != 2:
        found = f"x has shape {list(x.shape)} and weight {list(weight.shape)}"
        refuse(op, found, "(..., in_features) and (out_features, in_features)", "reshape them")
    is_pair = weight_format == INT4 or weight.dtype == PACKED
    k, wide = x.shape[-1] * (1 + (x.dtype == PACKED)), weight.shape[1] * (1 + is_pair)
    if k != wide:
        found = f"x has rows of {k} numbers and weight rows of {wide}"
        refuse(op, found, "equal ones", "pass the weight as (out_features, in_features), pairs as one byte")
    x2 = x if x.ndim > 1 else x.unsqueeze(0)
    shape = (*x2.shape[:-1], k)
    steps = _weight_scale(op, weight_scale, weight.shape[0], k)
    if bias is not None and (bias.dtype, bias.shape) != ("float32", weight.shape[:1]):
        refuse(op, f"bias is {bias}", f"float32[{weight.shape[0]}]", "convert it to float32, one for each out_feature")
    inputs = (
        *(x2, weight, steps, x_scale if x_scale is None else _scale(op, "x_scale", x_scale, shape), bias),
        _zeros(op, "x_zero_point", x_zero_point, x_scale, x.dtype, shape),
        _weight_zeros(op, weight_zero_point, weight_scale, weight, k),
    )
    output = TensorSpec.contiguous(made, (*x2.shape[:-1], weight.shape[0]))
    attrs: dict[str, Scalar] = {"dtype": "" if x.dtype in SCALED_DTYPES else made, "weight_format": weight_format}
    return Plan(op, inputs, attrs, (output,), (fresh(op, made, (*x.shape[:-1], weight.shape[0])),))


def _check_kinds(
    op: str, x: TensorSpec, weight: TensorSpec, x_scale: TensorSpec | None, dtype: str, weight_format: str
) -> None:
    """That x, the weight and the result may be of these dtypes together."""
    allowed: tuple[str, ...] = (*QUANTIZED_DTYPES, PACKED)
    if x.dtype in SCALED_DTYPES:
        if x_scale is not None:
            refuse(op, f"x_scale is given for x of {x.dtype}", "None", "leave it out, or quantize x")
        if dtype != x.dtype:
            refuse(op, f"dtype is {dtype!r} for x of {x.dtype}", repr(x.dtype), "leave it out")
    elif x.dtype in allowed:
        allowed = WEIGHTS_OF[x.dtype]
        if x_scale is None:
            refuse(op, f"x is {x.dtype} and x_scale is None", "a scale", "pass that which x was quantized with")
    else:
        refuse(op, f"x is {x.dtype}", ", ".join((*SCALED_DTYPES, *allowed)), "quantize it, or convert it to float32")
    if weight_format == INT4:
        allowed = ("uint8",) if "uint8" in allowed else ()
    if weight.dtype not in allowed:
        found = f"x is {x.dtype} and weight {weight.dtype}{' of int4' if weight_format else ''}"
        refuse(op, found, ", ".join(allowed) or "no int4 weight", "quantize both alike; lz types scaled_linear has all")


def _scaled(op: str, x: TensorSpec) -> None:
    if x.dtype not in SCALED_DTYPES:
        refuse(op, f"x is {x.dtype}", ", ".join(SCALED_DTYPES), "convert it to float32")


def _scale(op: str, name: str, scale: TensorSpec, shape: Shape) -> TensorSpec:
    """With as many dimensions as the numbers that it is for."""
    if scale.dtype != "float32":
        refuse(op, f"{name} is {scale.dtype}", "float32", "convert it")
    found = scale
    while scale.ndim < len(shape) and (not found.ndim or found.numel == 1):
        scale = scale.unsqueeze(0)
    is_fit = scale.ndim == len(shape) and scale.numel > 0
    if is_fit:
        is_fit = all(n in (1, wanted) for n, wanted in zip(scale.shape[:-1], shape[:-1], strict=True))
    if not is_fit and scale.ndim == len(shape) and 0 in shape[:-1]:
        is_fit = scale.shape[:-1] == shape[:-1] and scale.shape[-1] > 0
    if not is_fit or shape[-1] % scale.shape[-1]:
        refuse(
            op,
            f"{name} has shape {list(found.shape)} for numbers of shape {list(shape)}",
            "one number, or 1 or the same extents, and last a divisor of the numbers' last extent",
            "pass (..., 1) for a scale of each row, (..., groups) for one of each group in it",
        )
    return scale


def _weight_scale(op: str, scale: TensorSpec, rows: int, k: int) -> TensorSpec:
    """As a matrix: one number, one for each row or so many rows, and each group in it."""
    if scale.dtype != "float32":
        refuse(op, f"weight_scale is {scale.dtype}", "float32", "convert it")
    made = scale
    if made.ndim == 0:
        made = made.unsqueeze(0)
    if made.ndim == 1:
        made = made.unsqueeze(1)
    if made.ndim != 2 or not made.numel or rows % made.shape[0] or k % made.shape[1]:
        refuse(
            op,
            f"weight_scale has shape {list(scale.shape)} for a weight of {rows} rows of {k}",
            f"one number, [{rows}], or a divisor of {rows} and one of {k}",
            "pass (out_features, 1) for a scale of each row, (rows, groups) for one of each block",
        )
    return made


def _zeros(
    op: str, name: str, zeros: TensorSpec | None, scale: TensorSpec | None, dtype: str, shape: Shape
) -> TensorSpec | None:
    if zeros is None:
        return None
    _check_zeros(op, name, zeros, scale, dtype)
    return _scale(op, name, zeros.as_dtype("float32"), shape).as_dtype("int32")


def _weight_zeros(
    op: str, zeros: TensorSpec | None, scale: TensorSpec, weight: TensorSpec, k: int
) -> TensorSpec | None:
    if zeros is None:
        return None
    _check_zeros(op, "weight_zero_point", zeros, scale, weight.dtype)
    return _weight_scale(op, zeros.as_dtype("float32"), weight.shape[0], k).as_dtype("int32")


def _check_zeros(op: str, name: str, zeros: TensorSpec, scale: TensorSpec | None, dtype: str) -> None:
    if zeros.dtype != "int32":
        refuse(op, f"{name} is {zeros.dtype}", "int32", "convert it")
    if dtype not in BYTES:
        refuse(op, f"{name} is given for {dtype}", "zero points of int8 and uint8 alone", "leave it out")
    if scale is None or zeros.shape != scale.shape:
        found = "no scale" if scale is None else f"a scale of shape {list(scale.shape)}"
        refuse(op, f"{name} has shape {list(zeros.shape)} for {found}", "the shape of the scale", "pass one for each")
