"""client/planning/token_plans.py and cache_plans.py: canonical forms, and what makes no sense is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from layerzero.client.planning import cache_plans, token_plans
from layerzero.client.planning.plans import Plan, plan_out
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def t(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def i32(*shape: int) -> TensorSpec:
    return t(*shape, dtype="int32")


def planned(op: str, *args: Any, **kwargs: Any) -> Plan:
    plan: Callable[..., Plan] = getattr(token_plans, f"plan_{op}")
    return plan(*args, **kwargs)


VARLEN = (t(9, 4, 8), t(7, 2, 8), t(7, 2, 6), i32(3), i32(3))
PAGED = (t(3, 4, 8), t(5, 16, 2, 8), t(5, 16, 2, 6), i32(3, 2), i32(3), None, None)
ROPE = (t(2, 5, 4, 8), t(5, 4), t(5, 4))
ROPE_QK = (t(2, 5, 4, 8), t(2, 5, 1, 8), t(5, 4), t(5, 4))
APPEND = (t(9, 2, 8), t(9, 2, 6), t(5, 16, 2, 8), t(5, 16, 2, 6), i32(9), None, None)
SWIGLU = (t(2, 3), t(2, 3))
CALLS = {"attention_varlen": VARLEN, "paged_attention": PAGED, "append_kv": APPEND, "rope": ROPE, "swiglu": SWIGLU}
CALLS["rope_qk"] = ROPE_QK
RESULTS = {"attention_varlen": (9, 4, 6), "paged_attention": (3, 4, 6), "rope": (2, 5, 4, 8), "swiglu": (2, 3)}


@pytest.mark.parametrize("op", RESULTS)
def test_a_plan_has_the_op_s_arguments_and_its_result(op: str) -> None:
    """Workers read arguments by position and attributes by name."""
    plan = planned(op, *CALLS[op])
    assert len(plan.inputs) == len(OPS[op].inputs)
    assert tuple(plan.attrs) == OPS[op].attrs
    assert plan.results == (t(*RESULTS[op]),)
    assert planned(op, *CALLS[op]) is plan
    assert plan_out(plan, t(*RESULTS[op])).results == plan.results


def test_what_is_written_in_place_is_an_output_and_no_result() -> None:
    """A worker gets the very memory of the caches; there is nothing to allocate and nothing to return."""
    plan = planned("append_kv", *APPEND)
    assert (plan.inputs, plan.outputs, plan.results) == (APPEND, APPEND[2:4], ())
    with pytest.raises(InvalidArgument, match="append_kv has 0 results and out= 1 arrays"):
        plan_out(plan, t(5, 16, 2, 8))


@pytest.mark.parametrize("op", ["paged_attention", "append_kv"])
def test_a_cache_in_the_other_layout_is_a_view(op: str) -> None:
    """Kernels see one layout; what is written in place lies where the caller's is."""
    args = [
        spec if n not in ((1, 2) if op[0] == "p" else (2, 3)) else t(5, 2, 16, 8) for n, spec in enumerate(CALLS[op])
    ]
    if op == "append_kv":
        args[1] = t(9, 2, 8)
    view = TensorSpec("float32", (5, 16, 2, 8), (256, 8, 128, 1))
    plan = planned(op, *args, kv_layout="HND")
    assert [spec for spec in plan.inputs if spec and spec.ndim == 4] == [view, view]
    assert op[0] == "p" or (plan.outputs, plan.results) == ((view, view), ())
    with pytest.raises(InvalidArgument, match="kv_layout is 'NHWC'; allowed: 'NHD' or 'HND'"):
        planned(op, *args, kv_layout="NHWC")


FORWARD = {
    "attention_varlen_forward": (*VARLEN, None, None),
    "paged_attention_forward": (t(9, 4, 8), *PAGED[1:5], i32(4)),
}


@pytest.mark.parametrize(
    ("op", "options", "sent"),
    [
        ("attention_varlen_forward", {"is_causal": True}, {"is_causal": True}),
        ("attention_varlen_forward", {"window_size": (8, 0)}, {"is_causal": True}),
        ("attention_varlen_forward", {"window_size": (7, -1)}, {"window_left": 7}),
        ("attention_varlen_forward", {"window_size": (-1, 99), "softcap": 2}, {"softcap": 2.0}),
        (
            "paged_attention_forward",
            {"window_size": (30, 3), "is_causal": True},
            {"window_left": 30, "is_causal": True},
        ),
        ("paged_attention_forward", {"window_size": (31, 3)}, {"window_right": 3}),
    ],
)
def test_options_that_hide_nothing_are_not_sent(op: str, options: dict[str, Any], sent: dict[str, Any]) -> None:
    """Of no sequence more is known than what all of them, or a row of the table, have room for."""
    plan = getattr(cache_plans, f"plan_{op}")(*FORWARD[op], **options)
    assert len(plan.inputs) == len(OPS[op].inputs)
    assert plan.results == (t(9, 4, 6), t(9, 4))
    plain = {"is_causal": False, "scale": 1 / math.sqrt(8)}
    if op == "attention_varlen_forward":
        plain["causal_alignment"] = "top_left"
    assert plan.attrs == plain | sent


