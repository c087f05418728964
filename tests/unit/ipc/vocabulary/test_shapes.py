"""What belongs together, and that nothing else gets past the check."""

from __future__ import annotations

import inspect
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.reference import TENSOR_OPS
from tests.signatures import planned
from tests.unit.ipc.vocabulary.calls import call as good_call

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import check_call, outputs_of, overlaps
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

COMPUTED = sorted(TENSOR_OPS)
ROUNDS = 300


@pytest.mark.parametrize("op", sorted(OPS))
def test_what_the_client_plans_belongs_together(op: str) -> None:
    for seed in range(ROUNDS):
        call = planned(op, Random(seed))
        check_call(op, call.inputs, call.outputs, call.attrs)


def _mutated(rng: Random, spec: TensorSpec) -> TensorSpec:
    """Another dtype, extent, number of dimensions or stride."""
    dtype, shape, strides = spec.dtype, list(spec.shape), list(spec.strides)
    match rng.randrange(5):
        case 0:
            dtype = rng.choice(sorted(ITEMSIZE))
        case 1 if shape:
            shape[rng.randrange(len(shape))] += rng.choice((-1, 1, 5))
        case 2 if shape:
            strides[rng.randrange(len(strides))] = rng.choice((0, 1, 1000))
        case 3 if shape:
            at = rng.randrange(len(shape))
            del shape[at], strides[at]
        case _:
            at = rng.randint(0, len(shape))
            shape.insert(at, rng.choice((1, 2)))
            strides.insert(at, 1)
    return TensorSpec(dtype, tuple(max(n, 0) for n in shape), tuple(strides))


def _array(spec: TensorSpec) -> Any:
    dtype = {"bfloat16": "float32", "float8_e4m3fn": "float32", "float8_e5m2": "float32", "float4_e2m1fn_x2": "uint8"}
    return np.zeros(spec.shape, dtype.get(spec.dtype, spec.dtype))


def _computed(op: str, inputs: list[TensorSpec | None], attrs: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes that the formulas of docs/ops.md give, in NumPy, for tensors of zeros."""
    arrays = [None if spec is None else _array(spec) for spec in inputs]
    if op == "attention_varlen":
        arrays[3][-1], arrays[4][-1] = len(arrays[0]), len(arrays[1])
    known = inspect.signature(TENSOR_OPS[op]).parameters
    with np.errstate(all="ignore"):
        result = TENSOR_OPS[op](*arrays, **{name: value for name, value in attrs.items() if name in known})
    return [array.shape for array in (result if isinstance(result, tuple) else (result,))]


def _is_refused_by_numbers(op: str, inputs: list[TensorSpec | None]) -> bool:
    """No sequence, but tokens; ids, but no rows: providers refuse what cu_seqlens and ids hold then."""
    shapes = [spec.shape for spec in inputs if spec is not None]
    return (op == "attention_varlen" and shapes[3] == (1,)) or (op == "embedding" and shapes[1][0] == 0)


@pytest.mark.parametrize("op", COMPUTED)
def test_what_passes_is_what_the_formulas_take_and_give(op: str) -> None:
    """Of thousands of calls with a change by chance, those that pass compute, without NumPy's broadcasting where the op
    has none, to the shapes that were said; and each tensor's place in memory is its own."""
    passed = 0
    for seed in range(10 * ROUNDS):
        rng = Random(seed)
        call = planned(op, rng)
        inputs, outputs = list(call.inputs), list(call.outputs)
        side = inputs if rng.random() < 0.7 else outputs
        given = [n for n, spec in enumerate(side) if spec is not None]
        at = rng.choice(given)
        changed = side[at]
        assert changed is not None
        side[at] = _mutated(rng, changed)  # type: ignore[call-overload]
        try:
            check_call(op, inputs, outputs, call.attrs)
        except InvalidArgument:
            continue
        passed += 1
        if _is_refused_by_numbers(op, inputs):
            continue
        assert _computed(op, inputs, call.attrs) == [spec.shape for spec in outputs], seed
        for spec in outputs:
            places = np.zeros(spec.span_bytes // spec.itemsize, np.int32)
            view = np.lib.stride_tricks.as_strided(places, spec.shape, [4 * step for step in spec.strides])
            view += 1
            assert places.max(initial=0) <= 1, seed
    assert 0 < passed < 10 * ROUNDS


F32 = TensorSpec.contiguous
QKV = (F32("float32", (1, 1, 16, 64)),) * 3
ATTENTION = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "attrs", "text"),
    [
        ("attention", (*QKV[:2], F32("float32", (1, 1, 1, 64)), *[None] * 3), QKV[:1], ATTENTION, "sequence length 1"),
        ("attention", (*QKV, F32("float32", (1, 1, 16, 17)), None, None), QKV[:1], ATTENTION, "attn_mask has shape"),
        ("attention", (*QKV, *[None] * 3), (F32("float32", (1, 1, 1, 64)),), ATTENTION, "output out is float32"),
        ("attention", (*QKV, *[None] * 3), (F32("float16", (1, 1, 16, 64)),), ATTENTION, "output out is float16"),
        ("attention", (*QKV, *[None] * 3), QKV[:1], {**ATTENTION, "scale": float("nan")}, "scale is nan"),
        ("attention", (*QKV, *[None] * 3), QKV[:1], {**ATTENTION, "is_causal": 1}, "is_causal is 1"),
        (
            "linear",
            (F32("float32", (4, 8)), F32("float32", (32, 8)), None),
            (F32("float32", (4, 1)),),
            {"activation": ""},
            "output out",
        ),
        ("silu", (F32("float32", (8,)),), (TensorSpec("float32", (8,), (0,)),), {}, "no overlap"),
        ("softmax", (F32("float32", (8,)),), (F32("float32", (8,)),), {"dim": 1, "dtype": ""}, "dim is 1"),
        ("rms_norm", (F32("float32", (8,)), None), (F32("float32", (8,)),), {"ndim": 9, "eps": 1e-5}, "ndim is 9"),
        ("matmul", (F32("float32", (2, 3)), F32("float32", (4, 2))), (F32("float32", (2, 2)),), {}, "second to last"),
    ],
)
def test_what_does_not_belong_together_is_named(
    op: str, inputs: tuple[TensorSpec | None, ...], outputs: tuple[TensorSpec, ...], attrs: dict[str, Any], text: str
) -> None:
    """The first and the seventh are attacks that read and changed another client's memory."""
    with pytest.raises(InvalidArgument, match=text):
        check_call(op, inputs, outputs, attrs)


