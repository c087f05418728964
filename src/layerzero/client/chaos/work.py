"""Calls whose inputs follow from a number, and what must come out of each: the load and its oracle."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import layerzero as lz
from layerzero.client.planning.tokenizer import TokenizerFile

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
FOLD = 8  # numbers that a history keeps of an array; each element has a part in one of them
RTOL, ATOL = 2e-5, 1e-4  # of float32 kernels against float64; other inputs differ by far more
WORDS = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """`inputs` makes a call's arguments of its nonce; `run` does the call, with submit=True as a future where that can
    be; `expect` says what must come of it. `parts`: the ops that it calls, where it is more than one."""

    op: str
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    run: Callable[..., Any]
    expect: Callable[..., Any]
    can_submit: bool = True
    parts: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        return self.parts or (self.op,)

    def arguments(self, nonce: int) -> tuple[Any, ...]:
        return self.inputs(np.random.default_rng(nonce))

    def expected(self, nonce: int) -> list[float]:
        """What a history must say of the result."""
        return fold(self.expect(*self.arguments(nonce)))


def fold(result: Any) -> list[float]:
    """FOLD sums of the elements with weights that differ, so that no two of them can be exchanged unseen."""
    if result is None:
        return []
    flat = np.asarray(result, np.float64).ravel()
    weighted = flat * (1 + 0.5 * np.sin(np.arange(flat.size)))
    padded = np.zeros(math.ceil(max(flat.size, 1) / FOLD) * FOLD)
    padded[: flat.size] = weighted
    return [float(flat.size), *(float(f"{total:.7g}") for total in padded.reshape(-1, FOLD).sum(axis=0))]


def is_right(noted: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether what was noted of a result is what was expected, within what float32 kernels may differ."""
    if len(noted) != len(expected) or noted[:1] != expected[:1]:
        return False
    if not expected:
        return True
    scale = math.sqrt(max(expected[0] / FOLD, 1.0))
    return all(abs(a - b) <= RTOL * abs(b) + ATOL * scale for a, b in zip(noted[1:], expected[1:], strict=True))


def _normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def _rows(rng: np.random.Generator) -> tuple[F32]:
    """Of a few sizes, so that routes repeat; now and then large enough for arenas to be made and given back."""
    rows = (1, 4, 16, 1024)[int(rng.choice(4, p=(0.45, 0.35, 0.19, 0.01)))]
    return (_normal(rng, rows, 64),)


def _silu(x: F32) -> F64:
    wide = x.astype(np.float64)
    return np.asarray(wide / (1 + np.exp(-wide)), np.float64)


def _softmax(x: Any) -> F64:
    wide = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return np.asarray(wide / wide.sum(axis=-1, keepdims=True), np.float64)


def _layer_norm(x: F32) -> F64:
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1e-5), np.float64)


def _rms_norm(x: F32) -> F64:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5), np.float64)


def _matmul(a: F32, b: F32) -> F64:
    return np.asarray(a.astype(np.float64) @ b.astype(np.float64), np.float64)


def _matmul_of(x: F32, number: int) -> F64:
    return _matmul(x, _weight(number))


def _attention(q: F32, k: F32, v: F32) -> F64:
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return _softmax(scores) @ v.astype(np.float64)


def _weighted(rng: np.random.Generator) -> tuple[F32, int]:
    return _normal(rng, 4, 256), int(rng.random() < 0.1)


@cache
def _weight(number: int) -> F32:
    return _normal(np.random.default_rng(number), 256, 64)


def _with_weight(x: F32, number: int, **options: Any) -> Any:
    """The weight is the same memory at each call of a thread, so large that a copy is kept, and written at times."""
    if not hasattr(_buffers, "weight"):
        _buffers.weight, _buffers.number = np.empty_like(_weight(0)), None
    if _buffers.number != number:
        _buffers.weight[...], _buffers.number = _weight(number), number
    return lz.matmul(x, _buffers.weight, **options)


_buffers = threading.local()


@cache
def tokenizer() -> TokenizerFile:
    """Word number n is token n."""
    vocabulary = {**{f"w{n}": n for n in range(WORDS)}, "[UNK]": WORDS}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    return TokenizerFile(json.dumps(document).encode())


def _numbers(rng: np.random.Generator) -> tuple[list[int]]:
    return (rng.integers(0, WORDS, int(rng.integers(1, 20))).tolist(),)


def _tokenize(numbers: list[int], **options: Any) -> Any:
    return lz.tokenize(" ".join(f"w{n}" for n in numbers), tokenizer(), **options)


def _block(x: Any, **options: Any) -> Any:
    """Calls that feed each other, and a step of the caller's own between them."""
    y = lz.silu(lz.silu(x, **options), **options)
    y += x
    return lz.softmax(y, -1, **options)


@cache
def _plan() -> lz.ExecutionPlan:
    return lz.plan(_block)


def _planned(x: F32, **options: Any) -> Any:
    return _plan()(x, **options)


def _expected_of_plan(x: F32) -> F64:
    return _softmax(_silu(_silu(x).astype(np.float32)) + x)


def _op(name: str, **fixed: Any) -> Callable[..., Any]:
    def run(*args: Any, submit: bool = False, **options: Any) -> Any:
        op = getattr(lz, name)
        return lz.submit(op, *args, **fixed, **options) if submit else op(*args, **fixed, **options)

    return run


WORKS: dict[str, Work] = {
    work.op: work
    for work in (
        Work("null", lambda _: (), _op("null"), lambda: None),
        Work("silu", _rows, _op("silu"), _silu),
        Work("softmax", _rows, _op("softmax", dim=-1), _softmax),
        Work("layer_norm", _rows, _op("layer_norm", normalized_shape=64), _layer_norm),
        Work("rms_norm", _rows, _op("rms_norm", normalized_shape=64, eps=1e-5), _rms_norm),
        Work("matmul", lambda rng: (_normal(rng, 8, 32), _normal(rng, 32, 16)), _op("matmul"), _matmul),
        Work(
            "attention",
            lambda rng: tuple(_normal(rng, 1, 2, 8, 64) for _ in range(3)),
            _op("attention"),
            _attention,
        ),
        Work("weight", _weighted, _with_weight, _matmul_of, can_submit=False, parts=("matmul",)),
        Work("plan", _rows, _planned, _expected_of_plan, can_submit=False, parts=("silu", "softmax")),
        Work("tokenize", _numbers, _tokenize, lambda numbers: numbers, can_submit=False),
    )
}