def test_one_query_of_a_sequence_is_at_its_last_key() -> None:
    """The causal rule and what lies right of it hide nothing: one route serves all of them."""
    plan = cache_plans.plan_paged_attention_forward(*PAGED[:5], is_causal=True, window_size=(4, 9), alibi_slopes=t(4))
    assert plan.attrs == {"is_causal": False, "scale": 1 / math.sqrt(8), "window_left": 4}
    assert plan.inputs[5:] == (None, None, t(1, 4), None, None)


MOVES = {"gather_kv": (*APPEND[2:4], i32(7)), "copy_kv_blocks": (*APPEND[2:4], i32(3), i32(3))}
FORWARD |= MOVES


BYTES = (t(5, 16, 2, 8, dtype="int8"), t(5, 16, 2, 6, dtype="int8"))
ONE, EACH = TensorSpec.contiguous("float32", ()), t(2)


def test_scales_are_one_number_or_one_for_each_head() -> None:
    """Kernels see a dimension in any case; what comes out of a cache has a dtype of its own."""
    append = token_plans.plan_append_kv(*APPEND[:2], *BYTES, APPEND[4], ONE, EACH)
    assert append.inputs[5:] == (t(1), EACH)
    assert append.outputs == BYTES
    paged = token_plans.plan_paged_attention(PAGED[0], *BYTES, *PAGED[3:5], ONE, EACH)
    assert paged.inputs[5:] == (t(1), EACH)
    assert paged.results == (t(3, 4, 6),)
    found = cache_plans.plan_gather_kv(*BYTES, i32(7), EACH, EACH, dtype="float16")
    assert (found.attrs, found.results[1]) == ({"dtype": "float16"}, t(7, 2, 6, dtype="float16"))
    assert cache_plans.plan_gather_kv(*BYTES, i32(7), ONE, ONE).attrs == {"dtype": "float32"}
    assert cache_plans.plan_gather_kv(*BYTES, i32(7)).attrs == {}


@pytest.mark.parametrize(
    ("scales", "changes", "options", "says"),
    [
        ((ONE, None), {}, {}, "v_scale is None; allowed: both scales or neither"),
        ((ONE, t(3)), {}, {}, r"v_scale is float32\[3\]; allowed: float32, one number or one for each of 2 heads"),
        ((t(2, dtype="float16"), EACH), {}, {}, r"k_scale is float16\[2\]"),
        (
            (ONE, ONE),
            {0: APPEND[2], 1: APPEND[3]},
            {},
            "k_cache is float32; allowed: int8 or float8_e4m3fn or float8_e5m2",
        ),
        ((ONE, ONE), {1: APPEND[3]}, {}, "k_cache is int8, v_cache is float32"),
        ((ONE, ONE), {}, {"dtype": "int8"}, "dtype is 'int8'; allowed: 'float32' or 'bfloat16' or 'float16'"),
        ((None, None), {}, {"dtype": "float32"}, "dtype is 'float32' without scales"),
    ],
)
def test_scales_that_fit_no_cache_are_refused(
    scales: tuple[Any, Any], changes: dict[int, TensorSpec], options: dict[str, Any], says: str
) -> None:
    caches = [changes.get(n, cache) for n, cache in enumerate(BYTES)]
    with pytest.raises(InvalidArgument, match=says):
        cache_plans.plan_gather_kv(*caches, i32(7), *scales, **options)


def test_queries_of_a_cache_with_scales_have_a_dtype_that_quantize_takes() -> None:
    with pytest.raises(InvalidArgument, match="q is float64; allowed: float32 or bfloat16 or float16 with scales"):
        token_plans.plan_paged_attention(t(3, 4, 8, dtype="float64"), *BYTES, *PAGED[3:5], ONE, ONE)


