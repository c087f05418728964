"""The problems of products by groups and of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values


def _grouped_linear(_: Claims) -> Iterator[Problem]:
    """Groups without rows, and rows of no group."""
    numbers = Numbers(40)
    for m, k, n in ((5, 8, 5), (16, 32, 16), (17, 33, 7), (7, 300, 5)):
        for has_bias in (False, True):
            inputs = (numbers(m, k), numbers(4, n, k), Values((4,), [2, 2, m - 2, m - 1]))
            bias = numbers(4, n) if has_bias else None
            title = f"{m} rows of {k} to {n}{', bias' if has_bias else ''}"
            kind = "int64" if has_bias else "int32"
            yield Problem("grouped_linear", title, {}, (*inputs, bias), ("", "", kind, ""))
    empties: list[tuple[Shape, Shape]] = [((0, 4), (2, 5, 4)), ((3, 0), (2, 5, 0)), ((3, 4), (0, 5, 4))]
    for one, other in empties:
        ends = Values(other[:1], [one[0]] * other[0])
        inputs = (numbers(*one), numbers(*other), ends)
        yield Problem("grouped_linear", f"{list(one)} by {list(other)}", {}, (*inputs, None), ("", "", "int32", ""))


def routing(scoring: str, **changed: Any) -> dict[str, Any]:
    """Attributes of moe_route."""
    plain = {"top_k": 2, "scoring": scoring, "normalize": True, "num_groups": 1, "top_groups": 1}
    return {**plain, "group_score": "top2", "scale": 1.0, **changed}


def _route(_: Claims) -> Iterator[Problem]:
    """Mixtral's, Qwen2-MoE's, DeepSeek-V2's and -V3's. Logits without a bias have ties; those with one, and of groups'
    sums, are numbers whose scores are far from each other."""
    numbers = Numbers(41)
    for experts in (8, 32, 33, 272):
        logits, apart = numbers(3, experts), Values((3, experts), _apart(3, experts))
        for scoring in ("softmax", "sigmoid"):
            for way in (routing(scoring), routing(scoring, top_k=min(experts, 6), normalize=False, scale=2.5)):
                yield Problem("moe_route", f"{experts}: {way}", way, (logits, None), ("", "float32"))
                bias = Values((experts,), [((n * n * 5 + n * 3) % 23 - 11) / 300 for n in range(experts)])
                yield Problem("moe_route", f"{experts}, bias: {way}", way, (apart, bias), ("", "float32"))
                for groups in (4,) if experts % 8 == 0 else (experts,):
                    grouped = {**way, "num_groups": groups, "top_groups": groups // 2}
                    if way["top_k"] <= groups // 2 * (experts // groups):
                        for given in (None, bias):
                            kind = "max" if given is None else "top2"
                            more = {**grouped, "group_score": kind}
                            title = f"{experts}, {given is not None}: {more}"
                            yield Problem("moe_route", title, more, (apart, given), ("", "float32"))
    yield Problem("moe_route", "no tokens", routing("softmax"), (numbers(0, 8), None), ("", "float32"))


def _apart(rows: int, count: int) -> list[float]:
    """Of each row different numbers, exact in every dtype, whose scores do not come together in float32."""
    return [(n * 37 % count - count // 2) / 64 for row in range(rows) for n in range(row * 5, row * 5 + count)]


def _ids(numbers: Numbers, tokens: int, each: int, experts: int) -> Values:
    """Some are of no expert."""
    drawn = [int(abs(v) * 16) % (experts + 1) - 1 for v in numbers(tokens, each).flat]
    return Values((tokens, each), drawn)


def _permute(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(42)
    for kind in ("int32", "int64"):
        for features in (8, 32, 33, 301):
            inputs = numbers(5, features), _ids(numbers, 5, 3, 4)
            title = f"{kind} ids, {features} features"
            yield Problem("moe_permute", title, {"num_experts": 4}, inputs, ("", kind))
        yield Problem("moe_permute", "no tokens", {"num_experts": 4}, (numbers(0, 4), Values((0, 2), [])), ("", kind))


def _combine(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(43)
    for kind in ("int32", "int64"):
        for features in (8, 32, 33, 301):
            order = Values((15,), [n * 7 % 15 for n in range(15)])
            inputs = numbers(15, features), order, numbers(5, 3)
            yield Problem("moe_combine", f"{kind} order, {features} features", {}, inputs, ("", kind, "float32"))
        nothing = numbers(0, 4), Values((0,), []), Values((0, 2), [])
        yield Problem("moe_combine", "no tokens", {}, nothing, ("", kind, "float32"))


def _moe_mlp(_: Claims) -> Iterator[Problem]:
    """Of small numbers, as gated_mlp."""
    numbers = Numbers(44)
    for activation in LINEAR_ACTIVATIONS:
        for tokens, k, hidden, n in ((3, 8, 5, 7), (16, 32, 16, 16), (17, 33, 4, 33), (2, 300, 5, 5), (0, 4, 3, 5)):
            shapes = ((tokens, k), (3, 2 * hidden, k), (3, n, hidden))
            given = tuple(numbers(*one, scale=1 / 16) for one in shapes)
            inputs = (*given, _ids(numbers, tokens, 2, 3), numbers(tokens, 2))
            kind = "int64" if activation in LINEAR_ACTIVATIONS[::2] else "int32"
            title = f"{activation} of {tokens} by {hidden} to {n}"
            yield Problem("moe_mlp", title, {"activation": activation}, inputs, ("", "", "", kind, "float32"))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "grouped_linear": _grouped_linear,
    "moe_route": _route,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "moe_mlp": _moe_mlp,
}
