"""FlashInfer: prefill attention by its fa2 and fa3 templates, causal as bottom_right, and rms_norm.

Its kernels are compiled by nvcc at the first call of a dtype and head_dim.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda, is_aligned
from layerzero.workers.providers._torch_ops import Run

HEAD_DIMS = (64, 128, 256)  # that fa3 has templates for; others are padded with zeros, which change nothing
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; it holds partial results of a split sequence
MAX_PLANS = 16  # each has 8 MiB on the GPU and as much pinned memory


def load() -> Loaded:
    import flashinfer
    import torch

    gpu = TorchCuda(torch)
    prefill = _Prefill(torch, flashinfer, gpu)

    def rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        columns, eps = math.prod(x.shape[x.ndim - call.attrs["ndim"] :]), call.attrs["eps"]

        def run(out: Any) -> None:
            rows, flat_weight, dense = x.reshape(-1, columns), weight.reshape(-1), out.view(-1, columns)
            # It loads and stores 16 bytes at a time, and checks no address.
            rows, flat_weight = (t if is_aligned(t) else t.clone() for t in (rows, flat_weight))
            target = dense if is_aligned(dense) else torch.empty_like(dense)
            flashinfer.norm.rmsnorm(rows, flat_weight, eps, out=target)
            if target is not dense:
                dense.copy_(target)

        return run

    builders = {
        "flashinfer.attention.fa2": lambda views, call: prefill.build("fa2", views, call),
        "flashinfer.attention.fa3": lambda views, call: prefill.build("fa3", views, call),
        "flashinfer.rms_norm": rms_norm,
    }
    libraries = ("flashinfer-python", "apache-tvm-ffi")
    return Loaded(
        versions={**{name: version(name) for name in libraries}, "torch": torch.__version__},
        kernels=gpu.binds(builders),
        on_stream=gpu.on_stream,
    )


class _Prefill:
    """Attention over ragged tensors, here of equal lengths. What is planned depends on extents alone, so calls of one
    signature share a plan."""

    def __init__(self, torch: Any, flashinfer: Any, gpu: TorchCuda) -> None:
        self.torch = torch
        self.wrapper = flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper
        self.gpu = gpu
        self.workspaces: dict[int, Any] = {}  # one for each stream: calls on two may run at the same time
        self.plans: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def build(self, backend: str, views: Sequence[Any], call: Call) -> Run:
        q, k, v, _ = views
        queries, keys, wide = q.shape[2], k.shape[2], v.shape[3]
        if keys == 0:  # every row is fully masked
            return lambda out: out.zero_()
        is_causal = bool(call.attrs["is_causal"])
        hidden = max(queries - keys, 0) if is_causal and call.attrs["causal_alignment"] == "bottom_right" else 0
        width = next(dim for dim in HEAD_DIMS if dim >= max(q.shape[3], wide))
        inputs = [self.gpu.aligned(tensor, width) for tensor in (q[:, :, hidden:], k, v)]
        plan = self.plan(backend, q[:, :, hidden:], k, width, is_causal, call.attrs["scale"])

        def run(out: Any) -> None:
            plan._float_workspace_buffer = self.workspace()  # plans hold offsets into it, no address
            rows = [give().transpose(1, 2).flatten(0, 1) for give in inputs]
            target = out[:, :, hidden:].transpose(1, 2)
            is_direct = target.is_contiguous() and is_aligned(target) and wide == width
            dense = (
                target if is_direct else self.torch.empty((*target.shape[:3], width), dtype=q.dtype, device=q.device)
            )
            plan.run(*rows, out=dense.view(-1, *dense.shape[2:]))
            if not is_direct:
                target.copy_(dense[..., :wide])
            if hidden:
                out[:, :, :hidden].zero_()

        return run

    def workspace(self) -> Any:
        stream = self.torch.cuda.current_stream().cuda_stream
        if stream not in self.workspaces:
            self.workspaces[stream] = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device="cuda")
        return self.workspaces[stream]

    def plan(self, backend: str, q: Any, k: Any, width: int, is_causal: bool, scale: float) -> Any:
        """A planned wrapper for such tensors. Compiles its kernels if need be."""
        batch, heads, queries, _ = q.shape
        kv_heads, keys = k.shape[1:3]
        key = (backend, q.dtype, batch, heads, kv_heads, queries, keys, width, is_causal, scale)
        if key in self.plans:
            self.plans.move_to_end(key)
            return self.plans[key]
        torch = self.torch
        steps = torch.arange(batch + 1, dtype=torch.int32)
        wrapper = self.wrapper(self.workspace(), "NHD", backend=backend)
        wrapper.plan(
            steps * queries,
            steps * keys,
            heads,
            kv_heads,
            width,
            head_dim_vo=width,
            causal=is_causal,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        torch.cuda.current_stream().synchronize()  # the plan is used on other streams than it was copied on
        self.plans[key] = wrapper
        if len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)  # calls that are bound to it keep it
        return wrapper