def test_rows_of_a_cache_are_new_and_blocks_move_in_place() -> None:
    found = cache_plans.plan_gather_kv(*MOVES["gather_kv"])
    assert found.results == found.outputs == (t(7, 2, 8), t(7, 2, 6))
    turned = [t(5, 2, 16, dim) for dim in (8, 6)]
    moved = cache_plans.plan_copy_kv_blocks(*turned, i32(3), i32(3), kv_layout="HND")
    assert moved.outputs == moved.inputs[:2] == tuple(spec.permute(0, 2, 1, 3) for spec in turned)
    assert moved.results == ()


MLA = (t(3, 4, 8), t(3, 4, 6), t(5, 16, 8), t(5, 16, 6), i32(3, 2), i32(3))
FORWARD["mla_decode"] = MLA


def test_latent_attention_has_its_scale_from_the_caller() -> None:
    """No shape tells the extent that heads had before the up-projection of keys was absorbed."""
    plan = cache_plans.plan_mla_decode(*MLA, scale=1)
    assert (plan.inputs, plan.attrs, plan.results) == (MLA, {"scale": 1.0}, (t(3, 4, 8), t(3, 4)))
    with pytest.raises(InvalidArgument, match="mla_decode: scale is None; allowed: a number"):
        cache_plans.plan_mla_decode(*MLA, scale=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "changes", "options", "says"),
    [
        ("mla_decode", {1: t(3, 4, 1, 6)}, {"scale": 1.0}, r"allowed: \(sequences, heads, rope_dim\)"),
        ("mla_decode", {2: t(5, 16, 1, 8)}, {"scale": 1.0}, r"allowed: \(blocks, block_size, latent_dim\); all heads"),
        ("mla_decode", {5: i32(4)}, {"scale": 1.0}, "seq_lens' is 4; allowed: one row of each"),
        ("mla_decode", {1: t(3, 5, 6)}, {"scale": 1.0}, "q_nope has 4 heads and q_pe 5"),
        ("mla_decode", {3: t(5, 8, 6)}, {"scale": 1.0}, r"ckv_cache has \(blocks, block_size\) \[5, 16\]"),
        ("mla_decode", {0: t(3, 4, 9)}, {"scale": 1.0}, "latent_dim 9 and ckv_cache 8; .* up-projection of keys first"),
        ("mla_decode", {1: t(3, 4, 4)}, {"scale": 1.0}, "q_pe has rope_dim 4 and kpe_cache 6"),
        ("paged_attention_forward", {2: t(5, 16, 2, 6, dtype="int8")}, {}, "v_cache int8; .* pass k_scale and v_scale"),
        ("gather_kv", {1: t(5, 16, 3, 6)}, {}, "k_cache has 2 heads and v_cache 3"),
        ("gather_kv", {1: t(5, 16, 2, 6, dtype="int8")}, {}, "v_cache is int8"),
        ("gather_kv", {2: t(7)}, {}, r"slots is float32\[7\]; allowed: 1 dimension of int32 or int64"),
        (
            "copy_kv_blocks",
            {3: i32(4)},
            {},
            r"sources is int32\[3\] and targets int32\[4\]; allowed: one dtype and length",
        ),
        ("copy_kv_blocks", {0: TensorSpec("float32", (5, 16, 2, 8), (0, 16, 8, 1))}, {}, "elements share memory"),
        ("attention_varlen_forward", {4: i32(4)}, {}, "cu_seqlens_q has 3 entries and cu_seqlens_k 4"),
        ("attention_varlen_forward", {5: t(3)}, {}, r"sinks has shape \[3\]; allowed: \[4\]"),
        ("attention_varlen_forward", {6: t(3, 4)}, {}, r"allowed: \[4\], or \[1 or 2, 4\]"),
        ("attention_varlen_forward", {}, {"window_size": (1,)}, "allowed: \\(left, right\\)"),
        ("paged_attention_forward", {0: t(9, 32)}, {}, r"q has shape \[9, 32\]; allowed: \(tokens, heads, head_dim\)"),
        ("paged_attention_forward", {3: i32(2, 2)}, {}, "block_tables' first extent is 2, seq_lens' is 3"),
        ("paged_attention_forward", {5: i32(3)}, {}, "cu_seqlens_q has 3 entries; allowed: 4, one more than"),
        ("paged_attention_forward", {5: None}, {}, "q has 9 tokens and seq_lens 3 entries; allowed: one query"),
        ("paged_attention_forward", {}, {"softcap": -1}, "softcap is -1; allowed: 0.0 or more"),
        ("paged_attention_forward", {1: t(5, 16, 16)}, {"kv_layout": "HND"}, "blocks, heads, block_size, head_dim"),
    ],
)
def test_what_makes_no_sense_of_sequences_is_refused(
    op: str, changes: dict[int, Any], options: dict[str, Any], says: str
) -> None:
    args = [changes.get(number, spec) for number, spec in enumerate(FORWARD[op])]
    with pytest.raises(InvalidArgument, match=f"{op}: .*{says}"):
        getattr(cache_plans, f"plan_{op}")(*args, **options)


