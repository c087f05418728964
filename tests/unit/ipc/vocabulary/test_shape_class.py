"""ipc/vocabulary/shape_class.py: calls that a kernel treats alike share a class, others do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shape_class import ANY, EMPTY, class_dtype, shape_class
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec


def dense(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


ATTENTION = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
Q, K, K1 = dense(1, 4, 3, 64), dense(1, 4, 33, 64), dense(1, 2, 33, 64)
MASK = dense(1, 1, 3, 33, dtype="bool")
X = dense(2, 3, 32)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "expected"),
    [
        ("attention", (Q, K, K, None), {}, "plain/ragged/dense"),
        ("attention", (Q, K1, K1, None), {}, "gqa/ragged/dense"),
        ("attention", (Q, K, K, MASK), {}, "bool_mask/ragged/dense"),
        ("attention", (Q, K, K, dense(1, 1, 3, 33)), {}, "float_mask/ragged/dense"),
        ("attention", (Q, Q, Q, None), {"is_causal": True}, "causal/aligned/dense"),
        ("attention", (Q, K, K, None), {"is_causal": True}, "causal_top_left/ragged/dense"),
        (
            "attention",
            (Q, K1, K1, None),
            {"is_causal": True, "causal_alignment": "bottom_right"},
            "causal_bottom_right+gqa/ragged/dense",
        ),
        ("attention", (Q, K, K, None), {"window_left": 3, "is_causal": True}, "window/small/dense"),
        ("attention", (Q, K1, K1, MASK), {"window_right": 3}, "window/small/dense"),
        ("attention", (Q, K, K, MASK), {"is_causal": True}, "causal+mask/small/dense"),
        ("attention", (Q, K, K, None, dense(4)), {}, "sinks/small/dense"),
        ("attention", (Q, K, K, None, None, dense(1, 4)), {}, "alibi/small/dense"),
        ("attention", (Q, K, K, None, dense(4)), {"softcap": 3.0}, "several/small/dense"),
        ("attention", (Q, *[dense(1, 4, 257, 64)] * 2), {"softcap": 3.0}, "softcap/long/dense"),
        (
            "attention",
            (Q, *[dense(1, 4, 257, 64)] * 2, dense(1, 1, 1, 9, dtype="bool")),
            {"mask_block_q": 32, "mask_block_k": 32},
            "blocks/long/dense",
        ),
        ("attention", (Q, K, K, None), {"layout": "BSHD"}, "plain/ragged/bshd"),
        ("attention", (Q, dense(1, 4, 0, 64), dense(1, 4, 0, 64), None), {}, EMPTY),
        ("matmul", (dense(3, 8), dense(8, 5)), {}, "matrix/small/dense"),
        ("matmul", (dense(2, 3, 8), dense(2, 8, 257)), {}, "batched/long/dense"),
        ("matmul", (dense(2, 3, 8), dense(8, 5)), {}, "broadcast/small/dense"),
        ("matmul", (dense(3, 8), dense(5, 8).permute(1, 0)), {}, "matrix/small/strided"),
        ("matmul", (TensorSpec("float32", (3, 8), (9, 1)), dense(8, 5)), {}, "matrix/small/rows"),
        ("addmm", (dense(1, 8), dense(1, 4), dense(4, 8)), {"beta": 1.0, "alpha": 1.0}, "matrix/small/dense"),
        ("add", (X, X), {}, "equal/small/dense"),
        ("quantize", (X, dense(2, 3, 1), None), {"dtype": "int8"}, "int8+rows/small/dense"),
        ("dynamic_quantize", (X,), {"format": "int8", "groups": 2, "symmetric": False}, "int8+groups+zero/small/dense"),
        (
            "int_matmul",
            (dense(3, 8, dtype="int8"), dense(8, 5, dtype="uint8"), None, dense(1, 1, dtype="int32")),
            {},
            "matrix+by_uint8+zero/small/dense",
        ),
        (
            "scaled_linear",
            (X, dense(17, 16, dtype="uint8"), dense(1, 4), *[None] * 4),
            {"dtype": "", "weight_format": "int4"},
            "int4+groups/ragged/dense",
        ),
        ("gated_mlp", (X, dense(32, 32), dense(32, 16)), {"activation": "relu"}, "relu/aligned/dense"),
        (
            "grouped_linear",
            (dense(4, 16), dense(3, 17, 16), dense(3, dtype="int32"), dense(3, 17)),
            {},
            "bias/ragged/dense",
        ),
        (
            "moe_route",
            (dense(4, 8), dense(8)),
            {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2},
            "sigmoid+bias+groups/small/dense",
        ),
        ("moe_permute", (dense(4, 32), dense(4, 2, dtype="int64")), {}, "int64/aligned/dense"),
        ("mul", (dense(20, 1), dense(1, 20)), {}, "broadcast/long/dense"),
        ("clamp", (X,), {"min": None, "max": 1.0}, "max/small/dense"),
        ("cat", (X, X, *[None] * 6), {"dim": 2}, "inner/long/dense"),
        ("cast", (dense(300),), {"dtype": "int8"}, "to_int8/long/dense"),
        ("addmm", (dense(1, 8), dense(3, 4), dense(4, 8)), {"beta": 0.0, "alpha": 1.0}, "row+scaled/small/dense"),
        ("addmm", (dense(1, 1), dense(3, 4), dense(4, 8)), {"beta": 1.0, "alpha": 1.0}, "column/small/dense"),
        ("linear", (dense(2, 8, 32), dense(16, 32), dense(16)), {"activation": ""}, "batched+bias/aligned/dense"),
        ("linear", (dense(3, 32), dense(17, 32), None), {"activation": ""}, "matrix/ragged/dense"),
        ("linear", (dense(2, 8, 32), dense(16, 32), None), {"activation": "gelu"}, "gelu/aligned/dense"),
        ("conv", (dense(1, 4, 7, 7), dense(4, 4, 3, 3), None), {"groups": 1, "activation": ""}, "2d/small/dense"),
        ("conv", (dense(1, 4, 90), dense(8, 2, 3), None), {"groups": 2, "activation": ""}, "1d+groups/long/dense"),
        ("conv", (dense(1, 4, 3), dense(4, 1, 3), None), {"groups": 4, "activation": "relu"}, "relu/small/dense"),
        (
            "conv_transpose",
            (dense(1, 4, 3, 3, 3), dense(4, 1, 3, 3, 3), None),
            {"groups": 4, "activation": ""},
            "3d+depthwise/small/dense",
        ),
        ("max_pool", (dense(1, 4, 7, 7),), {"padding": "1,0,0,0"}, "2d+padded/small/dense"),
        ("avg_pool", (dense(1, 4, 90),), {"padding": "0,0"}, "1d/long/dense"),
        ("adaptive_avg_pool", (dense(1, 4, 9, 9, 9),), {"output_size": "1,1,1"}, "3d/long/dense"),
        (
            "interpolate",
            (dense(1, 4, 7, 7),),
            {"mode": "linear", "align_corners": True, "antialias": False},
            "linear+2d+align_corners/small/dense",
        ),
        ("softmax", (X,), {"dim": 2, "dtype": ""}, "last/aligned/dense"),
        ("softmax", (X,), {"dim": 1, "dtype": ""}, "inner/small/dense"),
        ("layer_norm", (X, None, dense(32)), {"ndim": 1, "eps": 0.0}, "one+bias/aligned/dense"),
        ("rms_norm", (X, dense(3, 32)), {"ndim": 2, "eps": 0.0}, "several+weight/aligned/dense"),
        ("rms_norm_backward", (X, X, dense(3, 32)), {"ndim": 2, "eps": 0.0}, "several+weight/aligned/dense"),
        ("layer_norm_backward", (X, X, None), {"ndim": 1, "eps": 0.0}, "one/aligned/dense"),
        ("gelu", (X,), {"approximate": "tanh"}, "tanh/aligned/dense"),
        ("silu", (dense(129),), {}, "plain/ragged/dense"),
        ("embedding", (dense(2, 3, dtype="int64"), dense(9, 33)), {}, "int64/ragged/dense"),
        ("null", (), {}, ANY),
    ],
)
def test_class_says_what_is_computed_how_large_and_where(op: str, inputs: Any, attrs: Any, expected: str) -> None:
    """These names are in reports, and in cached probes."""
    if op == "attention":
        inputs, attrs = (*inputs, *[None] * (6 - len(inputs))), {**ATTENTION, **attrs}
    assert shape_class(op, inputs, attrs) == expected


def test_output_counts_where_it_is_known() -> None:
    """A kernel that writes strides wrongly is wrong for `out=`, whatever its inputs look like."""
    assert shape_class("silu", [dense(4, 6)], {}, [dense(6, 4).permute(1, 0)]) == "plain/ragged/strided"


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("embedding", (dense(2, dtype="int32"), dense(4, 4, dtype="float16")), "float16"),
        ("matmul", (dense(2, 2, dtype="int8"), dense(2, 2, dtype="int8")), "int8"),
        ("tokenize", (dense(9, dtype="uint8"),), ANY),
        ("null", (), ANY),
    ],
)
def test_dtype_is_that_of_the_data(op: str, inputs: Any, expected: str) -> None:
    """Ids and masks have dtypes of their own."""
    assert class_dtype(op, inputs) == expected


SPECS = st.builds(
    lambda dtype, dims: TensorSpec(dtype, tuple(d for d, _ in dims), tuple(s for _, s in dims)),
    st.sampled_from(sorted(ITEMSIZE)),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=5),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(
    st.sampled_from(sorted(OPS)),
    st.lists(st.none() | SPECS, max_size=5),
    st.dictionaries(
        st.sampled_from(["dim", "ndim", "is_causal", "causal_alignment", "layout", "approximate", "tokenizer_format"]),
        st.sampled_from([None, True, -9, 3, "BSHD", ""]),
    ),
)
def test_every_signature_has_a_class(op: str, inputs: list[TensorSpec | None], attrs: dict[str, Any]) -> None:
    """Signatures come from clients; one that breaks its op's rules must not end the broker."""
    outputs = [spec for spec in inputs if spec is not None]
    assert shape_class(op, inputs, attrs, outputs) == shape_class(op, inputs, attrs, outputs)
    assert class_dtype(op, inputs) in {*ITEMSIZE, ANY}
