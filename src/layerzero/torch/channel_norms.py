"""Norms of channels: their gradients, in plain torch, which may be differentiated. In float32 for half precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch.gradients import Call, Gradients, through


def instance_norm(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, **options: Any
) -> Tensor:
    """lz.instance_norm, which takes weight and bias by name."""
    return lz.instance_norm(input, weight=weight, bias=bias, eps=eps, **options)


def group_norm_gradients(grad: Tensor, call: Call) -> Gradients:
    """With n what the weight multiplies, r what x is multiplied by, g = grad weight: r (g - mean(g) - n mean(g n)),
    means over a group. For the weight sums of grad n over all but channels, for the bias those of grad."""
    x, weight = call["input"], call["weight"]
    shape = call.shape["input"]
    groups = call["num_groups"] or shape[1]
    if call["activation"] is not None:  # what that is applied to is computed anew: nobody has kept it
        parameters = (None if one is None else _wide(one) for one in (weight, call["bias"]))
        made = torch.group_norm(_wide(x), groups, *parameters, call["eps"])
        grad = through(call["activation"], _wide(grad), made).to(grad.dtype)
    g, over = _wide(grad), _all_but_channels(grad)
    found: Gradients = {}
    if "bias" in call.needs:
        found["bias"] = g.sum(over).to(grad.dtype)
    if not call.needs & {"input", "weight"}:
        return found
    grouped = (shape[0], groups, shape[1] // groups * math.prod(shape[2:]))
    rows = _wide(x).reshape(grouped)
    rows = rows - rows.mean(-1, keepdim=True)
    r = torch.rsqrt(rows.square().mean(-1, keepdim=True) + call["eps"])
    n = rows * r
    if "weight" in call.needs:
        found["weight"] = (g * n.view(shape)).sum(over).to(grad.dtype)
    if "input" in call.needs:
        gw = (g if weight is None else g * _beside(weight, g)).reshape(grouped)
        by_x = r * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
        found["input"] = by_x.view(shape).to(grad.dtype)
    return found


def batch_norm_gradients(grad: Tensor, call: Call) -> Gradients:
    """With r = 1 / sqrt(var + eps), n = (x - mean) r, g = grad weight: g r, and summed over all but channels grad n for
    the weight, grad for the bias, -g r for the mean, -g n r^2 / 2 for the variance."""
    x, mean, weight = call["input"], call["running_mean"], call["weight"]
    g, over = _wide(grad), _all_but_channels(grad)
    found: dict[str, Tensor] = {}
    if "bias" in call.needs:
        found["bias"] = g.sum(over)
    if call.needs <= {"bias"}:
        return {name: one.to(grad.dtype) for name, one in found.items()}
    r = torch.rsqrt(_wide(call["running_var"]) + call["eps"])
    factor = r if weight is None else r * _wide(weight)
    if "input" in call.needs:
        found["input"] = g * _beside(factor, g)
    if "running_mean" in call.needs:
        found["running_mean"] = -factor * g.sum(over)
    if call.needs & {"weight", "running_var"}:
        along = (g * (_wide(x) - _beside(mean, g))).sum(over)
        found["weight"] = along * r
        found["running_var"] = along * factor * r * r * -0.5
    return {name: one.to(grad.dtype) for name, one in found.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _beside(parameter: Tensor, x: Tensor) -> Tensor:
    """One number for each channel of x."""
    return _wide(parameter).view(-1, *[1] * (x.dim() - 2))


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]
