"""The op vocabulary: tensor arguments and attributes of each op in canonical form, as they cross the wire.

The client turns a public call into this form (client/planning/plans.py); providers and capability rules see only this.
docs/ops.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from layerzero.ipc.vocabulary.attention_ops import ATTENTION_FAMILY, OPTIONS
from layerzero.ipc.vocabulary.attention_ops import MERGE_INPUTS as MERGE_INPUTS
from layerzero.ipc.vocabulary.expert_ops import EXPERT_OPS
from layerzero.ipc.vocabulary.op import Op as Op
from layerzero.ipc.vocabulary.tensors import TensorSpec

FUNCTION = "function"
FUNCTION_INPUTS = ("frame", *(f"m{n}" for n in range(8)))
FUNCTION_ON_GPU = "function_on_gpu"
GPU_ARRAYS = tuple(f"a{n}" for n in range(7))

# Activations, element by element, and those of a gate that multiply another tensor.
ACTIVATIONS = ("relu", "sigmoid", "tanh", "quick_gelu", "hardswish", "mish")
GATED = ("geglu", "reglu")
# What linear may apply to its result: "gelu" is that of erf.
LINEAR_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")

# What cast converts to and from; all but bool are numbers.
CAST_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)
CAT_INPUTS = tuple(f"t{n}" for n in range(8))

# What dynamic_quantize makes; the last two are packed fp4 with scales of their formats.
QUANTIZED_FORMATS = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "mxfp4", "nvfp4")
# Elements that share a scale in formats that say so.
BLOCKS = {"mxfp4": 32, "nvfp4": 16}

# What changes logits before a token is drawn, in the order in which it is applied.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FILTERS = ("temperature", "top_k", "top_p", "min_p")
_FILTERS_OF_FLOATS = frozenset(FILTERS) - {"top_k"}

# Ops that draw random numbers of a seed and an offset of the caller's.
DRAWING = frozenset({"sample", "speculative_verify"})

# Of a tokenizer: SHA-256 of its file and of its parts, and what each rule about files reads (capabilities/match.py).
TOKENIZER_ATTRS = (
    "tokenizer_digest",
    "tokenizer_format",
    "tokenizer_id",
    "vocab_hash",
    "merges_hash",
    "added_tokens_hash",
    "normalizer_id",
)

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *ATTENTION_FAMILY,
        # x (B,S,H,D), cos and sin (1|B,S,R/2) -> (B,S,H,D); of each head the first R elements are rotated. Pairs are
        # elements i and i + R/2, or 2i and 2i + 1 when interleaved.
        Op("rope", ("x", "cos", "sin"), attrs=("interleaved",)),
        # rope of q (B,S,Hq,D) and of k (B,S,Hk,D), by the same tables
        Op("rope_qk", ("q", "k", "cos", "sin"), ("q_out", "k_out"), attrs=("interleaved",)),
        # a (...,M,K), b (...,K,N) -> (...,M,N); at least 2-D each, leading dimensions broadcast.
        Op("matmul", ("a", "b")),
        # x (1|M,1|N), a (M,K), b (K,N) -> (M,N): beta x + alpha a b, floats; with a beta of 0 nothing of x counts
        Op("addmm", ("x", "a", "b"), attrs=("beta", "alpha")),
        # x (...,K), weight (N,K), bias (N) -> (...,N), through the activation; "" for none
        Op("linear", ("x", "weight", "bias"), optional=frozenset({"bias"}), attrs=("activation",)),
        # x (...,K), gate_up (2 I,K), down (N,I) -> (...,N): the rows of gate_up are I gates, then I others; floats.
        # activation: one of LINEAR_ACTIVATIONS
        Op("gated_mlp", ("x", "gate_up", "down"), attrs=("activation",)),
        *EXPERT_OPS,
        # x (N,C,...) of 1 to 3 more dimensions, weight (M,C/groups,...), bias (M) -> (N,M,...), through the activation,
        # as linear has it. stride, padding, dilation: numbers for each dimension, as ipc/vocabulary/windows.py has them
        Op(
            "conv",
            ("x", "weight", "bias"),
            optional=frozenset({"bias"}),
            attrs=("stride", "padding", "dilation", "groups", "activation"),
        ),
        # x (N,C,...), weight (C,M/groups,...): what conv's gradient by its x is of such a weight (C,M/groups,...);
        # output_padding: more elements at the end of each dimension, which fewer windows reach
        Op(
            "conv_transpose",
            ("x", "weight", "bias"),
            optional=frozenset({"bias"}),
            attrs=("stride", "padding", "output_padding", "dilation", "groups", "activation"),
        ),
        # x (N,C,...) of 1 to 3 more dimensions -> (N,C,...): the largest element of each window, or their mean. Numbers
        # as conv has them; what is padded counts for nothing in max_pool. ceil_mode: a last window may reach beyond the
        # padding. The mean is of all elements of a window within the padding with count_include_pad, else of those of
        # x; or the sum by `divisor`, where that is not 0.
        Op("max_pool", ("x",), attrs=("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
        Op(
            "avg_pool",
            ("x",),
            attrs=("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor"),
        ),
        # of windows that are found by the extents that come out: element o is of floor(o n / m) to ceil((o + 1) n / m)
        Op("adaptive_max_pool", ("x",), attrs=("output_size",)),
        Op("adaptive_avg_pool", ("x",), attrs=("output_size",)),
        # x (N,C,...) of 1 to 3 more dimensions -> (N,C,*size), as ipc/vocabulary/resampling.py says. size: numbers as
        # conv's; scale: factors that coordinates are computed with, as a text, "" for those of the extents. Of mode
        # "cubic", and with antialias, 2 dimensions; align_corners of "linear" and "cubic"
        Op("interpolate", ("x",), attrs=("size", "scale", "mode", "align_corners", "antialias")),
        # dim >= 0; dtype: what x is converted to before, and the result's; "" for x's own
        Op("softmax", ("x",), attrs=("dim", "dtype")),
        Op("log_softmax", ("x",), attrs=("dim", "dtype")),
        # x (N,C,...), target int32|int64 (N,...), weight (C) -> (N,...), or () where `reduction` is "sum", or "mean":
        # that by the sum of the weights that count. An index that is ignore_index does not count; another one outside
        # [0, C) is InvalidArgument.
        Op(
            "cross_entropy",
            ("x", "target", "weight"),
            optional=frozenset({"weight"}),
            indices=frozenset({"target"}),
            attrs=("ignore_index", "reduction", "label_smoothing"),
        ),
        # normalized over the last `ndim` dimensions; weight and bias have their shape
        Op("layer_norm", ("x", "weight", "bias"), optional=frozenset({"weight", "bias"}), attrs=("ndim", "eps")),
        Op("rms_norm", ("x", "weight"), optional=frozenset({"weight"}), attrs=("ndim", "eps")),
        # residual like x; summed = x + residual, out = rms_norm of it, before or after it is rounded to the dtype
        Op(
            "add_rms_norm",
            ("x", "residual", "weight"),
            ("out", "summed"),
            optional=frozenset({"weight"}),
            attrs=("ndim", "eps"),
        ),
        # x (N,C,...), C a multiple of num_groups: normalized over the channels of a group and all that follows them, of
        # each n by itself. weight and bias (C). activation: one of LINEAR_ACTIVATIONS, of the result.
        Op(
            "group_norm",
            ("x", "weight", "bias"),
            optional=frozenset({"weight", "bias"}),
            attrs=("num_groups", "eps", "activation"),
            options=frozenset({"activation"}),
        ),
        # group_norm with a group for each channel; x has at least 3 dimensions
        Op("instance_norm", ("x", "weight", "bias"), optional=frozenset({"weight", "bias"}), attrs=("eps",)),
        # x (N,C,...), all else (C): normalized by a mean and a variance of each channel that are known
        Op(
            "batch_norm",
            ("x", "running_mean", "running_var", "weight", "bias"),
            optional=frozenset({"weight", "bias"}),
            attrs=("eps",),
        ),
        # grad_out like x, weight as in the norm -> the gradients by x, in its shape, and by weight and bias, in that
        # which is normalized over. Without a weight grad_weight is that of a weight of ones.
        Op(
            "layer_norm_backward",
            ("grad_out", "x", "weight"),
            ("grad_x", "grad_weight", "grad_bias"),
            optional=frozenset({"weight"}),
            attrs=("ndim", "eps"),
        ),
        Op(
            "rms_norm_backward",
            ("grad_out", "x", "weight"),
            ("grad_x", "grad_weight"),
            optional=frozenset({"weight"}),
            attrs=("ndim", "eps"),
        ),
        # approximate: "none" (erf) or "tanh"
        Op("gelu", ("x",), attrs=("approximate",)),
        Op("silu", ("x",)),
        # equal shapes
        Op("swiglu", ("gate", "up")),
        # gelu(gate) * up, approximate as in gelu
        Op("geglu", ("gate", "up"), attrs=("approximate",)),
        # relu(gate) * up
        Op("reglu", ("gate", "up")),
        *(Op(name, ("x",)) for name in ACTIVATIONS),
        # shapes that broadcast, one dtype, numbers; integers wrap
        Op("add", ("x", "other")),
        Op("mul", ("x", "other")),
        # min, max: None, or a number: a float for floats, else an integer of the dtype; one of them at least. NaN
        # stays, and where min is above max all are max.
        Op("clamp", ("x",), attrs=("min", "max")),
        # condition bool; x and other of one dtype, any; shapes that broadcast
        Op("where", ("condition", "x", "other"), indices=frozenset({"condition"})),
        # of one dtype, any, and shapes that are equal but for `dim`; those that are given come first
        Op("cat", CAT_INPUTS, optional=frozenset(CAT_INPUTS[1:]), attrs=("dim",)),
        # dtype: one of CAST_DTYPES, as x's is. Floats are rounded to nearest, ties to even; to integers cut
        # towards 0, and what the dtype does not have may become anything. Integers wrap; bool is what is not 0.
        Op("cast", ("x",), attrs=("dtype",)),
        # x (...,K), scale float32 of as many dimensions: extents of 1 or x's, the last G a divisor of K; zero_point
        # int32 like it, of integers -> x's shape in the dtype of the attribute: x / scale in float32, rounded to
        # nearest, ties to even, plus zero_point, and cut to the dtype's finite range; NaN stays, in integers it is 0.
        # Element k of a row is of scale k // (K / G).
        Op(
            "quantize",
            ("x", "scale", "zero_point"),
            optional=frozenset({"zero_point"}),
            indices=frozenset({"zero_point"}),
            singles=frozenset({"scale"}),
            attrs=("dtype",),
        ),
        # x (...,K) of 8-bit numbers or (...,K/2) of packed fp4, scale and zero_point as above -> (...,K):
        # (x - zero_point) * scale in float32, rounded to the dtype of the attribute.
        Op(
            "dequantize",
            ("x", "scale", "zero_point"),
            optional=frozenset({"zero_point"}),
            indices=frozenset({"zero_point"}),
            singles=frozenset({"scale"}),
            attrs=("dtype",),
        ),
        # x (...,K) floats -> quantized numbers as quantize has them, those of mxfp4 and nvfp4 packed; their scales,
        # float32 (...,groups), or one for groups 0, which is a scale for all of x; and zero points, int32 like the
        # scales, 0 where `symmetric`. docs/ops.md has the formulas.
        Op(
            "dynamic_quantize",
            ("x",),
            ("out", "scale", "zero_point"),
            attrs=("format", "groups", "symmetric"),
        ),
        # a (...,M,K), b (...,K,N), each int8|uint8; zero points int32 (1|M,1) and (1,1|N) -> int32 (...,M,N):
        # (a - a_zero_point) (b - b_zero_point); leading dimensions broadcast, integers wrap.
        Op(
            "int_matmul",
            ("a", "b", "a_zero_point", "b_zero_point"),
            optional=frozenset({"a_zero_point", "b_zero_point"}),
            indices=frozenset({"a_zero_point", "b_zero_point"}),
        ),
        # x (...,K), weight (N,K), each int8|uint8, 8-bit floats, or packed fp4 (two in a byte); or x a float and weight
        # any of them. x_scale as of dequantize, weight_scale (R,G), R a divisor of N and G of K, all float32; zero
        # points int32 in the shapes of the scales, of integers; bias float32 (N) -> (...,N) in the dtype of the
        # attribute, "" for that of x in floats: the product of what both dequantize to, and bias. weight_format "int4":
        # weight is uint8 (N,K/2), numbers from 0 to 15, the first in the low bits, with a zero point of 8 where none is
        # given; else "".
        Op(
            "scaled_linear",
            ("x", "weight", "weight_scale", "x_scale", "bias", "x_zero_point", "weight_zero_point"),
            optional=frozenset({"x_scale", "bias", "x_zero_point", "weight_zero_point"}),
            indices=frozenset({"x_zero_point", "weight_zero_point"}),
            singles=frozenset({"weight_scale", "x_scale", "bias"}),
            attrs=("dtype", "weight_format"),
        ),
        # ids int32|int64 (...), weight (V,D) -> (...,D); an id outside [0, V) is InvalidArgument
        Op("embedding", ("ids", "weight"), indices=frozenset({"ids"})),
        # logits (B,V), token_ids int32|int64 (B,L): what has been generated, negative ones are padding; the penalties
        # (1|B) -> logits' shape. An id from V on is InvalidArgument on the CPU and does nothing on a GPU.
        Op(
            "penalize_logits",
            ("logits", "token_ids", *PENALTIES),
            optional=frozenset(PENALTIES),
            indices=frozenset({"token_ids"}),
            singles=frozenset(PENALTIES),
        ),
        # logits (B,V), all else (1|B) -> logits' shape: divided by the temperature, -inf where a token is removed
        Op(
            "filter_logits",
            ("logits", *FILTERS),
            optional=frozenset(FILTERS),
            indices=frozenset({"top_k"}),
            singles=_FILTERS_OF_FLOATS,
        ),
        # as filter_logits, and temperature 0 for the largest logit; seed and offset int64 (1|B) -> a token of each row,
        # int64 (B), drawn by Philox4x32-10. A row without a finite largest logit (NaN, infinity, nothing but -inf) is
        # InvalidArgument on the CPU and -1 on a GPU.
        Op(
            "sample",
            ("logits", "seed", "offset", *FILTERS),
            optional=frozenset(FILTERS),
            indices=frozenset({"seed", "offset", "top_k"}),
            singles=_FILTERS_OF_FLOATS,
        ),
        # target_probs (B,N+1,V); draft_ids int32|int64 (B,N), of which a negative one ends its row; draft_probs
        # (B,N,V), None for drafts that nothing was drawn for; seed and offset as in sample -> int64 (B,N+1), the
        # accepted ids, one more token and -1, and int64 (B), how many were accepted.
        Op(
            "speculative_verify",
            ("target_probs", "draft_ids", "draft_probs", "seed", "offset"),
            ("tokens", "accepted"),
            optional=frozenset({"draft_probs"}),
            indices=frozenset({"draft_ids", "seed", "offset"}),
        ),
        # All int32|int64 (B,N), ids of one dtype: node 0 is the last token that is settled; parents[i] < i, or -1 for
        # none; target_ids[i] follows node i -> int64 (B,N): the accepted tokens, the target's next one and -1; (B,N):
        # their nodes, from 0 on, and -1; (B): how many were accepted.
        Op(
            "tree_accept",
            ("draft_ids", "parents", "target_ids"),
            ("tokens", "nodes", "accepted"),
            indices=frozenset({"parents"}),
        ),
        # tokenizer: a tokenizer.json as bytes; text: UTF-8 of all texts, one after the other; text_splits
        # (n+1) int64 byte offsets. Outputs: ids int32, splits (n+1) int64, offsets (len(ids), 2) int32
        # character positions in each text, or shape (0, 2) unless return_offsets. The kernel returns
        # {"sizes": [ids, splits, offsets]} in elements of dimension 0.
        Op(
            "tokenize",
            ("tokenizer", "text", "text_splits"),
            ("ids", "splits", "offsets"),
            attrs=(*TOKENIZER_ATTRS, "add_special_tokens", "max_length", "return_offsets"),
            sized_output=True,
        ),
        # ids int32, splits (n+1) int64 -> text uint8 (UTF-8), text_splits (n+1) int64
        Op(
            "detokenize",
            ("tokenizer", "ids", "splits"),
            ("text", "text_splits"),
            attrs=(*TOKENIZER_ATTRS, "skip_special_tokens"),
            sized_output=True,
        ),
        # does nothing: measures dispatch
        Op("null", (), ()),
        # A call of a user's function in an environment of its own (docs/functions.md). frame and answer: what
        # ipc/functions/frames.py writes; m0 to m7: memory that arrays of the frame lie in. All uint8, as long as the
        # bytes that each call gives. The kernel returns nothing: the answer says how long it is. `of`: what times are
        # kept by, of a function that several environments have; "" for others.
        Op(
            "function",
            FUNCTION_INPUTS,
            ("answer",),
            optional=frozenset(FUNCTION_INPUTS[1:]),
            attrs=("of",),
            sized_output=True,
        ),
        # A call of a function whose arrays are on a GPU, as it is lifted (docs/lifting.md); nobody makes such calls, by
        # no kernel of a descriptor. a0 to a6: those arrays, in the order of the arguments. `call`: what the frame
        # of the call says, in hexadecimal digits. `ranges`: of arrays of integers the values that they are tried with
        # (ipc/lifting/trial.py). `result`: dtype and extents of out. `worker`: which process of the environment
        # computes it.
        Op(
            FUNCTION_ON_GPU,
            GPU_ARRAYS,
            optional=frozenset(GPU_ARRAYS[1:]),
            attrs=("call", "ranges", "result", "worker"),
        ),
    )
}
_OF_FUNCTIONS = frozenset({FUNCTION, FUNCTION_ON_GPU})  # a function has a page and kernels of ours
COUNTED_AS = {FUNCTION_ON_GPU: FUNCTION}
"""By which op calls are counted, where that is another one."""
CALLED_OPS = {name: op for name, op in OPS.items() if name not in COUNTED_AS}
"""Those that clients name and descriptors have kernels for."""
PUBLIC_OPS = {name: op for name, op in OPS.items() if name not in _OF_FUNCTIONS}


# Ops with several results that may be the caller's own arrays; those of others are always new.
TAKE_OUTS = frozenset({"add_rms_norm", "rope_qk"})
# Ops on views (B,H,S,D) with a causal rule and a mask.
ATTENTION_OPS = frozenset({"attention", "attention_forward", "attention_backward"})
# Ops on sequences one after the other that have a causal alignment, and on paged caches.
VARLEN_OPS = frozenset({"attention_varlen", "attention_varlen_forward"})
PAGED_OPS = frozenset({"paged_attention", "paged_attention_forward"})


def aligns(given: Container[str], attrs: Mapping[str, Any]) -> bool:
    """Whether a call of attention depends on which key a query's own place is: by the causal rule, windows, slopes."""
    return bool(attrs["is_causal"]) or any(n in attrs for n in OPTIONS[:2]) or "alibi_slopes" in given


