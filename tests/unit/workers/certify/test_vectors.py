"""workers/certify/vectors.json and the reference behind it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests import make_vectors, reference

from layerzero.ipc.vocabulary.ops import OPS


def test_file_is_what_the_script_writes() -> None:
    """Expected results come from the reference, and are not edited by hand."""
    assert make_vectors.VECTORS.read_text(encoding="utf-8") == make_vectors.make()


def test_every_op_has_a_reference_or_is_exact() -> None:
    """A new op needs a reference before a kernel of it can be certified."""
    assert reference.TENSOR_OPS.keys() | {"tokenize", "detokenize", "null", "function", "function_on_gpu"} == OPS.keys()


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),
        (1 + 3 * 2**-8, 0x3F82),
        (1 + 2**-8 + 2**-20, 0x3F81),
        (math.inf, 0x7F80),
        (-0.0, 0x8000),
        (3.4e38, 0x7F80),
        (1e-40, 0x0001),
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    """Inputs that are rounded otherwise than the libraries do would look like their error."""
    assert reference.to_bits(np.array(value), "bfloat16") == bits


def test_bfloat16_values_come_back() -> None:
    """All 65536 patterns but NaN survive the way to float32 and back."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = reference.from_bits(bits, "bfloat16")
    finite = ~np.isnan(values)
    assert np.array_equal(reference.to_bits(values[finite].astype(np.float64), "bfloat16"), bits[finite])


def test_attention_of_equal_keys_is_the_mean_of_what_is_visible() -> None:
    """Checks alignment and heads by hand: with q = 0 every visible key weighs the same."""
    q, k, v = np.zeros((1, 2, 2, 4)), np.ones((1, 1, 3, 4)), np.array([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1)

    def rows(alignment: str, is_causal: bool = True, keys: int = 3) -> list[float]:
        arrays = (q, k[:, :, :keys], v[:, :, :keys])
        out = reference.attention(*arrays, is_causal=is_causal, scale=1.0, causal_alignment=alignment)
        assert np.array_equal(out[:, 0], out[:, 1])
        return [float(value) for value in out[0, 0, :, 0]]

    assert rows("top_left", is_causal=False) == pytest.approx([3.0, 3.0])
    assert rows("top_left") == pytest.approx([1.0, 1.5])
    assert rows("bottom_right") == pytest.approx([1.5, 3.0])
    assert rows("bottom_right", keys=1) == [0.0, 1.0]


def test_activations_have_their_known_values() -> None:
    """Values of the normal distribution function and the logistic function, from tables."""
    x = np.array([-1.0, 0.0, 1.0, 3.0])
    assert reference.gelu(x, approximate="none") == pytest.approx([-0.15865525, 0.0, 0.84134475, 2.99595031])
    assert reference.gelu(x, approximate="tanh") == pytest.approx([-0.15880801, 0.0, 0.84119199, 2.99636261])
    assert reference.silu(x) == pytest.approx([-0.26894142, 0.0, 0.73105858, 2.85772238])


@pytest.mark.parametrize(
    ("result", "expected", "error"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.5], [0.25], 0.25),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([], [], 0.0),
    ],
)
def test_error_is_relative_to_the_largest_value(result: list[float], expected: list[float], error: float) -> None:
    """One that ignored NaN, or divided by values near 0, would pass wrong kernels or fail right ones."""
    assert reference.error(np.array(result), np.array(expected)) == error
