"""The problems of norms and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
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


# (N, C, ...) and groups
_GROUPED: list[tuple[Shape, int]] = [
    *(((2, 4, n), groups) for n in (3, 8, 17, 129) for groups in (1, 2, 4)),
    *(((1, 2, 9, 29), 1), ((1, 4, 5, 29), 2), ((1, 2, 9, 29), 2)),  # more than 256 in a group
    *(((2, 4), 1), ((3, 6), 2), ((2, 8, 2, 2), 2), ((2, 4, 4, 4), 4)),
]


def _activated_group_norm(_: Claims) -> Iterator[Problem]:
    """Each activation on groups of few, whole registers, others and many elements."""
    numbers = Numbers(51)
    for activation in LINEAR_ACTIVATIONS:
        for shape in ((2, 4, 3), (2, 4, 16), (2, 6, 11), (1, 4, 150)):
            attrs = {"num_groups": 2, "eps": 1e-5, "activation": activation}
            inputs = (numbers(*shape), numbers(shape[1]), numbers(shape[1]))
            yield Problem("group_norm", f"{list(shape)}, {activation}", attrs, inputs)


def _group_norm(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Also of instance_norm, which has a group for each channel and at least 3 dimensions."""
    is_instance = op == "instance_norm"

    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = Numbers(len(op))
        for present in _subsets(("weight", "bias")):

            def problem(name: str, x: Values, groups: int, eps: float, present: Sequence[str] = present) -> Problem:
                rest = [numbers(x.shape[1]) if which in present else None for which in ("weight", "bias")]
                attrs = {"eps": eps} if is_instance else {"num_groups": groups, "eps": eps}
                return Problem(op, f"{name}, {' and '.join(present) or 'alone'}", attrs, (x, *rest))

            for shape, groups in _GROUPED:
                if not is_instance or (groups == shape[1] and len(shape) > 2):
                    yield problem(f"{list(shape)} in {groups}", numbers(*shape), groups, 1e-5)
            yield problem("eps of 0.5", numbers(2, 4, 3), 4, 0.5)
            far = Values((2, 4, 5), [round(v) / 2 + 96 for v in numbers(2, 4, 5).flat])
            yield problem("large mean", far, 4 if is_instance else 2, 1e-5)
            yield problem("no samples", numbers(0, 4, 3), 4, 1e-5)
            yield problem("no elements", numbers(2, 4, 0), 4, 1e-5)
        if "activation" in (claims.get("optional_attrs") or ()):
            yield from _activated_group_norm(claims)

    return problems


def _batch_norm(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(19)
    shapes: list[Shape] = [(3, 5), (3, 32), (3, 33), (2, 272), (2, 3, 7), (2, 16, 32), (2, 17, 5), (2, 3, 301)]
    shapes += [(2, 4, 3, 5), (2, 32, 2, 4), (1, 3, 4, 9), (1, 2, 17, 16), (0, 4, 3), (2, 4, 0)]
    for present in _subsets(("weight", "bias")):
        for shape, offset in (*((shape, 0.0) for shape in shapes), ((2, 4, 5), 96.0)):
            # Halves near 96 take the 8 bits of bfloat16, and so do their means.
            x, mean = (
                Values(where, [round(v) / 2 + offset for v in numbers(*where).flat]) if offset else numbers(*where)
                for where in (shape, shape[1:2])
            )
            var = Values(mean.shape, [abs(v) + 0.25 for v in numbers(*mean.shape).flat])
            rest = [numbers(shape[1]) if which in present else None for which in ("weight", "bias")]
            title = f"{list(shape)}{' near 96' if offset else ''}, {' and '.join(present) or 'alone'}"
            attrs = {"eps": 0.5 if shape == (3, 5) else 1e-5}
            yield Problem("batch_norm", title, attrs, (x, mean, var, *rest), ("",) * 5)


def _add_rms_norm(claims: Claims) -> Iterator[Problem]:
    """Those of the norm, with a residual. Sums have no more digits than bfloat16 has."""
    numbers = Numbers(20)
    for norm in _norm("rms_norm", "weight")(claims):
        x, weight = norm.inputs
        assert x is not None
        yield Problem("add_rms_norm", norm.name, norm.attrs, (x, numbers(*x.shape), weight))


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
    "add_rms_norm": _add_rms_norm,
    "group_norm": _group_norm("group_norm"),
    "instance_norm": _group_norm("instance_norm"),
    "batch_norm": _batch_norm,
    "layer_norm_backward": _norm_backward("layer_norm_backward"),
    "rms_norm_backward": _norm_backward("rms_norm_backward"),
}
