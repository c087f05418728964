"""What certifies a kernel, before a dtype and a place in memory are chosen: for each op its problems. Each function
lists those of one op, for a kernel that claims what `claims` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from layerzero.ipc.vocabulary.ops import ACTIVATIONS, LINEAR_ACTIVATIONS
from layerzero.workers.certify import (
    attention_problems,
    cache_problems,
    elementwise_problems,
    expert_problems,
    loss_problems,
    norm_problems,
    quantized_problems,
    sampling_problems,
    vision_problems,
)
from layerzero.workers.certify.claims import Claims, fit
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values


def _matmul(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(2)
    for m, k, n in ((3, 8, 5), (1, 7, 1), (16, 32, 16), (17, 33, 7), (1, 40, 129), (3, 300, 5), (2, 16, 272)):
        for left, right in (((), ()), ((2,), (2,)), ((2, 1), (3,)), ((), (2,))):
            if max(m, k, n) > 100 and len(left) + len(right) > 2:
                continue
            a, b = numbers(*left, m, k), numbers(*right, k, n)
            yield Problem("matmul", f"{list(a.shape)} @ {list(b.shape)}", {}, (a, b))
    empties: list[tuple[Shape, Shape]] = [((3, 0), (0, 5)), ((0, 4), (4, 5)), ((2, 3, 4), (2, 4, 0))]
    for one, other in empties:
        yield Problem("matmul", f"{list(one)} @ {list(other)}", {}, (numbers(*one), numbers(*other)))


def _addmm(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(21)
    for m, k, n in ((3, 8, 5), (16, 32, 16), (17, 33, 7), (3, 300, 5), (0, 4, 5), (3, 0, 5)):
        for shape in ((m, n), (1, n), (m, 1)):
            for beta, alpha in ((1.0, 1.0), (0.5, -2.0)):
                name = f"{list(shape)} + [{m}, {k}] @ [{k}, {n}] by {beta} and {alpha}"
                inputs = numbers(*shape), numbers(m, k), numbers(k, n)
                yield Problem("addmm", name, {"beta": beta, "alpha": alpha}, inputs)
    for count in (15, 1):
        unread = Values((3, 5) if count > 1 else (1, 1), [math.inf] * count)  # times 0 it would be NaN
        yield Problem("addmm", "a beta of 0", {"beta": 0.0, "alpha": 2.0}, (unread, numbers(3, 8), numbers(8, 5)))


def _linear(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(3)
    matrices: list[tuple[Shape, int]] = [((3, 8), 5), ((1, 7), 3), ((16, 32), 16), ((17, 33), 7), ((1, 40), 129)]
    matrices += [((3, 300), 5), ((272, 8), 5)]
    batches: list[tuple[Shape, int]] = [((2, 3, 8), 5), ((2, 8, 32), 16), ((3, 7, 33), 7), ((2, 2, 300), 5)]
    empties: list[tuple[Shape, int]] = [((0, 4), 5), ((3, 0), 5), ((3, 4), 0)]
    for shape, rows in (*matrices, *batches, *empties):
        for has_bias in (True, False):
            name = f"{list(shape)} to {rows}{'' if has_bias else ', no bias'}"
            yield _projected(numbers, name, shape, rows, has_bias, "")
    for activation in LINEAR_ACTIVATIONS:
        for shape, rows in (((3, 8), 5), ((2, 8, 32), 16), ((17, 33), 7), ((2, 2, 300), 5)):
            for has_bias in (True, False):
                name = f"{activation} of {list(shape)} to {rows}{'' if has_bias else ', no bias'}"
                yield _projected(numbers, name, shape, rows, has_bias, activation)


def _projected(numbers: Numbers, name: str, shape: Shape, rows: int, has_bias: bool, activation: str) -> Problem:
    bias = numbers(rows) if has_bias else None
    inputs = numbers(*shape), numbers(rows, shape[-1]), bias
    return Problem("linear", name, {"activation": activation}, inputs, families=("float",) if activation else ())


def _gated_mlp(_: Claims) -> Iterator[Problem]:
    """Of small numbers: products of three have to stay within float16's range."""
    numbers = Numbers(27)
    shapes: list[tuple[Shape, int, int]] = [((3, 8), 5, 7), ((2, 8, 32), 16, 16), ((17, 33), 7, 33), ((1, 300), 5, 5)]
    shapes += [((2, 8), 272, 5), ((3, 8), 5, 272), ((0, 4), 3, 5)]
    for activation in LINEAR_ACTIVATIONS:
        for shape, hidden, features in shapes:
            inputs = tuple(numbers(*one, scale=1 / 16) for one in (shape, (2 * hidden, shape[-1]), (features, hidden)))
            title = f"{activation} of {list(shape)} by {hidden} to {features}"
            yield Problem("gated_mlp", title, {"activation": activation}, inputs)


