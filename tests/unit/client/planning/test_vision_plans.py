"""client/planning/vision_plans.py: what convolutions and pooling refuse, and what they make of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerzero.client.planning.vision_plans import (
    plan_adaptive_avg_pool,
    plan_adaptive_max_pool,
    plan_avg_pool,
    plan_conv,
    plan_conv_transpose,
    plan_interpolate,
    plan_max_pool,
)
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


X, W = t(2, 4, 9, 8), t(6, 4, 3, 2)
PLAIN = {"stride": "1,1", "padding": "0,0,0,0", "dilation": "1,1", "groups": 1, "activation": ""}
POOL = {"kernel_size": "3,2", "stride": "3,2", "padding": "0,0,0,0", "ceil_mode": False}
SIZED = {"size": "5,5", "scale": "", "mode": "nearest", "align_corners": False, "antialias": False}
TRANSPOSED = {**PLAIN, "output_padding": "0,0"}


@pytest.mark.parametrize(
    ("made", "attrs", "result"),
    [
        (plan_conv(X, W, t(6)), PLAIN, t(2, 6, 7, 7)),
        (plan_conv(X, W, stride=2), PLAIN | {"stride": "2,2"}, t(2, 6, 4, 4)),
        (plan_conv(X, W, stride=(2,)), PLAIN | {"stride": "2,2"}, t(2, 6, 4, 4)),
        (plan_conv(X, W, padding=(1, 0)), PLAIN | {"padding": "1,0,1,0"}, t(2, 6, 9, 7)),
        (plan_conv(X, W, padding=((1, 2), (0, 3))), PLAIN | {"padding": "1,0,2,3"}, t(2, 6, 10, 10)),
        (plan_conv(X, W, padding="same"), PLAIN | {"padding": "1,0,1,1"}, t(2, 6, 9, 8)),
        (
            plan_conv(X, W, padding="same", dilation=(2, 3)),
            PLAIN | {"padding": "2,1,2,2", "dilation": "2,3"},
            t(2, 6, 9, 8),
        ),
        (plan_conv(X, W, padding="valid", activation="relu"), PLAIN | {"activation": "relu"}, t(2, 6, 7, 7)),
        (plan_conv(X, t(8, 1, 3, 2), groups=np.int64(4)), PLAIN | {"groups": 4}, t(2, 8, 7, 7)),
        (plan_conv(t(4, 9, 8), W), PLAIN, t(6, 7, 7)),
        (plan_conv(t(0, 4, 9, 8), W), PLAIN, t(0, 6, 7, 7)),
        (plan_conv_transpose(X, t(4, 6, 3, 2), t(6)), TRANSPOSED, t(2, 6, 11, 9)),
        (plan_conv_transpose(t(4, 9, 8), t(4, 6, 3, 2)), TRANSPOSED, t(6, 11, 9)),
        (
            plan_conv_transpose(X, t(4, 3, 3, 2), stride=2, padding=1, output_padding=(1, 0), groups=2),
            TRANSPOSED | {"stride": "2,2", "padding": "1,1,1,1", "output_padding": "1,0", "groups": 2},
            t(2, 6, 18, 14),
        ),
        (plan_max_pool(X, kernel_size=(3, 2)), POOL | {"dilation": "1,1"}, t(2, 4, 3, 4)),
        (
            plan_max_pool(X, kernel_size=(3, 2), stride=2, padding=((1, 0), (0, 1)), dilation=2, ceil_mode=True),
            POOL | {"stride": "2,2", "padding": "1,0,0,1", "dilation": "2,2", "ceil_mode": True},
            t(2, 4, 4, 4),
        ),
        (
            plan_avg_pool(X, kernel_size=(3, 2), count_include_pad=False, divisor_override=5),
            POOL | {"count_include_pad": False, "divisor": 5},
            t(2, 4, 3, 4),
        ),
        (plan_interpolate(X, size=5), SIZED, t(2, 4, 5, 5)),
        (
            plan_interpolate(X, scale_factor=2, mode="bilinear", antialias=True),
            SIZED | {"size": "18,16", "scale": "2.0,2.0", "mode": "linear", "antialias": True},
            t(2, 4, 18, 16),
        ),
        (
            plan_interpolate(
                X, scale_factor=(0.7, 1.3), mode="bicubic", align_corners=True, recompute_scale_factor=True
            ),
            SIZED | {"size": "6,10", "mode": "cubic", "align_corners": True},
            t(2, 4, 6, 10),
        ),
        (
            plan_interpolate(t(1, 2, 3), size=(7,), mode="nearest-exact"),
            SIZED | {"size": "7", "mode": "nearest_exact"},
            t(1, 2, 7),
        ),
        (plan_adaptive_max_pool(X, output_size=1), {"output_size": "1,1"}, t(2, 4, 1, 1)),
        (plan_adaptive_avg_pool(X, output_size=(None, 3)), {"output_size": "9,3"}, t(2, 4, 9, 3)),
        (plan_adaptive_avg_pool(t(0, 4, 5), output_size=9), {"output_size": "9"}, t(0, 4, 9)),
    ],
)
def test_plan_is_what_the_broker_admits(made: Any, attrs: dict[str, Any], result: TensorSpec) -> None:
    assert {name: (value, type(value)) for name, value in made.attrs.items()} == {
        name: (value, type(value)) for name, value in attrs.items()
    }
    assert made.results == (result,)
    check_call(made.op, made.inputs, made.outputs, made.attrs)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan_conv(t(9, 8), W), "a weight of 3 to 5 dimensions, and as many of x, or one less without a batch"),
        (lambda: plan_conv(t(2, 4), t(6, 4)), "x has shape .* and weight"),
        (lambda: plan_conv(X, t(6, 3, 3, 2)), r"weight has shape \[6, 3, 3, 2\] and x .*out_channels, 4 / groups"),
        (lambda: plan_conv(X, t(5, 2, 3, 2), groups=2), "out_channels a multiple of the 2 groups"),
        (lambda: plan_conv(X, W, groups=0), "groups is 0; allowed: an integer from 1 to x's 4 channels"),
        (lambda: plan_conv(X, W, groups=True), "groups is True"),
        (lambda: plan_conv(X, W, t(4)), r"bias has shape \[4\]; allowed: \[6\], one for each out channel"),
        (lambda: plan_conv(X, W, stride=0), "stride is 0; allowed: an integer from 1 on, or 2 of them"),
        (lambda: plan_conv(X, W, stride=(1, 1, 1)), r"stride is \(1, 1, 1\)"),
        (lambda: plan_conv(X, W, dilation=1.5), "dilation is 1.5"),
        (lambda: plan_conv(X, W, padding=-1), "padding is -1; allowed: an integer from 0 on"),
        (lambda: plan_conv(X, W, padding=((1, 2),)), "or 2 pairs"),
        (lambda: plan_conv(X, W, padding="full"), "padding is 'full'; allowed: 'valid' or 'same'"),
        (lambda: plan_conv(X, W, padding="same", stride=2), "padding is 'same' and stride .*; allowed: a stride of 1"),
        (lambda: plan_conv(X, t(6, 4, 10, 2)), "windows that fit into what is padded"),
        (lambda: plan_conv(X, W, activation="tanh"), "activation is 'tanh'"),
        (lambda: plan_conv(X, t(6, 4, 3, 2, dtype="float16")), "x is float32, weight is float16; allowed: one dtype"),
        (lambda: plan_conv(t(2, 4, 9, dtype="int8"), t(6, 4, 3, dtype="int8")), "x is int8"),
        (lambda: plan_conv(t(2, 4, 0, 8), W), r"x has shape \[4, 0, 8\]; allowed: 1 or more, but for the batch"),
        (lambda: plan_conv_transpose(X, W), r"weight has shape \[6, 4, 3, 2\] .*\(4, out_channels / groups, ...\)"),
        (lambda: plan_conv_transpose(X, t(4, 6, 3, 2), padding="same"), "padding is 'same'; allowed: integers"),
        (
            lambda: plan_conv_transpose(X, t(4, 6, 3, 2), output_padding=1),
            "output_padding is 1; allowed: less than stride or dilation",
        ),
        (lambda: plan_conv_transpose(X, t(4, 6, 1, 1), padding=9), "the result would have extents"),
        (lambda: plan_max_pool(t(4, 9), kernel_size=2), r"x has shape \[4, 9\]; .*unsqueeze it, if it lacks the batch"),
        (lambda: plan_max_pool(X, kernel_size=3, padding=2), "padding is 2; allowed: half of kernel_size"),
        (lambda: plan_interpolate(X), "size is None and scale_factor None; allowed: one of them"),
        (lambda: plan_interpolate(X, size=4, scale_factor=2), "size is 4 and scale_factor 2; allowed: one of them"),
        (lambda: plan_interpolate(X, size=4, mode="linear"), r"x has shape .*; allowed: 3 dimensions for 'linear'"),
        (lambda: plan_interpolate(X, size=4, mode="area"), "mode is 'area'; allowed: 'nearest' or"),
        (lambda: plan_interpolate(X, size=4, align_corners=False), "align_corners is False and mode 'nearest'"),
        (lambda: plan_interpolate(X, size=4, antialias=True), "antialias is True and mode 'nearest'"),
        (lambda: plan_interpolate(X, size=4, recompute_scale_factor=True), "recompute_scale_factor is True and size"),
        (lambda: plan_interpolate(X, scale_factor=0), "scale_factor is 0; allowed: a number above 0"),
        (lambda: plan_interpolate(X, scale_factor=0.01), "extents of 1 or more"),
        (lambda: plan_interpolate(X, scale_factor=float("nan")), "scale_factor is nan"),
        (lambda: plan_max_pool(X, kernel_size=0), "kernel_size is 0; allowed: an integer from 1 on"),
        (lambda: plan_max_pool(X, kernel_size=10), "windows that fit into what is padded"),
        (lambda: plan_max_pool(X, kernel_size=2, ceil_mode=1), "ceil_mode is 1"),
        (lambda: plan_max_pool(t(2, 4, 9, dtype="int8"), kernel_size=2), "x is int8"),
        (
            lambda: plan_avg_pool(X, kernel_size=2, divisor_override=0),
            "divisor_override is 0; allowed: an integer from 1",
        ),
        (lambda: plan_avg_pool(X, kernel_size=2, count_include_pad="no"), "count_include_pad is 'no'"),
        (lambda: plan_avg_pool(t(2, 0, 9), kernel_size=2), "1 or more, but for the batch"),
        (lambda: plan_adaptive_max_pool(X, output_size=(1, 2, 3)), r"output_size is \(1, 2, 3\)"),
        (lambda: plan_conv(t(1, 1, 1, 1), t(1, 1, 1, 1), padding=10**8), "at most"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call()
