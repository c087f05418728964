"""Liger's autograd functions as LayerZero's ops of torch, gradients included, for its own tests.

What Liger computes in place of its input is a new tensor here. "llama" rounds before it multiplies by the weight and
"none" computes in the input's dtype, where our ops compute in float32; the tests' tolerances are wider than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import liger_kernel.ops as ops
from liger_kernel.ops import layer_norm, rms_norm
from torch import Tensor
from upstream_common import Calls, told, unserved

import layerzero as lz

calls = Calls()
BOTH = ("test_correctness", "test_correctness_functional")
OF_FILES: dict[str, tuple[str, ...]] = {
    "rms_norm": BOTH,
    "layer_norm": (),
    "fused_add_rms_norm": BOTH,
    "group_norm": (),
    "swiglu": (
        *("test_correctness_llamamlp", "test_correctness_phi3mlp", "test_correctness_functional"),
        "test_correctness_silumul_with_multipliers",
    ),
    "geglu": BOTH,
    "rope": ("test_correctness", "test_functional_correctness"),
    "softmax": (),
    "embedding": (),
    "cross_entropy": (),
}
TESTS = {f"test/transformers/test_{name}.py": functions for name, functions in OF_FILES.items()}
"""Their files and the functions in them that test what some op of ours computes; none: all."""

OPS = (
    *("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward", "add_rms_norm", "group_norm", "swiglu"),
    *("geglu", "rope", "softmax", "cross_entropy", "embedding"),
)
DTYPES = ("float32", "bfloat16")


def made(op: str, *args: Any, **options: Any) -> Any:
    """By name of a backend where gradients are not wanted: an op with them has kernels of two."""
    import torch

    wants = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    return calls.differentiable(op, *args, **options) if wants else calls(op, *args, **options)


def rms(x: Tensor, w: Tensor | None, eps: float, offset: float = 0.0, *_: Any) -> Any:
    if w is not None and w.dtype != x.dtype:
        unserved("rms_norm with a weight of another dtype")
    return made("rms_norm", x, [x.shape[-1]], w if w is None or not offset else w + offset, eps)


def add_rms(x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float = 0.0, *_: Any) -> Any:
    return made("add_rms_norm", x, r, [x.shape[-1]], w + offset if offset else w, eps)


def layer(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Any:
    return made("layer_norm", x, [x.shape[-1]], w, b, eps)


def group(x: Tensor, w: Tensor, b: Tensor, channels: int, groups: int, eps: float) -> Any:
    shape = x.shape
    return made("group_norm", x.view(shape[0], channels, -1), groups, w, b, eps).view(shape)


def silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Any:
    if (gate_multiplier, down_multiplier) != (1.0, 1.0):
        unserved("swiglu with multipliers")
    return made("swiglu", a, b)


def gelu_mul(a: Tensor, b: Tensor) -> Any:
    return made("geglu", a, b, "tanh")


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Any:
    half = cos.shape[-1] // 2
    tables = [table[..., :half].to(q.dtype) for table in (cos, sin)]
    return tuple(made("rope", x.transpose(1, 2), *tables).transpose(1, 2) for x in (q, k))


def softmax(x: Tensor) -> Any:
    return made("softmax", x, -1)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    wanted = {"lse_square_scale": lse_square_scale, "softcap": softcap, "return_z_loss": return_z_loss}
    wanted |= {"return_token_accuracy": return_token_accuracy, "return_predicted_tokens": return_predicted_tokens}
    for name, value in wanted.items():
        if value:
            unserved(f"cross_entropy with {name}")
    if weight is not None and weight.dtype != x.dtype:
        unserved("cross_entropy with weights of another dtype")
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = made("cross_entropy", x, target, weight, **options)
    with told("cross_entropy"):
        lz.synchronize()  # a target that is no class is told of when the GPU has come to it; Liger looks first
    return loss, None, None, None


def embedding(table: Tensor, indices: Tensor) -> Any:
    return made("embedding", indices, table)


def patch() -> None:
    """The classes stay, since tests have their names; what `apply` does is ours."""
    pairs: dict[Any, Callable[..., Any]] = {
        rms_norm.LigerRMSNormFunction: rms,
        layer_norm.LigerLayerNormFunction: layer,
        ops.LigerFusedAddRMSNormFunction: add_rms,
        ops.LigerGroupNormFunction: group,
        ops.LigerSiLUMulFunction: silu_mul,
        ops.LigerGELUMulFunction: gelu_mul,
        ops.LigerRopeFunction: rope,
        ops.LigerSoftmaxFunction: softmax,
        ops.LigerCrossEntropyFunction: cross_entropy,
        ops.LigerEmbeddingFunction: embedding,
    }
    for kind, function in pairs.items():
        kind.apply = staticmethod(function)
