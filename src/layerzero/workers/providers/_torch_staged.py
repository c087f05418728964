"""PyTorch on a device whose memory workers cannot share with clients: tensors lie in the CPU's memory, each call copies
its inputs to the device and its result back. Used by torch_rocm.py, torch_xpu.py and torch_hpu.py, which differ in the
device's name; the ops are those of every device. Run on the device "cpu" only (tests/envs/test_staged_torch.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers import _torch_activations, _torch_elementwise
from layerzero.workers.providers._torch_ops import Builder, Run, TorchOps, any_scale, host_view

# What needs one output, and no memory of the caller's but that.
STAGED = (
    *("attention", "matmul", "addmm", "linear", "softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "silu"),
    *("swiglu", "relu", "sigmoid", "tanh", "rope", "embedding", "add", "mul"),
)


def kernels(torch: Any, device: str, backend: str, ops: Iterable[str] = STAGED) -> dict[str, Bind]:
    """The kernels of a backend, by id, which compute on the device that torch calls so."""
    torch.set_grad_enabled(False)
    found = _builders(torch)
    view = host_view(torch)
    return {f"{backend}.{op}": _bind(torch, device, view, found[op]) for op in ops}


def _builders(torch: Any) -> Mapping[str, Builder]:
    def attention(views: Sequence[Any], call: Call) -> Run:
        return _attention(torch, views, call)

    ops = TorchOps(torch, torch.nn.functional.scaled_dot_product_attention).builders()
    others = {**_torch_activations.builders(torch), **_torch_elementwise.builders(torch)}
    return {**ops, **others, "attention": attention}


def _bind(torch: Any, device: str, view: Any, build: Builder) -> Bind:
    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        here = [None if block is None else view(block) for block in inputs]
        out = view(outputs[0])

        def bound() -> None:
            """Nothing stays on the device between two calls but what torch's allocator keeps."""
            if not out.numel():
                return
            there = [None if tensor is None else tensor.to(device, copy=True) for tensor in here]
            result = torch.empty(out.shape, dtype=out.dtype, device=device)
            build(there, call)(result)
            out.copy_(result)

        return bound

    return bind


def _attention(torch: Any, views: Sequence[Any], call: Call) -> Run:
    """By whichever implementation torch chooses there. Rows that a mask hides are set to 0."""
    q, k, v, mask, *_ = views
    queries, keys = q.shape[2], k.shape[2]
    if keys == 0:  # every row is fully masked
        return lambda out: out.zero_()
    is_causal = bool(call.attrs["is_causal"])
    if is_causal and queries != keys and call.attrs["causal_alignment"] == "bottom_right":
        is_causal = False
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    sdpa = any_scale(torch.nn.functional.scaled_dot_product_attention)
    scale, is_grouped = call.attrs["scale"], q.shape[1] != k.shape[1]

    def run(out: Any) -> None:
        out.copy_(sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped))
        if mask is not None:
            seen = mask if mask.dtype == torch.bool else mask > -math.inf
            out.masked_fill_(~seen.any(-1, keepdim=True), 0)

    return run
