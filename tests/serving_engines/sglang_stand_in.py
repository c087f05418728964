"""Stand-ins for the modules of SGLang 0.5.23 that ours import: it comes with another torch, and its kernels need a GPU.
Arguments and fields are those that sglang.json has from that release's sources, which test_sglang.py compares;
attention is torch's in float64, over the same pool."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import Any

import torch
from tests.serving_engines.flashinfer_kernels import attention
from torch import Tensor

called: list[str] = []

ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES = ["triton", "torch_native", "flashinfer"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend


def register_attention_backend(name: str) -> Any:
    return lambda made: ATTENTION_BACKENDS.setdefault(name, made)


@dataclasses.dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical=forward_batch.out_cache_loc_is_physical)


class MHATokenToKVPool:
    """Of one layer."""

    requires_physical_write_loc = False

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.buffers = (k, v)
        self.dtype = self.store_dtype = k.dtype

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.buffers

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Tensor | None = None,
    ) -> None:
        self.buffers[0][loc_info.loc], self.buffers[1][loc_info.loc] = cache_k, cache_v


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 6

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
        use_prefill_attention_wrapper: bool = True,
    ) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.qk_head_dim = num_heads, num_kv_heads, head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.logit_cap, self.use_irope = scaling, layer_id, logit_cap, use_irope
        self.sliding_window_size, self.is_cross_attention = sliding_window_size or -1, is_cross_attention
        self.attn_type, self.pos_encoding_mode = attn_type, pos_encoding_mode
        self.k_scale = self.v_scale = None
        self.xai_temperature_len = -1


class TorchNativeAttnBackend:
    def __init__(self, model_runner: Any) -> None:
        self.pool, self.requests = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, [1] * len(forward_batch.seq_lens))

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        queries = forward_batch.extend_seq_lens_cpu
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, queries)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, saves: bool, queries: list[int]
    ) -> Tensor:
        called.append("TorchNativeAttnBackend")
        if saves:
            self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        rows = self.requests[batch.req_pool_indices]
        parts = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(queries)
        made = [
            attention(part, keys[row[:length]], values[row[:length]], layer.scaling, True, layer.logit_cap)[0]
            for part, row, length in zip(parts, rows, batch.seq_lens.tolist(), strict=True)
        ]
        return torch.cat(made).flatten(1)


class TritonAttnBackend(TorchNativeAttnBackend):
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Tensor:
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Tensor:
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)


class FlashInferAttnBackend(TorchNativeAttnBackend):
    pass


WRAPPED = {"triton": TritonAttnBackend, "flashinfer": FlashInferAttnBackend, "torch_native": TorchNativeAttnBackend}
PLACES: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": ATTENTION_BACKEND_CHOICES,
        "add_attention_backend_choices": add_attention_backend_choices,
    },
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc, "MHATokenToKVPool": MHATokenToKVPool},
}


def put_in() -> None:
    """`import sglang...` finds them, in this process."""
    ATTENTION_BACKENDS.update(WRAPPED)
    for name, members in PLACES.items():
        parent = None
        for part in name.split("."):
            path = f"{parent.__name__}.{part}" if parent else part
            module = sys.modules.setdefault(path, types.ModuleType(path))
            if parent:
                setattr(parent, part, module)
            parent = module
        vars(sys.modules[name]).update(members)
