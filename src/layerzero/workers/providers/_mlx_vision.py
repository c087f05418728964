"""Convolutions, pooling and interpolation by MLX, in float32. Used by mlx.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.workers.provider import Call
from layerzero.workers.providers._mlx_activations import activated


class Vision:
    """One method per op: `call -> compute(*arrays)`. MLX wants channels last, in weights too."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx

    def builders(self) -> Mapping[str, Callable[[Call], Callable[..., Any]]]:
        return {
            "conv": self.conv,
            "conv_transpose": self.conv_transpose,
            "max_pool": self.max_pool,
            "interpolate": self.interpolate,
            "avg_pool": self.avg_pool,
            "adaptive_max_pool": self.adaptive_max_pool,
            "adaptive_avg_pool": self.adaptive_avg_pool,
        }

    def conv(self, call: Call) -> Callable[..., Any]:
        stride, dilation = (list(windows.known(call.attrs[name])) for name in ("stride", "dilation"))
        before, after = ([pad[side] for pad in windows.pads(call.attrs["padding"])] for side in (0, 1))
        options = {"stride": stride, "padding": (before, after), "kernel_dilation": dilation}
        return self._of(call, options, lambda weight: weight)

    def conv_transpose(self, call: Call) -> Callable[..., Any]:
        """A convolution of x with stride - 1 zeros between elements, by the weight the other way round."""
        mx, groups = self.mx, call.attrs["groups"]
        weight = call.inputs[1]
        assert weight is not None
        stride, dilation, more = (
            list(windows.known(call.attrs[name])) for name in ("stride", "dilation", "output_padding")
        )
        room = [windows.reach(n, gap) - 1 for n, gap in zip(weight.shape[2:], dilation, strict=True)]
        pads = list(zip(room, windows.pads(call.attrs["padding"]), more, strict=True))
        wanted = [(most - cut[0], most - cut[1] + added) for most, cut, added in pads]
        options = {
            "padding": tuple([max(pad[side], 0) for pad in wanted] for side in (0, 1)),
            "kernel_dilation": dilation,
            "input_dilation": stride,
            "flip": True,
        }

        def turned(given: Any) -> Any:
            """(channels, out / groups, ...) as (out, channels / groups, ...)."""
            shape = given.shape
            split = given.reshape(groups, shape[0] // groups, *shape[1:])
            return mx.swapaxes(split, 1, 2).reshape(groups * shape[1], shape[0] // groups, *shape[2:])

        return self._of(call, options, turned, [(max(-low, 0), max(-high, 0)) for low, high in wanted])

    def _of(
        self,
        call: Call,
        options: Mapping[str, Any],
        weighed: Callable[[Any], Any],
        cuts: list[tuple[int, int]] | None = None,
    ) -> Callable[..., Any]:
        """`cuts`: what is cut off the result of each dimension, since MLX pads by no negative numbers."""
        mx, groups, activation = self.mx, call.attrs["groups"], call.attrs["activation"]

        def compute(x: Any, weight: Any, bias: Any) -> Any:
            wide = mx.moveaxis(x.astype(mx.float32), 1, -1)
            by = mx.moveaxis(weighed(weight.astype(mx.float32)), 1, -1)
            if groups > 1 and x.ndim == 5:  # which MLX has none of
                each = zip(mx.split(wide, groups, -1), mx.split(by, groups, 0), strict=True)
                made = mx.concatenate([mx.conv_general(*one, **options) for one in each], -1)
            else:
                made = mx.conv_general(wide, by, groups=groups, **options)
            for axis, (low, high) in enumerate(cuts or (), 1):
                made = mx.take(made, mx.arange(low, made.shape[axis] - high), axis)
            made = made if bias is None else made + bias.astype(mx.float32)
            return mx.moveaxis(activated(mx, activation, made), -1, 1).astype(x.dtype)

        return compute

    def max_pool(self, call: Call) -> Callable[..., Any]:
        mx = self.mx
        seen = self._windows(call, windows.known(call.attrs["dilation"]), -math.inf)
        return lambda x: mx.max(seen(x), axis=_last(x)).astype(x.dtype)

    def avg_pool(self, call: Call) -> Callable[..., Any]:
        mx, x, attrs = self.mx, call.inputs[0], call.attrs
        assert x is not None
        sizes, kernel = call.outputs[0].shape[2:], windows.known(attrs["kernel_size"])
        seen = self._windows(call, [1] * len(sizes), 0.0)
        factor = mx.array(1 / (attrs["divisor"] or 1))
        numbers = (windows.known(attrs["stride"]), windows.pads(attrs["padding"]))
        for one in zip(x.shape[2:], sizes, kernel, *numbers, strict=True) if not attrs["divisor"] else ():
            counts = windows.shares(*one, counts_padding=attrs["count_include_pad"])
            factor = factor[..., None] / mx.array(counts, mx.float32)
        return lambda x: (mx.sum(seen(x), axis=_last(x)) * factor).astype(x.dtype)

    def _windows(self, call: Call, gaps: Sequence[int], beyond: float) -> Callable[[Any], Any]:
        """From x to (batch, channels, ..., kernel): what each window sees, in float32."""
        mx, spec = self.mx, call.inputs[0]
        assert spec is not None
        sizes = call.outputs[0].shape[2:]
        kernel, stride = (windows.known(call.attrs[name]) for name in ("kernel_size", "stride"))
        pads = windows.pads(call.attrs["padding"])
        dims = zip(spec.shape[2:], sizes, kernel, stride, pads, gaps, strict=True)
        ends = [(one[4][0], one[4][1] + windows.beyond(*one)) for one in dims]
        room = [n + low + high for n, (low, high) in zip(spec.shape[2:], ends, strict=True)]
        apart = [math.prod(room[dim + 1 :]) for dim in range(len(room))]
        strides = [
            *(spec.shape[1] * math.prod(room), math.prod(room)),
            *(n * step for n, step in zip(apart, stride, strict=True)),
            *(n * gap for n, gap in zip(apart, gaps, strict=True)),
        ]

        def seen(x: Any) -> Any:
            padded = mx.contiguous(mx.pad(x.astype(mx.float32), [(0, 0), (0, 0), *ends], constant_values=beyond))
            return mx.as_strided(padded, (*x.shape[:2], *sizes, *kernel), strides)

        return seen

    def interpolate(self, call: Call) -> Callable[..., Any]:
        """MLX has none: elements are taken and weighed, one dimension after the other."""
        mx, spec, attrs = self.mx, call.inputs[0], call.attrs
        assert spec is not None
        sizes, mode = call.outputs[0].shape[2:], attrs["mode"]
        scales = resampling.scales_of(attrs["scale"]) or (None,) * len(sizes)
        options = {"is_aligned": attrs["align_corners"], "is_smoothed": attrs["antialias"]}
        steps = []
        for axis, (size, made, scale) in enumerate(zip(spec.shape[2:], sizes, scales, strict=True), 2):
            places, weights, counts = resampling.even(resampling.taps(size, made, scale, mode, **options))
            shape = (made, len(weights[0]), *[1] * (spec.ndim - 1 - axis))
            steps.append(
                (axis, *(mx.array(n) for n in (places,)), *(mx.array(n).reshape(shape) for n in (weights, counts)))
            )
        if mode.startswith("nearest"):
            return lambda x: functools.reduce(lambda y, step: mx.take(y, step[1][:, 0], axis=step[0]), steps, x)

        def compute(x: Any) -> Any:
            found = x.astype(mx.float32)
            for axis, places, weights, counts in steps:
                weighed = mx.take(found, places, axis=axis) * weights
                found = mx.sum(mx.where(counts, weighed, mx.array(0.0)), axis=axis + 1)
            return found.astype(x.dtype)

        return compute

    def adaptive_max_pool(self, call: Call) -> Callable[..., Any]:
        """One dimension after the other."""
        return self._adaptive(call, lambda seen, counts, axis: self.mx.max(seen, axis=axis + 1))

    def adaptive_avg_pool(self, call: Call) -> Callable[..., Any]:
        """As adaptive_max_pool: the mean of means of equally many."""
        mx = self.mx

        def mean(seen: Any, counts: Sequence[int], axis: int) -> Any:
            width = seen.shape[axis + 1]
            kept = mx.arange(width) < mx.array(counts)[:, None]
            shape = [1] * seen.ndim
            shape[axis : axis + 2] = [len(counts), width]
            held = mx.where(kept.reshape(shape), seen, mx.array(0.0))
            shape = [1] * (seen.ndim - 1)
            shape[axis] = len(counts)
            return mx.sum(held, axis=axis + 1) / mx.array(counts, mx.float32).reshape(shape)

        return self._adaptive(call, mean)

    def _adaptive(self, call: Call, reduce: Callable[[Any, Sequence[int], int], Any]) -> Callable[..., Any]:
        """`reduce`: of an array with one more dimension after `axis`, which has a window's elements, the last of them
        repeated where windows are shorter than others; and of how many elements each has."""
        mx, spec = self.mx, call.inputs[0]
        assert spec is not None
        steps = []
        for axis, (size, made) in enumerate(zip(spec.shape[2:], call.outputs[0].shape[2:], strict=True), 2):
            ends = windows.adapted(size, made)
            width = max(end - start for start, end in ends)
            places = mx.array([[min(start + t, end - 1) for t in range(width)] for start, end in ends])
            steps.append((axis, places, [end - start for start, end in ends]))

        def compute(x: Any) -> Any:
            found = x.astype(mx.float32)
            for axis, places, counts in steps:
                found = reduce(mx.take(found, places, axis=axis), counts, axis)
            return found.astype(x.dtype)

        return compute


def _last(x: Any) -> list[int]:
    """The dimensions of a window, behind as many of a result as x has."""
    return list(range(x.ndim, 2 * x.ndim - 2))
