"""Convolutions, pooling and interpolation in float64 NumPy. As tests/reference.py, which has all ops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def pads(text: str) -> list[tuple[int, int]]:
    """Before and after each dimension."""
    found = numbers(text)
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


def windows(x: F64, kernel: tuple[int, ...], stride: list[int], dilation: list[int]) -> F64:
    """(N, C, ..., kernel): what each window of a padded x sees."""
    dims = len(kernel)
    spans = tuple(gap * (n - 1) + 1 for n, gap in zip(kernel, dilation, strict=True))
    seen = np.lib.stride_tricks.sliding_window_view(x, spans, tuple(range(2, 2 + dims)))
    taken = (slice(None), slice(None), *(slice(None, None, n) for n in (*stride, *dilation)))
    return np.asarray(seen[taken])


def conv(x: F64, weight: F64, bias: F64 | None, *, stride: str, padding: str, dilation: str, groups: int) -> F64:
    padded = np.pad(x, [(0, 0), (0, 0), *pads(padding)])
    seen = windows(padded, weight.shape[2:], numbers(stride), numbers(dilation))
    dims = weight.ndim - 2
    count, each = weight.shape[0] // groups, weight.shape[1]
    parts = [
        np.tensordot(
            seen[:, g * each : (g + 1) * each],
            weight[g * count : (g + 1) * count],
            ([1, *range(2 + dims, 2 + 2 * dims)], [1, *range(2, 2 + dims)]),
        )
        for g in range(groups)
    ]
    made = np.moveaxis(np.concatenate(parts, -1), -1, 1)
    return made if bias is None else made + bias.reshape(-1, *[1] * dims)


def conv_transpose(x: F64, weight: F64, bias: F64 | None, **attrs: Any) -> F64:
    """Each element of x adds its weights to the places that they fall on."""
    steps, gaps, more = (numbers(attrs[name]) for name in ("stride", "dilation", "output_padding"))
    kernel, groups = weight.shape[2:], attrs["groups"]
    room = [
        (size - 1) * step + gap * (n - 1) + 1 + added
        for size, n, step, gap, added in zip(x.shape[2:], kernel, steps, gaps, more, strict=True)
    ]
    out = np.zeros((x.shape[0], weight.shape[1] * groups, *room))
    each, count = x.shape[1] // groups, weight.shape[1]
    for g, tap in itertools.product(range(groups), itertools.product(*map(range, kernel))):
        by = weight[(slice(g * each, (g + 1) * each), slice(None), *tap)]
        added = np.moveaxis(np.tensordot(x[:, g * each : (g + 1) * each], by, ([1], [0])), -1, 1)
        places = (
            slice(t * gap, t * gap + (size - 1) * step + 1, step)
            for t, gap, size, step in zip(tap, gaps, x.shape[2:], steps, strict=True)
        )
        out[(slice(None), slice(g * count, (g + 1) * count), *places)] += added
    cuts = (slice(low, size - high) for (low, high), size in zip(pads(attrs["padding"]), room, strict=True))
    made = out[(slice(None), slice(None), *cuts)]
    return made if bias is None else made + bias.reshape(-1, *[1] * len(kernel))


def _seen(
    x: F64, kernel_size: str, stride: str, padding: str, dilation: list[int], ceil_mode: bool, beyond: float
) -> F64:
    """(N, C, ..., kernel): what each window sees, where nothing is, `beyond`."""
    kernel, steps = tuple(numbers(kernel_size)), numbers(stride)
    ends = []
    for size, n, step, (low, high), gap in zip(x.shape[2:], kernel, steps, pads(padding), dilation, strict=True):
        room = size + low + high - gap * (n - 1) - 1
        made = 1 + (math.ceil(room / step) if ceil_mode else room // step)
        if (made - 1) * step >= size + low:
            made -= 1
        ends.append((low, max(high, (made - 1) * step + gap * (n - 1) + 1 - size - low)))
    padded = np.pad(x, [(0, 0), (0, 0), *ends], constant_values=beyond)
    return windows(padded, kernel, steps, dilation)


def max_pool(x: F64, *, kernel_size: str, stride: str, padding: str, dilation: str, ceil_mode: bool) -> F64:
    seen = _seen(x, kernel_size, stride, padding, numbers(dilation), ceil_mode, -np.inf)
    return np.asarray(seen.max(tuple(range(x.ndim, seen.ndim))))


def avg_pool(
    x: F64, *, kernel_size: str, stride: str, padding: str, ceil_mode: bool, count_include_pad: bool, divisor: int
) -> F64:
    """NaN stands for what does not count."""
    inside = np.pad(np.ones(x.shape), [(0, 0), (0, 0), *pads(padding)], constant_values=float(count_include_pad))
    plain = ",".join(["0"] * 2 * (x.ndim - 2))
    ones = [1] * (x.ndim - 2)
    seen = _seen(x, kernel_size, stride, padding, ones, ceil_mode, 0.0)
    over = tuple(range(x.ndim, seen.ndim))
    if divisor:
        return np.asarray(seen.sum(over) / divisor)
    sizes = seen.shape[2 : x.ndim]
    counted = _seen(inside, kernel_size, stride, plain, ones, True, 0.0)[(..., *[slice(None)] * len(over))]
    counted = counted[(slice(None), slice(None), *(slice(n) for n in sizes))]
    return np.asarray(seen.sum(over) / counted.sum(over))


def _adaptive(x: F64, output_size: str, reduce: Any) -> F64:
    sizes = numbers(output_size)
    out = np.empty((*x.shape[:2], *sizes))
    for place in itertools.product(*map(range, sizes)):
        window = (
            slice(math.floor(o * n / m), math.ceil((o + 1) * n / m))
            for o, n, m in zip(place, x.shape[2:], sizes, strict=True)
        )
        part = x[(slice(None), slice(None), *window)]
        out[(slice(None), slice(None), *place)] = reduce(part, axis=tuple(range(2, x.ndim)))
    return out


def adaptive_max_pool(x: F64, *, output_size: str) -> F64:
    return _adaptive(x, output_size, np.max)


def adaptive_avg_pool(x: F64, *, output_size: str) -> F64:
    return _adaptive(x, output_size, np.mean)


def interpolate(x: F64, *, size: str, scale: str, mode: str, align_corners: bool, antialias: bool) -> F64:
    """One dimension after the other."""
    x = np.asarray(x, np.float64)
    factors = [float(part) for part in scale.split(",")] if scale else [None] * (x.ndim - 2)
    for axis, (made, factor) in enumerate(zip(numbers(size), factors, strict=True), 2):
        rows = _matrix(x.shape[axis], made, factor, mode, align_corners, antialias)
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ rows.T, -1, axis)
    return x


def _matrix(size: int, made: int, factor: float | None, mode: str, is_aligned: bool, is_smoothed: bool) -> F64:
    """(made, size): the filter at each element, of what lies outside at the edge."""
    places = np.arange(made)
    step = size / made if factor is None else 1 / factor
    if is_aligned:
        step = (size - 1) / (made - 1) if made > 1 else 0.0
    rows = np.zeros((made, size))
    if mode.startswith("nearest"):
        exact = places + (0.5 if mode == "nearest_exact" else 0.0)
        chosen = np.minimum(np.floor(exact * step + 1e-12).astype(int), size - 1)
        rows[places, chosen] = 1
        return rows
    if is_smoothed:
        wide = max(step, 1.0)
        centre = (places + 0.5) * step
        reach = wide * (1 if mode == "linear" else 2)
        inside = np.arange(size)
        low, high = (np.trunc(centre + sign * reach + 0.5)[:, None] for sign in (-1, 1))
        rows = _filter((inside - centre[:, None] + 0.5) / wide, mode, -0.5)
        rows = np.where((inside >= low) & (inside < high), rows, 0)
        return np.asarray(rows / rows.sum(1, keepdims=True))
    at = places * step if is_aligned else (places + 0.5) * step - 0.5
    for far in range(-3, size + 3):
        np.add.at(rows.T, min(max(far, 0), size - 1), _filter(at - far, mode, -0.75))
    return rows


def _filter(x: F64, mode: str, a: float) -> F64:
    x = np.abs(x)
    if mode == "linear":
        return np.maximum(1 - x, 0)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))
