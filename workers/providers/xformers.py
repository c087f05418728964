"""xFormers: memory_efficient_attention, by whichever of its operators takes the call."""

from __future__ import annotations

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

    def attention(views: Sequence[Any], call: Call) -> Run:
        bias = biases[call.attrs["causal_alignment"]]

        def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
            batch, queries, heads, dim = q.shape
            groups = k.shape[2]
            if groups != heads:  # grouped heads are a dimension of their own, in which keys do not move
                q = q.unflatten(2, (groups, heads // groups))
                k, v = (t.unsqueeze(3).expand(-1, -1, -1, heads // groups, -1) for t in (k, v))
            out = ops.memory_efficient_attention_forward(q, k, v, attn_bias=bias if is_causal else None, scale=scale)
            return out.reshape(batch, queries, heads, dim)

        return gpu.attention(forward)(views, call)

    return Loaded(
        versions={"xformers": xformers.__version__, "torch": torch.__version__},
        kernels=gpu.binds({"xformers.attention": attention}),
        on_stream=gpu.on_stream,
    )
