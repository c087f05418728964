"""Convolutions, pooling and interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import vision_plans as plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray

Numbers = int | Sequence[int]
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]


def conv(
    input: ArrayT,
    weight: AnyArray,
    bias: AnyArray | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    activation: str | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The convolution of one to three dimensions, and the activation of that: conv1d, conv2d and conv3d of torch.

    input: (batch, channels, ...) or without batch, weight: (out_channels, channels / groups, ...), bias:
    (out_channels); one floating-point dtype for all. The weight says how many dimensions there are. stride, dilation:
    a number, or one for each dimension. padding: likewise, or a pair (before, after) for each, "valid" for none, or
    "same" for a result of input's extents. groups: channels of a group see each other alone; with as many as channels
    the convolution is depthwise. activation: "relu", "gelu" (by erf), "gelu_tanh", "silu" or None. Returns (batch,
    out_channels, ...). Raises InvalidArgument. Source: torch.nn.functional.conv2d; Conv of ONNX.
    """
    params = {
        **_hashable(stride=stride, padding=padding, dilation=dilation),
        "groups": groups,
        "activation": activation,
    }
    return perform(Request("conv", (input, weight, bias), params, plans.plan_conv, out, backend, timeout_s))


def conv_transpose(
    input: ArrayT,
    weight: AnyArray,
    bias: AnyArray | None = None,
    stride: Numbers = 1,
    padding: Padding = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
    activation: str | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The transposed convolution: what conv's gradient by its input is, and the activation of that.

    input: (batch, channels, ...) or without batch, weight: (channels, out_channels / groups, ...), bias:
    (out_channels); one floating-point dtype for all. stride, dilation, groups, activation: as conv. padding: what is
    cut off, a number, one for each dimension, or a pair (before, after) for each. output_padding: more elements at the
    end, less than stride or dilation. An extent becomes (extent - 1) * stride + dilation * (kernel - 1) + 1 - before -
    after + output_padding. Raises InvalidArgument. Source: torch.nn.functional.conv_transpose2d; ConvTranspose of ONNX.
    """
    params = {
        **_hashable(stride=stride, padding=padding, output_padding=output_padding, dilation=dilation),
        "groups": groups,
        "activation": activation,
    }
    planner = plans.plan_conv_transpose
    return perform(Request("conv_transpose", (input, weight, bias), params, planner, out, backend, timeout_s))


def max_pool(
    input: ArrayT,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers | Sequence[tuple[int, int]] = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The largest element of each window of one to three dimensions: max_pool1d, max_pool2d and max_pool3d of torch.

    input: (batch, channels, ...), any float dtype. kernel_size, dilation: a number, or one for each dimension. stride:
    likewise, kernel_size where None. padding: likewise, or a pair (before, after) for each, at most half of
    kernel_size; it is never the largest. ceil_mode: a last window may reach beyond the padding. Returns (batch,
    channels, ...). Raises InvalidArgument. Source: torch.nn.functional.max_pool2d; MaxPool of ONNX.
    """
    params = {
        **_hashable(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation),
        "ceil_mode": ceil_mode,
    }
    return perform(Request("max_pool", (input,), params, plans.plan_max_pool, out, backend, timeout_s))


def avg_pool(
    input: ArrayT,
    kernel_size: Numbers,
    stride: Numbers | None = None,
    padding: Numbers | Sequence[tuple[int, int]] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The mean of each window of one to three dimensions: avg_pool1d, avg_pool2d and avg_pool3d of torch.

    Arguments as max_pool. With count_include_pad the zeros of the padding count, too; what lies beyond it never does.
    divisor_override: what sums are divided by in place of the number of elements. Returns (batch, channels, ...).
    Raises InvalidArgument. Source: torch.nn.functional.avg_pool2d; AveragePool of ONNX.
    """
    params = {
        **_hashable(kernel_size=kernel_size, stride=stride, padding=padding),
        "ceil_mode": ceil_mode,
        "count_include_pad": count_include_pad,
        "divisor_override": divisor_override,
    }
    return perform(Request("avg_pool", (input,), params, plans.plan_avg_pool, out, backend, timeout_s))


def adaptive_max_pool(
    input: ArrayT,
    output_size: int | Sequence[int | None],
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The largest element of as many windows as are asked for, which cover input: element o of an extent n that becomes
    m is of n * o // m to the ceiling of n * (o + 1) / m.

    input: (batch, channels, ...), any float dtype. output_size: a number, or one for each dimension, None for input's.
    Raises InvalidArgument. Source: torch.nn.functional.adaptive_max_pool2d.
    """
    params, planner = _hashable(output_size=output_size), plans.plan_adaptive_max_pool
    return perform(Request("adaptive_max_pool", (input,), params, planner, out, backend, timeout_s))


def adaptive_avg_pool(
    input: ArrayT,
    output_size: int | Sequence[int | None],
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The mean of the windows of adaptive_max_pool; output_size=1 is a mean over everything. Source:
    torch.nn.functional.adaptive_avg_pool2d; GlobalAveragePool of ONNX."""
    params, planner = _hashable(output_size=output_size), plans.plan_adaptive_avg_pool
    return perform(Request("adaptive_avg_pool", (input,), params, planner, out, backend, timeout_s))


def interpolate(
    input: ArrayT,
    size: Numbers | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input with other extents, by its nearest elements or by weights of those around.

    input: (batch, channels, ...), any float dtype. size: the new extents, a number, or one for each dimension; or
    scale_factor, by which they are multiplied and cut. mode: "nearest", "nearest-exact", "linear", "bilinear",
    "trilinear" (of one, two and three dimensions) or "bicubic". align_corners: the centres of the elements at the
    corners stay where they are. recompute_scale_factor: coordinates are computed by the extents, not by scale_factor.
    antialias: where the result is smaller, with a wider filter; of "bilinear" and "bicubic". Returns (batch, channels,
    ...). Raises InvalidArgument. Source: torch.nn.functional.interpolate; Keys 1981 of bicubic.
    """
    params = {
        **_hashable(size=size, scale_factor=scale_factor),
        **{"mode": mode, "align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor},
        "antialias": antialias,
    }
    return perform(Request("interpolate", (input,), params, plans.plan_interpolate, out, backend, timeout_s))


def _hashable(**params: Any) -> dict[str, Any]:
    """Plans are remembered by their arguments."""
    return {name: _tuple(value) for name, value in params.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
