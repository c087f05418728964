"""What convolutions mean, before their activation, pooling and interpolation. As workers/certify/reference.py, which
has all ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.workers.certify.values import Attrs, Shape, Values, given

Taps = list[tuple[int, int]]  # of a result's place: an element of the window, and the place that it falls on


def taps(size: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int, made: int) -> list[Taps]:
    """Of each place of one dimension of a result, without what is padded."""
    places = ([(t, o * stride - pad[0] + t * dilation) for t in range(kernel)] for o in range(made))
    return [[(t, place) for t, place in one if 0 <= place < size] for one in places]


def spread(size: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int, made: int) -> list[Taps]:
    """Of a transposed convolution: the windows that reach each place, by which of their elements."""
    found: list[Taps] = [[] for _ in range(made)]
    for place in range(size):
        for t in range(kernel):
            o = place * stride + t * dilation - pad[0]
            if 0 <= o < made:
                found[o].append((t, place))
    return found


def steps(shape: Shape) -> list[int]:
    """How far apart elements are that follow each other in each dimension."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def together(each: Sequence[Taps], kernel: Shape, sizes: Shape) -> Taps:
    """Of all dimensions: the place in a window, and in a channel."""
    by, to = steps(kernel), steps(sizes)
    return [
        (sum(t * n for (t, _), n in zip(one, by, strict=True)), sum(p * n for (_, p), n in zip(one, to, strict=True)))
        for one in itertools.product(*each)
    ]


