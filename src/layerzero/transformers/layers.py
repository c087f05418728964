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
        _check(*args)
        out = running.call(op, *args, **options)
    except HandedOver as why:
        running.count(layer, name, f"handed to torch: {why}")
        return None
    running.count(layer, name)
    return out


def _check(*args: Any) -> None:
    """Raises HandedOver for what goes to no op of ours."""
    if running.IS_DISABLED:
        raise HandedOver("LAYERZERO_DISABLE")
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise HandedOver("dtypes")


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
        return _both_rotated(self, q, k, cos, sin, unsqueeze_dim) or (
            _rotated(self, q, cos, sin, unsqueeze_dim),
            _rotated(self, k, cos, sin, unsqueeze_dim),
        )


def _both_rotated(
    layer: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor] | None:
    """By one call; None where each is to have its own, as on GPUs: rope has fused kernels there, rope_qk has none.
    `heads`: as of _rotated."""
    if not (_is_by_rope(q, cos, heads) and k.dim() == 4 and q.device.type == k.device.type == "cpu"):
        return None
    if any(q.shape[dim] != k.shape[dim] for dim in range(4) if dim != heads):
        return None
    pairs = _pairs(q, cos)
    given = (_turned(q, heads), _turned(k, heads), cos[..., :pairs], sin[..., :pairs])
    try:
        _check(*given)
        found = running.try_call("rope_qk", *given)
    except HandedOver:  # rope says why, where it has no kernel either
        return None
    running.count(layer, "rotary")
    return _turned(found[0], heads), _turned(found[1], heads)


def _rotated(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """`heads`: the dimension of x that the tables lack, 1 or 2 of 4."""
    pairs = _pairs(x, cos)
    c, s = cos[..., :pairs], sin[..., :pairs]
    out = None
    if _is_by_rope(x, cos, heads):
        out = _serve(layer, "rotary", "rope", _turned(x, heads), c, s)
    if out is not None:
        return _turned(out, heads)
    c, s = c.unsqueeze(heads), s.unsqueeze(heads)
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def _pairs(x: Tensor, cos: Tensor) -> int:
    return cos.shape[-1] if cos.shape[-1] * 2 == x.shape[-1] else cos.shape[-1] // 2


def _is_by_rope(x: Tensor, cos: Tensor, heads: int) -> bool:
    return x.dim() == 4 and heads in (1, 2) and cos.dim() == 3


def _turned(x: Tensor, heads: int) -> Tensor:
    """Heads behind the sequence, or back."""
    return x.transpose(1, 2) if heads == 1 else x


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
