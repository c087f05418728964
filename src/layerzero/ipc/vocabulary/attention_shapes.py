"""Shape functions of attention and of caches of keys and values: shapes.py's, of this family."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.ipc.vocabulary.attention_ops import MASK_BLOCKS
from layerzero.ipc.vocabulary.quantized_shapes import SCALED_DTYPES
from layerzero.ipc.vocabulary.shape_checks import (
    INDEX_DTYPES,
    Attrs,
    Inputs,
    Output,
    choice,
    equal,
    flag,
    float_dtype,
    grouped_heads,
    indices,
    integer,
    least_ndim,
    number,
    of_ndim,
    refuse,
    required,
    same_dtype,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec

LAYOUTS = ("BHSD", "BSHD")
KV_LAYOUTS = ("NHD", "HND")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
SCALED_CACHES = ("int8", "float8_e4m3fn", "float8_e5m2")  # numbers that scales of caches are for
MAX_WINDOW = (1 << 31) - 1  # as far as the integers of libraries reach


def _attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    outputs = _plain_attention(op, inputs[:4], attrs)
    (q,) = required(inputs, 1)
    _of_heads(op, q, inputs[4:], q.shape[0])
    return outputs


def _of_heads(op: str, q: TensorSpec, inputs: Inputs, sequences: int) -> None:
    """Sinks and slopes; heads are the second dimension of q."""
    (sinks, slopes), heads = inputs, q.shape[1:2]
    if sinks is not None and (sinks.dtype, sinks.shape) != (q.dtype, heads):
        refuse(op, f"sinks is {sinks}", f"{q.dtype}{list(heads)}, one for each head of q")
    if slopes is not None and (slopes.dtype != "float32" or slopes.shape not in ((1, *heads), (sequences, *heads))):
        refuse(op, f"alibi_slopes is {slopes}", f"float32, (1 or {sequences}, {q.shape[1]}), one for each head of q")


def _options(op: str, attrs: Attrs) -> None:
    for name in ("window_left", "window_right"):
        if name in attrs:
            integer(op, attrs, name, 0, MAX_WINDOW)
    if "softcap" in attrs:
        number(op, attrs, "softcap")
        if attrs["softcap"] <= 0.0:
            refuse(op, f"softcap is {attrs['softcap']}", "above 0, or left out")


def _plain_attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k, v = required(inputs, 3)
    mask = inputs[3]
    dtype = float_dtype(op, (q, k, v), ("q", "k", "v"))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        of_ndim(op, name, spec, 4)
    equal(op, "batch", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    equal(op, "heads", k=k.shape[1], v=v.shape[1])
    equal(op, "sequence length", k=k.shape[2], v=v.shape[2])
    equal(op, "head_dim", q=q.shape[3], k=k.shape[3])
    grouped_heads(op, q.shape[1], k.shape[1])
    flag(op, attrs, "is_causal")
    if any(name in attrs for name in MASK_BLOCKS):
        for name in MASK_BLOCKS:
            integer(op, {name: None, **attrs}, name, 1, MAX_WINDOW)
    if mask is not None:
        if mask.dtype not in ("bool", dtype):
            refuse(op, f"attn_mask is {mask.dtype}", f"bool, or {dtype} like q")
        target = masked_shape(q, k, attrs)
        if len(mask.shape) != 4 or any(n not in (1, m) for n, m in zip(mask.shape, target, strict=True)):
            refuse(op, f"attn_mask has shape {list(mask.shape)}", f"4 dimensions that broadcast to {list(target)}")
    number(op, attrs, "scale")
    choice(op, attrs, "causal_alignment", CAUSAL_ALIGNMENTS)
    choice(op, attrs, "layout", LAYOUTS)
    _options(op, attrs)
    if any(name in attrs for name in MASK_BLOCKS) and (mask is None or mask.dtype != "bool"):
        refuse(op, f"attn_mask is {mask} with blocks", "a bool mask")
    return ((dtype, (*q.shape[:3], v.shape[3])),)


def masked_shape(q: TensorSpec, k: TensorSpec, attrs: Attrs) -> tuple[int, ...]:
    """What a mask of attention broadcasts to."""
    rows, keys = (int(attrs.get(name, 1)) for name in MASK_BLOCKS)
    return (*q.shape[:2], -(-q.shape[2] // rows), -(-k.shape[2] // keys))


def _attention_forward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (out,) = _attention(op, inputs, attrs)
    return out, ("float32", out[1][:3])


def _attention_backward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    grad_out, q, k, v, output, lse = required(inputs, 6)
    out, rows = _attention_forward(op, (q, k, v, inputs[6], None, None), attrs)
    for name, spec, (dtype, shape) in (("grad_out", grad_out, out), ("output", output, out), ("lse", lse, rows)):
        if (spec.dtype, spec.shape) != (dtype, shape):
            refuse(op, f"{name} is {spec}", f"{dtype}{list(shape)}, as q, k and v say")
    return tuple((out[0], spec.shape) for spec in (q, k, v))


def _merge_attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    required(inputs, 4)
    given = [spec for spec in inputs if spec is not None]
    if len(given) % 2 or None in inputs[: len(given)]:
        refuse(op, "a tensor is left out before another", "parts that are given, first, each with its lse")
    outs, rows = given[::2], given[1::2]
    first = outs[0]
    dtype = float_dtype(op, outs, [f"out{n}" for n in range(len(outs))])
    least_ndim(op, "out0", first, 2)
    for n, (out, lse) in enumerate(zip(outs, rows, strict=True)):
        equal(op, "shape", **{"out0": first.shape, f"out{n}": out.shape})
        if (lse.dtype, lse.shape) != ("float32", first.shape[:-1]):
            refuse(op, f"lse{n} is {lse}", f"float32{list(first.shape[:-1])}, one for each row of out{n}")
    return ((dtype, first.shape), ("float32", first.shape[:-1]))


def _attention_varlen(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k, v, ends_q, ends_k = required(inputs, 5)
    dtype = float_dtype(op, (q, k, v), ("q", "k", "v"))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        of_ndim(op, name, spec, 3)
    indices(op, "cu_seqlens_q", ends_q, 1)
    indices(op, "cu_seqlens_k", ends_k, 1)
    equal(op, "entries", cu_seqlens_q=ends_q.shape[0], cu_seqlens_k=ends_k.shape[0])
    if not ends_q.shape[0]:
        refuse(op, "cu_seqlens_q is empty", "one more entry than there are sequences")
    equal(op, "tokens", k=k.shape[0], v=v.shape[0])
    equal(op, "heads", k=k.shape[1], v=v.shape[1])
    equal(op, "head_dim", q=q.shape[2], k=k.shape[2])
    grouped_heads(op, q.shape[1], k.shape[1])
    flag(op, attrs, "is_causal")
    number(op, attrs, "scale")
    choice(op, attrs, "causal_alignment", CAUSAL_ALIGNMENTS)
    return ((dtype, (*q.shape[:2], v.shape[2])),)


def _attention_varlen_forward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (out,) = _attention_varlen(op, inputs[:5], attrs)
    q, *_, ends_k = required(inputs, 5)
    _of_heads(op, q, inputs[5:], ends_k.shape[0] - 1)
    _options(op, attrs)
    return out, ("float32", q.shape[:2])


def _paged_attention(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, _, _, tables, lengths = required(inputs, 5)
    of_ndim(op, "q", q, 3)
    equal(op, "rows", q=q.shape[0], block_tables=(tables.shape or (0,))[0], seq_lens=(lengths.shape or (0,))[0])
    return _to_pages(op, inputs, attrs)


def _paged_attention_forward(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, *_, lengths = required(inputs, 5)
    ends = inputs[5]
    of_ndim(op, "q", q, 3)
    (out,) = _to_pages(op, (*inputs[:5], *inputs[8:]), attrs)
    sequences = lengths.shape[0]
    if ends is None:
        equal(op, "rows", q=q.shape[0], seq_lens=sequences)
    else:
        indices(op, "cu_seqlens_q", ends, 1)
        if ends.shape[0] != sequences + 1:
            refuse(
                op, f"cu_seqlens_q has {ends.shape[0]} entries", f"{sequences + 1}, one more than there are sequences"
            )
    _of_heads(op, q, inputs[6:8], sequences)
    flag(op, attrs, "is_causal")
    _options(op, attrs)
    return out, ("float32", q.shape[:2])


def _to_pages(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q, k_cache, v_cache, tables, lengths = required(inputs, 5)
    _caches(op, k_cache, v_cache)
    if _scales(op, inputs[5:], k_cache, v_cache):
        dtype = _scaled(op, "q", q.dtype)
    else:
        dtype = float_dtype(op, (q, k_cache, v_cache), ("q", "k_cache", "v_cache"))
    indices(op, "block_tables", tables, 2)
    indices(op, "seq_lens", lengths, 1)
    equal(op, "rows", block_tables=tables.shape[0], seq_lens=lengths.shape[0])
    equal(op, "head_dim", q=q.shape[2], k_cache=k_cache.shape[3])
    grouped_heads(op, q.shape[1], k_cache.shape[2])
    number(op, attrs, "scale")
    return ((dtype, (*q.shape[:2], v_cache.shape[3])),)


def _caches(op: str, k_cache: TensorSpec, v_cache: TensorSpec) -> None:
    of_ndim(op, "k_cache", k_cache, 4)
    of_ndim(op, "v_cache", v_cache, 4)
    equal(op, "blocks, their size and heads", k_cache=k_cache.shape[:3], v_cache=v_cache.shape[:3])


def _scales(op: str, scales: Inputs, k_cache: TensorSpec, v_cache: TensorSpec) -> bool:
    """Whether the caches have scales, which are checked then, and their dtype."""
    k_scale, v_scale = scales
    if k_scale is None and v_scale is None:
        return False
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        heads = k_cache.shape[2]
        if scale is None:
            refuse(op, f"{name} is left out", "both scales or neither")
        if scale.dtype != "float32" or scale.shape not in ((1,), (heads,)):
            refuse(op, f"{name} is {scale}", f"float32, (1 or {heads}), one for each head of the caches")
    dtype = same_dtype(op, (k_cache, v_cache), ("k_cache", "v_cache"))
    if dtype not in SCALED_CACHES:
        refuse(op, f"k_cache is {dtype} with scales", ", ".join(SCALED_CACHES))
    return True


def _scaled(op: str, name: str, dtype: str) -> str:
    """The dtype of what goes into quantized caches or comes out of them."""
    if dtype not in SCALED_DTYPES:
        refuse(op, f"{name} is {dtype} with scales", ", ".join(SCALED_DTYPES))
    return dtype


def _mla_decode(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    q_nope, q_pe, ckv, kpe, tables, lengths = required(inputs, 6)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    dtype = float_dtype(op, (q_nope, q_pe, ckv, kpe), names)
    for name, spec in zip(names, (q_nope, q_pe, ckv, kpe), strict=True):
        of_ndim(op, name, spec, 3)
    indices(op, "block_tables", tables, 2)
    indices(op, "seq_lens", lengths, 1)
    equal(op, "rows", q_nope=q_nope.shape[0], block_tables=tables.shape[0], seq_lens=lengths.shape[0])
    equal(op, "rows and heads", q_nope=q_nope.shape[:2], q_pe=q_pe.shape[:2])
    equal(op, "blocks and their size", ckv_cache=ckv.shape[:2], kpe_cache=kpe.shape[:2])
    equal(op, "extent", q_nope=q_nope.shape[2], ckv_cache=ckv.shape[2])
    equal(op, "extent", q_pe=q_pe.shape[2], kpe_cache=kpe.shape[2])
    number(op, attrs, "scale")
    return (dtype, q_nope.shape), ("float32", q_nope.shape[:2])


def _append_kv(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    key, value, k_cache, v_cache, slots = required(inputs, 5)
    of_ndim(op, "key", key, 3)
    of_ndim(op, "value", value, 3)
    _caches(op, k_cache, v_cache)
    if _scales(op, inputs[5:], k_cache, v_cache):
        _scaled(op, "key", same_dtype(op, (key, value), ("key", "value")))
        dtype = k_cache.dtype
    else:
        dtype = same_dtype(op, (key, value, k_cache, v_cache), ("key", "value", "k_cache", "v_cache"))
    indices(op, "slots", slots, 1, INDEX_DTYPES)
    equal(op, "rows", key=key.shape[0], value=value.shape[0], slots=slots.shape[0])
    equal(op, "heads and head_dim", key=key.shape[1:], k_cache=k_cache.shape[2:])
    equal(op, "heads and head_dim", value=value.shape[1:], v_cache=v_cache.shape[2:])
    return ((dtype, k_cache.shape), (dtype, v_cache.shape))


def _gather_kv(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    k_cache, v_cache, slots = required(inputs, 3)
    dtype = same_dtype(op, (k_cache, v_cache), ("k_cache", "v_cache"))
    _caches(op, k_cache, v_cache)
    if _scales(op, inputs[3:], k_cache, v_cache) != ("dtype" in attrs):
        refuse(op, "dtype or scales alone are given", "both or neither")
    if "dtype" in attrs:
        dtype = _scaled(op, "dtype", attrs["dtype"])
    indices(op, "slots", slots, 1, INDEX_DTYPES)
    return (dtype, (*slots.shape, *k_cache.shape[2:])), (dtype, (*slots.shape, *v_cache.shape[2:]))


def _copy_kv_blocks(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    k_cache, v_cache, sources, targets = required(inputs, 4)
    dtype = same_dtype(op, (k_cache, v_cache), ("k_cache", "v_cache"))
    _caches(op, k_cache, v_cache)
    indices(op, "sources", sources, 1, INDEX_DTYPES)
    indices(op, "targets", targets, 1, (sources.dtype,))
    equal(op, "entries", sources=sources.shape[0], targets=targets.shape[0])
    return (dtype, k_cache.shape), (dtype, v_cache.shape)


ATTENTION: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "attention": _attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "merge_attention": _merge_attention,
    "attention_varlen": _attention_varlen,
    "attention_varlen_forward": _attention_varlen_forward,
    "paged_attention": _paged_attention,
    "paged_attention_forward": _paged_attention_forward,
    "mla_decode": _mla_decode,
    "append_kv": _append_kv,
    "gather_kv": _gather_kv,
    "copy_kv_blocks": _copy_kv_blocks,
}
