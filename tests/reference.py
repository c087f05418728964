"""What each op means, in float64 NumPy and as the formulas say it. Other code is compared with this, never the reverse.

Inputs are NumPy arrays of any dtype (bfloat16 values as float32, see `to_bits`). Results of floating-point inputs are
float64.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests import expert_reference, sampling_reference, vision_reference

from layerzero.ipc.vocabulary.numerics import TOLERANCE as TOLERANCE

Array = NDArray[Any]
F64 = NDArray[np.float64]

# Bits of the significand, with the implied one.
SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


EIGHT_BIT = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}  # bits of exponent and fraction
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def numbers_of(dtype: str) -> F64:
    """What the 256 codes of an 8-bit format say."""
    exponents, fractions = EIGHT_BIT[dtype]
    codes = np.arange(128)
    exponent, fraction = codes >> fractions, (codes & (1 << fractions) - 1) / (1 << fractions)
    bias = (1 << exponents - 1) - 1
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype == "float8_e5m2":
        values[124:] = np.inf, np.nan, np.nan, np.nan
    values[127] = np.nan
    return np.concatenate((values, -values))


def _to_8_bits(values: F64, dtype: str) -> Array:
    """The codes of the nearest finite numbers, ties to even codes, and of NaN."""
    known = numbers_of(dtype)[:128]
    known = known[np.isfinite(known)]
    size = np.minimum(np.abs(np.nan_to_num(values, nan=0.0, posinf=1e9, neginf=-1e9)), known[-1])
    above = np.searchsorted(known, size)
    below = np.maximum(above - 1, 0)
    down, up = size - known[below], known[above] - size
    codes = np.where((down < up) | ((down == up) & (above % 2 == 1)), below, above)
    codes = np.where(known[above] == size, above, codes) + 128 * np.signbit(values)
    return np.where(np.isnan(values), 127, codes).astype(np.uint8)


def round_to(values: Array, dtype: str) -> F64:
    """Values rounded to `dtype` (ties to even), as float64."""
    values = np.asarray(values, np.float64)
    return from_bits(to_bits(values, dtype), dtype).astype(np.float64)


def to_bits(values: Array, dtype: str) -> Array:
    """Values as an array with the memory layout of `dtype`; bfloat16 as its bits in uint16."""
    if dtype == "float4_e2m1fn_x2":
        return np.asarray(values, np.uint8)
    if dtype in EIGHT_BIT:
        return _to_8_bits(np.asarray(values, np.float64), dtype)
    if dtype != "bfloat16":
        return np.asarray(values).astype(dtype)
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bits(bits: Array, dtype: str) -> Array:
    """The values in an array that `to_bits` made."""
    if dtype in EIGHT_BIT:
        return numbers_of(dtype)[bits]
    if dtype == "float4_e2m1fn_x2":  # pairs of numbers, which no numbers of NumPy's are
        return np.ascontiguousarray(bits).view("V1")
    if dtype != "bfloat16":
        return bits
    return (bits.astype(np.uint32) << 16).view(np.float32)


def attention(
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    *,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    layout: str = "BHSD",
    **options: Any,
) -> F64:
    """softmax(cap(q k^T * scale) + mask) v, one head at a time; a row that sees no key is 0."""
    rule: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "causal_alignment": causal_alignment}
    return attention_forward(q, k, v, attn_mask, sinks, alibi_slopes, **rule, **options)[0]


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    *,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    layout: str = "BHSD",
    **options: Any,
) -> tuple[F64, F64]:
    """attention, and log(sum(exp(scores))) of each row, its sink among them; -inf for one that sees no key.
    `options`: window_left, window_right, softcap, mask_block_q, mask_block_k."""
    beside = (sinks, alibi_slopes)
    weights, lse = _weights(q, k, attn_mask, is_causal, scale, causal_alignment, *beside, **options)
    values = np.repeat(v.astype(np.float64), q.shape[1] // max(k.shape[1], 1), axis=1)
    return weights @ values, lse


def attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    output: Array,
    lse: Array,
    attn_mask: Array | None = None,
    *,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    layout: str = "BHSD",
) -> tuple[F64, F64, F64]:
    """The Jacobian of softmax, diag(p) - p p^T, row by row; neither `output` nor `lse` is looked at."""
    batch, heads = q.shape[:2]
    groups = k.shape[1]
    group = heads // max(groups, 1)
    weights, _ = _weights(q, k, attn_mask, is_causal, scale, causal_alignment)
    wide = [np.repeat(one.astype(np.float64), group, axis=1) for one in (k, v)]
    g = grad_out.astype(np.float64)
    by_weight = g @ wide[1].swapaxes(-1, -2)
    by_score = np.einsum("bhqk,bhqk->bhqk", weights, by_weight)
    by_score = by_score - weights * by_score.sum(-1, keepdims=True)
    grad_q = scale * by_score @ wide[0]
    grad_k = scale * by_score.swapaxes(-1, -2) @ q.astype(np.float64)
    grad_v = weights.swapaxes(-1, -2) @ g
    shared = [one.reshape(batch, groups, group, *one.shape[2:]).sum(2) if groups else one for one in (grad_k, grad_v)]
    return grad_q, shared[0], shared[1]


def _weights(
    q: Array,
    k: Array,
    attn_mask: Array | None,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
    mask_block_q: int = 1,
    mask_block_k: int = 1,
) -> tuple[F64, F64]:
    """Weights (batch, heads, queries, keys), 0 in rows that see nothing, and the logarithm of what they are divided by,
    one row at a time."""
    batch, heads, queries, _ = q.shape
    keys, group = k.shape[2], heads // max(k.shape[1], 1)
    if attn_mask is not None and (mask_block_q, mask_block_k) != (1, 1):
        blocks = np.broadcast_to(
            attn_mask, (*attn_mask.shape[:2], -(-queries // mask_block_q), -(-keys // mask_block_k))
        )
        attn_mask = blocks.repeat(mask_block_q, 2).repeat(mask_block_k, 3)[:, :, :queries, :keys]
    found, lse = np.zeros((batch, heads, queries, keys)), np.full((batch, heads, queries), -np.inf)
    places = np.arange(queries) + (keys - queries if causal_alignment == "bottom_right" else 0)
    distance = np.arange(keys)[None, :] - places[:, None]
    visible = np.ones((queries, keys), bool)
    if is_causal:
        visible &= distance <= 0
    if window_left is not None:
        visible &= distance >= -window_left
    if window_right is not None:
        visible &= distance <= window_right
    for b in range(batch):
        for h in range(heads):
            scores = q[b, h].astype(np.float64) @ k[b, h // group].astype(np.float64).T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if alibi_slopes is not None:
                slope = np.broadcast_to(alibi_slopes, (batch, heads))[b, h].astype(np.float64)
                scores = scores - slope * np.abs(distance)
            seen = visible
            if attn_mask is not None:
                mask = np.broadcast_to(attn_mask, (batch, heads, queries, keys))[b, h]
                seen = visible & (mask if mask.dtype == bool else mask > -np.inf)
                scores = scores if mask.dtype == bool else scores + mask
            scores = np.where(seen, scores, -np.inf)
            sink = -np.inf if sinks is None else float(sinks[h])
            lse[b, h] = sink
            for row in np.flatnonzero(seen.any(axis=1)):
                top = max(scores[row].max(), sink)
                weights = np.exp(scores[row] - top)
                total = weights.sum() + np.exp(sink - top)
                found[b, h, row] = weights / total
                lse[b, h, row] = top + np.log(total)
    return found, lse


def merge_attention(*parts: Array | None) -> tuple[F64, F64]:
    """The parts' outs by their shares of exp(lse), row by row; -inf has none."""
    given = [one.astype(np.float64) for one in parts if one is not None]
    outs, sums = given[::2], np.stack(given[1::2])
    made, lse = np.zeros(outs[0].shape), np.full(outs[0].shape[:-1], -np.inf)
    for row in np.ndindex(lse.shape):
        of_row = sums[(slice(None), *row)]
        seen = np.flatnonzero(of_row > -np.inf)
        if seen.size:
            top = of_row.max()
            lse[row] = top + np.log(np.exp(of_row[seen] - top).sum())
            kept = [(n, np.exp(of_row[n] - lse[row])) for n in seen if of_row[n] - lse[row] > -700]
            made[row] = sum(weight * outs[n][row] for n, weight in kept)
    return made, lse


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
) -> F64:
    """`attention` of each sequence."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for (a, b), (c, d) in zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True):
        one = (tensor.swapaxes(0, 1)[None] for tensor in (q[a:b], k[c:d], v[c:d]))
        rule = {"is_causal": is_causal, "scale": scale, "causal_alignment": causal_alignment}
        out[a:b] = attention(*one, **rule)[0].swapaxes(0, 1)  # type: ignore[arg-type]
    return out


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    scale: float,
) -> F64:
    """`attention` of each query to its keys, which are gathered first."""
    k_cache, v_cache = in_numbers(k_cache, k_scale), in_numbers(v_cache, v_scale)
    out = np.zeros((*q.shape[:2], v_cache.shape[3]))
    page = k_cache.shape[1]
    for b, length in enumerate(seq_lens):
        slots = np.arange(length)
        k, v = (
            cache[block_tables[b, slots // page], slots % page].swapaxes(0, 1)[None] for cache in (k_cache, v_cache)
        )
        found = attention(q[b][None, :, None], k, v, is_causal=False, scale=scale, causal_alignment="top_left")
        out[b] = found[0, :, 0]
    return out


def attention_varlen_forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    *,
    is_causal: bool,
    scale: float,
    causal_alignment: str,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
) -> tuple[F64, F64]:
    """`attention_forward` of each sequence."""
    attrs: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "causal_alignment": causal_alignment}
    attrs |= {"window_left": window_left, "window_right": window_right, "softcap": softcap}
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.zeros(q.shape[:2])
    for n in range(len(cu_seqlens_q) - 1):
        rows, keys = slice(*cu_seqlens_q[n : n + 2]), slice(*cu_seqlens_k[n : n + 2])
        out[rows], lse[rows] = _of_sequence(q[rows], k[keys], v[keys], n, sinks, alibi_slopes, attrs)
    return out, lse


def paged_attention_forward(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    cu_seqlens_q: Array | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    is_causal: bool,
    scale: float,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float | None = None,
) -> tuple[F64, F64]:
    """`attention_forward` of each sequence's queries to its keys, which are gathered first."""
    k_cache, v_cache = in_numbers(k_cache, k_scale), in_numbers(v_cache, v_scale)
    attrs: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "causal_alignment": "bottom_right"}
    attrs |= {"window_left": window_left, "window_right": window_right, "softcap": softcap}
    out, lse = np.zeros((*q.shape[:2], v_cache.shape[3])), np.zeros(q.shape[:2])
    starts = np.arange(len(seq_lens) + 1) if cu_seqlens_q is None else cu_seqlens_q
    for b, length in enumerate(seq_lens):
        slots, rows = np.arange(length), slice(starts[b], starts[b + 1])
        page = k_cache.shape[1]
        k, v = (cache[block_tables[b, slots // page], slots % page] for cache in (k_cache, v_cache))
        out[rows], lse[rows] = _of_sequence(q[rows], k, v, b, sinks, alibi_slopes, attrs)
    return out, lse


def mla_decode(
    q_nope: Array,
    q_pe: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    scale: float,
) -> tuple[F64, F64]:
    """The softmax of both scores' sum, of latent vectors."""
    page = ckv_cache.shape[1]
    out, lse = np.zeros(q_nope.shape), np.full(q_nope.shape[:2], -np.inf)
    for b, length in enumerate(seq_lens):
        slots = np.arange(length)
        ckv, kpe = (
            cache[block_tables[b, slots // page], slots % page].astype(np.float64) for cache in (ckv_cache, kpe_cache)
        )
        if length:
            scores = (q_nope[b].astype(np.float64) @ ckv.T + q_pe[b].astype(np.float64) @ kpe.T) * scale
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out[b], lse[b] = weights / total @ ckv, (top + np.log(total))[:, 0]
    return out, lse


def _of_sequence(
    q: Array, k: Array, v: Array, number: int, sinks: Array | None, slopes: Array | None, attrs: dict[str, Any]
) -> tuple[F64, F64]:
    """(tokens, heads, extent) and (tokens, heads)."""
    if slopes is not None and len(slopes) > 1:
        slopes = slopes[number : number + 1]
    tensors = (tensor.swapaxes(0, 1)[None] for tensor in (q, k, v))
    out, lse = attention_forward(*tensors, None, sinks, slopes, **attrs)  # type: ignore[arg-type]
    return out[0].swapaxes(0, 1), lse[0].T


def in_numbers(cache: Array, scale: Array | None) -> Array:
    """What a cache (..., heads, extent) stands for."""
    return cache if scale is None else np.asarray(cache.astype(np.float64) * scale[:, None])


def gather_kv(
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    dtype: str | None = None,
) -> tuple[Array, Array]:
    """A row for each slot, 0 for a negative one."""
    k_cache, v_cache = in_numbers(k_cache, k_scale), in_numbers(v_cache, v_scale)
    page = max(k_cache.shape[1], 1)
    made = [np.zeros((len(slots), *cache.shape[2:]), cache.dtype) for cache in (k_cache, v_cache)]
    for n, slot in enumerate(slots.tolist()):
        for rows, cache in zip(made, (k_cache, v_cache), strict=True):
            if slot >= 0:
                rows[n] = cache[slot // page, slot % page]
    return made[0], made[1]


def copy_kv_blocks(k_cache: Array, v_cache: Array, sources: Array, targets: Array) -> tuple[Array, Array]:
    """The caches after it."""
    made = k_cache.copy(), v_cache.copy()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for copy, cache in zip(made, (k_cache, v_cache), strict=True):
            if min(source, target) >= 0:
                copy[target] = cache[source]
    return made


def rope(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> F64:
    """Pairs as complex numbers, times cos + i sin."""
    out = x.astype(np.float64)
    pairs = cos.shape[-1]
    turn = (cos.astype(np.float64) + 1j * sin.astype(np.float64))[:, :, None]
    one, other = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    turned = (out[..., one] + 1j * out[..., other]) * turn
    out[..., one], out[..., other] = turned.real, turned.imag
    return out


def rope_qk(q: Array, k: Array, cos: Array, sin: Array, *, interleaved: bool) -> tuple[F64, F64]:
    return rope(q, cos, sin, interleaved=interleaved), rope(k, cos, sin, interleaved=interleaved)


def wide(x: Array) -> Array:
    """Floating-point values as float64; integers stay, and wrap around in their dtype."""
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def matmul(a: Array, b: Array) -> Array:
    return np.asarray(np.matmul(wide(a), wide(b)))


def addmm(x: Array, a: Array, b: Array, *, beta: float, alpha: float) -> Array:
    product = np.asarray(alpha * matmul(a, b))
    return product + beta * wide(x) if beta else product


def linear(x: Array, weight: Array, bias: Array | None = None, *, activation: str = "") -> Array:
    product = matmul(x, weight.T) if x.ndim > 1 else matmul(x[None], weight.T)[0]
    return _activated(product if bias is None else np.asarray(product + wide(bias)), activation)


def _activated(made: Array, activation: str) -> Array:
    match activation:
        case "":
            return made
        case "gelu" | "gelu_tanh":
            return gelu(made, approximate="none" if activation == "gelu" else "tanh")
    return {"relu": relu, "silu": silu}[activation](made)


def gated_mlp(x: Array, gate_up: Array, down: Array, *, activation: str) -> Array:
    half = down.shape[1]
    gate = linear(x, gate_up[:half], activation=activation)
    return linear(gate * linear(x, gate_up[half:]), down)


def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: str,
    padding: str,
    dilation: str,
    groups: int,
    activation: str,
) -> Array:
    tensors = (wide(x), wide(weight), None if bias is None else wide(bias))
    attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _activated(vision_reference.conv(*tensors, **attrs), activation)


def conv_transpose(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: str,
    padding: str,
    output_padding: str,
    dilation: str,
    groups: int,
    activation: str,
) -> Array:
    tensors = (wide(x), wide(weight), None if bias is None else wide(bias))
    attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    made = vision_reference.conv_transpose(*tensors, **attrs, output_padding=output_padding)
    return _activated(made, activation)


def softmax(x: Array, *, dim: int, dtype: str = "") -> F64:
    x = (from_bits(to_bits(x, dtype), dtype) if dtype else x).astype(np.float64)
    if x.size == 0:
        return x
    powers = np.exp(x - x.max(axis=dim, keepdims=True))
    return np.asarray(powers / powers.sum(axis=dim, keepdims=True))


@np.errstate(invalid="ignore")
def log_softmax(x: Array, *, dim: int, dtype: str = "") -> F64:
    x = (from_bits(to_bits(x, dtype), dtype) if dtype else x).astype(np.float64)
    if x.size == 0:
        return x
    x = x - x.max(axis=dim, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=dim, keepdims=True)))


def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, ndim: int, eps: float) -> F64:
    x, axes = x.astype(np.float64), tuple(range(x.ndim - ndim, x.ndim))
    centred = x - x.mean(axis=axes, keepdims=True)
    out = centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + eps)
    out = out if weight is None else out * weight.astype(np.float64)
    return np.asarray(out if bias is None else out + bias.astype(np.float64))


@np.errstate(invalid="ignore")
def rms_norm(x: Array, weight: Array | None = None, *, ndim: int, eps: float) -> F64:
    x, axes = x.astype(np.float64), tuple(range(x.ndim - ndim, x.ndim))
    out = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + eps)
    return np.asarray(out if weight is None else out * weight.astype(np.float64))


def add_rms_norm(x: Array, residual: Array, weight: Array | None = None, *, ndim: int, eps: float) -> tuple[Array, ...]:
    summed = x.astype(np.float64) + residual.astype(np.float64)
    return rms_norm(summed, weight, ndim=ndim, eps=eps), summed


@np.errstate(invalid="ignore")
def group_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    num_groups: int = 0,
    eps: float,
    activation: str = "",
) -> F64:
    """Without groups one for each channel."""
    if not x.size:
        return x.astype(np.float64)
    grouped = x.reshape(x.shape[0], num_groups or x.shape[1], -1)
    made = _of_channels(layer_norm(grouped, ndim=1, eps=eps).reshape(x.shape), weight, bias)
    return np.asarray(_activated(made, activation))


