"""Every rule by which a kernel is passed over: its code, the offending value and the allowed one."""

from __future__ import annotations

import pytest
from tests.unit.capabilities.calls import ATTENTION, TOKENIZER, attention, call, kernel, reasons, spec

from layerzero.capabilities.match import Rejection, match
from layerzero.capabilities.reasons import Reason


def test_call_within_all_limits_is_accepted() -> None:
    """The rules must let pass what they are for."""
    mask = spec(1, 1, 4, 4, dtype="bool")
    assert attention(kernel(**ATTENTION), spec(2, 3, 4, 16), mask=mask) == []
    both = kernel(**ATTENTION, supports_causal_mask=True)
    assert attention(both, spec(2, 3, 4, 16), mask=mask, is_causal=True) == []
    some = kernel(**ATTENTION, optional_attrs=["window_left"], optional_args=["sinks"])
    assert attention(some, spec(2, 3, 4, 16), window_left=3) == []
    assert reasons("silu", kernel(), spec(4), out=spec(4)) == []
    assert reasons("null", kernel(dtypes=[])) == []


def test_options_of_attention_that_a_kernel_lacks_are_named() -> None:
    """It would compute something else without them."""
    plain, (q, heads) = kernel(**ATTENTION), (spec(2, 3, 4, 16), spec(3))
    some = kernel(**ATTENTION, optional_attrs=["window_left"], optional_args=["sinks"])
    found = match(call("attention", q, q, q, None, heads, window_left=3, softcap=2.0), plain)
    assert [str(one) for one in found] == [
        "ARG_UNSUPPORTED: argument 'sinks' is given; the kernel takes none",
        "ATTR_UNSUPPORTED: window_left=3; allowed: none",
        "ATTR_UNSUPPORTED: softcap=2.0; allowed: none",
    ]
    found = match(call("attention", q, q, q, None, heads, window_left=3, window_right=1), some)
    assert [str(one) for one in found] == ["ATTR_UNSUPPORTED: window_right=1; allowed: none"]
    mask = spec(1, 1, 4, 4, dtype="bool")
    (one,) = match(call("attention", q, q, q, mask, is_causal=True), plain)
    assert str(one) == "ATTN_MASK_UNSUPPORTED: bool mask with is_causal=True; allowed: one of them"
    k = spec(2, 3, 9, 16)  # where the places of queries are depends on the alignment, without a causal rule too
    (one,) = match(call("attention", q, k, k, window_left=3, causal_alignment="bottom_right"), some)
    assert one.code is Reason.CAUSAL_ALIGNMENT_UNSUPPORTED


def test_all_reasons_are_given_at_once() -> None:
    """A report that stops at the first reason sends its reader round in circles."""
    found = reasons("silu", kernel(requires_contiguous=True), spec(0, 2, dtype="float64", strides=(1, 9)))
    assert [reason.code for reason in found] == [Reason.DTYPE_UNSUPPORTED, Reason.EMPTY_UNSUPPORTED]


