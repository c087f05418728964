"""Rotary position embedding by MLX's arithmetic, in float32. Used by mlx.py.

mlx.core.fast.rope computes its angles itself, of positions that follow each other: it takes no tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from layerzero.workers.provider import Call


def builders(mx: Any) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
    return {"rope": partial(rope, mx), "rope_qk": partial(rope_qk, mx)}


def rope(mx: Any, call: Call) -> Callable[..., Any]:
    is_interleaved = call.attrs["interleaved"]

    def compute(x: Any, cos: Any, sin: Any) -> Any:
        c, s = (table.astype(mx.float32)[:, :, None] for table in (cos, sin))
        pairs = cos.shape[2]
        head = x[..., : 2 * pairs].astype(mx.float32)
        if is_interleaved:
            a, b = head[..., 0::2], head[..., 1::2]
            turned = mx.stack((a * c - b * s, b * c + a * s), axis=-1).reshape(head.shape)
        else:
            a, b = head[..., :pairs], head[..., pairs:]
            turned = mx.concatenate((a * c - b * s, b * c + a * s), axis=-1)
        turned = turned.astype(x.dtype)
        return turned if 2 * pairs == x.shape[3] else mx.concatenate((turned, x[..., 2 * pairs :]), axis=-1)

    return compute


def rope_qk(mx: Any, call: Call) -> Callable[..., Any]:
    turn = rope(mx, call)
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))