@np.errstate(invalid="ignore")
def batch_norm(
    x: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
) -> F64:
    mean, var = (beside(given, x) for given in (running_mean, running_var))
    return _of_channels((x.astype(np.float64) - mean) / np.sqrt(var + eps), weight, bias)


def beside(parameter: Array, x: Array) -> F64:
    """One number for each channel of x."""
    return parameter.astype(np.float64).reshape(-1, *[1] * (x.ndim - 2))


def _of_channels(x: F64, weight: Array | None, bias: Array | None) -> F64:
    scaled = x if weight is None else x * beside(weight, x)
    return scaled if bias is None else scaled + beside(bias, x)


def layer_norm_backward(
    grad_out: Array, x: Array, weight: Array | None = None, *, ndim: int, eps: float
) -> tuple[Array, ...]:
    return _norm_gradients(grad_out, x, weight, ndim, eps, is_centred=True)


def rms_norm_backward(
    grad_out: Array, x: Array, weight: Array | None = None, *, ndim: int, eps: float
) -> tuple[Array, ...]:
    return _norm_gradients(grad_out, x, weight, ndim, eps, is_centred=False)[:2]


def _norm_gradients(
    grad_out: Array, x: Array, weight: Array | None, ndim: int, eps: float, *, is_centred: bool
) -> tuple[Array, ...]:
    """By the chain rule over y = c n, c = 1 / sqrt(mean(n^2) + eps), of rows n, which layer_norm has subtracted a mean
    from before."""
    grad, x = grad_out.astype(np.float64), x.astype(np.float64)
    last, leading = tuple(range(x.ndim - ndim, x.ndim)), tuple(range(x.ndim - ndim))
    if is_centred:
        x = x - x.mean(axis=last, keepdims=True)
    deviation = np.sqrt((x**2).mean(axis=last, keepdims=True) + eps)
    by_weight, by_bias = (grad * x / deviation).sum(axis=leading), grad.sum(axis=leading)
    g = grad if weight is None else grad * weight.astype(np.float64)
    by_x = g / deviation - x * (g * x).mean(axis=last, keepdims=True) / deviation**3
    if is_centred:  # a mean's gradient is spread over the row
        by_x = by_x - by_x.mean(axis=last, keepdims=True)
    return np.asarray(by_x), np.asarray(by_weight), np.asarray(by_bias)


