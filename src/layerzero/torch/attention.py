"""Attention where gradients are wanted: by kernels, and where none serves, in this process, which the report says.

Backward passes come here for tensors that the program has saved itself, so a worker may die between forward and
backward. Formulas are in plain torch, and may be differentiated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.torch.backward import by_kernel, tell

BY_FORMULA = "layerzero.torch.attention"
BY_TORCH = "aten::scaled_dot_product_attention"
LSE_HERE = "the log-sum-exp is computed in this process: no kernel gives it"


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """lz.attention_forward. Where no kernel gives the log-sum-exp, one of attention serves, and it is computed here.
    `options`: is_causal, scale, enable_gqa, layout, causal_alignment, window_size, softcap, mask_block_size. Raises
    what lz.attention raises."""
    pinned: Any = {"backend": backend, "timeout_s": timeout_s}
    of_heads: Any = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    with contextlib.suppress(lz.NoBackend):
        return lz.attention_forward(q, k, v, attn_mask, **of_heads, **options, **pinned)
    out = lz.attention(q, k, v, attn_mask, **of_heads, **options, **pinned)
    mask = of_each(attn_mask, options.get("mask_block_size"), q, k, options.get("layout", "BHSD"))
    scores = scores_of(q, k, mask, alibi_slopes, **_of_scores(options)).total
    if sinks is not None:
        scores = torch.cat((scores, _of_each(sinks, scores)), -1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    served = lz.last_report()
    if served is not None:
        lz.session().note(replace(served, notes=(*served.notes, LSE_HERE)))
    return out, lse.to(torch.float32).reshape(lse.shape[4 - q.dim() :])


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """lz.attention_backward, and where that fails the formula. Raises InvalidArgument."""
    pinned: Any = {**options, "backend": backend, "timeout_s": timeout_s}
    found = by_kernel(
        "attention_backward",
        BY_FORMULA,
        lambda: lz.attention_backward(grad_out, q, k, v, output, lse, attn_mask, **pinned),
    )
    if found is not None:
        return found
    made = gradients(grad_out, q, k, v, attn_mask, ("q", "k", "v"), **options)
    return made["q"], made["k"], made["v"]


def gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    needs: Collection[str],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> dict[str, Tensor]:
    """Those that `needs` names, of q, k, v, attn_mask, sinks and alibi_slopes, each of its tensor's shape, and of
    grad_out's dtype but for slopes, which are float32.

    With p the weights, computed anew: dv = p^T g, ds = p (g v^T - sum(p g v^T)), dq = scale ds k, dk = scale ds^T q; of
    a float mask ds, of a sink -p sum(p g v^T) with its own p, of a slope -ds times the distance. With a soft cap ds
    becomes ds (1 - tanh^2) for q and k. Takes seq_q * seq_k numbers for each head (Dao et al. 2022, B.2, without the
    tiles)."""
    order = (0, 2, 1, 3) if layout == "BSHD" else (0, 1, 2, 3)
    wide = _wide(grad_out.dtype)
    scores = scores_of(q, k, attn_mask, alibi_slopes, is_causal, scale, layout, causal_alignment, window_size, softcap)
    p, p_sink = _weights(scores.total, None if sinks is None else _of_each(sinks, scores.total))
    q4, k4, v4, g = (four(tensor).permute(order).to(wide) for tensor in (q, k, v, grad_out))
    heads_q, heads_k = q4.shape[1], k4.shape[1]
    if heads_q != heads_k:  # heads of a group read the same keys
        k4, v4 = (tensor.repeat_interleave(heads_q // heads_k, 1) for tensor in (k4, v4))
    factor = scale_of(scale, q4.shape[-1])
    dv = torch.matmul(p.mT, g)
    gv = torch.matmul(g, v4.mT)
    mean = (p * gv).sum(-1, keepdim=True)
    ds = p * (gv - mean)
    inner = ds if scores.slope is None else ds * scores.slope
    dq, dk = torch.matmul(inner, k4) * factor, torch.matmul(inner.mT, q4) * factor
    if heads_q != heads_k:
        dk, dv = (tensor.unflatten(1, (heads_k, heads_q // heads_k)).sum(2) for tensor in (dk, dv))
    found = {
        name: value.permute(order).reshape(like.shape).to(grad_out.dtype)
        for name, value, like in (("q", dq, q), ("k", dk, k), ("v", dv, v))
        if name in needs
    }
    if "sinks" in needs and p_sink is not None:
        found["sinks"] = -(p_sink * mean).sum((0, 2, 3)).to(grad_out.dtype)
    if "alibi_slopes" in needs and alibi_slopes is not None:
        made = -(ds * scores.distance.abs()).sum((2, 3))
        found["alibi_slopes"] = made.sum_to_size(alibi_slopes.shape).to(alibi_slopes.dtype)
    if "attn_mask" in needs and attn_mask is not None:
        shape = tuple(attn_mask.shape)
        full = (1,) * (4 - len(shape)) + shape
        found["attn_mask"] = ds.sum_to_size(full).reshape(shape).to(grad_out.dtype)
    return found


def with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: Sequence[int] | None = None,
    **_: Any,
) -> Tensor | None:
    """torch's own attention, with its gradients, where weights are to be dropped: kernels of ours draw no random
    numbers. None for calls without dropout. Raises InvalidArgument for a `dropout_p` that is no probability, and for
    options that torch's has not."""
    if dropout_p == 0.0:
        return None
    if sinks is not None or alibi_slopes is not None or softcap or tuple(window_size) != (-1, -1):
        raise lz.InvalidArgument(
            f"attention: dropout_p is {dropout_p} and there are sinks, alibi_slopes, a softcap or a window; allowed: "
            "0.0 with these; drop it"
        )
    if not 0.0 < dropout_p <= 1.0:
        raise lz.InvalidArgument(f"attention: dropout_p is {dropout_p}; allowed: 0 to 1; pass a probability")
    if not torch.compiler.is_compiling():
        tell("attention", BY_TORCH, "dropout_p above 0: torch's own kernel, in this process")
    attn_mask = of_each(attn_mask, mask_block_size, q, k, layout)
    if layout == "BSHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    rows, columns = q.shape[-2], k.shape[-2]
    shift = columns - rows if causal_alignment == "bottom_right" else 0
    if is_causal and (shift or attn_mask is not None):
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(shift)
        if attn_mask is None:
            attn_mask = seen
        else:
            attn_mask = attn_mask & seen if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~seen, -math.inf)
        is_causal = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2).contiguous() if layout == "BSHD" else out.contiguous()


