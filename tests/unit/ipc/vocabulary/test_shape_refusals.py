"""Each rule of the shape functions by one call that breaks it: what the error says is what a user has to go by. And by
those that just do not break it."""

from __future__ import annotations

import pytest
from tests.unit.ipc.vocabulary.calls import CALLS, Change, call, spec

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import CAST_DTYPES, OPS
from layerzero.ipc.vocabulary.shapes import check_call, outputs_of
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES

FLOATS = "bfloat16, float16, float32, float64"
EACH = "one for each head of q"
ALIGNMENTS = "top_left or bottom_right"
QUANTIZED = "float8_e4m3fn or float8_e5m2 or int8"
NUMBERS = ", ".join(CAST_DTYPES[1:])


def outputs(op: str, change: Change) -> list[str]:
    return [" ".join(map(str, (dtype, *shape))) for dtype, shape in outputs_of(op, *call(op, change))]


def refusal(op: str, change: Change) -> str:
    with pytest.raises(InvalidArgument) as refused:
        outputs_of(op, *call(op, change))
    return refused.value.message


@pytest.mark.parametrize("op", OPS)
def test_the_outputs_of_a_good_call_are_those_of_the_formulas(op: str) -> None:
    assert outputs(op, {}) == list(CALLS[op][2])
    check_call(op, call(op, {})[0], [spec(text) for text in CALLS[op][2]], CALLS[op][1])


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in OPS[op].inputs if name not in OPS[op].optional]
)
def test_a_call_without_a_tensor_that_it_needs_is_refused(op: str, name: str) -> None:
    """The broker and the worker look for that before; nothing is computed of what is not there."""
    assert refusal(op, {name: None}) == "a required tensor is missing"


ACCEPTED: list[tuple[str, Change, str]] = [
    ("attention", {"attn_mask": "bool 1 1 1 1"}, "float32 2 6 5 13"),
    ("attention", {"attn_mask": "float32 2 6 5 11"}, "float32 2 6 5 13"),
    ("attention", {"is_causal": True, "causal_alignment": "bottom_right", "layout": "BSHD"}, "float32 2 6 5 13"),
    ("attention", {"q": "float32 2 0 5 7", "scale": -2.0}, "float32 2 0 5 13"),
    ("attention", {"q": "float32 2 0 5 7", "k": "float32 2 0 11 7", "v": "float32 2 0 11 13"}, "float32 2 0 5 13"),
    ("attention", {"q": "float32 2 3 5 7"}, "float32 2 3 5 13"),
    ("attention_forward", {"attn_mask": "bool 1 6 5 1"}, "float32 2 6 5 13"),
    ("attention", {"attn_mask": "bool 1 1 1 1", "is_causal": True}, "float32 2 6 5 13"),
    ("attention", {"sinks": "float32 6", "alibi_slopes": "float32 2 6", "softcap": 2.0}, "float32 2 6 5 13"),
    ("attention", {"window_left": 0, "window_right": 3, "alibi_slopes": "float32 1 6"}, "float32 2 6 5 13"),
    ("attention_backward", {"attn_mask": "float16 2 1 1 11"}, "float16 2 6 5 7"),
    ("attention_varlen", {"cu_seqlens_q": "int32 1", "cu_seqlens_k": "int32 1"}, "float32 5 6 13"),
    ("append_kv", {"slots": "int32 5"}, "int8 10 4 3 7"),
    ("rope", {"cos": "float32 1 5 1", "sin": "float32 1 5 1"}, "float32 2 5 3 9"),
    ("rope", {"x": "float32 2 5 3 8", "interleaved": True}, "float32 2 5 3 8"),
    ("matmul", {"a": "float64 2 3", "b": "float64 5 3 7"}, "float64 5 2 7"),
    ("matmul", {"a": "int8 5 2 3", "b": "int8 3 7"}, "int8 5 2 7"),
    ("matmul", {"a": "int8 0 2 3", "b": "int8 1 3 7"}, "int8 0 2 7"),
    ("addmm", {"x": "float32 2 1"}, "float32 2 7"),
    ("addmm", {"x": "float32 1 0", "b": "float32 3 0", "beta": 0.0}, "float32 2 0"),
    ("linear", {"x": "float32 2 3", "bias": None}, "float32 2 5"),
    ("add", {"x": "int32"}, "int32 5 3"),
    ("clamp", {"x": "int8 3", "min": -128, "max": 127}, "int8 3"),
    ("where", {"x": "bool 3", "other": "bool 2 3"}, "bool 2 3"),
    ("cat", {"t1": None}, "float32 2 3"),
    ("cat", {"t1": "float32 0 3", "dim": 0}, "float32 2 3"),
    ("cast", {"dtype": "float32"}, "float32 2 3"),
    ("linear", {"x": "int8 2 3", "weight": "int8 5 3", "bias": None, "activation": ""}, "int8 2 5"),
    ("softmax", {"x": "float16 4", "dim": 0}, "float16 4"),
    ("softmax", {"x": "float16 4", "dim": 0, "dtype": "float64"}, "float64 4"),
    ("layer_norm", {"ndim": 3, "weight": None, "bias": "float32 2 3 5", "eps": 0.0}, "float32 2 3 5"),
    ("rms_norm", {"x": "bfloat16 5", "weight": None}, "bfloat16 5"),
    ("layer_norm_backward", {"ndim": 3, "weight": None}, "float32 2 3 5"),
    ("rms_norm_backward", {"grad_out": "bfloat16 5", "x": "bfloat16 5", "weight": None}, "bfloat16 5"),
    ("gelu", {"approximate": "none"}, "float32 2 3"),
    ("quantize", {"x": "bfloat16 6", "scale": "float32 1", "dtype": "float8_e5m2"}, "float8_e5m2 6"),
    ("quantize", {"scale": "float32 1 6", "dtype": "float8_e4m3fn"}, "float8_e4m3fn 4 6"),
    ("dequantize", {"x": "float4_e2m1fn_x2 3", "scale": "float32 2", "dtype": "bfloat16"}, "bfloat16 6"),
    ("dequantize", {"x": "float8_e4m3fn 2 3 5", "scale": "float32 1 3 5", "dtype": "float32"}, "float32 2 3 5"),
    ("embedding", {"ids": "int32"}, "float32 5"),
    ("embedding", {"weight": "uint8 7 5"}, "uint8 2 3 5"),
    ("tokenize", {"max_length": 0, "tokenizer_digest": "x" * 256}, "int32 0"),
    ("tokenize", {"max_length": MAX_NBYTES, "tokenizer_format": "x" * 256}, "int32 0"),
    ("embedding", {"ids": "int32" + " 1" * 15, "weight": f"int8 1 {MAX_NBYTES}"}, f"int8{' 1' * 15} {MAX_NBYTES}"),
]


