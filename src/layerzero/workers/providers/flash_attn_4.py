"""flash-attn 4: kernels in NVIDIA's CuTe DSL, compiled at the first call of a kind; causal as bottom_right."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda


def load() -> Loaded:
    import torch
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    gpu = TorchCuda(torch)

    def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal)[0]  # the second is the log-sum-exp

    def varlen(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, is_causal: bool, scale: float) -> Any:
        ends = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        return flash_attn_varlen_func(q, k, v, **ends, softmax_scale=scale, causal=is_causal)[0]

    builders = {"attention": gpu.attention(forward), "attention_varlen": gpu.attention_varlen(varlen)}
    libraries = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
    return Loaded(
        versions={**{name: version(name) for name in libraries}, "torch": torch.__version__},
        kernels=gpu.binds({f"flash-attn-4.{op}": build for op, build in builders.items()}),
        on_stream=gpu.on_stream,
    )
