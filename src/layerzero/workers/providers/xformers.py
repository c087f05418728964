"""xFormers: memory_efficient_attention, by whichever of its operators takes the call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_ops import Run


def load() -> Loaded:
    import torch
    import xformers
    from xformers import _cpp_lib, ops
    from xformers.ops import fmha

    # It warns and goes on without its extension, which needs CUDA 12's runtime beside a torch for CUDA 13.
    if _cpp_lib._cpp_library_load_exception is not None:
        raise RuntimeError("the extension of xformers did not load") from _cpp_lib._cpp_library_load_exception
    gpu = TorchCuda(torch)
    biases = {
        "top_left": fmha.attn_bias.LowerTriangularMask(),
        "bottom_right": fmha.attn_bias.LowerTriangularFromBottomRightMask(),
    }

    blocks = {
        "top_left": fmha.attn_bias.BlockDiagonalCausalMask,
        "bottom_right": fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask,
    }

    def grouped(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """(batch, tokens, heads, head_dim); grouped heads are a dimension of their own, in which keys do not move."""
        heads, groups = q.shape[2], k.shape[2]
        if groups == heads:
            return q, k, v
        shared = (t.unsqueeze(3).expand(-1, -1, -1, heads // groups, -1) for t in (k, v))
        return q.unflatten(2, (groups, heads // groups)), *shared

    def varlen(q: Any, k: Any, v: Any, ends_q: list[int], ends_k: list[int], call: Call, scale: float) -> Any:
        rule = blocks[call.attrs["causal_alignment"]] if call.attrs["is_causal"] else fmha.attn_bias.BlockDiagonalMask
        counts_q, counts_k = ([high - low for low, high in itertools.pairwise(ends)] for ends in (ends_q, ends_k))
        if rule is blocks["top_left"] and any(map(int.__lt__, counts_q, counts_k)):
            # Keys that no query sees are left out: it lets a lone query of grouped heads see them all.
            seen = list(map(min, counts_q, counts_k))
            rows = [row for low, count in zip(ends_k, seen, strict=False) for row in range(low, low + count)]
            places = torch.tensor(rows, device=q.device)
            k, v, counts_k = k[places], v[places], seen
        bias = rule.from_seqlens(counts_q, counts_k, device=q.device)
        packed = grouped(*(tensor.unsqueeze(0) for tensor in (q, k, v)))
        return ops.memory_efficient_attention_forward(*packed, attn_bias=bias, scale=scale).reshape(q.shape)

    def attention(views: Sequence[Any], call: Call) -> Run:
        bias = biases[call.attrs["causal_alignment"]]

        def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
            shape = q.shape
            q, k, v = grouped(q, k, v)
            out = ops.memory_efficient_attention_forward(q, k, v, attn_bias=bias if is_causal else None, scale=scale)
            return out.reshape(shape)

        return gpu.attention(forward)(views, call)

    return Loaded(
        versions={"xformers": xformers.__version__, "torch": torch.__version__},
        kernels=gpu.binds(
            {
                "xformers.attention": attention,
                "xformers.attention_varlen": gpu.attention_varlen_on_host(varlen, lambda dim: dim),
            }
        ),
        on_stream=gpu.on_stream,
    )
