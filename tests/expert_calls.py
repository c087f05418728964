"""Calls of products by groups and of mixtures of experts by chance: dtypes ("" for that of the data) and shapes of
their tensors, and their attributes."""

from __future__ import annotations

from random import Random
from typing import Any

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS

OPS = ("grouped_linear", "moe_route", "moe_permute", "moe_combine", "moe_mlp")
Tensor = tuple[str, tuple[int, ...]]
EXTENTS = (1, 3, 5, 8, 16, 17, 32, 33, 130)


def random_call(op: str, rng: Random) -> tuple[list[Tensor | None], dict[str, Any]]:
    def extent() -> int:
        return rng.choice(EXTENTS)

    index, tokens, k, n = rng.choice(("int32", "int64")), extent(), extent(), extent()
    experts, each = rng.randint(1, 5), rng.randint(1, 3)
    ids, weights = (index, (tokens, each)), ("float32", (tokens, each))
    if op == "grouped_linear":
        bias = ("", (experts, n)) if rng.random() < 0.5 else None
        return [("", (tokens, k)), ("", (experts, n, k)), (index, (experts,)), bias], {}
    if op == "moe_route":
        groups, of_each, kept = rng.choice(((1, n, 1), (4, 2, 2), (4, 8, 1), (3, 11, 2), (4, 68, 3)))
        attrs = {
            **{"top_k": rng.randint(1, kept * of_each), "scoring": rng.choice(("softmax", "sigmoid"))},
            **{"normalize": rng.random() < 0.5, "num_groups": groups, "top_groups": kept},
            **{"group_score": rng.choice(("max", "top2")), "scale": rng.choice((1.0, 2.5))},
        }
        bias = ("float32", (groups * of_each,)) if rng.random() < 0.5 else None
        return [("", (tokens, groups * of_each)), bias], attrs
    if op == "moe_permute":
        return [("", (tokens, k)), ids], {"num_experts": experts}
    if op == "moe_combine":
        return [("", (tokens * each, k)), (index, (tokens * each,)), weights], {}
    shapes = ((tokens, k), (experts, 2 * each, k), (experts, n, each))
    return [*(("", shape) for shape in shapes), ids, weights], {"activation": rng.choice(LINEAR_ACTIVATIONS)}
