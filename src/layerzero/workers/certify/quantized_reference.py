"""What ops on quantized numbers mean, in plain Python. As workers/certify/reference.py, which has them all."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

from layerzero.ipc.vocabulary.numerics import MAGNITUDES, nearest
from layerzero.ipc.vocabulary.ops import BLOCKS
from layerzero.workers.certify.values import Attrs, Shape, Values, broadcast_shape, broadcast_value, given, offset

_FP4 = MAGNITUDES["float4_e2m1fn_x2"]
_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
_TOPS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def quantize(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    x, scale = given(inputs[:2])
    zeros = _spread(inputs[2], x.shape) if inputs[2] is not None else [0] * len(x.flat)
    steps = _spread(scale, x.shape)
    rows = zip(x.flat, steps, zeros, strict=True)
    return Values(x.shape, [quantized(v, step, zero, attrs["dtype"]) for v, step, zero in rows])


def dequantize(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """`kind`: of the numbers; packed ones come as their bytes."""
    x, scale = given(inputs[:2])
    x = _fp4(x) if attrs["kind"] == "float4_e2m1fn_x2" else x
    return Values(x.shape, _scaled(x, scale, inputs[2]))


def dynamic_quantize(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, ...]:
    """Group by group, which is all of x where there are none."""
    (x,) = given(inputs)
    kind, groups = attrs["format"], attrs["groups"]
    each = x.shape[-1] // groups if groups else len(x.flat)
    parts = [x.flat[start : start + each] for start in range(0, len(x.flat), each)] if each else []
    whole = _single(max(map(abs, x.flat), default=0.0) / (448 * 6)) if kind == "nvfp4" else 1.0
    made: list[Any] = []
    steps: list[float] = []
    zeros: list[int] = []
    for part in parts:
        step, zero = _step(part, kind, attrs["symmetric"], whole)
        made += [quantized(v, step, zero, "fp4" if kind in BLOCKS else kind) if step else 0.0 for v in part]
        steps.append(step)
        zeros.append(zero)
    shape = (*x.shape[:-1], groups) if groups else (1,) * len(x.shape)
    if kind in BLOCKS:
        codes = list(map(_fp4_code, made))
        made = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    count = math.prod(shape)
    steps, zeros = (steps or [0.0] * count), (zeros or [0] * count)
    extent = x.shape[-1] // 2 if kind in BLOCKS else x.shape[-1]
    return Values((*x.shape[:-1], extent), made), Values(shape, steps), Values(shape, zeros)


def _step(part: Sequence[float], kind: str, is_symmetric: bool, whole: float) -> tuple[float, int]:
    """The scale of numbers that share one, and their zero point."""
    if not all(map(math.isfinite, part)):
        return math.nan, 0
    most = max(map(abs, part), default=0.0)
    if not is_symmetric:
        low, high = _RANGES[kind]
        least, greatest = min(0.0, *part), max(0.0, *part)
        step = _single(_single(greatest - least) / 255)
        return step, 0 if step == 0 else max(low, min(high, round(low - _single(least / step))))
    if kind == "mxfp4":
        return (math.ldexp(1.0, max(math.frexp(most)[1] - 3, -127)) if most else 0.0), 0
    if kind == "nvfp4":
        return (_single(nearest(_single(_single(most / 6) / whole), "float8_e4m3fn") * whole) if whole else 0.0), 0
    return _single(most / _TOPS[kind]), 0


def quantized(value: float, step: float, zero: int, kind: str) -> float:
    """A number in a dtype of 8 bits, or fp4: divided in float32, rounded, cut to the dtype's finite range."""
    part = _divided(value, step)
    if kind in _RANGES:
        low, high = _RANGES[kind]
        rounded = 0 if math.isnan(part) else round(part) if math.isfinite(part) else math.copysign(1 << 31, part)
        return max(low, min(high, int(rounded) + zero))
    if kind == "fp4":
        return _nearest_fp4(0.0 if math.isnan(part) else part)
    return part if math.isnan(part) else nearest(part, kind)


def _divided(value: float, step: float) -> float:
    """In float32."""
    if step == 0:
        return math.nan if value == 0 or math.isnan(value) else math.copysign(math.inf, value)
    return _single(value / step)


def _single(value: float) -> float:
    """Rounded to float32."""
    return ctypes.c_float(value).value


