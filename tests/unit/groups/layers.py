"""Layers of transformers as functions of lz calls, and NumPy in the place of a session: what splits are tested with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import layerzero as lz
from layerzero.client.connection.call import Request
from layerzero.client.facade import default_session, running
from layerzero.client.plans.recording import Recording, Use, record
from layerzero.client.plans.traced import map_leaves
from layerzero.groups import products
from layerzero.groups.products import Product, Summed, with_products
from layerzero.groups.splitting import Collective, Split, Stretch, split
from layerzero.groups.stretches import LocalStretch, Weights

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 5, 16, 4, 2, 4, 24


def _silu(x: Any, **_: Any) -> Any:
    return x / (1 + np.exp(-x))


def _softmax(x: Any, dim: int = -1, **_: Any) -> Any:
    found = np.exp(x - x.max(dim, keepdims=True))
    return found / found.sum(dim, keepdims=True)


def _linear(x: Any, w: Any, b: Any = None, *, activation: Any = None) -> Any:
    y = x @ w.T + (0 if b is None else b)
    return _silu(y) if activation == "silu" else y


def _rms_norm(x: Any, w: Any = None, **_: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 if w is None else w)


def _rope(x: Any, cos: Any, sin: Any, **_: Any) -> Any:
    half = x.shape[-1] // 2
    a, b, c, s = x[..., :half], x[..., half:], cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def _attention(q: Any, k: Any, v: Any, mask: Any, sinks: Any, slopes: Any, *, layout: str, **_: Any) -> Any:
    assert sinks is None
    assert slopes is None
    if layout == "BSHD":
        q, k, v = (np.swapaxes(x, -2, -3) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5 + (0 if mask is None else mask)
    found = _softmax(scores) @ v
    return np.swapaxes(found, -2, -3) if layout == "BSHD" else found


def _gated_mlp(x: Any, gate_up: Any, down: Any, **_: Any) -> Any:
    gate, up = np.split(x @ gate_up.T, 2, -1)
    return (_silu(gate) * up) @ down.T


COMPUTE: dict[str, Callable[..., Any]] = {
    "linear": _linear, "matmul": lambda a, b: a @ b, "silu": _silu, "softmax": _softmax, "rms_norm": _rms_norm,
    "rope": _rope, "attention": _attention, "gated_mlp": _gated_mlp, "add": lambda a, b: a + b,
    "rope_qk": lambda q, k, *tables, **_: (_rope(q, *tables), _rope(k, *tables)),
    "swiglu": lambda gate, up: _silu(gate) * up,
}  # fmt: skip


class Session:
    """Computes calls where it is."""

    last_record: Any = None

    def run(self, request: Request) -> Any:
        self.last_record = SimpleNamespace(kernel_id="numpy", path="worker", attempts=())
        result = COMPUTE[request.op](*request.args, **request.params)
        if request.out is None:
            return result
        request.out[...] = result
        return request.out


class Unsummed:
    """Ranks whose sums are to be made later."""

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        assert out is x
        return x

    def all_gather(self, x: Any) -> Any:
        raise NotImplementedError


def recorded(function: Callable[..., Any], *args: Any) -> Recording:
    return record(Session(), function, args, {})[1]  # type: ignore[arg-type]


def ran(made: Split, items: Sequence[Stretch | Collective | Summed], *inputs: Any) -> list[Any]:
    """The result on each rank."""
    ranks = range(made.size)
    weights = [Weights(made.recording, rank, made.size) for rank in ranks]
    known = [dict(zip(made.recording.inputs, inputs, strict=True)) for _ in ranks]
    session = Session()
    token = running.handler.set(session.run)
    try:
        for item in items:
            if isinstance(item, Summed):
                with (
                    mock.patch.object(default_session, "session", return_value=session),
                    mock.patch.object(products, "_new", lambda like, dtype, shape: np.empty(shape, dtype)),
                ):
                    for rank in ranks:
                        ((op, _),) = Product(made, item, weights[rank], rank)(known[rank], Unsummed())
                        assert op in ("matmul", "linear")
            if not isinstance(item, Stretch):
                collective = item.collective if isinstance(item, Summed) else item
                for number in collective.values:
                    given = [known[rank][number] for rank in ranks]
                    met = sum(given) if collective.dim is None else np.concatenate(given, collective.dim)
                    for rank in ranks:
                        known[rank][number] = met
                continue
            for rank in ranks:
                stretch = LocalStretch(item, weights[rank], rank)
                found = stretch(*(known[rank][number] for number in item.takes))
                known[rank].update(zip(item.makes, found, strict=True))
    finally:
        running.handler.reset(token)
    return [
        map_leaves(made.recording.output, lambda leaf, k=k: k[leaf.value] if isinstance(leaf, Use) else leaf)
        for k in known
    ]


def agree(function: Callable[..., Any], size: int, *args: Any) -> Split:
    """Split, and give what it gives whole, on all ranks."""
    made = split(recorded(function, *args), size)
    token = running.handler.set(Session().run)
    try:
        expected = function(*args)
    finally:
        running.handler.reset(token)
    for items in (made.items, with_products(made)):  # as on the CPU, and on GPUs
        for result in ran(made, items, *args):
            for one, other in zip(_flat(result), _flat(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    return made


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def some(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape)


class Layer:
    """Of a Llama."""

    def __init__(self, heads: int = HEADS, kv_heads: int = KV_HEADS) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.norms = some(HIDDEN), some(1, HIDDEN)[0]
        self.q, self.k, self.v = (some(n * DIM, HIDDEN) for n in (heads, kv_heads, kv_heads))
        self.o = some(HIDDEN, heads * DIM)
        self.gate, self.up, self.down = some(INNER, HIDDEN), some(INNER, HIDDEN) + 1, some(HIDDEN, INNER)
        angles = some(TOKENS, DIM // 2)
        self.tables = np.cos(angles), np.sin(angles)

    def attention(self, x: Any) -> Any:
        h = lz.rms_norm(x, HIDDEN, self.norms[0])
        shapes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            lz.linear(h, w).reshape(1, -1, n, DIM) for w, n in zip((self.q, self.k, self.v), shapes, strict=True)
        )
        q, k = lz.rope_qk(q, k, *self.tables)
        y = lz.attention(q, k, v, is_causal=False, enable_gqa=True, layout="BSHD")
        return lz.linear(y.reshape(TOKENS, self.heads * DIM), self.o)

    def mlp(self, x: Any) -> Any:
        h = lz.rms_norm(x, HIDDEN, self.norms[1])
        return lz.linear(lz.swiglu(lz.linear(h, self.gate), lz.linear(h, self.up)), self.down)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(x)
        return x + self.mlp(x)