def test_rope_without_a_batch_gets_one() -> None:
    """Kernels see four dimensions, and a table of one batch."""
    plan = planned("rope", t(5, 4, 8), t(5, 4), t(5, 4), interleaved=True)
    assert plan.inputs == (t(1, 5, 4, 8), t(1, 5, 4), t(1, 5, 4))
    assert (plan.outputs, plan.results) == ((t(1, 5, 4, 8),), (t(5, 4, 8),))
    assert plan.attrs == {"interleaved": True}
    strided = TensorSpec("float32", (5, 4, 8), (64, 8, 1))
    assert plan_out(plan, strided).outputs[0].strides[1:] == (64, 8, 1)


def test_rope_of_queries_and_keys_has_both_results() -> None:
    """Keys have heads of their own, and without a batch both get one."""
    plan = planned("rope_qk", *ROPE_QK)
    assert plan.results == (t(2, 5, 4, 8), t(2, 5, 1, 8))
    plan = planned("rope_qk", t(5, 4, 8), t(5, 2, 8), t(5, 3), t(5, 3), interleaved=True)
    assert plan.inputs == (t(1, 5, 4, 8), t(1, 5, 2, 8), t(1, 5, 3), t(1, 5, 3))
    assert (plan.outputs, plan.results) == ((t(1, 5, 4, 8), t(1, 5, 2, 8)), (t(5, 4, 8), t(5, 2, 8)))


