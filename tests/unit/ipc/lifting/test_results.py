"""What a call gave on trial inputs: samples are of places that two processes agree on, of all parts of an output, and
near is near by the numbers, not by their bytes."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.lifting import results
from layerzero.ipc.lifting.results import RUN, SAMPLED, fits, is_near, read_sample
from layerzero.ipc.vocabulary.tensors import TensorSpec

DTYPES = ("bfloat16", "float16", "float32", "float64")


class Memory:
    """A driver's, at the addresses of arrays of this process."""

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def synchronize_stream(self, stream: int) -> None:
        pass


def sample(values: np.ndarray[Any, Any], seed: int = 1) -> bytes:
    spec = TensorSpec.contiguous(str(values.dtype), values.shape)
    return read_sample(Memory(), values.ctypes.data, spec, seed, 0)  # type: ignore[arg-type]


def bytes_of(dtype: str, *values: float) -> bytes:
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{ {'float16': 'e', 'float32': 'f', 'float64': 'd'}[dtype] }", *values)


def test_a_small_output_is_its_own_sample() -> None:
    values = np.arange(SAMPLED, dtype="float32")
    assert sample(values) == values.tobytes()


@pytest.mark.parametrize("step", [results._STEP_BYTES, 4096])
@pytest.mark.parametrize("numel", [SAMPLED + 1, 100_003, 1_000_000])
def test_a_large_output_is_sampled_in_every_part(numel: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it is read at a time."""
    monkeypatch.setattr(results, "_STEP_BYTES", step)
    values = np.arange(numel, dtype="float32")
    found = np.frombuffer(sample(values), "float32").reshape(-1, RUN)
    assert found.size == SAMPLED
    assert (np.diff(found, axis=1) == 1).all()
    assert (np.diff(found[:, 0]) >= RUN).all()
    assert found[0, 0] <= numel / len(found)
    assert found[-1, 0] >= numel - numel / len(found) - 1
    assert sample(values) == sample(values)
    if numel > SAMPLED + 1:
        assert sample(values) != sample(values, 2)


def test_what_is_no_float_has_no_sample() -> None:
    assert sample(np.arange(10)) == b""
    assert not is_near(TensorSpec.contiguous("int64", (1,)), b"\0" * 8, b"\1" * 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_near_is_some_units_of_the_largest(dtype: str) -> None:
    spec, unit = TensorSpec.contiguous(dtype, (3,)), results._NEAR[dtype]
    values = bytes_of(dtype, 0.0, 1.0, -64.0)
    assert is_near(spec, values, values)
    assert is_near(spec, values, bytes_of(dtype, 32 * unit, 1.0, -64.0))
    assert not is_near(spec, values, bytes_of(dtype, 128 * unit, 1.0, -64.0))
    assert not is_near(spec, values, bytes_of(dtype, 0.0, 1.0, 64.0))
    assert not is_near(spec, values, values[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("one", "other"), [(math.inf, -math.inf), (math.inf, 1.0), (1.0, math.nan), (math.nan, 0.0)])
def test_what_is_not_finite_is_near_to_itself_alone(dtype: str, one: float, other: float) -> None:
    spec = TensorSpec.contiguous(dtype, (2,))
    assert is_near(spec, bytes_of(dtype, 1.0, one), bytes_of(dtype, 1.0 + results._NEAR[dtype] / 2, one))
    assert not is_near(spec, bytes_of(dtype, 1.0, one), bytes_of(dtype, 1.0, other))
    assert is_near(spec, bytes_of(dtype, one, one), bytes_of(dtype, one, one))


def test_zeros_are_near_to_zeros_alone() -> None:
    spec = TensorSpec.contiguous("float32", (1,))
    assert is_near(spec, bytes_of("float32", 0.0), bytes_of("float32", -0.0))
    assert not is_near(spec, bytes_of("float32", 0.0), bytes_of("float32", 1e-30))


@given(st.sampled_from(DTYPES), st.binary(max_size=64), st.binary(max_size=64))
def test_any_bytes_can_be_compared(dtype: str, one: bytes, other: bytes) -> None:
    spec = TensorSpec.contiguous(dtype, (8,))
    whole = len(one) - len(one) % spec.itemsize
    assert is_near(spec, one[:whole], one[:whole])
    assert is_near(spec, one[:whole], other[:whole]) in (True, False)


def test_additions_in_another_order_are_near_and_another_seeds_are_not() -> None:
    rng = np.random.default_rng(0)
    terms = rng.standard_normal((4000, 64)).astype("float32")
    order = list(range(len(terms)))
    random.Random(0).shuffle(order)
    one, other = (np.add.reduce(terms[rows], axis=0) for rows in (slice(None), order))
    spec = TensorSpec.contiguous("float32", (64,))
    assert one.tobytes() != other.tobytes()
    assert is_near(spec, one.tobytes(), other.tobytes())
    assert not is_near(spec, one.tobytes(), np.roll(one, 1).tobytes())


def test_trials_fit_their_outputs() -> None:
    outputs = (TensorSpec.contiguous("float32", (100_000,)), TensorSpec.contiguous("int64", (3,)))
    whole = bytes(SAMPLED * 4)
    assert fits({1: ("abc", "def"), 2: (whole, "def")}, outputs)
    assert fits({}, outputs)
    for wrong in ((whole,), (whole[:-1], "def"), (b"", "def"), ("abc", b""), ("abc", bytes(24))):
        assert not fits({1: wrong}, outputs)
