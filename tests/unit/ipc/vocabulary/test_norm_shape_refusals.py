"""What the broker refuses of norms of channels: a kernel would read beyond its tensors."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import TensorSpec

X, W = TensorSpec.contiguous("float32", (2, 6, 5)), TensorSpec.contiguous("float32", (6,))
FLAT, SHORT = TensorSpec.contiguous("float32", (2, 6)), TensorSpec.contiguous("float32", (5,))
HALF = TensorSpec.contiguous("float16", (6,))


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "says"),
    [
        ("group_norm", (X, None, None), {"num_groups": 4, "eps": 0.0}, "num_groups is 4; allowed: a divisor of 6"),
        ("group_norm", (X, None, None), {"num_groups": 0, "eps": 0.0}, "num_groups is 0; allowed: an integer from 1"),
        ("group_norm", (X, None, None), {"num_groups": 7, "eps": 0.0}, "num_groups is 7"),
        ("group_norm", (X, SHORT, None), {"num_groups": 2, "eps": 0.0}, "weight has shape [5]; allowed: [6]"),
        ("group_norm", (X, None, HALF), {"num_groups": 2, "eps": 0.0}, "one dtype for all"),
        ("group_norm", (W, None, None), {"num_groups": 2, "eps": 0.0}, "x has shape [6]"),
        ("group_norm", (X, None, None), {"num_groups": 2, "eps": -1.0}, "eps is -1.0"),
        (
            "group_norm",
            (X, None, None),
            {"num_groups": 2, "eps": 0.0, "activation": ""},
            "activation is ''; allowed: relu",
        ),
        ("add_rms_norm", (X, FLAT, None), {"ndim": 1, "eps": 0.0}, "residual has shape (2, 6)"),
        ("add_rms_norm", (X, X, W), {"ndim": 1, "eps": 0.0}, "weight has shape [6]; allowed: [5]"),
        ("add_rms_norm", (X, X, None), {"ndim": 4, "eps": 0.0}, "ndim is 4"),
        ("instance_norm", (FLAT, None, None), {"eps": 0.0}, "x has shape [2, 6]; allowed: at least 3 dimensions"),
        ("instance_norm", (X, W, SHORT), {"eps": 0.0}, "bias has shape [5]"),
        ("batch_norm", (X, SHORT, W, None, None), {"eps": 0.0}, "running_mean has shape [5]"),
        ("batch_norm", (X, W, SHORT, None, None), {"eps": 0.0}, "running_var has shape [5]"),
        ("batch_norm", (X, W, None, None, None), {"eps": 0.0}, "a required tensor is missing"),
    ],
)
def test_what_does_not_belong_together_is_refused(op: str, inputs: Any, attrs: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as found:
        outputs_of(op, inputs, attrs)
    assert says in str(found.value)


@pytest.mark.parametrize("op", ["group_norm", "instance_norm", "batch_norm"])
def test_no_channels_and_no_samples_are_shapes_like_others(op: str) -> None:
    attrs: dict[str, Any] = {"eps": 0.0, **({"num_groups": 1} if op == "group_norm" else {})}
    for shape in ((0, 6, 5), (2, 0, 5), (2, 6, 0)):
        x, w = TensorSpec.contiguous("float32", shape), TensorSpec.contiguous("float32", shape[1:2])
        given = (x, w, w, None, None) if op == "batch_norm" else (x, w, None)
        assert outputs_of(op, given, attrs) == (("float32", shape),)
