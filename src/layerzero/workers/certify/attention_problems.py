"""The problems of attention, of caches of keys and values, and of what is done to heads before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from layerzero.ipc.vocabulary.ops import MERGE_INPUTS, OPS
from layerzero.ipc.vocabulary.shape_class import LONG, REGISTER
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Shape, Values


def _attention(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Of attention and attention_forward, which take the same."""
    return partial(_attention_problems, op, least_heads=2 if op == "attention" else 1)


def _attention_backward(claims: Claims) -> Iterator[Problem]:
    """Those of attention_forward, with a gradient; `output` and `lse` are what comes out there."""
    numbers = Numbers(17)
    for forward in _attention_problems("attention_forward", claims, least_heads=1):
        q, k, v, mask, sinks, slopes = forward.inputs
        if sinks or slopes or OPS["attention"].options & forward.attrs.keys():
            continue
        assert q is not None
        assert v is not None
        shape = (*q.shape[:3], v.shape[3])
        output, lse = (Values(its, partial(_solution, forward, i)) for i, its in enumerate((shape, shape[:3])))
        inputs = (numbers(*shape, scale=0.5), q, k, v, output, lse, mask)
        kinds = ("", "", "", "", "", "float32", forward.kinds[3])
        yield Problem("attention_backward", forward.name, forward.attrs, inputs, kinds)


def _solution(problem: Problem, number: int) -> Sequence[float]:
    return problem.solutions("float")[number].flat


