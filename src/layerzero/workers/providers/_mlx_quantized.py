"""Ops on quantized numbers, by MLX. Used by mlx.py, which gives 8-bit floats and fp4 as bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.ipc.vocabulary.numerics import MAGNITUDES
from layerzero.ipc.vocabulary.quantized_shapes import BYTES, INT4, PACKED, SCALED_DTYPES
from layerzero.workers.provider import Call

_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
_EXACT = 256  # so many products of 8 bits add up to less than 2 ** 24, which float32 has exact in any order
_LARGEST = 3e38  # below what float32 has
_GROUPS = (128, 64, 32)  # numbers that may share a scale in MLX's own product
# Halfway between the numbers of fp4; ties go to the even code.
_HALVES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    """By name of the op: `call -> compute(*arrays)`."""
    made = _Quantized(mx)
    ops = (made.quantize, made.dequantize, made.dynamic_quantize, made.int_matmul, made.scaled_linear)
    return {op.__name__: op for op in ops}


def widened(mx: Any, x: Any, dtype: str) -> Any:
    """Quantized numbers, given as what mlx.py makes of them, in float32."""
    if dtype in (PACKED, INT4):
        codes = mx.stack((x & 15, x >> 4), axis=-1).reshape((*x.shape[:-1], 2 * x.shape[-1]))
        known = MAGNITUDES[PACKED]
        table = [*known, *(-v for v in known)] if dtype == PACKED else range(16)
        return mx.take(mx.array(list(table), mx.float32), codes)
    if dtype == "float8_e4m3fn":
        return mx.from_fp8(x, mx.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (x.astype(mx.uint16) << 8).view(mx.float16).astype(mx.float32)
    return x.astype(mx.float32)


def narrowed(mx: Any, parts: Any, dtype: str) -> Any:
    """float32 in a dtype of 8 bits, cut to its range; those of 8-bit floats as bytes. MLX makes 448 of NaN."""
    if dtype == "float8_e4m3fn":
        return mx.where(mx.isnan(parts), mx.array(0x7F, mx.uint8), mx.to_fp8(parts))
    whole = mx.where(mx.isnan(parts), 0.0, mx.round(parts))
    return mx.clip(whole, *_RANGES[dtype]).astype(getattr(mx, dtype))


class _Quantized:
    """One method per op."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx

    def quantize(self, call: Call) -> Callable[..., Any]:
        dtype = call.attrs["dtype"]

        def compute(x: Any, scale: Any, zero: Any) -> Any:
            groups = (*x.shape[:-1], scale.shape[-1], -1)
            parts = x.astype(self.mx.float32).reshape(groups) / scale[..., None]
            return self._rounded(parts, dtype, None if zero is None else zero[..., None]).reshape(x.shape)

        return compute

    def _rounded(self, parts: Any, dtype: str, zero: Any) -> Any:
        mx = self.mx
        whole = mx.where(mx.isnan(parts), 0.0, mx.round(parts))
        whole = whole if zero is None else whole + zero
        return mx.clip(whole, *_RANGES[dtype]).astype(getattr(mx, dtype))

    def dequantize(self, call: Call) -> Callable[..., Any]:
        spec = call.inputs[0]
        assert spec is not None
        dtype = getattr(self.mx, call.outputs[0].dtype)
        return lambda x, scale, zero: self._numbers(x, spec.dtype, scale, zero).astype(dtype)

    def _numbers(self, x: Any, dtype: str, scale: Any, zero: Any) -> Any:
        """What quantized numbers stand for, in float32."""
        wide = widened(self.mx, x, dtype)
        parts = wide.reshape((*wide.shape[:-1], scale.shape[-1], -1))
        parts = parts if zero is None else parts - zero[..., None]
        return (parts * scale[..., None]).reshape(wide.shape)

    def dynamic_quantize(self, call: Call) -> Callable[..., Any]:
        mx, kind, groups = self.mx, call.attrs["format"], call.attrs["groups"]
        is_symmetric, steps = call.attrs["symmetric"], call.outputs[1].shape

        def compute(x: Any) -> Any:
            parts = x.astype(mx.float32).reshape((*x.shape[:-1], groups, -1) if groups else (1, -1))
            points: Any = mx.array(0.0)
            if not is_symmetric:
                least = mx.minimum(mx.min(parts, axis=-1, keepdims=True), 0.0)
                step = (mx.maximum(mx.max(parts, axis=-1, keepdims=True), 0.0) - least) / 255.0
                low, high = _RANGES[kind]
                points = mx.clip(mx.round(low - least / step), low, high)
            else:
                most = mx.max(mx.abs(parts), axis=-1, keepdims=True)
                step = self._power(most) if kind == "mxfp4" else most / 127.0
            step = mx.where(mx.isfinite(step), step, math.nan)
            is_fit = mx.isfinite(step) & (step != 0)
            points = mx.where(is_fit, points, 0.0)
            scaled = mx.where(is_fit, parts / mx.where(is_fit, step, 1.0), 0.0)
            if kind == "mxfp4":
                numbers = self._packed(scaled.reshape(x.shape))
            else:
                numbers = self._rounded(scaled, kind, points).reshape(x.shape)
            return numbers, step.reshape(steps), mx.broadcast_to(points, step.shape).astype(mx.int32).reshape(steps)

        return compute

    def _power(self, most: Any) -> Any:
        """2 ** (floor(log2 of it) - 2), by the exponent of float32; NaN for what is not finite."""
        mx = self.mx
        exponent = mx.maximum((most.view(mx.uint32) >> 23).astype(mx.int32) - 127 - 2, -127)
        bits = mx.where(exponent == -127, 1 << 22, (exponent + 127) << 23).astype(mx.uint32)
        step = mx.where(most == 0, 0.0, bits.view(mx.float32))
        return mx.where(mx.isfinite(most), step, math.nan)

    def _packed(self, numbers: Any) -> Any:
        mx = self.mx
        size = mx.abs(numbers)
        codes = (numbers.view(mx.uint32) >> 31 << 3).astype(mx.uint8)
        for number, half in enumerate(_HALVES):
            codes = codes + (size >= half if number % 2 else size > half).astype(mx.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4

    def int_matmul(self, call: Call) -> Callable[..., Any]:
        return self._product

    def _product(self, a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
        """int32, by products of float32 that are exact."""
        mx = self.mx
        extent = a.shape[-1]
        one, other = a.astype(mx.float32), b.astype(mx.float32)
        found: Any = 0
        for start in range(0, extent, _EXACT):
            part = slice(start, start + _EXACT)
            found = found + mx.matmul(one[..., part], other[..., part, :]).astype(mx.int32)
        if a_zero is not None:
            found = found - a_zero * mx.sum(b.astype(mx.int32), axis=-2, keepdims=True)
        if b_zero is not None:
            found = found - b_zero * mx.sum(a.astype(mx.int32), axis=-1, keepdims=True)
        if a_zero is not None and b_zero is not None:
            found = found + extent * a_zero * b_zero
        return found

    def scaled_linear(self, call: Call) -> Callable[..., Any]:
        """Integers with one scale a row are multiplied as such; all else in float32, of what it stands for."""
        mx, dtype = self.mx, getattr(self.mx, call.outputs[0].dtype)
        kinds = [spec.dtype for spec in call.inputs[:2] if spec is not None]
        is_int4 = call.attrs["weight_format"] == INT4
        is_whole = set(kinds) <= set(BYTES) and not is_int4

        def compute(x: Any, weight: Any, scale: Any, x_scale: Any, bias: Any, x_zero: Any, weight_zero: Any) -> Any:
            shared = weight.shape[0] // scale.shape[0]  # rows that have one
            steps, points = mx.repeat(scale, shared, axis=0), weight_zero
            if points is not None:
                points = mx.repeat(points, shared, axis=0)
            if is_whole and scale.shape[1] == x_scale.shape[-1] == 1:
                column = None if points is None else points.T
                found = self._product(x, weight.T, x_zero, column).astype(mx.float32) * x_scale * steps.T
            else:
                if is_int4 and points is None:
                    points = mx.full(steps.shape, 8, mx.int32)
                wide = x.astype(mx.float32)
                if kinds[0] not in SCALED_DTYPES:
                    wide = self._numbers(x, kinds[0], x_scale, x_zero)
                kind = INT4 if is_int4 else kinds[1]
                size = self._group(kind, wide.shape[-1], steps.shape[1])
                found = self._of_groups(wide, weight, kind, steps, points, size) if size else None
                if found is None:
                    found = mx.matmul(wide, self._numbers(weight, kind, steps, points).T)
            return (found if bias is None else found + bias).astype(dtype)

        return compute

    def _group(self, kind: str, extent: int, groups: int) -> int:
        """How many numbers a group of MLX's own product has here; 0 where it has none such."""
        if kind not in (INT4, *BYTES) or not groups or not extent:
            return 0
        return next((size for size in _GROUPS if extent // groups % size == 0), 0)

    def _of_groups(self, x: Any, weight: Any, kind: str, steps: Any, points: Any, size: int) -> Any:
        """By MLX's own product, which takes unsigned numbers as words of 32 bits and adds a bias to each group; None
        where a scaled number or a bias is infinite: of both the sum is none."""
        mx = self.mx
        if kind == "int8":
            weight = weight.view(mx.uint8) ^ 128
            points = 128 if points is None else points + 128
        bias = mx.zeros_like(steps) if points is None else -(points * steps)
        bits = 4 if kind == INT4 else 8
        if not max(mx.max(mx.abs(steps)).item() * (1 << bits), mx.max(mx.abs(bias)).item()) < _LARGEST:
            return None
        each = x.shape[-1] // steps.shape[1] // size
        steps, bias = (mx.repeat(one, each, axis=1) if each > 1 else one for one in (steps, bias))
        words = mx.contiguous(weight).view(mx.uint32)
        return mx.quantized_matmul(x, words, steps, bias, transpose=True, group_size=size, bits=bits)
