"""The problems of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values


def _cross_entropy(_: Claims) -> Iterator[Problem]:
    """Every third index does not count. Calls with options have one more dimension."""
    numbers = Numbers(50)
    for classes in (5, 32, 33, 272):
        for reduction in ("none", "mean", "sum"):
            for has_options in (False, True):
                shape: Shape = (2, classes, 3) if has_options else (4, classes)
                rest = (shape[0], *shape[2:])
                count = 6 if has_options else 4
                target = Values(rest, [-100 if n % 3 == 2 else n * 7 % classes for n in range(count)])
                weight = numbers(classes, scale=0.25, offset=1.0) if has_options else None
                attrs = {
                    "ignore_index": -100,
                    "reduction": reduction,
                    "label_smoothing": 0.25 if has_options else 0.0,
                }
                title = f"{classes}, {reduction}{', weight and smoothing' if has_options else ''}"
                kind = "int32" if has_options else "int64"
                yield Problem("cross_entropy", title, attrs, (numbers(*shape), target, weight), ("", kind, ""))
    attrs = {"ignore_index": 0, "reduction": "sum", "label_smoothing": 0.0}
    yield Problem("cross_entropy", "no predictions", attrs, (numbers(0, 4), Values((0,), []), None), ("", "int64", ""))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {"cross_entropy": _cross_entropy}
