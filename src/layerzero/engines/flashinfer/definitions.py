"""Our solutions of flashinfer's definitions. Each takes all arguments of the call, not only those of the definition:
that leaves epsilon, soft cap, window and others out. What no op of ours has is handed over, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.engines import pages
from layerzero.engines.flashinfer.running import runner
from layerzero.torch.running import DEVICES, DTYPES, HandedOver

Arguments = Mapping[str, Any]

_SCALES = frozenset({"q_scale", "k_scale", "v_scale", "o_scale", "scale_q", "scale_k", "scale_v"})
# What results do not depend on: where they are written, and how they are computed.
_INERT = frozenset({"out", "lse", "enable_pdl", "use_tensor_cores", "use_fp16_qk_reduction", "backend"})
# Those of positions and log-sum-exp, which are said by another argument to have no effect.
_MOOT = frozenset({"rope_scale", "rope_theta", "lse_base", "lse_layout"})


class Kind(NamedTuple):
    """One of flashinfer's APIs. `api`: its name; `written`: the arguments that it writes its result into, where it
    returns none."""

    api: str
    serve: Callable[[Arguments], Sequence[Tensor]]
    written: tuple[str, ...] = ()


def rmsnorm(call: Arguments) -> Sequence[Tensor]:
    x, weight = call["input"], call["weight"]
    _check_arguments(call, "input", "weight", "eps")
    _check(x, weight)
    return (runner.call("rms_norm", x, tuple(weight.shape), weight, call["eps"]),)


def fused_add_rmsnorm(call: Arguments) -> Sequence[Tensor]:
    """The norm is of the sum as it is stored, rounded to the dtype."""
    x, residual, weight = call["input"], call["residual"], call["weight"]
    _check_arguments(call, "input", "residual", "weight", "eps")
    _check(x, residual, weight)
    if x.shape != residual.shape:
        raise HandedOver("shapes")
    total = x + residual
    return runner.call("rms_norm", total, tuple(weight.shape), weight, call["eps"]), total


def silu_and_mul(call: Arguments) -> Sequence[Tensor]:
    x = call["input"]
    _check_arguments(call, "input")
    _check(x)
    gate, up = x.chunk(2, -1)
    if gate.shape != up.shape:
        raise HandedOver("shapes")
    return (runner.call("swiglu", gate, up),)


def rope(call: Arguments) -> Sequence[Tensor]:
    """In float32, as flashinfer computes it, whose tables are of that dtype."""
    tables, positions = call["cos_sin_cache"], call["positions"]
    _check_arguments(call, "positions", "query", "key", "head_size", "cos_sin_cache", "is_neox")
    _check(call["query"], call["key"])
    cos, sin = tables[positions.long()].float().chunk(2, -1)
    made = []
    for x in (call["query"], call["key"]):
        heads = x.float().view(x.shape[0], -1, call["head_size"])
        out = runner.call("rope", heads, cos, sin, interleaved=not call["is_neox"])
        made.append(out.reshape(x.shape).to(x.dtype))
    return made


def single_decode(call: Arguments) -> Sequence[Tensor]:
    _check_arguments(call, "q", "k", "v", "kv_layout", "sm_scale")
    q, (k, v) = call["q"], _heads_last(call, call["kv_layout"])
    return (_attention(q[None], k, v, False, call["sm_scale"])[0],)


def single_prefill(call: Arguments) -> Sequence[Tensor]:
    _check_arguments(call, "q", "k", "v", "kv_layout", "sm_scale", "causal", "o_dtype")
    q, (k, v) = call["q"], _heads_last(call, call["kv_layout"])
    if call["o_dtype"] not in (None, q.dtype):
        raise HandedOver("argument o_dtype")
    return (_attention(q, k, v, call["causal"], call["sm_scale"]),)


def batch_decode(call: Arguments) -> Sequence[Tensor]:
    wrapper, q = call["self"], call["q"]
    _check_arguments(call, "self", "q", "paged_kv_cache")
    k, v = _paged(call["paged_kv_cache"], wrapper)
    _check(q, k, v)
    _check_plan(wrapper, "_window_right", "_user_block_tables")
    indptr = _planned(wrapper, "_paged_kv_indptr_buf")
    if q.shape[0] != indptr.shape[0] - 1:
        raise HandedOver("several queries for each sequence")
    blocks, lengths = _tables(wrapper, indptr, k.shape[1])
    scale = _planned(wrapper, "_sm_scale")
    return (runner.call("paged_attention", q.contiguous(), k, v, blocks, lengths, scale=scale),)


def batch_prefill_paged(call: Arguments) -> Sequence[Tensor]:
    wrapper, q = call["self"], call["q"]
    _check_arguments(call, "self", "q", "paged_kv_cache")
    caches = _paged(call["paged_kv_cache"], wrapper)
    _check(q, *caches)
    _check_plan(wrapper)
    blocks, lengths = _tables(wrapper, _planned(wrapper, "_paged_kv_indptr_buf"), caches[0].shape[1])
    k, v, starts = pages.gathered(*caches, blocks, lengths)
    return (_varlen(wrapper, q, k, v, starts),)


def batch_prefill_ragged(call: Arguments) -> Sequence[Tensor]:
    wrapper, q, k, v = call["self"], call["q"], call["k"], call["v"]
    _check_arguments(call, "self", "q", "k", "v")
    _check(q, k, v)
    _check_plan(wrapper)
    if _planned(wrapper, "_kv_layout") != "NHD":
        raise HandedOver("layout")
    return (_varlen(wrapper, q, k, v, _planned(wrapper, "_kv_indptr_buf")),)


KINDS: dict[str, Kind] = {
    "rmsnorm": Kind("flashinfer.norm.rmsnorm", rmsnorm),
    "fused_add_rmsnorm": Kind("flashinfer.norm.fused_add_rmsnorm", fused_add_rmsnorm, ("input", "residual")),
    "silu_and_mul": Kind("flashinfer.activation.silu_and_mul", silu_and_mul),
    "rope_cos_sin_cache": Kind("flashinfer.rope.apply_rope_with_cos_sin_cache", rope),
    "single_decode": Kind("flashinfer.decode.single_decode_with_kv_cache", single_decode),
    "single_prefill": Kind("flashinfer.prefill.single_prefill_with_kv_cache", single_prefill),
    "gqa_paged_decode": Kind("flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run", batch_decode),
    "gqa_paged_prefill": Kind("flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run", batch_prefill_paged),
    "gqa_ragged": Kind("flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run", batch_prefill_ragged),
}
"""By flashinfer's prefixes of the names of definitions: that of rmsnorm with 4096 columns is rmsnorm_h4096."""


