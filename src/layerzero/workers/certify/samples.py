"""Calls of an op in every dtype, of the smallest shapes that certification has: whether an op takes such dtypes is for
the shape functions to say (capabilities/type_rules.py asks them)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from layerzero.ipc.vocabulary.attention_shapes import SCALED_CACHES
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.problems import PROBLEMS

Sample = tuple[tuple["TensorSpec | None", ...], Mapping[str, Any]]  # inputs in wire order, attributes

_TYPES = ("dtype", "format", "weight_format")


def samples(op: str) -> Iterator[Sample]:
    """None for ops whose inputs are texts, or nothing. Dtypes that follow that of the data follow it here."""
    seen: set[Any] = set()
    for problem in PROBLEMS[op]({"supports_kv_cache_dtypes": SCALED_CACHES}) if op in PROBLEMS else ():
        key = (
            *(values is not None for values in problem.inputs),
            *problem.kinds,
            problem.families,
            *(problem.attrs.get(name) for name in _TYPES),
        )
        if key not in seen and all(0 not in values.shape for values in problem.inputs if values is not None):
            seen.add(key)
            yield from _in_every_dtype(problem)


def _in_every_dtype(problem: Problem) -> Iterator[Sample]:
    for dtype in ITEMSIZE:
        if problem.is_of(dtype):
            yield (
                tuple(
                    None if values is None else TensorSpec.contiguous(kind or dtype, values.shape)
                    for values, kind in zip(problem.inputs, problem.kinds, strict=True)
                ),
                problem.attrs,
            )
