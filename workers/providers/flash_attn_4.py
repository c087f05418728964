"""flash-attn 4: kernels in NVIDIA's CuTe DSL, compiled at the first call of a kind; causal as bottom_right."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda


def load() -> Loaded:
    import torch
    from flash_attn.cute import flash_attn_func

    gpu = TorchCuda(torch)

    def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal)[0]  # the second is the log-sum-exp

    libraries = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
    return Loaded(
        versions={**{name: version(name) for name in libraries}, "torch": torch.__version__},
        kernels=gpu.binds({"flash-attn-4.attention": gpu.attention(forward)}),
        on_stream=gpu.on_stream,
    )
