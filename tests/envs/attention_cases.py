"""Calls of attention with options: windows, soft cap, sinks, slopes, a mask beside the causal rule; merges of parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tests.envs.case import Case, normal

from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES


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
    for blocks, queries, keys, shape in (
        ((2, 3), 7, 9, (2, 2, 4, 3)),
        ((4, 1), 7, 9, (1, 2, 2, 9)),
        ((16, 64), 60, 150, (1, 1, 4, 3)),
        ((1, 128), 1, 300, (2, 2, 1, 3)),
        ((64, 64), 7, 9, (2, 1, 1, 1)),
        ((3, 2), 7, 9, (1, 1, 1, 5)),
    ):
        made: dict[str, Any] = {"mask_block_q": blocks[0], "mask_block_k": blocks[1], "mask": rng.random(shape) < 0.5}
        size = f"blocks {blocks} of {queries}x{keys}"
        yield case(size, queries, keys, **made)
        if shape[0] == 1:
            yield case(f"{size}, causal", queries, keys, **made, causal="bottom_right", group=2)
        yield case(
            f"{size}, everything", queries, keys, **made, window_left=5, softcap=2.0, sinks=np.array([0.5, -1.0])
        )
    yield case("blocks that hide all", mask=np.zeros((1, 1, 4, 3), bool), mask_block_q=2, mask_block_k=3)
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


# Options of attention within sequences, by name of the argument or attribute.
_WITH: tuple[dict[str, Any], ...] = (
    {"window_left": 3},
    {"window_left": 2, "window_right": 4},
    {"softcap": 1.5},
    {"softcap": 2.0, "window_left": 40},
    {"sinks": True},
    {"slopes": True},
    {"sinks": True, "slopes": True, "softcap": 2.0, "window_left": 5},
)


def varlen_forward_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, queries: Sequence[int], keys: Sequence[int], group: int = 1, **more: Any) -> Case:
        tensors = [normal(rng, sum(n), h, 16) for n, h in ((queries, 2 * group), (keys, 2), (keys, 2))]
        ends = [np.cumsum([0, *lengths]).astype("int32") for lengths in (queries, keys)]
        beside, attrs, placed = _asked(rng, 2 * group, len(keys), more)
        attrs.setdefault("causal_alignment", "top_left")
        return Case(name, (*tensors, *ends, *beside), attrs, **placed)

    mixed = ([5, 1, 0, 7, 2], [5, 9, 3, 4, 0])
    for options in ({}, *_WITH):
        for causal in ("top_left", "bottom_right"):
            alone = options if "window_right" in options else {**options, "is_causal": True}
            yield case(f"{options} {causal}", *mixed, causal_alignment=causal, **alone)
        yield case(
            f"{options}, long, grouped heads", [3, 260], [300, 33], 2, causal_alignment="bottom_right", **options
        )
    for layout in ("transposed", "gaps", "rows"):
        yield case(f"{layout} inputs", *mixed, layouts=(layout,) * 3, softcap=2.0)
    yield case("no sequences", [], [])
    yield case("no keys", [2, 1], [0, 0], sinks=True)


def paged_forward_cases(rng: np.random.Generator) -> Iterator[Case]:
    """NaN in slots that no key is in, and in blocks that lie before a window."""

    def case(
        name: str, lengths: Sequence[int], queries: Sequence[int] = (), page: int = 8, group: int = 1, **more: Any
    ) -> Case:
        wide = max((-(-length // page) for length in lengths), default=0) + 1
        blocks = wide * len(lengths) + 2
        tables = rng.permutation(blocks)[: wide * len(lengths)].reshape(len(lengths), wide).astype("int32")
        caches = [np.full((blocks, page, 2, 16), np.nan) for _ in "kv"]
        for row, length in zip(tables, lengths, strict=True):
            slots = np.arange(length)
            for cache in caches:
                cache[row[slots // page], slots % page] = normal(rng, length, 2, 16)
            row[-(-length // page) :] = -(2**31)  # never followed
        q = normal(rng, sum(queries) if queries else len(lengths), 2 * group, 16)
        ends = np.cumsum([0, *queries]).astype("int32") if queries else None
        scales: tuple[Any, Any] = (None, None)
        if "kinds" in more:
            caches, scales = [unread(cache, more["kinds"]["k_cache"]) for cache in caches], _scales(rng, 2)
        beside, attrs, placed = _asked(rng, 2 * group, len(lengths), more)
        where = tables, np.array(lengths, "int32")
        return Case(name, (q, *caches, *where, ends, *beside, *scales), attrs, **placed)

    mixed = ([5, 33, 0, 16, 100], [5, 2, 0, 20, 30])
    for options in ({}, *_WITH):
        yield case(f"{options}", *mixed, **options)
        if "window_right" not in options:
            yield case(f"{options} causal", *mixed, is_causal=True, **options)
            yield case(f"{options}, one query each", [1, 17, 64], **options)
        many = 260 if "slopes" in options else 20
        yield case(f"{options}, long, grouped heads", [300, 20], [many, 3], 16, 2, **options)
    for layout in ("transposed", "gaps", "rows", "heads"):
        yield case(f"{layout} inputs", *mixed, layouts=("contiguous", layout, layout), is_causal=True)
    yield case("blocks of one key", [5, 3], [2, 3], 1, is_causal=True)
    yield case("no sequences", [])
    yield case("no keys", [0, 0], [1, 2], sinks=True)
    for kind in SCALED_CACHES:
        kinds = {"k_cache": kind, "v_cache": kind}
        yield case(f"{kind}, one query each", [1, 17, 64], group=2, kinds=kinds)
        yield case(f"{kind} causal", *mixed, is_causal=True, window_left=3, kinds=kinds)
        yield case(f"{kind}, all", *mixed, is_causal=True, softcap=2.0, sinks=True, slopes=True, kinds=kinds)
        yield case(f"{kind}, by heads", *mixed, kinds=kinds, layouts=("contiguous", "heads", "heads"))


def unread(cache: Any, kind: str) -> Any:
    """A cache in this dtype: integers have no NaN."""
    return np.nan_to_num(cache, nan=7.0) if kind == "int8" else cache


def _scales(rng: np.random.Generator, heads: int) -> tuple[Any, Any]:
    """Of keys one, of values one for each head."""
    return rng.random(1) / 32 + 0.01, rng.random(heads) / 16 + 0.01


def scaled_append_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Infinities, NaN and what is beyond the range among the numbers."""
    for kind in SCALED_CACHES:
        for name, slots in (("decode", [11, 3, 8]), ("padding", [-1, 5, -(2**31), 2]), ("nothing", [-1, -1])):
            for layout in ("contiguous", "heads"):
                rows = [normal(rng, len(slots), 2, dim) for dim in (16, 12)]
                for one in rows:
                    one[-1, 0, :5] = [1e4, -1e4, np.inf, -np.inf, np.nan]
                caches = [normal(rng, 3, 4, 2, dim) for dim in (16, 12)]
                tensors = (*rows, *caches, np.array(slots, "int64"), *_scales(rng, 2))
                kinds, layouts = {"k_cache": kind, "v_cache": kind}, ("contiguous",) * 2 + (layout,) * 2
                yield Case(f"{kind} {name}, {layout}", tensors, {}, layouts, kinds=kinds, told={"dtype": kind})