Q = spec(1, 4, 6, 16)
CASES: dict[str, tuple[list[Rejection], Reason, str]] = {
    "dtype": (
        reasons("silu", kernel(), spec(4, dtype="float64")),
        Reason.DTYPE_UNSUPPORTED,
        "x is float64; allowed: float32, float16",
    ),
    "index dtype": (
        reasons("embedding", kernel(index_dtypes=["int64"]), spec(4, dtype="int32"), spec(8, 4)),
        Reason.DTYPE_UNSUPPORTED,
        "ids is int32; allowed: int64",
    ),
    "no index dtype": (
        reasons("embedding", kernel(), spec(4, dtype="int32"), spec(8, 4)),
        Reason.DTYPE_UNSUPPORTED,
        "ids is int32; allowed: none",
    ),
    "mixed dtypes": (
        reasons("matmul", kernel(), spec(2, 2), spec(2, 2, dtype="float16")),
        Reason.DTYPE_MIXED,
        "inputs are float16 and float32; they must agree",
    ),
    "empty": (
        reasons("silu", kernel(), spec(4, 0)),
        Reason.EMPTY_UNSUPPORTED,
        "x has shape [4, 0]; extents of 0 are not supported",
    ),
    "gaps": (
        reasons("silu", kernel(requires_contiguous=True), spec(2, 3, strides=(4, 1))),
        Reason.NOT_CONTIGUOUS,
        "x has shape [2, 3] and strides [4, 1]",
    ),
    "gaps in the output": (
        reasons("silu", kernel(requires_contiguous=True), spec(2, 3), out=spec(2, 3, strides=(4, 1))),
        Reason.NOT_CONTIGUOUS,
        "out has strides [4, 1] for shape [2, 3]",
    ),
    "last stride": (
        reasons("silu", kernel(requires_last_dim_stride1=True), spec(2, 3, strides=(1, 2))),
        Reason.STRIDE_LAST_DIM,
        "x has stride 2 in its last dimension; needed: 1",
    ),
    "too few dimensions": (
        reasons("softmax", kernel(min_ndim=2), spec(4)),
        Reason.RANK_UNSUPPORTED,
        "1 dimensions; needed: at least 2",
    ),
    "too many dimensions": (
        reasons("softmax", kernel(max_ndim=2), spec(1, 2, 3)),
        Reason.RANK_UNSUPPORTED,
        "3 dimensions; allowed: at most 2",
    ),
    "optional argument": (
        reasons("linear", kernel(), spec(2, 4), spec(3, 4), spec(3)),
        Reason.ARG_UNSUPPORTED,
        "argument 'bias' is given; the kernel takes none",
    ),
    "required argument": (
        reasons("layer_norm", kernel(optional_args=["bias"], required_args=["weight"]), spec(4), None, spec(4)),
        Reason.ARG_REQUIRED,
        "argument 'weight' is missing; the kernel needs it",
    ),
    "attribute": (
        reasons("gelu", kernel(attrs={"approximate": ["none"]}), spec(4), approximate="tanh"),
        Reason.ATTR_UNSUPPORTED,
        "approximate='tanh'; allowed: 'none'",
    ),
    "layout": (
        attention(kernel(**ATTENTION), Q, layout="BSHD"),
        Reason.LAYOUT_UNSUPPORTED,
        "layout BSHD; allowed: BHSD",
    ),
    "small head": (
        attention(kernel(**ATTENTION | {"min_head_dim": 32}), Q),
        Reason.HEAD_DIM_INVALID,
        "query and key head_dim 16; allowed: at least 32",
    ),
    "large head": (
        attention(kernel(**ATTENTION), spec(1, 4, 6, 128)),
        Reason.HEAD_DIM_TOO_LARGE,
        "query and key head_dim 128; allowed: at most 64",
    ),
    "odd value head": (
        attention(kernel(**ATTENTION), Q, Q, spec(1, 4, 6, 20)),
        Reason.HEAD_DIM_ALIGNMENT,
        "value head_dim 20; allowed: multiples of 8",
    ),
    "long sequence": (
        attention(kernel(**ATTENTION), Q, spec(1, 4, 513, 16)),
        Reason.SEQ_TOO_LONG,
        "sequence length 513; allowed: at most 512",
    ),
    "grouped heads": (
        attention(kernel(**ATTENTION), Q, spec(1, 2, 6, 16)),
        Reason.GQA_UNSUPPORTED,
        "4 query heads on 2 key heads; the kernel needs equal numbers",
    ),
    "mask": (
        attention(kernel(**ATTENTION), Q, mask=spec(1, 1, 6, 6)),
        Reason.ATTN_MASK_UNSUPPORTED,
        "float mask; allowed: bool",
    ),
    "causal alignment": (
        attention(kernel(**ATTENTION), Q, spec(1, 4, 9, 16), is_causal=True, causal_alignment="bottom_right"),
        Reason.CAUSAL_ALIGNMENT_UNSUPPORTED,
        "bottom_right with 6 queries and 9 keys; allowed: top_left",
    ),
    "tokenizer format": (
        reasons("tokenize", kernel(**TOKENIZER), *[spec(3, dtype="uint8")] * 3, tokenizer_format="0.23"),
        Reason.TOKENIZER_FORMAT_UNSUPPORTED,
        "tokenizer file format '0.23'; readable: 0.13",
    ),
    "token offsets": (
        reasons("tokenize", kernel(**TOKENIZER), *[spec(3, dtype="uint8")] * 3, return_offsets=True),
        Reason.ATTR_UNSUPPORTED,
        "return_offsets=True; the kernel gives no offsets",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rejection_names_the_offending_and_the_allowed_value(name: str) -> None:
    """Who reads it must know what to change."""
    found, code, detail = CASES[name]
    assert Rejection(code, detail) in found


@pytest.mark.parametrize(
    "found",
    [
        attention(kernel(**ATTENTION), Q, is_causal=True, causal_alignment="bottom_right"),
        attention(kernel(**ATTENTION, supports_gqa=True), Q, spec(1, 2, 6, 16)),
        attention(kernel(**ATTENTION), Q, mask=spec(1, 1, 6, 6, dtype="bool")),
        reasons("silu", kernel(requires_contiguous=True), spec(1, 3, strides=(99, 1))),
        reasons("silu", kernel(requires_last_dim_stride1=True), spec(2, 1, strides=(1, 7))),
        reasons("silu", kernel(requires_last_dim_stride1=True), spec()),
        reasons(
            "silu", kernel(requires_contiguous=True, copies_outputs=True), spec(2, 2), out=spec(2, 2, strides=(3, 1))
        ),
        reasons("linear", kernel(required_args=["bias"]), spec(2, 4), spec(3, 4), spec(3)),
    ],
    ids=[
        "alignment of a square",
        "grouped heads",
        "bool mask",
        "stride of one row",
        "stride of one column",
        "scalar",
        "copied output",
        "required argument",
    ],
)
def test_rule_does_not_refuse_what_makes_no_difference(found: list[Rejection]) -> None:
    """A kernel that could serve a call must not lose it to a formality."""
    assert found == []
