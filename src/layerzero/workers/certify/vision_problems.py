"""The problems of convolutions, pooling and interpolation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values

# x, the weight's channels that come out, its kernel, and what it slides by: strides, padding before and after, dilation
_One = tuple[Shape, int, Shape, int, int, int, int]
_SLID: list[_One] = [
    ((2, 4, 9), 4, (3,), 1, 1, 1, 1),
    ((2, 4, 40), 8, (5,), 2, 2, 1, 1),
    ((1, 4, 12), 4, (3,), 1, 2, 2, 2),
    ((2, 4, 5, 6), 4, (3, 3), 1, 1, 1, 1),
    ((1, 4, 7, 6), 8, (3, 2), 2, 1, 0, 1),
    ((2, 4, 6, 7), 4, (1, 1), 1, 0, 0, 1),
    ((1, 4, 7, 6), 4, (2, 3), 1, 2, 2, 2),
    ((1, 16, 5, 5), 16, (3, 3), 1, 1, 1, 1),
    ((1, 4, 3, 4, 3), 4, (2, 2, 2), 1, 1, 1, 1),
    ((1, 4, 5, 4, 5), 4, (3, 1, 2), 2, 1, 0, 1),
    ((0, 4, 5, 5), 4, (3, 3), 1, 1, 1, 1),
    ((1, 4, 7, 4), 8, (3, 3), 2, 0, 0, 1),  # one column comes out: oneDNN's bfloat16 with AMX has it wrong
]


def _conv(op: str) -> Callable[[Claims], Iterator[Problem]]:
    return functools.partial(_problems, op)


def _problems(op: str, _: Claims) -> Iterator[Problem]:
    """In one group, in two, and in as many as there are channels."""
    numbers = Numbers(len(op))
    for slid in _SLID:
        for groups in (1, 2, slid[0][1]):
            yield _one(op, numbers, slid, groups, groups != 2, "")
    for activation in LINEAR_ACTIVATIONS:
        for slid in (_SLID[0], _SLID[3], _SLID[7]):
            yield _one(op, numbers, slid, 1, slid is not _SLID[3], activation)


def _one(op: str, numbers: Numbers, slid: _One, groups: int, has_bias: bool, activation: str) -> Problem:
    """The transposed one gets the weight with its first two dimensions for one another."""
    shape, channels, kernel, stride, before, after, dilation = slid
    dims = len(kernel)
    attrs: dict[str, Any] = {
        "stride": windows.text_of([stride] * dims),
        "padding": windows.text_of([before] * dims + [after] * dims),
        "dilation": windows.text_of([dilation] * dims),
        "groups": groups,
        "activation": activation,
    }
    first, second = channels, shape[1] // groups
    if op == "conv_transpose":
        first, second = shape[1], channels // groups
        attrs["output_padding"] = windows.text_of([1 if stride > 1 else 0] * dims)
    weight = numbers(first, second, *kernel)
    title = (
        f"{list(shape)} by {list(weight.shape)} in {groups}, stride {stride}{', ' if activation else ''}{activation}"
    )
    return Problem(op, title, attrs, (numbers(*shape), weight, numbers(channels) if has_bias else None))


# x, kernel, and stride, padding before and after, dilation, whether the last window may reach beyond
_POOLED: list[tuple[Shape, Shape, int, int, int, int, bool]] = [
    ((2, 3, 9), (3,), 2, 0, 0, 1, False),
    ((2, 3, 100), (2,), 2, 1, 1, 1, True),
    ((1, 3, 20), (3,), 2, 1, 0, 1, True),
    ((2, 17, 11), (4,), 3, 0, 0, 1, True),
    ((1, 3, 7, 6), (2, 3), 2, 0, 0, 1, True),
    ((1, 3, 7, 6), (3, 2), 1, 1, 1, 1, False),
    ((2, 5, 9, 8), (3, 3), 2, 1, 1, 1, False),
    ((2, 16, 5, 6), (2, 2), 2, 0, 0, 1, False),
    ((1, 4, 8, 9), (3, 2), 2, 1, 0, 2, True),
    ((1, 2, 4, 5, 3), (2, 3, 2), 2, 0, 0, 1, True),
    ((1, 2, 4, 5, 3), (3, 2, 2), 1, 1, 1, 1, False),
    ((2, 3, 4, 5, 6), (2, 2, 2), 2, 1, 0, 1, True),
    ((2, 3, 4, 5, 6), (2, 2, 2), 2, 0, 0, 1, False),
    ((0, 3, 5, 5), (2, 2), 2, 0, 0, 1, False),
]


def _pool(op: str) -> Callable[[Claims], Iterator[Problem]]:
    return functools.partial(_pool_problems, op)


def _pool_problems(op: str, _: Claims) -> Iterator[Problem]:
    numbers = Numbers(len(op))
    for number, (shape, kernel, stride, before, after, dilation, is_ceiled) in enumerate(_POOLED):
        dims = len(kernel)
        attrs: dict[str, Any] = {
            "kernel_size": windows.text_of(kernel),
            "stride": windows.text_of([stride] * dims),
            "padding": windows.text_of([before] * dims + [after] * dims),
            "ceil_mode": is_ceiled,
        }
        if op == "max_pool":
            every: list[dict[str, Any]] = [{"dilation": windows.text_of([dilation] * dims)}]
        else:
            every = [{"count_include_pad": counted, "divisor": 0} for counted in (True, False)]
            every += [{"count_include_pad": True, "divisor": 3}] if number % 3 == 1 else []
        for more in every:
            title = f"{list(shape)} by {list(kernel)}, stride {stride}, padding {before} and {after}, {more}"
            x = numbers(*shape)
            yield Problem(op, title, {**attrs, **more}, (x,))
            if op == "max_pool" and number == 1:
                yield Problem(op, f"{title}, with NaN", {**attrs, **more}, (_with_nan(x),))


def _with_nan(values: Values) -> Values:
    """Three of them."""
    return Values(values.shape, lambda: [math.nan if i % 11 == 7 and i < 33 else v for i, v in enumerate(values.flat)])


_ADAPTED: list[tuple[Shape, Shape]] = [
    *(((2, 3, 10), (3,)), ((2, 3, 100), (7,)), ((1, 2, 3), (5,)), ((2, 3, 7, 6), (1, 1)), ((1, 2, 7, 6), (3, 2))),
    *(((2, 16, 8, 8), (4, 4)), ((2, 5, 9, 10), (4, 7)), ((1, 2, 3, 4, 5), (2, 2, 2)), ((2, 3, 4, 5, 6), (3, 5, 1))),
    ((0, 3, 5, 5), (2, 2)),
]


def _adaptive(op: str) -> Callable[[Claims], Iterator[Problem]]:
    def problems(_: Claims) -> Iterator[Problem]:
        numbers = Numbers(len(op))
        for shape, made in _ADAPTED:
            title, attrs, x = f"{list(shape)} to {list(made)}", {"output_size": windows.text_of(made)}, numbers(*shape)
            yield Problem(op, title, attrs, (x,))
            if op == "adaptive_max_pool" and shape == (2, 16, 8, 8):
                yield Problem(op, f"{title}, with NaN", attrs, (_with_nan(x),))

    return problems


# x, the extents that come out, and the factors by which those were asked for
_RESIZED: list[tuple[Shape, Shape, tuple[float, ...]]] = [
    ((2, 3, 7), (12,), ()),
    ((2, 3, 60), (27,), ()),
    ((2, 3, 5), (13,), (2.625,)),
    ((1, 3, 5, 4), (8, 6), ()),
    ((2, 3, 9, 8), (4, 3), ()),
    ((1, 2, 4, 5), (6, 13), (1.5, 2.625)),
    ((2, 3, 8, 9), (5, 3), (0.6875, 0.375)),
    ((1, 2, 6, 5), (1, 5), ()),
    ((1, 2, 3, 4, 3), (4, 3, 6), ()),
    ((2, 3, 4, 5, 6), (3, 7, 4), ()),
    ((0, 3, 5, 5), (2, 2), ()),
]


def _interpolate(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(31)
    for shape, made, scales in _RESIZED:
        for mode in resampling.MODES:
            for is_aligned, is_smoothed in itertools.product((False, True), repeat=2):
                is_plain = not is_aligned and not is_smoothed
                if (mode.startswith("nearest") and not is_plain) or (
                    len(made) != 2 and (mode == "cubic" or is_smoothed)
                ):
                    continue
                attrs = {
                    **{"size": windows.text_of(made), "scale": resampling.text_of(scales), "mode": mode},
                    **{"align_corners": is_aligned, "antialias": is_smoothed},
                }
                yield Problem("interpolate", f"{list(shape)}: {attrs}", attrs, (numbers(*shape),))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "conv": _conv("conv"),
    "conv_transpose": _conv("conv_transpose"),
    **{op: _pool(op) for op in ("max_pool", "avg_pool")},
    "interpolate": _interpolate,
    **{op: _adaptive(op) for op in ("adaptive_max_pool", "adaptive_avg_pool")},
}
