"""Activations by torch, on every device. Used by torch_cpu.py, torch_cuda.py and _torch_staged.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run, gelu


def builders(torch: Any) -> Mapping[str, Builder]:
    """By name of the op."""
    F = torch.nn.functional

    def quick_gelu(x: Any) -> Any:
        wide = x if x.dtype == torch.float64 else x.float()  # 1.702 x has more digits than half precision
        return wide * torch.sigmoid(1.702 * wide)

    def hardswish(x: Any) -> Any:
        # torch's CUDA kernel multiplies by a sixth of float32 whatever the dtype: 3e-8 of error in float64.
        is_coarse = x.dtype == torch.float64 and x.is_cuda
        return x * F.relu6(x + 3) / 6 if is_coarse else F.hardswish(x)

    def geglu(views: Sequence[Any], call: Call) -> Run:
        (gate, up), approximate = views, call.attrs["approximate"]
        return lambda out: torch.mul(gelu(torch, gate, approximate, torch.empty_like(gate)), up, out=out)

    def reglu(views: Sequence[Any], call: Call) -> Run:
        gate, up = views
        return lambda out: torch.mul(F.relu(gate), up, out=out)

    return {
        "relu": _each(F.relu),
        "sigmoid": _each(torch.sigmoid),
        "tanh": _each(torch.tanh),
        "quick_gelu": _each(quick_gelu),
        "hardswish": _each(hardswish),
        "mish": _each(F.mish),
        "geglu": geglu,
        "reglu": reglu,
    }


def _each(function: Callable[[Any], Any]) -> Builder:
    def build(views: Sequence[Any], call: Call) -> Run:
        (x,) = views
        return lambda out: out.copy_(function(x))

    return build
