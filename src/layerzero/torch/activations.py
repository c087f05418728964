"""Gradient formulas of activations, in plain torch, which may be differentiated. In float32 for half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.torch.gradients import Call, Formula, Gradients


def _each(slope: Callable[[Tensor], Tensor]) -> Formula:
    """grad times the slope at the input."""

    def formula(grad: Tensor, call: Call) -> Gradients:
        x = call["input"]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return {"input": (grad.to(wide) * slope(x.to(wide))).to(x.dtype)}

    return formula


def _sigmoid(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s)


def _quick_gelu(x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return s * (1.0 + 1.702 * x * (1.0 - s))


def _hardswish(x: Tensor) -> Tensor:
    """0 up to -3, 1 from 3 on, between them x / 3 + 1 / 2."""
    between = torch.where(x < 3.0, x / 3.0 + 0.5, torch.ones_like(x))
    return torch.where(x <= -3.0, torch.zeros_like(x), between)


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(F.softplus(x))
    return t + x * torch.sigmoid(x) * (1.0 - t * t)


FORMULAS: dict[str, Formula] = {
    "relu": _each(lambda x: (x > 0.0).to(x.dtype)),
    "sigmoid": _each(_sigmoid),
    "tanh": _each(lambda x: 1.0 - torch.tanh(x).square()),
    "quick_gelu": _each(_quick_gelu),
    "hardswish": _each(_hardswish),
    "mish": _each(_mish),
}


def geglu(grad: Tensor, call: Call) -> Gradients:
    """Those of gelu(gate) * up."""
    gate, up, approximate = call["gate"], call["up"], call["approximate"]
    found: Gradients = {}
    if "gate" in call.needs:
        found["gate"] = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
    if "up" in call.needs:
        found["up"] = grad * F.gelu(gate, approximate=approximate)
    return found


def reglu(grad: Tensor, call: Call) -> Gradients:
    """Those of relu(gate) * up."""
    gate, up = call["gate"], call["up"]
    found: Gradients = {}
    if "gate" in call.needs:
        found["gate"] = grad * up * (gate > 0.0)
    if "up" in call.needs:
        found["up"] = grad * F.relu(gate)
    return found
