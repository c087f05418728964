"""The problems of ops that work element by element, and of cat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from layerzero.ipc.vocabulary.ops import CAST_DTYPES, CAT_INPUTS
from layerzero.workers.certify.claims import Claims, fit
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values

_SHAPES: list[Shape] = [(3, 43), (2, 3, 96), (), (0, 4)]
_PAIRS: list[tuple[Shape, Shape]] = [
    *((shape, shape) for shape in _SHAPES),
    *(((3, 1), (1, 43)), ((43,), (3, 43)), ((2, 3, 96), (96,)), ((2, 1, 96), (3, 1)), ((2, 3, 96), ())),
    ((0, 4), (4,)),
]


def _pair(op: str) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = Numbers(22)
        for one, other in _PAIRS:
            shapes = fit(claims, one), fit(claims, other)
            yield Problem(op, f"{list(one)} and {list(other)}", {}, tuple(numbers(*shape) for shape in shapes))

    return problems


def _clamp(claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(23)
    for scale, families in ((1 / 16, ("float",)), (1, ("int", "uint"))):
        for low, high in ((10, 30), (10, None), (None, 30), (30, 10)):
            attrs = {name: bound and bound * scale for name, bound in (("min", low), ("max", high))}
            for shape in dict.fromkeys(fit(claims, shape) for shape in _SHAPES):
                title = f"{list(shape)} to {attrs['min']} and {attrs['max']}"
                yield Problem("clamp", title, attrs, (numbers(*shape),), families=families)
            if "float" in families:
                odd = Values(fit(claims, (5,)), [math.inf, -math.inf, 1.0, math.inf, -2.0])
                yield Problem(
                    "clamp", f"infinities to {attrs['min']} and {attrs['max']}", attrs, (odd,), families=families
                )


def _where(claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(24)
    several: list[tuple[Shape, Shape, Shape]] = [
        *((shape, shape, shape) for shape in _SHAPES),
        *(((3, 1), (43,), ()), ((96,), (2, 3, 96), (3, 1)), ((2, 3, 1), (), (96,)), ((0, 4), (4,), ())),
    ]
    for shapes in several:
        condition, x, other = (fit(claims, shape) for shape in shapes)
        chosen = Values(condition, [v > 0 for v in numbers(*condition).flat])
        title = " and ".join(str(list(shape)) for shape in shapes)
        yield Problem("where", title, {}, (chosen, numbers(*x), numbers(*other)), ("bool", "", ""))


def _cat(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(25)
    several: list[tuple[list[Shape], int]] = [
        ([(3, 40), (3, 3)], 1),
        ([(2, 43), (1, 43)], 0),
        ([(2, 3, 64), (2, 3, 33), (2, 3, 1)], 2),
        ([(2, 2, 96), (2, 1, 96)], 1),
        ([(2, 2, 96), (1, 2, 96)], 0),
        ([(2, 5)] * len(CAT_INPUTS), 1),
        ([(3, 43)], 0),
        ([(0, 4), (0, 4)], 1),
        ([(2, 4), (0, 4)], 0),
    ]
    for shapes, dim in several:
        inputs = [numbers(*shape) for shape in shapes]
        title = f"{' and '.join(str(list(shape)) for shape in shapes)} over {dim}"
        left_out = [None] * (len(CAT_INPUTS) - len(inputs))
        yield Problem("cat", title, {"dim": dim}, (*inputs, *left_out), ("",) * len(CAT_INPUTS))


def _cast(claims: Claims) -> Iterator[Problem]:
    """To dtypes without signs no number below 0: what becomes of such floats is nobody's promise."""
    numbers = Numbers(26)
    for dtype in CAST_DTYPES:
        for shape in dict.fromkeys(fit(claims, shape) for shape in _SHAPES):
            x = numbers(*shape)
            if dtype.startswith("uint"):
                x = Values(shape, [abs(v) for v in x.flat])
            yield Problem("cast", f"{list(shape)} to {dtype}", {"dtype": dtype}, (x,))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "add": _pair("add"),
    "mul": _pair("mul"),
    "clamp": _clamp,
    "where": _where,
    "cat": _cat,
    "cast": _cast,
}
