"""client/cli/calls.py: what is said of a result."""

from __future__ import annotations

import math

import numpy as np

from layerzero.client.cli.calls import describe, summary


def test_numbers_that_are_none_are_counted() -> None:
    """The first elements may all be good, and so is the range, which is of those that are finite."""
    said = summary(np.array([1, 2, math.nan, math.inf, -math.inf, 3], np.float32))
    assert (said["not_finite"], said["min"], said["max"]) == (3, 1.0, 3.0)
    assert any("2 not finite" in line for line in describe(np.array([1, math.nan, math.inf])))
    assert any("nothing finite" in line for line in describe(np.array([math.nan])))
    assert any("all finite" in line for line in describe(np.ones(3)))
