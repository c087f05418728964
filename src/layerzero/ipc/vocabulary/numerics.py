"""How far a result may be from the right one, and how far it is. In plain Python: no library under test takes part."""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Sequence

from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

# Largest |result - reference| that passes, as a share of max(1, largest |reference|). Half types lose up to half a
# unit in the last place on output (2^-11, 2^-8) and, in attention, the same again on the weights inside.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}

CODES = {
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q",
    "int64": "q", "float16": "e", "float32": "f", "float64": "d", "bfloat16": "H",
    "float8_e4m3fn": "B", "float8_e5m2": "B", "float4_e2m1fn_x2": "B",
}  # fmt: skip


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


def tolerance(dtype: str) -> float:
    """What TOLERANCE says; every other dtype must be exact."""
    return TOLERANCE.get(dtype, 0.0)


def pack(values: Sequence[float], dtype: str) -> bytes:
    """Numbers as bytes in native order. bfloat16 is cut off, so its values must be exact in it; so must those of 8-bit
    floats. Packed fp4 has its bytes for numbers."""
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        codes = _CODE_OF[dtype]
        return bytes([codes[abs(value)] | (0x80 if math.copysign(1, value) < 0 else 0) for value in values])
    if dtype == "bfloat16":
        return b"".join([struct.pack("<f", value)[2:] for value in values])
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def unpack(data: bytes | memoryview, dtype: str) -> list[float]:
    """The numbers in contiguous memory."""
    count = len(data) // struct.calcsize(CODES[dtype])
    values = struct.unpack(f"<{count}{CODES[dtype]}", data)
    if dtype in ("float8_e4m3fn", "float8_e5m2"):
        known = [*MAGNITUDES[dtype], *([math.inf] if dtype == "float8_e5m2" else []), *[math.nan] * 3]
        return [math.copysign(known[code & 0x7F], 1 - (code >> 6 & 2)) for code in values]
    if dtype == "bfloat16":
        wide = struct.pack(f"<{count}I", *[bits << 16 for bits in values])
        return list(struct.unpack(f"<{count}f", wide))
    return list(values)


def row_starts(spec: TensorSpec) -> list[int]:
    """For each run along the last dimension, in row-major order: where it starts, in elements."""
    starts = [0]
    for extent, stride in zip(spec.shape[:-1], spec.strides[:-1], strict=True):
        starts = [start + i * stride for start in starts for i in range(extent)]
    return starts


def scatter(data: bytes, spec: TensorSpec, target: memoryview) -> None:
    """Write row-major elements where the spec's strides say."""
    if spec.is_contiguous:
        target[: len(data)] = data
        return
    size, row = spec.itemsize, spec.shape[-1] * spec.itemsize
    for number, start in enumerate(row_starts(spec)):
        source = data[number * row : (number + 1) * row]
        if spec.strides[-1] == 1:
            target[start * size : start * size + row] = source
            continue
        step = spec.strides[-1] * size
        for lane in range(size):  # byte by byte of all elements at once
            first = start * size + lane
            target[first : first + (spec.shape[-1] - 1) * step + 1 : step] = source[lane::size]


def gather(memory: memoryview, spec: TensorSpec) -> bytes:
    """The elements of a strided view in row-major order."""
    if spec.is_contiguous:
        return bytes(memory[: spec.span_bytes])
    size, n, stride = spec.itemsize, spec.shape[-1], spec.strides[-1]
    rows = []
    for start in row_starts(spec):
        if stride == 1:
            rows.append(bytes(memory[start * size : (start + n) * size]))
            continue
        row = bytearray(n * size)
        for lane in range(size):
            first = start * size + lane
            row[lane::size] = (
                memory[first : first + (n - 1) * stride * size + 1 : stride * size]
                if stride
                else bytes(memory[first : first + 1]) * n
            )
        rows.append(bytes(row))
    return b"".join(rows)


def difference(values: Sequence[float], expected: Sequence[float], dtype: str) -> float:
    """Largest difference as a share of max(1, largest finite expected magnitude).

    Infinite when NaN or an infinity is not where it is expected, and for any difference of integers.
    """
    if dtype not in FLOAT_DTYPES:
        return 0.0 if list(values) == list(expected) else math.inf
    if list(values) == list(expected):  # the usual case of a copy; what follows is ten times slower
        return 0.0
    scale, largest = 1.0, 0.0
    for value, want in zip(values, expected, strict=True):
        if math.isfinite(want) and math.isfinite(value):
            scale = max(scale, abs(want))
            largest = max(largest, abs(value - want))
        elif not (value == want or (math.isnan(value) and math.isnan(want))):
            return math.inf
    return largest / scale
