"""The calls that test_conformance.py makes: values, how they lie in memory, and back from memory to values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tests import reference
from tests.envs import elementwise_cases, expert_cases, quantized_cases, vision_cases
from tests.envs.attention_cases import (
    copy_block_cases,
    gather_cases,
    latent_cases,
    merge_cases,
    option_cases,
    paged_forward_cases,
    scaled_append_cases,
    unread,
    varlen_forward_cases,
)
from tests.envs.case import LAYOUTS, SWAPS, Case, normal
from tests.envs.sampling_cases import filter_cases, penalize_cases, sample_cases, tree_cases, verify_cases

from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, LINEAR_ACTIVATIONS, OPS
from layerzero.ipc.vocabulary.sampling import LIMITS
from layerzero.ipc.vocabulary.tensors import NARROW_DTYPES, TensorSpec


def lay_out(values: reference.Array, dtype: str, layout: str) -> tuple[TensorSpec, reference.Array]:
    """A spec and the memory it covers, for values of one shape.

    transposed: the last two dimensions change places in memory; gaps: every third element is used; rows: gaps between
    rows only; broadcast: stride 0 in the first dimension, whose first entry counts; heads and first last: dimensions 1
    and 2, or the first and the last, change places in memory.
    """
    bits = reference.to_bits(values, dtype)
    shape = bits.shape
    if layout == "broadcast" and shape:
        view = np.broadcast_to(np.ascontiguousarray(bits[:1]), shape)
    elif layout in SWAPS and len(shape) > 1:
        view = np.ascontiguousarray(bits.swapaxes(*SWAPS[layout])).swapaxes(*SWAPS[layout])
    elif layout == "gaps" and shape:
        view = np.zeros((*shape[:-1], 3 * shape[-1]), bits.dtype)[..., ::3]
        view[...] = bits
    elif layout == "rows" and shape:
        view = np.zeros((*shape[:-1], shape[-1] + 8), bits.dtype)[..., : shape[-1]]
        view[...] = bits
    else:
        view = np.ascontiguousarray(bits).reshape(shape)
    return TensorSpec(dtype, shape, tuple(stride // view.itemsize for stride in view.strides)), view


def memory_of(spec: TensorSpec, view: reference.Array) -> bytes:
    """The bytes from the first element to the end of the last one."""
    flat = np.lib.stride_tricks.as_strided(view, (spec.span_bytes // view.itemsize,), (view.itemsize,))
    return flat.tobytes()


def strided(data: bytes, spec: TensorSpec) -> reference.Array:
    storage = {"bfloat16": "uint16"}.get(spec.dtype, "uint8" if spec.dtype in NARROW_DTYPES else spec.dtype)
    if spec.numel == 0:
        return np.zeros(spec.shape, storage)
    strides = [stride * spec.itemsize for stride in spec.strides]
    return np.ndarray(spec.shape, storage, buffer=data, strides=strides)


def strided_bytes(data: reference.Array, spec: TensorSpec) -> reference.Array:
    """The bytes of a strided view's elements, in an array of every byte it spans."""
    if spec.numel == 0:
        return data[:0]
    strides = [stride * spec.itemsize for stride in spec.strides]
    return np.lib.stride_tricks.as_strided(data, (*spec.shape, spec.itemsize), (*strides, 1))


def in_dtype(values: reference.Array, dtype: str) -> tuple[str, reference.Array]:
    """The dtype a tensor of a case takes, and its values there: floating-point tensors follow the dtype under test."""
    if values.dtype.kind != "f":
        return str(values.dtype), values
    if dtype in reference.TOLERANCE:
        return dtype, values
    whole = np.round(values * 16)
    if dtype == "float4_e2m1fn_x2":  # its bytes
        return dtype, (np.abs(whole) * 37 % 256).astype(np.uint8)
    return dtype, np.abs(whole) if dtype.startswith("u") else whole > 0 if dtype == "bool" else whole


def refilled(name: str, values: reference.Array) -> reference.Array:
    """Other values of the same kind for the same memory. Sequences are the same in the opposite order."""
    if name == "running_var" or (name in LIMITS and name != "top_k"):
        return np.asarray(values * 0.5)
    if name == "parents":
        return np.where(np.arange(values.shape[-1]) % 3 == 0, -1, values)
    if name.endswith("_probs"):
        return np.asarray(values[..., ::-1] * 0.5)
    if values.dtype.kind == "f" and values.size and np.all(values >= 0):  # what has to have no sign
        return np.asarray(values * 0.5)
    if values.dtype.kind == "f":
        return np.where(np.isfinite(values), values * -0.5, values)
    if name.startswith("cu_seqlens"):
        return np.asarray(values[-1] - np.flip(values))
    if name == "offsets":
        return np.concatenate((values[:1] * 0, values))[:-1]
    if name == "block_tables":
        return np.flip(values, axis=0)
    return np.flip(values) if values.dtype.kind == "i" else values


def forward_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of attention. Results are new, so they lie without gaps."""
    for case in attention_cases(rng):
        if case.out_layout in ("contiguous", "heads"):
            yield case


def backward_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of attention, with a gradient that lies as q does. `tensors`: but for output and lse, which `completed`
    adds."""
    for case in forward_cases(rng):
        # Gradients of such scores have a bound of their own: tests/frameworks/test_torch_attention.py. Tensors that are
        # broadcast in memory are other ones than those that output and lse would be made from.
        if case.name == "logits of 1e4" or "broadcast" in case.layouts:
            continue
        q, k, v, mask, sinks, slopes = case.tensors
        if sinks is not None or slopes is not None or OPS["attention"].options & case.attrs.keys():
            continue
        assert q is not None
        assert v is not None
        grad = normal(rng, *q.shape[:3], v.shape[3])
        layouts = (*case.layouts, *["contiguous"] * 4)[:4]
        layouts = (layouts[0], *layouts[:3], layouts[0], "contiguous", layouts[3])
        yield Case(case.name, (grad, q, k, v, None, None, mask), case.attrs, layouts, case.out_layout)


