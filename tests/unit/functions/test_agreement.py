"""functions/agreement.py: where two results differ, and what is close enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerzero.functions.agreement import difference


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 1.0 + 1e-6),
        (1, 1.0),
        pytest.param(10**400, 10**400, id="wide"),
        (float("nan"), float("nan")),
        ([1, ("a", None)], [1, ("a", None)]),
        ({"x": np.ones(3)}, {"x": np.ones(3) + 1e-7}),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf])),
        (np.array([True]), np.array([True])),
        (np.empty((0, 2)), np.empty((0, 2))),
    ],
)
def test_what_agrees(one: Any, other: Any) -> None:
    assert difference(one, other, 1e-5) == ""


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (1.0, 1.1, "result is 1.0 and 1.1"),
        (True, 1, "bool and int"),
        pytest.param(10**400, 1.0, "result is 1000", id="wide"),
        pytest.param(10**9000, 1, "result is a long int and 1", id="long"),
        ([1], [1, 2], "1 and 2 items"),
        ({"a": 1}, {"b": 1}, "the keys"),
        ([0, {"a": ("x",)}], [0, {"a": ("y",)}], "result[1]['a'][0] is 'x' and 'y'"),
        (np.zeros(4), np.array([0, 0, 2.5, 0]), "differs in 1 of 4 elements, by up to 2.5"),
        (np.zeros(4), np.zeros(5), "float64[4] and float64[5]"),
        (np.zeros(1, "float32"), np.zeros(1), "float32[1] and float64[1]"),
        (np.array([np.nan]), np.array([0.0]), "differs in 1 of 1"),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, said: str) -> None:
    assert said in difference(one, other, 1e-5)
