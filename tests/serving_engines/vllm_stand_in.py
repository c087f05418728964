"""Stand-ins for the modules of vLLM 0.33.0 that ours import: its wheel has 336 MB, and its kernels need a GPU.
Arguments and fields are those that vllm.json has from that release's sources, which test_vllm.py compares; attention is
torch's in float64, over the same cache."""

from __future__ import annotations

import dataclasses
import sys
import types
from enum import Enum
from typing import Any

import torch
from tests.serving_engines.flashinfer_kernels import attention
from torch import Tensor

called: list[str] = []


class AttentionBackendEnum(Enum):
    """As vLLM's, members can be added; `paths` has their classes."""

    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    """Raises ValueError for a name that exists."""
    if backend in AttentionBackendEnum.__members__:
        raise ValueError(f"Backend {backend} already exists")
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_ = backend, class_path
    AttentionBackendEnum._member_map_[backend] = member
    AttentionBackendEnum._member_names_.append(backend)


class _Impl:
    """What both have."""

    def _made(self, arguments: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in arguments.items() if name not in ("self", "__class__")})
        window = arguments["sliding_window"]
        self.sliding_window = (-1, -1) if window is None else (window - 1, 0)
        self.logits_soft_cap = arguments["logits_soft_cap"] or 0
        self.dcp_world_size = self.pcp_world_size = 1

    def _forward(self: Any, query: Tensor, kv_cache: Tensor, meta: Any, output: Tensor) -> Tensor:
        called.append(type(self).__bases__[-1].__name__)
        if meta is None:
            return output.fill_(0)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        ends = meta.query_start_loc.unfold(0, 2, 1).tolist()
        for (a, b), row, length in zip(ends, meta.block_table.long(), meta.seq_lens.tolist(), strict=True):
            k, v = (cache[row].flatten(0, 1)[:length] for cache in (keys, values))
            output[a:b] = attention(query[a:b], k, v, self.scale, meta.causal is True, self.logits_soft_cap)[0]
        return output


class FlashAttentionImpl(_Impl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._made(locals())

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
        return self._forward(query, kv_cache, attn_metadata, output)


class TritonAttentionImpl(_Impl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
    ) -> None:
        self._made(locals())

    forward = FlashAttentionImpl.forward


class FlashAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return FlashAttentionImpl


class TritonAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return TritonAttentionImpl


@dataclasses.dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_dcp_context_kv_len: int | None = None
    dcp_context_kv_lens: Tensor | None = None
    num_decode_reqs: int = 0
    num_prefill_reqs: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    scheduler_metadata: Tensor | None = None
    max_num_splits: int = 0
    causal: bool | Tensor = True
    mm_prefix_query_range_tensor: Tensor | None = None
    rswa_prefix_lens: Tensor | None = None
    rswa_window: int | None = None
    rswa_window_tensor: Tensor | None = None


@dataclasses.dataclass
class TritonAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    seq_threshold_3D: int = 1
    num_par_softmax_segments: int = 1
    softmax_segm_output: Tensor = dataclasses.field(default_factory=lambda: torch.empty(1))
    softmax_segm_max: Tensor = dataclasses.field(default_factory=lambda: torch.empty(1))
    softmax_segm_expsum: Tensor = dataclasses.field(default_factory=lambda: torch.empty(1))
    causal: bool | Tensor = True
    scheduler_metadata: Tensor | None = None
    mm_prefix_range: dict[int, Any] | None = None
    mm_prefix_range_tensor: Tensor | None = None
    rswa_prefix_lens: Tensor | None = None
    rswa_window: int | None = None


PLACES = {
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    "vllm.v1.attention.backends.flash_attn": (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata),
    "vllm.v1.attention.backends.triton_attn": (TritonAttentionBackend, TritonAttentionImpl, TritonAttentionMetadata),
}


def put_in() -> None:
    """`import vllm...` finds them, in this process."""
    for name, members in PLACES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(sys.modules[name]).update({member.__name__: member for member in members})