def latent_cases(rng: np.random.Generator) -> Iterator[Case]:
    """NaN in slots that no key is in."""

    def case(name: str, lengths: Sequence[int], page: int = 8, latent: int = 32, **placed: Any) -> Case:
        wide = max((-(-length // page) for length in lengths), default=0) + 1
        blocks = wide * len(lengths) + 2
        tables = rng.permutation(blocks)[: wide * len(lengths)].reshape(len(lengths), wide).astype("int32")
        caches = [np.full((blocks, page, extent), np.nan) for extent in (latent, 8)]
        for row, length in zip(tables, lengths, strict=True):
            slots = np.arange(length)
            for cache in caches:
                cache[row[slots // page], slots % page] = normal(rng, length, cache.shape[2])
            row[-(-length // page) :] = -(2**31)  # never followed
        queries = [normal(rng, len(lengths), 5, extent) for extent in (latent, 8)]
        return Case(name, (*queries, *caches, tables, np.array(lengths, "int32")), {"scale": 0.25}, **placed)

    yield case("mixed", [5, 33, 0, 16, 1])
    yield case("long", [300, 20], 16, 512)
    yield case("blocks of one key", [5, 3], 1)
    yield case("a sequence alone", [40])
    for layout in ("transposed", "gaps", "rows"):
        yield case(f"{layout} inputs", [5, 17], layouts=(layout,) * 4)
    yield case("no sequences", [])
    yield case("no keys", [0, 0])


def _asked(
    rng: np.random.Generator, heads: int, sequences: int, more: dict[str, Any]
) -> tuple[tuple[Any, Any], dict[str, Any], dict[str, Any]]:
    """Sinks and slopes, attributes, and how tensors lie."""
    placed = {one: more.pop(one) for one in ("layouts", "kinds") if one in more}
    sinks = rng.standard_normal(heads) if more.pop("sinks", False) else None
    slopes = rng.random((sequences, heads)).astype(np.float32) if more.pop("slopes", False) and sequences else None
    return (sinks, slopes), {"is_causal": False, "scale": 0.25, **more}, placed


def gather_cases(rng: np.random.Generator) -> Iterator[Case]:
    exact = np.array([0.125]), np.array([0.5, 0.0625])
    for dtype in ("int32", "int64"):
        for name, (caches, placed) in _caches(rng).items():
            room = caches[0].shape[0] * caches[0].shape[1]
            slots = np.array([room - 1, 0, -1, 3, 3, -(2**31), 1] if room else [-1], dtype)
            yield Case(f"{name} {dtype}", (*caches, slots, None, None), {}, placed)
            for made in ("float32", "bfloat16", "float16") if caches[0].shape[2] == 2 else ():  # by powers of 2: exact
                attrs = {"dtype": made}
                yield Case(f"{name} {dtype} to {made}", (*caches, slots, *exact), attrs, placed)
    yield Case("no tokens", (*caches, np.array([], "int64"), None, None))


def copy_block_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Numbers that make as much sense turned around, as the second run has them."""
    for dtype in ("int32", "int64"):
        for name, (caches, placed) in _caches(rng).items():
            pairs = [(0, 1), (3, 2), (-1, 3), (4, -1), (4, 4)] if len(caches[0]) else [(-1, -1)]
            yield Case(f"{name} {dtype}", (*caches, *np.array(pairs, dtype).T.copy()), {}, placed)
    yield Case("nothing", (*caches, *np.zeros((2, 0), "int64")))


def _caches(rng: np.random.Generator) -> dict[str, tuple[list[Any], tuple[str, ...]]]:
    """A paged cache as it may lie."""
    made: dict[str, tuple[list[Any], tuple[str, ...]]] = {
        layout: ([normal(rng, 5, 4, 2, dim) for dim in (8, 6)], (layout, layout))
        for layout in ("contiguous", "transposed", "gaps", "rows", "heads")
    }
    made["odd extents"] = [normal(rng, 5, 3, 3, dim) for dim in (13, 1)], ()
    made["no block"] = [normal(rng, 0, 3, 2, dim) for dim in (4, 4)], ()
    return made
