"""Attention as Diffusers asks for it, by its dispatcher or by torch's SDPA: a call of lz.attention where that has all
that is asked for; else Diffusers' native attention, or torch's, computes it. Nothing that is asked for is ignored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from layerzero.diffusers.running import runner
from layerzero.torch import running
from layerzero.torch.running import HandedOver

DISPATCHER = "dispatch_attention_fn"  # who calls, in the report: it does not say for which layer


def dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Tensor:
    """The attention backend: query (B, Sq, Hq, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv) -> (B, Sq, Hq, Dv), in one
    dtype: float16, bfloat16, float32 or float64, on the CPU or a GPU. `attn_mask`: bool (True: attend), or of the dtype
    of query, which is added; (B, Sk), or right-aligned with (B, Hq, Sq, Sk). `others`: of `attention_kwargs`.

    What is not served is handed to Diffusers' native attention, which raises what it raises."""
    try:
        if return_lse:
            raise HandedOver("return_lse")
        if _parallel_config is not None:
            raise HandedOver("context parallelism")
        for name, other in others.items():
            if other is not None:
                raise HandedOver(f"argument {name}")
        mask = attn_mask
        if mask is not None and tuple(mask.shape) == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None, :]
        out = _serve(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, "BSHD")
    except HandedOver as why:
        runner.count(DISPATCHER, "attention", f"handed to native: {why}")
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        found: Tensor = native(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            _parallel_config,
        )
        return found
    runner.count(DISPATCHER, "attention")
    return out


def sdpa(
    layer: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor:
    """torch's SDPA, as a processor calls it for `layer`: query (B, Hq, Sq, D), key (B, Hk, Sk, D), value
    (B, Hk, Sk, Dv) -> (B, Hq, Sq, Dv). Dtypes, devices and masks as above, but for masks (B, Sk).

    What is not served is handed to torch.nn.functional.scaled_dot_product_attention, which raises what it raises."""
    try:
        for name in others:
            raise HandedOver(f"argument {name}")
        out = _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "BHSD")
    except HandedOver as why:
        runner.count(layer, "attention", f"handed to SDPA: {why}")
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, **others
        )
    runner.count(layer, "attention")
    return out


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    layout: str,
) -> Tensor:
    """By lz.attention. Raises HandedOver."""
    if running.IS_DISABLED:
        raise HandedOver("LAYERZERO_DISABLE")
    if dropout:
        raise HandedOver("dropout")
    running.check_attention(query, key, value, mask)
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        raise HandedOver("dtype of mask")
    if mask is not None and causal:
        raise HandedOver("mask and is_causal")
    heads, seq = (2, 1) if layout == "BSHD" else (1, 2)
    is_alike = query.shape[0] == key.shape[0] == value.shape[0] and query.shape[3] == key.shape[3]
    is_alike = is_alike and key.shape[heads] == value.shape[heads] and key.shape[seq] == value.shape[seq]
    if not is_alike or (query.shape[heads] != key.shape[heads] and not enable_gqa):
        raise HandedOver("shapes")
    return runner.call(
        "attention", query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa, layout=layout
    )
