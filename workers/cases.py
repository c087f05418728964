"""The calls that certify a kernel: at least one for each shape class (ipc/shape_class.py) that a descriptor permits.

Inputs come from a seeded integer generator and are multiples of 1/16 below 4, exact in every floating-point dtype; what
is expected comes from workers/reference.py. Cases of tokenizers are in vectors.json, made by tests/make_vectors.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.ipc.numerics import pack
from layerzero.ipc.shape_class import shape_class
from layerzero.ipc.tensors import FLOAT_DTYPES, TensorSpec
from layerzero.workers import claims as claimed
from layerzero.workers import reference
from layerzero.workers.claims import Claims
from layerzero.workers.reference import Shape, Values

VECTORS = Path(__file__).with_name("vectors.json")

# How inputs and output lie in memory. transposed: the last two dimensions change places; gaps: every second element;
# rows: gaps between rows only.
LAYOUTS = (("dense", "dense"), ("rows", "rows"), ("dense", "rows"), ("transposed", "dense"), ("dense", "gaps"))
BSHD = ("bshd", "bshd")


@dataclass(frozen=True)
class Case:
    """One call with its inputs' elements (row-major bytes) and the numbers that must come out."""

    name: str
    shape_class: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorSpec | None, ...]
    data: tuple[bytes, ...]  # b"" for an input that is left out
    outputs: tuple[TensorSpec, ...]
    expected: tuple[Sequence[float], ...]
    result: Any = None  # what the kernel must return


@dataclass
class Problem:
    """What a case computes, before a dtype and a place in memory are chosen. `kinds` names the dtypes that do not
    follow the one under test."""

    op: str
    name: str
    attrs: dict[str, Any]
    inputs: tuple[Values | None, ...]
    kinds: tuple[str, ...] = ("", "", "", "")
    _solved: dict[str, Values] = field(default_factory=dict)

    def numbers(self, family: str) -> list[Values | None]:
        """The inputs as numbers of a family of dtypes."""
        return [
            values
            if values is None or kind or family == "float"
            else Values(values.shape, [_number(v, family) for v in values.flat])
            for values, kind in zip(self.inputs, self.kinds, strict=False)
        ]

    def solution(self, family: str) -> Values:
        """What comes out for these numbers. Computed once."""
        if family not in self._solved:
            self._solved[family] = reference.OPS[self.op](self.numbers(family), self.attrs)
        return self._solved[family]


def cases(op: str, claims: Claims, problems: Sequence[Problem], dtype: str) -> Iterator[Case]:
    """Every case that a kernel's descriptor admits in one of its dtypes."""
    if op not in PROBLEMS:
        yield from (case for case in _stored(op) if claimed.admits(op, claims, case.inputs, case.outputs, case.attrs))
        return
    for problem in problems:
        seen: set[Any] = set()
        data: tuple[bytes, ...] = ()
        for layouts in (*LAYOUTS, BSHD) if op == "attention" else LAYOUTS:
            specs, out, attrs = _placed(problem, dtype, *layouts)
            key = (*specs, out, attrs.get("layout"))
            if key in seen or not claimed.admits(op, claims, specs, [out], attrs):
                continue
            seen.add(key)
            data = data or _packed(problem, dtype)  # the same in every layout
            yield Case(
                problem.name if layouts == LAYOUTS[0] else f"{problem.name}, {layouts[0]} to {layouts[1]}",
                shape_class(op, specs, attrs, [out]),
                attrs,
                specs,
                data,
                (out,),
                (_wrapped(problem.solution(_family(dtype)).flat, dtype),),
            )


def _packed(problem: Problem, dtype: str) -> tuple[bytes, ...]:
    numbers = problem.numbers(_family(dtype))
    return tuple(
        b"" if values is None else pack(values.flat, kind or dtype)
        for values, kind in zip(numbers, problem.kinds, strict=False)
    )


