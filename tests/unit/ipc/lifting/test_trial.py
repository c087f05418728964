"""Inputs that lifted calls are tried on: of arrays of integers of a function, values that its program has named."""

from __future__ import annotations

import math
import struct

import pytest

from layerzero.ipc.lifting.trial import EXTREME, PATTERN, fits_dtype, pack_ranges, pattern, ranges_of
from layerzero.ipc.vocabulary.ops import FUNCTION_ON_GPU
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPECS = {
    "a0": TensorSpec.contiguous("int64", (1000,)),
    "a1": TensorSpec.contiguous("int8", (PATTERN + 5,)),
    "a2": TensorSpec.contiguous("uint8", (700,)),
    "a3": TensorSpec.contiguous("float32", (4,)),
}


def test_values_are_within_their_range_and_two_processes_make_the_same() -> None:
    attrs = {"ranges": pack_ranges({"a0": (-3, 4), "a1": (-128, 128), "a2": (250, 256)})}
    made = {name: pattern(FUNCTION_ON_GPU, name, SPECS, 1, attrs) for name in SPECS}
    assert set(struct.unpack("=1000q", made["a0"])) == set(range(-3, 4))
    assert len(made["a1"]) == PATTERN
    assert set(struct.unpack(f"={PATTERN}b", made["a1"])) == set(range(-128, 128))
    assert set(made["a2"]) == set(range(250, 256))
    assert all(0.125 <= abs(value) <= 2 for value in struct.unpack("=4f", made["a3"]))
    assert made == {name: pattern(FUNCTION_ON_GPU, name, SPECS, 1, attrs) for name in SPECS}
    assert made["a0"] != pattern(FUNCTION_ON_GPU, "a0", SPECS, 2, attrs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_one_seed_has_numbers_that_branches_are_for(dtype: str) -> None:
    specs = {"a0": TensorSpec.contiguous(dtype, (1000,))}
    data = pattern(FUNCTION_ON_GPU, "a0", specs, EXTREME)
    if dtype == "bfloat16":
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    values = struct.unpack({"float16": "<1000e", "float64": "<1000d"}.get(dtype, "<1000f"), data)
    assert {0.0, math.inf, -math.inf, 11.0, -300.0} <= set(values)
    assert any(map(math.isnan, values))
    assert sum(0.125 <= abs(value) <= 2 for value in values) == 500
    assert max(abs(value) for value in values if math.isfinite(value)) > 29e3


def test_ranges_cross_as_text() -> None:
    assert ranges_of({"ranges": pack_ranges({"a1": (0, 5), "a0": (-1, 1)})}) == {"a0": (-1, 1), "a1": (0, 5)}
    assert (pack_ranges({}), ranges_of({}), ranges_of({"ranges": ""})) == ("", {}, {})


@pytest.mark.parametrize(
    "text",
    ["5", "[5]", "[[0, 0, 5]]", '[["a0", 5, 5]]', '[["a0", 0.0, 5]]', "{", '[["a0"]]', "[" * 4000, '[["a0", true, 5]]'],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        ranges_of({"ranges": text})


@pytest.mark.parametrize(
    ("dtype", "ends", "fits"),
    [
        ("int8", (-128, 128), True),
        ("int8", (-129, 0), False),
        ("int8", (0, 129), False),
        ("uint8", (0, 256), True),
        ("uint8", (-1, 5), False),
        ("int64", (-(1 << 63), 1 << 63), True),
        ("uint64", (0, (1 << 64) + 1), False),
    ],
)
def test_a_range_has_values_that_the_dtype_has(dtype: str, ends: tuple[int, int], fits: bool) -> None:
    assert fits_dtype(dtype, ends) is fits