def _check(*tensors: Tensor) -> None:
    """Raises HandedOver for tensors that our ops do not take together."""
    first = tensors[0]
    if first.dtype not in DTYPES or any(tensor.dtype != first.dtype for tensor in tensors):
        raise HandedOver("dtypes")
    if first.device.type not in DEVICES or any(tensor.device != first.device for tensor in tensors):
        raise HandedOver("devices")


def _check_arguments(call: Arguments, *served: str) -> None:
    """Raises HandedOver for what is asked for besides the arguments that are served."""
    for name, value in call.items():
        if name in served or name in _INERT or name in _MOOT or value is None or value is False:
            continue
        is_neutral = (
            (name in _SCALES and isinstance(value, int | float) and value == 1)
            or (name == "window_left" and value == -1)
            or (name == "logits_soft_cap" and value == 0)
            or (name == "pos_encoding_mode" and value == "NONE")
            or (name == "q_len_per_req" and value == 1)
            or (name in ("args", "kwargs") and not value)
        )
        if not is_neutral:
            raise HandedOver(f"argument {name}")


def _planned(wrapper: Any, name: str) -> Any:
    """What plan() has left in a wrapper."""
    try:
        return getattr(wrapper, name)
    except AttributeError:
        raise HandedOver(f"plan without {name}") from None


# What plan() was asked for besides, by the attribute that says so, with the values that mean nothing of it.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "_jit_module": (None,),
    "_pos_encoding_mode": ("NONE",),
    "_window_left": (-1, None),
    "_logits_soft_cap": (0.0, None),
}
_NOTHING_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "_window_right": (-1, None),
    "_user_block_tables": (False,),
    "_custom_mask_buf": (None,),
    "_prefix_len_ptr": (None,),
    "_token_pos_in_items_ptr": (None,),
    "_max_item_len_ptr": (None,),
}


def _check_plan(wrapper: Any, *names: str) -> None:
    """Raises HandedOver for what a plan asks for besides."""
    for name, nothing in _NOTHING.items():
        if _planned(wrapper, name) not in nothing:
            raise HandedOver(f"plan with {name.strip('_')}")
    for name, nothing in _NOTHING_OPTIONAL.items():
        value = getattr(wrapper, name, nothing[0])
        if isinstance(value, Tensor) or value not in nothing:
            raise HandedOver(f"plan with {name.strip('_')}")
    planned, wanted = getattr(wrapper, "_cached_o_data_type", None), getattr(wrapper, "_cached_q_data_type", None)
    if planned is not None and planned != wanted:
        raise HandedOver("plan with o_data_type")


def _paged(cache: Any, wrapper: Any) -> tuple[Tensor, Tensor]:
    """Keys and values as (N, P, Hk, D)."""
    k, v = (cache[:, 0], cache[:, 1]) if isinstance(cache, Tensor) else cache
    if _planned(wrapper, "_kv_layout") == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return k, v


def _tables(wrapper: Any, indptr: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    indices, last = (_planned(wrapper, name) for name in ("_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"))
    return pages.tables(indptr, indices, last, page_size)


def _heads_last(call: Arguments, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values as (S, Hk, D)."""
    k, v = call["k"], call["v"]
    _check(call["q"], k, v)
    return (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Of one sequence: (S, H, D)."""
    is_grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {"layout": "BSHD", "causal_alignment": "bottom_right", "enable_gqa": is_grouped}
    out = runner.call("attention", q[None], k[None], v[None], is_causal=bool(causal), scale=scale, **options)
    return out[0]


def _varlen(wrapper: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    if getattr(wrapper, "_qo_indptr_last", q.shape[0]) != q.shape[0]:
        raise HandedOver("padded queries")
    starts_q = _planned(wrapper, "_qo_indptr_buf").to(q.device, torch.int32)
    causal, scale = bool(_planned(wrapper, "_causal")), _planned(wrapper, "_sm_scale")
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "causal_alignment": "bottom_right"}
    return runner.call("attention_varlen", q, k, v, starts_q, starts.to(q.device, torch.int32), **options)
