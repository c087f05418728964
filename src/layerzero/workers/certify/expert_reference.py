"""What products by groups and mixtures of experts mean. As workers/certify/reference.py, which has all ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from layerzero.workers.certify.values import Attrs, Values, given, rows_of


def page(values: Values, number: int) -> Values:
    """Of the first dimension."""
    size = math.prod(values.shape[1:])
    return Values(values.shape[1:], values.flat[number * size : (number + 1) * size])


def grouped_linear(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """Row by row: its group is the first that ends after it."""
    x, weight, offsets = given(inputs[:3])
    bias = inputs[3]
    n, k = weight.shape[1:]
    out: list[float] = []
    for number, row in enumerate(rows_of(x.flat, k, 0, x.shape[0])):
        group = next((g for g, end in enumerate(offsets.flat) if number < end), None)
        if group is None:
            out += [0.0] * n
            continue
        more = [0.0] * n if bias is None else page(bias, group).flat
        lines = rows_of(weight.flat, k, group * n, n)
        out += [sum(map(mul, row, line)) + b for line, b in zip(lines, more, strict=True)]
    return Values((x.shape[0], n), out)


def route(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """Experts are sorted by score, of equal ones by number, after those of groups that are not among the best."""
    (logits,), bias = given(inputs[:1]), inputs[1]
    tokens, experts = logits.shape
    each, top_k = experts // attrs["num_groups"], attrs["top_k"]
    weights: list[float] = []
    ids: list[int] = []
    for row in rows_of(logits.flat, experts, 0, tokens):
        if attrs["scoring"] == "softmax":
            powers = [math.exp(v - max(row)) for v in row]
            scores = [power / sum(powers) for power in powers]
        else:
            scores = [1 / (1 + math.exp(-v)) for v in row]
        by = scores if bias is None else [s + b for s, b in zip(scores, bias.flat, strict=True)]
        parts = [sorted(by[g : g + each], reverse=True) for g in range(0, experts, each)]
        best = [sum(part[: 1 if attrs["group_score"] == "max" else 2]) for part in parts]
        kept = sorted(range(len(best)), key=lambda g: (-best[g], g))[: attrs["top_groups"]]
        known = [e for e in range(experts) if e // each in kept]
        exact = row if bias is None else by  # which has the order of exact scores
        chosen = sorted(known, key=lambda e: (-exact[e], e))[:top_k]
        total = sum(scores[e] for e in chosen) + 1e-20 if attrs["normalize"] else 1.0
        weights += [scores[e] / total * attrs["scale"] for e in chosen]
        ids += chosen
    return Values((tokens, top_k), weights), Values((tokens, top_k), ids)


def permute(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values, Values]:
    x, ids = given(inputs)
    experts, width = attrs["num_experts"], x.shape[1]
    order = sorted(
        range(len(ids.flat)),
        key=lambda place: (ids.flat[place] < 0, ids.flat[place] if ids.flat[place] >= 0 else 0, place),
    )
    rows = [v for place in order for v in x.flat[place // ids.shape[1] * width :][:width]]
    ends = [sum(0 <= i <= expert for i in ids.flat) for expert in range(experts)]
    return Values((len(order), width), rows), Values((len(order),), order), Values((experts,), ends)


def combine(inputs: Sequence[Values | None], _: Attrs) -> Values:
    rows, order, weights = given(inputs)
    tokens, each = weights.shape
    out = [[0.0] * rows.shape[1] for _ in range(tokens)]
    for row, place in zip(rows_of(rows.flat, rows.shape[1], 0, rows.shape[0]), order.flat, strict=True):
        token = out[place // each]
        for column, value in enumerate(row):
            token[column] += weights.flat[place] * value
    return Values((tokens, rows.shape[1]), [v for token in out for v in token])
