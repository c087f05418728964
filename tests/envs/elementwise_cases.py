"""Cases of ops that work element by element, and of cat, for tests/envs/test_conformance.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tests.envs.case import LAYOUTS, Case, normal

OUTS = ("transposed", "gaps", "rows", "first last")
Pair = tuple[tuple[int, ...], tuple[int, ...]]
PAIRS: list[Pair] = [
    *((shape, shape) for shape in ((), (1,), (7,), (3, 5), (2, 3, 4, 5), (1000,), (33, 65))),
    *(
        ((3, 1), (1, 5)),
        ((5,), (3, 5)),
        ((2, 1, 4), (3, 1)),
        ((), (3, 5)),
        ((3, 5), ()),
        ((1,), (300, 3)),
        ((1, 1), (4,)),
    ),
]


def pair_cases(rng: np.random.Generator) -> Iterator[Case]:
    for one, other in PAIRS:
        yield Case(f"{one} and {other}", (normal(rng, *one), normal(rng, *other)))
    x, y = normal(rng, 2, 6, 5), normal(rng, 2, 6, 5)
    for layout in LAYOUTS[1:]:
        yield Case(f"{layout} first", (x, y), layouts=(layout,))
        yield Case(f"{layout} second", (x, y[0]), layouts=("contiguous", layout))
    for layout in OUTS:
        yield Case(f"{layout} output", (x, y), out_layout=layout)
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-8])
    yield Case("what is not finite", (odd[:, None], odd))
    for one, other in (((0, 4), (0, 4)), ((0, 4), (4,)), ((3, 0), ())):
        yield Case(f"empty {one} and {other}", (normal(rng, *one), normal(rng, *other)))


def clamp_cases(rng: np.random.Generator) -> Iterator[Case]:
    bounds: list[tuple[float | None, float | None]] = [(-0.5, 0.75), (None, 0.1), (0.1, None), (0.5, -0.5), (0.0, 0.0)]
    for is_whole in (False, True):

        def attrs(low: float | None, high: float | None, is_whole: bool = is_whole) -> dict[str, Any]:
            made = (None if b is None else round(abs(b) * 8) if is_whole else b for b in (low, high))
            return dict(zip(("min", "max"), made, strict=True))

        kind = "whole " if is_whole else ""
        for low, high in bounds:
            for shape in ((), (7,), (3, 5), (40, 33), (0, 4)):
                yield Case(f"{kind}{shape} to {low} and {high}", (normal(rng, *shape),), attrs(low, high))
        x = normal(rng, 2, 6, 5)
        for layout in LAYOUTS[1:]:
            yield Case(f"{kind}{layout}", (x,), attrs(-0.5, 0.5), layouts=(layout,))
        for layout in OUTS:
            yield Case(f"{kind}{layout} output", (x,), attrs(-0.5, 0.5), out_layout=layout)
    odd = np.array([np.inf, -np.inf, np.nan, 1.0])
    yield Case("what is not finite", (odd,), {"min": -2.0, "max": 2.0})
    yield Case("what is not finite, above", (odd,), {"min": None, "max": 2.0})


def where_cases(rng: np.random.Generator) -> Iterator[Case]:
    def chosen(*shape: int) -> Any:
        return np.asarray(normal(rng, *shape) > 0)

    for one, other in PAIRS:
        yield Case(f"{one} and {other}", (chosen(*one), normal(rng, *one), normal(rng, *other)))
        yield Case(f"{other} of {one}", (chosen(*other), normal(rng, *one), normal(rng)))
    condition, x, y = chosen(2, 6, 5), normal(rng, 2, 6, 5), normal(rng, 2, 6, 5)
    for layout in LAYOUTS[1:]:
        yield Case(f"{layout} condition", (condition, x, y), layouts=(layout,))
        yield Case(f"{layout} others", (condition, x, y), layouts=("contiguous", layout, layout))
    for layout in OUTS:
        yield Case(f"{layout} output", (condition, x, y), out_layout=layout)
    odd = np.array([np.inf, -np.inf, np.nan, 1.0])
    yield Case("what is not finite", (np.array([True, False, False, True]), odd, odd[::-1].copy()))
    yield Case("empty", (chosen(0, 4), normal(rng, 4), normal(rng, 0, 1)))


def cat_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, *shapes: tuple[int, ...], dim: int, **where: Any) -> Case:
        given = [normal(rng, *shape) for shape in shapes]
        return Case(name, (*given, *[None] * (8 - len(given))), {"dim": dim}, **where)

    yield case("one", (3, 5), dim=0)
    yield case("vectors", (3,), (1,), (200,), dim=0)
    yield case("columns", (3, 5), (3, 1), (3, 2), dim=1)
    yield case("rows", (3, 5), (1, 5), dim=0)
    yield case("in the middle", (2, 3, 4), (2, 1, 4), dim=1)
    yield case("long", (4, 300), (4, 33), dim=1)
    yield case("four dimensions", (2, 3, 4, 5), (2, 3, 4, 5), dim=1)
    yield case("the last of four", (2, 3, 1, 5), (2, 3, 1, 300), (2, 3, 1, 5), dim=3)
    yield case("eight", *[(2, n) for n in range(1, 9)], dim=1)
    for layout in LAYOUTS[1:]:
        yield case(layout, (2, 6, 5), (2, 6, 3), dim=2, layouts=(layout, layout))
    for layout in OUTS:
        yield case(f"{layout} output", (2, 6, 5), (2, 6, 3), dim=2, out_layout=layout)
        yield case(f"{layout} output, rows", (2, 6, 5), (2, 1, 5), dim=1, out_layout=layout)
    yield case("empty", (0, 4), (0, 2), dim=1)
    yield case("one empty", (2, 4), (2, 0), dim=1)
    yield Case("what is not finite", (np.array([np.inf, np.nan]), np.array([-np.inf]), *[None] * 6), {"dim": 0})


def cast_cases(rng: np.random.Generator) -> Iterator[Case]:
    for dtype in ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64"):
        signs = np.abs if dtype == "uint8" else np.asarray
        attrs = {"dtype": dtype}
        for shape in ((), (7,), (3, 5), (40, 33), (0, 4)):
            yield Case(f"{shape} to {dtype}", (signs(normal(rng, *shape) * 3),), attrs)
        x = signs(normal(rng, 2, 6, 5) * 3)
        for layout in LAYOUTS[1:]:
            yield Case(f"{layout} to {dtype}", (x,), attrs, layouts=(layout,))
        yield Case(f"transposed {dtype}", (x,), attrs, out_layout="transposed")
        yield Case(f"gaps between {dtype}", (x,), attrs, out_layout="gaps")
        wide = np.array([300, -1, 128, -200, 70000, 2**31 + 5])
        yield Case(f"integers that wrap, to {dtype}", (wide,), attrs)
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, 2.0, -1e-3])
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        yield Case(f"what is not finite, to {dtype}", (odd,), {"dtype": dtype})
    yield Case("what is not finite, to bool", (odd[3:],), {"dtype": "bool"})


CASES: dict[str, Callable[[np.random.Generator], Iterator[Case]]] = {
    "add": pair_cases,
    "mul": pair_cases,
    "clamp": clamp_cases,
    "where": where_cases,
    "cat": cat_cases,
    "cast": cast_cases,
}
