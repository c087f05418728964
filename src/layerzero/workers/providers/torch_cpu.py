"""PyTorch on the CPU: every tensor op, all dtypes and strides. The reference that other backends are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers import _torch_activations, _torch_elementwise, _torch_paged
from layerzero.workers.providers._torch_attention import (
    Composed,
    FlashAttention,
    has_options,
    merge,
    sdpa_with_nan,
)
from layerzero.workers.providers._torch_channel_norms import ChannelNorms
from layerzero.workers.providers._torch_experts import Experts
from layerzero.workers.providers._torch_losses import Losses
from layerzero.workers.providers._torch_norms import NormGradients
from layerzero.workers.providers._torch_ops import Builder, Run, TorchOps, as_bits, binder, host_view
from layerzero.workers.providers._torch_quantized import Quantized
from layerzero.workers.providers._torch_sampling import Sampling
from layerzero.workers.providers._torch_vision import Vision


def load() -> Loaded:
    import torch

    torch.set_grad_enabled(False)

    view = host_view(torch)
    flash, sdpa = FlashAttention(torch), sdpa_with_nan(torch)

    def attention(views: Sequence[Any], call: Call) -> Run:
        q, k, v, mask, *_ = views
        queries, keys = q.shape[2], k.shape[2]
        if keys == 0:  # every row is fully masked
            return lambda out: out.zero_()
        if has_options(call):
            return Composed(torch, flash.attend, views, call).attention
        is_causal = call.attrs["is_causal"]
        if is_causal and queries != keys and call.attrs["causal_alignment"] == "bottom_right":
            is_causal = False
            mask = torch.ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
        scale, is_grouped = call.attrs["scale"], q.shape[1] != k.shape[1]
        return lambda out: out.copy_(
            sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
        )

    ops, quantized = TorchOps(torch, sdpa), Quantized(torch, is_gpu=False)

    def paged_attention(views: Sequence[Any], call: Call) -> Run:
        q, k_cache, v_cache, tables, lengths, *_ = views

        def run(out: Any) -> None:
            for b, k, v in _torch_paged.gathered(torch, (k_cache, v_cache), tables, lengths.tolist(), call):
                ops.attend(q[b : b + 1], k, v, out[b : b + 1], False, False, call.attrs["scale"])

        return run

    def append_kv(views: Sequence[Any], call: Call) -> Run:
        key, value, k_cache, _, slots, *_ = views
        blocks, page = k_cache.shape[:2]
        if not slots.numel():
            return lambda caches: None

        def run(caches: Any) -> None:
            wanted = slots.clone()  # the caller can write to its own while they are used
            low, high = (int(bound) for bound in torch.aminmax(wanted))
            if high >= blocks * page:
                raise InvalidArgument(
                    f"append_kv: slot {high} is outside [0, {blocks * page}), the {blocks} blocks of {page} of the "
                    "caches; check slots",
                    slot=high,
                )
            kept = slice(None) if low >= 0 else wanted >= 0
            places = wanted[kept].long()
            where = places // max(page, 1), places % max(page, 1)
            for cache, rows in zip(caches, (key, value), strict=True):
                as_bits(torch, cache)[where] = as_bits(torch, rows)[kept]

        return run

    builders: dict[str, Builder] = {
        "attention": attention,
        "attention_forward": flash.forward,
        "attention_backward": flash.backward,
        "merge_attention": merge(torch),
        "paged_attention": paged_attention,
        "append_kv": append_kv,
        **_torch_paged.builders(torch, flash.attend, append_kv, quantized.rounded, is_gpu=False),
        **ops.builders(),
        **NormGradients(torch, is_gpu=False).builders(),
        **ChannelNorms(torch, is_gpu=False).builders(),
        **Experts(torch, is_gpu=False).builders(),
        **quantized.builders(),
        **Sampling(torch, is_gpu=False).builders(),
        **Vision(torch).builders(),
        **Losses(torch).builders(),
        **_torch_activations.builders(torch),
        **_torch_elementwise.builders(torch),
    }
    return Loaded(
        versions={"torch": torch.__version__, "numpy": version("numpy")},
        kernels={f"torch.{op}": binder(torch, view, build) for op, build in builders.items()},
    )
