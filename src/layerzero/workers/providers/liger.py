"""Liger: norms, rope and swiglu as Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import TorchCuda
from layerzero.workers.providers._torch_ops import Run


def load() -> Loaded:
    import torch
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import rope_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    gpu = TorchCuda(torch)

    def rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        columns, eps = _columns(x, call), call.attrs["eps"]

        def run(out: Any) -> None:
            flat_weight = None if weight is None else weight.reshape(-1)
            # gemma: all of it in float32, as the op means it; llama rounds before it multiplies by the weight.
            result = LigerRMSNormFunction.apply(x.reshape(-1, columns), flat_weight, eps, 0.0, "gemma", False)
            out.copy_(result.view(out.shape))

        return run

    def layer_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight, bias = views
        columns, eps = _columns(x, call), call.attrs["eps"]

        def run(out: Any) -> None:
            result = LigerLayerNormFunction.apply(x.reshape(-1, columns), weight.reshape(-1), bias.reshape(-1), eps)
            out.copy_(result.view(out.shape))

        return run

    def rope(views: Sequence[Any], call: Call) -> Run:
        x, cos, sin = views
        rotated = 2 * cos.shape[2]

        def run(out: Any) -> None:
            turned = x.contiguous().clone() if not out.is_contiguous() else out.copy_(x)
            key = torch.zeros_like(turned[:, :, :1])  # it rotates two tensors; nobody wants this one
            angles = (table.float() for table in (cos, sin))  # the type that it computes in
            # In place: (batch, sequence, heads, head_dim) is what it brings its arguments to.
            rope_forward(turned.transpose(1, 2), key.transpose(1, 2), *angles, rotary_dim=rotated)
            if turned is not out:
                out.copy_(turned)

        return run

    def swiglu(views: Sequence[Any], call: Call) -> Run:
        gate, up = views

        def run(out: Any) -> None:
            out.copy_(swiglu_forward(gate.contiguous(), up.contiguous())[2])

        return run

    kernels = {"rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "swiglu": swiglu}
    return Loaded(
        versions={"liger-kernel": version("liger-kernel"), "triton": version("triton"), "torch": torch.__version__},
        kernels=gpu.binds({f"liger.{op}": build for op, build in kernels.items()}),
        on_stream=gpu.on_stream,
    )


def _columns(x: Any, call: Call) -> int:
    """Normalized elements of a row."""
    return math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
