"""Shape functions of convolutions, pooling and interpolation. As ipc/vocabulary/shapes.py, which has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS, OPS
from layerzero.ipc.vocabulary.shape_checks import (
    Attrs,
    Inputs,
    Output,
    choice,
    flag,
    float_dtype,
    integer,
    of_ndim,
    refuse,
    required,
)
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES, TensorSpec


def _conv(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, weight, groups, dims = _convolved(op, inputs, attrs)
    if weight.shape[1] * groups != x.shape[1]:
        refuse(op, f"weight has shape {list(weight.shape)}, x {x.shape[1]} channels", f"{groups} groups of them")
    if weight.shape[0] % groups:
        refuse(op, f"weight has shape {list(weight.shape)}", f"a multiple of {groups} groups first")
    _bias(op, inputs[2], weight.shape[0])
    sizes = [windows.count(*one[:4], one[4]) for one in dims]
    _extents(op, x, sizes)
    return ((x.dtype, (x.shape[0], weight.shape[0], *sizes)),)


def _conv_transpose(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, weight, groups, dims = _convolved(op, inputs, attrs)
    if weight.shape[0] != x.shape[1] or weight.shape[0] % groups:
        allowed = f"x's {x.shape[1]} channels first, in {groups} groups"
        refuse(op, f"weight has shape {list(weight.shape)}", allowed)
    _bias(op, inputs[2], weight.shape[1] * groups)
    more = numbers(op, attrs, "output_padding", x.ndim - 2)
    for one, (_, _, stride, _, dilation) in zip(more, dims, strict=True):
        if one >= max(stride, dilation):
            refuse(op, f"output_padding is {attrs['output_padding']!r}", "less than stride or dilation")
    sizes = [windows.spread(*one, added) for one, added in zip(dims, more, strict=True)]
    _extents(op, x, sizes)
    return ((x.dtype, (x.shape[0], weight.shape[1] * groups, *sizes)),)


_Dim = tuple[int, int, int, tuple[int, int], int]  # size, kernel, stride, padding, dilation


def _convolved(op: str, inputs: Inputs, attrs: Attrs) -> tuple[TensorSpec, TensorSpec, int, list[_Dim]]:
    """x (N, C, ...), the weight, in how many groups, and of each dimension what slides over it."""
    x, weight = required(inputs, 2)
    float_dtype(op, inputs, OPS[op].inputs)
    slid(op, x)
    of_ndim(op, "weight", weight, x.ndim)
    for name, shape in (("x", x.shape[1:]), ("weight", weight.shape)):
        if 0 in shape:
            refuse(op, f"{name} has shape {list(x.shape if name == 'x' else shape)}", "extents of 1 or more")
    if attrs["activation"] != "":
        choice(op, attrs, "activation", LINEAR_ACTIVATIONS)
    groups = integer(op, attrs, "groups", 1, x.shape[1])
    count = x.ndim - 2
    dims = zip(
        x.shape[2:],
        weight.shape[2:],
        numbers(op, attrs, "stride", count, 1),
        padding(op, attrs, count),
        numbers(op, attrs, "dilation", count, 1),
        strict=True,
    )
    return x, weight, groups, list(dims)


def slid(op: str, x: TensorSpec) -> None:
    """x is (N, C, ...) with one to three dimensions that windows slide over."""
    if not 3 <= x.ndim <= 2 + windows.MAX_DIMS:
        refuse(op, f"x has shape {list(x.shape)}", "3 to 5 dimensions")


def numbers(op: str, attrs: Attrs, name: str, count: int, least: int = 0) -> tuple[int, ...]:
    """An attribute that has one number for each dimension."""
    found = windows.numbers_of(attrs[name])
    if found is None or len(found) != count or min(found) < least:
        refuse(op, f"{name} is {attrs[name]!r:.80}", f"{count} integers from {least} on, with commas")
    return found


def padding(op: str, attrs: Attrs, count: int) -> tuple[tuple[int, int], ...]:
    """Before and after each dimension."""
    numbers(op, attrs, "padding", 2 * count)
    return windows.pads(attrs["padding"])


def _bias(op: str, bias: Any, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        refuse(op, f"bias has shape {list(bias.shape)}", f"{[channels]}, the channels that come out")


def _extents(op: str, x: TensorSpec, sizes: list[int]) -> None:
    if min(sizes) < 1:
        refuse(op, f"x has shape {list(x.shape)} and the result would have {sizes}", "extents of 1 or more")


def _pool(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    """max_pool and avg_pool."""
    (x,) = required(inputs, 1)
    float_dtype(op, inputs, ("x",))
    slid(op, x)
    count = x.ndim - 2
    kernel = numbers(op, attrs, "kernel_size", count, 1)
    stride = numbers(op, attrs, "stride", count, 1)
    pads = padding(op, attrs, count)
    dilation = numbers(op, attrs, "dilation", count, 1) if op == "max_pool" else (1,) * count
    is_ceiled = flag(op, attrs, "ceil_mode")
    if op == "avg_pool":
        flag(op, attrs, "count_include_pad")
        integer(op, attrs, "divisor", 0, MAX_NBYTES)
    for n, pad in zip(kernel, pads, strict=True):
        if max(pad) > n // 2:
            refuse(op, f"padding is {attrs['padding']!r}", f"half of kernel_size {attrs['kernel_size']!r} at most")
    if 0 in x.shape[1:]:
        refuse(op, f"x has shape {list(x.shape)}", "extents of 1 or more")
    dims = zip(x.shape[2:], kernel, stride, pads, dilation, strict=True)
    sizes = [windows.count(*one, is_ceiled=is_ceiled) for one in dims]
    _extents(op, x, sizes)
    return ((x.dtype, (*x.shape[:2], *sizes)),)


def _adaptive_pool(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    float_dtype(op, inputs, ("x",))
    slid(op, x)
    sizes = numbers(op, attrs, "output_size", x.ndim - 2, 1)
    if 0 in x.shape[1:]:
        refuse(op, f"x has shape {list(x.shape)}", "extents of 1 or more")
    return ((x.dtype, (*x.shape[:2], *sizes)),)


def _interpolate(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (x,) = required(inputs, 1)
    float_dtype(op, inputs, ("x",))
    slid(op, x)
    count = x.ndim - 2
    size = numbers(op, attrs, "size", count, 1)
    if 0 in x.shape[1:]:
        refuse(op, f"x has shape {list(x.shape)}", "extents of 1 or more")
    scales = resampling.scales_of(attrs["scale"])
    if scales is None or len(scales) not in (0, count):
        refuse(op, f"scale is {attrs['scale']!r:.80}", f"'', or {count} finite numbers above 0, with commas")
    if scales and size != tuple(map(resampling.made_of, x.shape[2:], scales)):
        refuse(op, f"size is {attrs['size']!r} and scale {attrs['scale']!r}", "the size that the scale gives")
    mode = choice(op, attrs, "mode", resampling.MODES)
    is_aligned, is_smoothed = flag(op, attrs, "align_corners"), flag(op, attrs, "antialias")
    if mode.startswith("nearest") and (is_aligned or is_smoothed):
        refuse(op, f"mode is {mode!r} with align_corners or antialias", "linear or cubic")
    if count != 2 and (mode == "cubic" or is_smoothed):
        refuse(op, f"x has shape {list(x.shape)} and mode is {mode!r}, antialias {is_smoothed}", "4 dimensions")
    return ((x.dtype, (*x.shape[:2], *size)),)


VISION: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("adaptive_max_pool", "adaptive_avg_pool"), _adaptive_pool),
    "interpolate": _interpolate,
}
