"""PyTorch on an NVIDIA GPU: every tensor op, and attention as four kernels, one for each of its implementations.

Limits of the fused ones: torch's sdp_utils.cpp and the LayerZero spec, 12.2.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.errors import BackendError
from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers import _torch_activations, _torch_elementwise, _torch_paged
from layerzero.workers.providers._torch_attention import Composed, merge
from layerzero.workers.providers._torch_channel_norms import ChannelNorms
from layerzero.workers.providers._torch_cuda import TorchCuda, is_aligned
from layerzero.workers.providers._torch_cuda_gradients import Gradients
from layerzero.workers.providers._torch_experts import Experts
from layerzero.workers.providers._torch_losses import Losses
from layerzero.workers.providers._torch_norms import NormGradients
from layerzero.workers.providers._torch_ops import Run, TorchOps, any_scale, as_bits
from layerzero.workers.providers._torch_quantized import Quantized
from layerzero.workers.providers._torch_sampling import Sampling
from layerzero.workers.providers._torch_vision import Vision

CAUSAL_BOTTOM_RIGHT = 2  # custom_mask_type of aten::_efficient_attention_forward


def load() -> Loaded:
    import torch
    import torch.nn.attention

    gpu = TorchCuda(torch)
    attention = _Attention(torch, gpu)
    quantized = Quantized(torch, is_gpu=True)

    def append(views: Sequence[Any], call: Call) -> Run:
        return append_kv(torch, views)

    builders = {
        **TorchOps(torch, attention.unfused).builders(),
        "attention_varlen.flash": gpu.attention_varlen(attention.flash_varlen),
        "merge_attention": merge(torch),
        "paged_attention": attention.paged,
        "append_kv": append,
        "attention.flash": attention.flash,
        "attention.efficient": attention.efficient,
        "attention.cudnn": attention.cudnn,
        "attention.cudnn_wide": attention.cudnn,
        "attention.math": attention.math,
        "attention.composed": lambda views, call: Composed(torch, None, views, call).attention,
        "attention_forward.composed": lambda views, call: Composed(torch, None, views, call).forward,
        **_torch_paged.builders(torch, None, append, quantized.rounded, is_gpu=True),
        **Gradients(torch, gpu).builders(),
        **NormGradients(torch, is_gpu=True).builders(),
        **ChannelNorms(torch, is_gpu=True).builders(),
        **Experts(torch, is_gpu=True).builders(),
        **quantized.builders(),
        **Sampling(torch, is_gpu=True).builders(),
        **Vision(torch).builders(),
        **Losses(torch).builders(),
        **_torch_activations.builders(torch),
        **_torch_elementwise.builders(torch),
    }
    builders["attention_varlen.math"] = builders.pop("attention_varlen")
    cudnn = str(torch.backends.cudnn.version())
    return Loaded(
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda), "cudnn": cudnn},
        kernels=gpu.binds({f"torch-cuda.{name}": build for name, build in builders.items()}),
        on_stream=gpu.on_stream,
    )


def append_kv(torch: Any, views: Sequence[Any]) -> Run:
    """Does not wait for the slots, so it cannot drop tokens that are not to be stored: they become copies of one that
    is, or, where none is, of what a slot holds."""
    key, value, k_cache, _, slots, *_ = views
    blocks, page = k_cache.shape[:2]
    room = blocks * page
    if not slots.numel() or not room:
        return lambda caches: None

    def run(caches: Any) -> None:
        wanted = slots.long()
        is_kept = (wanted >= 0) & (wanted < room)
        first = is_kept.to(torch.uint8).argmax().view(1)
        places = torch.where(is_kept, wanted, wanted.index_select(0, first)).clamp(0, room - 1)
        where = torch.div(places, page, rounding_mode="floor"), places % page
        is_any, is_kept = is_kept.any(), is_kept.view(-1, 1, 1)
        for target, source in zip(caches, (key, value), strict=True):
            cache, rows = as_bits(torch, target), as_bits(torch, source)
            held = cache[where[0][:1], where[1][:1]]
            spare = torch.where(is_any, rows.index_select(0, first), held)
            cache[where] = torch.where(is_kept, rows, spare)

    return run


class _Attention:
    """One method per implementation, each a Builder. Results are copied to the caller: none of them has an out=."""

    def __init__(self, torch: Any, gpu: TorchCuda) -> None:
        self.torch = torch
        self.gpu = gpu

    def flash(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, *_ = views = views[:4]
        if k.shape[2] == 0:  # every row is fully masked
            return lambda out: out.zero_()
        is_bottom_right = _is_bottom_right(views, call)
        self._check("flash", (q, k, k, None), is_causal=call.attrs["is_causal"] and not is_bottom_right)
        wide = v.shape[3]
        inputs = [self.gpu.aligned(tensor, max(q.shape[3], wide)) for tensor in (q, k, v)]  # it wants one head_dim
        if not is_bottom_right:
            return self._sdpa("FLASH_ATTENTION", views, call, inputs)
        # F.scaled_dot_product_attention has no flag for it; torch.nn.attention.bias calls this op, too.
        flash = any_scale(self.torch.ops.aten._scaled_dot_product_flash_attention)
        scale = call.attrs["scale"]

        def run(out: Any) -> None:
            q, k, v = (give() for give in inputs)
            result = flash(q, k, v, 0.0, is_causal=True, return_debug_mask=False, scale=scale)[0]
            out.copy_(result[..., :wide])

        return run

    def efficient(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, *_ = views = views[:4]
        if k.shape[2] == 0:
            return lambda out: out.zero_()
        is_bottom_right = _is_bottom_right(views, call)
        self._check("efficient", views, is_causal=call.attrs["is_causal"] and not is_bottom_right)
        inputs = [self.gpu.aligned(tensor) for tensor in (q, k, v)]
        if not is_bottom_right:
            return self._masked("EFFICIENT_ATTENTION", views, call, inputs)
        forward, scale = any_scale(self.torch.ops.aten._efficient_attention_forward), call.attrs["scale"]
        # Rows that see no key are left out: with some, the kernel is wrong in others, too (2.11, ragged shapes).
        hidden = max(q.shape[2] - k.shape[2], 0)
        read_q, read_k, read_v = inputs

        def run(out: Any) -> None:
            result = forward(
                read_q()[:, :, hidden:].transpose(1, 2),
                read_k().transpose(1, 2),
                read_v().transpose(1, 2),
                bias=None,
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                max_seqlen_q=None,
                max_seqlen_k=None,
                dropout_p=0.0,
                custom_mask_type=CAUSAL_BOTTOM_RIGHT,
                compute_log_sumexp=False,
                scale=scale,
            )[0]
            out[:, :, hidden:].copy_(result.transpose(1, 2))
            out[:, :, :hidden].zero_()

        return run

    def cudnn(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, mask = views = views[:4]
        if k.shape[2] == 0:
            return lambda out: out.zero_()
        inputs = [self.gpu.aligned(tensor) for tensor in (q, k, v)]
        if k.shape[2] == 1:  # which cuDNN refuses; the same key a second time changes no result
            read_k, read_v = inputs[1:]
            inputs[1:] = [lambda: read_k().repeat(1, 1, 2, 1), lambda: read_v().repeat(1, 1, 2, 1)]
            k, v = k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1)
            mask = None if mask is None else mask.expand(-1, -1, -1, 2)
        doubled = (q, k, v, mask)
        self._check("cudnn", doubled, is_causal=call.attrs["is_causal"])
        return self._masked("CUDNN_ATTENTION", doubled, call, inputs)

    def math(self, views: Sequence[Any], call: Call) -> Run:
        q, k, v, mask = views = views[:4]
        queries, keys = q.shape[2], k.shape[2]
        if keys == 0:
            return lambda out: out.zero_()
        inputs = [lambda: q, lambda: k, lambda: v]
        if not _is_bottom_right(views, call):
            return self._sdpa("MATH", views, call, inputs, lambda: mask)

        def visible() -> Any:
            return self.torch.ones(queries, keys, dtype=self.torch.bool, device=q.device).tril_(keys - queries)

        return self._sdpa("MATH", views, call, inputs, visible)

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """scaled_dot_product_attention as it is defined: takes any strides and starts."""
        attention = self.torch.nn.attention
        with attention.sdpa_kernel([attention.SDPBackend.MATH]):
            return self.torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    def flash_varlen(self, q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, is_causal: bool, scale: float) -> Any:
        """No sequence is longer than all of them together. A longest one of 1 would take another path, for which there
        must be one query in each."""
        forward = self.torch.ops.aten._flash_attention_forward
        longest = max(len(q), 2), max(len(k), 2)
        return forward(q, k, v, starts_q, starts_k, *longest, 0.0, is_causal, False, scale=scale)[0]

    def paged(self, views: Sequence[Any], call: Call) -> Run:
        """Gathers as many keys as the tables have room for; does not wait for the lengths."""
        q, k_cache, v_cache, tables, lengths, *_ = views
        blocks, page = k_cache.shape[:2]
        room, scale = tables.shape[1] * page, call.attrs["scale"]
        if blocks == 0 or room == 0:
            return lambda out: out.zero_()
        is_grouped = q.shape[1] != k_cache.shape[2]

        def run(out: Any) -> None:
            torch = self.torch
            chosen = tables.clamp(0, blocks - 1).flatten()  # entries that are not used may hold anything
            seen = torch.arange(room, device=q.device) < lengths.unsqueeze(1)
            k, v = (
                # 0 in place of what no key is in: infinities there would reach the result
                cache.index_select(0, chosen)
                .view(len(q), room, *cache.shape[2:])
                .masked_fill_(~seen[:, :, None, None], 0)
                .transpose(1, 2)
                for cache in (k_cache, v_cache)
            )
            mask = seen[:, None, None]
            result = self.unfused(q.unsqueeze(2), k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
            out.copy_(result.squeeze(2).masked_fill_((lengths == 0)[:, None, None], 0))

        return run

    def _masked(self, backend: str, views: Sequence[Any], call: Call, inputs: Sequence[Callable[[], Any]]) -> Run:
        """With the mask, if there is one, as fused kernels load it; rows that it hides are set to 0."""
        q, k, _, mask = views
        if mask is None:
            return self._sdpa(backend, views, call, inputs)
        is_bool = mask.dtype == self.torch.bool
        full = mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])
        # Of a bool mask torch makes a dense one of its own.
        sdpa = self._sdpa(backend, views, call, inputs, (lambda: full) if is_bool else self.gpu.aligned(full))

        def run(out: Any) -> None:
            sdpa(out)
            seen = mask if is_bool else mask > -math.inf
            out.masked_fill_(~seen.any(-1, keepdim=True), 0)

        return run

    def _sdpa(
        self,
        backend: str,
        views: Sequence[Any],
        call: Call,
        inputs: Sequence[Callable[[], Any]],
        mask: Callable[[], Any] = lambda: None,
    ) -> Run:
        """scaled_dot_product_attention by one implementation only. Takes causal calls that are not bottom-right, and
        those for which `mask` says what is visible."""
        attention, scale = self.torch.nn.attention, call.attrs["scale"]
        chosen = [getattr(attention.SDPBackend, backend)]
        sdpa = any_scale(self.torch.nn.functional.scaled_dot_product_attention)
        is_causal = call.attrs["is_causal"] and not _is_bottom_right(views, call)
        is_grouped = views[0].shape[1] != views[1].shape[1]

        def run(out: Any) -> None:
            with attention.sdpa_kernel(chosen):
                q, k, v = (give() for give in inputs)
                result = sdpa(q, k, v, attn_mask=mask(), is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
            out.copy_(result[..., : out.shape[3]])

        return run

    def _check(self, name: str, views: Sequence[Any], *, is_causal: bool) -> None:
        """Raise BackendError with torch's own reasons where an implementation refuses a call."""
        torch = self.torch
        *tensors, mask = views
        q, k, v = (t if is_aligned(t) else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors)
        parameters = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, is_causal, q.shape[1] != k.shape[1])
        can_use = getattr(torch.backends.cuda, f"can_use_{name}_attention")
        with warnings.catch_warnings(record=True) as reasons:
            warnings.simplefilter("always")
            if can_use(parameters, True):
                return
        said = "; ".join(dict.fromkeys(str(reason.message).partition(" (Triggered")[0] for reason in reasons))
        raise BackendError(f"torch's {name} attention refuses this call: {said}"[:2000], exception="refused")


def _is_bottom_right(views: Sequence[Any], call: Call) -> bool:
    """With as many queries as keys both rules are the same, and every kernel has it."""
    is_square = views[0].shape[2] == views[1].shape[2]
    return bool(call.attrs["is_causal"]) and not is_square and call.attrs["causal_alignment"] == "bottom_right"
