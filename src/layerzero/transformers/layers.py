"""Layers in the place of those that Transformers marks as replaceable: RMSNorm, activations, rotary embedding.

Each class has a forward function alone, which is put into a layer that exists and uses its weights: so HF kernels'
`kernelize` wants it, and so does ours (kernelizing.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from layerzero.transformers import running
from layerzero.transformers.running import HandedOver


def _serve(layer: nn.Module, name: str, op: str, *args: Any, **options: Any) -> Tensor | None:
    """The op's result; None where the formula here has to do."""
    try:
        if running.IS_DISABLED:
            raise HandedOver("LAYERZERO_DISABLE")
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise HandedOver("dtypes")
        out = running.call(op, *args, **options)
    except HandedOver as why:
        running.count(layer, name, f"handed to torch: {why}")
        return None
    running.count(layer, name)
    return out


def _eps(layer: Any) -> float:
    return float(layer.variance_epsilon if hasattr(layer, "variance_epsilon") else layer.eps)


def _normed(layer: Any, x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _eps(layer))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, as Llama has it."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (hidden_states.shape[-1],)
        out = _serve(self, "RMSNorm", "rms_norm", hidden_states, shape, self.weight, _eps(self))
        return self.weight * _normed(self, hidden_states).to(hidden_states.dtype) if out is None else out


class RMSNormZeroCentered(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), as Qwen 3.5 has it."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = None
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):  # else the sum is rounded
            shape = (x.shape[-1],)
            out = _serve(self, "RMSNormZeroCentered", "rms_norm", x, shape, 1.0 + self.weight, _eps(self))
        return (_normed(self, x) * (1.0 + self.weight.float())).type_as(x) if out is None else out


class SiLU(nn.Module):
    """x / (1 + exp(-x))."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        out = _serve(self, "SiLU", "silu", input)
        return nn.functional.silu(input) if out is None else out


class QuickGELU(nn.Module):
    """x / (1 + exp(-1.702 x)), which is silu(1.702 x) / 1.702."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        out = None
        if input.dtype in (torch.float32, torch.float64):  # else it is rounded in between
            out = _serve(self, "QuickGELU", "silu", input * 1.702)
        return input * torch.sigmoid(1.702 * input) if out is None else out / 1.702


class GeLU(nn.Module):
    """x Phi(x)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        out = _serve(self, "GeLU", "gelu", input)
        return nn.functional.gelu(input) if out is None else out


class GeluTanh(nn.Module):
    """The approximation of gelu by tanh: what Transformers calls GeluTanh, NewGELU and FastGELU."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        out = _serve(self, "GeluTanh", "gelu", input, "tanh")
        return nn.functional.gelu(input, approximate="tanh") if out is None else out


class RotaryPosEmb(nn.Module):
    """Rotary position embedding of queries and keys by tables that have each column twice, or once."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return _rotated(self, q, cos, sin, unsqueeze_dim), _rotated(self, k, cos, sin, unsqueeze_dim)


def _rotated(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """`heads`: the dimension of x that the tables lack, 1 or 2 of 4."""
    pairs = cos.shape[-1] if cos.shape[-1] * 2 == x.shape[-1] else cos.shape[-1] // 2
    c, s = cos[..., :pairs], sin[..., :pairs]
    out = None
    if x.dim() == 4 and heads in (1, 2) and c.dim() == 3:
        out = _serve(layer, "rotary", "rope", x.transpose(1, 2) if heads == 1 else x, c, s)
    if out is not None:
        return out.transpose(1, 2) if heads == 1 else out
    c, s = c.unsqueeze(heads), s.unsqueeze(heads)
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNormZeroCentered,
    "SiLU": SiLU,
    "QuickGELU": QuickGELU,
    "GeLU": GeLU,
    "GeluTanh": GeluTanh,
    "NewGELU": GeluTanh,
    "FastGELU": GeluTanh,
    "rotary_pos_emb": RotaryPosEmb,
}
"""By the names of Transformers' marks."""
