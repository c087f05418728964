"""Liger: norms as Triton kernels."""

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

    return Loaded(
        versions={"liger-kernel": version("liger-kernel"), "triton": version("triton"), "torch": torch.__version__},
        kernels=gpu.binds({"liger.rms_norm": rms_norm, "liger.layer_norm": layer_norm}),
        on_stream=gpu.on_stream,
    )


def _columns(x: Any, call: Call) -> int:
    """Normalized elements of a row."""
    return math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
