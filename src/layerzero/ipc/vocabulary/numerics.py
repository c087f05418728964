"""How far a result may be from the right one, and how far it is. In plain Python: no library under test takes part."""

from __future__ import annotations

import bisect
import math
import operator
import struct
from collections.abc import Sequence
from typing import Literal

from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, NARROW_DTYPES, TensorSpec

# Largest |result - reference| that passes, as a share of max(1, largest |reference|). Half types lose up to half a
# unit in the last place on output (2^-11, 2^-8) and, in attention, the same again on the weights inside.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# Half types again, where a kernel starts from results that were rounded to them: sum(grad_out * output), and gates.
OF_ROUNDED = {"float16": 5e-3, "bfloat16": 4e-2}
_FROM_ROUNDED = frozenset({"attention_backward", "gated_mlp", "moe_mlp"})
_OF_RESULT = frozenset({"scaled_linear"})  # the dtype of the result says what is allowed, not that of the data

CODES = {
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q",
    "int64": "q", "float16": "e", "float32": "f", "float64": "d", "bfloat16": "H",
    "float8_e4m3fn": "B", "float8_e5m2": "B", "float4_e2m1fn_x2": "B",
}  # fmt: skip
# By size: what copies elements without looking at them.
_WHOLE: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def _magnitudes(exponent_bits: int, fraction_bits: int) -> tuple[float, ...]:
    """The finite numbers from 0 on of a format whose bias is that of IEEE 754, and all of whose codes are such."""
    bias, steps = (1 << (exponent_bits - 1)) - 1, 1 << fraction_bits
    return tuple(
        math.ldexp(code % steps + (steps if code >= steps else 0), max(code // steps, 1) - bias - fraction_bits)
        for code in range(steps << exponent_bits)
    )


# By code, without the sign bit. Source: OCP 8-bit floating point specification 1.0; OCP microscaling formats 1.0 (fp4).
MAGNITUDES = {
    "float8_e4m3fn": _magnitudes(4, 3)[:-1],  # the last code is NaN
    "float8_e5m2": _magnitudes(5, 2)[:-4],  # infinity and three NaN
    "float4_e2m1fn_x2": _magnitudes(2, 1),
}
_CODE_OF = {dtype: {value: code for code, value in enumerate(values)} for dtype, values in MAGNITUDES.items()}


def nearest(value: float, dtype: str) -> float:
    """The finite number of an 8-bit format that is nearest to a finite one; of two, that with the even code."""
    known = MAGNITUDES[dtype]
    size = min(abs(value), known[-1])
    code = bisect.bisect_left(known, size)
    if known[code] != size:
        below, above = size - known[code - 1], known[code] - size
        code -= below < above or (below == above and code % 2)
    return math.copysign(known[code], value)


def tolerance(dtype: str, op: str = "", output: str = "") -> float:
    """What TOLERANCE says of a kernel of an op on data of this dtype; every other dtype must be exact. `output`: the
    dtype of a result, where it is another one than the data's: the coarser of the two counts; integers are exact."""
    if "int" in output:
        return 0.0
    if op in _OF_RESULT:
        return TOLERANCE[output or "float32"]
    known = {**TOLERANCE, **OF_ROUNDED} if op in _FROM_ROUNDED else TOLERANCE
    found = known.get(dtype, 0.0)
    return max(found, known[output]) if found and output in known else found


def pack(values: Sequence[float], dtype: str) -> bytes:
    """Numbers as bytes in native order, rounded to the nearest; those of 8-bit floats must be exact. Packed fp4 has its
    bytes for numbers."""
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        codes = _CODE_OF[dtype]
        return bytes([codes[abs(value)] | (0x80 if math.copysign(1, value) < 0 else 0) for value in values])
    if dtype == "bfloat16":
        count = len(values)
        wide, halves = struct.pack(f"<{count}f", *values), bytearray(2 * count)
        if wide[::4].count(0) < count or wide[1::4].count(0) < count:  # else all are exact, which is quickly seen
            bits = struct.unpack(f"<{count}I", wide)
            return struct.pack(f"<{count}H", *[(one + 0x7FFF + (one >> 16 & 1)) >> 16 for one in bits])
        halves[::2], halves[1::2] = wide[2::4], wide[3::4]
        return bytes(halves)
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def unpack(data: bytes | memoryview, dtype: str) -> list[float]:
    """The numbers in contiguous memory."""
    count = len(data) // struct.calcsize(CODES[dtype])
    values = struct.unpack(f"<{count}{CODES[dtype]}", data)
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        known = [*MAGNITUDES[dtype], *([math.inf] if dtype == "float8_e5m2" else []), *[math.nan] * 3]
        return [math.copysign(known[code & 0x7F], 1 - (code >> 6 & 2)) for code in values]
    if dtype == "bfloat16":
        halves, wide = bytes(data), bytearray(4 * count)
        wide[2::4], wide[3::4] = halves[::2], halves[1::2]
        return list(struct.unpack(f"<{count}f", wide))
    return list(values)


def _runs(spec: TensorSpec) -> tuple[list[int], int, int]:
    """The runs of elements, equally far from each other, that make up a tensor in row-major order: where each starts,
    how long they are, and how far apart their elements are; all in elements."""
    shape, strides = list(spec.shape), list(spec.strides)
    extent, step = (shape.pop(), strides.pop()) if shape else (1, 1)
    while shape and strides[-1] == extent * step:  # the next row begins where this one would go on
        extent *= shape.pop()
        strides.pop()
    starts = [0]
    for outer, stride in zip(shape, strides, strict=True):
        starts = [start + i * stride for start in starts for i in range(outer)]
    return starts, extent, step


def scatter(data: bytes, spec: TensorSpec, target: memoryview) -> None:
    """Write row-major elements where the spec's strides say."""
    if spec.is_contiguous:
        target[: len(data)] = data
        return
    starts, extent, step = _runs(spec)
    if not extent:
        return
    to, elements = target[: spec.span_bytes].cast(_WHOLE[spec.itemsize]), memoryview(data).cast(_WHOLE[spec.itemsize])
    reach = (extent - 1) * step + 1
    for number, start in enumerate(starts):
        to[start : start + reach : step] = elements[number * extent : (number + 1) * extent]


def gather(memory: memoryview, spec: TensorSpec) -> bytes:
    """The elements of a strided view in row-major order."""
    if spec.is_contiguous:
        return bytes(memory[: spec.span_bytes])
    starts, extent, step = _runs(spec)
    if not extent:
        return b""
    elements = memory[: spec.span_bytes].cast(_WHOLE[spec.itemsize])
    if not step:  # one element for all
        return b"".join([bytes(elements[start : start + 1]) * extent for start in starts])
    reach = (extent - 1) * step + 1
    return b"".join([elements[start : start + reach : step].tobytes() for start in starts])


def difference(values: Sequence[float], expected: Sequence[float], dtype: str) -> float:
    """Largest difference as a share of max(1, largest finite expected magnitude).

    Infinite when NaN or an infinity is not where it is expected, and for any difference of integers.
    """
    is_same = list(values) == list(expected)  # the usual case of a copy
    if not is_same and dtype in NARROW_DTYPES:  # exact, but NaN is no number's equal
        pairs = zip(values, expected, strict=True)
        is_same = all(value == want or (math.isnan(value) and math.isnan(want)) for value, want in pairs)
    if is_same or dtype not in FLOAT_DTYPES:
        return 0.0 if is_same else math.inf
    if all(map(math.isfinite, values)) and all(map(math.isfinite, expected)) and len(values) == len(expected):
        largest = max(map(abs, map(operator.sub, values, expected)))
        return float(largest / max([1.0, *map(abs, expected)]))
    scale, largest = 1.0, 0.0
    for value, want in zip(values, expected, strict=True):
        if math.isfinite(want) and math.isfinite(value):
            scale = max(scale, abs(want))
            largest = max(largest, abs(value - want))
        elif not (value == want or (math.isnan(value) and math.isnan(want))):
            return math.inf
    return largest / scale
