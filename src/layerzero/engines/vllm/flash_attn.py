"""vLLM's FlashAttention backend, with our kernels where they have all that is asked for."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from layerzero.engines.vllm.attention import ServedAttention


class LayerZeroImpl(ServedAttention, FlashAttentionImpl):
    """Attention of a layer."""


class LayerZeroBackend(FlashAttentionBackend):
    """`--attention-backend LAYERZERO`."""

    @staticmethod
    def get_name() -> str:
        return "LAYERZERO"

    @staticmethod
    def get_impl_cls() -> type[LayerZeroImpl]:
        return LayerZeroImpl
