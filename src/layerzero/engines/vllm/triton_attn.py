"""vLLM's Triton backend, with our kernels where they have all that is asked for."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from layerzero.engines.vllm.attention import ServedAttention


class LayerZeroTritonImpl(ServedAttention, TritonAttentionImpl):
    """Attention of a layer."""


class LayerZeroTritonBackend(TritonAttentionBackend):
    """`--attention-backend TRITON_LAYERZERO`."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_LAYERZERO"

    @staticmethod
    def get_impl_cls() -> type[LayerZeroTritonImpl]:
        return LayerZeroTritonImpl
