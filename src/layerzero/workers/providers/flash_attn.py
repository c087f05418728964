"""flash-attn 2: its own kernels for NVIDIA GPUs, causal as bottom_right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_ops import Run, plain_scale, times


def load() -> Loaded:
    import flash_attn
    import torch

    gpu = TorchCuda(torch)

    def attention(views: Sequence[Any], call: Call) -> Run:
        slopes, attrs = views[5], call.attrs
        window = (attrs.get("window_left", -1), attrs.get("window_right", -1))

        def forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
            options: dict[str, Any] = {"window_size": window, "softcap": attrs.get("softcap", 0.0)}
            if slopes is not None:
                options["alibi_slopes"] = (slopes[0] if len(slopes) == 1 else slopes).contiguous()
            return flash_attn.flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal, **options)

        return gpu.attention(forward)(views, call)

    def varlen(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, is_causal: bool, scale: float) -> Any:
        # No sequence is longer than all together. A longest one of 1 would take a path for one query in each.
        longest = max(len(q), 2), max(len(k), 2)
        return flash_attn.flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, *longest, softmax_scale=scale, causal=is_causal
        )

    def paged(views: Sequence[Any], call: Call) -> Run:
        q, k_cache, v_cache, tables, lengths, *_ = views
        blocks, page = k_cache.shape[:2]
        room = tables.shape[1] * page
        if room == 0 or blocks == 0:
            return lambda out: out.zero_()
        inputs = [gpu.aligned(tensor) for tensor in (q, k_cache, v_cache)]
        factor, scale = plain_scale(call.attrs["scale"])

        def run(out: Any) -> None:
            query, k, v = (give() for give in inputs)
            result = flash_attn.flash_attn_with_kvcache(
                times(query, factor).unsqueeze(1),
                k,
                v,
                # The kernel believes both. What leads outside is bent to keys of the caller's: nobody waits for them.
                cache_seqlens=lengths.clamp(0, room),
                block_table=tables.clamp(0, blocks - 1),
                softmax_scale=scale,
            )
            out.copy_(result.squeeze(1))

        return run

    builders = {
        "attention": attention,
        "attention_varlen": gpu.attention_varlen(varlen),
        "paged_attention": paged,
    }
    return Loaded(
        versions={"flash-attn": flash_attn.__version__, "torch": torch.__version__},
        kernels=gpu.binds({f"flash-attn.{op}": build for op, build in builders.items()}),
        on_stream=gpu.on_stream,
    )
