"""Attention of sequences that lie one after the other, or in a paged cache, with its options and the log-sum-exp of its
rows; rows and blocks of such caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.ops import extents_of
from layerzero.client.facade.running import perform
from layerzero.client.planning import cache_plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def attention_varlen_forward(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """attention_varlen with the options of attention, and the log-sum-exp of each row of its scores: (out, lse), new.

    q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale and causal_alignment as attention_varlen. window_size, softcap
    and sinks as attention, places being those within a sequence; alibi_slopes: float32 (heads,) or (1 or sequences,
    heads). out: (tokens_q, heads, value_dim); lse: float32 (tokens_q, heads), as attention_forward: natural, sinks
    among the scores, -inf for a query that sees nothing. merge_attention takes both. Source: docs/ops.md.
    """
    params = {"is_causal": is_causal, "scale": scale, "causal_alignment": causal_alignment}
    params |= {"window_size": extents_of(window_size), "softcap": softcap}
    args = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes)
    planner = cache_plans.plan_attention_varlen_forward
    return perform(Request("attention_varlen_forward", args, params, planner, None, backend, timeout_s))


def paged_attention_forward(
    q: ArrayT,
    k_cache: AnyArray,
    v_cache: AnyArray,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    cu_seqlens_q: AnyArray | None = None,
    sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    kv_layout: str = "NHD",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """Attention of several queries for each sequence to the keys that a paged cache holds of it, with the options of
    attention, and the log-sum-exp of each row of its scores: (out, lse), new. Prefill, chunked prefill, decoding.

    q: (tokens, heads, head_dim), one sequence after the other; cu_seqlens_q: int32 (sequences + 1), from 0 up to the
    number of tokens: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1]. Without it each has one.
    k_cache, v_cache, block_tables, seq_lens, all scales, kv_layout as paged_attention. The queries are the last tokens
    of their sequence: with S of them and L = seq_lens[b] keys the place of query i is key i + L - S. is_causal: it sees
    keys up to its place, where append_kv has put its own key before; else all L of them, as a prefix that ends before
    the queries needs it. window_size, softcap and sinks as attention; alibi_slopes: float32 (heads,) or (1 or
    sequences, heads).
    out: (tokens, heads, value_dim); lse: float32 (tokens, heads), natural, sinks among the scores, -inf for a query
    that sees nothing, whose out is 0. merge_attention takes both. What is read of tables, lengths and cu_seqlens_q is
    checked: bad ones are InvalidArgument. Source: docs/ops.md.
    """
    params = {"is_causal": is_causal, "scale": scale, "kv_layout": kv_layout}
    params |= {"window_size": extents_of(window_size), "softcap": softcap}
    args = (q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, sinks, alibi_slopes, k_scale, v_scale)
    planner = cache_plans.plan_paged_attention_forward
    return perform(Request("paged_attention_forward", args, params, planner, None, backend, timeout_s))


def mla_decode(
    q_nope: ArrayT,
    q_pe: AnyArray,
    ckv_cache: AnyArray,
    kpe_cache: AnyArray,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    *,
    scale: float,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """Multi-head latent attention of one query for each sequence to a paged cache of latent vectors, as DeepSeek's
    models decode, and the log-sum-exp of each row of its scores: (out, lse), new.

    q_nope: (sequences, heads, latent_dim), multiplied by the up-projection of keys already (absorbed); q_pe:
    (sequences, heads, rope_dim), rotated. ckv_cache: (blocks, block_size, latent_dim), normed latent vectors;
    kpe_cache: (blocks, block_size, rope_dim), rotated keys: one row of each a token, which all heads share.
    block_tables, seq_lens: as paged_attention. scale: the model's own, 1/sqrt(nope_dim + rope_dim) of its heads before
    they are absorbed, which no shape tells; with YaRN times the square of its factor.
    out: (sequences, heads, latent_dim), to be multiplied by the up-projection of values; lse: float32 (sequences,
    heads), natural, -inf for a sequence of no keys, whose out is 0. merge_attention takes both. Source: docs/ops.md.
    """
    args, params = (q_nope, q_pe, ckv_cache, kpe_cache, block_tables, seq_lens), {"scale": scale}
    return perform(Request("mla_decode", args, params, cache_plans.plan_mla_decode, None, backend, timeout_s))


def gather_kv(
    k_cache: ArrayT,
    v_cache: AnyArray,
    slots: AnyArray,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    *,
    dtype: str | None = None,
    kv_layout: str = "NHD",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """The keys and values of tokens, out of a paged cache: (key, value), new. The reverse of append_kv.

    k_cache, v_cache, slots and kv_layout as append_kv; key: (tokens, kv_heads, head_dim), value: the same with
    value_dim, of the caches' dtype, any that append_kv takes. A negative slot gives 0; one from blocks * block_size on
    is InvalidArgument on the CPU, and gives 0 on a GPU. With k_scale and v_scale, as append_kv had them, both are times
    those, in dtype: "float32" (default), "bfloat16" or "float16". Source: docs/ops.md.
    """
    params, planner = {"dtype": dtype, "kv_layout": kv_layout}, cache_plans.plan_gather_kv
    args = (k_cache, v_cache, slots, k_scale, v_scale)
    return perform(Request("gather_kv", args, params, planner, None, backend, timeout_s))


def copy_kv_blocks(
    k_cache: AnyArray,
    v_cache: AnyArray,
    sources: AnyArray,
    targets: AnyArray,
    *,
    kv_layout: str = "NHD",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Copy blocks of a paged cache into other blocks of it, in place: block sources[n] into block targets[n].

    k_cache, v_cache and kv_layout as append_kv, of one dtype, any that it takes. sources, targets: int32 or int64 (n),
    one dtype for both. A pair with a negative number copies nothing; of equal targets any source may be there after.
    No target may be the source of another pair: a call that is run again, after a worker's death, must find its
    sources. That, and a number from the number of blocks on, is InvalidArgument on the CPU, before anything is written;
    on a GPU, where nobody waits for the numbers, the first is up to the caller and the second copies nothing.
    Returns None. Source: vLLM's copy_blocks, which beam search and shared prefixes need before they write.
    """
    args, params = (k_cache, v_cache, sources, targets), {"kv_layout": kv_layout}
    planner = cache_plans.plan_copy_kv_blocks
    return perform(Request("copy_kv_blocks", args, params, planner, None, backend, timeout_s))  # type: ignore[return-value]
