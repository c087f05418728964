"""Norms of channels by MLX, in float32. Used by mlx.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._mlx_activations import activated


class ChannelNorms:
    """One method per op: `call -> compute(*arrays)`."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx

    def builders(self) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
        return {"group_norm": self.group_norm, "instance_norm": self.group_norm, "batch_norm": self.batch_norm}

    def group_norm(self, call: Call) -> Callable[..., Any]:
        """Of instance_norm each channel is a group."""
        mx, eps, groups = self.mx, call.attrs["eps"], call.attrs.get("num_groups")
        activation = call.attrs.get("activation", "")

        def compute(x: Any, weight: Any, bias: Any) -> Any:
            grouped = x.astype(mx.float32).reshape(x.shape[0], groups or x.shape[1], -1)
            # Its own mean has few digits of a deviation where it is large; a second one finds the rest.
            centred = grouped - mx.mean(grouped, axis=-1, keepdims=True)
            normalized = mx.fast.layer_norm(centred, None, None, eps).reshape(x.shape)
            return activated(mx, activation, self._of_channels(normalized, weight, bias)).astype(x.dtype)

        return compute

    def batch_norm(self, call: Call) -> Callable[..., Any]:
        mx, eps = self.mx, call.attrs["eps"]

        def compute(x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> Any:
            factor = mx.rsqrt(var.astype(mx.float32) + eps)
            centred = x.astype(mx.float32) - self._beside(mean, x)
            return self._of_channels(centred * self._beside(factor, x), weight, bias).astype(x.dtype)

        return compute

    def _of_channels(self, x: Any, weight: Any, bias: Any) -> Any:
        scaled = x if weight is None else x * self._beside(weight, x)
        return scaled if bias is None else scaled + self._beside(bias, x)

    def _beside(self, parameter: Any, x: Any) -> Any:
        """One number for each channel of x."""
        return parameter.astype(self.mx.float32).reshape(-1, *[1] * (x.ndim - 2))
