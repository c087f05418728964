"""Activations of MLX, in float32. Used by mlx.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.workers.provider import Call


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    """By name of the op: `call -> compute(*arrays)`."""

    def wide(function: Callable[..., Any]) -> Callable[[Call], Callable[..., Any]]:
        def build(call: Call) -> Callable[..., Any]:
            return lambda *arrays: function(*(a.astype(mx.float32) for a in arrays)).astype(arrays[0].dtype)

        return build

    def geglu(call: Call) -> Callable[..., Any]:
        approximate = call.attrs["approximate"]
        return wide(lambda gate, up: _gelu(mx, gate, approximate) * up)(call)

    def gelu_of(call: Call) -> Callable[..., Any]:
        approximate = call.attrs["approximate"]
        return wide(lambda x: _gelu(mx, x, approximate))(call)

    return {
        "gelu": gelu_of,
        "silu": wide(lambda x: x * mx.sigmoid(x)),
        "swiglu": wide(lambda gate, up: gate * mx.sigmoid(gate) * up),
        "relu": wide(lambda x: mx.maximum(x, 0)),
        "sigmoid": wide(mx.sigmoid),
        "tanh": wide(mx.tanh),
        "quick_gelu": wide(lambda x: x * mx.sigmoid(1.702 * x)),
        "hardswish": wide(lambda x: x * mx.clip(x + 3, 0, 6) / 6),
        "mish": wide(lambda x: x * mx.tanh(mx.logaddexp(x, 0))),
        "geglu": geglu,
        "reglu": wide(lambda gate, up: mx.maximum(gate, 0) * up),
    }


def activated(mx: Any, activation: str, x: Any) -> Any:
    """An activation of linear, "" for none, of a tensor in float32."""
    if not activation:
        return x
    if activation == "relu":
        return mx.maximum(x, 0)
    return x * mx.sigmoid(x) if activation == "silu" else _gelu(mx, x, activation.partition("_")[2])


def _gelu(mx: Any, x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        return x * 0.5 * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return x * 0.5 * (1 + mx.erf(x * math.sqrt(0.5)))
