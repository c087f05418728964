"""Attention of one of SGLang's layers, over its pool of keys and values: a call of lz.paged_attention for a step of
decoding, of lz.attention_varlen for prompts. What they do not have is handed to the wrapped backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from layerzero.engines import pages
from layerzero.engines.plugins import of_environment
from layerzero.engines.sglang.running import runner
from layerzero.torch import running
from layerzero.torch.running import DEVICES, DTYPES, HandedOver

# What a layer or a batch has besides, by the attribute that says so, with the values that mean nothing of it.
_LAYER: dict[str, tuple[Any, ...]] = {
    "is_cross_attention": (False,),
    "sliding_window_size": (-1, None),
    "logit_cap": (0.0, None),
    "pos_encoding_mode": ("NONE",),
    "use_irope": (False,),
    "k_scale": (None,),
    "v_scale": (None,),
    "xai_temperature_len": (-1, 0, None),
}
_BATCH: dict[str, tuple[Any, ...]] = {
    "encoder_lens": (None,),
    "spec_info": (None,),
    "multi_item_delimiter_indices": (None,),
}
_BATCH_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "mha_one_shot": (None, False),
    "mha_return_lse": (None, False),
    "attn_attend_prefix_cache": (None, False),
    "_attn_output": (None,),
}
_BACKEND_OPTIONAL: dict[str, tuple[Any, ...]] = {"dcp_size": (1,), "allow_bidirectional_attention_in_extend": (False,)}
_EXTENDS = ("EXTEND", "MIXED")  # others are of speculation and of diffusion


class Pools(NamedTuple):
    """Where keys and values are: `req_to_token` has a row of slots for each request."""

    kv: Any
    req_to_token: Tensor


class Call(NamedTuple):
    """Arguments of AttentionBackend.forward_decode and forward_extend, in their order. q: (tokens, Hq * D)."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    layer: Any
    batch: Any
    save_kv_cache: bool


_guard = of_environment(runner)


def creator(backends: Mapping[str, Callable[[Any], Any]], name: str) -> Callable[[Any], Any]:
    """What SGLang calls with its model runner: a backend of that name, whose attention is ours."""

    def create(model_runner: Any) -> Any:
        backend = backends[name](model_runner)
        if model_runner.use_mla_backend:
            runner.log.warning("attention is computed by SGLang: the model has latent attention (MLA)")
            return backend
        pools = Pools(model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token)
        wrapped: Any = type(backend)
        backend.__class__ = _wrapper(wrapped)
        backend.layerzero_pools = pools
        return backend

    return create


@functools.cache
def _wrapper(cls: Any) -> Any:
    """A subclass of one of SGLang's backends, whose attention is ours where that has all that is asked for."""

    def forward_decode(
        self: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        call = Call(q, k, v, layer, forward_batch, save_kv_cache)
        return _forward(self, functools.partial(cls.forward_decode, self), _decode, call, others)

    def forward_extend(
        self: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        call = Call(q, k, v, layer, forward_batch, save_kv_cache)
        return _forward(self, functools.partial(cls.forward_extend, self), _extend, call, others)

    members = {"forward_decode": forward_decode, "forward_extend": forward_extend, "__module__": __name__}
    made = type(f"LayerZero{cls.__name__}", (cls,), members)
    made.__doc__ = f"{cls.__name__} of SGLang, its attention served by LayerZero."
    return made


def _forward(
    backend: Any,
    wrapped: Callable[..., Tensor],
    serve: Callable[[Pools, Call], Tensor],
    call: Call,
    others: dict[str, Any],
) -> Tensor:
    def ours() -> Sequence[Tensor]:
        _check(backend, call, others)
        return (serve(backend.layerzero_pools, call).reshape(call.q.shape[0], -1),)

    def made(output: Tensor) -> Sequence[Tensor]:
        return (output.reshape(call.q.shape[0], -1),)

    return _guard().run(call.layer, "attention", ours, lambda: wrapped(*call, **others), lambda found: found[0], made)


def _decode(pools: Pools, call: Call) -> Tensor:
    batch = call.batch
    if not batch.forward_mode.is_decode() or call.q.shape[0] != batch.seq_lens.shape[0]:
        raise HandedOver("several queries for each sequence")
    q, keys, values = _stored(pools, call)
    blocks = _slots(pools, batch)
    return runner.call("paged_attention", q, keys, values, blocks, batch.seq_lens.int(), scale=call.layer.scaling)


def _extend(pools: Pools, call: Call) -> Tensor:
    batch = call.batch
    if batch.forward_mode.name not in _EXTENDS:
        raise HandedOver(f"mode {batch.forward_mode.name}")
    if batch.extend_seq_lens_cpu is None or sum(batch.extend_seq_lens_cpu) != call.q.shape[0]:
        raise HandedOver("padded queries")
    q, keys, values = _stored(pools, call)
    k, v, starts = pages.gathered(keys, values, _slots(pools, batch), batch.seq_lens)
    options: dict[str, Any] = {"is_causal": True, "scale": call.layer.scaling, "causal_alignment": "bottom_right"}
    return runner.call("attention_varlen", q, k, v, pages.starts(batch.extend_seq_lens), starts, **options)


def _stored(pools: Pools, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (tokens, Hq, D), and all keys and values as blocks of one slot: (slots, 1, Hk, D). Those of this call are
    put where they belong first; the wrapped backend, where it has to, puts the same there again."""
    layer = call.layer
    keys, values = pools.kv.get_kv_buffer(layer.layer_id)
    shape = (layer.tp_k_head_num, layer.qk_head_dim)
    if keys.shape[1:] != shape or values.shape[1:] != (shape[0], layer.v_head_dim):
        raise HandedOver("layout of the pool")
    if call.save_kv_cache:
        pools.kv.set_kv_buffer(layer, KVWriteLoc.for_batch(call.batch), call.k, call.v)
    return call.q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys.unsqueeze(1), values.unsqueeze(1)


def _slots(pools: Pools, batch: Any) -> Tensor:
    """The slots of each sequence, int32 (sequences, longest)."""
    lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
    return pools.req_to_token[batch.req_pool_indices, : int(lengths.max())].int()


def _check(backend: Any, call: Call, others: dict[str, Any]) -> None:
    """Raises HandedOver for what a layer, a batch or a pool has besides."""
    if running.IS_DISABLED:
        raise HandedOver("LAYERZERO_DISABLE")
    for name, value in others.items():
        if value is not None and value is not False:
            raise HandedOver(f"argument {name}")
    layer, batch, pool = call.layer, call.batch, backend.layerzero_pools.kv
    for owner, required in ((layer, _LAYER), (batch, _BATCH)):
        for name, nothing in required.items():
            if getattr(owner, name) not in nothing:
                raise HandedOver(name)
    for owner, optional in ((batch, _BATCH_OPTIONAL), (backend, _BACKEND_OPTIONAL)):
        for name, nothing in optional.items():
            if getattr(owner, name, nothing[0]) not in nothing:
                raise HandedOver(name.strip("_"))
    if layer.attn_type.value != "decoder":
        raise HandedOver("attn_type")
    if type(pool) is not MHATokenToKVPool or pool.requires_physical_write_loc:
        raise HandedOver(f"pool {type(pool).__name__}")
    if call.k is None or call.v is None:
        raise HandedOver("no new keys")
    q, k, v = call.q, call.k, call.v
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype == pool.dtype == pool.store_dtype:
        raise HandedOver("dtypes")
    if q.device.type not in DEVICES:
        raise HandedOver("devices")
    if q.dim() != 2:
        raise HandedOver("shape of queries")
    pages.check_not_captured(q)
