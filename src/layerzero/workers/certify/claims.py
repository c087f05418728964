"""Whether a kernel's descriptor claims a call: the rules of capabilities/match.py over the descriptor's plain JSON.

Foreign environments have no pydantic, so the broker's matcher cannot run there; a test holds the two to one verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, FUNCTION, OPS, PAGED_OPS, VARLEN_OPS, aligns, heads
from layerzero.ipc.vocabulary.quantization import quantization
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.certify.values import Shape

Claims = Mapping[str, Any]  # one kernel of a descriptor


def dtypes(op: str, claims: Claims) -> Sequence[str]:
    """The dtypes that the kernel needs a certificate for; "any" for ops that have none."""
    return list(claims.get("dtypes") or ()) or ["any"]


def admits(
    op: str,
    claims: Claims,
    inputs: Sequence[TensorSpec | None],
    outputs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> bool:
    """True when the descriptor refuses nothing about this call."""
    given = {name: spec for name, spec in zip(OPS[op].inputs, inputs, strict=True) if spec is not None}
    if not _admits_arguments(op, claims, given, attrs):
        return False
    if op in ("null", FUNCTION):
        return True
    if OPS[op].sized_output:
        return _admits_tokenizer(claims, attrs)
    scaled = {} if "k_scale" not in given else {name: given[name].dtype for name in ("k_cache", "v_cache")}
    if not set(scaled.values()) <= set(claims.get("supports_kv_cache_dtypes", ())):
        return False
    if not all(_admits_tensor(op, claims, name, spec, scaled.get(name)) for name, spec in given.items()):
        return False
    needs_dense_out = claims.get("requires_contiguous") and not claims.get("copies_outputs")
    if needs_dense_out and not all(spec.is_contiguous for spec in outputs):
        return False
    ndim = next(iter(given.values())).ndim
    if not claims.get("min_ndim", 0) <= ndim <= _limit(claims, "max_ndim"):
        return False
    if not _admits_heads(op, claims, given) or not _admits_quantization(op, claims, given, attrs):
        return False
    if op in VARLEN_OPS:
        return not aligns(given, attrs) or attrs["causal_alignment"] in claims.get("causal_alignments", ())
    if op in PAGED_OPS:
        page = given["k_cache"].shape[1]
        return page % claims.get("page_size_multiple", 1) == 0 and page <= _limit(claims, "max_page_size")
    return op not in ATTENTION_OPS or _admits_attention(claims, given, attrs)


def fit(claims: Claims, shape: Shape) -> Shape:
    """The shape with the fewest dimensions that a kernel takes (ones in front), or the most (the first ones merged)."""
    low, high = claims.get("min_ndim", 0), claims.get("max_ndim")
    if high is not None and 0 < high < len(shape):
        shape = (math.prod(shape[: len(shape) - high + 1]), *shape[len(shape) - high + 1 :])
    return (*(1 for _ in range(low - len(shape))), *shape)


# Field of the kernel, attribute of the call. What a kernel says nothing of may be any.
_TOKENIZER_LIMITS = (
    ("tokenizer_ids", "tokenizer_id"),
    ("vocab_hashes", "vocab_hash"),
    ("merges_hashes", "merges_hash"),
    ("added_tokens_hashes", "added_tokens_hash"),
    ("supports_normalizers", "normalizer_id"),
)


def _admits_tokenizer(claims: Claims, attrs: Mapping[str, Any]) -> bool:
    if attrs["tokenizer_format"] not in claims.get("tokenizer_formats", ()):
        return False
    if attrs.get("return_offsets") and not claims.get("supports_offsets", False):
        return False
    return all(claims.get(field) is None or attrs[name] in claims[field] for field, name in _TOKENIZER_LIMITS)


def _admits_arguments(op: str, claims: Claims, given: Mapping[str, TensorSpec], attrs: Mapping[str, Any]) -> bool:
    required = claims.get("required_args", ())
    allowed = {*claims.get("optional_args", ()), *required, "attn_mask"}
    if not (OPS[op].optional & given.keys()) <= allowed or not given.keys() >= set(required):
        return False
    if not OPS[op].options & attrs.keys() <= set(claims.get("optional_attrs", ())):
        return False
    return all(name not in attrs or attrs[name] in values for name, values in (claims.get("attrs") or {}).items())


def _admits_tensor(op: str, claims: Claims, name: str, spec: TensorSpec, other: str | None) -> bool:
    """`other`: a dtype that is admitted whatever `dtypes` says."""
    allowed = claims.get("index_dtypes" if name in OPS[op].indices else "dtypes") or ()
    if name in OPS[op].singles:
        allowed = ("float32",)
    if spec.dtype not in (*allowed, other) and not (name == "attn_mask" and spec.dtype == "bool"):
        return False
    if spec.numel == 0 and not claims.get("supports_empty"):
        return False
    if claims.get("requires_contiguous"):
        return spec.is_contiguous
    is_last_dense = not spec.ndim or spec.shape[-1] <= 1 or spec.strides[-1] == 1
    return is_last_dense or not claims.get("requires_last_dim_stride1")


def _admits_heads(op: str, claims: Claims, given: Mapping[str, TensorSpec]) -> bool:
    found = heads(op, given)
    if found is None:
        return True
    low, high, step = claims.get("min_head_dim", 1), _limit(claims, "max_head_dim"), claims.get("head_dim_multiple", 1)
    if any(not low <= dim <= high or dim % step for _, dim in found.dims):
        return False
    if claims.get("equal_head_dims") and len({dim for _, dim in found.dims}) > 1:
        return False
    return found.query == found.key or bool(claims.get("supports_gqa"))


def _admits_quantization(op: str, claims: Claims, given: Mapping[str, TensorSpec], attrs: Mapping[str, Any]) -> bool:
    found = quantization(op, given, attrs)
    if found is None:
        return True
    if found.has_zero_point and not claims.get("quantization_zero_point"):
        return False
    is_known = found.dtype in claims.get("supported_quant_dtypes", ())
    return is_known and found.granularity in claims.get("quantization_scale_granularities", ())


def _admits_attention(claims: Claims, given: Mapping[str, TensorSpec], attrs: Mapping[str, Any]) -> bool:
    q, k, mask = given["q"], given["k"], given.get("attn_mask")
    if attrs["layout"] not in claims.get("requires_layouts", ()):
        return False
    if max(q.shape[2], k.shape[2]) > _limit(claims, "max_seq_len"):
        return False
    if mask is not None:
        kind = "bool" if mask.dtype == "bool" else "float"
        if kind not in claims.get("attn_mask_types", ()):
            return False
        if attrs["is_causal"] and not claims.get("supports_causal_mask"):
            return False
    is_aligned = attrs["causal_alignment"] in claims.get("causal_alignments", ())
    return is_aligned or not aligns(given, attrs) or q.shape[2] == k.shape[2]


def _limit(claims: Claims, name: str) -> float:
    limit = claims.get(name)
    return math.inf if limit is None else float(limit)
