"""Mixtures of experts through the public API to the backends of an ordinary installation: the whole block is what its
parts make, and data that leads outside of other tensors is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import expert_calls, reference

import layerzero as lz
from layerzero.client.tools.calls import default_calls
from layerzero.client.tools.inputs import plain_inputs, random_inputs

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(600)]
BACKENDS = ["torch", "mlx"]
WAYS: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 3, "normalize": False, "num_groups": 4, "top_groups": 2, "group_score": "max"},
    {"top_k": 3, "scoring": "sigmoid", "num_groups": 4, "top_groups": 3, "scale": 2.5},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS, ids=["mixtral", "deepseek-v2", "deepseek-v3"])
def test_the_block_is_what_its_parts_make(backend: str, way: dict[str, Any]) -> None:
    """Against each other, and against float64; a third of the experts is elsewhere."""
    rng = np.random.default_rng(7)
    x, gate = (rng.standard_normal(shape).astype(np.float32) for shape in ((37, 24), (12, 24)))
    gate_up, down = (rng.standard_normal(shape).astype(np.float32) / 5 for shape in ((12, 32, 24), (12, 24, 16)))
    bias = rng.standard_normal(12).astype(np.float32) / 8 if "scoring" in way else None
    by = {"backend": backend}
    weights, ids = lz.moe_route(lz.linear(x, gate, backend="torch"), bias, **way, **by)
    given = {"scoring": "softmax", "normalize": True, "num_groups": 1, "top_groups": 1, "group_score": "top2"}
    logits = x.astype(np.float64) @ gate.T
    expected_weights, expected_ids = reference.TENSOR_OPS["moe_route"](logits, bias, **given | {"scale": 1.0} | way)
    np.testing.assert_array_equal(ids, expected_ids)
    assert reference.error(weights, expected_weights) <= 1e-5
    ids = np.where(ids % 3 == 2, -1, ids)
    whole = lz.moe_mlp(x, gate_up, down, ids, weights, **by)
    rows, order, offsets = lz.moe_permute(x, ids, num_experts=12, **by)
    gates, others = np.split(lz.grouped_linear(rows, gate_up, offsets, **by), 2, axis=1)
    made = lz.grouped_linear(lz.swiglu(gates, others, **by), down, offsets, **by)
    parts = lz.moe_combine(made, order, weights, **by)
    expected = reference.TENSOR_OPS["moe_mlp"](x, gate_up, down, ids, weights, activation="silu")
    assert reference.error(whole, expected) <= 1e-5
    assert reference.error(parts, expected) <= 1e-5


@pytest.mark.parametrize("backend", [*BACKENDS, "onnxruntime"])
def test_offsets_and_ids_that_lead_outside_are_refused(backend: str) -> None:
    x, weight = np.ones((4, 8), np.float32), np.ones((2, 5, 8), np.float32)
    for ends in ([3, 2], [-1, 4], [2, 5]):
        says = rf"offsets is \[{ends[0]}, {ends[1]}\]; allowed: from 0 to 4, the number of rows, and never down"
        with pytest.raises(lz.InvalidArgument, match=says):
            lz.grouped_linear(x, weight, np.array(ends, np.int32), backend=backend)
    ids, down, shares = np.array([[0], [1], [2], [-9]]), np.ones((2, 8, 2), np.float32), np.ones((4, 1), np.float32)
    with pytest.raises(lz.InvalidArgument, match="expert id 2 is not below 2"):
        lz.moe_mlp(x, np.ones((2, 4, 8), np.float32), down, ids, shares, backend=backend)


@pytest.mark.parametrize("backend", [*BACKENDS, "onnxruntime"])
def test_tokens_of_experts_that_are_elsewhere_get_nothing(backend: str) -> None:
    """Some of them, all of a token's, and all; a token may have one expert twice."""
    rng = np.random.default_rng(8)
    x, gate_up, down = (rng.standard_normal(s).astype(np.float32) / 4 for s in ((6, 8), (3, 10, 8), (3, 7, 5)))
    weights = rng.random((6, 2), np.float32)
    for ids in ([[0, 2], [-1, 1], [-1, -1], [2, 2], [1, -7], [0, 1]], [[-1, -1]] * 6, [[2, -1]] * 6):
        found = lz.moe_mlp(x, gate_up, down, np.array(ids), weights, "gelu", backend=backend)
        expected = reference.TENSOR_OPS["moe_mlp"](x, gate_up, down, np.array(ids), weights, activation="gelu")
        assert reference.error(found, expected) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_and_orders_that_lead_outside_are_refused(backend: str) -> None:
    x = np.ones((4, 8), np.float32)
    ids = np.array([[0], [1], [2], [-9]])
    with pytest.raises(lz.InvalidArgument, match="expert id 2 is not below 2, the number of experts; pass ids below"):
        lz.moe_permute(x, ids, num_experts=2, backend=backend)
    for order in ([0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2]):
        with pytest.raises(lz.InvalidArgument, match="order lacks a number; allowed: each from 0 to 3 once; pass what"):
            lz.moe_combine(x, np.array(order), np.ones((2, 2), np.float32), backend=backend)


@pytest.mark.parametrize("op", expert_calls.OPS)
def test_typical_calls_run_on_arguments_that_nobody_gave(op: str) -> None:
    """Those of `lz tune` and warm-up: made-up offsets, ids and orders lead nowhere outside."""
    for call in default_calls(op):
        for arrays in (random_inputs(op, call.arrays, 1), plain_inputs(op, call.arrays)):
            assert call.function(**arrays, **call.params) is not None
