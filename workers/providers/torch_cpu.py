"""PyTorch on the CPU: every tensor op, all dtypes and strides. The reference that other backends are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Block, Call, Loaded
from layerzero.workers.providers._torch_ops import Builder, Run, TorchOps, binder


def load() -> Loaded:
    import torch

    torch.set_grad_enabled(False)

    def view(block: Block) -> Any:
        """The block's memory as a tensor, without a copy."""
        spec = block.spec
        dtype = getattr(torch, spec.dtype)
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            flat = torch.frombuffer(block.host, dtype=dtype, count=spec.span_bytes // spec.itemsize)
        return flat.as_strided(spec.shape, spec.strides)

    def attention(views: Sequence[Any], call: Call) -> Run:
        q, k, v, mask = views
        queries, keys = q.shape[2], k.shape[2]
        if keys == 0:  # every row is fully masked
            return lambda out: out.zero_()
        is_causal = call.attrs["is_causal"]
        if is_causal and queries != keys and call.attrs["causal_alignment"] == "bottom_right":
            is_causal = False
            mask = torch.ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
        scale, is_grouped = call.attrs["scale"], q.shape[1] != k.shape[1]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda out: out.copy_(
            sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
        )

    builders: dict[str, Builder] = {"attention": attention, **TorchOps(torch).builders()}
    return Loaded(
        versions={"torch": torch.__version__, "numpy": version("numpy")},
        kernels={f"torch.{op}": binder(torch, view, build) for op, build in builders.items()},
    )