def test_outputs_beyond_every_memory_are_refused() -> None:
    huge = F32("float32", (1 << 40, 1))
    with pytest.raises(InvalidArgument, match="bytes at most"):
        outputs_of("matmul", (huge, replace(huge, shape=(1, 1 << 40), strides=(1, 1))), {})


@pytest.mark.parametrize(
    ("op", "at", "changed", "text"),
    [
        ("matmul", 0, F32("int32", (4, 5, 7, 2)), "output out is int32[4, 5, 7, 2]; allowed: int32[4, 5, 2, 7], as"),
        (
            "softmax",
            0,
            F32("float64", (2, 3)),
            "output out is float64[2, 3]; allowed: float32[2, 3], as its inputs say",
        ),
        (
            "softmax",
            0,
            TensorSpec("float32", (2, 3), (1, 1)),
            "output out has shape [2, 3] and strides [1, 1]; allowed: no overlap",
        ),
        (
            "append_kv",
            1,
            TensorSpec("int8", (10, 4, 3, 13), (13, 130, 520, 1)),
            "output v_cache is int8[10, 4, 3, 13] in other strides than the input; allowed: the input itself",
        ),
    ],
)
def test_an_output_that_is_not_its_calls_is_named_with_what_it_should_be(
    op: str, at: int, changed: TensorSpec, text: str
) -> None:
    """A kernel would write beyond it, or twice into the same place, or beside the cache that it is to fill."""
    inputs, attrs = good_call(op, {})
    outputs = [F32(dtype, shape) for dtype, shape in outputs_of(op, inputs, attrs)]
    check_call(op, inputs, outputs, attrs)
    outputs[at] = changed
    with pytest.raises(InvalidArgument) as refused:
        check_call(op, inputs, outputs, attrs)
    assert refused.value.message.startswith(f"{op}: {text}")


SMALL = st.integers(0, 4)


def offsets(spec: TensorSpec) -> list[int]:
    return [
        sum(i * step for i, step in zip(index, spec.strides, strict=True))
        for index in np.ndindex(*map(int, spec.shape))
    ]


@given(st.lists(st.tuples(SMALL, st.integers(0, 30)), max_size=4))
@example([(3, 1), (2, 3), (2, 4)])
def test_elements_that_share_memory_are_seen(dims: list[tuple[int, int]]) -> None:
    """Whatever the extents and strides are."""
    spec = TensorSpec("float32", tuple(n for n, _ in dims), tuple(step for _, step in dims))
    places = offsets(spec)
    assert overlaps(spec) or len(set(places)) == len(places)


@given(st.lists(st.tuples(SMALL, st.integers(1, 3)), min_size=1, max_size=4), st.randoms())
def test_slices_and_transposes_of_dense_memory_share_nothing(dims: list[tuple[int, int]], rng: Random) -> None:
    """They are what users have, and are not refused."""
    dense = F32("float32", tuple(n * step for n, step in dims))
    sliced = TensorSpec(
        "float32", tuple(n for n, _ in dims), tuple(s * step for s, (_, step) in zip(dense.strides, dims, strict=True))
    )
    order = rng.sample(range(len(dims)), len(dims))
    assert not overlaps(sliced.permute(*order))


@pytest.mark.parametrize(("shape", "strides"), [((1, 3), (0, 1)), ((3, 1, 2), (2, 1, 1)), ((0, 3), (1, 0)), ((), ())])
def test_steps_that_nothing_takes_do_not_matter(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Along an extent of 1, and of a tensor without elements."""
    assert not overlaps(TensorSpec("float32", shape, strides))


@given(st.lists(SMALL, max_size=3), st.lists(SMALL, max_size=3))
def test_leading_dimensions_broadcast_as_numpys(a: list[int], b: list[int]) -> None:
    """Or are refused, where NumPy refuses them."""
    inputs = (F32("float32", (*a, 2, 3)), F32("float32", (*b, 3, 5)))
    try:
        wanted = (*np.broadcast_shapes(tuple(a), tuple(b)), 2, 5)
    except ValueError:
        with pytest.raises(InvalidArgument, match="leading dimensions"):
            outputs_of("matmul", inputs, {})
    else:
        assert outputs_of("matmul", inputs, {}) == (("float32", wanted),)


def test_an_output_less_than_the_op_has_is_an_error() -> None:
    """Whoever reads a call counts them; one that was left out would not be checked."""
    inputs, attrs = good_call("append_kv", {})
    outputs = [F32(dtype, shape) for dtype, shape in outputs_of("append_kv", inputs, attrs)]
    with pytest.raises(ValueError, match="shorter"):
        check_call("append_kv", inputs, outputs[:1], attrs)
