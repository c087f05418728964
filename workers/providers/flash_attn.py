"""flash-attn 2: its own kernels for NVIDIA GPUs, causal as bottom_right."""

from __future__ import annotations

from typing import Any

from layerzero.workers.provider import Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda


def load() -> Loaded:
    import flash_attn
    import torch

    gpu = TorchCuda(torch)

    def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
        return flash_attn.flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal)

    return Loaded(
        versions={"flash-attn": flash_attn.__version__, "torch": torch.__version__},
        kernels=gpu.binds({"flash-attn.attention": gpu.attention(forward)}),
        on_stream=gpu.on_stream,
    )