def lay_out(dtype: str, shape: Shape, layout: str) -> TensorSpec:
    """A spec for a tensor of this shape that lies so in memory; dense where the layout says nothing about it."""
    dense = TensorSpec.contiguous(dtype, shape)
    ndim = len(shape)
    if layout == "bshd" and ndim == 4:
        return TensorSpec.contiguous(dtype, (shape[0], shape[2], shape[1], shape[3])).permute(0, 2, 1, 3)
    if layout == "transposed" and ndim > 1:
        order = (*range(ndim - 2), ndim - 1, ndim - 2)
        return TensorSpec.contiguous(dtype, tuple(shape[d] for d in order)).permute(*order)
    if layout == "rows" and ndim > 1:
        return TensorSpec(dtype, shape, TensorSpec.contiguous(dtype, (*shape[:-1], shape[-1] + 8)).strides)
    if layout in ("gaps", "transposed") and ndim:
        return TensorSpec(dtype, shape, tuple(2 * stride for stride in dense.strides))
    return dense


def _placed(
    problem: Problem, dtype: str, layout: str, out_layout: str
) -> tuple[tuple[TensorSpec | None, ...], TensorSpec, dict[str, Any]]:
    is_bshd = layout == "bshd"
    specs = tuple(
        None if values is None else lay_out(kind or dtype, values.shape, "dense" if is_bshd and i == 3 else layout)
        for i, (values, kind) in enumerate(zip(problem.inputs, problem.kinds, strict=False))
    )
    attrs = {**problem.attrs, "layout": "BSHD"} if is_bshd else problem.attrs
    return specs, lay_out(dtype, problem.solution(_family(dtype)).shape, out_layout), attrs


def _family(dtype: str) -> str:
    return "float" if dtype in FLOAT_DTYPES else "bool" if dtype == "bool" else "uint" if dtype[0] == "u" else "int"


def _number(value: float, family: str) -> float:
    if family == "float":
        return value
    whole = round(value * 16)
    return whole > 0 if family == "bool" else abs(whole) if family == "uint" else whole


def _wrapped(values: Sequence[Any], dtype: str) -> Sequence[Any]:
    """Integers wrap around in their dtype."""
    family = _family(dtype)
    if family in ("float", "bool"):
        return values
    bits = 8 * TensorSpec.contiguous(dtype, ()).itemsize
    low = 0 if family == "uint" else 1 << (bits - 1)
    return [(value + low) % (1 << bits) - low for value in values]


# --- problems: each function lists those of one op, for a kernel that claims what `claims` says


