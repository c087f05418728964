"""The problems of attention within sequences, packed or in a paged cache, with options and the log-sum-exp of rows, and
of what moves rows and blocks of such a cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from layerzero.ipc.vocabulary.numerics import MAGNITUDES, nearest
from layerzero.ipc.vocabulary.quantized_shapes import SCALED_DTYPES
from layerzero.workers.certify.attention_problems import (
    append_kv,
    head_dims,
    packed,
    page_size,
    paged,
    paged_attention,
)
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem, family
from layerzero.workers.certify.values import Values

# Each option, beside a causal rule or none: attributes, and whether there are sinks and slopes.
_OPTIONS: tuple[tuple[str, bool, dict[str, Any], bool, bool], ...] = (
    ("plain", False, {}, False, False),
    ("causal", True, {}, False, False),
    ("window", True, {"window_left": 5}, False, False),
    ("window", False, {"window_left": 2, "window_right": 3}, False, False),
    ("softcap", True, {"softcap": 1.5}, False, False),
    ("sinks", True, {}, True, False),
    ("slopes", False, {}, False, True),
    ("all options", True, {"window_left": 9, "softcap": 2.0}, True, True),
)


_OF_PAGED = ("", "", "", "int32", "int32", "int32", "", "float32", "float32", "float32")


def _beside(numbers: Numbers, sequences: int, heads: int, has_sinks: bool, has_slopes: bool) -> list[Values | None]:
    count = sequences * heads
    slopes = Values((sequences, heads), [0.25 + n / 16 for n in range(count)]) if has_slopes and count else None
    return [numbers(heads) if has_sinks else None, slopes]


def _varlen(claims: Claims) -> Iterator[Problem]:
    numbers, dims = Numbers(38), head_dims(claims, (8, 16))
    counts: tuple[tuple[Sequence[int], Sequence[int]], ...] = (((1, 4, 0, 3), (4, 2, 3, 0)), ((2, 5), (3, 270)))
    for (title, is_causal, options, *given), (group, sizes) in itertools.product(_OPTIONS, enumerate(counts, 1)):
        for alignment in ("top_left", "bottom_right") if title == "causal" else ("bottom_right",):
            attrs = {"is_causal": is_causal, "scale": 0.25, "causal_alignment": alignment, **options}
            made = packed(numbers, f"{title} {alignment}, {sizes}", attrs, sizes, 2, group, dims)
            inputs = (*made.inputs, *_beside(numbers, len(sizes[0]), 2, *given))
            kinds = (*made.kinds, "", "float32")
            yield replace(made, op="attention_varlen_forward", inputs=inputs, kinds=kinds, _solved={})
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left"}
    made = packed(numbers, "no query", plain, ((0, 0), (2, 1)), 2, 1, dims)
    yield replace(
        made,
        op="attention_varlen_forward",
        inputs=(*made.inputs, None, None),
        kinds=(*made.kinds, "", "float32"),
        _solved={},
    )


def _paged(claims: Claims) -> Iterator[Problem]:
    """Of each size once without cu_seqlens_q."""
    numbers, dims = Numbers(39), head_dims(claims, (8, 16))
    sizes: tuple[tuple[Sequence[int], Sequence[int], int], ...] = (
        ((3, 0, 1), (7, 5, 3), 4),
        ((4, 2), (270, 3), 16),
    )
    options = (*_OPTIONS, ("decode", False, {}, False, False))
    for (title, is_causal, more, *given), (group, (queries, keys, page)) in itertools.product(
        options, enumerate(sizes, 1)
    ):
        made = paged(numbers, f"{title}, {queries} of {keys}", keys, page_size(claims, page), group, dims)
        cached = made.inputs[1:5]
        total = len(keys) if title == "decode" else sum(queries)
        ends = Values((len(keys) + 1,), list(itertools.accumulate(queries, initial=0)))
        attrs = {"is_causal": is_causal, "scale": 0.25, **more}
        inputs = (numbers(total, 2, dims[0]), *cached, None if title == "decode" else ends)
        inputs = (*inputs, *_beside(numbers, len(keys), 2, *given), None, None)
        yield Problem("paged_attention_forward", made.name, attrs, inputs, _OF_PAGED)
    made = paged(numbers, "no sequence", (), page_size(claims, 4), 1, dims)
    attrs = {"is_causal": False, "scale": 0.25}
    inputs = (*made.inputs[:5], *[None] * 5)
    yield Problem("paged_attention_forward", made.name, attrs, inputs, _OF_PAGED)


def _mla_decode(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(41)
    # lengths, size of a block, extents of latent vectors and of rotated keys
    sizes: tuple[tuple[str, Sequence[int], int, tuple[int, int]], ...] = (
        ("small", (7, 0, 4), 4, (8, 4)),
        ("ragged", (270, 3), 16, (40, 12)),
        ("no sequence", (), 4, (8, 4)),
        ("no rotated part", (5, 2), 4, (8, 0)),
    )
    for title, lengths, page, (latent, rope) in sizes:
        *cached, tables, counts = paged(numbers, title, lengths, page, 2, (latent, rope)).inputs[1:5]
        caches = [Values((*one.shape[:2], one.shape[3]), one.flat) for one in cached if one is not None]
        queries = [numbers(len(lengths), 3, wide) for wide in (latent, rope)]
        inputs = (*queries, *caches, tables, counts)
        yield Problem("mla_decode", title, {"scale": 0.25}, inputs, ("",) * 4 + ("int32",) * 2)


def _with_scales(op: str, plain: Callable[[Claims], Iterator[Problem]]) -> Callable[[Claims], Iterator[Problem]]:
    """Those of an op, or where a kernel takes caches with scales those of these alone."""

    def problems(claims: Claims) -> Iterator[Problem]:
        dtypes = claims.get("supports_kv_cache_dtypes", ())
        if "k_scale" not in claims.get("required_args", ()):
            yield from plain(claims)
        for dtype in dtypes:
            yield from _SCALED[op](claims, dtype)

    return problems


# Scales of k and v: one, and one for each of two heads. Powers of 2 where a product must be exact.
_STEPS = ((0.046875, 0.03125), ([0.03125, 0.01171875], [0.0234375, 0.0625]))
_EXACT = ((0.0625, 0.125), ([0.25, 0.03125], [0.125, 0.5]))


def _scales(steps: Sequence[Any], heads: int) -> list[Values]:
    found = [[one] if isinstance(one, float) else list(one[:heads]) for one in steps]
    return [Values((len(flat),), flat) for flat in found]


def _in_eight_bits(cache: Values, dtype: str) -> Values:
    """A cache as numbers of a dtype, so large that steps of 1/32 give back about what it was; infinities as the largest
    number."""
    top = MAGNITUDES[dtype][-1] if dtype in MAGNITUDES else 127.0

    def flat() -> list[float]:
        wide = [32 * x if math.isfinite(x) else top for x in cache.flat]
        return [nearest(x, dtype) if dtype in MAGNITUDES else round(x) for x in wide]

    return Values(cache.shape, flat)


def _scaled_paged(claims: Claims, dtype: str) -> Iterator[Problem]:
    numbers, dims = Numbers(42), head_dims(claims, (8, 16))
    for number, (lengths, page) in enumerate((((7, 0, 3), 4), ((270, 5), 16), ((), 4))):
        made = paged(numbers, f"{dtype}, {lengths}", lengths, page_size(claims, page), 1 + number % 2, dims)
        yield _quantized(made, dtype, _STEPS[number % 2])


def _scaled_paged_forward(claims: Claims, dtype: str) -> Iterator[Problem]:
    """With all options and without; of each once without cu_seqlens_q."""
    numbers, dims = Numbers(43), head_dims(claims, (8, 16))
    sizes: tuple[tuple[Sequence[int], Sequence[int], int], ...] = (
        ((3, 0, 1), (7, 5, 3), 4),
        ((4, 2), (270, 3), 16),
        ((), (3, 2), 4),
    )
    for (title, is_causal, more, *given), (number, (queries, keys, page)) in itertools.product(
        (_OPTIONS[1], _OPTIONS[-1]), enumerate(sizes)
    ):
        made = paged(numbers, f"{dtype}, {title}, {queries} of {keys}", keys, page_size(claims, page), 1, dims)
        ends = Values((len(keys) + 1,), list(itertools.accumulate(queries, initial=0))) if queries else None
        attrs = {"is_causal": is_causal and bool(queries), "scale": 0.25, **more}
        query = numbers(sum(queries) or len(keys), 2, dims[0])
        inputs = (query, *made.inputs[1:5], ends, *_beside(numbers, len(keys), 2, *given), None, None)
        whole = Problem("paged_attention_forward", made.name, attrs, inputs, _OF_PAGED)
        yield _quantized(whole, dtype, _STEPS[number % 2])


def _quantized(problem: Problem, dtype: str, steps: Sequence[Any]) -> Problem:
    """With caches of 8 bits, and their scales."""
    q, k_cache, v_cache, *others = problem.inputs
    assert k_cache is not None
    assert v_cache is not None
    caches = [_in_eight_bits(cache, dtype) for cache in (k_cache, v_cache)]
    inputs = (q, *caches, *others[:-2], *_scales(steps, k_cache.shape[2]))
    kinds = ("", dtype, dtype, *problem.kinds[3:])
    return replace(problem, inputs=inputs, kinds=kinds, families=SCALED_DTYPES, _solved={})


def _scaled_append(_: Claims, dtype: str) -> Iterator[Problem]:
    """Among the numbers are those beyond the dtype's range, infinities and NaN."""
    numbers = Numbers(44)
    sizes = (("small", (3, -1, 9, 0), 3, 4, 8), ("long", (299, 2, 511, -1), 2, 272, 16), ("no token", (), 2, 4, 8))
    for index, (number, (title, slots, blocks, page, dim)) in itertools.product(("int32", "int64"), enumerate(sizes)):
        rows = [numbers(len(slots), 2, extent) for extent in (dim, dim + 8)]
        for one in rows:
            if slots:
                one.flat[1:6] = [8192.0, -8192.0, math.inf, -math.inf, math.nan]  # type: ignore[index]
        caches = [_in_eight_bits(numbers(blocks, page, 2, extent), dtype) for extent in (dim, dim + 8)]
        steps = [[one / 64 for one in of] if dtype == "float8_e5m2" else of for of in _STEPS[1]]
        scales = _scales(steps if number % 2 else _STEPS[0], 2)
        inputs = (*rows, *caches, Values((len(slots),), list(slots)), *scales)
        kinds = ("", "", dtype, dtype, index, "float32", "float32")
        yield Problem("append_kv", f"{dtype}, {title}, {index}", {}, inputs, kinds, SCALED_DTYPES)


