"""flashinfer's functions with torch's arithmetic in float64 in the place of its CUDA kernels, and with flashinfer's own
signatures and traces: what trace_apply wraps, where there is no GPU. Each tells `called` its name.

plan() leaves the attributes that flashinfer 0.7.2's leaves (flashinfer/decode.py and prefill.py, which
test_flashinfer.py holds against the names here)."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
from torch import Tensor

called: list[str] = []


def rmsnorm(input: Tensor, weight: Tensor, eps: float, out: Tensor | None, **_: Any) -> Tensor:
    called.append("rmsnorm")
    made = _normed(input, weight, eps).to(input.dtype)
    return made if out is None else out.copy_(made)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float, **_: Any) -> None:
    called.append("fused_add_rmsnorm")
    total = input.double() + residual.double()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def silu_and_mul(input: Tensor, out: Tensor | None, **_: Any) -> Tensor:
    called.append("silu_and_mul")
    gate, up = input.double().chunk(2, -1)
    made = (torch.nn.functional.silu(gate) * up).to(input.dtype)
    return made if out is None else out.copy_(made)


def rope(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    called.append("rope_cos_sin_cache")
    cos, sin = cos_sin_cache.double()[positions.long()].unsqueeze(1).chunk(2, -1)
    size = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        heads = x.double().view(x.shape[0], -1, head_size).clone()
        a, b = (slice(0, size), slice(size, 2 * size)) if is_neox else (slice(0, 2 * size, 2), slice(1, 2 * size, 2))
        first, second = heads[..., a].clone(), heads[..., b].clone()
        heads[..., a], heads[..., b] = first * cos - second * sin, second * cos + first * sin
        return heads.view(x.shape).to(x.dtype)

    return turned(query), turned(key)


def single_decode(q: Tensor, k: Tensor, v: Tensor, kv_layout: str, **rest: Any) -> Any:
    called.append("single_decode")
    k, v = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    out, lse = attention(q[None], k, v, rest.get("sm_scale"), False, rest.get("logits_soft_cap") or 0)
    return (out[0], lse[0]) if rest.get("return_lse") else out[0]


def single_prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool, kv_layout: str, **rest: Any) -> Any:
    called.append("single_prefill")
    k, v = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    out, lse = attention(q, k, v, rest.get("sm_scale"), causal, rest.get("logits_soft_cap") or 0)
    return (out, lse) if rest.get("return_lse") else out


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Of one sequence, (S, H, D), causal from the bottom right; and log-sum-exp of base 2, as flashinfer gives it."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * (scale or 1 / math.sqrt(q.shape[-1]))
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if causal:
        rows = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0]) > rows, -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), values)
    return out.to(q.dtype), (scores.logsumexp(-1) / math.log(2)).T.float()


def plan(self: Any, **planned: Any) -> None:
    """The attributes that any wrapper's plan() leaves, those named in `planned` with other values."""
    usual = {
        "_pos_encoding_mode": "NONE",
        "_window_left": -1,
        "_logits_soft_cap": None,
        "_sm_scale": None,
        "_causal": False,
        "_custom_mask_buf": None,
        "_cached_q_data_type": torch.float32,
        "_cached_o_data_type": None,
    }
    for name, value in (usual | {f"_{name}": value for name, value in planned.items()}).items():
        setattr(self, name, value)


def wrapper(cls: type, kv_layout: str = "NHD", **planned: Any) -> Any:
    """One that is planned, without workspace buffers, which are CUDA's."""
    made = object.__new__(cls)
    made._kv_layout, made._jit_module = kv_layout, None
    plan(made, **planned)
    return made


def batch_decode(self: Any, q: Tensor, paged_kv_cache: Any, **kwargs: Any) -> Any:
    called.append("gqa_paged_decode")
    starts = torch.arange(q.shape[0] + 1)
    return _of_sequences(self, q, *_pages(self, paged_kv_cache), starts, True, kwargs)


def batch_prefill_paged(self: Any, q: Tensor, paged_kv_cache: Any, **kwargs: Any) -> Any:
    called.append("gqa_paged_prefill")
    return _of_sequences(self, q, *_pages(self, paged_kv_cache), self._qo_indptr_buf, self._causal, kwargs)


def batch_prefill_ragged(self: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    called.append("gqa_ragged")
    parts = [slice(a, b) for a, b in self._kv_indptr_buf.unfold(0, 2, 1).tolist()]
    keys, values = [k[part] for part in parts], [v[part] for part in parts]
    return _of_sequences(self, q, keys, values, self._qo_indptr_buf, self._causal, kwargs)


def _pages(self: Any, cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each sequence."""
    both = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 1])
    made: tuple[list[Tensor], list[Tensor]] = ([], [])
    for one, found in zip(both, made, strict=True):
        pages = one if self._kv_layout == "NHD" else one.transpose(1, 2)
        for b, (start, stop) in enumerate(self._paged_kv_indptr_buf.unfold(0, 2, 1).tolist()):
            keys = pages[self._paged_kv_indices_buf[start:stop].long()].flatten(0, 1)
            length = (
                (stop - start - 1) * pages.shape[1] + int(self._paged_kv_last_page_len_buf[b]) if stop > start else 0
            )
            found.append(keys[:length])
    return made


def _of_sequences(
    self: Any, q: Tensor, keys: list[Tensor], values: list[Tensor], starts: Tensor, causal: bool, kwargs: dict[str, Any]
) -> Any:
    ends = starts.unfold(0, 2, 1).tolist()
    made = [
        attention(q[a:b], k, v, self._sm_scale, causal, self._logits_soft_cap or 0.0)
        for (a, b), k, v in zip(ends, keys, values, strict=True)
    ]
    out, lse = (torch.cat(parts) for parts in zip(*made, strict=True))
    if kwargs.get("out") is not None:
        out = kwargs["out"].copy_(out)
    return (out, lse) if kwargs.get("return_lse") else out


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


IN_PLACE_OF = {
    "flashinfer.norm.rmsnorm": rmsnorm,
    "flashinfer.norm.fused_add_rmsnorm": fused_add_rmsnorm,
    "flashinfer.activation.silu_and_mul": silu_and_mul,
    "flashinfer.rope.apply_rope_with_cos_sin_cache": rope,
    "flashinfer.decode.single_decode_with_kv_cache": single_decode,
    "flashinfer.prefill.single_prefill_with_kv_cache": single_prefill,
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run": batch_decode,
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run": batch_prefill_paged,
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run": batch_prefill_ragged,
}


def replace(monkeypatch: Any) -> None:
    """All of them, wherever flashinfer has them, until the end of the test."""
    called.clear()
    # torch without CUDA has none, and trace_apply asks for it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for api, kernel in IN_PLACE_OF.items():
        parts = api.split(".")
        owner: Any = importlib.import_module(".".join(parts[:2]))
        for part in parts[2:-1]:
            owner = getattr(owner, part)
        real = getattr(owner, parts[-1])
        made = functools.wraps(real)(_bound(real, kernel))
        monkeypatch.setattr(owner, parts[-1], made)
        if hasattr(flashinfer, parts[-1]):
            monkeypatch.setattr(flashinfer, parts[-1], made)


def _bound(real: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Called as the real one is, a kernel gets all arguments by their names."""
    signature = inspect.signature(real)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return kernel(**bound.arguments)

    return run