def _attention_problems(op: str, claims: Claims, least_heads: int = 2) -> Iterator[Problem]:
    numbers = Numbers(1)
    # (queries, keys, head_dim, dimension of values, shape of a mask as a choice of extents)
    sizes = (
        ("small", 3, 5, 8, 8, "bhqk"),
        ("aligned", 16, 32, 64, 64, "b1qk"),
        ("decode", 1, 33, 64, 64, "b11k"),
        ("ragged", 17, 9, 24, 40, "1hqk"),
        ("long", 2, 272, 16, 16, "111k"),
        ("long, ragged", 9, 301, 8, 8, "b1qk"),
    )
    for variant in ("plain", "causal", "top_left", "bottom_right", "bool", "float"):
        for group in (1, 2):
            for name, queries, keys, dim, wide, mask_shape in sizes:
                rows = keys if variant == "causal" else queries
                is_again = op != "attention" and variant != "plain"
                if name == "long, ragged" and (variant == "causal" or is_again):
                    continue  # takes a quarter of a second, and the other long one says the same
                is_small = name in ("small", "aligned")  # where a second head costs little
                batch, heads = 1 if keys > 64 else 2, max(group, 2 if is_small else least_heads)
                dims = [_head_dim(claims, d) for d in (dim, wide)]
                mask, kind = None, ""
                if variant in ("bool", "float"):
                    extents = {"b": batch, "h": heads, "q": rows, "k": keys, "1": 1}
                    mask = _mask(numbers, tuple(extents[c] for c in mask_shape), variant)
                    kind = "bool" if variant == "bool" else ""
                attrs = {
                    "is_causal": variant in ("causal", "top_left", "bottom_right"),
                    "scale": 0.25,
                    "causal_alignment": variant if variant == "bottom_right" else "top_left",
                    "layout": "BHSD",
                }
                q = numbers(batch, heads, rows, dims[0])
                k, v = (numbers(batch, heads // group, keys, d) for d in dims)
                title = f"{variant}, {name}{', grouped heads' if group > 1 else ''}"
                yield Problem(op, title, attrs, (q, k, v, mask, None, None), ("", "", "", kind, "", "float32"))
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left", "layout": "BHSD"}
    dim = _head_dim(claims, 8)
    for queries, keys in ((0, 3), (3, 0)):
        q, k, v = numbers(1, 2, queries, dim), numbers(1, 2, keys, dim), numbers(1, 2, keys, dim)
        inputs = (q, k, v, None, None, None)
        yield Problem(op, f"{queries} queries, {keys} keys", plain, inputs, ("", "", "", "", "", "float32"))
    yield from _option_problems(op, claims, numbers)


# Each option once with few heads and keys, and once beyond a block of a library: queries, keys, causal_alignment of a
# causal rule or "", mask or "", query heads for each key head, attributes, and whether there are sinks and slopes.
_OPTIONS: tuple[tuple[str, tuple[int, int], str, str, int, dict[str, Any], bool, bool], ...] = (
    ("window", (7, 7), "top_left", "", 2, {"window_left": 2}, False, False),
    ("window", (5, 9), "", "bool", 1, {"window_left": 1, "window_right": 2}, False, False),
    ("window", (2, 272), "bottom_right", "", 1, {"window_left": 20}, False, False),
    ("window of nothing", (9, 3), "top_left", "", 1, {"window_left": 0}, False, False),
    ("softcap", (5, 9), "bottom_right", "", 2, {"softcap": 2.0}, False, False),
    ("softcap", (3, 272), "", "", 1, {"softcap": 0.5}, False, False),
    ("sinks", (7, 5), "", "bool", 2, {}, True, False),
    ("sinks", (2, 272), "bottom_right", "", 1, {}, True, False),
    ("slopes", (5, 9), "", "", 2, {}, False, True),
    ("slopes", (2, 272), "bottom_right", "", 1, {}, False, True),
    ("mask and causal", (7, 7), "top_left", "bool", 2, {}, False, False),
    ("mask and causal", (3, 272), "bottom_right", "float", 1, {}, False, False),
    ("window and softcap", (6, 9), "bottom_right", "", 2, {"window_left": 3, "softcap": 1.5}, False, False),
    ("window and softcap", (2, 272), "bottom_right", "", 1, {"window_left": 100, "softcap": 1.5}, False, False),
    ("window and sinks", (6, 6), "top_left", "", 2, {"window_left": 3}, True, False),
    ("blocks", (7, 20), "", "bool", 2, {"mask_block_q": 2, "mask_block_k": 3}, False, False),
    ("blocks", (40, 272), "", "bool", 1, {"mask_block_q": 16, "mask_block_k": 64}, False, False),
    ("blocks and causal", (9, 9), "top_left", "bool", 2, {"mask_block_q": 4, "mask_block_k": 2}, False, False),
    (
        "blocks and window",
        (3, 272),
        "bottom_right",
        "bool",
        1,
        {"mask_block_q": 2, "mask_block_k": 8, "window_left": 99},
        True,
        False,
    ),
    ("all options", (5, 7), "top_left", "float", 2, {"window_left": 2, "softcap": 1.5}, True, True),
    ("all options", (3, 272), "", "bool", 1, {"window_left": 99, "window_right": 30, "softcap": 9.0}, True, True),
)


def _option_problems(op: str, claims: Claims, numbers: Numbers) -> Iterator[Problem]:
    dim = _head_dim(claims, 8)
    for title, (queries, keys), alignment, mask_kind, group, options, has_sinks, has_slopes in _OPTIONS:
        batch, heads = (1, group) if keys > LONG else (2, 2 * group)
        attrs = {
            "is_causal": bool(alignment),
            "scale": 0.25,
            "causal_alignment": alignment or "bottom_right",
            "layout": "BHSD",
            **options,
        }
        blocks = (-(-queries // attrs.get("mask_block_q", 1)), -(-keys // attrs.get("mask_block_k", 1)))
        mask = _mask(numbers, (batch, 1, *blocks), mask_kind) if mask_kind else None
        q = numbers(batch, heads, queries, dim)
        k, v = (numbers(batch, heads // group, keys, dim) for _ in "kv")
        sinks = numbers(heads) if has_sinks else None
        slopes = Values((batch, heads), [0.25 + n / 16 for n in range(batch * heads)]) if has_slopes else None
        kinds = ("", "", "", "bool" if mask_kind == "bool" else "", "", "float32")
        yield Problem(op, f"{title}, {queries} x {keys}", attrs, (q, k, v, mask, sinks, slopes), kinds)


def _head_dim(claims: Claims, wanted: int) -> int:
    """The head dimension nearest to `wanted` that a kernel takes; of whole registers when `wanted` is."""
    step: int = claims.get("head_dim_multiple", 1)
    low: int = -(-claims.get("min_head_dim", 1) // step) * step
    high = claims.get("max_head_dim")
    whole = math.lcm(step, REGISTER)
    if wanted % REGISTER == 0 and low > wanted and (high is None or -(-low // whole) * whole <= high):
        low = -(-low // whole) * whole
    nearest = max(low, round(wanted / step) * step)
    return nearest if high is None else max(low, min(nearest, int(high) // step * step))


def head_dims(claims: Claims, wanted: Sequence[int]) -> list[int]:
    """Of queries and values."""
    dims = [_head_dim(claims, dim) for dim in wanted]
    return [dims[0], dims[0]] if claims.get("equal_head_dims") else dims


def _mask(numbers: Numbers, shape: Shape, kind: str) -> Values:
    """About two thirds visible; where there are several rows, the second sees nothing."""
    flat = [value > -1 for value in numbers(*shape).flat]
    flat[0] = True
    if shape[2] > 1:
        flat[shape[3] : 2 * shape[3]] = [False] * shape[3]
    if kind == "bool":
        return Values(shape, flat)
    return Values(shape, [bias if seen else -math.inf for seen, bias in zip(flat, numbers(*shape).flat, strict=True)])


def _merge_attention(_: Claims) -> Iterator[Problem]:
    """Among the rows: parts that see nothing, with infinities in them, rows that none sees, and one part far above."""
    numbers = Numbers(37)
    for count, shape in (
        (2, (2, 3, 5, 8)),
        (2, (3, 7)),
        (2, (2, 40, 16)),
        (3, (5, 2, 8)),
        (4, (1, 2, 9, 24)),
        (2, (0, 4)),
    ):
        rows = math.prod(shape[:-1])
        inputs: list[Values | None] = []
        for part in range(count):
            out, lse = numbers(*shape), [value * 4 for value in numbers(rows).flat]
            flat = list(out.flat)
            for row in range(rows):
                if row % 5 == 1 or (row % 5 == 2 and part == 0):
                    lse[row] = -math.inf
                    flat[row * shape[-1]] = math.inf
                elif row % 5 == 3 and part == 1:
                    lse[row] += 500.0
            inputs += [Values(shape, flat), Values(shape[:-1], lse)]
        inputs += [None] * (len(MERGE_INPUTS) - len(inputs))
        yield Problem("merge_attention", f"{count} of {list(shape)}", {}, tuple(inputs), ("", "float32") * 4)


def _attention_varlen(claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(12)
    # queries and keys of each sequence, head_dim, dimension of values
    sizes = (
        ("small", (1, 3, 0, 2), (4, 2, 3, 0), 8, 8),
        ("aligned", (7, 9), (20, 12), 64, 64),
        ("ragged", (5, 12), (18, 3), 24, 40),
        ("long", (2, 0, 9), (150, 20, 131), 16, 16),
    )
    for variant in ("plain", "top_left", "bottom_right"):
        for group in (1, 2):
            for name, queries, keys, *dims in sizes:
                attrs = {
                    "is_causal": variant != "plain",
                    "scale": 0.25,
                    "causal_alignment": variant if variant == "bottom_right" else "top_left",
                }
                title = f"{variant}, {name}{', grouped heads' if group > 1 else ''}"
                yield packed(numbers, title, attrs, (queries, keys), 2, group, head_dims(claims, dims))
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left"}
    dim = _head_dim(claims, 8)
    for counts in ((), ()), ((0, 0), (2, 1)), ((2, 1), (0, 0)):
        yield packed(numbers, f"queries {counts[0]}, keys {counts[1]}", plain, counts, 2, 1, (dim, dim))


def packed(
    numbers: Numbers,
    name: str,
    attrs: dict[str, Any],
    counts: tuple[Sequence[int], Sequence[int]],
    heads: int,
    group: int,
    dims: Sequence[int],
) -> Problem:
    """Sequences with so many queries and keys."""
    queries, keys = map(sum, counts)
    q = numbers(queries, heads, dims[0])
    k, v = (numbers(keys, heads // group, dim) for dim in dims)
    ends = (Values((len(n) + 1,), list(itertools.accumulate(n, initial=0))) for n in counts)
    return Problem("attention_varlen", name, attrs, (q, k, v, *ends), ("", "", "", "int32", "int32"))


def paged_attention(claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(13)
    # keys of each sequence, size of a block, head_dim, dimension of values
    sizes = (
        ("small", (5, 0, 8), 4, 8, 8),
        ("aligned", (33, 1, 32), 16, 64, 64),
        ("ragged", (33, 17), 16, 24, 40),
        ("ragged blocks", (30, 5), 24, 16, 16),
        ("long", (272, 40), 16, 16, 16),
        ("long blocks", (300, 7), 256, 16, 16),
    )
    for name, lengths, page, *dims in sizes:
        for group in (1, 2):
            title = f"{name}{', grouped heads' if group > 1 else ''}"
            yield paged(numbers, title, lengths, page_size(claims, page), group, head_dims(claims, dims))
    dim = _head_dim(claims, 8)
    for none in (), (0, 0):
        yield paged(numbers, f"lengths {none}", none, page_size(claims, 4), 1, (dim, dim))


def page_size(claims: Claims, wanted: int) -> int:
    """The size of a block nearest to `wanted`, from above, that a kernel takes."""
    step: int = claims.get("page_size_multiple", 1)
    high = claims.get("max_page_size")
    return -(-(wanted if high is None else min(wanted, high)) // step) * step


def paged(numbers: Numbers, name: str, lengths: Sequence[int], page: int, group: int, dims: Sequence[int]) -> Problem:
    """Sequences whose blocks lie in turns, from the last one back. What no key is in, kernels must not look at: slots
    hold infinity, table entries -1."""
    heads, wide = 2, max((-(-length // page) for length in lengths), default=0)
    total = sum(-(-length // page) for length in lengths) + 1
    free = list(range(1, total))
    tables = [free.pop() if j * page < length else -1 for length in lengths for j in range(wide)]
    caches = [
        Values((total, page, heads // group, dim), [math.inf] * (total * page * heads // group * dim)) for dim in dims
    ]
    for b, length in enumerate(lengths):
        for j in range(length):
            slot = tables[b * wide + j // page] * page + j % page
            for cache in caches:
                row = math.prod(cache.shape[2:])
                cache.flat[slot * row : (slot + 1) * row] = numbers(row).flat  # type: ignore[index]
    q = numbers(len(lengths), heads, dims[0])
    where = (Values((len(lengths), wide), tables), Values((len(lengths),), list(lengths)))
    kinds = ("", "", "", "int32", "int32", "float32", "float32")
    return Problem("paged_attention", name, {"scale": 0.25}, (q, *caches, *where, None, None), kinds)


def append_kv(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(15)
    # slots, blocks, size of a block, extent of keys, of values
    sizes = (
        ("small", (3, -1, 9, 0), 3, 4, 8, 8),
        ("aligned", tuple(range(40, 8, -2)), 3, 16, 64, 64),
        ("ragged", (*range(17, 29), -5, 3, 2, 47, 11), 3, 17, 24, 40),
        ("long", (299, 2, 511, -1), 2, 256, 272, 16),
        ("padding only", (-1, -1, -2), 2, 4, 8, 8),
    )
    for dtype in ("int32", "int64"):
        for name, slots, blocks, page, *dims in sizes:
            yield _appended(numbers, f"{name}, {dtype}", slots, (blocks, page), dims, dtype)
        yield _appended(numbers, f"no token, {dtype}", (), (2, 4), (8, 8), dtype)
        yield _appended(numbers, f"no block, {dtype}", (-1,), (0, 4), (8, 8), dtype)


def _appended(
    numbers: Numbers, name: str, slots: Sequence[int], blocks: Shape, dims: Sequence[int], dtype: str
) -> Problem:
    heads = 2
    rows = [numbers(len(slots), heads, dim) for dim in dims]
    caches = [numbers(*blocks, heads, dim) for dim in dims]
    where = Values((len(slots),), list(slots))
    kinds = ("", "", "", "", dtype, "float32", "float32")
    return Problem("append_kv", name, {}, (*rows, *caches, where, None, None), kinds)


def _rope(claims: Claims) -> Iterator[Problem]:
    numbers = Numbers(14)
    # extent of a head, and how much of it is rotated
    sizes = [("small", 8, 8), ("small", 12, 4), ("aligned", 64, 64), ("aligned", 64, 32)]
    sizes += [("ragged", 40, 40), ("ragged", 40, 24), ("long", 272, 272), ("long", 264, 24)]
    for interleaved in (False, True):
        for is_batched in (False, True):
            for name, *extents in sizes:
                dim, rotated = (_head_dim(claims, d) for d in extents)
                batch, sequence, heads = 2, 3, 2
                x = numbers(batch, sequence, heads, dim)
                tables = [numbers(batch if is_batched else 1, sequence, rotated // 2) for _ in ("cos", "sin")]
                title = f"{name}, {rotated} of {dim}{', interleaved' if interleaved else ''}"
                title += ", angles of each batch" if is_batched else ""
                yield Problem("rope", title, {"interleaved": interleaved}, (x, *tables))
    dim = _head_dim(claims, 8)
    for batch, sequence, heads in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        inputs = numbers(batch, sequence, heads, dim), numbers(1, sequence, dim // 2), numbers(1, sequence, dim // 2)
        yield Problem("rope", f"empty {[batch, sequence, heads]}", {"interleaved": False}, inputs)


def _rope_qk(claims: Claims) -> Iterator[Problem]:
    """Those of rope, with keys of fewer heads beside them."""
    numbers = Numbers(15)
    for rope in _rope(claims):
        q, *tables = rope.inputs
        assert q is not None
        k = numbers(*q.shape[:2], min(q.shape[2], 1), q.shape[3])
        yield Problem("rope_qk", rope.name, rope.attrs, (q, k, *tables))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "attention": _attention("attention"),
    "attention_forward": _attention("attention_forward"),
    "attention_backward": _attention_backward,
    "merge_attention": _merge_attention,
    "attention_varlen": _attention_varlen,
    "rope": _rope,
    "rope_qk": _rope_qk,
}
