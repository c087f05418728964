"""The calls of sampling that test_conformance.py makes. As tests/envs/cases.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.envs.case import Case, normal

Rng = np.random.Generator
LAYOUTS = ("transposed", "gaps", "rows")


def _single(*values: float) -> Any:
    return np.array(values, np.float32)


def penalize_cases(rng: Rng) -> Iterator[Case]:
    def case(name: str, rows: int, size: int, length: int, *settings: Any, dtype: str = "int64", **more: Any) -> Case:
        ids = rng.integers(-2, size, (rows, length)).astype(dtype)
        given = (*settings, None, None, None)[:3]
        return Case(name, (normal(rng, rows, size) * 4, ids, *given), **more)

    every = (_single(1.5), _single(0.5, -1.0, 0.0), _single(0.25))
    for dtype in ("int32", "int64"):
        for size in (1, 7, 32, 33, 300):
            yield case(f"{size} {dtype}", 3, size, 40, *every, dtype=dtype)
    for n, name in enumerate(("repetition", "presence", "frequency")):
        yield case(f"{name} alone", 2, 50, 30, *[every[n][:1] if n == m else None for m in range(3)])
    yield case("none", 2, 50, 30)
    for layout in LAYOUTS:
        yield case(f"{layout} inputs", 3, 50, 30, *every, layouts=(layout,) * 5)
        yield case(f"{layout} output", 3, 50, 30, *every, out_layout=layout)
    yield case("no ids", 2, 50, 0, *every[:1])
    yield case("no rows", 0, 50, 3, *every[:1])


def filter_cases(rng: Rng) -> Iterator[Case]:
    for name, logits, settings, layouts, out_layout in _filtered(rng):
        yield Case(name, (logits, *settings), {}, layouts, out_layout)
    odd = normal(rng, 6, 20)
    odd[0, 3], odd[1, 4], odd[2] = np.nan, np.inf, -np.inf
    odd[3, :7], odd[4, 1:], odd[5] = -np.inf, -np.inf, 0.25
    for names in ((), ("top_k",), ("top_p",), ("min_p",)):
        yield Case(f"NaN and infinities {names}", (odd, *_chosen(names)))


def sample_cases(rng: Rng) -> Iterator[Case]:
    for n, (name, logits, settings, layouts, out_layout) in enumerate(_filtered(rng)):
        if out_layout == "transposed":  # of one dimension there is no other
            continue
        rows = len(logits) if n % 2 else 1
        seeds, offsets = (rng.integers(-(2**63), 2**63 - 1, rows) for _ in range(2))
        yield Case(name, (logits, seeds, offsets, *settings), {}, (*layouts, *layouts[:2]), out_layout)
    greedy = (_single(0.0, 1.0, 0.0), None, None, None)
    yield Case("greedy", (normal(rng, 3, 50), np.array([1]), np.array([2]), *greedy))
    yield Case("ties of the largest", (np.ones((3, 50)), np.array([1]), np.array([2]), *greedy))


def verify_cases(rng: Rng) -> Iterator[Case]:
    def case(name: str, rows: int, drafts: int, size: int, has_draft: bool = True, **more: Any) -> Case:
        p, q = (rng.dirichlet(np.ones(size), (rows, steps)) for steps in (drafts + 1, drafts))
        ids = rng.integers(-1, size, (rows, drafts)).astype(more.pop("dtype", "int64"))
        seeds = rng.integers(-(2**63), 2**63 - 1, more.pop("seeds", 1))
        given = (p, ids, q if has_draft else None, seeds, rng.integers(0, 99, 1))
        return Case(f"{name} {has_draft}", given, **more)

    for has_draft in (True, False):
        for size in (1, 2, 7, 32, 301):
            yield case(f"{size}", 5, 4, size, has_draft)
        yield case("seeds", 5, 2, 9, has_draft, seeds=5, dtype="int32")
        for layout in LAYOUTS:
            yield case(f"{layout} inputs", 4, 3, 9, has_draft, layouts=(layout,) * 5)
        yield case("no drafts", 3, 0, 9, has_draft)
        yield case("no rows", 0, 3, 9, has_draft)
    yield Case("nothing", (np.zeros((2, 2, 9)), np.ones((2, 1), int), np.ones((2, 1, 9)), np.array([1]), np.array([1])))


def tree_cases(rng: Rng) -> Iterator[Case]:
    def case(name: str, rows: int, nodes: int, **more: Any) -> Case:
        dtype = more.pop("dtype", "int64")
        above = np.array([[rng.integers(-1, n) if n else -1 for n in range(nodes)] for _ in range(rows)], dtype)
        drafts, wanted = (rng.integers(-1, 3, (rows, nodes)).astype(float) for _ in range(2))
        return Case(name, (drafts / 16, above.reshape(rows, nodes), wanted / 16), **more)

    for dtype in ("int32", "int64"):
        for nodes in (1, 2, 9, 33):
            yield case(f"{nodes} {dtype}", 6, nodes, dtype=dtype)
    for layout in LAYOUTS:
        yield case(f"{layout} inputs", 6, 12, layouts=(layout,) * 3)
    yield case("no rows", 0, 5)


def _chosen(names: tuple[str, ...], rows: int = 1) -> tuple[Any, ...]:
    """The four settings, None for those that are not named: one number each, or one for each of 3 rows."""
    known = {
        "temperature": _single(0.7, 1.0, 3.0),
        "top_k": np.array([5, 0, 10**6]),
        "top_p": _single(0.8, 1.0, 0.0),
        "min_p": _single(0.05, 0.0, 1.0),
    }
    return tuple(value[:rows] if name in names else None for name, value in known.items())


def _filtered(rng: Rng) -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[str, ...], str]]:
    """Name, logits, the four settings, layouts."""
    several = ("temperature", "top_k", "top_p", "min_p")
    for size in (1, 32, 301):
        for names in ((), ("temperature",), *((name,) for name in several[1:]), several):
            for rows in (1, 3):
                yield f"{size} {names} {rows}", normal(rng, 3, size) * 3, _chosen(names, rows), (), "contiguous"
    yield "wide range", normal(rng, 3, 64) * 1000, _chosen(several[:3]), (), "contiguous"
    for names in (("top_k",), ("top_p",), several):
        for layout in LAYOUTS:
            logits, given = normal(rng, 3, 40), _chosen(names, 3)
            yield f"{layout} inputs {names}", logits, given, (layout,) * 5, "contiguous"
            yield f"{layout} output {names}", logits, given, (), layout
    yield "broadcast", normal(rng, 3, 40), _chosen(several), ("broadcast",), "contiguous"
    yield "no rows", normal(rng, 0, 40), _chosen(("top_k",)), (), "contiguous"
