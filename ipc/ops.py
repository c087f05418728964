"""The op vocabulary: tensor arguments and attributes of each op in canonical form, as they cross the wire.

The client turns a public call into this form (client/plans.py); providers and capability rules see only this.
docs/ops.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """`inputs` and `outputs` name the tensors in wire order; names in `optional` may be absent (None).

    An op whose output size depends on the data (`sized_output`) returns the sizes it used, and raises
    OutputTooSmall when the buffers are too small.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("out",)
    optional: frozenset[str] = frozenset()
    attrs: tuple[str, ...] = ()
    sized_output: bool = False


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        # q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) -> (B,Hq,Sq,Dv); Hq is a multiple of Hk.
        # attn_mask (1|B, 1|Hq, 1|Sq, 1|Sk): bool (True = attend) or q's dtype (added). scale is a float.
        # `layout` says how the caller's memory is ordered; the views are BHSD either way.
        Op(
            "attention",
            ("q", "k", "v", "attn_mask"),
            optional=frozenset({"attn_mask"}),
            attrs=("is_causal", "scale", "causal_alignment", "layout"),
        ),
        # a (...,M,K), b (...,K,N) -> (...,M,N); at least 2-D each, leading dimensions broadcast.
        Op("matmul", ("a", "b")),
        # x (...,K), weight (N,K), bias (N) -> (...,N)
        Op("linear", ("x", "weight", "bias"), optional=frozenset({"bias"})),
        # dim >= 0
        Op("softmax", ("x",), attrs=("dim",)),
        # normalized over the last `ndim` dimensions; weight and bias have their shape
        Op("layer_norm", ("x", "weight", "bias"), optional=frozenset({"weight", "bias"}), attrs=("ndim", "eps")),
        Op("rms_norm", ("x", "weight"), optional=frozenset({"weight"}), attrs=("ndim", "eps")),
        # approximate: "none" (erf) or "tanh"
        Op("gelu", ("x",), attrs=("approximate",)),
        Op("silu", ("x",)),
        # ids int32|int64 (...), weight (V,D) -> (...,D); an id outside [0, V) is InvalidArgument
        Op("embedding", ("ids", "weight")),
        # tokenizer: a tokenizer.json as bytes; text: UTF-8 of all texts, one after the other; text_splits
        # (n+1) int64 byte offsets. Outputs: ids int32, splits (n+1) int64, offsets (len(ids), 2) int32
        # character positions in each text, or shape (0, 2) unless return_offsets. The kernel returns
        # {"sizes": [ids, splits, offsets]} in elements of dimension 0.
        Op(
            "tokenize",
            ("tokenizer", "text", "text_splits"),
            ("ids", "splits", "offsets"),
            attrs=("tokenizer_digest", "tokenizer_format", "add_special_tokens", "max_length", "return_offsets"),
            sized_output=True,
        ),
        # ids int32, splits (n+1) int64 -> text uint8 (UTF-8), text_splits (n+1) int64
        Op(
            "detokenize",
            ("tokenizer", "ids", "splits"),
            ("text", "text_splits"),
            attrs=("tokenizer_digest", "tokenizer_format", "skip_special_tokens"),
            sized_output=True,
        ),
        # does nothing: measures dispatch
        Op("null", (), ()),
    )
}