@np.errstate(invalid="ignore")
def add(x: Array, other: Array) -> Array:
    return np.asarray(wide(x) + wide(other))


@np.errstate(invalid="ignore")
def mul(x: Array, other: Array) -> Array:
    return np.asarray(wide(x) * wide(other))


def clamp(x: Array, *, min: float | None, max: float | None) -> Array:
    low = x if min is None else np.maximum(wide(x), min)
    return np.asarray(low if max is None else np.minimum(wide(low), max)).astype(wide(x).dtype)


def where(condition: Array, x: Array, other: Array) -> Array:
    return np.asarray(np.where(condition, wide(x), wide(other)))


def cat(*tensors: Array | None, dim: int) -> Array:
    return np.concatenate([wide(x) for x in tensors if x is not None], axis=dim)


@np.errstate(all="ignore")
def cast(x: Array, *, dtype: str) -> Array:
    if dtype in TOLERANCE:
        return from_bits(to_bits(x, dtype), dtype).astype(np.float64)
    return np.asarray(x != 0 if dtype == "bool" else (np.trunc(x) if x.dtype.kind == "f" else x).astype(dtype))


def gelu(x: Array, *, approximate: str) -> F64:
    x = x.astype(np.float64)
    if approximate == "tanh":
        return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    # erfc keeps the digits of the left tail, where 1 + erf cancels
    return np.asarray(x / 2 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)))