def _scaled_gather(_: Claims, dtype: str) -> Iterator[Problem]:
    numbers = Numbers(45)
    shapes = (("small", 6, 4, 8), ("long", 4, 272, 8), ("no block", 0, 4, 8))
    made = ("float32", "bfloat16", "float16")
    for index, out, (number, shape) in itertools.product(("int32", "int64"), made, enumerate(shapes)):
        title, blocks, page, dim = shape
        slots = (page * 2 + 1, 0, -1, page * blocks - 1, 1) if blocks else (-1, -1)
        caches = [_in_eight_bits(numbers(blocks, page, 2, extent), dtype) for extent in (dim, dim + 8)]
        inputs = (*caches, Values((len(slots),), list(slots)), *_scales(_EXACT[number % 2], 2))
        kinds = (dtype, dtype, index, "float32", "float32")
        families = (family(dtype),)
        yield Problem("gather_kv", f"{title}, {index} to {out}", {"dtype": out}, inputs, kinds, families)


_SCALED: dict[str, Callable[[Claims, str], Iterator[Problem]]] = {
    "paged_attention": _scaled_paged,
    "paged_attention_forward": _scaled_paged_forward,
    "append_kv": _scaled_append,
    "gather_kv": _scaled_gather,
}


def _moves(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Of rows, or of blocks: which places, and where to."""

    def problems(_: Claims) -> Iterator[Problem]:
        numbers = Numbers(40)
        shapes = (("small", 6, 4, 8), ("long", 4, 272, 8), ("no block", 0, 4, 8))
        for dtype, (title, blocks, page, dim) in itertools.product(("int32", "int64"), shapes):
            slots = (page * 2 + 1, 0, -1, page * blocks - 1, 1) if blocks else (-1, -1)
            given = ([slots] if op == "gather_kv" else [(0, 2, -1, 3), (1, -1, 0, 3)]) if blocks else [(-1, -1)]
            given = given if op == "gather_kv" or blocks else [(-1, -1), (-1, -1)]
            caches = [numbers(blocks, page, 2, extent) for extent in (dim, dim + 8)]
            places = [Values((len(one),), list(one)) for one in given]
            inputs = (*caches, *places, *([None, None] if op == "gather_kv" else []))
            kinds = ("", "", *[dtype] * len(places), *["float32"] * (len(inputs) - len(places) - 2))
            yield Problem(op, f"{title}, {dtype}", {}, inputs, kinds)

    return problems


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "attention_varlen_forward": _varlen,
    "paged_attention": _with_scales("paged_attention", paged_attention),
    "paged_attention_forward": _with_scales("paged_attention_forward", _paged),
    "mla_decode": _mla_decode,
    "append_kv": _with_scales("append_kv", append_kv),
    "gather_kv": _with_scales("gather_kv", _moves("gather_kv")),
    "copy_kv_blocks": _moves("copy_kv_blocks"),
}
