"""vLLM's FlashAttention backend, with our kernels where they have all that is asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from layerzero.engines.vllm import attention


class LayerZeroImpl(FlashAttentionImpl):
    """Attention of a layer."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        call = attention.Call(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return attention.forward(self, super().forward, call)


class LayerZeroBackend(FlashAttentionBackend):
    """`--attention-backend LAYERZERO`."""

    @staticmethod
    def get_name() -> str:
        return "LAYERZERO"

    @staticmethod
    def get_impl_cls() -> type[LayerZeroImpl]:
        return LayerZeroImpl