# --- formulas ----------------------------------------------------------------------------------------------------


def _of_scores(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("enable_gqa", "mask_block_size")}


def of_each(
    mask: Tensor | None, block_size: Sequence[int] | None, q: Tensor, k: Tensor, layout: str = "BHSD"
) -> Tensor | None:
    """A mask of blocks of so many queries and keys as one of queries and keys."""
    if mask is None or block_size is None:
        return mask
    axis = -3 if layout == "BSHD" else -2
    for dim, size, extent in zip((-2, -1), block_size, (q.shape[axis], k.shape[axis]), strict=True):
        if mask.dim() >= -dim and mask.shape[dim] > 1:
            mask = mask.index_select(dim, torch.arange(extent, device=mask.device) // size)
    return mask


class Scores(NamedTuple):
    """`total`: what weights are made of, (batch, heads, seq_q, seq_k) in float32, or in float64 for that. `slope`: of a
    soft cap, its derivative at each score. `distance`: (seq_q, seq_k), how far a key is from a query's place."""

    total: Tensor
    slope: Tensor | None
    distance: Tensor


def scores_of(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
) -> Scores:
    """cap(scale q k^T), with slopes and masked."""
    order = (0, 2, 1, 3) if layout == "BSHD" else (0, 1, 2, 3)
    wide = _wide(q.dtype)
    q, k = (four(tensor).permute(order).to(wide) for tensor in (q, k))
    heads_q, heads_k, seq_q, seq_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if heads_q != heads_k:
        k = k.repeat_interleave(heads_q // heads_k, 1)
    scores, derivative = torch.matmul(q, k.mT) * scale_of(scale, q.shape[-1]), None
    if softcap:
        turned = torch.tanh(scores / softcap)
        scores, derivative = softcap * turned, 1.0 - turned * turned
    offset = seq_k - seq_q if causal_alignment == "bottom_right" else 0
    rows = torch.arange(seq_q, device=q.device).unsqueeze(-1)
    distance = torch.arange(seq_k, device=q.device) - rows - offset
    if slopes is not None:
        scores = (
            scores - (slopes if slopes.dim() == 2 else slopes.unsqueeze(0)).to(wide)[..., None, None] * distance.abs()
        )
    if mask is not None:
        mask = four(mask)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    left, right = window_size
    right = 0 if is_causal else right
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(distance > right, -math.inf)
    return Scores(scores, derivative, distance)


def _of_each(sinks: Tensor, scores: Tensor) -> Tensor:
    """Sinks as one more score of each row."""
    return sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)


def _weights(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """softmax over the last dimension, 0 in rows that see nothing, which softmax has NaN for; and the weight of the
    sink."""
    if scores.shape[-1] == 0:
        return scores, None if sinks is None else torch.ones_like(sinks)
    top = scores.amax(-1, keepdim=True)
    top = top if sinks is None else torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(scores - top)
    sink = None if sinks is None else torch.exp(sinks - top)
    total = p.sum(-1, keepdim=True) if sink is None else p.sum(-1, keepdim=True) + sink
    total = total.masked_fill(total == 0.0, 1.0)
    return p / total, None if sink is None else sink / total


def scale_of(scale: float | None, head_dim: int) -> float:
    """The default is 1/sqrt(head_dim), and 1 without any."""
    if scale is not None:
        return scale
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def four(tensor: Tensor) -> Tensor:
    """With extents of 1 in front, up to 4 dimensions."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