def test_scale_defaults_to_the_root_of_head_dim_and_alignment_is_canonical() -> None:
    """Calls that mean the same must share one route."""
    plan = planned(
        "attention_varlen", t(2, 1, 16), t(2, 1, 16), t(2, 1, 16), i32(2), i32(2), causal_alignment="bottom_right"
    )
    assert plan.attrs == {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left"}
    assert planned("paged_attention", *PAGED, scale=2).attrs == {"scale": 2.0}


@pytest.mark.parametrize(
    ("op", "changes", "options", "says"),
    [
        (
            "attention_varlen",
            {0: t(1, 9, 4, 8)},
            {},
            r"q has shape \[1, 9, 4, 8\]; allowed: \(tokens, heads, head_dim\)",
        ),
        ("attention_varlen", {0: t(9, 4, 8, dtype="int32")}, {}, "q is int32"),
        ("attention_varlen", {1: t(7, 2, 8, dtype="float16")}, {}, "k is float16"),
        ("attention_varlen", {3: t(3, dtype="int64")}, {}, "cu_seqlens_q is int64; allowed: int32"),
        ("attention_varlen", {4: i32(4)}, {}, "cu_seqlens_q has 3 entries and cu_seqlens_k 4"),
        ("attention_varlen", {3: i32(0), 4: i32(0)}, {}, "cu_seqlens_q is empty"),
        ("attention_varlen", {4: i32(3, 1)}, {}, r"cu_seqlens_k has shape \[3, 1\]; allowed: 1 dimension;"),
        ("attention_varlen", {2: t(6, 2, 6)}, {}, "k has 7 tokens and v 6"),
        ("attention_varlen", {1: t(7, 2, 6)}, {}, "q has head_dim 8 and k 6"),
        ("attention_varlen", {1: t(7, 4, 8)}, {}, "k has 4 heads and v 2"),
        ("attention_varlen", {1: t(7, 3, 8), 2: t(7, 3, 6)}, {}, "q has 4 heads and k 3; allowed: a multiple of k's"),
        ("attention_varlen", {}, {"scale": float("inf")}, "scale is inf; allowed: a finite number"),
        ("attention_varlen", {}, {"is_causal": 1}, "is_causal is 1; allowed: True or False"),
        ("attention_varlen", {}, {"causal_alignment": "left"}, "causal_alignment is 'left'"),
        ("paged_attention", {0: t(3, 1, 4, 8)}, {}, "allowed: \\(sequences, heads, head_dim\\)"),
        ("paged_attention", {1: t(5, 16, 16)}, {}, "allowed: \\(blocks, block_size, heads, head_dim\\)"),
        ("paged_attention", {2: t(5, 8, 2, 6)}, {}, "as many blocks of the same size"),
        ("paged_attention", {3: i32(2, 2)}, {}, "q's first extent is 3, block_tables' is 2, seq_lens' is 3"),
        ("paged_attention", {3: t(3, 2, dtype="int64")}, {}, "block_tables is int64"),
        ("paged_attention", {0: t(3, 3, 8)}, {}, "q has 3 heads and k_cache 2"),
        ("rope", {0: t(5, 8)}, {}, r"x has shape \[5, 8\]; .*x.transpose\(1, 2\)"),
        ("rope", {2: t(5, 2)}, {}, r"cos has shape \[5, 4\] and sin \[5, 2\]"),
        ("rope", {1: t(4, 4), 2: t(4, 4)}, {}, r"allowed: \(5, pairs\) or \(1 or 2, 5, pairs\)"),
        ("rope", {1: t(3, 5, 4), 2: t(3, 5, 4)}, {}, "pass the rows of x's positions"),
        (
            "rope",
            {1: t(5, 8), 2: t(5, 8)},
            {},
            "cos has 8 columns.*allowed: 1 to 4 columns; where the columns are given twice",
        ),
        ("rope", {1: t(5, 0), 2: t(5, 0)}, {}, "cos has 0 columns"),
        ("rope", {1: t(4), 2: t(4)}, {}, r"cos has shape \[4\]"),
        ("rope", {1: t(5, 4, dtype="float64"), 2: t(5, 4, dtype="float64")}, {}, "cos is float64"),
        ("rope", {}, {"interleaved": None}, "interleaved is None"),
        (
            "rope_qk",
            {1: t(2, 5, 1, 6)},
            {},
            r"q has shape \[2, 5, 4, 8\] and k \[2, 5, 1, 6\]; allowed: shapes that differ",
        ),
        ("rope_qk", {1: t(5, 1, 8)}, {}, r"k \[5, 1, 8\].*call lz.rope on each"),
        ("rope_qk", {2: t(4, 4), 3: t(4, 4)}, {}, "pass the rows of q's positions"),
        ("rope_qk", {1: t(2, 5, 1, 8, dtype="float16")}, {}, "k is float16, .*allowed: one dtype"),
        ("append_kv", {0: t(9, 2)}, {}, r"key has shape \[9, 2\]; allowed: \(tokens, heads, head_dim\)"),
        ("append_kv", {1: t(9, 2, 8)}, {}, r"value has \(heads, head_dim\) \[2, 8\] and v_cache \[2, 6\]"),
        ("append_kv", {0: t(8, 2, 8)}, {}, "key's first extent is 8, value's is 9, slots' is 9"),
        ("append_kv", {2: t(5, 16, 2, 8, dtype="float16")}, {}, "k_cache is float16"),
        (
            "append_kv",
            {3: t(5, 16, 2, 6, dtype="int8")},
            {},
            "key is float32 and v_cache int8; .* pass k_scale and v_scale, or what lz.dynamic_quantize makes",
        ),
        (
            "paged_attention",
            {1: t(5, 16, 2, 8, dtype="float8_e4m3fn")},
            {},
            "q is float32 and k_cache float8_e4m3fn; allowed: one dtype without scales",
        ),
        ("append_kv", {3: t(5, 8, 2, 6)}, {}, "as many blocks of the same size"),
        ("append_kv", {4: t(9)}, {}, r"slots is float32\[9\]; allowed: \(tokens,\) of int32 or int64"),
        ("append_kv", {4: i32(9, 1)}, {}, r"slots is int32\[9, 1\]"),
        (
            "append_kv",
            {2: TensorSpec("float32", (5, 16, 2, 8), (0, 16, 8, 1))},
            {},
            r"k_cache has shape .* so elements share memory; allowed: one place per element",
        ),
        ("swiglu", {1: t(3)}, {}, r"gate has shape \[2, 3\] and up \[3\]"),
        ("swiglu", {1: t(2, 3, dtype="float16")}, {}, "up is float16"),
    ],
)
def test_what_makes_no_sense_is_refused(
    op: str, changes: dict[int, TensorSpec], options: dict[str, Any], says: str
) -> None:
    """No backend could serve it, so it must not reach one."""
    args = [changes.get(number, spec) for number, spec in enumerate(CALLS[op])]
    with pytest.raises(InvalidArgument, match=says):
        planned(op, *args, **options)
