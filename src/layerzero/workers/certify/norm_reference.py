"""What norms and their gradients mean, as workers/certify/reference.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add, mul

from layerzero.workers.certify.values import Attrs, Values, given, rows_of


def layer_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def normalize(row: Sequence[float]) -> list[float]:
        mean = math.fsum(row) / len(row)
        variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
        return [(value - mean) / math.sqrt(variance + attrs["eps"]) for value in row]

    return _normalized(inputs, attrs, normalize)


def rms_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def normalize(row: Sequence[float]) -> list[float]:
        mean_square = math.fsum(value * value for value in row) / len(row)
        return [value / math.sqrt(mean_square + attrs["eps"]) for value in row]

    return _normalized(inputs, attrs, normalize)


def add_rms_norm(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """The norm of a sum, and the sum."""
    x, residual = given(inputs[:2])
    summed = Values(x.shape, list(map(add, x.flat, residual.flat)))
    return rms_norm([summed, inputs[2]], attrs), summed


def group_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """layer_norm of each group, with a weight and a bias of each channel."""
    x, weight, bias = inputs
    assert x is not None
    batch, channels = x.shape[:2]
    count = math.prod(x.shape[2:])
    groups = attrs.get("num_groups", channels)
    alone = Values((batch * groups, len(x.flat) // max(batch * groups, 1)), x.flat)
    normalized = layer_norm([alone], {"ndim": 1, "eps": attrs["eps"]})
    return _by_channels(Values(x.shape, normalized.flat), count, weight, bias)


def batch_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """(x - mean) / sqrt(var + eps), of each channel."""
    x, mean, var = given(inputs[:3])
    count, channels = math.prod(x.shape[2:]), x.shape[1]
    roots = [math.sqrt(value + attrs["eps"]) for value in var.flat]
    flat = []
    for i, value in enumerate(x.flat):
        channel = i // count % channels
        flat.append((value - mean.flat[channel]) / roots[channel])
    return _by_channels(Values(x.shape, flat), count, *inputs[3:])


def layer_norm_backward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, ...]:
    """The gradients of layer_norm by x, weight and bias."""
    return _norm_gradients(inputs, attrs, is_centred=True)


def rms_norm_backward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, ...]:
    """The gradients of rms_norm by x and weight."""
    return _norm_gradients(inputs, attrs, is_centred=False)[:2]


def _normalized(
    inputs: Sequence[Values | None], attrs: Attrs, normalize: Callable[[Sequence[float]], list[float]]
) -> Values:
    x, weight, bias = (*inputs, None, None)[:3]
    assert x is not None
    width = math.prod(x.shape[len(x.shape) - attrs["ndim"] :])
    out: list[float] = []
    for row in rows_of(x.flat, width, 0, math.prod(x.shape) // width if width else 0):
        values = normalize(row)
        values = values if weight is None else list(map(mul, values, weight.flat))
        out += values if bias is None else [value + more for value, more in zip(values, bias.flat, strict=True)]
    return Values(x.shape, out)


def _by_channels(x: Values, count: int, weight: Values | None, bias: Values | None) -> Values:
    """x times the weight of each channel, and its bias; `count`: elements of a channel."""
    channels = x.shape[1]
    flat = []
    for i, value in enumerate(x.flat):
        channel = i // count % channels
        scaled = value if weight is None else value * weight.flat[channel]
        flat.append(scaled if bias is None else scaled + bias.flat[channel])
    return Values(x.shape, flat)


def _norm_gradients(inputs: Sequence[Values | None], attrs: Attrs, *, is_centred: bool) -> tuple[Values, ...]:
    """With n what the norm multiplies by the weight, r what it multiplies x by, g = grad_out * weight: by x
    r (g - n mean(g n) - mean(g)), the last mean where the norm subtracts one; by weight the sums of grad_out * n over
    rows, by bias those of grad_out."""
    grad_out, x = given(inputs[:2])
    weight = inputs[2]
    shape = x.shape[len(x.shape) - attrs["ndim"] :]
    width = math.prod(shape)
    count = math.prod(x.shape) // width if width else 0
    by_x: list[float] = []
    by_weight, by_bias = [0.0] * width, [0.0] * width
    for row, grad in zip(rows_of(x.flat, width, 0, count), rows_of(grad_out.flat, width, 0, count), strict=True):
        centre = math.fsum(row) / width if is_centred else 0.0
        moved = [value - centre for value in row]
        r = 1 / math.sqrt(math.fsum(map(mul, moved, moved)) / width + attrs["eps"])
        n = [value * r for value in moved]
        by_weight = list(map(add, by_weight, map(mul, grad, n)))
        by_bias = list(map(add, by_bias, grad))
        g = grad if weight is None else list(map(mul, grad, weight.flat))
        along, mean = math.fsum(map(mul, g, n)) / width, math.fsum(g) / width if is_centred else 0.0
        by_x += [r * (value - mean - along * one) for value, one in zip(g, n, strict=True)]
    return Values(x.shape, by_x), Values(shape, by_weight), Values(shape, by_bias)


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values | tuple[Values, ...]]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "group_norm": group_norm,
    "instance_norm": group_norm,
    "batch_norm": batch_norm,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
}