def silu(x: Array) -> F64:
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def swiglu(gate: Array, up: Array) -> F64:
    return silu(gate) * up.astype(np.float64)


def relu(x: Array) -> F64:
    return np.maximum(x.astype(np.float64), 0.0)


def sigmoid(x: Array) -> F64:
    return np.asarray(0.5 + 0.5 * np.tanh(x.astype(np.float64) / 2))


def tanh(x: Array) -> F64:
    return np.asarray(np.tanh(x.astype(np.float64)))


def quick_gelu(x: Array) -> F64:
    return np.asarray(x.astype(np.float64) * sigmoid(1.702 * x.astype(np.float64)))


def hardswish(x: Array) -> F64:
    return np.asarray(x.astype(np.float64) * np.clip(x.astype(np.float64) + 3, 0, 6) / 6)


def mish(x: Array) -> F64:
    return np.asarray(x.astype(np.float64) * np.tanh(np.logaddexp(x.astype(np.float64), 0)))


def geglu(gate: Array, up: Array, *, approximate: str) -> F64:
    return gelu(gate, approximate=approximate) * up.astype(np.float64)


def reglu(gate: Array, up: Array) -> F64:
    return relu(gate) * up.astype(np.float64)


def cross_entropy(
    x: Array,
    target: Array,
    weight: Array | None = None,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> F64:
    """The cross entropy of the softmax and a distribution that is smoothed, times the weights of its classes."""
    rows = np.moveaxis(x.astype(np.float64), 1, -1)
    weights = np.ones(x.shape[1]) if weight is None else weight.astype(np.float64)
    counts = target != ignore_index
    wanted = np.eye(x.shape[1])[np.where(counts, target, 0)]
    wanted = ((1 - label_smoothing) * wanted + label_smoothing / x.shape[1]) * counts[..., None]
    with np.errstate(invalid="ignore"):
        losses = -(wanted * weights * log_softmax(rows, dim=rows.ndim - 1)).sum(-1)
        if reduction == "none":
            return np.asarray(losses)
        share = (weights[np.where(counts, target, 0)] * counts).sum() if reduction == "mean" else 1.0
        return np.asarray(losses.sum() / np.float64(share))


def embedding(ids: Array, weight: Array) -> Array:
    return np.asarray(wide(weight)[ids])


def append_kv(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    dtype: str = "int8",
) -> tuple[Array, Array]:
    """With scales in `dtype`."""
    caches = []
    for tokens, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        rows = tokens if scale is None else quantize(tokens, scale.reshape(1, -1, 1), dtype=dtype)
        changed = wide(cache).copy()
        for row, slot in zip(wide(rows), slots.tolist(), strict=True):
            if slot >= 0:
                changed[slot // cache.shape[1]][slot % cache.shape[1]] = row
        caches.append(changed)
    return caches[0], caches[1]


def quantize(x: Array, scale: Array, zero_point: Array | None = None, *, dtype: str) -> Array:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        parts = wide(x).astype(np.float32) / _of_each(scale, x.shape)
    return _rounded(parts, dtype, 0 if zero_point is None else _of_each(zero_point, x.shape))


def _rounded(parts: Array, dtype: str, zero_point: Array | int = 0) -> Array:
    if dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        whole = np.where(np.isnan(parts), 0, np.round(parts)).astype(np.float64) + zero_point
        return np.clip(whole, limits.min, limits.max).astype(dtype)
    return from_bits(to_bits(parts, dtype), dtype)


def dequantize(x: Array, scale: Array, zero_point: Array | None = None, *, dtype: str) -> Array:
    """x as numbers; packed fp4 as from_bits gives it."""
    x = unpacked_fp4(x) if x.dtype.kind == "V" else x
    wide_x = x.astype(np.float64) - (0 if zero_point is None else _of_each(zero_point, x.shape))
    return np.asarray(wide_x * _of_each(scale, x.shape))


def unpacked_fp4(x: Array) -> F64:
    codes = x.view(np.uint8)
    return np.asarray(FP4[np.stack((codes & 15, codes >> 4), -1)].reshape(*x.shape[:-1], -1))


def _of_each(scale: Array, shape: tuple[int, ...]) -> Array:
    """The scale of each element."""
    each = np.repeat(scale, shape[-1] // scale.shape[-1], axis=-1)
    return np.broadcast_to(each, shape)


def dynamic_quantize(x: Array, *, format: str, groups: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Scales are rounded to float32 at each step, as the formulas have them."""
    single = np.float32
    shape = (*x.shape[:-1], groups) if groups else (1,) * x.ndim
    zero = np.zeros(shape, np.int32)
    if not x.size:
        halves = 2 if format in ("mxfp4", "nvfp4") else 1
        return np.zeros((*x.shape[:-1], x.shape[-1] // halves), np.int8), np.zeros(shape, single), zero
    parts = wide(x).astype(single).reshape(*x.shape[:-1], groups, -1) if groups else wide(x).astype(single).ravel()
    finite = np.isfinite(parts).all(-1).reshape(shape)
    parts = np.where(np.isfinite(parts), parts, single(0))
    most = np.abs(parts).max(-1).reshape(shape)
    if not symmetric:
        low, high = np.iinfo(format).min, np.iinfo(format).max
        least, greatest = (f(single(0), g(parts, axis=-1)).reshape(shape) for f, g in
                           ((np.minimum, np.min), (np.maximum, np.max)))  # fmt: skip
        step = (greatest - least) / single(255)
        points = np.round(low - np.divide(least, step, out=np.zeros_like(step), where=step != 0))
        zero = np.where((step != 0) & finite, np.clip(points, low, high), 0).astype(np.int32)
    elif format == "mxfp4":
        exponents = np.floor(np.log2(most, out=np.zeros_like(most), where=most > 0)) - 2
        step = np.where(most > 0, np.exp2(np.maximum(exponents, -127)), 0).astype(single)
    elif format == "nvfp4":
        whole = single(most.max() / single(448 * 6))
        step = (from_bits(to_bits(most / single(6) / (whole or single(1)), "float8_e4m3fn"), "float8_e4m3fn")).astype(
            single
        ) * whole
    else:
        step = most / single({"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[format])
    each = np.repeat(step, parts.shape[-1], -1).reshape(x.shape) if groups else np.broadcast_to(step, x.shape)
    flat = np.divide(parts.reshape(x.shape), each, out=np.zeros(x.shape, single), where=each != 0)
    fit = np.repeat(finite, parts.shape[-1], -1).reshape(x.shape) if groups else np.broadcast_to(finite, x.shape)
    step = np.where(finite, step, single(np.nan))
    if format in ("mxfp4", "nvfp4"):
        codes = _fp4_codes(np.where(fit, flat, 0))
        return codes[..., ::2] | codes[..., 1::2] << 4, step, zero
    points = np.repeat(zero, parts.shape[-1], -1).reshape(x.shape) if groups else np.broadcast_to(zero, x.shape)
    flat = np.where(fit, flat, 0 if "int" in format else np.nan)
    return _rounded(flat, format, points), step, zero


def _fp4_codes(values: Array) -> Array:
    """The nearest, of two the even code."""
    size = np.minimum(np.abs(values.astype(np.float64)), 6)
    distances = np.abs(size[..., None] - FP4[:8])
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first, which argmin then prefers
    return (order[distances[..., order].argmin(-1)] | 8 * np.signbit(values)).astype(np.uint8)


def int_matmul(
    a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None
) -> NDArray[np.int32]:
    one = a.astype(np.int64) - (0 if a_zero_point is None else a_zero_point)
    other = b.astype(np.int64) - (0 if b_zero_point is None else b_zero_point)
    return (one @ other).astype(np.int32)


def scaled_linear(
    x: Array,
    weight: Array,
    weight_scale: Array,
    x_scale: Array | None = None,
    bias: Array | None = None,
    x_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    *,
    dtype: str,
    weight_format: str,
) -> F64:
    if x_scale is not None:
        x = dequantize(x, x_scale, x_zero_point, dtype="")
    rows = len(weight) // len(weight_scale) if len(weight_scale) > 1 else 1
    scale = np.repeat(weight_scale, rows, 0)
    zero = None if weight_zero_point is None else np.repeat(weight_zero_point, rows, 0)
    if weight_format:
        weight = np.stack((weight & 15, weight >> 4), -1).reshape(len(weight), 2 * weight.shape[1])
        zero = np.full(scale.shape, 8) if zero is None else zero
    made = wide(x).astype(np.float64) @ dequantize(weight, scale, zero, dtype="").T
    return np.asarray(made if bias is None else made + bias)


TENSOR_OPS: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "attention": attention,
    "attention_forward": attention_forward,
    "attention_backward": attention_backward,
    "attention_varlen": attention_varlen,
    "merge_attention": merge_attention,
    "gather_kv": gather_kv,
    "copy_kv_blocks": copy_kv_blocks,
    "attention_varlen_forward": attention_varlen_forward,
    "paged_attention_forward": paged_attention_forward,
    "paged_attention": paged_attention,
    "mla_decode": mla_decode,
    "append_kv": append_kv,
    "rope": rope,
    "rope_qk": rope_qk,
    "matmul": matmul,
    "addmm": addmm,
    "linear": linear,
    "gated_mlp": gated_mlp,
    "grouped_linear": expert_reference.grouped_linear,
    "moe_route": expert_reference.route,
    "moe_permute": expert_reference.permute,
    "moe_combine": expert_reference.combine,
    "moe_mlp": functools.partial(expert_reference.moe_mlp, expert=gated_mlp),
    "conv": conv,
    "conv_transpose": conv_transpose,
    "max_pool": vision_reference.max_pool,
    "avg_pool": vision_reference.avg_pool,
    "adaptive_max_pool": vision_reference.adaptive_max_pool,
    "adaptive_avg_pool": vision_reference.adaptive_avg_pool,
    "interpolate": vision_reference.interpolate,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "cross_entropy": cross_entropy,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "group_norm": group_norm,
    "instance_norm": group_norm,
    "batch_norm": batch_norm,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
    "gelu": gelu,
    "silu": silu,
    "swiglu": swiglu,
    "geglu": geglu,
    "reglu": reglu,
    "relu": relu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "quick_gelu": quick_gelu,
    "hardswish": hardswish,
    "mish": mish,
    "add": add,
    "mul": mul,
    "clamp": clamp,
    "where": where,
    "cat": cat,
    "cast": cast,
    "quantize": quantize,
    "dequantize": dequantize,
    "dynamic_quantize": dynamic_quantize,
    "int_matmul": int_matmul,
    "scaled_linear": scaled_linear,
    "embedding": embedding,
    "penalize_logits": sampling_reference.penalize_logits,
    "filter_logits": sampling_reference.filter_logits,
    "sample": sampling_reference.sample,
    "speculative_verify": sampling_reference.speculative_verify,
    "tree_accept": sampling_reference.tree_accept,
}


def error(result: Array, expected: Array) -> float:
    """The measure TOLERANCE is about. Infinite when one is NaN or infinite where the other is not, and for any
    difference of integers."""
    if result.size == 0:
        return 0.0
    if result.dtype.kind == "V":
        result = result.view(np.uint8)
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(result, expected) else math.inf
    if not np.array_equal(np.isfinite(result), np.isfinite(expected)):
        return math.inf
    finite = np.isfinite(expected)
    if not np.array_equal(result[~finite], expected[~finite], equal_nan=True):
        return math.inf
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0.0)))
    return float(np.abs(result[finite].astype(np.float64) - expected[finite]).max(initial=0.0)) / scale


Tokens = list[tuple[int, int, int]]  # id, start and end character


def tokenize(
    document: dict[str, Any], texts: list[str], *, add_special_tokens: bool, max_length: int | None
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """ids, splits and offsets for documents with a WhitespaceSplit pre-tokenizer, a WordPiece or BPE model, an optional
    Lowercase normalizer and an optional BertProcessing; for byte-level ones, and for Llama 2's."""
    model, processor = document["model"], document["post_processor"] if add_special_tokens else None
    ids: list[int] = []
    splits, offsets = [0], []
    for text in texts:
        row: Tokens = []
        if model["type"] == "WordPiece":
            for found in re.finditer(r"\S+", text):
                pieces = _word_pieces(model, found.group().lower() if document["normalizer"] else found.group())
                row += [(i, found.start() + a, found.start() + b) for i, a, b in pieces]
        else:
            for symbols in _symbols(document, text):
                row += _merge(model, symbols)
        if max_length is not None:
            row = row[: max_length - (2 if processor else 0)]
        if processor:
            row = [(processor["cls"][1], 0, 0), *row, (processor["sep"][1], 0, 0)]
        ids += [token[0] for token in row]
        offsets += [token[1:] for token in row]
        splits.append(len(ids))
    return ids, splits, offsets


def _word_pieces(model: dict[str, Any], word: str) -> Tokens:
    """Longest match first; a word with a part that is not in the vocabulary is one unknown token."""
    vocab, pieces, start = model["vocab"], [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = (model["continuing_subword_prefix"] if start else "") + word[start:end]
            if piece in vocab:
                pieces.append((vocab[piece], start, end))
                start = end
                break
        else:
            return [(vocab[model["unk_token"]], 0, len(word))]
    return pieces


# GPT-2's pattern for texts of letters and digits that Python's \w tells alike.
_PIECES = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def byte_level_alphabet() -> list[str]:
    """A visible character for each byte: its own, or the next one from U+0100 on."""
    is_visible = [33 <= b <= 126 or 161 <= b <= 172 or b >= 174 for b in range(256)]
    return [chr(b if is_visible[b] else 256 + is_visible[:b].count(False)) for b in range(256)]


def _symbols(document: dict[str, Any], text: str) -> list[Tokens]:
    """What a BPE model starts from, by word: (symbol, start, end) in the text."""
    kind = (document["pre_tokenizer"] or {}).get("type")
    if kind == "ByteLevel":
        letters = byte_level_alphabet()
        return [
            [(letters[b], i, i + 1) for i in range(*found.span()) for b in text[i].encode()]
            for found in _PIECES.finditer(text)
        ]
    if kind == "WhitespaceSplit":
        return [[(text[i], i, i + 1) for i in range(*found.span())] for found in re.finditer(r"\S+", text)]
    spaced = [("▁", 0, 1), *((c.replace(" ", "▁"), i, i + 1) for i, c in enumerate(text))] if text else []
    known = document["model"]["vocab"]
    return [
        [(symbol, *at) for c, *at in spaced for symbol in ([c] if c in known else [f"<0x{b:02X}>" for b in c.encode()])]
    ]


def _merge(model: dict[str, Any], parts: Tokens) -> Tokens:
    """Merge the pair of lowest rank, leftmost first, until none is left; or take the word as it is, if that is a token
    and merges are ignored then."""
    ranks = {tuple(m.split(" ") if isinstance(m, str) else m): rank for rank, m in enumerate(model["merges"])}
    whole = "".join(symbol for symbol, _, _ in parts)
    if model.get("ignore_merges") and whole in model["vocab"]:
        parts = [(whole, parts[0][1], parts[-1][2])]
    while True:
        pairs = [(ranks[a[0], b[0]], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if (a[0], b[0]) in ranks]
        if not pairs:
            return [(model["vocab"][symbol], start, end) for symbol, start, end in parts]
        _, i = min(pairs)
        one, other = parts[i : i + 2]
        parts[i : i + 2] = [(one[0] + other[0], one[1], other[2])]


def detokenize(document: dict[str, Any], rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
    """Texts for documents with a WordPiece decoder without cleanup, a ByteLevel one, or none (tokens joined by
    spaces)."""
    names = {i: token for token, i in document["model"]["vocab"].items()}
    special = {token["id"] for token in document["added_tokens"] if token["special"]}
    texts = []
    for row in rows:
        tokens = [names[i] for i in row if i in names and not (skip_special_tokens and i in special)]
        text = " ".join(tokens)
        if (document["decoder"] or {}).get("type") == "ByteLevel":
            letters = {letter: b for b, letter in enumerate(byte_level_alphabet())}
            text = bytes(letters[c] for c in "".join(tokens)).decode(errors="replace")
        elif document["decoder"] is not None:
            text = text.replace(" " + document["decoder"]["prefix"], "")
        texts.append(text)
    return texts
