"""Attention with the log-sum-exp of its rows: what its backward pass wants, that pass, and the merge of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.ops import extents_of
from layerzero.client.facade.running import perform
from layerzero.client.planning import attention_plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def attention_forward(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    attn_mask: AnyArray | None = None,
    sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: Sequence[int] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """Softmax attention, and the log-sum-exp of each row of its scores: (out, lse).

    Arguments and out as attention. With s the scores, lse[i] = log(sum_j exp(s[i, j])), natural, float32 of shape
    (batch, heads, seq_q) in either layout, without the leading dimensions that q lacks, the sink among the scores; -inf
    for a row that sees nothing, whose out is 0. Both are new, of the kind of q; attention_backward takes those of calls
    without options, merge_attention those of any.
    Source: Dao et al. 2022, algorithm 1 (there L = m + log l).
    """
    args = (q, k, v, attn_mask, sinks, alibi_slopes)
    params = _params(is_causal, scale, enable_gqa, layout, causal_alignment)
    params |= {"window_size": extents_of(window_size), "softcap": softcap}
    params["mask_block_size"] = None if mask_block_size is None else extents_of(mask_block_size)
    planner = attention_plans.plan_attention_forward
    return perform(Request("attention_forward", args, params, planner, None, backend, timeout_s))


def attention_backward(
    grad_out: ArrayT,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    output: AnyArray,
    lse: AnyArray,
    attn_mask: AnyArray | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT, ArrayT]:
    """The gradients of attention by q, k and v: (grad_q, grad_k, grad_v), of their shapes and of one dtype with them.

    grad_out: the gradient by attention's result, of its shape and dtype. output, lse: what attention_forward gave for
    these q, k, v and attn_mask, which are arguments as there; kernels may compute both anew. With
    p = exp(scale q k^T + mask - lse): grad_v = p^T grad_out, ds = p (grad_out v^T - sum(grad_out output)),
    grad_q = scale ds k, grad_k = scale ds^T q. Rows that see nothing add nothing; heads that share keys are summed.
    Half precision is summed in float32. Source: Dao et al. 2022, B.2.
    """
    args = (grad_out, q, k, v, output, lse, attn_mask)
    params = _params(is_causal, scale, enable_gqa, layout, causal_alignment)
    planner = attention_plans.plan_attention_backward
    return perform(Request("attention_backward", args, params, planner, None, backend, timeout_s))


def merge_attention(
    out0: ArrayT,
    lse0: AnyArray,
    out1: AnyArray,
    lse1: AnyArray,
    out2: AnyArray | None = None,
    lse2: AnyArray | None = None,
    out3: AnyArray | None = None,
    lse3: AnyArray | None = None,
    *,
    layout: str = "BHSD",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any]:
    """Attention to all keys, of two to four results of attention to parts of them: (out, lse), of the kind of out0.

    out0, out1, ...: (..., value_dim) of one shape and float dtype, for the same queries; lse0, lse1, ...: float32, the
    log-sum-exp of their rows (natural logarithm), of the shape of an out without its last dimension, with
    layout="BSHD" (batch, heads, sequence) for outs (batch, sequence, heads, value_dim), as attention_forward gives
    them. What comes out is a part like them, so more are merged by merging again: merge_attention(*a, *b).

    lse = log(sum_p exp(lse_p)), out = sum_p exp(lse_p - lse) out_p, in float32, in float64 for that. A part that sees
    no key, of lse -inf, adds nothing, whatever its out holds; where all are such, out is 0 and lse -inf. A sink belongs
    to one part alone. Source: FlashInfer's cascade attention (Ye et al. 2024), merge_state; flash-decoding (Dao et al.
    2023).
    """
    args = (out0, lse0, out1, lse1, out2, lse2, out3, lse3)
    planner = attention_plans.plan_merge_attention
    return perform(Request("merge_attention", args, {"layout": layout}, planner, None, backend, timeout_s))


def _params(
    is_causal: bool, scale: float | None, enable_gqa: bool, layout: str, causal_alignment: str
) -> dict[str, Any]:
    return {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "layout": layout,
        "causal_alignment": causal_alignment,
    }
