"""Attention of one of vLLM's layers, over its paged cache: a call of lz.paged_attention for a step of decoding, else of
lz.attention_varlen with the keys gathered from their blocks. What they do not have is handed to the wrapped backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from layerzero.engines import pages
from layerzero.engines.plugins import of_environment
from layerzero.engines.vllm.running import runner
from layerzero.torch import running
from layerzero.torch.running import DEVICES, DTYPES, HandedOver

# What a layer was made with, by the attribute that says so, with the values that mean nothing of it.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "attn_type": ("decoder",),
    "alibi_slopes": (None,),
    "sliding_window": ((-1, -1),),
    "logits_soft_cap": (0, None),
    "sinks": (None,),
}
_NOTHING_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "chunk_lookback": (-1,),
    "dcp_world_size": (1,),
    "pcp_world_size": (1,),
}
# Of a batch: what is used, and how the wrapped backend's kernels are to run. Others must not be set.
_USED = frozenset(
    {"num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc", "seq_lens", "block_table", "causal"}
)
_INERT = frozenset(
    {
        "slot_mapping",
        "scheduler_metadata",
        "max_num_splits",
        "num_decode_reqs",
        "num_prefill_reqs",
        "num_decode_tokens",
        "num_prefill_tokens",
        "seq_threshold_3D",
        "num_par_softmax_segments",
        "softmax_segm_output",
        "softmax_segm_max",
        "softmax_segm_expsum",
    }
)


class Call(NamedTuple):
    """Arguments of AttentionImpl.forward, in its order. `kv_cache`: (N, Hk, P, 2 D), keys before values; `output`:
    (tokens, Hq, D), written in place."""

    layer: Any
    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    attn_metadata: Any
    output: Tensor
    output_scale: Tensor | None
    output_block_scale: Tensor | None


class ServedAttention:
    """Before a backend's AttentionImpl among the bases of a class: its forward is the one that is wrapped."""

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
        """`output`, filled."""
        call = Call(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        return forward(self, super().forward, call)  # type: ignore[misc]  # of the class behind it


_guard = of_environment(runner)


def forward(impl: Any, wrapped: Callable[..., Tensor], call: Call) -> Tensor:
    """`call.output`, filled for the batch's tokens by ours, or by the wrapped backend's forward."""

    def theirs() -> Tensor:
        return wrapped(*call)

    if call.attn_metadata is None:  # a run that measures memory
        return theirs()
    size = (call.attn_metadata.num_actual_tokens, impl.num_heads, impl.head_size)

    def used(found: Sequence[Tensor]) -> Tensor:
        call.output[: size[0]].copy_(found[0].view(call.output[: size[0]].shape))
        return call.output

    def made(output: Tensor) -> Sequence[Tensor]:
        return (output[: size[0]].reshape(size),)

    return _guard().run(call.layer, "attention", lambda: (_serve(impl, call).reshape(size),), theirs, used, made)


def _serve(impl: Any, call: Call) -> Tensor:
    """By our ops. Raises HandedOver."""
    meta = call.attn_metadata
    query = call.query[: meta.num_actual_tokens].view(meta.num_actual_tokens, impl.num_heads, impl.head_size)
    _check(impl, call, query)
    keys, values = call.kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    lengths, blocks = meta.seq_lens.int(), meta.block_table.int()
    if meta.max_query_len == 1 and query.shape[0] == lengths.shape[0]:
        return runner.call("paged_attention", query, keys, values, blocks, lengths, scale=impl.scale)
    width = -(-meta.max_seq_len // keys.shape[1])
    k, v, starts = pages.gathered(keys, values, blocks[:, :width], lengths)
    options: dict[str, Any] = {"is_causal": meta.causal, "scale": impl.scale, "causal_alignment": "bottom_right"}
    return runner.call("attention_varlen", query, k, v, meta.query_start_loc.int(), starts, **options)


def _check(impl: Any, call: Call, query: Tensor) -> None:
    """Raises HandedOver for what a layer, a batch or a cache has besides."""
    if running.IS_DISABLED:
        raise HandedOver("LAYERZERO_DISABLE")
    if call.output_scale is not None or call.output_block_scale is not None:
        raise HandedOver("output scales")
    for name, nothing in _NOTHING.items():
        if getattr(impl, name) not in nothing:
            raise HandedOver(name)
    for name, nothing in _NOTHING_OPTIONAL.items():
        if getattr(impl, name, nothing[0]) not in nothing:
            raise HandedOver(name)
    meta = call.attn_metadata
    for name in (field.name for field in dataclasses.fields(meta) if field.name not in _USED | _INERT):
        value = getattr(meta, name)
        if value is not None and value is not False:
            raise HandedOver(f"metadata {name}")
    if not isinstance(meta.causal, bool):
        raise HandedOver("causal for each sequence")
    cache = call.kv_cache
    if query.dtype not in DTYPES or not query.dtype == cache.dtype == call.output.dtype:
        raise HandedOver("dtypes")
    if query.device.type not in DEVICES or cache.device != query.device:
        raise HandedOver("devices")
    if cache.dim() != 4 or cache.shape[1] != impl.num_kv_heads or cache.shape[3] != 2 * impl.head_size:
        raise HandedOver("layout of the cache")
    pages.check_not_captured(query)
