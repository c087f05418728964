"""Random calls of products by groups and of mixtures of experts, for provider_checks.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.workers.certify.values import Values

OPS = frozenset({"grouped_linear", "moe_route", "moe_permute", "moe_combine", "moe_mlp"})
_EXTENTS = (1, 2, 3, 5, 8, 17, 31, 32, 65)


def random_call(
    op: str, rng: random.Random, numbers: Callable[..., Values], number: int
) -> tuple[Sequence[Values | None], dict[str, Any]]:
    """Inputs and attributes; some experts have no token, and some ids are of no expert."""
    tokens, features, made, experts, each = (rng.choice(_EXTENTS) for _ in range(5))
    ids = Values((tokens, each), [rng.randrange(-1, experts) for _ in range(tokens * each)])
    weights = Values((tokens, each), [rng.randrange(-16, 17) / 16 for _ in range(tokens * each)])
    if op == "grouped_linear":
        ends = Values((experts,), sorted(rng.randrange(tokens + 1) for _ in range(experts)))
        bias = numbers(experts, made) if number % 2 else None
        return [numbers(tokens, features), numbers(experts, made, features), ends, bias], {}
    if op == "moe_route":
        return _routing(rng, tokens, number)
    if op == "moe_permute":
        return [numbers(tokens, features), ids], {"num_experts": experts}
    if op == "moe_combine":
        order = Values((tokens * each,), rng.sample(range(tokens * each), tokens * each))
        return [numbers(tokens * each, features), order, weights], {}
    hidden = rng.choice(_EXTENTS[:6])
    shapes = ((tokens, features), (experts, 2 * hidden, features), (experts, made, hidden))
    given = [numbers(*shape, scale=1 / 16) for shape in shapes]
    return [*given, ids, weights], {"activation": LINEAR_ACTIVATIONS[number % len(LINEAR_ACTIVATIONS)]}


def _routing(rng: random.Random, tokens: int, number: int) -> tuple[Sequence[Values | None], dict[str, Any]]:
    """Of logits that are far enough from each other for every dtype, without a bias."""
    groups, width = rng.choice((1, 2, 4)), rng.choice((4, 8, 16))
    experts, kept = groups * width, rng.randrange(1, groups + 1)
    logits = [v / 16 for _ in range(tokens) for v in rng.sample(range(-experts, experts), experts)]
    attrs = {
        "top_k": rng.randrange(1, width + 1),
        "scoring": ("softmax", "sigmoid")[number % 2],
        "normalize": number % 3 > 0,
        "num_groups": groups,
        "top_groups": kept,
        "group_score": "max",
        "scale": rng.choice((1.0, 2.5)),
    }
    return [Values((tokens, experts), logits), None], attrs
