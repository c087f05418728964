"""Ops that work element by element, and cat, by MLX. Used by mlx.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layerzero.workers.provider import Call


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    """By name of the op: `call -> compute(*arrays)`."""

    def clamp(call: Call) -> Callable[..., Any]:
        low, high = call.attrs["min"], call.attrs["max"]

        def compute(x: Any) -> Any:
            low_, high_ = (None if bound is None else mx.array(bound, x.dtype) for bound in (low, high))
            return mx.clip(x, low_, high_)

        return compute

    def cat(call: Call) -> Callable[..., Any]:
        dim = call.attrs["dim"]
        return lambda *arrays: mx.concatenate([array for array in arrays if array is not None], axis=dim)

    def cast(call: Call) -> Callable[..., Any]:
        dtype = mx.bool_ if call.attrs["dtype"] == "bool" else getattr(mx, call.attrs["dtype"])
        return lambda x: x.astype(dtype)

    return {
        "add": lambda call: mx.add,
        "mul": lambda call: mx.multiply,
        "clamp": clamp,
        "where": lambda call: mx.where,
        "cat": cat,
        "cast": cast,
    }
