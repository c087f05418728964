"""Inputs to try a lifted call on, made without NumPy from a seed, so that two processes make the same ones.

Bytes of a pattern, repeated: making them for large tensors takes the GPU's time, not this process's. The pattern's
length is odd in elements, so that no row repeats another.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from layerzero.ipc.cuda.driver import Driver, read_back
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.places import places
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

EXTREME = 3  # a seed whose floats are zeros, large ones, infinities and NaN, too
PATTERN = 32749  # elements, a prime
UNWRITTEN = b"\x5c"  # what outputs hold before a run; between the elements of a strided one it stays
_STEP_BYTES = 64 << 20  # read back at a time
# Of each float its bytes from the lowest on, as what random bytes become: numbers between 1/8 and 2, of either sign.
_ANY = bytes(range(256))
_HIGH = {
    "float16": (0x30, 0x3B),
    "bfloat16": (0x3E, 0x3F),
    "float32": (0x3E, 0x3F),
    "float8_e4m3fn": (0x20, 0x3F),
    "float8_e5m2": (0x30, 0x3F),
}
_FORMATS = {"float16": "<e", "bfloat16": "<f", "float32": "<f", "float64": "<d"}
_EXTREMES = (0.0, -0.0, 11.0, -11.0, 300.0, -300.0, 3e4, -3e4, math.inf, -math.inf, math.nan)


def _table(least: int, most: int) -> bytes:
    """Random bytes become those from least to most, half of them with the sign."""
    width = most - least + 1
    return bytes((least + value % width) | (value & 0x80) for value in range(256))


NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


def pattern(
    op: str, name: str, specs: Mapping[str, TensorSpec | None], seed: int, attrs: Mapping[str, Any] = NO_ATTRS
) -> bytes:
    """The bytes that fill the tensor `name` of a call of `op`, from its start, again and again."""
    spec = specs[name]
    assert spec is not None
    rng = random.Random(f"{seed}:{name}")
    numel = spec.span_bytes // spec.itemsize
    within = ranges_of(attrs).get(name)
    if within is not None:
        values = [rng.randrange(*within) for _ in range(min(numel, PATTERN))]
        return b"".join(value.to_bytes(spec.itemsize, sys.byteorder, signed=within[0] < 0) for value in values)
    if name in OPS[op].indices:
        spread = places(name, specs)
        if spread is not None:
            start, stop = spread
            values = [start + (stop - start) * n // max(numel - 1, 1) for n in range(numel)]
        else:
            top = _rows(specs)
            values = [rng.randrange(top) for _ in range(min(numel, PATTERN))]
        return b"".join(value.to_bytes(spec.itemsize, sys.byteorder, signed=True) for value in values)
    count = min(numel, PATTERN)
    raw = bytearray(rng.randbytes(count * spec.itemsize))
    if spec.dtype == "bool":
        return bytes(raw.translate(bytes(value & 1 for value in range(256))))
    if spec.dtype == "float64":
        raw[7::8] = raw[7::8].translate(_table(0x3F, 0x3F))
        raw[6::8] = raw[6::8].translate(bytes(0xC0 | value & 0x3F for value in range(256)))
    elif spec.dtype in _HIGH:
        last = spec.itemsize - 1
        raw[last :: spec.itemsize] = raw[last :: spec.itemsize].translate(_table(*_HIGH[spec.dtype]))
    elif "int" in spec.dtype and spec.itemsize > 1:  # small ones
        for at in range(1, spec.itemsize):
            raw[at :: spec.itemsize] = bytes(count)
    if seed == EXTREME and spec.dtype in _FORMATS:  # half of them
        choice = [struct.pack(_FORMATS[spec.dtype], value)[-spec.itemsize :] for value in _EXTREMES]
        for at in range(0, len(raw), 2 * spec.itemsize):
            raw[at : at + spec.itemsize] = rng.choice(choice)
    return bytes(raw)


def pack_ranges(ranges: Mapping[str, tuple[int, int]]) -> str:
    """As an attribute of a call: of tensors the least value that they are tried with, and the one behind the last."""
    return json.dumps([[name, *ends] for name, ends in sorted(ranges.items())]) if ranges else ""


def ranges_of(attrs: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """What `pack_ranges` packed, of a call that has it. Raises ValueError."""
    text, found = attrs.get("ranges", ""), dict[str, tuple[int, int]]()
    try:
        told = json.loads(text) if text else ()
    except RecursionError:
        raise ValueError(f"{text[:80]!r} holds lists too deep") from None
    for one in told:
        match one:
            case [str(name), int(start), int(stop)] if start < stop and bool not in (type(start), type(stop)):
                found[name] = (start, stop)
            case _:
                raise ValueError(f"{one!r:.80} is no range of values")
    return found


def fits_dtype(dtype: str, ends: tuple[int, int]) -> bool:
    """Whether an array of these integers can have all values of a range."""
    bits = 8 * ITEMSIZE[dtype]
    least, most = (0, (1 << bits) - 1) if dtype.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return least <= ends[0] < ends[1] <= most + 1


def _rows(specs: Mapping[str, TensorSpec | None]) -> int:
    """Of the table that ids look into; without one, ids are below 8."""
    weight = specs.get("weight")
    return max(weight.shape[0], 1) if weight is not None and weight.ndim else 8


def write(driver: Driver, address: int, nbytes: int, data: bytes, stream: int) -> None:
    """Fill `nbytes` on the GPU with `data`, again and again. Waits. Needs a current context."""
    import ctypes

    if not nbytes:
        return
    length = min(len(data), nbytes)
    buffer = ctypes.create_string_buffer(data, len(data))
    driver.copy_to_device(address, ctypes.addressof(buffer), length, stream)
    done = length
    while done < nbytes:  # what is there already is a whole number of patterns
        step = min(done, nbytes - done)
        driver.copy_on_device(address + done, address, step, stream)
        done += step
    driver.synchronize_stream(stream)


def holds(driver: Driver, address: int, nbytes: int, data: bytes, stream: int) -> bool:
    """Whether `nbytes` on the GPU are as `write` has left them, once the stream has come to them."""
    if not nbytes:
        return True
    length = min(len(data), nbytes)
    count = min(max(_STEP_BYTES // length, 1), -(-nbytes // length))
    wanted = data[:length] * count
    for at in range(0, nbytes, len(wanted)):
        found = read_back(driver, address + at, min(len(wanted), nbytes - at), stream)
        if not wanted.startswith(found):
            return False
    return True


def named(op: str, inputs: Sequence[TensorSpec | None]) -> dict[str, TensorSpec | None]:
    """The inputs by their names."""
    return dict(zip(OPS[op].inputs, inputs, strict=True))