def _softmax(op: str) -> Callable[[Claims], Iterator[Problem]]:
    return partial(_softmax_problems, op)


def _softmax_problems(op: str, claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(4)
    shapes: list[Shape] = [(3, 7), (1,), (3, 32), (2, 33), (2, 129), (2, 512), (3, 301), (0, 4)]
    plain = {"dtype": ""}
    lasts = [(fit(claims, shape), {"dim": len(fit(claims, shape)) - 1}) for shape in shapes]
    inners = [((2, 7, 3), 1), ((32, 3), 0), ((2, 33, 2), 1), ((272, 3), 0), ((2, 301, 2), 1)]
    for shape, attrs in {shape: (shape, attrs) for shape, attrs in lasts}.values():
        yield Problem(op, f"{list(shape)}", {**attrs, **plain}, (numbers(*shape),))
    for shape, dim in inners:
        yield Problem(op, f"{list(shape)} over {dim}", {"dim": dim, **plain}, (numbers(*shape),))
    shape = fit(claims, (3, 9))
    yield Problem(op, "logits of some hundreds", {"dim": len(shape) - 1, **plain}, (numbers(*shape, scale=256),))
    for dtype in ("float32", "float64", "bfloat16", "float16"):  # which all have these numbers
        for shape, attrs in (*lasts, *((shape, {"dim": dim}) for shape, dim in inners)):
            name = f"{list(shape)} over {attrs['dim']} in {dtype}"
            yield Problem(op, name, {**attrs, "dtype": dtype}, (numbers(*shape),))


def _elementwise(op: str, attrs: Sequence[dict[str, Any]], tensors: int = 1) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = Numbers(10)
        shapes: list[Shape] = [(), (1,), (3, 4), (4, 8), (33,), (3, 43), (2, 3, 96), (2, 512), (0, 4)]
        for more in attrs:
            for shape in dict.fromkeys(fit(claims, shape) for shape in shapes):
                inputs = tuple(numbers(*shape) for _ in range(tensors))
                yield Problem(op, f"{list(shape)} {' '.join(map(str, more.values()))}".strip(), more, inputs)
            far = tuple(numbers(*fit(claims, (2, 5)), scale=8) for _ in range(tensors))
            yield Problem(op, "far from 0", more, far)

    return problems


def _embedding(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(11)
    shapes: list[tuple[Shape, int]] = [((2, 3), 4), ((), 7), ((16,), 32), ((17,), 33), ((2, 3), 301), ((300,), 4)]
    for dtype in ("int32", "int64"):
        for shape, dim in (*shapes, ((0, 3), 4)):
            ids = Values(shape, [int(abs(v) * 16) % 5 for v in numbers(*shape).flat])
            yield Problem("embedding", f"{dtype} {list(shape)} of {dim}", {}, (ids, numbers(5, dim)), (dtype, ""))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    **attention_problems.PROBLEMS,
    **cache_problems.PROBLEMS,
    **loss_problems.PROBLEMS,
    **norm_problems.PROBLEMS,
    **elementwise_problems.PROBLEMS,
    **expert_problems.PROBLEMS,
    **vision_problems.PROBLEMS,
    **quantized_problems.PROBLEMS,
    **sampling_problems.PROBLEMS,
    "matmul": _matmul,
    "addmm": _addmm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "gelu": _elementwise("gelu", [{"approximate": "none"}, {"approximate": "tanh"}]),
    "silu": _elementwise("silu", [{}]),
    "swiglu": _elementwise("swiglu", [{}], tensors=2),
    "geglu": _elementwise("geglu", [{"approximate": "none"}, {"approximate": "tanh"}], tensors=2),
    "reglu": _elementwise("reglu", [{}], tensors=2),
    **{op: _elementwise(op, [{}]) for op in ACTIVATIONS},
    "embedding": _embedding,
}
