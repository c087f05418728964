"""Profiles: the ops and dtypes that an installation is for. What lies outside of one is neither probed nor compiled,
warmed or served, and every kernel says so of a call."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerzero.ipc.vocabulary.ops import CAST_DTYPES, FUNCTION, FUNCTION_ON_GPU, OPS
from layerzero.ipc.vocabulary.shape_class import ANY, class_dtype
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

_ALWAYS = frozenset({"null", FUNCTION, FUNCTION_ON_GPU})  # what is no matter of dtypes
_TEXT = ("tokenize", "detokenize")
_GRADIENTS = frozenset({"attention_backward", "layer_norm_backward", "rms_norm_backward", "cross_entropy"})
_VISION = frozenset(
    {
        *("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "interpolate"),
        *("group_norm", "instance_norm", "batch_norm"),
    }
)
_QUANTIZED = frozenset({"quantize", "dequantize", "dynamic_quantize", "int_matmul", "scaled_linear"})
_FLOATS = ("bfloat16", "float16", "float32")
_WHOLE = ("bool", "int32", "int64")
_NARROW = ("int8", "uint8", *(dtype for dtype in ITEMSIZE if dtype not in CAST_DTYPES))


_TENSOR = re.compile(r"\w+:(?P<dtype>\w+)\[")


class _Typed(NamedTuple):
    dtype: str


@dataclass(frozen=True)
class Profile:
    """`calls`: the dtypes of each op that has any, by which certificates are kept (shape_class.class_dtype); None for
    all there are."""

    name: str
    calls: Mapping[str, tuple[str, ...]] | None = None

    def has(self, op: str, dtype: str) -> bool:
        """Whether calls of the op with such data belong to it."""
        if self.calls is None or op in _ALWAYS:
            return True
        return dtype in self.calls.get(op, ())

    def refusal(self, op: str, dtype: str) -> str:
        """Why calls of the op with such data do not belong to it; empty when they do."""
        if self.has(op, dtype):
            return ""
        dtypes = (self.calls or {}).get(op, ())
        has = f"{op} in {', '.join(dtypes)}, and not in {dtype}" if dtypes else f"no {op}"
        return f"profile {self.name} has {has}"

    @property
    def hash(self) -> str:
        """Of what belongs to it; empty for all."""
        if self.calls is None:
            return ""
        known = json.dumps({op: sorted(dtypes) for op, dtypes in self.calls.items()}, sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()[:8]

    def to_json(self) -> dict[str, Any] | None:
        """What workers/probe.py is told."""
        return None if self.calls is None else {op: list(dtypes) for op, dtypes in self.calls.items()}


def of_calls(name: str, calls: Iterable[tuple[str, str]]) -> Profile:
    """Of what was called: ops, and the dtypes of their data."""
    found: dict[str, list[str]] = {}
    for op, dtype in sorted(set(calls)):
        found.setdefault(op, []).append(dtype)
    return Profile(name, {op: tuple(dtypes) for op, dtypes in found.items()})


def of_key(key: str) -> tuple[str, str] | None:
    """Op and dtype of the calls that share a key of measured times (SelectionContext.perf_key); None where it is of
    another version's."""
    op, *parts = key.split(" ")
    specs = [_Typed(found["dtype"]) for part in parts if (found := _TENSOR.match(part)) is not None]
    return (op, class_dtype(op, specs)) if op in OPS and op not in _ALWAYS else None


def _named(name: str, ops: Iterable[str], dtypes: tuple[str, ...]) -> Profile:
    calls = {op: (*dtypes, *(_NARROW if op in _QUANTIZED else ())) for op in ops if op not in _TEXT}
    return Profile(name, {**calls, **dict.fromkeys(_TEXT, (ANY,))})


_FORWARD = [op for op in OPS if op not in _GRADIENTS | _ALWAYS]
ALL = Profile("all")
PROFILES = {
    profile.name: profile
    for profile in (
        _named("inference", _FORWARD, (*_FLOATS, *_WHOLE, *_NARROW)),
        _named("quantized", [op for op in _FORWARD if op not in _VISION], (*_FLOATS, *_WHOLE)),
        _named("nlp", [op for op in _FORWARD if op not in _VISION | _QUANTIZED], (*_FLOATS, *_WHOLE)),
        ALL,
    )
}
