"""Calls of attention, of its caches and of rope, as the client plans them: signatures.py has the other ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.random_tensors import extents, float_dtype, tensor

from layerzero.client.planning import (
    attention_plans,
    cache_plans,
    token_plans,
)
from layerzero.client.planning.plans import Plan
from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES
from layerzero.ipc.vocabulary.tensors import TensorSpec


def _attention(rng: Random) -> Plan:
    args, options = _attention_call(rng)
    return attention_plans.plan_attention(*args, **options)


def _attention_forward(rng: Random) -> Plan:
    args, options = _attention_call(rng)
    return attention_plans.plan_attention_forward(*args, **options)


def _attention_backward(rng: Random) -> Plan:
    (q, k, v, mask), options = _attention_call(rng)
    shape = (*q.shape[:3], v.shape[3])
    grad, output = (tensor(rng, q.dtype, *shape) for _ in range(2))
    b, *middle = shape[:3]
    lse = tensor(rng, "float32", b, *(reversed(middle) if options.get("layout") == "BSHD" else middle))
    return attention_plans.plan_attention_backward(grad, q, k, v, output, lse, mask, **options)


def _attention_call(rng: Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, (batch, groups, queries, keys) = float_dtype(rng), extents(rng, 4, least=1)
    heads, dim, wide = groups * rng.randint(1, 3), rng.choice((1, 4, 8)), rng.choice((1, 4, 8))
    q, k, v = (
        tensor(rng, dtype, batch, h, s, d)
        for h, s, d in ((heads, queries, dim), (groups, keys, dim), (groups, keys, wide))
    )
    mask = None
    if rng.random() < 0.5:
        shape = [rng.choice((1, n)) for n in (batch, heads, queries, keys)]
        mask = tensor(rng, rng.choice(("bool", dtype)), *shape)
    if mask is None and rng.random() < 0.3:
        q, k, v = (spec.permute(0, 2, 1, 3) for spec in (q, k, v))
        return (q, k, v, mask), {"enable_gqa": True, "layout": "BSHD", "is_causal": rng.random() < 0.5}
    is_causal = mask is None and rng.random() < 0.5
    alignment = rng.choice(("top_left", "bottom_right"))
    return (q, k, v, mask), {"enable_gqa": True, "is_causal": is_causal, "causal_alignment": alignment}


def _merge_attention(rng: Random) -> Plan:
    dtype, shape = float_dtype(rng), extents(rng, 4, least=1)
    layout = rng.choice(("BHSD", "BSHD"))
    rows = [shape[0], shape[2], shape[1]] if layout == "BSHD" else shape[:-1]
    parts = rng.randint(2, 4)
    pairs = [(tensor(rng, dtype, *shape), tensor(rng, "float32", *rows)) for _ in range(parts)]
    tensors = [spec for pair in pairs for spec in pair]
    return attention_plans.plan_merge_attention(*tensors, *[None] * (8 - len(tensors)), layout=layout)


def _varlen(rng: Random) -> Plan:
    dtype, (queries, keys, groups, count) = float_dtype(rng), extents(rng, 4, least=1)
    dim, wide = rng.choice((4, 8)), rng.choice((4, 8))
    ends = [TensorSpec.contiguous("int32", (count,)) for _ in range(2)]
    q, k, v = (
        tensor(rng, dtype, n, h, d)
        for n, h, d in ((queries, groups * 2, dim), (keys, groups, dim), (keys, groups, wide))
    )
    return token_plans.plan_attention_varlen(q, k, v, *ends, is_causal=rng.random() < 0.5)


def _paged(rng: Random) -> Plan:
    dtype, (batch, groups, blocks, page) = float_dtype(rng), extents(rng, 4, least=1)
    k_cache, v_cache = (tensor(rng, dtype, blocks, page, groups, d) for d in (4, rng.choice((4, 8))))
    tables = TensorSpec.contiguous("int32", (batch, rng.randint(1, 3)))
    lengths = TensorSpec.contiguous("int32", (batch,))
    return token_plans.plan_paged_attention(tensor(rng, dtype, batch, groups * 2, 4), k_cache, v_cache, tables, lengths)


def _varlen_forward(rng: Random) -> Plan:
    plain = _varlen(rng)
    q, sequences = plain.inputs[0], plain.inputs[3].shape[0] - 1  # type: ignore[union-attr]
    options = {"window_size": rng.choice(((-1, -1), (1, 0), (0, 2))), "softcap": rng.choice((0.0, 2.0))}
    return cache_plans.plan_attention_varlen_forward(
        *plain.inputs,  # type: ignore[arg-type]
        *_beside(rng, q, sequences),
        is_causal=rng.random() < 0.5,
        **options,
    )


def _paged_forward(rng: Random) -> Plan:
    q, *cached = _paged(rng).inputs[:5]
    sequences, layout = cached[3].shape[0], rng.choice(("NHD", "HND"))  # type: ignore[union-attr]
    assert q is not None
    ends = None
    if rng.random() < 0.5:
        ends, q = TensorSpec.contiguous("int32", (sequences + 1,)), tensor(rng, q.dtype, 5, *q.shape[1:])
    if layout == "HND":
        cached[:2] = [cache.permute(0, 2, 1, 3) for cache in cached[:2] if cache]
    options = {"window_size": rng.choice(((-1, -1), (1, 0), (0, 2))), "softcap": rng.choice((0.0, 2.0))}
    return cache_plans.plan_paged_attention_forward(
        q, *cached, ends, *_beside(rng, q, sequences), is_causal=rng.random() < 0.5, kv_layout=layout, **options
    )


def _mla_decode(rng: Random) -> Plan:
    dtype, (batch, heads, blocks, page) = float_dtype(rng), extents(rng, 4, least=1)
    latent, rope = rng.choice((4, 8)), rng.choice((2, 4))
    queries, caches = (
        [tensor(rng, dtype, *shape, wide) for wide in (latent, rope)] for shape in ((batch, heads), (blocks, page))
    )
    where = (TensorSpec.contiguous("int32", shape) for shape in ((batch, rng.randint(1, 3)), (batch,)))
    return cache_plans.plan_mla_decode(*queries, *caches, *where, scale=0.5)


def _moved(rng: Random, op: str) -> Plan:
    _, _, k_cache, v_cache, slots, *scales = _append(rng).inputs
    assert k_cache is not None
    assert v_cache is not None
    assert slots is not None
    if op == "gather_kv":
        return cache_plans.plan_gather_kv(k_cache, v_cache, slots, *scales)
    return cache_plans.plan_copy_kv_blocks(k_cache, v_cache, slots, slots)


def _beside(rng: Random, q: TensorSpec | None, sequences: int) -> list[TensorSpec | None]:
    assert q is not None
    sinks = TensorSpec.contiguous(q.dtype, q.shape[1:2]) if rng.random() < 0.5 else None
    slopes = TensorSpec.contiguous("float32", (rng.choice((1, sequences)), q.shape[1])) if rng.random() < 0.5 else None
    return [sinks, slopes]


def _append(rng: Random) -> Plan:
    dtype, (tokens, groups, blocks, page) = float_dtype(rng), extents(rng, 4, least=1)
    dims = 4, rng.choice((4, 8))
    rows = [tensor(rng, dtype, tokens, groups, d) for d in dims]
    caches = [tensor(rng, dtype, blocks, page, groups, d) for d in dims]
    slots = TensorSpec.contiguous(rng.choice(("int32", "int64")), (tokens,))
    if dtype != "float64" and rng.random() < 0.3:
        kind = rng.choice(SCALED_CACHES)
        caches = [tensor(rng, kind, blocks, page, groups, d) for d in dims]
        return token_plans.plan_append_kv(*rows, *caches, slots, *_scales(rng, groups))
    return token_plans.plan_append_kv(*rows, *caches, slots)


def _scales(rng: Random, heads: int) -> list[TensorSpec]:
    return [TensorSpec.contiguous("float32", (rng.choice((1, heads)),)) for _ in "kv"]


def _rope(rng: Random) -> Plan:
    dtype, (batch, length, heads, half) = float_dtype(rng), extents(rng, 4, least=1)
    tables = [tensor(rng, dtype, rng.choice((1, batch)) if n < 0 else 1, length, half) for n in range(2)]
    x = tensor(rng, dtype, batch, length, heads, 2 * half + rng.choice((0, 2)))
    return token_plans.plan_rope(x, *tables, interleaved=rng.random() < 0.5)


def _rope_qk(rng: Random) -> Plan:
    q, cos, sin = _rope(rng).inputs
    assert q is not None
    assert cos is not None
    assert sin is not None
    k = tensor(rng, q.dtype, q.shape[0], q.shape[1], rng.randint(1, 2), q.shape[3])
    return token_plans.plan_rope_qk(q, k, cos, sin, interleaved=rng.random() < 0.5)


MAKERS: dict[str, Callable[[Random], Plan]] = {
    "attention": _attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "merge_attention": _merge_attention,
    "attention_varlen": _varlen,
    "attention_varlen_forward": _varlen_forward,
    "paged_attention": _paged,
    "paged_attention_forward": _paged_forward,
    "mla_decode": _mla_decode,
    "append_kv": _append,
    **{op: partial(_moved, op=op) for op in ("gather_kv", "copy_kv_blocks")},
    "rope": _rope,
    "rope_qk": _rope_qk,
}
