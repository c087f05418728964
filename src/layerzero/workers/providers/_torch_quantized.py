"""Ops on quantized numbers in PyTorch, on any device. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import BLOCKS
from layerzero.ipc.vocabulary.quantized_shapes import BYTES, INT4, PACKED, SCALED_DTYPES
from layerzero.workers.provider import Call
from layerzero.workers.providers._kept_weights import KeptWeights, read_most_bytes
from layerzero.workers.providers._torch_ops import Builder, Run

_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
# Halfway between the numbers of fp4: ties go to the even code, so that every other one belongs to what is above it.
_HALVES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


_ROWS = 1 << 22  # so many numbers of a weight that is not kept are in floats at once: 16 MiB, which stay


class Quantized:
    """One method per op, each a Builder."""

    def __init__(self, torch: Any, is_gpu: bool) -> None:
        self.torch = torch
        self.is_gpu = is_gpu
        self.kept = KeptWeights(read_most_bytes(os.environ))
        self.own = threading.local()  # of each thread: floats for rows of a weight

    def builders(self) -> Mapping[str, Builder]:
        return {
            "quantize": self.quantize,
            "dequantize": self.dequantize,
            "dynamic_quantize": self.dynamic_quantize,
            "int_matmul": self.int_matmul,
            "scaled_linear": self.scaled_linear,
        }

    def quantize(self, views: Sequence[Any], call: Call) -> Run:
        x, scale, zero = views
        dtype, groups = call.attrs["dtype"], (scale.shape[-1], x.shape[-1] // scale.shape[-1])

        def run(out: Any) -> None:
            parts = x.float().unflatten(-1, groups) / scale.unsqueeze(-1)
            out.copy_(self.rounded(parts, dtype, None if zero is None else zero.unsqueeze(-1)).flatten(-2))

        return run

    def rounded(self, parts: Any, dtype: str, zero: Any = None) -> Any:
        """float32 in a dtype of 8 bits, cut to its range; changes what it is given."""
        torch = self.torch
        if dtype in _RANGES:
            whole = parts.round_().nan_to_num_(0.0, math.inf, -math.inf)
            return (whole if zero is None else whole.add_(zero)).clamp_(*_RANGES[dtype]).to(getattr(torch, dtype))
        narrow = getattr(torch, dtype)
        top = torch.finfo(narrow).max
        return parts.clamp_(-top, top).to(narrow)

    def dequantize(self, views: Sequence[Any], call: Call) -> Run:
        x, scale, zero = views
        spec = call.inputs[0]
        assert spec is not None

        def run(out: Any) -> None:
            out.copy_(self._numbers(x, spec.dtype, scale, zero))

        return run

    def _numbers(self, x: Any, dtype: str, scale: Any, zero: Any) -> Any:
        """What quantized numbers stand for, in float32."""
        wide = self._fp4(x) if dtype == PACKED else (self._int4(x) if dtype == INT4 else x).float()
        groups = (scale.shape[-1], wide.shape[-1] // scale.shape[-1])
        parts = wide.unflatten(-1, groups)
        if zero is not None:
            parts = parts - zero.unsqueeze(-1)
        return (parts * scale.unsqueeze(-1)).flatten(-2)

    def _fp4(self, x: Any) -> Any:
        torch = self.torch
        codes = x.view(torch.uint8)
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        magnitude, exponent = codes & 1, codes >> 1 & 3
        # 0 and 0.5 without an exponent; else 2 ** (exponent - 1) times 1 or 1.5
        wide = torch.where(exponent > 0, (2.0 + magnitude) * 0.25 * (1 << exponent.int()), magnitude * 0.5)
        return torch.where(codes > 7, -wide, wide)

    def _int4(self, x: Any) -> Any:
        return self.torch.stack((x & 15, x >> 4), -1).flatten(-2)

    def dynamic_quantize(self, views: Sequence[Any], call: Call) -> Run:
        torch, (x,) = self.torch, views
        kind, groups = call.attrs["format"], call.attrs["groups"]
        is_symmetric = call.attrs["symmetric"]

        def run(targets: Any) -> None:
            out, scale, zero = targets
            zero.zero_()
            if not x.numel():
                scale.zero_()
                return
            parts = x.float()
            parts = parts.unflatten(-1, (groups, -1)) if groups else parts.reshape(1, -1)
            points = None
            if is_symmetric:
                most = parts.abs().amax(-1, keepdim=True)
                step = self._step(most, kind)
            else:
                least, greatest = torch.aminmax(parts, dim=-1, keepdim=True)
                least, greatest = least.clamp(max=0.0), greatest.clamp(min=0.0)
                step = self._over(greatest - least, 255.0)
                low, high = _RANGES[kind]
                points = (low - least / step).round_().clamp_(low, high)
            is_fit = step.isfinite() & (step != 0)
            if points is not None:
                points = torch.where(is_fit, points, 0.0)
                zero.copy_(points.view(zero.shape))
            scale.copy_(torch.where(step.isfinite(), step, math.nan).view(scale.shape))
            scaled = parts / torch.where(is_fit, step, 1.0)
            if kind in BLOCKS:
                self._pack(torch.where(is_fit, scaled, 0.0).flatten(-2), out)
                return
            if kind in _RANGES:
                scaled = torch.where(is_fit, scaled, 0.0)
            else:
                scaled = torch.where(is_fit, scaled, torch.where(step == 0, 0.0, math.nan))
            out.copy_(self.rounded(scaled, kind, points).reshape(out.shape))

        return run

    def _step(self, most: Any, kind: str) -> Any:
        """The scales of groups whose greatest numbers are known."""
        torch = self.torch
        if kind == "mxfp4":
            exponent = torch.frexp(most)[1]
            step = torch.ldexp(torch.ones_like(most), (exponent - 3).clamp(min=-127))
            return torch.where(most.isfinite() & (most > 0), step, torch.where(most == 0, 0.0, math.nan))
        if kind == "nvfp4":
            whole = self._over(most.amax(), 448.0 * 6.0)
            blocks = self._over(most, 6.0) / torch.where(whole == 0, 1.0, whole)
            return self.rounded(blocks, "float8_e4m3fn").float() * whole
        top = 127.0 if kind == "int8" else torch.finfo(getattr(torch, kind)).max
        return self._over(most, top)

    def _over(self, numbers: Any, divisor: float) -> Any:
        """Quotients, rounded once: of a number torch takes the inverse on a GPU, and multiplies."""
        return numbers / self.torch.full_like(numbers, divisor)

    def _pack(self, numbers: Any, out: Any) -> None:
        torch = self.torch
        size = numbers.abs()
        codes = torch.signbit(numbers).to(torch.uint8) << 3
        for number, half in enumerate(_HALVES):
            codes += size >= half if number % 2 else size > half
        out.view(torch.uint8).copy_(codes[..., ::2] | codes[..., 1::2] << 4)

    def int_matmul(self, views: Sequence[Any], call: Call) -> Run:
        a, b, a_zero, b_zero = views

        def run(out: Any) -> None:
            out.copy_(self._product(a, b, a_zero, b_zero))

        return run

    def _product(self, a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
        """int32. torch's product is of int8: what has no sign is moved by 128 first, and its zero point with it."""
        torch = self.torch
        (a, a_zero), (b, b_zero) = (self._signed(*pair) for pair in ((a, a_zero), (b, b_zero)))
        if b.ndim == 2:
            found = self._matrix(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
        else:
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            one, other = (t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (a, b))
            found = torch.stack([self._matrix(*both) for both in zip(one, other, strict=True)])
            found = found.unflatten(0, lead)
        if a_zero is not None:
            found = found - a_zero * b.sum(-2, keepdim=True, dtype=torch.int32)
        if b_zero is not None:
            found = found - b_zero * a.sum(-1, keepdim=True, dtype=torch.int32)
        if a_zero is not None and b_zero is not None:
            found = found + a.shape[-1] * a_zero * b_zero
        return found

    def _matrix(self, a: Any, b: Any) -> Any:
        """Of two matrices of int8. cuBLAS takes rows of the first and columns of the second that lie in a row each, at
        multiples of 16 bytes, and more than 16 rows."""
        torch, (rows, extent), columns = self.torch, a.shape, b.shape[1]
        if not extent:
            return torch.zeros(rows, columns, dtype=torch.int32, device=a.device)
        if not self.is_gpu:
            return torch._int_mm(a, b)
        inner = extent + -extent % 16
        a = _laid(a, max(rows, 32), inner)
        b = _laid(b.t(), columns + -columns % 16, inner).t()
        return torch._int_mm(a, b)[:rows, :columns]

    def _signed(self, x: Any, zero: Any) -> tuple[Any, Any]:
        """The same numbers as int8 and a zero point."""
        torch = self.torch
        if x.dtype == torch.int8:
            return x, zero
        shift = torch.full((1, 1), -128, dtype=torch.int32, device=x.device)
        return (x ^ 128).view(torch.int8), shift if zero is None else zero - 128

    def scaled_linear(self, views: Sequence[Any], call: Call) -> Run:
        """Integers with one scale a row are multiplied as such; all else in float32, of what it stands for."""
        torch = self.torch
        x, weight, scale, x_scale, bias, x_zero, weight_zero = views
        kinds = [spec.dtype for spec in call.inputs[:2] if spec is not None]
        is_int4 = call.attrs["weight_format"] == INT4
        is_by_rows = scale.shape[1] == 1 and (x_scale is None or x_scale.shape[-1] == 1)

        def in_integers(out: Any) -> None:
            lines = x.shape[:-1]
            column = None if weight_zero is None else self._each_row(weight_zero, weight.shape[0]).t()
            points = None if x_zero is None else x_zero.expand(*lines, 1).reshape(-1, 1)
            found = self._product(x.flatten(0, -2), weight.t(), points, column).float()
            found *= x_scale.expand(*lines, 1).reshape(-1, 1)
            found *= self._each_row(scale, weight.shape[0]).t()
            if bias is not None:
                found += bias
            out.copy_(found.view(out.shape))

        kind = INT4 if is_int4 else kinds[1]
        kept, linear = self._kept_weight(views, kind), torch.nn.functional.linear

        def in_floats(out: Any) -> None:
            wide = x.float() if kinds[0] in SCALED_DTYPES else self._numbers(x, kinds[0], x_scale, x_zero)
            numbers = kept()
            if numbers is not None:
                out.copy_(linear(wide, numbers, bias))
                return
            for rows, part in self._rows(weight, scale, weight_zero, kind):
                out[..., rows].copy_(linear(wide, part, None if bias is None else bias[rows]))

        is_whole = set(kinds) <= set(BYTES) and not is_int4
        return in_integers if is_whole and is_by_rows else in_floats

    def _kept_weight(self, views: Sequence[Any], dtype: str) -> Callable[[], Any]:
        """A function that gives what a weight stands for, in float32: on the CPU, of arrays without gaps, made once for
        all calls that come with the same bytes; None where it is not kept."""
        torch, arrays = self.torch, (views[1], views[2], views[6])
        given = [array for array in arrays if array is not None]
        if self.is_gpu or not all(array.is_contiguous() and array.numel() for array in given):
            return lambda: None
        places = [(array.data_ptr(), array.numel() * array.itemsize) for array in given]
        kind = (dtype, *(tuple(array.shape) for array in given))
        shape = (len(views[1]), views[1].shape[1] * (2 if dtype in (INT4, PACKED) else 1))

        def make(copies: Sequence[Any]) -> Any:
            own = [
                torch.frombuffer(copy, dtype=torch.uint8).view(array.dtype).view(array.shape)
                for copy, array in zip(copies, given, strict=True)
            ]
            made = torch.empty(shape)
            for _ in self._rows(own[0], own[1], own[2] if len(own) > 2 else None, dtype, made):
                pass
            return made

        return lambda: self.kept.get(kind, places, 4 * math.prod(shape), make)

    def _rows(self, weight: Any, scale: Any, zero: Any, dtype: str, made: Any = None) -> Iterator[tuple[slice, Any]]:
        """Some rows of a weight after the others, and what they stand for, in float32; on a GPU all at once. Without
        `made`, where they go, each takes the place of the last: memory of this size that is given back for other calls
        to take is in pieces soon, and glibc's heap grows by as much for each weight."""
        torch, steps = self.torch, self._each_row(scale, weight.shape[0])
        points = None if zero is None else self._each_row(zero, weight.shape[0])
        if dtype == INT4 and points is None:
            points = torch.full_like(steps, 8)
        width = weight.shape[1] * (2 if dtype in (INT4, PACKED) else 1)
        count = max(_ROWS // max(width, 1), 1)
        if self.is_gpu:
            yield slice(None), self._numbers(weight, dtype, steps, points)
            return
        if made is None:
            made = getattr(self.own, "floats", None)
            if made is None or made.numel() < count * width:
                made = self.own.floats = torch.empty(max(count * width, _ROWS))
            made = made[: count * width].view(count, width)
        for start in range(0, len(weight), count):
            rows = slice(start, min(start + count, len(weight)))
            codes = weight[rows]
            wide = self._fp4(codes) if dtype == PACKED else self._int4(codes) if dtype == INT4 else codes
            part = made[rows] if len(made) >= len(weight) else made[: rows.stop - start]
            part.copy_(wide)
            parts = part.view(len(part), steps.shape[1], width // steps.shape[1])
            if points is not None:
                parts.sub_((points[rows] if len(points) > 1 else points).unsqueeze(-1))
            parts.mul_((steps[rows] if len(steps) > 1 else steps).unsqueeze(-1))
            yield rows, part

    def _each_row(self, scale: Any, rows: int) -> Any:
        """A scale for each row of a weight, of which so many share one."""
        return scale.repeat_interleave(rows // scale.shape[0], 0) if scale.shape[0] not in (1, rows) else scale


def _laid(x: Any, rows: int, columns: int) -> Any:
    """A matrix of bytes with zeros up to that size, whose rows have no gaps and start at multiples of 16."""
    is_laid = x.stride(1) == 1 and not (x.stride(0) | x.data_ptr()) % 16
    if is_laid and x.shape == (rows, columns):
        return x
    laid = x.new_zeros(rows, columns)
    laid[: x.shape[0], : x.shape[1]] = x
    return laid