def conv(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    x, weight = given(inputs[:2])
    slid = list(_slid(x.shape, weight.shape[2:], attrs))
    made = tuple(windows.count(*one) for one in slid)
    each = [taps(*one, many) for one, many in zip(slid, made, strict=True)]
    return _summed(x, weight, inputs[2], attrs, each, made, (weight.shape[0], weight.shape[1]), is_transposed=False)


def conv_transpose(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    x, weight = given(inputs[:2])
    slid = list(_slid(x.shape, weight.shape[2:], attrs))
    more = windows.known(attrs["output_padding"])
    made = tuple(windows.spread(*one, added) for one, added in zip(slid, more, strict=True))
    each = [spread(*one, many) for one, many in zip(slid, made, strict=True)]
    channels = weight.shape[1] * attrs["groups"], x.shape[1] // attrs["groups"]
    return _summed(x, weight, inputs[2], attrs, each, made, channels, is_transposed=True)


def _slid(shape: Shape, kernel: Shape, attrs: Attrs) -> Iterator[tuple[int, int, int, tuple[int, int], int]]:
    numbers = (windows.known(attrs["stride"]), windows.pads(attrs["padding"]), windows.known(attrs["dilation"]))
    return zip(shape[2:], kernel, *numbers, strict=True)


def _summed(
    x: Values,
    weight: Values,
    bias: Values | None,
    attrs: Attrs,
    each: Sequence[list[Taps]],
    made: Shape,
    channels: tuple[int, int],
    *,
    is_transposed: bool,
) -> Values:
    """`channels`: that come out, and that each of those is a sum over."""
    count, summed = channels
    kernel, sizes = weight.shape[2:], x.shape[2:]
    area, room, per_group = math.prod(kernel), math.prod(sizes), count // attrs["groups"]
    places = [together(one, kernel, sizes) for one in itertools.product(*each)]
    out = []
    for n in range(x.shape[0]):
        for m in range(count):
            group, within = divmod(m, per_group)
            first = 0.0 if bias is None else bias.flat[m]
            pairs = []
            for c in range(summed):
                channel = group * summed + c
                row = channel * weight.shape[1] + within if is_transposed else m * weight.shape[1] + c
                pairs.append((row * area, (n * x.shape[1] + channel) * room))
            for found in places:
                out.append(first + sum(weight.flat[w + t] * x.flat[v + p] for w, v in pairs for t, p in found))
    return Values((x.shape[0], count, *made), out)


def max_pool(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    return _of_windows(x, _pooled(x.shape, attrs, windows.known(attrs["dilation"])), _largest)


def avg_pool(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    each = _pooled(x.shape, attrs, (1,) * (len(x.shape) - 2))
    counted = attrs["count_include_pad"]
    kernel, stride = (windows.known(attrs[name]) for name in ("kernel_size", "stride"))
    slid = zip(x.shape[2:], map(len, each), kernel, stride, windows.pads(attrs["padding"]), strict=True)
    counts = [windows.shares(*one, counts_padding=counted) for one in slid]
    divisors = [attrs["divisor"] or math.prod(one) for one in itertools.product(*counts)]
    return _of_windows(x, each, lambda found, number: sum(found) / divisors[number])


def adaptive_max_pool(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    return _of_windows(x, _adapted(x.shape, attrs), _largest)


def _largest(found: Sequence[float], _: int) -> float:
    """NaN where there is one; Python's max finds it at the start of a window alone."""
    return math.nan if any(map(math.isnan, found)) else max(found, default=-math.inf)


def adaptive_avg_pool(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    return _of_windows(x, _adapted(x.shape, attrs), lambda found, _: sum(found) / len(found))


def _pooled(shape: Shape, attrs: Attrs, dilation: Shape) -> list[list[Taps]]:
    numbers = (windows.known(attrs["kernel_size"]), windows.known(attrs["stride"]), windows.pads(attrs["padding"]))
    slid = list(zip(shape[2:], *numbers, dilation, strict=True))
    return [taps(*one, windows.count(*one, is_ceiled=attrs["ceil_mode"])) for one in slid]


def _adapted(shape: Shape, attrs: Attrs) -> list[list[Taps]]:
    found = []
    for size, made in zip(shape[2:], windows.known(attrs["output_size"]), strict=True):
        found.append([[(0, place) for place in range(*ends)] for ends in windows.adapted(size, made)])
    return found


def _of_windows(x: Values, each: Sequence[list[Taps]], reduce: Callable[[list[float], int], float]) -> Values:
    """Of what each window sees, and of the window's number."""
    sizes = x.shape[2:]
    places = [[p for _, p in together(one, sizes, sizes)] for one in itertools.product(*each)]
    room = math.prod(sizes)
    out = []
    for start in range(0, math.prod(x.shape), max(room, 1)):
        out += [reduce([x.flat[start + p] for p in seen], number) for number, seen in enumerate(places)]
    return Values((*x.shape[:2], *map(len, each)), out)


def interpolate(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Sums over elements around, in all dimensions at once."""
    (x,) = given(inputs)
    sizes, made = x.shape[2:], windows.known(attrs["size"])
    scales = resampling.scales_of(attrs["scale"]) or (None,) * len(sizes)
    options = {"is_aligned": attrs["align_corners"], "is_smoothed": attrs["antialias"]}
    each = [
        resampling.taps(size, many, scale, attrs["mode"], **options)
        for size, many, scale in zip(sizes, made, scales, strict=True)
    ]
    apart = steps(sizes)
    places = [
        [
            (sum(p * n for (p, _), n in zip(one, apart, strict=True)), math.prod(weight for _, weight in one))
            for one in itertools.product(*around)
        ]
        for around in itertools.product(*each)
    ]
    out: list[float] = []
    for start in range(0, math.prod(x.shape), max(math.prod(sizes), 1)):
        out += [sum(x.flat[start + p] * weight for p, weight in around) for around in places]
    return Values((*x.shape[:2], *made), out)


RESIZED: dict[str, Callable[[Sequence[Values | None], Attrs], Values]] = {
    "max_pool": max_pool,
    "avg_pool": avg_pool,
    "adaptive_max_pool": adaptive_max_pool,
    "adaptive_avg_pool": adaptive_avg_pool,
    "interpolate": interpolate,
}
