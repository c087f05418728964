"""client/planning/norm_plans.py: what norms of channels refuse, and what they make of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from layerzero.client.planning.norm_plans import plan_add_rms_norm, plan_batch_norm, plan_group_norm, plan_instance_norm
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


@pytest.mark.parametrize(
    ("made", "attrs"),
    [
        (plan_group_norm(t(2, 6, 5), num_groups=np.int64(3)), {"num_groups": 3, "eps": 1e-5}),
        (plan_group_norm(t(2, 6), t(6), None, num_groups=6, eps=0), {"num_groups": 6, "eps": 0.0}),
        (plan_group_norm(t(2, 0, 5), num_groups=1), {"num_groups": 1, "eps": 1e-5}),
        (
            plan_group_norm(t(2, 6), num_groups=2, activation="silu"),
            {"num_groups": 2, "eps": 1e-5, "activation": "silu"},
        ),
        (plan_add_rms_norm(t(2, 3, 6), t(2, 3, 6), normalized_shape=(3, 6)), {"ndim": 2, "eps": 2.0**-23}),
        (plan_instance_norm(t(2, 6, 1), None, t(6), eps=1), {"eps": 1.0}),
        (plan_batch_norm(t(2, 6), t(6), t(6), None, t(6), momentum=0.5), {"eps": 1e-5}),
    ],
)
def test_plan_is_what_the_broker_admits(made: Any, attrs: dict[str, Any]) -> None:
    assert made.attrs == attrs
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_group_norm(t(2, 6, 5), num_groups=4), "num_groups is 4 for 6 channels; allowed: a divisor of x"),
        (lambda: plan_group_norm(t(2, 6, 5), num_groups=0), "num_groups is 0 for 6 channels"),
        (lambda: plan_group_norm(t(2, 6, 5), num_groups=True), "num_groups is True"),
        (lambda: plan_group_norm(t(2, 6, 5), num_groups=2.0), "num_groups is 2.0"),  # type: ignore[arg-type]
        (lambda: plan_group_norm(t(2, 0, 5), num_groups=2), "num_groups is 2 and x has no channels"),
        (lambda: plan_group_norm(t(6), num_groups=2), r"x has shape \[6\]; allowed: \(batch, channels, ...\)"),
        (lambda: plan_group_norm(t(2, 6), t(5), num_groups=2), r"weight has shape \[5\]; allowed: \[6\], one for each"),
        (lambda: plan_group_norm(t(2, 6), None, t(6, dtype="float16"), num_groups=2), "one dtype for all"),
        (lambda: plan_group_norm(t(2, 6, dtype="int32"), num_groups=2), "x is int32"),
        (lambda: plan_group_norm(t(2, 6), num_groups=2, eps=-1.0), "eps is -1.0"),
        (lambda: plan_group_norm(t(2, 6), num_groups=2, activation="mish"), "activation is 'mish'; allowed: .*silu"),
        (
            lambda: plan_add_rms_norm(t(2, 6), t(6), normalized_shape=(6,)),
            r"x has shape \[2, 6\] and residual \[6\]; allowed: equal shapes; expand the smaller",
        ),
        (lambda: plan_add_rms_norm(t(2, 6), t(2, 6), normalized_shape=(5,)), r"normalized_shape is \[5\]"),
        (lambda: plan_add_rms_norm(t(2, 6), t(2, 6), t(2), normalized_shape=(6,)), r"weight has shape \[2\]"),
        (
            lambda: plan_add_rms_norm(t(2, 6), t(2, 6, dtype="float16"), normalized_shape=(6,)),
            "x is float32, residual is float16; allowed: one dtype for all",
        ),
        (lambda: plan_instance_norm(t(2, 6)), r"x has shape \[2, 6\]; allowed: \(batch, channels, length, ...\)"),
        (lambda: plan_instance_norm(t(2, 6, 3), eps=math.inf), "eps is inf"),
        (lambda: plan_batch_norm(t(2, 6), t(6), t(2)), r"running_var has shape \[2\]"),
        (lambda: plan_batch_norm(t(2, 6), t(6), t(6), training=True), "training is True; allowed: False"),
        (lambda: plan_batch_norm(t(2, 6), t(6), t(6), training=0), "training is 0"),  # type: ignore[arg-type]
        (lambda: plan_batch_norm(t(2, 6), t(6), t(6), momentum=None), "momentum is None"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
