"""client/planning/sampling_plans.py: what is refused about logits and their settings, and what the broker admits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import layerzero as lz
from layerzero.client.planning.sampling_plans import (
    plan_filter_logits,
    plan_penalize_logits,
    plan_sample,
    plan_speculative_verify,
    plan_tree_accept,
)
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.sampling import exponential, weight_bits
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def ids(*shape: int) -> TensorSpec:
    return t(*shape, dtype="int64")


@pytest.mark.parametrize(
    ("made", "inputs", "result"),
    [
        (plan_filter_logits(t(2, 6), t(), ids(2), None, t(1)), ([2, 6], [1], [2], None, [1]), [2, 6]),
        (plan_filter_logits(t(6), None, ids(), t(1)), ([1, 6], None, [1], [1], None), [6]),
        (plan_penalize_logits(t(2, 6), ids(2, 3), None, t(2)), ([2, 6], [2, 3], None, [2], None), [2, 6]),
        (plan_penalize_logits(t(6), ids(3), t()), ([1, 6], [1, 3], [1], None, None), [6]),
    ],
)
def test_plan_is_what_the_broker_admits(made: Any, inputs: Any, result: list[int]) -> None:
    assert tuple(None if spec is None else list(spec.shape) for spec in made.inputs) == inputs
    assert [list(spec.shape) for spec in made.results] == [result]
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("made", "results"),
    [
        (plan_sample(t(2, 6), ids(), ids(2), t(2), None, t()), [[2]]),
        (plan_sample(t(6), ids(1), ids()), [[]]),
        (plan_sample(t(0, 6), ids(), ids(0)), [[0]]),
        (plan_speculative_verify(t(2, 4, 6), ids(2, 3), t(2, 3, 6), ids(2), ids()), [[2, 4], [2]]),
        (plan_speculative_verify(t(4, 6), ids(3), None, ids(), ids(1)), [[4], []]),
        (plan_speculative_verify(t(2, 1, 6), ids(2, 0), None, ids(), ids()), [[2, 1], [2]]),
        (plan_tree_accept(ids(2, 5), t(2, 5, dtype="int32"), ids(2, 5)), [[2, 5], [2, 5], [2]]),
        (plan_tree_accept(ids(5), ids(5), ids(5)), [[5], [5], []]),
    ],
)
def test_tokens_and_counts_are_integers_of_64_bits(made: Any, results: list[list[int]]) -> None:
    """With and without rows."""
    assert [(spec.dtype, list(spec.shape)) for spec in made.results] == [("int64", shape) for shape in results]
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_sample(t(2, 0), ids(), ids()), "allowed: a vocabulary of one token or more"),
        (lambda: plan_sample(t(2, 6), ids(3), ids()), r"seed has shape \[3\] for logits of shape \[2, 6\]"),
        (lambda: plan_speculative_verify(t(2, 0, 6), ids(2, 0), None, ids(), ids()), r"allowed: \(rows, drafts \+ 1"),
        (lambda: plan_speculative_verify(t(2, 4, 6), ids(2, 4), None, ids(), ids()), r"draft_ids .*allowed: \[2, 3\]"),
        (lambda: plan_speculative_verify(t(2, 2, 6), ids(2, 1), t(2, 1, 5), ids(), ids()), "draft_probs has shape"),
        (lambda: plan_tree_accept(ids(2, 0), ids(2, 0), ids(2, 0)), "pass the settled token as node 0"),
        (lambda: plan_tree_accept(ids(2, 5), t(2, 5), ids(2, 5)), "parents is float32; allowed: int32 or int64"),
        (lambda: plan_tree_accept(ids(2, 5), ids(2, 5), t(2, 5, dtype="int32")), "one dtype for all"),
        (lambda: plan_filter_logits(t(2, 6, dtype="int32")), "logits is int32; allowed: bfloat16, float16"),
        (lambda: plan_filter_logits(t(2, 3, 6)), r"logits has shape \[2, 3, 6\]; allowed: \(rows, vocabulary\)"),
        (lambda: plan_filter_logits(t()), r"logits has shape \[\]"),
        (lambda: plan_filter_logits(t(2, 6), t(3)), r"temperature has shape \[3\] for logits of shape \[2, 6\]"),
        (lambda: plan_filter_logits(t(2, 6), t(2, 1)), r"temperature has shape \[2, 1\]"),
        (lambda: plan_filter_logits(t(2, 6), t(2, dtype="float64")), "temperature is float64; allowed: float32"),
        (lambda: plan_filter_logits(t(2, 6), None, t(2)), "top_k is float32; allowed: int32 or int64"),
        (lambda: plan_penalize_logits(t(2, 6), t(2, 3)), "token_ids is float32; allowed: int32 or int64"),
        (
            lambda: plan_penalize_logits(t(2, 6), ids(3, 2)),
            r"token_ids has shape \[3, 2\] for logits of shape \[2, 6\]",
        ),
        (lambda: plan_penalize_logits(t(2, 6), ids(3)), r"token_ids has shape \[3\].*fill shorter rows with -1"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_is_allowed(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": 0}, "temperature is 0; allowed: a finite number above 0"),
        ({"temperature": 1e-60}, "temperature is 1e-60; allowed: a finite number above 0"),  # 0 in float32
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 1e39}, "temperature is 1e\\+39"),
        ({"temperature": 10**400}, "temperature is 10000"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1; allowed: an integer from 0 on; 0 keeps all"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": 2**63}, "top_k is 9223372036854775808"),
        ({"top_p": 1.5}, "top_p is 1.5; allowed: 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1; allowed: 0 to 1"),
    ],
)
def test_a_number_is_looked_at_before_anything_is_sent(settings: dict[str, Any], says: str) -> None:
    """Without a broker, because the client alone sees what was written."""
    with pytest.raises(InvalidArgument, match=f"filter_logits: {says}"):
        lz.filter_logits(np.zeros((2, 6), np.float32), **settings)


def test_exponential_is_that_of_the_library_to_a_few_units() -> None:
    """It is there for equal bits; it must still be an exponential."""
    assert exponential(0.0) == 1.0
    for n in range(4000):
        y = -n / 100
        assert exponential(y) == pytest.approx(math.exp(y), rel=3e-13)
    assert exponential(-1e300) == exponential(-math.inf) < 2.0**-53


def test_sums_of_weights_are_exact_for_every_vocabulary() -> None:
    """As many of the largest as there are tokens stay below 2^53, beyond which float64 skips integers."""
    for vocabulary in (1, 2, 3, 1000, 32_000, 131_072, 131_073, 2**20):
        assert vocabulary << weight_bits(vocabulary) <= 1 << 52
        assert vocabulary << weight_bits(vocabulary) > 1 << 51