def completed(op: str, arguments: Sequence[reference.Array | None], attrs: dict[str, Any], dtype: str) -> list[Any]:
    """The arguments with those that follow from others: of attention_backward, output and lse as a forward pass in
    `dtype` gives them."""
    if op != "attention_backward":
        return list(arguments)
    grad, q, k, v, _, _, mask = arguments
    assert q is not None
    assert k is not None
    assert v is not None
    exact = [reference.round_to(one, dtype) for one in (q, k, v)]
    bias = mask if mask is None or mask.dtype == bool else reference.round_to(mask, dtype)
    output, lse = reference.attention_forward(*exact, bias, **attrs)
    return [grad, q, k, v, output, lse, mask]


def attention_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, q: Any, k: Any, v: Any, mask: Any = None, *, causal: str = "", **more: Any) -> Case:
        layout = more.pop("layout", "BHSD")
        attrs = {"is_causal": bool(causal), "causal_alignment": causal or "top_left", "layout": layout}
        scale = more.pop("scale", q[3] ** -0.5 if q[3] else 1.0)
        tensors = (normal(rng, *q), normal(rng, *k), normal(rng, *v), mask, None, None)
        return Case(name, tensors, {**attrs, "scale": scale}, **more)

    small = ((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    yield case("plain", *small)
    yield case("one of each", (1, 1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8))
    yield case("decode", (2, 4, 1, 32), (2, 4, 33, 32), (2, 4, 33, 32))
    yield case("odd head_dim", (1, 3, 5, 13), (1, 3, 6, 13), (1, 3, 6, 13))
    yield case("head_dim 1", (1, 2, 5, 1), (1, 2, 6, 1), (1, 2, 6, 1))
    yield case("narrow values", (1, 2, 5, 16), (1, 2, 6, 16), (1, 2, 6, 8))
    yield case("wide values", (1, 2, 5, 16), (1, 2, 6, 16), (1, 2, 6, 24))
    yield case("large", (1, 2, 150, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    yield case("scale", *small, scale=1.5)
    yield case("negative scale", *small, scale=-0.3)
    yield case("logits of 1e4", *small, scale=3e3)
    for heads, kv_heads in ((4, 2), (6, 2), (4, 1)):
        kv = (2, kv_heads, 6, 16)
        yield case(f"{heads} heads on {kv_heads}", (2, heads, 5, 16), kv, kv)
        yield case(f"{heads} heads on {kv_heads}, causal", (2, heads, 5, 16), kv, kv, causal="top_left")
    for alignment in ("top_left", "bottom_right"):
        for queries, keys in ((6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (70, 130)):
            kv = (2, 2, keys, 16)
            yield case(f"{alignment} {queries}x{keys}", (2, 2, queries, 16), kv, kv, causal=alignment)
    seen = rng.random((2, 4, 7, 9)) < 0.6
    seen[0, 1, 3] = False
    seen[1, :, 0] = False
    for shape in ((2, 4, 7, 9), (2, 1, 7, 9), (1, 4, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (2, 1, 7, 1), (1, 1, 1, 1)):
        mask = seen[tuple(slice(0, n) for n in shape)]
        yield case(f"bool mask {shape}", *small, mask)
        bias = np.where(mask, rng.standard_normal(shape) * 3, -np.inf)
        yield case(f"float mask {shape}", *small, bias)
    yield case("all masked", *small, np.zeros((1, 1, 7, 9), bool))
    yield case("all masked by -inf", *small, np.full((2, 1, 1, 9), -np.inf))
    yield case(
        "all masked in the first blocks",
        (1, 1, 3, 16),
        (1, 1, 600, 16),
        (1, 1, 600, 16),
        np.arange(600)[None, None, None] > 590,
    )
    gqa_mask = rng.random((2, 4, 7, 9)) < 0.5
    yield case("bool mask, grouped heads", (2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16), gqa_mask)
    for layout in LAYOUTS[1:]:
        yield case(f"{layout} inputs", *small, layouts=(layout,) * 3)
        yield case(f"{layout} mask", *small, seen[:, :1], layouts=("contiguous",) * 3 + (layout,))
    for layout in ("transposed", "gaps", "rows"):
        yield case(f"{layout} output", *small, out_layout=layout)
    bshd = ("heads",) * 3
    yield case("BSHD", *small, layouts=bshd, out_layout="heads", layout="BSHD")
    yield case("BSHD causal", *small, layouts=bshd, out_layout="heads", layout="BSHD", causal="top_left")
    yield case("BSHD mask", *small, seen, layouts=bshd, out_layout="heads", layout="BSHD")
    for q, k, v in (
        ((0, 2, 3, 8), (0, 2, 3, 8), (0, 2, 3, 8)),
        ((2, 2, 0, 8), (2, 2, 3, 8), (2, 2, 3, 8)),
        ((2, 2, 3, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
        ((2, 2, 3, 8), (2, 2, 4, 8), (2, 2, 4, 0)),
    ):
        yield case(f"empty {q} {k} {v}", q, k, v)
        yield case(f"empty causal {q} {k} {v}", q, k, v, causal="bottom_right")
    yield from option_cases(rng)


def varlen_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(
        name: str, queries: Any, keys: Any, heads: int = 4, kv_heads: int = 4, causal: str = "", **more: Any
    ) -> Case:
        dim, value_dim = more.pop("dims", (16, 16))
        attrs = {"is_causal": bool(causal), "causal_alignment": causal or "top_left", "scale": more.pop("scale", 0.25)}
        q = normal(rng, sum(queries), heads, dim)
        k, v = normal(rng, sum(keys), kv_heads, dim), normal(rng, sum(keys), kv_heads, value_dim)
        ends = (np.cumsum([0, *lengths]).astype("int32") for lengths in (queries, keys))
        return Case(name, (q, k, v, *ends), attrs, **more)

    mixed = ([5, 1, 0, 7, 2], [5, 9, 3, 4, 0])
    for causal in ("", "top_left", "bottom_right"):
        yield case(f"mixed {causal}", *mixed, causal=causal)
        yield case(f"mixed, grouped heads {causal}", *mixed, kv_heads=2, causal=causal)
        yield case(f"one sequence {causal}", [40], [40], causal=causal)
        yield case(f"long {causal}", [3, 260], [300, 33], causal=causal, dims=(64, 64))
        for layout in ("transposed", "gaps", "rows"):
            yield case(f"{layout} inputs {causal}", *mixed, causal=causal, layouts=(layout,) * 3)
            yield case(f"{layout} output {causal}", *mixed, causal=causal, out_layout=layout)
    yield case("odd extents", [3, 4], [6, 1], heads=3, kv_heads=3, dims=(13, 7))
    yield case("logits of 1e2", *mixed, scale=30)
    yield case("gaps in cu_seqlens", *mixed, layouts=("contiguous",) * 3 + ("gaps", "gaps"))
    yield case("no sequences", [], [])
    yield case("no tokens", [0, 0], [0, 0])
    yield case("no keys", [2, 1], [0, 0])


def paged_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, lengths: Any, page: int = 16, heads: int = 4, kv_heads: int = 4, **more: Any) -> Case:
        dim, value_dim = more.pop("dims", (16, 16))
        wide = max((-(-length // page) for length in lengths), default=0) + 1
        blocks = wide * len(lengths) + 2
        tables = rng.permutation(blocks)[: wide * len(lengths)].reshape(len(lengths), wide).astype("int32")
        caches = [normal(rng, blocks, page, kv_heads, extent) for extent in (dim, value_dim)]
        free = np.ones((blocks, page), bool)
        for row, length in zip(tables, lengths, strict=True):
            slots = np.arange(length)
            free[row[slots // page], slots % page] = False
            row[-(-length // page) :] = -(2**31)  # never followed
        for cache in caches:
            cache[free] = np.nan
        q = normal(rng, len(lengths), heads, dim)
        scales: tuple[Any, Any] = (None, None)
        if "kinds" in more:
            scales = np.array([0.03]), rng.random(kv_heads) / 16 + 0.01
            caches = [unread(cache, more["kinds"]["k_cache"]) for cache in caches]
        tensors = (q, *caches, tables, np.array(lengths, "int32"), *scales)
        return Case(name, tensors, {"scale": more.pop("scale", 0.25)}, **more)

    for lengths in ([1], [16], [17], [5, 33, 0, 16, 100]):
        yield case(f"{lengths}", lengths)
        yield case(f"{lengths}, grouped heads", lengths, kv_heads=1)
    for page in (1, 8, 256):
        yield case(f"blocks of {page}", [7, 300], page)
    yield case("odd extents", [9, 4], 4, heads=3, kv_heads=3, dims=(13, 7))
    yield case("logits of 1e2", [9, 40], scale=30)
    for layout in ("transposed", "gaps", "rows"):
        yield case(f"{layout} inputs", [9, 40], layouts=(layout,) * 3)
        yield case(f"{layout} output", [9, 40], out_layout=layout)
    yield case("gaps in tables", [9, 40], layouts=("contiguous",) * 3 + ("gaps", "gaps"))
    for kind in SCALED_CACHES:
        kinds = {"k_cache": kind, "v_cache": kind}
        yield case(f"{kind}", [5, 33, 0, 16, 100], kinds=kinds)
        yield case(f"{kind}, grouped heads", [16, 17], kv_heads=2, kinds=kinds)
        yield case(f"{kind}, transposed", [9, 40], kinds=kinds, layouts=("transposed",) * 3)
    yield case("no sequences", [])
    yield case("no keys", [0, 0])


def append_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, slots: Any, blocks: int = 3, page: int = 16, heads: int = 2, **more: Any) -> Case:
        dims = more.pop("dims", (16, 16))
        rows = [normal(rng, len(slots), heads, dim) for dim in dims]
        caches = [normal(rng, blocks, page, heads, dim) for dim in dims]
        return Case(name, (*rows, *caches, np.array(slots, more.pop("dtype", "int64")), None, None), **more)

    for dtype in ("int32", "int64"):
        yield case(f"decode {dtype}", [40, 3, 16], dtype=dtype)
        yield case(f"prefill {dtype}", [*range(17, 48), *range(3, 9)], dtype=dtype)
        yield case(f"padding {dtype}", [-1, 5, -1, -(2**31), 6, -1], dtype=dtype)
    yield case("padding only", [-1, -1])
    yield case("odd extents", [8, 0, 2], 3, 3, 3, dims=(13, 7))
    for layout in ("transposed", "gaps", "rows", "heads"):
        yield case(f"{layout} rows", [40, 3], layouts=(layout,) * 2)
        yield case(f"{layout} caches", [40, 3], layouts=("contiguous",) * 2 + (layout,) * 2)
    yield case("gaps in slots", [40, 3, -1], layouts=("contiguous",) * 4 + ("gaps",))
    yield case("no tokens", [])
    yield case("no blocks", [-1], 0)
    yield case("no heads", [1, 2], heads=0)
    yield from scaled_append_cases(rng)


def rope_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, shape: Any, rotated: int, batches: int = 1, interleaved: bool = False, **more: Any) -> Case:
        angles = normal(rng, batches, shape[1], rotated // 2) * 3
        x = normal(rng, *shape)
        return Case(name, (x, np.cos(angles), np.sin(angles)), {"interleaved": interleaved}, **more)

    small = (2, 3, 4, 16)
    for interleaved in (False, True):
        for rotated in (16, 8, 2):
            yield case(f"{rotated} of 16 {interleaved}", small, rotated, interleaved=interleaved)
            yield case(f"{rotated} of 16, batched {interleaved}", small, rotated, 2, interleaved)
        yield case(f"odd head_dim {interleaved}", (1, 5, 3, 13), 6, interleaved=interleaved)
        yield case(f"large {interleaved}", (1, 70, 8, 128), 128, interleaved=interleaved)
        for layout in ("transposed", "gaps", "rows"):
            yield case(f"{layout} inputs {interleaved}", small, 8, 2, interleaved, layouts=(layout,) * 3)
            yield case(f"{layout} output {interleaved}", small, 8, 2, interleaved, out_layout=layout)
        yield case(
            f"BHSD memory {interleaved}", small, 16, interleaved=interleaved, layouts=("heads",), out_layout="heads"
        )
    for shape in ((0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)):
        yield case(f"empty {shape}", shape, 8)


def rope_qk_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of rope, with keys of one head beside them."""
    for case in rope_cases(rng):
        q, cos, sin = case.tensors
        assert q is not None
        k = normal(rng, *q.shape[:2], min(q.shape[2], 1), q.shape[3])
        layouts = (case.layouts[0], *case.layouts) if case.layouts else ()
        yield Case(case.name, (q, k, cos, sin), case.attrs, layouts, case.out_layout)


def geglu_cases(rng: np.random.Generator) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        for case in swiglu_cases(rng):
            more = {"approximate": approximate}
            yield Case(f"{case.name} {approximate}", case.tensors, more, case.layouts, case.out_layout)


def swiglu_cases(rng: np.random.Generator) -> Iterator[Case]:
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 33), (2, 1, 5, 3), (100, 130)):
        yield Case(f"{shape}", (normal(rng, *shape) * 3, normal(rng, *shape)))
    yield Case("extremes", (np.array([-1e4, -50.0, -8.0, -0.0, 0.0, 1e-4, 8.0, 50.0, 1e2]), np.full(9, 2.0)))
    for layout in LAYOUTS[1:]:
        yield Case(f"{layout} gate", (normal(rng, 3, 4, 6), normal(rng, 3, 4, 6)), layouts=(layout,))
        yield Case(f"{layout} up", (normal(rng, 3, 4, 6), normal(rng, 3, 4, 6)), layouts=("contiguous", layout))
    for layout in ("transposed", "gaps", "rows", "first last"):
        yield Case(f"{layout} output", (normal(rng, 3, 4, 6), normal(rng, 3, 4, 6)), out_layout=layout)
    yield Case("empty", (normal(rng, 0, 4), normal(rng, 0, 4)))


def matmul_cases(rng: np.random.Generator) -> Iterator[Case]:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    shapes = [((3, 4), (4, 5)), ((1, 1), (1, 1)), ((1, 7), (7, 1)), ((33, 65), (65, 17)), ((2, 3, 4), (2, 4, 5))]
    shapes += [((2, 1, 3, 4), (5, 4, 6)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5)), ((1, 3, 4), (6, 4, 5))]
    shapes += [((2, 2, 1, 3, 4), (1, 2, 3, 4, 2)), ((130, 200), (200, 70)), ((4, 12, 16, 8), (4, 12, 8, 16))]
    for left, right in shapes:
        yield Case(f"{left} @ {right}", (normal(rng, *left), normal(rng, *right)))
    for layout in LAYOUTS[1:]:
        a, b = normal(rng, 2, 6, 4), normal(rng, 2, 4, 5)
        yield Case(f"{layout} a", (a, b), layouts=(layout,))
        yield Case(f"{layout} b", (a, b), layouts=("contiguous", layout))
        yield Case(f"{layout} 2-D", (a[0], b[0]), layouts=(layout, layout))
    for layout in ("transposed", "gaps", "rows", "first last"):
        yield Case(f"{layout} output", (normal(rng, 3, 6, 4), normal(rng, 4, 5)), out_layout=layout)
        yield Case(f"{layout} batched output", (normal(rng, 3, 6, 4), normal(rng, 3, 4, 5)), out_layout=layout)
    yield Case("values of 1e4", (normal(rng, 5, 8) * 1e2, normal(rng, 8, 5) * 1e2))
    for left, right in (
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((3, 4), (4, 0)),
        ((0, 3, 4), (4, 5)),
        ((2, 3, 0), (2, 0, 5)),
    ):
        yield Case(f"empty {left} @ {right}", (normal(rng, *left), normal(rng, *right)))


def addmm_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, *tensors: reference.Array, beta: float = 1.0, alpha: float = 1.0, **where: Any) -> Case:
        return Case(name, tensors, {"beta": beta, "alpha": alpha}, **where)

    for m, k, n in ((3, 4, 5), (1, 1, 1), (1, 7, 1), (33, 65, 17), (1, 200, 70), (130, 200, 70)):
        a, b = normal(rng, m, k), normal(rng, k, n)
        for shape in ((m, n), (1, n), (m, 1), (1, 1)):
            yield case(f"{m}, {k}, {n} and {shape}", normal(rng, *shape), a, b)
            yield case(f"{m}, {k}, {n} and {shape}, scaled", normal(rng, *shape), a, b, beta=-0.5, alpha=1.5)
    row, a, b = normal(rng, 1, 5), normal(rng, 6, 4), normal(rng, 4, 5)
    for layout in LAYOUTS[1:]:
        yield case(f"{layout} a", row, a, b, layouts=("contiguous", layout))
        yield case(f"{layout} b", row, a, b, beta=2.0, layouts=("contiguous", "contiguous", layout))
        yield case(f"{layout} x", normal(rng, 6, 5), a, b, alpha=2.0, layouts=(layout,))
    for layout in ("transposed", "gaps", "rows"):
        yield case(f"{layout} output", row, a, b, out_layout=layout)
    yield case("a beta of 0", np.full((6, 5), np.nan), a, b, beta=0.0)
    yield case("a beta of 0, a row", np.full((1, 5), np.inf), a, b, beta=0.0, alpha=2.0)
    yield case("an alpha of 0", row, a, b, alpha=0.0)
    yield case("values of 1e2", row * 1e2, a * 1e2, b)
    for m, k, n in ((0, 4, 5), (3, 0, 5), (3, 4, 0)):
        yield case(f"empty {m}, {k}, {n}", normal(rng, 1, n), normal(rng, m, k), normal(rng, k, n), beta=0.5)


def linear_cases(rng: np.random.Generator) -> Iterator[Case]:
    def case(name: str, *tensors: reference.Array | None, activation: str = "", **where: Any) -> Case:
        return Case(name, tensors, {"activation": activation}, **where)

    for shape, rows in (
        ((3, 4), 5),
        ((1, 1), 1),
        ((7,), 3),
        ((2, 3, 8), 6),
        ((2, 3, 2, 8), 5),
        ((65, 130), 33),
        ((1, 200), 70),
        ((64, 384), 1536),
    ):
        x, weight, bias = normal(rng, *shape), normal(rng, rows, shape[-1]), normal(rng, rows)
        yield case(f"{shape} to {rows}", x, weight, bias)
        yield case(f"{shape} to {rows}, no bias", x, weight, None)
    x, weight, bias = normal(rng, 4, 6, 8), normal(rng, 5, 8), normal(rng, 5)
    for layout in LAYOUTS[1:]:
        for position in range(3):
            layouts = ("contiguous",) * position + (layout,)
            yield case(f"{layout} {('x', 'weight', 'bias')[position]}", x, weight, bias, layouts=layouts)
    for layout in ("transposed", "gaps", "rows", "first last"):
        yield case(f"{layout} output", x, weight, bias, out_layout=layout)
        yield case(f"{layout} output, no bias", x, weight, None, out_layout=layout)
    for shape, rows in (((0, 4), 5), ((3, 0), 5), ((3, 4), 0)):
        yield case(f"empty {shape} to {rows}", normal(rng, *shape), normal(rng, rows, shape[-1]), normal(rng, rows))
        yield case(f"empty {shape} to {rows}, no bias", normal(rng, *shape), normal(rng, rows, shape[-1]), None)
    for activation in LINEAR_ACTIVATIONS:
        for shape, rows in (((3, 4), 5), ((7,), 3), ((2, 3, 8), 6), ((65, 130), 33), ((0, 4), 5)):
            made = normal(rng, *shape), normal(rng, rows, shape[-1]), normal(rng, rows)
            yield case(f"{activation} of {shape} to {rows}", *made, activation=activation)
            yield case(f"{activation} of {shape} to {rows}, no bias", *made[:2], None, activation=activation)
        far = x * 16, weight * 4, bias
        yield case(f"{activation} far from 0", *far, activation=activation)
        for layout in ("transposed", "gaps", "rows"):
            yield case(f"{activation}, {layout} x", x, weight, bias, activation=activation, layouts=(layout,))
            yield case(f"{activation}, {layout} output", x, weight, bias, activation=activation, out_layout=layout)


def gated_mlp_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Weights as wide as models have them: of variance 1 over what is summed."""

    def made(shape: tuple[int, ...], hidden: int, features: int) -> tuple[reference.Array, ...]:
        gate_up, down = normal(rng, 2 * hidden, shape[-1]), normal(rng, features, hidden)
        return normal(rng, *shape), gate_up / shape[-1] ** 0.5, down / hidden**0.5

    for activation in LINEAR_ACTIVATIONS:
        attrs = {"activation": activation}
        for shape, hidden, features in (
            ((3, 4), 5, 4),
            ((1, 1), 1, 1),
            ((7,), 3, 7),
            ((2, 3, 8), 6, 8),
            ((65, 130), 33, 70),
            ((1, 200), 600, 200),
            ((64, 128), 352, 128),
        ):
            yield Case(f"{activation} of {shape} by {hidden}", made(shape, hidden, features), attrs)
        for layout in ("transposed", "gaps", "rows"):
            yield Case(f"{activation}, {layout}", made((4, 6, 8), 5, 7), attrs, layouts=(layout,) * 3)
            yield Case(f"{activation}, {layout} output", made((4, 6, 8), 5, 7), attrs, out_layout=layout)
        yield Case(f"{activation}, empty", (normal(rng, 0, 4), normal(rng, 6, 4), normal(rng, 5, 3)), attrs)


def softmax_cases(rng: np.random.Generator, *, is_log: bool = False) -> Iterator[Case]:
    for shape in ((5,), (1,), (3, 7), (2, 3, 5), (2, 3, 4, 5), (4, 1000), (3, 1)):
        for dim in range(len(shape)):
            yield Case(f"{shape} over {dim}", (normal(rng, *shape),), {"dim": dim, "dtype": ""})
    yield Case("logits of 1e4", (normal(rng, 4, 9) * 1e4,), {"dim": 1, "dtype": ""})
    yield Case("equal logits of -1e4", (np.full((2, 8), -1e4),), {"dim": 1, "dtype": ""})
    masked = normal(rng, 4, 9)
    masked[:, ::2] = -np.inf
    yield Case("some -inf", (masked,), {"dim": 1, "dtype": ""})
    if is_log:
        edges = normal(rng, 5, 6)
        edges[0], edges[1, 2], edges[2, 3], edges[3, ::2] = -np.inf, np.inf, np.nan, -np.inf
        yield Case("NaN and infinities", (edges,), {"dim": 1, "dtype": ""})
    for layout in LAYOUTS[1:]:
        for dim in (0, 2):
            attrs = {"dim": dim, "dtype": ""}
            yield Case(f"{layout} input over {dim}", (normal(rng, 3, 4, 6),), attrs, layouts=(layout,))
    for layout in ("transposed", "gaps", "rows", "first last"):
        for dim in (0, 2):
            attrs = {"dim": dim, "dtype": ""}
            yield Case(f"{layout} output over {dim}", (normal(rng, 3, 4, 6),), attrs, out_layout=layout)
    yield Case("empty", (normal(rng, 0, 4),), {"dim": 1, "dtype": ""})
    yield Case("empty dimension", (normal(rng, 3, 0),), {"dim": 1, "dtype": ""})
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        yield Case(f"in {dtype}", (normal(rng, 3, 4, 6),), {"dim": 1, "dtype": dtype})
        yield Case(f"gaps in {dtype}", (normal(rng, 4, 9),), {"dim": 1, "dtype": dtype}, ("gaps",), "rows")
        yield Case(f"empty, in {dtype}", (normal(rng, 0, 4),), {"dim": 1, "dtype": dtype})
        if is_log:
            yield Case(f"NaN and infinities in {dtype}", (edges,), {"dim": 1, "dtype": dtype})


def norm_cases(rng: np.random.Generator, tensors: int) -> Iterator[Case]:
    """layer_norm (x, weight, bias) and rms_norm (x, weight)."""

    def case(name: str, x: Any, ndim: int, given: int = tensors, eps: float = 1e-5, **more: Any) -> Case:
        parameters = [normal(rng, *x.shape[x.ndim - ndim :]) for _ in range(tensors - 1)]
        kept = [p if i < given - 1 else None for i, p in enumerate(parameters)]
        return Case(name, (x, *kept), {"ndim": ndim, "eps": eps}, **more)

    for shape, ndim in (
        ((3, 8), 1),
        ((5,), 1),
        ((2, 3, 7), 1),
        ((2, 3, 4), 2),
        ((2, 3, 4), 3),
        ((2, 2, 3, 5), 1),
        ((40, 384), 1),
    ):
        for given in range(1, tensors + 1):
            yield case(f"{shape} last {ndim}, {given} tensors", normal(rng, *shape), ndim, given)
    yield case("no variance", np.ones((3, 8)), 1)
    yield case("zeros", np.zeros((3, 8)), 1)
    yield case("eps 1", normal(rng, 3, 8), 1, eps=1.0)
    yield case("eps 1e-12", normal(rng, 3, 8), 1, eps=1e-12)
    yield case("values of 1e4", normal(rng, 3, 64) * 1e4, 1)
    yield case("values of 1e-4", normal(rng, 3, 64) * 1e-4, 1, eps=1e-6)
    yield case("mean of 100", np.round(normal(rng, 3, 64) * 8) / 2 + 100, 1)
    for layout in LAYOUTS[1:]:
        yield case(f"{layout} x", normal(rng, 3, 4, 6), 1, layouts=(layout,))
        yield case(f"{layout} x, last 2", normal(rng, 3, 4, 6), 2, layouts=(layout,))
        yield case(f"{layout} weight", normal(rng, 3, 4, 6), 2, layouts=("contiguous", layout, layout))
    for layout in ("transposed", "gaps", "rows", "first last"):
        yield case(f"{layout} output", normal(rng, 3, 4, 6), 1, out_layout=layout)
    yield case("empty", normal(rng, 0, 4), 1)


def add_rms_norm_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of rms_norm, with a residual that lies as x does, or the other way round."""
    for case in norm_cases(rng, tensors=2):
        x, weight = case.tensors
        assert x is not None
        layouts = (*case.layouts, "contiguous", "contiguous")[:2]
        other = np.clip(normal(rng, *x.shape), -1, 1) * min(np.abs(x).max(initial=0.0), 1e4)
        yield Case(case.name, (x, other, weight), case.attrs, (layouts[0], *layouts), case.out_layout)
    x, other, edges = normal(rng, 3, 6), normal(rng, 3, 6), normal(rng, 4, 6)
    yield Case("residual of another layout", (x, other, None), {"ndim": 1, "eps": 1e-5}, ("contiguous", "transposed"))
    edges[0, 1], edges[1, 2], edges[2, 3] = np.nan, np.inf, -np.inf
    yield Case("NaN and infinities", (edges, normal(rng, 4, 6), normal(rng, 6)), {"ndim": 1, "eps": 1e-5})
    yield Case("a sum of 0", (x, -x, normal(rng, 6)), {"ndim": 1, "eps": 1e-5})


def channel_norm_cases(rng: np.random.Generator, op: str) -> Iterator[Case]:
    """group_norm, instance_norm and batch_norm, with none, one and all of their parameters."""

    def case(name: str, x: Any, groups: int = 1, given: str = "wb", eps: float = 1e-5, **more: Any) -> Case:
        channels = x.shape[1]
        parameters = [normal(rng, channels) if one in given else None for one in "wb"]
        if op == "batch_norm":
            axes = tuple(n for n in range(x.ndim) if n != 1)
            known = np.where(np.isfinite(x), x, 0.0) if x.size else np.ones((1, channels, *[1] * (x.ndim - 2)))
            found = (known.mean(axis=axes), np.minimum(known.var(axis=axes), 6e4))  # float16 has no larger ones
            return Case(name, (x, *found, *parameters), {"eps": eps}, **more)
        attrs = {"eps": eps} if op == "instance_norm" else {"num_groups": groups, "eps": eps}
        return Case(name, (x, *parameters), attrs, **more)

    shapes = [((2, 4, 5), 2), ((2, 4, 5), 1), ((2, 4, 5), 4), ((1, 1, 7), 1), ((3, 6, 2, 3), 3), ((2, 2, 3, 2, 5), 2)]
    shapes += [((2, 32, 8, 8), 8), ((1, 6, 300), 2), ((3, 2, 1), 1)]
    shapes += [] if op == "instance_norm" else [((3, 6), 2), ((5, 4), 1), ((2, 33), 11)]
    for shape, groups in shapes:
        for given in ("", "w", "b", "wb"):
            yield case(f"{shape} in {groups}, {given or 'alone'}", normal(rng, *shape), groups, given)
    for activation in LINEAR_ACTIVATIONS if op == "group_norm" else ():
        for shape, mean in (((2, 4, 5), 0.0), ((1, 6, 300), 0.0), ((2, 4, 16), 100.0)):
            name = f"{shape} around {mean}, {activation}"
            plain = case(name, np.round(normal(rng, *shape) * 8) / 2 + mean, 2, "wb" if shape[0] > 1 else "")
            yield Case(name, plain.tensors, {**plain.attrs, "activation": activation})
    yield case("no variance", np.ones((2, 4, 3)), 2)
    yield case("eps 1", normal(rng, 2, 4, 3), 2, eps=1.0)
    yield case("eps 0", normal(rng, 2, 4, 8), 2, eps=0.0)
    yield case("values of 1e4", normal(rng, 2, 4, 16) * 1e4, 2)
    yield case("values of 1e-4", normal(rng, 2, 4, 16) * 1e-4, 2, eps=1e-6)
    yield case("mean of 100", np.round(normal(rng, 2, 4, 16) * 8) / 2 + 100, 2)
    yield case("mean of 1e4, deviation of 1", np.round(normal(rng, 2, 4, 64) * 16) / 16 + 1e4, 2)
    for layout in LAYOUTS[1:]:
        yield case(f"{layout} x", normal(rng, 3, 4, 6), 2, layouts=(layout,))
        yield case(f"{layout} 4-D x", normal(rng, 3, 4, 2, 6), 2, layouts=(layout,))
        yield case(f"{layout} parameters", normal(rng, 3, 4, 6), 2, layouts=("contiguous", *[layout] * 4))
    for layout in ("transposed", "gaps", "rows", "first last"):
        yield case(f"{layout} output", normal(rng, 3, 4, 6), 2, out_layout=layout)
    edges = normal(rng, 2, 4, 6)
    edges[0, 0, 1], edges[1, 3, 2], edges[0, 3, 3] = np.nan, np.inf, -np.inf
    yield case("NaN and infinities", edges, 2)
    yield case("no samples", normal(rng, 0, 4, 3), 2)
    yield case("no elements", normal(rng, 2, 4, 0), 2)


def norm_backward_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Those of a norm with one parameter, with a gradient that lies as x does; also of many rows, which gradients of
    weights are sums over."""
    many = [
        Case(f"{rows} rows", (normal(rng, rows, 33), normal(rng, 33)), {"ndim": 1, "eps": 1e-5}) for rows in (1, 500)
    ]
    for case in (*norm_cases(rng, tensors=2), *many):
        x, weight = case.tensors
        assert x is not None
        layouts = (*case.layouts, "contiguous", "contiguous")[:2]
        tensors = (normal(rng, *x.shape), x, weight)
        yield Case(case.name, tensors, case.attrs, (layouts[0], *layouts), case.out_layout)


def activation_cases(rng: np.random.Generator, attrs: Sequence[dict[str, Any]]) -> Iterator[Case]:
    for more in attrs:
        for shape in ((), (1,), (7,), (3, 5), (2, 3, 33), (2, 1, 5, 3), (100, 130)):
            yield Case(f"{shape} {more}", (normal(rng, *shape) * 3,), more)
        yield Case(f"extremes {more}", (np.array([-1e4, -50.0, -8.0, -0.0, 0.0, 1e-4, 8.0, 50.0, 1e4]),), more)
        for layout in LAYOUTS[1:]:
            yield Case(f"{layout} input {more}", (normal(rng, 3, 4, 6),), more, layouts=(layout,))
        for layout in ("transposed", "gaps", "rows", "first last"):
            yield Case(f"{layout} output {more}", (normal(rng, 3, 4, 6),), more, out_layout=layout)
        yield Case(f"empty {more}", (normal(rng, 0, 4),), more)


def embedding_cases(rng: np.random.Generator) -> Iterator[Case]:
    for dtype in ("int32", "int64"):
        for shape in ((), (1,), (5,), (2, 3), (2, 3, 4)):
            yield Case(f"{dtype} {shape}", (rng.integers(0, 11, shape).astype(dtype), normal(rng, 11, 7)))
        ids = rng.integers(0, 11, (3, 4)).astype(dtype)
        for layout in LAYOUTS[1:]:
            yield Case(f"{dtype} {layout} ids", (ids, normal(rng, 11, 7)), layouts=(layout,))
            yield Case(f"{dtype} {layout} weight", (ids, normal(rng, 11, 7)), layouts=("contiguous", layout))
        for layout in ("transposed", "gaps", "rows", "first last"):
            yield Case(f"{dtype} {layout} output", (ids, normal(rng, 11, 7)), out_layout=layout)
        yield Case(f"{dtype} empty", (ids[:0], normal(rng, 11, 7)))


def cross_entropy_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every fourth index does not count; in one case none does."""
    for reduction in ("none", "mean", "sum"):
        for shape, kind in (((5, 7), "int64"), ((2, 300), "int32"), ((3, 16, 4), "int64"), ((2, 5, 3, 4), "int32")):
            rest = (shape[0], *shape[2:])
            target = rng.integers(0, shape[1], rest).astype(kind)
            target.flat[::4] = -100
            weight = abs(normal(rng, shape[1]))
            for smoothing, given in ((0.0, None), (0.25, None), (0.0, weight), (0.125, weight)):
                attrs = {"ignore_index": -100, "reduction": reduction, "label_smoothing": smoothing}
                name = f"{reduction} {shape} {smoothing} {given is not None}"
                yield Case(name, (normal(rng, *shape) * 5, target, given), attrs)
        attrs = {"ignore_index": 3, "reduction": reduction, "label_smoothing": 0.5}
        yield Case(f"{reduction}, none counts", (normal(rng, 3, 4), np.full(3, 3), None), attrs)
        x, target = normal(rng, 4, 6), rng.integers(0, 6, 4)
        for layout in ("transposed", "gaps", "rows"):
            yield Case(f"{reduction}, {layout} input", (x, target, None), attrs, layouts=(layout,))
        yield Case(f"{reduction}, gaps target", (x, target, None), attrs, layouts=("contiguous", "gaps"))
        yield Case(f"{reduction}, empty", (x[:0], target[:0], None), attrs)
        yield Case(f"{reduction}, far apart", (x * 300, target, None), attrs)


CASES: dict[str, Callable[[np.random.Generator], Iterator[Case]]] = {
    "attention": attention_cases,
    "attention_forward": forward_cases,
    "attention_backward": backward_cases,
    "merge_attention": merge_cases,
    "attention_varlen": varlen_cases,
    "attention_varlen_forward": varlen_forward_cases,
    "paged_attention": paged_cases,
    "paged_attention_forward": paged_forward_cases,
    "mla_decode": latent_cases,
    "append_kv": append_cases,
    "gather_kv": gather_cases,
    "copy_kv_blocks": copy_block_cases,
    "cross_entropy": cross_entropy_cases,
    "rope": rope_cases,
    "rope_qk": rope_qk_cases,
    "swiglu": swiglu_cases,
    "geglu": geglu_cases,
    "reglu": swiglu_cases,
    **dict.fromkeys(ACTIVATIONS, functools.partial(activation_cases, attrs=[{}])),
    "matmul": matmul_cases,
    "addmm": addmm_cases,
    "linear": linear_cases,
    "gated_mlp": gated_mlp_cases,
    "softmax": softmax_cases,
    "log_softmax": functools.partial(softmax_cases, is_log=True),
    "add_rms_norm": add_rms_norm_cases,
    **{op: functools.partial(channel_norm_cases, op=op) for op in ("group_norm", "instance_norm", "batch_norm")},
    "layer_norm": functools.partial(norm_cases, tensors=3),
    "rms_norm": functools.partial(norm_cases, tensors=2),
    "layer_norm_backward": norm_backward_cases,
    "rms_norm_backward": norm_backward_cases,
    "gelu": functools.partial(activation_cases, attrs=[{"approximate": "none"}, {"approximate": "tanh"}]),
    "silu": functools.partial(activation_cases, attrs=[{}]),
    **elementwise_cases.CASES,
    **expert_cases.CASES,
    **vision_cases.CASES,
    **quantized_cases.CASES,
    "embedding": embedding_cases,
    "penalize_logits": penalize_cases,
    "filter_logits": filter_cases,
    "sample": sample_cases,
    "speculative_verify": verify_cases,
    "tree_accept": tree_cases,
}
