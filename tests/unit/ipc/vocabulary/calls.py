"""A good call of each op, and calls that differ from it in one thing."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, CAT_INPUTS, MERGE_INPUTS, OPS, TOKENIZER_ATTRS
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import TensorSpec

Change = dict[str, Any]
FLOATS = "bfloat16, float16, float32, float64"

ATTENTION = {"is_causal": False, "scale": 0.5, "causal_alignment": "top_left"}
TOKENIZER = {**dict.fromkeys(TOKENIZER_ATTRS, "h"), "tokenizer_digest": "d", "tokenizer_format": "f"}

UNSCALED = {"k_scale": None, "v_scale": None}
UNASKED = {"attn_mask": None, "sinks": None, "alibi_slopes": None}

# By op: its tensors as "DTYPE EXTENT...", its attributes, its outputs. No two extents are equal that need not be.
CALLS: dict[str, tuple[dict[str, str | None], dict[str, Any], tuple[str, ...]]] = {
    "attention": (
        {"q": "float32 2 6 5 7", "k": "float32 2 3 11 7", "v": "float32 2 3 11 13", **UNASKED},
        {**ATTENTION, "layout": "BHSD"},
        ("float32 2 6 5 13",),
    ),
    "attention_forward": (
        {"q": "float32 2 6 5 7", "k": "float32 2 3 11 7", "v": "float32 2 3 11 13", **UNASKED},
        {**ATTENTION, "layout": "BHSD"},
        ("float32 2 6 5 13", "float32 2 6 5"),
    ),
    "attention_backward": (
        {
            "grad_out": "float16 2 6 5 13",
            "q": "float16 2 6 5 7",
            "k": "float16 2 3 11 7",
            "v": "float16 2 3 11 13",
            "output": "float16 2 6 5 13",
            "lse": "float32 2 6 5",
            "attn_mask": None,
        },
        {**ATTENTION, "layout": "BHSD"},
        ("float16 2 6 5 7", "float16 2 3 11 7", "float16 2 3 11 13"),
    ),
    "merge_attention": (
        {
            **{
                f"{name}{n}": one
                for n in (0, 1)
                for name, one in (("out", "float16 2 6 5 7"), ("lse", "float32 2 6 5"))
            },
            **dict.fromkeys(MERGE_INPUTS[4:]),
        },
        {},
        ("float16 2 6 5 7", "float32 2 6 5"),
    ),
    "attention_varlen": (
        {
            "q": "float32 5 6 7",
            "k": "float32 11 3 7",
            "v": "float32 11 3 13",
            "cu_seqlens_q": "int32 4",
            "cu_seqlens_k": "int32 4",
        },
        ATTENTION,
        ("float32 5 6 13",),
    ),
    "paged_attention": (
        {
            "q": "float32 2 6 7",
            "k_cache": "float32 10 4 3 7",
            "v_cache": "float32 10 4 3 13",
            "block_tables": "int32 2 9",
            "seq_lens": "int32 2",
            **UNSCALED,
        },
        {"scale": 0.5},
        ("float32 2 6 13",),
    ),
    "attention_varlen_forward": (
        {
            "q": "float32 5 6 7",
            "k": "float32 11 3 7",
            "v": "float32 11 3 13",
            "cu_seqlens_q": "int32 4",
            "cu_seqlens_k": "int32 4",
            "sinks": None,
            "alibi_slopes": None,
        },
        ATTENTION,
        ("float32 5 6 13", "float32 5 6"),
    ),
    "paged_attention_forward": (
        {
            "q": "float32 5 6 7",
            "k_cache": "float32 10 4 3 7",
            "v_cache": "float32 10 4 3 13",
            "block_tables": "int32 2 9",
            "seq_lens": "int32 2",
            "cu_seqlens_q": "int32 3",
            "sinks": None,
            "alibi_slopes": None,
            **UNSCALED,
        },
        {"scale": 0.5, "is_causal": True},
        ("float32 5 6 13", "float32 5 6"),
    ),
    "mla_decode": (
        {
            "q_nope": "float32 2 6 13",
            "q_pe": "float32 2 6 7",
            "ckv_cache": "float32 10 4 13",
            "kpe_cache": "float32 10 4 7",
            "block_tables": "int32 2 9",
            "seq_lens": "int32 2",
        },
        {"scale": 0.5},
        ("float32 2 6 13", "float32 2 6"),
    ),
    "append_kv": (
        {
            "key": "int8 5 3 7",
            "value": "int8 5 3 13",
            "k_cache": "int8 10 4 3 7",
            "v_cache": "int8 10 4 3 13",
            "slots": "int64 5",
            **UNSCALED,
        },
        {},
        ("int8 10 4 3 7", "int8 10 4 3 13"),
    ),
    "gather_kv": (
        {"k_cache": "int8 10 4 3 7", "v_cache": "int8 10 4 3 13", "slots": "int64 5", **UNSCALED},
        {},
        ("int8 5 3 7", "int8 5 3 13"),
    ),
    "copy_kv_blocks": (
        {"k_cache": "int8 10 4 3 7", "v_cache": "int8 10 4 3 13", "sources": "int64 5", "targets": "int64 5"},
        {},
        ("int8 10 4 3 7", "int8 10 4 3 13"),
    ),
    "rope": (
        {"x": "float32 2 5 3 9", "cos": "float32 2 5 4", "sin": "float32 2 5 4"},
        {"interleaved": False},
        ("float32 2 5 3 9",),
    ),
    "rope_qk": (
        {"q": "float32 2 5 3 9", "k": "float32 2 5 1 9", "cos": "float32 1 5 4", "sin": "float32 1 5 4"},
        {"interleaved": False},
        ("float32 2 5 3 9", "float32 2 5 1 9"),
    ),
    "matmul": ({"a": "int32 4 1 2 3", "b": "int32 5 3 7"}, {}, ("int32 4 5 2 7",)),
    "addmm": (
        {"x": "float32 1 7", "a": "float32 2 3", "b": "float32 3 7"},
        {"beta": 0.5, "alpha": 2.0},
        ("float32 2 7",),
    ),
    "linear": (
        {"x": "float32 4 6 2 3", "weight": "float32 5 3", "bias": "float32 5"},
        {"activation": "silu"},
        ("float32 4 6 2 5",),
    ),
    "gated_mlp": (
        {"x": "float32 4 2 3", "gate_up": "float32 14 3", "down": "float32 5 7"},
        {"activation": "silu"},
        ("float32 4 2 5",),
    ),
    "grouped_linear": (
        {"x": "float32 4 3", "weight": "float32 6 5 3", "offsets": "int32 6", "bias": "float32 6 5"},
        {},
        ("float32 4 5",),
    ),
    "moe_route": (
        {"logits": "bfloat16 4 12", "correction_bias": "float32 12"},
        {
            **{"top_k": 4, "scoring": "sigmoid", "normalize": True, "num_groups": 6, "top_groups": 2},
            **{"group_score": "top2", "scale": 2.5},
        },
        ("float32 4 4", "int64 4 4"),
    ),
    "moe_permute": (
        {"x": "float32 4 3", "ids": "int64 4 2"},
        {"num_experts": 7},
        ("float32 8 3", "int64 8", "int32 7"),
    ),
    "moe_combine": ({"rows": "float32 8 3", "order": "int32 8", "weights": "float32 4 2"}, {}, ("float32 4 3",)),
    "moe_mlp": (
        {
            **{"x": "float32 4 3", "gate_up": "float32 6 14 3", "down": "float32 6 5 7"},
            **{"ids": "int32 4 2", "weights": "float32 4 2"},
        },
        {"activation": "silu"},
        ("float32 4 5",),
    ),
    "conv": (
        {"x": "float32 2 6 5 7", "weight": "float32 4 3 2 3", "bias": "float32 4"},
        {"stride": "2,1", "padding": "1,0,0,1", "dilation": "1,2", "groups": 2, "activation": "silu"},
        ("float32 2 4 3 4",),
    ),
    "conv_transpose": (
        {"x": "float32 2 6 5 7", "weight": "float32 6 2 2 3", "bias": "float32 4"},
        {
            "stride": "2,1",
            "padding": "1,0,0,1",
            "output_padding": "1,0",
            "dilation": "1,2",
            "groups": 2,
            "activation": "",
        },
        ("float32 2 4 10 10",),
    ),
    "max_pool": (
        {"x": "float32 2 6 5 7"},
        {"kernel_size": "2,3", "stride": "2,1", "padding": "1,0,0,1", "dilation": "1,2", "ceil_mode": True},
        ("float32 2 6 3 4",),
    ),
    "avg_pool": (
        {"x": "float32 2 6 5 7"},
        {
            **{"kernel_size": "2,3", "stride": "2,1", "padding": "1,0,0,1"},
            **{"ceil_mode": True, "count_include_pad": False, "divisor": 0},
        },
        ("float32 2 6 3 6",),
    ),
    "adaptive_max_pool": ({"x": "float32 2 6 5 7"}, {"output_size": "2,9"}, ("float32 2 6 2 9",)),
    "adaptive_avg_pool": ({"x": "float32 2 6 5 7"}, {"output_size": "2,9"}, ("float32 2 6 2 9",)),
    "interpolate": (
        {"x": "float32 2 6 5 7"},
        {"size": "7,10", "scale": "1.5,1.5", "mode": "cubic", "align_corners": True, "antialias": True},
        ("float32 2 6 7 10",),
    ),
    "softmax": ({"x": "float32 2 3"}, {"dim": 1, "dtype": ""}, ("float32 2 3",)),
    "cross_entropy": (
        {"x": "float32 2 5 3", "target": "int64 2 3", "weight": "float32 5"},
        {"ignore_index": -100, "reduction": "none", "label_smoothing": 0.0},
        ("float32 2 3",),
    ),
    "log_softmax": ({"x": "float32 2 3"}, {"dim": 1, "dtype": ""}, ("float32 2 3",)),
    "add_rms_norm": (
        {"x": "float32 2 3 5", "residual": "float32 2 3 5", "weight": "float32 5"},
        {"ndim": 1, "eps": 0.5},
        ("float32 2 3 5", "float32 2 3 5"),
    ),
    "group_norm": (
        {"x": "float32 2 6 5", "weight": "float32 6", "bias": "float32 6"},
        {"num_groups": 3, "eps": 0.5},
        ("float32 2 6 5",),
    ),
    "instance_norm": (
        {"x": "float32 2 6 5", "weight": "float32 6", "bias": "float32 6"},
        {"eps": 0.5},
        ("float32 2 6 5",),
    ),
    "batch_norm": (
        {
            "x": "float32 2 6 5",
            "running_mean": "float32 6",
            "running_var": "float32 6",
            "weight": "float32 6",
            "bias": "float32 6",
        },
        {"eps": 0.5},
        ("float32 2 6 5",),
    ),
    "layer_norm": (
        {"x": "float32 2 3 5", "weight": "float32 3 5", "bias": "float32 3 5"},
        {"ndim": 2, "eps": 0.5},
        ("float32 2 3 5",),
    ),
    "rms_norm": ({"x": "float32 2 3 5", "weight": "float32 5"}, {"ndim": 1, "eps": 0.5}, ("float32 2 3 5",)),
    "layer_norm_backward": (
        {"grad_out": "float32 2 3 5", "x": "float32 2 3 5", "weight": "float32 3 5"},
        {"ndim": 2, "eps": 0.5},
        ("float32 2 3 5", "float32 3 5", "float32 3 5"),
    ),
    "rms_norm_backward": (
        {"grad_out": "float32 2 3 5", "x": "float32 2 3 5", "weight": "float32 5"},
        {"ndim": 1, "eps": 0.5},
        ("float32 2 3 5", "float32 5"),
    ),
    "gelu": ({"x": "float32 2 3"}, {"approximate": "tanh"}, ("float32 2 3",)),
    "silu": ({"x": "float32 2 3"}, {}, ("float32 2 3",)),
    "swiglu": ({"gate": "float32 2 3", "up": "float32 2 3"}, {}, ("float32 2 3",)),
    "geglu": ({"gate": "float32 2 3", "up": "float32 2 3"}, {"approximate": "none"}, ("float32 2 3",)),
    "reglu": ({"gate": "float32 2 3", "up": "float32 2 3"}, {}, ("float32 2 3",)),
    **{op: ({"x": "float32 2 3"}, {}, ("float32 2 3",)) for op in ACTIVATIONS},
    "add": ({"x": "int32 2 1 3", "other": "int32 5 3"}, {}, ("int32 2 5 3",)),
    "mul": ({"x": "float32 2 3", "other": "float32"}, {}, ("float32 2 3",)),
    "clamp": ({"x": "float32 2 3"}, {"min": -1.0, "max": None}, ("float32 2 3",)),
    "where": ({"condition": "bool 2 1", "x": "int8 3", "other": "int8 2 3"}, {}, ("int8 2 3",)),
    "cat": (
        {"t0": "float32 2 3", "t1": "float32 2 5", **dict.fromkeys(CAT_INPUTS[2:])},
        {"dim": 1},
        ("float32 2 8",),
    ),
    "cast": ({"x": "float32 2 3"}, {"dtype": "int8"}, ("int8 2 3",)),
    "quantize": ({"x": "float32 4 6", "scale": "float32 4 3", "zero_point": None}, {"dtype": "int8"}, ("int8 4 6",)),
    "dequantize": (
        {"x": "int8 4 6", "scale": "float32 4 3", "zero_point": "int32 4 3"},
        {"dtype": "float16"},
        ("float16 4 6",),
    ),
    "embedding": ({"ids": "int64 2 3", "weight": "float32 7 5"}, {}, ("float32 2 3 5",)),
    "penalize_logits": (
        {
            "logits": "float32 5 7",
            "token_ids": "int64 5 3",
            "repetition_penalty": "float32 5",
            "presence_penalty": None,
            "frequency_penalty": "float32 1",
        },
        {},
        ("float32 5 7",),
    ),
    "filter_logits": (
        {
            "logits": "float16 5 7",
            "temperature": "float32 1",
            "top_k": "int64 5",
            "top_p": "float32 5",
            "min_p": "float32 5",
        },
        {},
        ("float16 5 7",),
    ),
    "sample": (
        {
            "logits": "float16 5 7",
            "seed": "int64 5",
            "offset": "int64 1",
            "temperature": "float32 1",
            "top_k": None,
            "top_p": "float32 5",
            "min_p": "float32 5",
        },
        {},
        ("int64 5",),
    ),
    "speculative_verify": (
        {
            "target_probs": "float32 5 3 7",
            "draft_ids": "int32 5 2",
            "draft_probs": "float32 5 2 7",
            "seed": "int64 5",
            "offset": "int64 1",
        },
        {},
        ("int64 5 3", "int64 5"),
    ),
    "tree_accept": (
        {"draft_ids": "int32 5 7", "parents": "int64 5 7", "target_ids": "int32 5 7"},
        {},
        ("int64 5 7", "int64 5 7", "int64 5"),
    ),
    "dynamic_quantize": (
        {"x": "bfloat16 3 4"},
        {"format": "int8", "groups": 2, "symmetric": False},
        ("int8 3 4", "float32 3 2", "int32 3 2"),
    ),
    "int_matmul": (
        {"a": "int8 4 1 2 3", "b": "uint8 6 3 5", "a_zero_point": "int32 2 1", "b_zero_point": "int32 1 5"},
        {},
        ("int32 4 6 2 5",),
    ),
    "scaled_linear": (
        {
            **{"x": "int8 3 12", "weight": "uint8 10 12", "weight_scale": "float32 5 3", "x_scale": "float32 3 2"},
            **{"bias": "float32 10", "x_zero_point": "int32 3 2", "weight_zero_point": "int32 5 3"},
        },
        {"dtype": "bfloat16", "weight_format": ""},
        ("bfloat16 3 10",),
    ),
    "tokenize": (
        {"tokenizer": "uint8 0", "text": "uint8 0", "text_splits": "int64 0"},
        {**TOKENIZER, "add_special_tokens": True, "max_length": None, "return_offsets": False},
        ("int32 0", "int64 0", "int32 0 2"),
    ),
    "detokenize": (
        {"tokenizer": "uint8 0", "ids": "int32 0", "splits": "int64 0"},
        {**TOKENIZER, "skip_special_tokens": True},
        ("uint8 0", "int64 0"),
    ),
    "null": ({}, {}, ()),
    "function_on_gpu": (
        {"a0": "float32 5 7", **dict.fromkeys(OPS["function_on_gpu"].inputs[1:])},
        {"call": "00ff", "ranges": "", "result": "bfloat16 2 3", "worker": "0.1"},
        ("bfloat16 2 3",),
    ),
    "function": ({"frame": "uint8 0", "m0": "uint8 0", **dict.fromkeys(OPS["function"].inputs[2:])}, {}, ("uint8 0",)),
}


def spec(text: str) -> TensorSpec:
    dtype, *extents = text.split()
    return TensorSpec.contiguous(dtype, tuple(int(extent) for extent in extents))


def call(op: str, change: Change) -> tuple[list[TensorSpec | None], dict[str, Any]]:
    """The op's good call, with some of its tensors or attributes changed."""
    tensors, attrs, _ = CALLS[op]
    known = {**tensors, **{name: value for name, value in change.items() if name in tensors}}
    given = [None if text is None else spec(text) for text in known.values()]
    return given, {**attrs, **{name: value for name, value in change.items() if name not in tensors}}


def outputs(op: str, change: Change) -> list[str]:
    return [" ".join(map(str, (dtype, *shape))) for dtype, shape in outputs_of(op, *call(op, change))]


def refusal(op: str, change: Change) -> str:
    with pytest.raises(InvalidArgument) as refused:
        outputs_of(op, *call(op, change))
    return refused.value.message
