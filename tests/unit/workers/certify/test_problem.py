"""workers/certify/problem.py: a problem has all of its inputs, however many dtypes it names."""

from __future__ import annotations

import pytest

from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Values


def test_inputs_without_a_dtype_of_their_own_are_kept() -> None:
    """Where fewer dtypes were named than there are inputs, the last inputs were left out of the call."""
    inputs = tuple(Values((1,), lambda n=n: [float(n)]) for n in range(5))  # type: ignore[misc]
    for kinds in ((), ("", "int32")):
        problem = Problem("cat", "five", {"dim": 0}, inputs, kinds)
        assert [values.flat for values in problem.numbers("float") if values] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
        assert problem.kinds == (*kinds, *[""] * (5 - len(kinds)))


def test_more_dtypes_than_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 kinds of 1 inputs"):
        Problem("silu", "one", {}, (Values((1,), lambda: [1.0]),), ("", "", ""))
