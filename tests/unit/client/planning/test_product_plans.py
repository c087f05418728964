"""client/planning/product_plans.py: what products of matrices refuse, and what they make of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.client.planning.product_plans import plan_addmm, plan_gated_mlp
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (3, 1), (1, 1), (3, 5)])
def test_what_is_added_broadcasts(shape: tuple[int, ...]) -> None:
    """Workers get it with two dimensions, as it lies."""
    made = plan_addmm(t(*shape), t(3, 4), t(4, 5), beta=2, alpha=0.5)
    assert made.attrs == {"beta": 2.0, "alpha": 0.5}
    assert [spec and spec.ndim for spec in made.inputs] == [2, 2, 2]
    assert made.results == (t(3, 5),)
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 0, 4)])
def test_a_gated_block_has_the_features_of_its_second_weight(shape: tuple[int, ...]) -> None:
    made = plan_gated_mlp(t(*shape), t(6, 4), t(5, 3), "gelu")
    assert made.results == (t(*shape[:-1], 5),)
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_addmm(t(5), t(2, 3, 4), t(4, 5)), r"a has shape \[2, 3, 4\]; allowed: 2 dimensions; use matmul"),
        (lambda: plan_addmm(t(5), t(3, 4), t(4)), r"b has shape \[4\]; allowed: 2 dimensions"),
        (lambda: plan_addmm(t(5), t(3, 4), t(5, 5)), r"a's last dimension \(4\) equal to b's first \(5\); transpose"),
        (lambda: plan_addmm(t(3), t(3, 4), t(4, 5)), r"x has shape \[3\]; allowed: what broadcasts to \[3, 5\]"),
        (lambda: plan_addmm(t(1, 3, 5), t(3, 4), t(4, 5)), r"x has shape \[1, 3, 5\]"),
        (lambda: plan_addmm(t(5), t(3, 4), t(4, 5), beta=math.nan), "beta is nan; allowed: a finite number"),
        (lambda: plan_addmm(t(5), t(3, 4), t(4, 5), alpha=True), "alpha is True"),
        (lambda: plan_addmm(t(5), t(3, 4, dtype="float16"), t(4, 5)), "one dtype for all"),
        (lambda: plan_addmm(*[t(1, 1, dtype="int32")] * 3), "x is int32"),
        (lambda: plan_gated_mlp(t(), t(6, 4), t(5, 3)), "x has no dimensions"),
        (lambda: plan_gated_mlp(t(2, 4), t(6), t(5, 3)), r"gate_up has shape \[6\]; allowed: \(2 \* hidden"),
        (lambda: plan_gated_mlp(t(2, 4), t(6, 4), t(3)), r"down has shape \[3\]; allowed: \(out_features"),
        (lambda: plan_gated_mlp(t(2, 5), t(6, 4), t(5, 3)), "allowed: 5 in_features in both last dimensions"),
        (lambda: plan_gated_mlp(t(2, 4), t(6, 4), t(5, 6)), "allowed: 12 rows of gate_up, .* as torch.cat"),
        (lambda: plan_gated_mlp(t(2, 4), t(6, 4), t(5, 3), "tanh"), "activation is 'tanh'; allowed: 'relu' or"),
        (lambda: plan_gated_mlp(t(2, 4), t(6, 4), t(5, 3), None), "activation is None"),  # type: ignore[arg-type]
        (lambda: plan_gated_mlp(*[t(2, 1, dtype="int32")] * 3), "x is int32"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
