"""Losses by MLX, in float32. Used by mlx.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from layerzero.workers.provider import Call
from layerzero.workers.providers._losses import check_classes


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    return {"cross_entropy": partial(cross_entropy, mx)}


def cross_entropy(mx: Any, call: Call) -> Callable[..., Any]:
    attrs = call.attrs
    smoothing, reduction = attrs["label_smoothing"], attrs["reduction"]

    def compute(x: Any, target: Any, weight: Any) -> Any:
        classes, indices = x.shape[1], target.astype(mx.int64)
        counts = indices != mx.array(attrs["ignore_index"], mx.int64)
        indices = mx.where(counts, indices, mx.array(0, mx.int64))
        if indices.size:
            check_classes(call.op, mx.min(indices).item(), mx.max(indices).item(), classes)
        wide = x.astype(mx.float32)
        wide = wide - mx.max(wide, axis=1, keepdims=True)
        scores = wide - mx.log(mx.sum(mx.exp(wide), axis=1, keepdims=True))
        losses = -mx.take_along_axis(scores, indices[:, None], axis=1).squeeze(1)
        shares = mx.ones_like(losses)
        if weight is not None:
            weights = weight.astype(mx.float32)
            shares = weights[indices]
            losses = losses * shares
            scores = scores * weights.reshape(-1, *[1] * (x.ndim - 2))
        if smoothing:
            losses = (1.0 - smoothing) * losses - smoothing / classes * mx.sum(scores, axis=1)
        losses = mx.where(counts, losses, mx.array(0.0))
        if reduction == "mean":
            losses = mx.sum(losses) / mx.sum(mx.where(counts, shares, mx.array(0.0)))
        elif reduction == "sum":
            losses = mx.sum(losses)
        return losses.astype(x.dtype)

    return compute
