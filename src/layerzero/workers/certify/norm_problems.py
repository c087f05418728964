"""The problems of norms and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from layerzero.workers.certify.claims import Claims, fit
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values


def _norm(op: str, *names: str) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = Numbers(len(op))
        shapes: list[tuple[Shape, int]] = [((3, 8), 1), ((2, 3, 7), 1), ((3, 32), 1), ((3, 33), 1), ((2, 129), 1)]
        shapes += [((2, 512), 1), ((2, 301), 1), ((3, 2, 4), 2), ((2, 4, 8), 2), ((2, 3, 11), 2), ((2, 2, 161), 2)]
        for given in _subsets(names):

            def problem(name: str, x: Values, ndim: int, eps: float, given: Sequence[str] = given) -> Problem:
                shape = x.shape[len(x.shape) - ndim :]
                rest = [numbers(*shape) if name in given else None for name in names]
                return Problem(op, f"{name}, {' and '.join(given) or 'alone'}", {"ndim": ndim, "eps": eps}, (x, *rest))

            for shape, ndim in [(fit(claims, shape), ndim) for shape, ndim in shapes]:
                yield problem(f"{list(shape)} over the last {ndim}", numbers(*shape), ndim, 1e-5)
            yield problem("eps of 0.5", numbers(*fit(claims, (3, 8))), 1, 0.5)
            # Halves near 96 take the 8 bits of bfloat16.
            centred = Values(fit(claims, (3, 8)), [round(v) / 2 + 96 for v in numbers(3, 8).flat])
            yield problem("large mean", centred, 1, 1e-5)
            yield problem("empty", numbers(*fit(claims, (0, 4))), 1, 1e-5)

    return problems


def _norm_backward(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Those of the norm, with a gradient, and more rows, which gradients of weights are sums over."""

    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = Numbers(18)
        for norm in _norm(op.removesuffix("_backward"), "weight")(claims):
            x, weight = norm.inputs
            assert x is not None
            yield Problem(op, norm.name, norm.attrs, (numbers(*x.shape), x, weight))
        for shape in ((70, 8), (41, 129)):
            x, grad = numbers(*fit(claims, shape)), numbers(*fit(claims, shape))
            yield Problem(op, f"{shape[0]} rows of {shape[1]}", {"ndim": 1, "eps": 1e-5}, (grad, x, numbers(shape[1])))

    return problems


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(1 << len(names))]


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "layer_norm": _norm("layer_norm", "weight", "bias"),
    "rms_norm": _norm("rms_norm", "weight"),
    "layer_norm_backward": _norm_backward("layer_norm_backward"),
    "rms_norm_backward": _norm_backward("rms_norm_backward"),
}