def _nearest_fp4(value: float) -> float:
    size = min(abs(value), _FP4[-1])
    code = bisect.bisect_left(_FP4, size)
    if _FP4[code] != size:
        below, above = size - _FP4[code - 1], _FP4[code] - size
        code -= below < above or (below == above and code % 2)
    return math.copysign(_FP4[code], value)


def _fp4_code(value: float) -> int:
    return _FP4.index(abs(value)) | (8 if math.copysign(1, value) < 0 else 0)


def _fp4(x: Values) -> Values:
    """Packed numbers, from their bytes."""
    codes = [code for byte in x.flat for code in (byte % 16, byte // 16)]
    return Values((*x.shape[:-1], 2 * x.shape[-1]), [-_FP4[c - 8] if c > 7 else _FP4[c] for c in codes])


def _int4(x: Values) -> Values:
    codes = [code for byte in x.flat for code in (byte % 16, byte // 16)]
    return Values((*x.shape[:-1], 2 * x.shape[-1]), codes)


def _scaled(x: Values, scale: Values, zeros: Values | None) -> list[float]:
    steps = _spread(scale, x.shape)
    if zeros is None:
        return list(map(mul, x.flat, steps))
    return [(v - zero) * step for v, zero, step in zip(x.flat, _spread(zeros, x.shape), steps, strict=True)]


def _spread(scale: Values, shape: Shape) -> list[Any]:
    """The scale, or zero point, of each element."""
    groups = scale.shape[-1]
    each = shape[-1] // groups
    found: list[Any] = []
    for lead in itertools.product(*map(range, shape[:-1])):
        for group in range(groups):
            found += [broadcast_value(scale, (*lead, group))] * each
    return found


def int_matmul(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """Whole numbers; whoever calls wraps them."""
    a, b = given(inputs[:2])
    (m, k), n = a.shape[-2:], b.shape[-1]
    lead = broadcast_shape(a.shape[:-2], b.shape[:-2])
    out: list[int] = []
    for index in itertools.product(*map(range, lead)):
        first, start = offset(a.shape[:-2], index) * m * k, offset(b.shape[:-2], index) * k * n
        columns = [
            [v - _point(inputs[3], c) for v in b.flat[start + c : start + k * n : n] or [0] * k] for c in range(n)
        ]
        for i in range(m):
            row = [v - _point(inputs[2], i) for v in a.flat[first + i * k : first + (i + 1) * k]]
            out += [sum(map(mul, row, column)) for column in columns]
    return Values((*lead, m, n), out)


def _point(zeros: Values | None, number: int) -> int:
    return 0 if zeros is None else int(zeros.flat[number if len(zeros.flat) > 1 else 0])


def scaled_linear(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Of what both are dequantized to."""
    x, weight, scale = given(inputs[:3])
    x_scale, bias, x_zero, weight_zero = inputs[3:]
    x = _fp4(x) if attrs["kind"] == "float4_e2m1fn_x2" else x
    (n, wide), k = weight.shape, x.shape[-1]
    if attrs["weight_format"]:
        weight = _int4(weight)
        weight_zero = weight_zero or Values(scale.shape, [8] * len(scale.flat))
    elif wide != k:
        weight = _fp4(weight)
    rows = [x.flat[i * k : (i + 1) * k] for i in range(math.prod(x.shape[:-1]))]
    if x_scale is not None:
        flat = _scaled(x, x_scale, x_zero)
        rows = [flat[i * k : (i + 1) * k] for i in range(len(rows))]
    each = n // scale.shape[0]  # rows of the weight that share one
    spread = [
        None
        if one is None
        else Values((n, one.shape[1]), [v for i in range(n) for v in _row(one.flat, one.shape[1], i // each)])
        for one in (scale, weight_zero)
    ]
    assert spread[0] is not None
    flat = _scaled(weight, spread[0], spread[1])
    columns = [flat[i * k : (i + 1) * k] for i in range(n)]
    added = [0.0] * n if bias is None else bias.flat
    out = [sum(map(mul, row, column)) + more for row in rows for column, more in zip(columns, added, strict=True)]
    return Values((*x.shape[:-1], n), out)


def _row(flat: Sequence[Any], width: int, number: int) -> Sequence[Any]:
    return flat[number * width : (number + 1) * width]


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values | tuple[Values, ...]]] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "dynamic_quantize": dynamic_quantize,
    "int_matmul": int_matmul,
    "scaled_linear": scaled_linear,
}
