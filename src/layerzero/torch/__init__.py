"""Our ops as ops of torch: `torch.ops.layerzero`, with gradients, for torch.compile and torch.export. Importing this
defines the ops, and makes `lz.silu(x)` and its like traceable.

    import layerzero as lz
    import layerzero.torch
    y = layerzero.torch.silu(x)
    with layerzero.torch.accelerate(): model(x)  # torch's own functions, served by LayerZero
"""

from __future__ import annotations

from layerzero.torch import tracing as _tracing
from layerzero.torch.acceleration.benchmark import BenchmarkReport, benchmark
from layerzero.torch.acceleration.handle import Acceleration, accelerate, report
from layerzero.torch.acceleration.report import AccelerationReport
from layerzero.torch.functional import (
    cat,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear,
    matmul,
    rms_norm,
    rope,
    rope_qk,
    scaled_dot_product_attention,
    silu,
    softmax,
    swiglu,
)

_tracing.install()

__all__ = [
    "Acceleration",
    "AccelerationReport",
    "BenchmarkReport",
    "accelerate",
    "benchmark",
    "cat",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "matmul",
    "report",
    "rms_norm",
    "rope",
    "rope_qk",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
    "swiglu",
]
