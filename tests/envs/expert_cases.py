"""The calls of mixtures of experts that test_conformance.py makes. As tests/envs/cases.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tests.envs.case import Case, normal

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS

Rng = np.random.Generator
LAYOUTS = ("transposed", "gaps", "rows")


def grouped_linear_cases(rng: Rng) -> Iterator[Case]:
    def case(name: str, k: int, n: int, ends: list[int], rows: int, dtype: str = "int32", **more: Any) -> Case:
        tensors = (normal(rng, rows, k), normal(rng, len(ends), n, k) / max(k, 1) ** 0.5, np.array(ends, dtype))
        bias = normal(rng, len(ends), n) if more.pop("has_bias", False) else None
        return Case(name, (*tensors, bias), **more)

    for has_bias in (False, True):
        yield case("one group", 8, 5, [4], 4, has_bias=has_bias)
        yield case("some are empty", 33, 7, [0, 3, 3, 9, 9], 9, "int64", has_bias=has_bias)
        yield case("rows of none", 16, 32, [2, 5, 11], 14, has_bias=has_bias)
        yield case("none has rows", 16, 8, [0, 0], 3, has_bias=has_bias)
        yield case("wide", 300, 130, [1, 40, 41, 64], 64, "int64", has_bias=has_bias)
    for layout in LAYOUTS:
        yield case(layout, 8, 6, [1, 4, 5], 7, has_bias=True, layouts=(layout,) * 4)
        yield case(f"{layout} output", 8, 6, [1, 4, 5], 7, out_layout=layout)
    yield case("no rows", 8, 6, [0, 0], 0)
    yield case("no groups", 8, 6, [], 3)
    yield case("nothing to sum", 0, 6, [1, 3], 3, has_bias=True)


def route_cases(rng: Rng) -> Iterator[Case]:
    plain: dict[str, Any] = {"top_k": 2, "scoring": "softmax", "normalize": True, "num_groups": 1, "top_groups": 1}
    plain |= {"group_score": "top2", "scale": 1.0}
    ways: dict[str, dict[str, Any]] = {
        "Mixtral": {},
        "Qwen2-MoE": {"top_k": 4, "normalize": False},
        "DeepSeek-V2": {"normalize": False, "num_groups": 4, "top_groups": 2, "group_score": "max", "scale": 16.0},
        "DeepSeek-V3": {"top_k": 4, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
        "Llama 4": {"top_k": 1, "scoring": "sigmoid", "normalize": False},
        "all": {"top_k": 8, "num_groups": 8, "top_groups": 8},
    }
    for name, way in ways.items():
        for experts in (8, 64, 136):
            for has_bias in (False, True):
                bias = (normal(rng, experts) / 8).astype(np.float32) if has_bias else None
                yield Case(f"{name} of {experts} {has_bias}", (normal(rng, 9, experts) * 2, bias), plain | way)
    yield Case("ties", (np.round(normal(rng, 20, 16)), None), plain)
    yield Case("one for all", (np.zeros((3, 16)), None), {**plain, "num_groups": 4, "top_groups": 2})
    yield Case("far", (normal(rng, 5, 16) * 100, None), {**plain, "scoring": "sigmoid", "scale": 0.5})
    for layout in LAYOUTS:
        yield Case(layout, (normal(rng, 5, 16), normal(rng, 16).astype(np.float32)), plain, (layout, layout))
    yield Case("no tokens", (normal(rng, 0, 16), None), plain)


def permute_cases(rng: Rng) -> Iterator[Case]:
    for dtype in ("int32", "int64"):
        for tokens, each, experts, features in ((1, 1, 1, 1), (5, 2, 4, 8), (40, 6, 64, 33), (64, 2, 3, 130)):
            ids = rng.integers(-1, experts, (tokens, each)).astype(dtype)
            name = f"{tokens} to {each} of {experts} {dtype}"
            yield Case(name, (normal(rng, tokens, features), ids), {"num_experts": experts})
        here = {"num_experts": 4}
        for name, ids in (("all to one", np.full((6, 2), 3)), ("all to none", np.full((6, 2), -5))):
            yield Case(f"{name} {dtype}", (normal(rng, 6, 8), ids.astype(dtype)), here)
        for layout in LAYOUTS:
            ids = rng.integers(0, 4, (6, 2)).astype(dtype)
            yield Case(f"{layout} {dtype}", (normal(rng, 6, 8), ids), here, (layout, layout))
        yield Case(f"no tokens {dtype}", (normal(rng, 0, 8), np.zeros((0, 2), dtype)), here)


def combine_cases(rng: Rng) -> Iterator[Case]:
    def case(name: str, tokens: int, each: int, features: int, dtype: str = "int64", **more: Any) -> Case:
        order = rng.permutation(tokens * each).astype(dtype)
        weights = normal(rng, tokens, each).astype(np.float32)
        return Case(name, (normal(rng, tokens * each, features), order, weights), **more)

    for dtype in ("int32", "int64"):
        for tokens, each, features in ((1, 1, 1), (5, 2, 8), (40, 6, 33), (64, 1, 130)):
            yield case(f"{tokens} by {each} of {features} {dtype}", tokens, each, features, dtype)
    for layout in LAYOUTS:
        yield case(layout, 5, 3, 8, layouts=(layout,) * 3)
        yield case(f"{layout} output", 5, 3, 8, out_layout=layout)
    yield case("no tokens", 0, 2, 8)


def moe_mlp_cases(rng: Rng) -> Iterator[Case]:
    """Weights as wide as models have them."""

    def made(tokens: int, each: int, experts: int, k: int, hidden: int, n: int) -> tuple[Any, ...]:
        ids = rng.integers(-1, experts, (tokens, each)).astype(("int32", "int64")[tokens % 2])
        gate_up, down = normal(rng, experts, 2 * hidden, k), normal(rng, experts, n, hidden)
        shares = abs(normal(rng, tokens, each)).astype(np.float32) / each
        return normal(rng, tokens, k), gate_up / max(k, 1) ** 0.5, down / max(hidden, 1) ** 0.5, ids, shares

    for activation in LINEAR_ACTIVATIONS:
        for extents in ((3, 2, 4, 8, 5, 6), (1, 1, 1, 1, 1, 1), (33, 4, 8, 40, 24, 40)):
            yield Case(f"{activation} {extents}", made(*extents), {"activation": activation})
    silu = {"activation": "silu"}
    yield Case("several of few", made(65, 2, 3, 130, 33, 70), silu)
    for layout in LAYOUTS:
        yield Case(layout, made(4, 2, 3, 8, 5, 6), silu, (layout,) * 5)
        yield Case(f"{layout} output", made(4, 2, 3, 8, 5, 6), silu, out_layout=layout)
    yield Case("no tokens", made(0, 2, 3, 8, 5, 6), silu)


CASES: dict[str, Callable[[Rng], Iterator[Case]]] = {
    "grouped_linear": grouped_linear_cases,
    "moe_route": route_cases,
    "moe_permute": permute_cases,
    "moe_combine": combine_cases,
    "moe_mlp": moe_mlp_cases,
}
