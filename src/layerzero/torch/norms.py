"""Gradients of norms: by kernels, and where none serves, in this process, which the report says.

Formulas are in plain torch, and may be differentiated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch.backward import by_kernel

BY_FORMULA = "layerzero.torch.norms"
LAYER_NORM, RMS_NORM = ("input", "weight", "bias"), ("input", "weight")  # by which there are gradients
aten = torch.ops.aten


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """lz.layer_norm_backward, and where that fails the formula. Raises InvalidArgument."""
    args = (grad_out, input, normalized_shape, weight, eps)
    found = by_kernel(
        "layer_norm_backward", BY_FORMULA, lambda: lz.layer_norm_backward(*args, backend=backend, timeout_s=timeout_s)
    )
    if found is None:
        made = layer_norm(*args, LAYER_NORM)
        return made["input"].contiguous(), made["weight"], made["bias"]
    by_x, by_weight, by_bias = found
    return by_x, _apart(by_weight), _apart(by_bias)


def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[Tensor, Tensor]:
    """lz.rms_norm_backward, and where that fails the formula. Raises InvalidArgument."""
    args = (grad_out, input, normalized_shape, weight, eps)
    found = by_kernel(
        "rms_norm_backward", BY_FORMULA, lambda: lz.rms_norm_backward(*args, backend=backend, timeout_s=timeout_s)
    )
    if found is None:
        made = rms_norm(*args, RMS_NORM)
        return made["input"].contiguous(), made["weight"].contiguous()
    by_x, by_weight = found
    return by_x, _apart(by_weight)


def _apart(sums: Tensor) -> Tensor:
    """In memory of its own. On a GPU the results of a call share an allocation, and a parameter keeps its gradient from
    step to step: it would keep that of x, which is many times as large."""
    return sums.clone() if sums.is_cuda else sums


def layer_norm(
    grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float, needs: Collection[str]
) -> dict[str, Tensor]:
    """Those that `needs` names, by torch's own kernels, on the mean and deviation of x computed anew."""
    wanted = [name in needs for name in LAYER_NORM]
    if wanted[1] and weight is None:  # its values matter to the gradient of x alone
        weight = x.new_ones(tuple(shape))
    bias = x.new_zeros(tuple(shape)) if wanted[2] else None  # whose values do not matter to any gradient
    _, mean, deviation = aten.native_layer_norm(x, shape, weight, None, eps)
    found = aten.native_layer_norm_backward(grad, x, shape, mean, deviation, weight, bias, wanted)
    return dict(zip(LAYER_NORM, found, strict=True))


def rms_norm(
    grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, needs: Collection[str]
) -> dict[str, Tensor]:
    """Those that `needs` names. With n = x r, r = 1 / sqrt(mean(x^2) + eps): r (g w - n mean(g w n)), and for w the sum
    of g n."""
    ndim, wide = len(shape), torch.float64 if x.dtype == torch.float64 else torch.float32
    last = tuple(range(-ndim, 0))
    eps = torch.finfo(wide).eps if eps is None else eps
    xs, g = x.to(wide), grad.to(wide)
    r = torch.rsqrt(xs.square().mean(last, keepdim=True) + eps)
    n = xs * r
    found: dict[str, Tensor] = {}
    if "input" in needs:
        gw = g if weight is None else g * weight.to(wide)
        found["input"] = (r * (gw - n * (gw * n).mean(last, keepdim=True))).to(x.dtype)
    if "weight" in needs:
        leading = tuple(range(x.dim() - ndim))
        found["weight"] = ((g * n).sum(leading) if leading else g * n).to(x.dtype)
    return found