class Heads(NamedTuple):
    """Heads of queries, keys and values, and the extents that limits on head_dim are about, by name."""

    query: int
    key: int
    value: int
    dims: tuple[tuple[str, int], ...]


def heads(op: str, given: Mapping[str, TensorSpec]) -> Heads | None:
    """What the tensors of a call have as heads; None for ops that have none."""
    if op in ("rope", "rope_qk"):
        x = given["x" if op == "rope" else "q"]
        return Heads(x.shape[2], x.shape[2], x.shape[2], (("x", x.shape[3]), ("rotary", 2 * given["cos"].shape[2])))
    if op not in _HEADS:
        return None
    own, shared, *names = _HEADS[op]
    q, k, v = (given[name] for name in names)
    dims = (("query and key", q.shape[-1]), ("value", v.shape[-1]))
    return Heads(q.shape[own], k.shape[shared], v.shape[shared], dims)


# The dimension that counts heads, in queries and in keys and values; the names of these.
_HEADS: dict[str, tuple[int, int, str, str, str]] = {
    **dict.fromkeys(sorted(ATTENTION_OPS | VARLEN_OPS), (1, 1, "q", "k", "v")),
    **dict.fromkeys(sorted(PAGED_OPS), (1, 2, "q", "k_cache", "v_cache")),
}