@pytest.mark.parametrize(("op", "change", "first"), ACCEPTED)
def test_what_just_does_not_break_a_rule_is_served(op: str, change: Change, first: str) -> None:
    assert outputs(op, change)[0] == first


# Op, what is changed of its good call, what the error says is there, and what it says is allowed.
REFUSED: list[tuple[str, Change, str, str]] = [
    ("attention", {"k": "float16 2 3 11 7"}, "q is float32, k is float16, v is float32", "one dtype for all"),
    (
        "attention",
        {"q": "int8 2 6 5 7", "k": "int8 2 3 11 7", "v": "int8 2 3 11 13"},
        "q is int8",
        FLOATS,
    ),
    ("attention", {"q": "float32 2 6 5"}, "q has shape [2, 6, 5]", "4 dimensions"),
    ("attention", {"k": "float32 2 3 1 1 7"}, "k has shape [2, 3, 1, 1, 7]", "4 dimensions"),
    ("attention", {"v": "float32 7"}, "v has shape [7]", "4 dimensions"),
    ("attention", {"q": "float32 1 6 5 7"}, "q has batch 1, k has batch 2, v has batch 2", "equal ones"),
    (
        "attention",
        {"v": "float32 1 3 11 13"},
        "q has batch 2, k has batch 2, v has batch 1",
        "equal ones",
    ),
    (
        "attention",
        {"k": "float32 4 3 11 7"},
        "q has batch 2, k has batch 4, v has batch 2",
        "equal ones",
    ),
    (
        "attention",
        {"q": "float32 4 6 5 7"},
        "q has batch 4, k has batch 2, v has batch 2",
        "equal ones",
    ),
    ("attention", {"v": "float32 2 6 11 13"}, "k has heads 3, v has heads 6", "equal ones"),
    ("attention", {"v": "float32 2 3 5 13"}, "k has sequence length 11, v has sequence length 5", "equal ones"),
    ("attention", {"q": "float32 2 6 5 13"}, "q has head_dim 13, k has head_dim 7", "equal ones"),
    ("attention", {"q": "float32 2 4 5 7"}, "4 query heads and 3 key heads", "a multiple of the key heads"),
    (
        "attention",
        {"k": "float32 2 0 11 7", "v": "float32 2 0 11 13"},
        "6 query heads and 0 key heads",
        "a multiple of the key heads",
    ),
    ("attention", {"is_causal": 1}, "is_causal is 1", "True or False"),
    ("attention_backward", {"lse": "float16 2 6 5"}, "lse is float16[2, 6, 5]", "float32[2, 6, 5], as q, k and v say"),
    ("attention_backward", {"lse": "float32 2 5 6"}, "lse is float32[2, 5, 6]", "float32[2, 6, 5], as q, k and v say"),
    (
        "attention_backward",
        {"output": "float16 2 6 5 7"},
        "output is float16[2, 6, 5, 7]",
        "float16[2, 6, 5, 13], as q, k and v say",
    ),
    (
        "attention_backward",
        {"grad_out": "float32 2 6 5 13"},
        "grad_out is float32[2, 6, 5, 13]",
        "float16[2, 6, 5, 13], as q, k and v say",
    ),
    ("attention_backward", {"q": "float16 2 4 5 7"}, "4 query heads and 3 key heads", "a multiple of the key heads"),
    ("attention", {"attn_mask": "float16 1 1 5 11"}, "attn_mask is float16", "bool, or float32 like q"),
    (
        "attention",
        {"attn_mask": "bool 5 11"},
        "attn_mask has shape [5, 11]",
        "4 dimensions that broadcast to [2, 6, 5, 11]",
    ),
    (
        "attention",
        {"attn_mask": "bool 2 3 5 11"},
        "attn_mask has shape [2, 3, 5, 11]",
        "4 dimensions that broadcast to [2, 6, 5, 11]",
    ),
    (
        "attention",
        {"attn_mask": "bool 2 6 5 7"},
        "attn_mask has shape [2, 6, 5, 7]",
        "4 dimensions that broadcast to [2, 6, 5, 11]",
    ),
    (
        "attention",
        {"attn_mask": "bool 0 1 1 1"},
        "attn_mask has shape [0, 1, 1, 1]",
        "4 dimensions that broadcast to [2, 6, 5, 11]",
    ),
    ("attention", {"sinks": "float32 3"}, "sinks is float32[3]", f"float32[6], {EACH}"),
    ("attention", {"sinks": "float16 6"}, "sinks is float16[6]", f"float32[6], {EACH}"),
    ("attention", {"alibi_slopes": "float32 6"}, "alibi_slopes is float32[6]", f"float32, (1 or 2, 6), {EACH}"),
    ("attention", {"alibi_slopes": "float16 1 6"}, "alibi_slopes is float16[1, 6]", f"float32, (1 or 2, 6), {EACH}"),
    ("attention", {"window_left": -1}, "window_left is -1", "an integer from 0 to 2147483647"),
    ("attention", {"window_right": 1.0}, "window_right is 1.0", "an integer from 0 to 2147483647"),
    ("attention", {"softcap": 1}, "softcap is 1", "a finite float"),
    ("attention", {"softcap": 0.0}, "softcap is 0.0", "above 0, or left out"),
    ("attention_forward", {"softcap": -2.0}, "softcap is -2.0", "above 0, or left out"),
    ("attention", {"scale": 1}, "scale is 1", "a finite float"),
    ("attention", {"scale": float("inf")}, "scale is inf", "a finite float"),
    ("attention", {"scale": float("nan")}, "scale is nan", "a finite float"),
    ("attention", {"causal_alignment": "left"}, "causal_alignment is 'left'", ALIGNMENTS),
    ("attention", {"layout": "bhsd"}, "layout is 'bhsd'", "BHSD or BSHD"),
    ("attention", {"layout": ["BHSD"]}, "layout is ['BHSD']", "BHSD or BSHD"),
    (
        "attention_varlen",
        {"v": "float64 11 3 13"},
        "q is float32, k is float32, v is float64",
        "one dtype for all",
    ),
    (
        "attention_varlen",
        {"q": "uint8 5 6 7", "k": "uint8 11 3 7", "v": "uint8 11 3 13"},
        "q is uint8",
        FLOATS,
    ),
    ("attention_varlen", {"q": "float32 1 5 6 7"}, "q has shape [1, 5, 6, 7]", "3 dimensions"),
    ("attention_varlen", {"k": "float32 3 7"}, "k has shape [3, 7]", "3 dimensions"),
    ("attention_varlen", {"v": "float32 1 11 3 13"}, "v has shape [1, 11, 3, 13]", "3 dimensions"),
    ("attention_varlen", {"cu_seqlens_q": "int64 4"}, "cu_seqlens_q is int64", "int32"),
    ("attention_varlen", {"cu_seqlens_k": "uint32 4"}, "cu_seqlens_k is uint32", "int32"),
    ("attention_varlen", {"cu_seqlens_q": "int32 4 1"}, "cu_seqlens_q has shape [4, 1]", "1 dimensions"),
    ("attention_varlen", {"cu_seqlens_k": "int32"}, "cu_seqlens_k has shape []", "1 dimensions"),
    (
        "attention_varlen",
        {"cu_seqlens_q": "int32 3"},
        "cu_seqlens_q has entries 3, cu_seqlens_k has entries 4",
        "equal ones",
    ),
    (
        "attention_varlen",
        {"cu_seqlens_q": "int32 0", "cu_seqlens_k": "int32 0"},
        "cu_seqlens_q is empty",
        "one more entry than there are sequences",
    ),
    ("attention_varlen", {"k": "float32 5 3 7"}, "k has tokens 5, v has tokens 11", "equal ones"),
    ("attention_varlen", {"v": "float32 11 6 13"}, "k has heads 3, v has heads 6", "equal ones"),
    ("attention_varlen", {"q": "float32 5 6 13"}, "q has head_dim 13, k has head_dim 7", "equal ones"),
    ("attention_varlen", {"q": "float32 5 7 7"}, "7 query heads and 3 key heads", "a multiple of the key heads"),
    ("attention_varlen", {"is_causal": None}, "is_causal is None", "True or False"),
    ("attention_varlen", {"scale": "1"}, "scale is '1'", "a finite float"),
    ("attention_varlen", {"causal_alignment": 0}, "causal_alignment is 0", ALIGNMENTS),
    (
        "paged_attention",
        {"v_cache": "float16 10 4 3 13"},
        "q is float32, k_cache is float32, v_cache is float16",
        "one dtype for all",
    ),
    (
        "paged_attention",
        {"q": "int8 2 6 7", "k_cache": "int8 10 4 3 7", "v_cache": "int8 10 4 3 13"},
        "q is int8",
        FLOATS,
    ),
    ("paged_attention", {"q": "float32 2 1 6 7"}, "q has shape [2, 1, 6, 7]", "3 dimensions"),
    ("paged_attention", {"k_cache": "float32 4 3 7"}, "k_cache has shape [4, 3, 7]", "4 dimensions"),
    ("paged_attention", {"v_cache": "float32 4 3 13"}, "v_cache has shape [4, 3, 13]", "4 dimensions"),
    (
        "paged_attention",
        {"v_cache": "float32 10 5 3 13"},
        "k_cache has blocks, their size and heads (10, 4, 3), v_cache has blocks, their size and heads (10, 5, 3)",
        "equal ones",
    ),
    ("paged_attention", {"block_tables": "int64 2 9"}, "block_tables is int64", "int32"),
    ("paged_attention", {"block_tables": "int32 2"}, "block_tables has shape [2]", "2 dimensions"),
    ("paged_attention", {"seq_lens": "float32 2"}, "seq_lens is float32", "int32"),
    ("paged_attention", {"seq_lens": "int32 2 1"}, "seq_lens has shape [2, 1]", "1 dimensions"),
    (
        "paged_attention",
        {"block_tables": "int32 3 9"},
        "q has rows 2, block_tables has rows 3, seq_lens has rows 2",
        "equal ones",
    ),
    (
        "paged_attention",
        {"seq_lens": "int32 1"},
        "q has rows 2, block_tables has rows 2, seq_lens has rows 1",
        "equal ones",
    ),
    (
        "paged_attention",
        {"q": "float32 1 6 7"},
        "q has rows 1, block_tables has rows 2, seq_lens has rows 2",
        "equal ones",
    ),
    ("paged_attention", {"q": "float32 2 6 13"}, "q has head_dim 13, k_cache has head_dim 7", "equal ones"),
    ("paged_attention", {"q": "float32 2 4 7"}, "4 query heads and 3 key heads", "a multiple of the key heads"),
    ("paged_attention", {"scale": None}, "scale is None", "a finite float"),
    (
        "append_kv",
        {"k_cache": "float16 10 4 3 7"},
        "key is int8, value is int8, k_cache is float16, v_cache is int8",
        "one dtype for all",
    ),
    ("append_kv", {"key": "int8 1 5 3 7"}, "key has shape [1, 5, 3, 7]", "3 dimensions"),
    ("append_kv", {"value": "int8 3 13"}, "value has shape [3, 13]", "3 dimensions"),
    ("append_kv", {"k_cache": "int8 10 3 7"}, "k_cache has shape [10, 3, 7]", "4 dimensions"),
    ("append_kv", {"v_cache": "int8 10 3 13"}, "v_cache has shape [10, 3, 13]", "4 dimensions"),
    (
        "append_kv",
        {"k_cache": "int8 9 4 3 7"},
        "k_cache has blocks, their size and heads (9, 4, 3), v_cache has blocks, their size and heads (10, 4, 3)",
        "equal ones",
    ),
    ("append_kv", {"slots": "uint32 5"}, "slots is uint32", "int32 or int64"),
    ("append_kv", {"slots": "int32 5 1"}, "slots has shape [5, 1]", "1 dimensions"),
    ("append_kv", {"slots": "int32 6"}, "key has rows 5, value has rows 5, slots has rows 6", "equal ones"),
    ("append_kv", {"value": "int8 4 3 13"}, "key has rows 5, value has rows 4, slots has rows 5", "equal ones"),
    ("append_kv", {"key": "int8 4 3 7"}, "key has rows 4, value has rows 5, slots has rows 5", "equal ones"),
    (
        "append_kv",
        {"key": "int8 5 3 8"},
        "key has heads and head_dim (3, 8), k_cache has heads and head_dim (3, 7)",
        "equal ones",
    ),
    (
        "append_kv",
        {"value": "int8 5 1 13"},
        "value has heads and head_dim (1, 13), v_cache has heads and head_dim (3, 13)",
        "equal ones",
    ),
    ("rope", {"sin": "float64 2 5 4"}, "x is float32, cos is float32, sin is float64", "one dtype for all"),
    ("rope", {"x": "int32 2 5 3 9", "cos": "int32 2 5 4", "sin": "int32 2 5 4"}, "x is int32", FLOATS),
    ("rope", {"x": "float32 5 3 9"}, "x has shape [5, 3, 9]", "4 dimensions"),
    ("rope", {"cos": "float32 5 4"}, "cos has shape [5, 4]", "3 dimensions"),
    ("rope", {"sin": "float32 2 5 3"}, "cos has shape (2, 5, 4), sin has shape (2, 5, 3)", "equal ones"),
    (
        "rope",
        {"cos": "float32 5 5 4", "sin": "float32 5 5 4"},
        "cos has shape [5, 5, 4]",
        "(1 or 2, 5, pairs)",
    ),
    (
        "rope",
        {"cos": "float32 2 1 4", "sin": "float32 2 1 4"},
        "cos has shape [2, 1, 4]",
        "(1 or 2, 5, pairs)",
    ),
    (
        "rope",
        {"cos": "float32 2 5 5", "sin": "float32 2 5 5"},
        "cos has 5 columns and x a head_dim of 9",
        "1 to half of it",
    ),
    (
        "rope",
        {"cos": "float32 2 5 0", "sin": "float32 2 5 0"},
        "cos has 0 columns and x a head_dim of 9",
        "1 to half of it",
    ),
    ("rope", {"interleaved": 0}, "interleaved is 0", "True or False"),
    ("matmul", {"b": "int64 5 3 7"}, "a is int32, b is int64", "one dtype for all"),
    ("matmul", {"a": "bool 2 3", "b": "bool 3 7"}, "a is bool", "numbers"),
    ("matmul", {"a": "int32 3"}, "a has shape [3]", "at least 2 dimensions"),
    ("matmul", {"b": "int32 3"}, "b has shape [3]", "at least 2 dimensions"),
    (
        "matmul",
        {"b": "int32 5 7 3"},
        "a has shape [4, 1, 2, 3] and b [5, 7, 3]",
        "a's last extent, b's second to last",
    ),
    ("matmul", {"a": "int32 4 2 2 3"}, "leading dimensions [4, 2] and [1, 5]", "equal extents, or 1"),
    ("matmul", {"a": "int32 0 2 3"}, "leading dimensions [0] and [5]", "equal extents, or 1"),
    ("addmm", {"x": "float16 1 7"}, "x is float16, a is float32, b is float32", "one dtype for all"),
    ("addmm", {"x": "int8 1 7", "a": "int8 2 3", "b": "int8 3 7"}, "x is int8", FLOATS),
    ("addmm", {"x": "float32 7"}, "x has shape [7]", "2 dimensions"),
    ("addmm", {"x": "float32 3 7"}, "x has shape [3, 7]", "1 or [2, 7]"),
    ("addmm", {"a": "float32 1 2 3"}, "a has shape [1, 2, 3]", "2 dimensions"),
    ("addmm", {"b": "float32 2 7"}, "a has shape [2, 3] and b [2, 7]", "a's last extent, b's first"),
    ("addmm", {"beta": 1}, "beta is 1", "a finite float"),
    ("addmm", {"alpha": float("inf")}, "alpha is inf", "a finite float"),
    ("linear", {"bias": "float16 5"}, "x is float32, weight is float32, bias is float16", "one dtype for all"),
    ("linear", {"weight": "float16 5 3", "bias": None}, "x is float32, weight is float16", "one dtype for all"),
    ("linear", {"x": "bool 4 3", "weight": "bool 5 3", "bias": None}, "x is bool", "numbers"),
    ("linear", {"x": "float32 3"}, "x has shape [3]", "at least 2 dimensions"),
    ("linear", {"weight": "float32 1 5 3"}, "weight has shape [1, 5, 3]", "2 dimensions"),
    (
        "linear",
        {"x": "float32 4 3 2"},
        "x has shape [4, 3, 2] and weight [5, 3]",
        "equal last extents",
    ),
    ("linear", {"bias": "float32 3"}, "bias has shape [3]", "[5], weight's first extent"),
    ("linear", {"bias": "float32 1 5"}, "bias has shape [1, 5]", "[5], weight's first extent"),
    ("gated_mlp", {"down": "float64 5 7"}, "x is float32, gate_up is float32, down is float64", "one dtype for all"),
    ("gated_mlp", {"x": "int8 2 3", "gate_up": "int8 14 3", "down": "int8 5 7"}, "x is int8", FLOATS),
    ("gated_mlp", {"x": "float32 3"}, "x has shape [3]", "at least 2 dimensions"),
    ("gated_mlp", {"gate_up": "float32 1 14 3"}, "gate_up has shape [1, 14, 3]", "2 dimensions"),
    ("gated_mlp", {"down": "float32 5"}, "down has shape [5]", "2 dimensions"),
    ("gated_mlp", {"x": "float32 2 4"}, "x has shape [2, 4] and gate_up [14, 3]", "equal last extents"),
    ("gated_mlp", {"down": "float32 5 14"}, "gate_up has shape [14, 3] and down [5, 14]", "twice down's last extent"),
    ("gated_mlp", {"activation": ""}, "activation is ''", "relu or gelu or gelu_tanh or silu"),
    ("add", {"x": "float32 2 1 3"}, "x is float32, other is int32", "one dtype for all"),
    ("add", {"x": "int32 4"}, "leading dimensions [1, 4] and [5, 3]", "equal extents, or 1"),
    ("mul", {"x": "bool 3", "other": "bool"}, "x is bool", NUMBERS),
    ("mul", {"x": "float8_e5m2 3", "other": "float8_e5m2"}, "x is float8_e5m2", NUMBERS),
    ("clamp", {"min": None}, "min and max are None", "one of them, or both"),
    ("clamp", {"min": -1}, "min is -1", "a finite float, or None"),
    ("clamp", {"max": float("nan")}, "max is nan", "a finite float, or None"),
    ("clamp", {"x": "int8 3", "min": 200}, "min is 200", "an integer from -128 to 127"),
    ("clamp", {"x": "uint8 3", "min": 1.0}, "min is 1.0", "an integer from 0 to 255"),
    ("where", {"condition": "int8 3"}, "condition is int8", "bool"),
    ("where", {"other": "int16 3"}, "x is int8, other is int16", "one dtype for all"),
    ("where", {"condition": "bool 4"}, "leading dimensions [1, 4] and [2, 3]", "equal extents, or 1"),
    ("cat", {"t1": "float16 2 5"}, "t0 is float32, t1 is float16", "one dtype for all"),
    ("cat", {"t1": "float32 3 5"}, "t1 has shape [3, 5] and t0 [2, 3]", "equal but for 1"),
    ("cat", {"t1": "float32 5"}, "t1 has shape [5] and t0 [2, 3]", "equal but for 1"),
    ("cat", {"dim": 2}, "dim is 2", "an integer from 0 to 1"),
    ("cat", {"t0": "float32", "t1": "float32"}, "t0 has shape []", "at least 1 dimensions"),
    ("cat", {"t1": None, "t2": "float32 2 5"}, "a tensor is left out before another", "those that are given, first"),
    ("cast", {"x": "float8_e5m2 3"}, "x is float8_e5m2", f"bool, {NUMBERS}"),
    ("cast", {"dtype": "float8_e5m2"}, "dtype is 'float8_e5m2'", " or ".join(CAST_DTYPES)),
    ("linear", {"activation": "tanh"}, "activation is 'tanh'", "relu or gelu or gelu_tanh or silu"),
    ("linear", {"activation": 1}, "activation is 1", "relu or gelu or gelu_tanh or silu"),
    ("linear", {"x": "int8 2 3", "weight": "int8 5 3", "bias": None}, "x is int8", FLOATS),
    ("softmax", {"x": "int32 2 3"}, "x is int32", FLOATS),
    ("softmax", {"x": "float32", "dim": 0}, "x has shape []", "at least 1 dimensions"),
    ("softmax", {"dim": 2}, "dim is 2", "an integer from 0 to 1"),
    ("softmax", {"dim": -1}, "dim is -1", "an integer from 0 to 1"),
    ("softmax", {"dim": True}, "dim is True", "an integer from 0 to 1"),
    ("softmax", {"dtype": "int8"}, "dtype is 'int8'", "bfloat16 or float16 or float32 or float64"),
    (
        "layer_norm",
        {"bias": "float16 3 5"},
        "x is float32, weight is float32, bias is float16",
        "one dtype for all",
    ),
    ("layer_norm", {"x": "int8 2 3 5", "weight": None, "bias": None}, "x is int8", FLOATS),
    ("layer_norm", {"x": "float32", "weight": None, "bias": None}, "x has shape []", "at least 1 dimensions"),
    ("layer_norm", {"ndim": 0}, "ndim is 0", "an integer from 1 to 3"),
    ("layer_norm", {"ndim": 4}, "ndim is 4", "an integer from 1 to 3"),
    ("layer_norm", {"weight": "float32 5"}, "weight has shape [5]", "[3, 5], what is normalized over"),
    ("layer_norm", {"bias": "float32 2 3"}, "bias has shape [2, 3]", "[3, 5], what is normalized over"),
    ("layer_norm", {"eps": -1e-9}, "eps is -1e-09", "a finite float from 0.0 on"),
    ("rms_norm", {"weight": "float32 3"}, "weight has shape [3]", "[5], what is normalized over"),
    ("rms_norm", {"eps": 0}, "eps is 0", "a finite float from 0.0 on"),
    (
        "rms_norm_backward",
        {"grad_out": "float32 3 5"},
        "grad_out has shape (3, 5), x has shape (2, 3, 5)",
        "equal ones",
    ),
    (
        "rms_norm_backward",
        {"grad_out": "float16 2 3 5"},
        "grad_out is float16, x is float32, weight is float32",
        "one dtype for all",
    ),
    ("rms_norm_backward", {"weight": "float32 3"}, "weight has shape [3]", "[5], what is normalized over"),
    ("rms_norm_backward", {"ndim": 0}, "ndim is 0", "an integer from 1 to 3"),
    ("layer_norm_backward", {"eps": -1.0}, "eps is -1.0", "a finite float from 0.0 on"),
    ("gelu", {"approximate": "erf"}, "approximate is 'erf'", "none or tanh"),
    ("gelu", {"x": "bool 3"}, "x is bool", FLOATS),
    ("silu", {"x": "int64 3"}, "x is int64", FLOATS),
    ("swiglu", {"up": "float16 2 3"}, "gate is float32, up is float16", "one dtype for all"),
    ("swiglu", {"gate": "int8 2", "up": "int8 2"}, "gate is int8", FLOATS),
    ("swiglu", {"up": "float32 1 3"}, "gate has shape (2, 3), up has shape (1, 3)", "equal ones"),
    ("quantize", {"x": "float64 4 6"}, "x is float64", "float32, bfloat16, float16"),
    ("quantize", {"x": "float32"}, "x has shape []", "at least 1 dimensions"),
    ("quantize", {"scale": "float16 4 3"}, "scale is float16", "float32"),
    ("quantize", {"scale": "float32 3"}, "scale has shape [3]", "2 dimensions"),
    (
        "quantize",
        {"scale": "float32 2 3"},
        "scale has shape [2, 3]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"scale": "float32 4 4"},
        "scale has shape [4, 4]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"scale": "float32 4 0"},
        "scale has shape [4, 0]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    (
        "quantize",
        {"x": "float32 4 2 6", "scale": "float32 1 1 4"},
        "scale has shape [1, 1, 4]",
        "1 or [4, 2, 6], and last a divisor of 6",
    ),
    ("quantize", {"dtype": "uint8"}, "dtype is 'uint8'", QUANTIZED),
    ("dequantize", {"x": "uint8 4 6"}, "x is uint8", "float8_e4m3fn, float8_e5m2, int8, float4_e2m1fn_x2"),
    ("dequantize", {"x": "int8"}, "x has shape []", "at least 1 dimensions"),
    ("dequantize", {"scale": "int8 4 3"}, "scale is int8", "float32"),
    (
        "dequantize",
        {"x": "float4_e2m1fn_x2 4 3", "scale": "float32 4 4"},
        "scale has shape [4, 4]",
        "1 or [4, 6], and last a divisor of 6",
    ),
    ("dequantize", {"dtype": "float64"}, "dtype is 'float64'", "float32 or bfloat16 or float16"),
    ("embedding", {"ids": "uint32 2 3"}, "ids is uint32", "int32 or int64"),
    ("embedding", {"weight": "float32 7"}, "weight has shape [7]", "2 dimensions"),
    (
        "embedding",
        {"ids": "int32" + " 1" * 16},
        f"an output of shape {[1] * 16 + [5]}",
        f"16 dimensions and {MAX_NBYTES} bytes at most",
    ),
    (
        "embedding",
        {"ids": "int32 2", "weight": f"int8 1 {MAX_NBYTES // 2 + 1}"},
        f"an output of shape {[2, MAX_NBYTES // 2 + 1]}",
        f"16 dimensions and {MAX_NBYTES} bytes at most",
    ),
    ("tokenize", {"tokenizer": "int8 0"}, "tokenizer is int8[0]", "uint8[0]: calls say how long it is"),
    ("tokenize", {"text": "uint8 9"}, "text is uint8[9]", "uint8[0]: calls say how long it is"),
    ("tokenize", {"text_splits": "int32 0"}, "text_splits is int32[0]", "int64[0]: calls say how long it is"),
    ("tokenize", {"tokenizer_digest": 7}, "tokenizer_digest is 7", "a text of at most 256 characters"),
    ("tokenize", {"tokenizer_format": None}, "tokenizer_format is None", "a text of at most 256 characters"),
    (
        "tokenize",
        {"tokenizer_digest": "x" * 257},
        f"tokenizer_digest is '{'x' * 79}",
        "a text of at most 256 characters",
    ),
    ("tokenize", {"add_special_tokens": "no"}, "add_special_tokens is 'no'", "True or False"),
    ("tokenize", {"return_offsets": 1}, "return_offsets is 1", "True or False"),
    ("tokenize", {"max_length": -1}, "max_length is -1", f"an integer from 0 to {MAX_NBYTES}"),
    (
        "tokenize",
        {"max_length": MAX_NBYTES + 1},
        f"max_length is {MAX_NBYTES + 1}",
        f"an integer from 0 to {MAX_NBYTES}",
    ),
    ("detokenize", {"ids": "int64 0"}, "ids is int64[0]", "int32[0]: calls say how long it is"),
    ("detokenize", {"splits": "int64 1"}, "splits is int64[1]", "int64[0]: calls say how long it is"),
    (
        "detokenize",
        {"tokenizer_format": "x" * 300},
        f"tokenizer_format is '{'x' * 79}",
        "a text of at most 256 characters",
    ),
    ("detokenize", {"skip_special_tokens": 2.0}, "skip_special_tokens is 2.0", "True or False"),
]


@pytest.mark.parametrize(("op", "change", "found", "allowed"), REFUSED)
def test_what_breaks_a_rule_is_refused_with_what_is_there_and_what_is_allowed(
    op: str, change: Change, found: str, allowed: str
) -> None:
    assert refusal(op, change) == f"{op}: {found}; allowed: {allowed}"
