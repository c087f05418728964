"""xFormers' memory_efficient_attention as calls of LayerZero, for its own tests: forward, without dropout.

Its `op=` names one of its operators, of which the test takes its tolerances; who serves is LayerZero's choice. Tests of
operators for other processors are theirs to skip. Dropout, and masks that no op of ours has, are no such option.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from upstream_common import Calls, unserved
from xformers import ops
from xformers.ops import fmha

calls = Calls()
TESTS = {"tests/test_mem_eff_attention.py": ("test_forward", "test_logsumexp", "test_logsumexp_mqa")}
OPS = ("attention", "attention_forward", "attention_varlen", "attention_varlen_forward")
DTYPES = ("float16", "bfloat16", "float32")
bias = fmha.attn_bias
LOCAL = {bias.LocalAttentionFromBottomRightMask, bias.LowerTriangularFromBottomRightLocalAttentionMask}


def four(tensor: Tensor) -> Tensor:
    """(B, M, H, K) of whichever layout; grouped heads are one dimension."""
    if tensor.ndim == 3:
        return tensor[:, :, None]
    return tensor.flatten(2, 3) if tensor.ndim == 5 else tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: Any = None, **options: Any
) -> Tensor:
    if p:
        unserved("dropout")
    if options.get("output_dtype") not in (None, query.dtype):
        unserved("results of another dtype")
    q, k, v = (four(tensor) for tensor in (query, key, value))
    made, _ = attention(q, k, v, attn_bias, scale, needs_lse=False)
    return made.reshape(*query.shape[:-1], value.shape[-1])


def forward_requires_grad(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    if p:
        unserved("dropout")
    q, k, v = (four(tensor) for tensor in (query, key, value))
    made, lse = attention(q, k, v, attn_bias, scale, needs_lse=True)
    assert lse is not None
    op = options.get("op")
    if isinstance(attn_bias, bias.VARLEN_BIASES) and op is not None and not op.VARLEN_LSE_PACKED:
        unserved("the log-sum-exp of sequences, padded")
    return made.reshape(*query.shape[:-1], value.shape[-1]), lse


def attention(
    q: Tensor, k: Tensor, v: Tensor, given: Any, scale: float | None, *, needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(B, M, H, K); the log-sum-exp (B, H, M)."""
    kind = type(given)
    options: dict[str, Any] = {"scale": scale}
    if kind in (bias.BlockDiagonalMask, bias.BlockDiagonalCausalMask, bias.BlockDiagonalCausalFromBottomRightMask):
        options["is_causal"] = kind is not bias.BlockDiagonalMask
        is_right = kind is bias.BlockDiagonalCausalFromBottomRightMask
        options["causal_alignment"] = "bottom_right" if is_right else "top_left"
        starts = (info.seqstart.to(q.device, torch.int32) for info in (given.q_seqinfo, given.k_seqinfo))
        tensors = (q[0], k[0], v[0], *starts)
        if not needs_lse:
            return calls("attention_varlen", *tensors, **options)[None], None
        made, lse = calls("attention_varlen_forward", *tensors, **options)
        return made[None], lse.T[None]
    if given is None:
        pass
    elif kind is bias.LowerTriangularMask:
        options["is_causal"] = True
    elif kind is bias.LowerTriangularFromBottomRightMask:
        options |= {"is_causal": True, "causal_alignment": "bottom_right"}
    elif kind in LOCAL:
        is_causal = kind is bias.LowerTriangularFromBottomRightLocalAttentionMask
        window = (given._window_size - 1, 0) if is_causal else (given.window_left, given.window_right)
        options |= {"window_size": window, "causal_alignment": "bottom_right"}
    elif isinstance(given, Tensor):
        mask = given if given.ndim == 4 else given[:, None]
        options["attn_mask"] = mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    else:
        unserved(kind.__name__)
    layout = {"layout": "BSHD"}
    if not needs_lse:
        return calls("attention", q, k, v, **options, **layout), None
    made, lse = calls("attention_forward", q, k, v, **options, **layout)
    return made, lse


def patch() -> None:
    for module in (ops, fmha):
        module.memory_efficient_attention_forward = forward
        module.memory_efficient_attention_forward_requires_grad = forward_requires_grad
