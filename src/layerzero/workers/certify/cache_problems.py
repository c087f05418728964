"""The problems of attention within sequences, packed or in a paged cache, with options and the log-sum-exp of rows, and
of what moves rows and blocks of such a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from layerzero.workers.certify.attention_problems import head_dims, packed, page_size, paged
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
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
        _, *cached = made.inputs
        total = len(keys) if title == "decode" else sum(queries)
        ends = Values((len(keys) + 1,), list(itertools.accumulate(queries, initial=0)))
        attrs = {"is_causal": is_causal, "scale": 0.25, **more}
        inputs = (numbers(total, 2, dims[0]), *cached, None if title == "decode" else ends)
        inputs = (*inputs, *_beside(numbers, len(keys), 2, *given))
        kinds = (*made.kinds, "int32", "", "float32")
        yield Problem("paged_attention_forward", made.name, attrs, inputs, kinds)
    made = paged(numbers, "no sequence", (), page_size(claims, 4), 1, dims)
    attrs = {"is_causal": False, "scale": 0.25}
    inputs = (*made.inputs, None, None, None)
    yield Problem("paged_attention_forward", made.name, attrs, inputs, (*made.kinds, "int32", "", "float32"))


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
        *cached, tables, counts = paged(numbers, title, lengths, page, 2, (latent, rope)).inputs[1:]
        caches = [Values((*one.shape[:2], one.shape[3]), one.flat) for one in cached if one is not None]
        queries = [numbers(len(lengths), 3, wide) for wide in (latent, rope)]
        inputs = (*queries, *caches, tables, counts)
        yield Problem("mla_decode", title, {"scale": 0.25}, inputs, ("",) * 4 + ("int32",) * 2)


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
            yield Problem(op, f"{title}, {dtype}", {}, (*caches, *places), ("", "", *[dtype] * len(places)))

    return problems


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "attention_varlen_forward": _varlen,
    "paged_attention_forward": _paged,
    "mla_decode": _mla_decode,
    **{op: _moves(op) for op in ("gather_kv", "copy_kv_blocks")},
}
