"""Tensor descriptions from other processes are checked before anything is computed with them."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NBYTES, MAX_NDIM, TensorSpec, contiguous_strides

dims = st.lists(st.integers(0, 6), max_size=5)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    shape = draw(dims)
    strides = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    return TensorSpec(draw(st.sampled_from(sorted(ITEMSIZE))), tuple(shape), tuple(strides))


@given(specs())
def test_spec_survives_a_round_trip(spec: TensorSpec) -> None:
    """The worker sees the tensor that the client meant."""
    assert TensorSpec.from_wire(spec.to_wire()) == spec


@given(specs())
def test_span_and_contiguity_agree_with_numpy(spec: TensorSpec) -> None:
    """The bounds check of every kernel's memory rests on the span."""
    high = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True)) if spec.numel else -1
    memory = np.zeros((high + 1) * spec.itemsize, np.uint8)
    array = np.ndarray(spec.shape, np.dtype(f"V{spec.itemsize}"), memory, 0, [s * spec.itemsize for s in spec.strides])
    low_byte, high_byte = np.lib.array_utils.byte_bounds(array) if spec.numel else (0, 0)
    assert spec.span_bytes == high_byte - low_byte
    assert spec.is_contiguous == array.flags.c_contiguous
    assert spec.numel == array.size


@given(dims)
def test_contiguous_strides_are_numpys(shape: list[int]) -> None:
    """Everyone computes the same layout."""
    spec = TensorSpec("float32", tuple(shape), contiguous_strides(tuple(shape)))
    assert spec.is_contiguous
    assert spec.span_bytes == 4 * math.prod(shape)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "must be"),
        ("float32", "must be"),
        (["float32", [1]], "must be"),
        (("float32", [1], [1]), "must be"),
        (["float31", [1], [1]], "unknown dtype 'float31'; known: bool, uint8"),
        ([b"float32", [1], [1]], "unknown dtype"),
        ([["float32"], [1], [1]], "unknown dtype"),
        (["float32", [-1], [1]], rf"^tensor shape must be at most {MAX_NDIM} non-negative integers, got \[-1\]$"),
        (["float32", [1], [-1]], rf"^tensor strides must be at most {MAX_NDIM} non-negative integers, got \[-1\]$"),
        (["float32", [1.0], [1]], "non-negative integers"),
        (["float32", [True], [1]], "non-negative integers"),
        (["float32", "11", [1, 1]], "non-negative integers"),
        (["float32", [1, 1], [1]], "differ in length"),
        (["float32", [1] * (MAX_NDIM + 1), [1] * (MAX_NDIM + 1)], f"at most {MAX_NDIM}"),
        (["float32", [MAX_NBYTES + 1], [0]], "non-negative"),
        (["float32", [2], [MAX_NBYTES]], "above the limit"),
        (["float64", [MAX_NBYTES // 8 + 1], [1]], "above the limit"),
        (["uint8", [2**40, 2**40], [2**40, 1]], "above the limit"),
    ],
)
def test_broken_spec_is_refused(value: object, text: str) -> None:
    """Sums of 64-bit sizes overflow; ours must not get that far."""
    with pytest.raises(InvalidArgument, match=text):
        TensorSpec.from_wire(value)


def test_largest_spec_is_accepted() -> None:
    """The limits are meant inclusively."""
    assert TensorSpec.from_wire(["uint8", [MAX_NBYTES], [1]]).span_bytes == MAX_NBYTES
    assert TensorSpec.from_wire(["float32", [1] * MAX_NDIM, [0] * MAX_NDIM]).span_bytes == 4


def test_empty_tensor_needs_no_memory() -> None:
    """Whatever its strides say."""
    assert TensorSpec.from_wire(["float64", [0, 9], [MAX_NBYTES, MAX_NBYTES]]).span_bytes == 0


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(sorted(ITEMSIZE)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(json_like | st.tuples(st.sampled_from(sorted(ITEMSIZE)), json_like, json_like).map(list))
def test_any_value_is_a_spec_or_refused(value: object) -> None:
    """Nothing else may come out of it, and a spec's memory is bounded."""
    with contextlib.suppress(InvalidArgument):
        assert TensorSpec.from_wire(value).span_bytes <= MAX_NBYTES


def test_views_keep_the_memory() -> None:
    """permute and unsqueeze move nothing."""
    spec = TensorSpec.contiguous("float32", (2, 3, 4))
    assert spec.permute(2, 0, 1) == TensorSpec("float32", (4, 2, 3), (1, 12, 4))
    assert spec.unsqueeze(0) == TensorSpec("float32", (1, 2, 3, 4), (24, 12, 4, 1))
    assert spec.unsqueeze(2) == TensorSpec("float32", (2, 3, 1, 4), (12, 4, 4, 1))
    assert spec.unsqueeze(3) == TensorSpec("float32", (2, 3, 4, 1), (12, 4, 1, 1))


def test_errors_name_dtype_and_shape() -> None:
    """Strides are left out: few users chose them."""
    assert str(TensorSpec("float32", (2, 3), (1, 2))) == "float32[2, 3]"
    assert str(TensorSpec("bool", (), ())) == "bool[]"
