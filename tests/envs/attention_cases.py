"""Calls of attention with options: windows, soft cap, sinks, slopes, a mask beside the causal rule; merges of parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tests.envs.case import Case, normal


def option_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, queries: int = 7, keys: int = 9, *, group: int = 1, causal: str = "", **more: Any) -> Case:
        heads, dim = 2 * group, more.pop("dim", 16)
        tensors = [normal(rng, 2, *shape) for shape in ((heads, queries, dim), (2, keys, dim), (2, keys, dim))]
        mask, sinks, slopes = (more.pop(one, None) for one in ("mask", "sinks", "slopes"))
        placed = {one: more.pop(one) for one in ("layouts", "out_layout") if one in more}
        attrs = {
            "is_causal": bool(causal),
            "causal_alignment": causal or more.pop("alignment", "top_left"),
            "scale": more.pop("scale", dim**-0.5),
            "layout": more.pop("layout", "BHSD"),
        }
        return Case(name, (*tensors, mask, sinks, slopes), {**attrs, **more}, **placed)

    for alignment in ("top_left", "bottom_right"):
        for queries, keys in ((6, 6), (4, 9), (9, 4), (1, 5), (300, 70)):
            size = f"{alignment} {queries}x{keys}"
            yield case(f"causal window {size}", queries, keys, causal=alignment, window_left=2)
            yield case(f"window {size}", queries, keys, alignment=alignment, window_left=1, window_right=3)
            yield case(f"slopes {size}", queries, keys, alignment=alignment, slopes=np.array([[0.25, 1.5]]))
        yield case(f"itself alone {alignment}", causal=alignment, window_left=0)
        yield case(f"right only {alignment}", alignment=alignment, window_right=1)
        yield case(f"left only {alignment}", alignment=alignment, window_left=1)
    yield case("a window far wider than all", window_left=10**9, window_right=10**9)
    yield case("a window, long", 600, 600, causal="top_left", window_left=33, dim=8)
    yield case("a window, long, with a soft cap", 600, 600, causal="top_left", window_left=33, dim=8, softcap=1.5)
    yield case("a soft cap that turns everything", softcap=0.01, scale=3.0)
    yield case("a soft cap far above scores", softcap=1e6, group=3)
    yield case("a soft cap and infinite scores before it", softcap=30.0, scale=1e4)
    yield case("sinks", sinks=np.array([0.5, -1.0]))
    yield case("sinks that take all", sinks=np.array([80.0, -80.0]))
    yield case("sinks of no weight", sinks=np.array([-np.inf, 0.0]))
    yield case("sinks, and rows that see nothing", mask=np.zeros((1, 1, 7, 9), bool), sinks=np.array([0.5, -np.inf]))
    yield case("sinks without keys", keys=0, sinks=np.array([0.5, -np.inf]))
    yield case("sinks, grouped heads", group=2, causal="bottom_right", sinks=np.array([0.5, -1.0, 2.0, 0.0]))
    yield case("slopes of each batch", slopes=np.array([[0.25, 1.5], [3.0, 0.0]]), causal="bottom_right")
    yield case("slopes, grouped heads", group=2, slopes=np.array([[0.5, 0.25, 0.125, 0.0625]]))
    yield case("slopes, far", 2, 1500, slopes=np.array([[0.5, 0.01]]), alignment="bottom_right", dim=8)
    seen = rng.random((2, 2, 7, 9)) < 0.6
    seen[0, 1, 3] = False
    for shape in ((2, 2, 7, 9), (2, 1, 1, 9), (1, 1, 7, 1)):
        mask = seen[tuple(slice(0, n) for n in shape)]
        bias = np.where(mask, rng.standard_normal(shape), -np.inf)
        for kind, one in (("bool", mask), ("float", bias)):
            yield case(f"{kind} mask {shape} and causal", mask=one, causal="bottom_right")
            yield case(f"{kind} mask {shape} and a window", mask=one, window_left=2, window_right=1)
    yield case(
        "everything",
        group=2,
        mask=rng.random((2, 1, 7, 9)) < 0.7,
        causal="bottom_right",
        window_left=4,
        softcap=2.0,
        sinks=rng.standard_normal(4),
        slopes=np.array([[0.5, 0.25, 0.125, 0.0625]]),
    )
    everything: dict[str, Any] = {"softcap": 2.0, "sinks": np.array([0.5, -1.0]), "window_left": 3}
    heads = ("heads",) * 3
    yield case("BSHD", **everything, causal="top_left", layouts=heads, out_layout="heads", layout="BSHD")
    for layout in ("transposed", "gaps", "rows", "broadcast"):
        yield case(f"{layout} inputs", **everything, layouts=(layout,) * 3)
    yield case("gaps in the output", **everything, out_layout="gaps")
    yield case("no query", 0, 3, **everything)


def merge_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Parts of whole calls of attention, and rows that a part does not see, whatever it holds there."""

    def parts(count: int, *shape: int) -> list[Any]:
        return [one for _ in range(count) for one in (normal(rng, *shape), 3 * normal(rng, *shape[:-1]))]

    def case(name: str, tensors: Sequence[Any], **placed: Any) -> Case:
        tensors = [one if one is None or n % 2 == 0 else one.astype(np.float32) for n, one in enumerate(tensors)]
        return Case(name, (*tensors, *[None] * (8 - len(tensors))), {}, **placed)

    for count in (2, 3, 4):
        yield case(f"{count} parts", parts(count, 2, 3, 5, 7))
    yield case("rows alone", parts(2, 6, 16))
    yield case("many", parts(2, 2, 4, 300, 64))
    hidden = parts(3, 2, 3, 5, 7)
    for part, rows in ((0, 0), (1, 0), (2, 0), (1, 1), (0, 2), (2, 2)):  # head 0 sees nothing at all
        hidden[2 * part][:, rows], hidden[2 * part + 1][:, rows] = np.nan, -np.inf
    yield case("empty parts with NaN in them", hidden)
    far = parts(2, 2, 3, 5, 7)
    far[1][0], far[3][1] = far[1][0] + 3000, far[3][1] - 1e30
    yield case("one part far above", far)
    yield case("equal ones", [*parts(1, 3, 4, 8) * 2])
    for layout in ("transposed", "gaps", "rows", "heads"):
        yield case(f"{layout} inputs", parts(2, 2, 3, 5, 7), layouts=(layout,) * 4)
    yield case("no row", parts(2, 2, 0, 7))
    yield case("no element", parts(2, 2, 3, 0))
