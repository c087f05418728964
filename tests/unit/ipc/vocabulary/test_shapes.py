"""What belongs together, and that nothing else gets past the check."""

from __future__ import annotations

import inspect
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.reference import TENSOR_OPS
from tests.signatures import planned

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import check_call, outputs_of
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
        ("attention", (*QKV[:2], F32("float32", (1, 1, 1, 64)), None), QKV[:1], ATTENTION, "sequence length 1"),
        ("attention", (*QKV, F32("float32", (1, 1, 16, 17))), QKV[:1], ATTENTION, "attn_mask has shape"),
        ("attention", (*QKV, None), (F32("float32", (1, 1, 1, 64)),), ATTENTION, "output out is float32"),
        ("attention", (*QKV, None), (F32("float16", (1, 1, 16, 64)),), ATTENTION, "output out is float16"),
        ("attention", (*QKV, None), QKV[:1], {**ATTENTION, "scale": float("nan")}, "scale is nan"),
        ("attention", (*QKV, None), QKV[:1], {**ATTENTION, "is_causal": 1}, "is_causal is 1"),
        (
            "linear",
            (F32("float32", (4, 8)), F32("float32", (32, 8)), None),
            (F32("float32", (4, 1)),),
            {},
            "output out",
        ),
        ("silu", (F32("float32", (8,)),), (TensorSpec("float32", (8,), (0,)),), {}, "no overlap"),
        ("softmax", (F32("float32", (8,)),), (F32("float32", (8,)),), {"dim": 1}, "dim is 1"),
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
