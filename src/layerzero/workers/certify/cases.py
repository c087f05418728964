"""The calls that certify a kernel: at least one for each shape class (ipc/vocabulary/shape_class.py) that a
descriptor permits.

What is computed is in workers/certify/problems.py; here it gets dtypes, and places in memory. Cases of tokenizers are
in vectors.json, made by tests/make_vectors.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.numerics import pack
from layerzero.ipc.vocabulary.ops import ATTENTION_OPS, FUNCTION, OPS, TAKE_OUTS
from layerzero.ipc.vocabulary.shape_class import shape_class
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.vocabulary.tokenizer_identity import tokenizer_parts
from layerzero.workers.certify import claims as claimed
from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.problem import Problem, family
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.certify.values import Shape

VECTORS = Path(__file__).with_name("vectors.json")

# How inputs and output lie in memory. transposed: the last two dimensions change places; gaps: every second element;
# rows: gaps between rows only.
LAYOUTS = (("dense", "dense"), ("rows", "rows"), ("dense", "rows"), ("transposed", "dense"), ("dense", "gaps"))
BSHD = ("bshd", "bshd")
# Of ops with many classes.
FEWER = (("dense", "dense"), ("rows", "rows"), ("transposed", "gaps"))
_OF_FEWER = frozenset({"quantize", "dequantize", "int_matmul", "scaled_linear"})
# Of ops with several results, which are always new.
TO_NEW = (("dense", "dense"), ("rows", "dense"), ("transposed", "dense"))


@dataclass(frozen=True)
class Case:
    """One call with its inputs' elements and the numbers that must come out. Those are computed when they are asked
    for, which takes most of the time that a case takes."""

    name: str
    shape_class: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    _data: Callable[[], tuple[bytes, ...]]
    _expected: Callable[[], tuple[Sequence[float], ...]]
    result: Any = None  # what the kernel must return

    @property
    def data(self) -> tuple[bytes, ...]:
        """Row-major; b"" for an input that is left out."""
        return self._data()

    @property
    def expected(self) -> tuple[Sequence[float], ...]:
        return self._expected()


def cases(op: str, claims: Claims, problems: Sequence[Problem], dtype: str) -> Iterator[Case]:
    """Every case that a kernel's descriptor admits in one of its dtypes."""
    if op not in PROBLEMS:
        yield from (case for case in _stored(op) if claimed.admits(op, claims, case.inputs, case.outputs, case.attrs))
        return
    for problem in problems:
        if not problem.is_of(dtype):
            continue
        seen: set[Any] = set()
        data = functools.cache(functools.partial(_packed, problem, dtype))  # the same in every layout
        for layouts in _layouts(op):
            specs, outs, attrs = _placed(problem, dtype, *layouts)
            key = (*specs, *outs, attrs.get("layout"))
            if key in seen or not claimed.admits(op, claims, specs, outs, attrs):
                continue
            seen.add(key)
            yield Case(
                problem.name if layouts == LAYOUTS[0] else f"{problem.name}, {layouts[0]} to {layouts[1]}",
                shape_class(op, specs, attrs, outs),
                attrs,
                specs,
                outs,
                data,
                functools.partial(_expected, problem, dtype, outs),
            )


def _layouts(op: str) -> Sequence[tuple[str, str]]:
    is_new = len(OPS[op].outputs) > 1 and not OPS[op].in_place and op not in TAKE_OUTS
    found = TO_NEW if is_new else FEWER if op in _OF_FEWER else LAYOUTS
    return (*found, BSHD) if op in ATTENTION_OPS else found


def _expected(problem: Problem, dtype: str, outs: Sequence[TensorSpec]) -> tuple[Sequence[float], ...]:
    solutions = problem.solutions(family(dtype))
    return tuple(_wrapped(values.flat, spec.dtype) for values, spec in zip(solutions, outs, strict=True))


def _packed(problem: Problem, dtype: str) -> tuple[bytes, ...]:
    numbers = problem.numbers(family(dtype))
    return tuple(
        b"" if values is None else pack(values.flat, kind or dtype)
        for values, kind in zip(numbers, problem.kinds, strict=True)
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
) -> tuple[tuple[TensorSpec | None, ...], tuple[TensorSpec, ...], dict[str, Any]]:
    is_bshd = layout == "bshd"
    specs = tuple(
        None
        if values is None
        else lay_out(kind or dtype, values.shape, "dense" if is_bshd and name == "attn_mask" else layout)
        for name, values, kind in zip(OPS[problem.op].inputs, problem.inputs, problem.kinds, strict=False)
    )
    attrs = {**problem.attrs, "layout": "BSHD"} if is_bshd else problem.attrs
    in_place = [specs[OPS[problem.op].inputs.index(name)] for name in OPS[problem.op].in_place]
    if in_place:
        return specs, tuple(spec for spec in in_place if spec), attrs
    outs = outputs_of(problem.op, specs, attrs)
    return specs, tuple(lay_out(out_dtype, shape, out_layout) for out_dtype, shape in outs), attrs


def _wrapped(values: Sequence[Any], dtype: str) -> Sequence[Any]:
    """Integers wrap around in their dtype."""
    kind = family(dtype)
    if kind not in ("int", "uint"):
        return values
    bits = 8 * TensorSpec.contiguous(dtype, ()).itemsize
    low = 0 if kind == "uint" else 1 << (bits - 1)
    return [(value + low) % (1 << bits) - low for value in values]


# --- stored cases: tokenizers, whose documents no generator makes, and null


def _stored(op: str) -> Iterator[Case]:
    if op == "null":
        yield Case("nothing", shape_class(op, (), {}), {}, (), (), tuple, tuple)
        return
    if op == FUNCTION:
        yield _ping(op)
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


def _ping(op: str) -> Case:
    """That the environment has a worker which answers; what functions compute is their authors' matter."""
    asked, answer = bytes(frames.ping()), bytes(frames.pong())
    specs = (TensorSpec.contiguous("uint8", (len(asked),)), *(None for _ in OPS[op].inputs[1:]))
    out = (TensorSpec.contiguous("uint8", (len(answer),)),)
    data = (asked, *(b"" for _ in OPS[op].inputs[1:]))
    return Case("ping", shape_class(op, specs, {}), {"of": ""}, specs, out, lambda: data, lambda: (answer,), None)


def _text_case(stored: Mapping[str, Any]) -> Case:
    """The digest of a tokenizer and the hashes of its parts are computed here, not stored."""
    text = stored["inputs"][0]["text"]
    digest = hashlib.sha256(text.encode()).hexdigest()
    attrs = {**stored["attrs"], "tokenizer_digest": digest, **tokenizer_parts(json.loads(text), digest)}
    inputs = [_stored_tensor(tensor) for tensor in stored["inputs"]]
    outputs = [_stored_tensor(tensor) for tensor in stored["outputs"]]
    specs = tuple(spec for spec, _ in inputs)
    return Case(
        stored["name"],
        shape_class(stored["op"], specs, attrs),
        attrs,
        specs,
        tuple(spec for spec, _ in outputs),
        lambda: tuple(pack(values, spec.dtype) for spec, values in inputs),
        lambda: tuple(values for _, values in outputs),
        stored["result"],
    )


def _stored_tensor(tensor: Mapping[str, Any]) -> tuple[TensorSpec, Sequence[Any]]:
    values = list(tensor["text"].encode()) if "text" in tensor else tensor["values"]
    return TensorSpec.contiguous(tensor["dtype"], tuple(tensor["shape"])), values
