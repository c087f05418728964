"""What certifies pooling, of numbers that are none."""

from __future__ import annotations

import math

import pytest

from layerzero.workers.certify import reference
from layerzero.workers.certify.values import Values


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("max_pool", {"kernel_size": "3", "stride": "3", "padding": "0,0", "dilation": "1", "ceil_mode": False}),
        ("adaptive_max_pool", {"output_size": "2"}),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_window_with_nan_gives_nan(op: str, attrs: dict[str, object], place: int) -> None:
    """Wherever it is in the window: Python's max finds it at the start alone, and right kernels were called wrong."""
    row = [1.0, 3.0, 2.0, 4.0, 6.0, 5.0]
    row[place] = math.nan
    one, other = reference.OPS[op]([Values((1, 1, 6), row)], attrs).flat
    assert math.isnan(one)
    assert other == 6.0
