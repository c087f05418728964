"""client/planning/expert_plans.py: what mixtures of experts refuse, and what they make of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.client.planning.expert_plans import (
    plan_grouped_linear,
    plan_moe_combine,
    plan_moe_mlp,
    plan_moe_permute,
    plan_moe_route,
)
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def i(*shape: int) -> TensorSpec:
    return t(*shape, dtype="int32")


MLP = (t(4, 6), t(3, 10, 6), t(3, 7, 5), i(4, 2), t(4, 2))


def mlp(place: int, spec: TensorSpec) -> Any:
    return lambda: plan_moe_mlp(*MLP[:place], spec, *MLP[place + 1 :])


@pytest.mark.parametrize(
    ("made", "results"),
    [
        (plan_grouped_linear(t(4, 6), t(3, 5, 6), i(3), t(3, 5)), (t(4, 5),)),
        (plan_moe_route(t(4, 8), top_k=2), (t(4, 2), t(4, 2, dtype="int64"))),
        (
            plan_moe_route(t(4, 8, dtype="float16"), t(8), top_k=4, num_groups=4, top_groups=2, scale=2),
            (t(4, 4), t(4, 4, dtype="int64")),
        ),
        (plan_moe_permute(t(4, 6), i(4, 2), num_experts=3), (t(8, 6), t(8, dtype="int64"), i(3))),
        (plan_moe_combine(t(8, 6), i(8), t(4, 2)), (t(4, 6),)),
        (plan_moe_mlp(*MLP, activation="gelu"), (t(4, 7),)),
    ],
)
def test_results_are_those_of_the_formulas(made: Any, results: tuple[TensorSpec, ...]) -> None:
    assert made.results == results
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: plan_grouped_linear(t(2, 4, 6), t(3, 5, 6), i(3)),
            r"x has shape \[2, 4, 6\]; .*; flatten",
        ),
        (lambda: plan_grouped_linear(t(4, 6), t(5, 6), i(3)), r"weight has shape \[5, 6\]; allowed: \(groups, out"),
        (lambda: plan_grouped_linear(t(4, 6), t(3, 6, 5), i(3)), "allowed: 6 in_features in both last dimensions"),
        (
            lambda: plan_grouped_linear(t(4, 6), t(3, 5, 6), i(4)),
            r"offsets has shape \[4\] for 3 groups; allowed: \[3",
        ),
        (lambda: plan_grouped_linear(t(4, 6), t(3, 5, 6), t(3)), "offsets is float32; allowed: int32 or int64"),
        (lambda: plan_grouped_linear(t(4, 6), t(3, 5, 6), i(3, 1)), r"offsets has shape \[3, 1\]; allowed: one dim"),
        (lambda: plan_grouped_linear(t(4, 6), t(3, 5, 6), i(3), t(5)), r"bias has shape \[5\]; allowed: \[3, 5\]"),
        (lambda: plan_grouped_linear(i(4, 6), i(3, 5, 6), i(3)), "x is int32"),
        (lambda: plan_moe_route(t(8), top_k=2), r"logits has shape \[8\]; allowed: \(tokens, experts\)"),
        (lambda: plan_moe_route(t(4, 0), top_k=1), r"logits has shape \[4, 0\]; allowed: 1 to 65536 experts"),
        (lambda: plan_moe_route(t(4, 8), top_k=9), "top_k is 9; allowed: an integer from 1 to 8"),
        (lambda: plan_moe_route(t(4, 8), top_k=True), "top_k is True"),
        (lambda: plan_moe_route(t(4, 8), top_k=5, num_groups=4, top_groups=2), "top_k is 5; .* from 1 to 4"),
        (lambda: plan_moe_route(t(4, 8), top_k=1, num_groups=3), "num_groups is 3; allowed: a divisor of 8"),
        (lambda: plan_moe_route(t(4, 8), top_k=1, top_groups=2), "top_groups is 2; allowed: an integer from 1 to 1"),
        (lambda: plan_moe_route(t(4, 8), top_k=1, scoring="relu"), "scoring is 'relu'; allowed: 'softmax' or 'sigm"),
        (lambda: plan_moe_route(t(4, 8), top_k=1, group_score="sum"), "group_score is 'sum'; allowed: 'max' or 'top2'"),
        (lambda: plan_moe_route(t(4, 8), top_k=1, scale=math.inf), "scale is inf; allowed: a finite number"),
        (lambda: plan_moe_route(t(4, 8), t(4), top_k=1), r"correction_bias is float32\[4\]; allowed: float32\[8\]"),
        (lambda: plan_moe_permute(t(4, 6), i(3, 2), num_experts=3), r"ids has shape \[3, 2\]; allowed: \(4, experts"),
        (lambda: plan_moe_permute(t(4, 6), t(4, 2), num_experts=3), "ids is float32; allowed: int32 or int64"),
        (lambda: plan_moe_permute(t(4, 6), i(4, 2), num_experts=0), "num_experts is 0; allowed: an integer from 1"),
        (lambda: plan_moe_combine(t(8, 6), i(8), i(4, 2)), r"weights is int32\[4, 2\]; allowed: float32 \(tokens"),
        (lambda: plan_moe_combine(t(7, 6), i(8), t(4, 2)), r"rows has shape \[7, 6\] .* allowed: 8 rows; pass what"),
        (lambda: plan_moe_combine(t(8, 6), i(7), t(4, 2)), r"order has shape \[7\] for weights of shape \[4, 2\]"),
        (mlp(0, t(4, 5)), "allowed: 5 in_features in both last dimensions"),
        (mlp(1, t(3, 9, 6)), r"gate_up has shape \[3, 9, 6\] and down \[3, 7, 5\]; allowed: \[3, 10, 6\] of gate_up"),
        (mlp(2, t(2, 7, 5)), r"allowed: \[2, 10, 6\] of gate_up; lay the rows of gates above"),
        (mlp(2, t(7, 5)), r"down has shape \[7, 5\]; allowed: \(experts, out_features, hidden\)"),
        (mlp(4, t(4, 3)), r"weights has shape \[4, 3\] and ids \[4, 2\]; allowed: equal ones"),
        (lambda: plan_moe_mlp(*MLP, activation="tanh"), "activation is 'tanh'"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
