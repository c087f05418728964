"""client/planning/loss_plans.py: canonical forms, and what makes no sense is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerzero.client.planning.loss_plans import plan_cross_entropy
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def i64(*shape: int) -> TensorSpec:
    return t(*shape, dtype="int64")


@pytest.mark.parametrize(
    ("given", "options", "output", "result"),
    [
        ((t(2, 5), i64(2)), {}, (), ()),
        ((t(2, 5, 3, 4), i64(2, 3, 4), t(5)), {"reduction": "none"}, (2, 3, 4), (2, 3, 4)),
        ((t(5), i64()), {"reduction": "none"}, (1,), ()),
        ((t(5, dtype="float16"), t(dtype="int32")), {"ignore_index": np.int32(3), "label_smoothing": 1}, (), ()),
        ((t(0, 5), i64(0)), {"reduction": "sum"}, (), ()),
    ],
)
def test_plan_is_what_the_broker_admits(given: Any, options: Any, output: Any, result: Any) -> None:
    """A prediction without a batch is one of a batch."""
    made = plan_cross_entropy(*given, **options)
    check_call("cross_entropy", made.inputs, made.outputs, made.attrs)
    assert [spec.shape for spec in (*made.outputs, *made.results)] == [output, result]


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((t(2, 5), t(2, 5)), {}, "target is float32; allowed: class indices of int32 or int64; .*-lz.log_softmax"),
        ((t(2, 5), i64(5)), {}, r"target has shape \[5\] and x \[2, 5\]; allowed: \[2\]"),
        ((t(2, 3, 5), i64(2, 3)), {}, r"allowed: \[2, 5\], .*; move classes to dimension 1"),
        ((t(5), i64(1)), {}, r"target has shape \[1\] and x \[5\]; allowed: \[\], an index"),
        ((t(), i64()), {}, r"x has shape \[\]"),
        ((t(2, 0), i64(2)), {}, "one class at least"),
        ((t(2, 5), i64(2), t(2)), {}, r"weight has shape \[2\]; allowed: \[5\]"),
        ((t(2, 5), i64(2), t(5, dtype="float64")), {}, "weight is float64; allowed: one dtype"),
        ((t(2, 5), i64(2)), {"reduction": "max"}, "reduction is 'max'; allowed: .*none"),
        ((t(2, 5), i64(2)), {"label_smoothing": 1.5}, "label_smoothing is 1.5; allowed: 0.0 to 1.0"),
        ((t(2, 5), i64(2)), {"ignore_index": 1.0}, "ignore_index is 1.0; allowed: an integer"),
        ((t(2, 5), i64(2)), {"ignore_index": 1 << 63}, "ignore_index is 9223372036854775808"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, options: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"cross_entropy: .*{says}"):
        plan_cross_entropy(*given, **options)
