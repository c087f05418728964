"""Attention in MLX: its own kernel, which has masks and sinks; with a soft cap composed of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from layerzero.workers.provider import Call

_HALF_DTYPES = ("float16", "bfloat16")


class Attention:
    """One call. MLX multiplies half precision in its own dtype on the CPU, which loses digits and time: all is
    float32."""

    def __init__(self, mx: Any, call: Call) -> None:
        self.mx = mx
        q, k, *_ = call.inputs
        assert q is not None
        assert k is not None
        self.dtype = getattr(mx, q.dtype)
        self.is_half = q.dtype in _HALF_DTYPES
        self.attrs, queries, keys = call.attrs, q.shape[2], k.shape[2]
        attrs = self.attrs
        self.scale, self.cap = attrs["scale"], attrs.get("softcap")
        shift = keys - queries if attrs["causal_alignment"] == "bottom_right" else 0
        self.queries, self.keys = queries, keys
        self.distance = mx.arange(keys)[None, :] - mx.arange(queries)[:, None] - shift
        left, right = attrs.get("window_left"), 0 if attrs["is_causal"] else attrs.get("window_right")
        seen = []
        if left is not None:
            seen.append(self.distance >= -left)
        if right is not None:
            seen.append(self.distance <= right)
        self.seen = seen[0] if len(seen) == 1 else seen[0] & seen[1] if seen else None

    def compute(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any, slopes: Any) -> Any:
        mx = self.mx
        if self.is_half:
            q, k, v = (array.astype(mx.float32) for array in (q, k, v))
            mask = mask.astype(mx.float32) if mask is not None and mask.dtype != mx.bool_ else mask
            sinks = sinks if sinks is None else sinks.astype(mx.float32)
        mask = self._mask(self._of_each(mask), slopes)
        if self.cap is None:
            out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask, sinks=sinks)
        else:
            out = self._capped(q, k, v, mask, sinks)
        if mask is not None:  # MLX gives a fully masked row the mean of v, or NaN
            visible = mask if mask.dtype == mx.bool_ else mask > -math.inf
            out = mx.where(mx.any(visible, axis=-1, keepdims=True), out, mx.array(0, out.dtype))
        return out.astype(self.dtype)

    def _of_each(self, mask: Any) -> Any:
        """A mask of blocks as one of queries and keys."""
        for name, axis, extent in (("mask_block_q", 2, self.queries), ("mask_block_k", 3, self.keys)):
            if name in self.attrs and mask.shape[axis] > 1:
                mask = self.mx.take(mask, self.mx.arange(extent) // self.attrs[name], axis=axis)
        return mask

    def _mask(self, mask: Any, slopes: Any) -> Any:
        """All that hides keys or is added to scores; None for neither."""
        mx = self.mx
        if slopes is not None:
            bias = -slopes[:, :, None, None] * mx.abs(self.distance)
            hidden = None if mask is None or mask.dtype != mx.bool_ else mx.where(mask, bias, -math.inf)
            mask = bias if mask is None else mask + bias if hidden is None else hidden
        if self.seen is None or mask is None:
            return self.seen if mask is None else mask
        return mask & self.seen if mask.dtype == mx.bool_ else mx.where(self.seen, mask, -math.inf)

    def _capped(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        mx, group = self.mx, q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (mx.repeat(array, group, axis=1) for array in (k, v))
        scores = self.cap * mx.tanh(mx.matmul(q, mx.swapaxes(k, -1, -2)) * (self.scale / self.cap))
        if mask is not None:
            scores = mx.where(mask, scores, -math.inf) if mask.dtype == mx.bool_ else scores + mask
        if sinks is not None:  # one key more, whose value is 0
            column = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = mx.concatenate([scores, column], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return mx.matmul(weights[..., : k.shape[2]], v)


def attention(mx: Any, call: Call) -> Callable[..., Any]:
    return Attention(mx, call).compute


def merge_attention(mx: Any, call: Call) -> Callable[..., Any]:
    """Parts merged, in float32."""
    dtype = getattr(mx, call.outputs[0].dtype)

    def compute(*arrays: Any) -> Any:
        given = [array for array in arrays if array is not None]
        rows = mx.stack(given[1::2])
        top = mx.max(rows, axis=0)
        weights = mx.where(rows > -math.inf, mx.exp(rows - top), 0.0)
        total = mx.sum(weights, axis=0)
        shares = mx.expand_dims(weights / mx.maximum(total, 1.0), -1)  # it is 1 or more where there is a key
        parts = [  # what has no weight may hold anything
            mx.where(share > 0.0, out.astype(mx.float32) * share, 0.0)
            for out, share in zip(given[::2], shares, strict=True)
        ]
        return mx.sum(mx.stack(parts), axis=0).astype(dtype), top + mx.log(total)

    return compute
