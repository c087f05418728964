"""What certifies a kernel, before a dtype and a place in memory are chosen: for each op calls with their numbers.

Inputs come from a seeded integer generator and are multiples of 1/16 below 4, exact in every floating-point dtype; what
is expected comes from workers/certify/reference.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from layerzero.ipc.vocabulary.numerics import nearest
from layerzero.ipc.vocabulary.ops import ACTIVATIONS
from layerzero.ipc.vocabulary.shape_class import REGISTER
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, NARROW_DTYPES
from layerzero.workers.certify import reference
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.reference import Shape, Values


@dataclass
class Problem:
    """What a case computes, before a dtype and a place in memory are chosen. `kinds` names the dtypes that do not
    follow the one under test."""

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: tuple[Values | None, ...]
    kinds: tuple[str, ...] = ("", "", "", "")
    _solved: dict[str, tuple[Values, ...]] = field(default_factory=dict)

    def numbers(self, kind: str) -> list[Values | None]:
        """The inputs as numbers of a family of dtypes."""
        return [
            values
            if values is None or own or kind == "float"
            else Values(values.shape, partial(_in_kind, values, kind))
            for values, own in zip(self.inputs, self.kinds, strict=False)
        ]

    def solutions(self, kind: str) -> tuple[Values, ...]:
        """What comes out for these numbers, for each output. Computed once."""
        if kind not in self._solved:
            found = reference.OPS[self.op](self.numbers(kind), {**self.attrs, "kind": kind})
            self._solved[kind] = found if isinstance(found, tuple) else (found,)
        return self._solved[kind]


def family(dtype: str) -> str:
    """Dtypes that have the same numbers."""
    if dtype in NARROW_DTYPES:
        return dtype
    return "float" if dtype in FLOAT_DTYPES else "bool" if dtype == "bool" else "uint" if dtype[0] == "u" else "int"


def _in_kind(values: Values, kind: str) -> list[float]:
    return [_number(value, kind) for value in values.flat]


def _number(value: float, kind: str) -> float:
    if kind == "float":
        return value
    if kind in ("float8_e4m3fn", "float8_e5m2"):
        return nearest(value, kind)
    if kind == "float4_e2m1fn_x2":  # two in a byte
        return round(value * 16) * 37 % 256
    whole = round(value * 16)
    return whole > 0 if kind == "bool" else abs(whole) if kind == "uint" else whole


# --- each function lists the problems of one op, for a kernel that claims what `claims` says


class _Numbers:
    """Multiples of 1/16 from -3 to 3, the same on every machine (Knuth's MMIX generator). Each tensor is made when it
    is looked at: most are only asked for their shape."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def __call__(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> Values:
        made = Values(shape, partial(_drawn, self._state, math.prod(shape), scale, offset))
        self._state = _skipped(self._state, math.prod(shape))
        return made


_FACTOR, _STEP, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64
_PERIOD = 20_011  # a prime: no two rows or pages of a tensor are equal


def _drawn(state: int, count: int, scale: float, offset: float) -> list[float]:
    """After _PERIOD of them they come again, which takes a tenth of the time for the pages of a cache."""
    known = [(number - 48) / 16 * scale + offset for number in range(97)]
    flat = []
    for _ in range(min(count, _PERIOD)):
        state = (state * _FACTOR + _STEP) & _MODULUS - 1
        flat.append(known[(state >> 33) % 97])
    return flat if count <= _PERIOD else list(itertools.islice(itertools.cycle(flat), count))


def _skipped(state: int, count: int) -> int:
    """The state after so many numbers: steps of 1, 2, 4, ... numbers are of the same form."""
    factor, step = _FACTOR, _STEP
    while count:
        if count & 1:
            state = (state * factor + step) % _MODULUS
        factor, step = factor * factor % _MODULUS, (factor * step + step) % _MODULUS
        count >>= 1
    return state


def _attention(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Of attention and attention_forward, which take the same."""
    return partial(_attention_problems, op, least_heads=2 if op == "attention" else 1)


def _attention_backward(claims: Claims) -> Iterator[Problem]:
    """Those of attention_forward, with a gradient; `output` and `lse` are what comes out there."""
    numbers = _Numbers(17)
    for forward in _attention_problems("attention_forward", claims, least_heads=1):
        q, k, v, mask = forward.inputs
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
    numbers = _Numbers(1)
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
                yield Problem(op, title, attrs, (q, k, v, mask), ("", "", "", kind))
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left", "layout": "BHSD"}
    dim = _head_dim(claims, 8)
    for queries, keys in ((0, 3), (3, 0)):
        q, k, v = numbers(1, 2, queries, dim), numbers(1, 2, keys, dim), numbers(1, 2, keys, dim)
        yield Problem(op, f"{queries} queries, {keys} keys", plain, (q, k, v, None))


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


def _head_dims(claims: Claims, wanted: Sequence[int]) -> list[int]:
    """Of queries and values."""
    dims = [_head_dim(claims, dim) for dim in wanted]
    return [dims[0], dims[0]] if claims.get("equal_head_dims") else dims


def _mask(numbers: _Numbers, shape: Shape, kind: str) -> Values:
    """About two thirds visible; where there are several rows, the second sees nothing."""
    flat = [value > -1 for value in numbers(*shape).flat]
    flat[0] = True
    if shape[2] > 1:
        flat[shape[3] : 2 * shape[3]] = [False] * shape[3]
    if kind == "bool":
        return Values(shape, flat)
    return Values(shape, [bias if seen else -math.inf for seen, bias in zip(flat, numbers(*shape).flat, strict=True)])


def _attention_varlen(claims: Claims) -> Iterator[Problem]:
    numbers = _Numbers(12)
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
                yield _packed(numbers, title, attrs, (queries, keys), 2, group, _head_dims(claims, dims))
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left"}
    dim = _head_dim(claims, 8)
    for counts in ((), ()), ((0, 0), (2, 1)), ((2, 1), (0, 0)):
        yield _packed(numbers, f"queries {counts[0]}, keys {counts[1]}", plain, counts, 2, 1, (dim, dim))


def _packed(
    numbers: _Numbers,
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


def _paged_attention(claims: Claims) -> Iterator[Problem]:
    numbers = _Numbers(13)
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
            yield _paged(numbers, title, lengths, _page(claims, page), group, _head_dims(claims, dims))
    dim = _head_dim(claims, 8)
    for none in (), (0, 0):
        yield _paged(numbers, f"lengths {none}", none, _page(claims, 4), 1, (dim, dim))


def _page(claims: Claims, wanted: int) -> int:
    """The size of a block nearest to `wanted`, from above, that a kernel takes."""
    step: int = claims.get("page_size_multiple", 1)
    high = claims.get("max_page_size")
    return -(-(wanted if high is None else min(wanted, high)) // step) * step


def _paged(numbers: _Numbers, name: str, lengths: Sequence[int], page: int, group: int, dims: Sequence[int]) -> Problem:
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
    return Problem("paged_attention", name, {"scale": 0.25}, (q, *caches, *where), ("", "", "", "int32", "int32"))


def _append_kv(_: Claims) -> Iterator[Problem]:
    numbers = _Numbers(15)
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
    numbers: _Numbers, name: str, slots: Sequence[int], blocks: Shape, dims: Sequence[int], dtype: str
) -> Problem:
    heads = 2
    rows = [numbers(len(slots), heads, dim) for dim in dims]
    caches = [numbers(*blocks, heads, dim) for dim in dims]
    where = Values((len(slots),), list(slots))
    return Problem("append_kv", name, {}, (*rows, *caches, where), ("", "", "", "", dtype))


def _rope(claims: Claims) -> Iterator[Problem]:
    numbers = _Numbers(14)
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


def _matmul(_: Claims) -> Iterator[Problem]:
    numbers = _Numbers(2)
    for m, k, n in ((3, 8, 5), (1, 7, 1), (16, 32, 16), (17, 33, 7), (1, 40, 129), (3, 300, 5), (2, 16, 272)):
        for left, right in (((), ()), ((2,), (2,)), ((2, 1), (3,)), ((), (2,))):
            if max(m, k, n) > 100 and len(left) + len(right) > 2:
                continue
            a, b = numbers(*left, m, k), numbers(*right, k, n)
            yield Problem("matmul", f"{list(a.shape)} @ {list(b.shape)}", {}, (a, b))
    empties: list[tuple[Shape, Shape]] = [((3, 0), (0, 5)), ((0, 4), (4, 5)), ((2, 3, 4), (2, 4, 0))]
    for one, other in empties:
        yield Problem("matmul", f"{list(one)} @ {list(other)}", {}, (numbers(*one), numbers(*other)))


def _linear(_: Claims) -> Iterator[Problem]:
    numbers = _Numbers(3)
    matrices: list[tuple[Shape, int]] = [((3, 8), 5), ((1, 7), 3), ((16, 32), 16), ((17, 33), 7), ((1, 40), 129)]
    matrices += [((3, 300), 5), ((272, 8), 5)]
    batches: list[tuple[Shape, int]] = [((2, 3, 8), 5), ((2, 8, 32), 16), ((3, 7, 33), 7), ((2, 2, 300), 5)]
    empties: list[tuple[Shape, int]] = [((0, 4), 5), ((3, 0), 5), ((3, 4), 0)]
    for shape, rows in (*matrices, *batches, *empties):
        for has_bias in (True, False):
            name = f"{list(shape)} to {rows}{'' if has_bias else ', no bias'}"
            bias = numbers(rows) if has_bias else None
            yield Problem("linear", name, {}, (numbers(*shape), numbers(rows, shape[-1]), bias))


def _fit(claims: Claims, shape: Shape) -> Shape:
    """The shape with the fewest dimensions that a kernel takes (ones in front), or the most (the first ones merged)."""
    low, high = claims.get("min_ndim", 0), claims.get("max_ndim")
    if high is not None and 0 < high < len(shape):
        shape = (math.prod(shape[: len(shape) - high + 1]), *shape[len(shape) - high + 1 :])
    return (*(1 for _ in range(low - len(shape))), *shape)


def _softmax(claims: Claims) -> Iterator[Problem]:
    numbers = _Numbers(4)
    shapes: list[Shape] = [(3, 7), (1,), (3, 32), (2, 33), (2, 129), (2, 512), (3, 301), (0, 4)]
    for shape in dict.fromkeys(_fit(claims, shape) for shape in shapes):
        yield Problem("softmax", f"{list(shape)}", {"dim": len(shape) - 1}, (numbers(*shape),))
    for shape, dim in (((2, 7, 3), 1), ((32, 3), 0), ((2, 33, 2), 1), ((272, 3), 0), ((2, 301, 2), 1)):
        yield Problem("softmax", f"{list(shape)} over {dim}", {"dim": dim}, (numbers(*shape),))
    shape = _fit(claims, (3, 9))
    yield Problem("softmax", "logits of some hundreds", {"dim": len(shape) - 1}, (numbers(*shape, scale=256),))


def _norm(op: str, *names: str) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = _Numbers(len(op))
        shapes: list[tuple[Shape, int]] = [((3, 8), 1), ((2, 3, 7), 1), ((3, 32), 1), ((3, 33), 1), ((2, 129), 1)]
        shapes += [((2, 512), 1), ((2, 301), 1), ((3, 2, 4), 2), ((2, 4, 8), 2), ((2, 3, 11), 2), ((2, 2, 161), 2)]
        for given in _subsets(names):

            def problem(name: str, x: Values, ndim: int, eps: float, given: Sequence[str] = given) -> Problem:
                shape = x.shape[len(x.shape) - ndim :]
                rest = [numbers(*shape) if name in given else None for name in names]
                return Problem(op, f"{name}, {' and '.join(given) or 'alone'}", {"ndim": ndim, "eps": eps}, (x, *rest))

            for shape, ndim in [(_fit(claims, shape), ndim) for shape, ndim in shapes]:
                yield problem(f"{list(shape)} over the last {ndim}", numbers(*shape), ndim, 1e-5)
            yield problem("eps of 0.5", numbers(*_fit(claims, (3, 8))), 1, 0.5)
            # Halves near 96 take the 8 bits of bfloat16.
            centred = Values(_fit(claims, (3, 8)), [round(v) / 2 + 96 for v in numbers(3, 8).flat])
            yield problem("large mean", centred, 1, 1e-5)
            yield problem("empty", numbers(*_fit(claims, (0, 4))), 1, 1e-5)

    return problems


def _norm_backward(op: str) -> Callable[[Claims], Iterator[Problem]]:
    """Those of the norm, with a gradient, and more rows, which gradients of weights are sums over."""

    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = _Numbers(18)
        for norm in _norm(op.removesuffix("_backward"), "weight")(claims):
            x, weight = norm.inputs
            assert x is not None
            yield Problem(op, norm.name, norm.attrs, (numbers(*x.shape), x, weight))
        for shape in ((70, 8), (41, 129)):
            x, grad = numbers(*_fit(claims, shape)), numbers(*_fit(claims, shape))
            yield Problem(op, f"{shape[0]} rows of {shape[1]}", {"ndim": 1, "eps": 1e-5}, (grad, x, numbers(shape[1])))

    return problems


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(1 << len(names))]


def _elementwise(op: str, attrs: Sequence[dict[str, Any]], tensors: int = 1) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = _Numbers(10)
        shapes: list[Shape] = [(), (1,), (3, 4), (4, 8), (33,), (3, 43), (2, 3, 96), (2, 512), (0, 4)]
        for more in attrs:
            for shape in dict.fromkeys(_fit(claims, shape) for shape in shapes):
                inputs = tuple(numbers(*shape) for _ in range(tensors))
                yield Problem(op, f"{list(shape)} {' '.join(map(str, more.values()))}".strip(), more, inputs)
            far = tuple(numbers(*_fit(claims, (2, 5)), scale=8) for _ in range(tensors))
            yield Problem(op, "far from 0", more, far)

    return problems


def _quantization(op: str, dtypes: Sequence[str]) -> Callable[[Claims], Iterator[Problem]]:
    def problems(_: Claims) -> Iterator[Problem]:
        numbers = _Numbers(16)
        shapes: list[Shape] = [(3, 8), (2, 3, 32), (2, 40), (2, 272), (4,), (0, 4)]
        for dtype in dtypes:
            for shape in shapes:
                for extents in ((*shape[:-1], 1), (1,) * len(shape), (*shape[:-1], 4)):
                    steps = [2.0 ** (i % 12 - 9) for i in range(math.prod(extents))]
                    scale = Values(extents, steps)
                    title = f"{list(shape)} by {list(extents)} to {dtype}"
                    yield Problem(op, title, {"dtype": dtype}, (numbers(*shape), scale), ("", "float32"))

    return problems


def _embedding(_: Claims) -> Iterator[Problem]:
    numbers = _Numbers(11)
    shapes: list[tuple[Shape, int]] = [((2, 3), 4), ((), 7), ((16,), 32), ((17,), 33), ((2, 3), 301), ((300,), 4)]
    for dtype in ("int32", "int64"):
        for shape, dim in (*shapes, ((0, 3), 4)):
            ids = Values(shape, [int(abs(v) * 16) % 5 for v in numbers(*shape).flat])
            yield Problem("embedding", f"{dtype} {list(shape)} of {dim}", {}, (ids, numbers(5, dim)), (dtype, ""))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "attention": _attention("attention"),
    "attention_forward": _attention("attention_forward"),
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "paged_attention": _paged_attention,
    "append_kv": _append_kv,
    "rope": _rope,
    "matmul": _matmul,
    "linear": _linear,
    "softmax": _softmax,
    "layer_norm": _norm("layer_norm", "weight", "bias"),
    "rms_norm": _norm("rms_norm", "weight"),
    "layer_norm_backward": _norm_backward("layer_norm_backward"),
    "rms_norm_backward": _norm_backward("rms_norm_backward"),
    "gelu": _elementwise("gelu", [{"approximate": "none"}, {"approximate": "tanh"}]),
    "silu": _elementwise("silu", [{}]),
    "swiglu": _elementwise("swiglu", [{}], tensors=2),
    "geglu": _elementwise("geglu", [{"approximate": "none"}, {"approximate": "tanh"}], tensors=2),
    "reglu": _elementwise("reglu", [{}], tensors=2),
    **{op: _elementwise(op, [{}]) for op in ACTIVATIONS},
    "quantize": _quantization("quantize", ("float8_e4m3fn", "float8_e5m2", "int8")),
    "dequantize": _quantization("dequantize", ("float32", "bfloat16", "float16")),
    "embedding": _embedding,
}
