"""Attention of sequences that lie one after the other, or in a paged cache, with its options and the log-sum-exp of its
rows."""

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
    k_cache, v_cache, block_tables, seq_lens, scale and kv_layout as paged_attention. The queries are the last tokens of
    their sequence: with S of them and L = seq_lens[b] keys the place of query i is key i + L - S. is_causal: it sees
    keys up to its place, where append_kv has put its own key before; else all L of them, as a prefix that ends before
    the queries needs it. window_size, softcap and sinks as attention; alibi_slopes: float32 (heads,) or (1 or
    sequences, heads).
    out: (tokens, heads, value_dim); lse: float32 (tokens, heads), natural, sinks among the scores, -inf for a query
    that sees nothing, whose out is 0. merge_attention takes both. What is read of tables, lengths and cu_seqlens_q is
    checked: bad ones are InvalidArgument. Source: docs/ops.md.
    """
    params = {"is_causal": is_causal, "scale": scale, "kv_layout": kv_layout}
    params |= {"window_size": extents_of(window_size), "softcap": softcap}
    args = (q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, sinks, alibi_slopes)
    planner = cache_plans.plan_paged_attention_forward
    return perform(Request("paged_attention_forward", args, params, planner, None, backend, timeout_s))
