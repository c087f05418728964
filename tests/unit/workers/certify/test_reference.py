"""What certifies activations, of numbers that are none, or far from 0."""

from __future__ import annotations

import math

import pytest

from layerzero.workers.certify import reference
from layerzero.workers.certify.values import Values


@pytest.mark.parametrize("op", ["silu", "sigmoid", "quick_gelu", "swiglu"])
def test_activations_of_odd_numbers_are_those_of_the_formula(op: str) -> None:
    """silu of NaN was 0, by which a right kernel is wrong; of others there was no number at all."""
    x = Values((4,), [math.nan, -1e4, 1e4, -math.inf])
    inputs = [x, Values((4,), [1.0] * 4)] if op == "swiglu" else [x]
    odd, low, high, lowest = reference.OPS[op](inputs, {}).flat
    assert math.isnan(odd)
    assert (low, high) == (0.0, 1.0 if op == "sigmoid" else 1e4)
    assert lowest == 0.0 if op == "sigmoid" else math.isnan(lowest)  # -infinity times 0
