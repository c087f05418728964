"""Quantized numbers of 8 bits in NumPy, which has no 8-bit floats: these are looked up. Used by numba.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from layerzero.ipc.vocabulary.numerics import unpack
from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._numpy_ops import reader, view, writer

_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
_SIGN = 0x80
# The largest finite code of each, and what is none: the codes of positive numbers grow as these do.
_TOP, _NAN = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}, {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


def builders(numpy: Any) -> Mapping[str, Bind]:
    """By op."""
    made = _Quantized(numpy)
    return {"quantize": made.quantize, "dequantize": made.dequantize}


class _Quantized:
    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._table = cache(self._numbers_of)

    def quantize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        numpy, dtype = self._numpy, call.attrs["dtype"]
        x, scale, zero = inputs
        assert x is not None
        assert scale is not None
        read, groups, target = reader(numpy, x), _groups(x, scale), view(numpy, outputs[0])
        steps, zeros = view(numpy, scale), None if zero is None else view(numpy, zero)
        shape = outputs[0].spec.shape

        def bound() -> None:
            with numpy.errstate(all="ignore"):
                parts = read().reshape(groups) / steps[..., None]
                if dtype in _RANGES:
                    # As float64, which has every sum with a zero point of 32 bits.
                    whole = numpy.nan_to_num(
                        numpy.rint(parts).astype(numpy.float64), nan=0.0, posinf=2.0**31, neginf=-(2.0**31)
                    )
                    moved = whole if zeros is None else whole + zeros[..., None]
                    target[...] = numpy.clip(moved, *_RANGES[dtype]).astype(dtype).reshape(shape)
                else:
                    target[...] = self._codes(parts, dtype).reshape(shape)

        return bound

    def dequantize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        numpy = self._numpy
        x, scale, zero = inputs
        assert x is not None
        assert scale is not None
        given, groups, write = view(numpy, x), _groups(x, scale), writer(numpy, outputs[0])
        steps, zeros = view(numpy, scale), None if zero is None else view(numpy, zero)
        table = None if x.spec.dtype in _RANGES else self._table(x.spec.dtype)

        def bound() -> None:
            with numpy.errstate(all="ignore"):
                parts = (given.astype(numpy.float32) if table is None else table[given]).reshape(groups)
                if zeros is not None:
                    parts = parts - zeros[..., None].astype(numpy.float32)
                write(parts * steps[..., None])

        return bound

    def _codes(self, values: Any, dtype: str) -> Any:
        """Rounded to nearest, ties to even, and cut to the finite range: of two neighbours, whose codes follow each
        other, the nearer one, or the one with the even code."""
        numpy, top = self._numpy, _TOP[dtype]
        known = self._table(dtype)[: top + 1].astype(numpy.float64)
        size = numpy.minimum(numpy.abs(values.astype(numpy.float64)), known[top])
        above = numpy.searchsorted(known, size).clip(1, top)  # of NaN it is the end
        twice, middle = 2 * size, known[above - 1] + known[above]
        codes = numpy.where((twice > middle) | ((twice == middle) & (above % 2 == 0)), above, above - 1)
        codes = numpy.where(numpy.signbit(values), codes | _SIGN, codes)
        return numpy.where(numpy.isnan(values), _NAN[dtype], codes).astype(numpy.uint8)

    def _numbers_of(self, dtype: str) -> Any:
        """What each of the 256 codes stands for."""
        return self._numpy.array(unpack(bytes(range(256)), dtype), self._numpy.float32)


def _groups(x: Block, scale: Block) -> tuple[int, ...]:
    """Elements of a row by the scale that they share."""
    *rows, width = x.spec.shape
    count = scale.spec.shape[-1]
    return (*rows, count, width // count if count else 0)