class _Numbers:
    """Multiples of 1/16 from -3 to 3, the same on every machine (Knuth's MMIX generator)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def __call__(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> Values:
        flat = []
        for _ in range(math.prod(shape)):
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            flat.append(((self._state >> 33) % 97 - 48) / 16 * scale + offset)
        return Values(shape, flat)


def _attention(claims: Claims) -> Iterator[Problem]:
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
                if variant == "causal" and rows > 280:
                    continue  # takes a quarter of a second, and the other long one says the same
                batch, heads = 1 if keys > 64 else 2, 2
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
                yield Problem("attention", title, attrs, (q, k, v, mask), ("", "", "", kind))
    plain = {"is_causal": False, "scale": 0.25, "causal_alignment": "top_left", "layout": "BHSD"}
    dim = _head_dim(claims, 8)
    for queries, keys in ((0, 3), (3, 0)):
        q, k, v = numbers(1, 2, queries, dim), numbers(1, 2, keys, dim), numbers(1, 2, keys, dim)
        yield Problem("attention", f"{queries} queries, {keys} keys", plain, (q, k, v, None))


def _head_dim(claims: Claims, wanted: int) -> int:
    """The head dimension nearest to `wanted` that a kernel takes."""
    step: int = claims.get("head_dim_multiple", 1)
    low: int = -(-claims.get("min_head_dim", 1) // step) * step
    high = claims.get("max_head_dim")
    nearest = max(low, round(wanted / step) * step)
    return nearest if high is None else max(low, min(nearest, int(high) // step * step))


def _mask(numbers: _Numbers, shape: Shape, kind: str) -> Values:
    """About two thirds visible; where there are several rows, the second sees nothing."""
    flat = [value > -1 for value in numbers(*shape).flat]
    flat[0] = True
    if shape[2] > 1:
        flat[shape[3] : 2 * shape[3]] = [False] * shape[3]
    if kind == "bool":
        return Values(shape, flat)
    return Values(shape, [bias if seen else -math.inf for seen, bias in zip(flat, numbers(*shape).flat, strict=True)])


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


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(1 << len(names))]


def _elementwise(op: str, attrs: Sequence[dict[str, Any]]) -> Callable[[Claims], Iterator[Problem]]:
    def problems(claims: Claims) -> Iterator[Problem]:
        numbers = _Numbers(10)
        shapes: list[Shape] = [(), (1,), (3, 4), (4, 8), (33,), (3, 43), (2, 3, 96), (2, 512), (0, 4)]
        for more in attrs:
            for shape in dict.fromkeys(_fit(claims, shape) for shape in shapes):
                yield Problem(
                    op, f"{list(shape)} {' '.join(map(str, more.values()))}".strip(), more, (numbers(*shape),)
                )
            yield Problem(op, "far from 0", more, (numbers(*_fit(claims, (2, 5)), scale=8),))

    return problems


def _embedding(_: Claims) -> Iterator[Problem]:
    numbers = _Numbers(11)
    shapes: list[tuple[Shape, int]] = [((2, 3), 4), ((), 7), ((16,), 32), ((17,), 33), ((2, 3), 301), ((300,), 4)]
    for dtype in ("int32", "int64"):
        for shape, dim in (*shapes, ((0, 3), 4)):
            ids = Values(shape, [int(abs(v) * 16) % 5 for v in numbers(*shape).flat])
            yield Problem("embedding", f"{dtype} {list(shape)} of {dim}", {}, (ids, numbers(5, dim)), (dtype, ""))


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "attention": _attention,
    "matmul": _matmul,
    "linear": _linear,
    "softmax": _softmax,
    "layer_norm": _norm("layer_norm", "weight", "bias"),
    "rms_norm": _norm("rms_norm", "weight"),
    "gelu": _elementwise("gelu", [{"approximate": "none"}, {"approximate": "tanh"}]),
    "silu": _elementwise("silu", [{}]),
    "embedding": _embedding,
}


# --- stored cases: tokenizers, whose documents no generator makes, and null


def _stored(op: str) -> Iterator[Case]:
    if op == "null":
        yield Case("nothing", shape_class(op, (), {}), {}, (), (), (), ())
        return
    for stored in json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]:
        if stored["op"] != op:
            continue
        yield _text_case(stored)
        if stored["attrs"].get("return_offsets"):
            *kept, offsets = stored["outputs"]
            sizes = [*stored["result"]["sizes"][:-1], 0]
            without = {**offsets, "shape": [0, 2], "values": []}
            yield _text_case(
                {
                    **stored,
                    "name": f"{stored['name']}, no offsets",
                    "attrs": {**stored["attrs"], "return_offsets": False},
                    "outputs": [*kept, without],
                    "result": {"sizes": sizes},
                }
            )


def _text_case(stored: Mapping[str, Any]) -> Case:
    """The digest of a tokenizer is computed here, not stored."""
    digest = hashlib.sha256(stored["inputs"][0]["text"].encode()).hexdigest()
    attrs = {**stored["attrs"], "tokenizer_digest": digest}
    inputs = [_stored_tensor(tensor) for tensor in stored["inputs"]]
    outputs = [_stored_tensor(tensor) for tensor in stored["outputs"]]
    specs = tuple(spec for spec, _ in inputs)
    return Case(
        stored["name"],
        shape_class(stored["op"], specs, attrs),
        attrs,
        specs,
        tuple(pack(values, spec.dtype) for spec, values in inputs),
        tuple(spec for spec, _ in outputs),
        tuple(values for _, values in outputs),
        stored["result"],
    )


def _stored_tensor(tensor: Mapping[str, Any]) -> tuple[TensorSpec, Sequence[Any]]:
    values = list(tensor["text"].encode()) if "text" in tensor else tensor["values"]
    return TensorSpec.contiguous(tensor["dtype"], tuple(tensor["shape"])), values
