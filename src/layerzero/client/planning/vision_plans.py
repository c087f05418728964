"""Plans of convolutions, pooling and interpolation. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from layerzero.client.planning.checks import choice, finite, flag, floating, fresh, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, Scalar, remember
from layerzero.ipc.vocabulary import resampling, windows
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.ipc.vocabulary.tensors import TensorSpec

MOST = 10**9 - 1  # of a number in an attribute
Pads = tuple[tuple[int, int], ...]


@remember
def plan_conv(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Plan:
    """torch.nn.functional.conv1d, conv2d and conv3d, and the activation of that."""
    op = "conv"
    x4, dims, steps, gaps = _convolved(op, x, weight, bias, stride, dilation, activation)
    pads = _padding(op, padding, dims, weight.shape[2:], gaps, steps)
    groups = _groups(op, groups, x4.shape[1])
    if weight.shape[1] * groups != x4.shape[1] or weight.shape[0] % groups:
        allowed = f"(out_channels, {x4.shape[1]} / groups, ...), out_channels a multiple of the {groups} groups"
        refuse(op, f"weight has shape {list(weight.shape)} and x {list(x.shape)}", allowed, "check groups")
    _bias(op, bias, weight.shape[0])
    sizes = [windows.count(*one) for one in zip(x4.shape[2:], weight.shape[2:], steps, pads, gaps, strict=True)]
    if 0 in sizes:
        found = f"x has shape {list(x.shape)} and weight {list(weight.shape)}"
        refuse(op, found, "windows that fit into what is padded", "pad more, or pass a smaller kernel")
    attrs: dict[str, Scalar] = {
        **_attrs(stride=steps, padding=_flat(pads), dilation=gaps),
        "groups": groups,
        "activation": activation or "",
    }
    return _planned(op, x, (x4, weight, bias), attrs, (x4.shape[0], weight.shape[0], *sizes))


@remember
def plan_conv_transpose(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    activation: str | None = None,
) -> Plan:
    """torch.nn.functional.conv_transpose1d, conv_transpose2d and conv_transpose3d, and the activation of that."""
    op = "conv_transpose"
    x4, dims, steps, gaps = _convolved(op, x, weight, bias, stride, dilation, activation)
    if isinstance(padding, str):
        refuse(op, f"padding is {padding!r}", "integers, or pairs of them", "pass what is to be cut off")
    pads = _padding(op, padding, dims, weight.shape[2:], gaps, steps)
    more = each(op, "output_padding", output_padding, dims)
    if any(one >= max(step, gap) for one, step, gap in zip(more, steps, gaps, strict=True)):
        refuse(op, f"output_padding is {output_padding!r}", "less than stride or dilation", "pass a smaller one")
    groups = _groups(op, groups, x4.shape[1])
    if weight.shape[0] != x4.shape[1] or weight.shape[0] % groups:
        allowed = f"({x4.shape[1]}, out_channels / groups, ...) of x's channels, a multiple of the {groups} groups"
        refuse(op, f"weight has shape {list(weight.shape)} and x {list(x.shape)}", allowed, "check groups")
    channels = weight.shape[1] * groups
    _bias(op, bias, channels)
    given = zip(x4.shape[2:], weight.shape[2:], steps, pads, gaps, more, strict=True)
    sizes = [windows.spread(*one) for one in given]
    if min(sizes) < 1:
        refuse(op, f"the result would have extents {sizes}", "1 or more", "pass less padding")
    attrs: dict[str, Scalar] = {
        **_attrs(stride=steps, padding=_flat(pads), output_padding=more, dilation=gaps),
        "groups": groups,
        "activation": activation or "",
    }
    return _planned(op, x, (x4, weight, bias), attrs, (x4.shape[0], channels, *sizes))


@remember
def plan_max_pool(
    x: TensorSpec,
    *,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Plan:
    """torch.nn.functional.max_pool1d, max_pool2d and max_pool3d."""
    op = "max_pool"
    gaps = each(op, "dilation", dilation, _pooled(op, x), 1)
    return _plan_pool(op, x, kernel_size, stride, padding, gaps, ceil_mode, {"dilation": windows.text_of(gaps)})


@remember
def plan_avg_pool(
    x: TensorSpec,
    *,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Plan:
    """torch.nn.functional.avg_pool1d, avg_pool2d and avg_pool3d."""
    op = "avg_pool"
    divisor = 0 if divisor_override is None else divisor_override
    if isinstance(divisor, bool) or not isinstance(divisor, Integral) or int(divisor) < (divisor_override is not None):
        refuse(op, f"divisor_override is {divisor_override!r}", "an integer from 1 on, or None", "pass one of them")
    more: dict[str, Scalar] = {
        "count_include_pad": flag(op, "count_include_pad", count_include_pad),
        "divisor": int(divisor),
    }
    return _plan_pool(op, x, kernel_size, stride, padding, (1,) * _pooled(op, x), ceil_mode, more)


def _plan_pool(
    op: str,
    x: TensorSpec,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    gaps: tuple[int, ...],
    ceil_mode: bool,
    more: dict[str, Scalar],
) -> Plan:
    dims = len(gaps)
    kernel = each(op, "kernel_size", kernel_size, dims, 1)
    steps = kernel if stride is None or stride == () else each(op, "stride", stride, dims, 1)
    pads = pairs(op, padding, dims) or tuple((n, n) for n in each(op, "padding", padding, dims))
    if any(max(pad) > n // 2 for pad, n in zip(pads, kernel, strict=True)):
        allowed = f"half of kernel_size {list(kernel)} at most"
        refuse(op, f"padding is {padding!r}", allowed, "pad with lz.cat, or pass a larger kernel")
    is_ceiled = flag(op, "ceil_mode", ceil_mode)
    given = zip(x.shape[2:], kernel, steps, pads, gaps, strict=True)
    sizes = [windows.count(*one, is_ceiled=is_ceiled) for one in given]
    if 0 in sizes:
        found = f"x has shape {list(x.shape)} and kernel_size is {list(kernel)}"
        refuse(op, found, "windows that fit into what is padded", "pad more, or pass a smaller kernel")
    attrs = {**_attrs(kernel_size=kernel, stride=steps, padding=_flat(pads)), "ceil_mode": is_ceiled, **more}
    result = fresh(op, x.dtype, (*x.shape[:2], *sizes))
    return Plan(op, (x,), attrs, (result,), (result,))


@remember
def plan_adaptive_max_pool(x: TensorSpec, *, output_size: Any) -> Plan:
    """torch.nn.functional.adaptive_max_pool1d, adaptive_max_pool2d and adaptive_max_pool3d."""
    return _plan_adaptive("adaptive_max_pool", x, output_size)


@remember
def plan_adaptive_avg_pool(x: TensorSpec, *, output_size: Any) -> Plan:
    """torch.nn.functional.adaptive_avg_pool1d, adaptive_avg_pool2d and adaptive_avg_pool3d."""
    return _plan_adaptive("adaptive_avg_pool", x, output_size)


def _plan_adaptive(op: str, x: TensorSpec, output_size: Any) -> Plan:
    dims = _pooled(op, x)
    if isinstance(output_size, Sequence) and len(output_size) == dims:  # None: as many as x has
        output_size = [size if n is None else n for n, size in zip(output_size, x.shape[2:], strict=True)]
    sizes = each(op, "output_size", output_size, dims, 1)
    result = fresh(op, x.dtype, (*x.shape[:2], *sizes))
    return Plan(op, (x,), _attrs(output_size=sizes), (result,), (result,))


@remember
def plan_interpolate(
    x: TensorSpec,
    *,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Plan:
    """torch.nn.functional.interpolate."""
    op = "interpolate"
    dims = _pooled(op, x)
    choice(op, "mode", mode, tuple(resampling.INTERPOLATIONS))
    ours, wanted = resampling.INTERPOLATIONS[mode]
    if wanted not in (0, dims):
        allowed = f"{wanted + 2} dimensions for {mode!r}"
        refuse(op, f"x has shape {list(x.shape)}", allowed, "pass another mode, or reshape it")
    if (size is None) == (scale_factor is None):
        refuse(op, f"size is {size!r} and scale_factor {scale_factor!r}", "one of them", "leave out the other")
    is_aligned = flag(op, "align_corners", False if align_corners is None else align_corners)
    if align_corners is not None and ours.startswith("nearest"):
        refuse(op, f"align_corners is {align_corners!r} and mode {mode!r}", "None", "leave it out")
    is_smoothed = flag(op, "antialias", antialias)
    if is_smoothed and (dims != 2 or ours.startswith("nearest")):
        refuse(op, f"antialias is True and mode {mode!r}", "'bilinear' or 'bicubic'", "leave it out")
    scales: tuple[float, ...] = ()
    if size is not None:
        if recompute_scale_factor:
            refuse(op, "recompute_scale_factor is True and size is given", "scale_factor", "leave it out")
        made = each(op, "size", size, dims, 1)
    else:
        scales = _scales(op, scale_factor, dims)
        made = tuple(map(resampling.made_of, x.shape[2:], scales))
        if 0 in made or max(made) > MOST:
            refuse(
                op,
                f"scale_factor is {scale_factor!r} and x has shape {list(x.shape)}",
                "extents of 1 or more",
                "scale by more",
            )
        if recompute_scale_factor is not None and flag(op, "recompute_scale_factor", recompute_scale_factor):
            scales = ()
    attrs: dict[str, Scalar] = {
        **{"size": windows.text_of(made), "scale": resampling.text_of(scales), "mode": ours},
        **{"align_corners": is_aligned, "antialias": is_smoothed},
    }
    result = fresh(op, x.dtype, (*x.shape[:2], *made))
    return Plan(op, (x,), attrs, (result,), (result,))


def _scales(op: str, given: Any, count: int) -> tuple[float, ...]:
    numbers = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * count
    found = tuple(finite(op, "scale_factor", one, "size") for one in numbers)
    if len(found) != count or min(found) <= 0.0:
        allowed = f"a number above 0, or {count} of them"
        refuse(op, f"scale_factor is {given!r:.80}", allowed, "pass one for each dimension after the channels")
    return found


def _pooled(op: str, x: TensorSpec) -> int:
    """How many dimensions a window has."""
    floating(op, "x", x)
    if not 3 <= x.ndim <= 2 + windows.MAX_DIMS:
        allowed = "(batch, channels, ...) of 3 to 5 dimensions"
        refuse(op, f"x has shape {list(x.shape)}", allowed, "unsqueeze it, if it lacks the batch")
    if 0 in x.shape[1:]:
        refuse(op, f"x has shape {list(x.shape)}", "1 or more, but for the batch", "leave out the call")
    return x.ndim - 2


def _planned(
    op: str,
    x: TensorSpec,
    inputs: tuple[TensorSpec | None, ...],
    attrs: dict[str, Scalar],
    shape: tuple[int, ...],
) -> Plan:
    """Of an x without a batch the result has none either."""
    result = fresh(op, x.dtype, shape)
    first = inputs[0]
    assert first is not None
    seen = result if x.ndim == first.ndim else fresh(op, x.dtype, shape[1:])
    return Plan(op, inputs, attrs, (result,), (seen,))


def _convolved(
    op: str,
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Any,
    dilation: Any,
    activation: str | None,
) -> tuple[TensorSpec, int, tuple[int, ...], tuple[int, ...]]:
    """x with a batch, how many dimensions a window has, and its stride and dilation in each."""
    same_float_dtype(op, x=x, weight=weight, bias=bias)
    dims = weight.ndim - 2
    if not 1 <= dims <= windows.MAX_DIMS or x.ndim not in (dims + 1, dims + 2):
        allowed = "a weight of 3 to 5 dimensions, and as many of x, or one less without a batch"
        refuse(op, f"x has shape {list(x.shape)} and weight {list(weight.shape)}", allowed, "reshape them")
    x4 = x.unsqueeze(0) if x.ndim == dims + 1 else x
    for name, shape in (("x", x4.shape[1:]), ("weight", weight.shape)):
        if 0 in shape:
            refuse(op, f"{name} has shape {list(shape)}", "1 or more, but for the batch", "leave out the call")
    if activation is not None:
        choice(op, "activation", activation, LINEAR_ACTIVATIONS)
    return x4, dims, each(op, "stride", stride, dims, 1), each(op, "dilation", dilation, dims, 1)


def each(op: str, name: str, value: Any, count: int, least: int = 0) -> tuple[int, ...]:
    """A number for all dimensions, or one for each."""
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    is_fit = len(given) in (1, count) and all(
        isinstance(n, Integral) and not isinstance(n, bool) and least <= int(n) <= MOST for n in given
    )
    if not is_fit:
        allowed = f"an integer from {least} on, or {count} of them"
        refuse(op, f"{name} is {value!r:.80}", allowed, "pass one for each dimension after the channels")
    numbers = tuple(int(n) for n in given)
    return numbers * count if len(numbers) == 1 else numbers


def pairs(op: str, padding: Any, count: int) -> Pads | None:
    """Padding that is a pair for each dimension; None where it is something else."""
    if not isinstance(padding, Sequence) or isinstance(padding, str):
        return None
    if not any(isinstance(one, Sequence) for one in padding):
        return None
    if len(padding) != count or not all(isinstance(one, Sequence) and len(one) == 2 for one in padding):
        allowed = f"an integer from 0 on, {count} of them, or {count} pairs (before, after)"
        refuse(op, f"padding is {padding!r:.80}", allowed, "pass one for each dimension after the channels")
    low, high = (each(op, "padding", [one[side] for one in padding], count) for side in (0, 1))
    return tuple(zip(low, high, strict=True))


def _padding(
    op: str, padding: Any, count: int, kernel: Sequence[int], gaps: Sequence[int], steps: Sequence[int]
) -> Pads:
    if isinstance(padding, str):
        choice(op, "padding", padding, ("valid", "same"))
        if padding == "valid":
            return ((0, 0),) * count
        if any(step != 1 for step in steps):
            refuse(op, f"padding is 'same' and stride {list(steps)}", "a stride of 1", "pass integers")
        totals = [windows.reach(n, gap) - 1 for n, gap in zip(kernel, gaps, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    found = pairs(op, padding, count)
    return tuple((n, n) for n in each(op, "padding", padding, count)) if found is None else found


def _groups(op: str, groups: object, channels: int) -> int:
    if isinstance(groups, bool) or not isinstance(groups, Integral) or not 1 <= int(groups) <= channels:
        refuse(op, f"groups is {groups!r}", f"an integer from 1 to x's {channels} channels", "pass one of them")
    return int(groups)


def _bias(op: str, bias: TensorSpec | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        refuse(op, f"bias has shape {list(bias.shape)}", f"{[channels]}, one for each out channel", "reshape it")


def _flat(pads: Pads) -> tuple[int, ...]:
    return (*(low for low, _ in pads), *(high for _, high in pads))


def _attrs(**numbers: tuple[int, ...]) -> dict[str, Scalar]:
    return {name: windows.text_of(given) for name, given in numbers.items()}
