"""What each tensor op means, in plain Python: float64 arithmetic, or exact integers that the caller wraps.

No library takes part, so a kernel in any environment can be compared with it. Tensors are flat row-major lists beside
their shapes. tests/reference.py says the same in NumPy; a test holds the two against each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Values:
    """A tensor: its shape and its elements in row-major order."""

    shape: Shape
    flat: Sequence[Any]


Attrs = Mapping[str, Any]


def attention(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """softmax(q k^T * scale + mask) v; a row that sees no key is 0."""
    q, k, v = _given(inputs[:3])
    mask = inputs[3]
    batch, heads, queries, dim = q.shape
    kv_heads, keys, wide = k.shape[1], k.shape[2], v.shape[3]
    shift = keys - queries if attrs["causal_alignment"] == "bottom_right" else 0
    out: list[float] = []
    for b, h in itertools.product(range(batch), range(heads)):
        head = b * kv_heads + h // (heads // kv_heads)
        k_rows = _rows(k.flat, dim, head * keys, keys)
        v_columns = [v.flat[head * keys * wide + c : (head + 1) * keys * wide : wide] for c in range(wide)]
        for i in range(queries):
            row = q.flat[((b * heads + h) * queries + i) * dim :][:dim]
            scores = []
            for j in range(keys):
                bias = 0.0
                if mask is not None:
                    bias = _broadcast(mask, (b, h, i, j))
                    bias = (0.0 if bias else -math.inf) if isinstance(bias, bool) else bias
                if attrs["is_causal"] and j > i + shift:
                    bias = -math.inf
                scores.append(sum(map(mul, row, k_rows[j])) * attrs["scale"] + bias)
            top = max(scores, default=-math.inf)
            if top == -math.inf:
                out += [0.0] * wide
                continue
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights)
            out += [sum(map(mul, weights, column)) / total for column in v_columns]
    return Values((batch, heads, queries, wide), out)


def matmul(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """a @ b with broadcast leading dimensions."""
    a, b = _given(inputs)
    (m, n), inner = a.shape[-2:], b.shape[-1]
    lead = _broadcast_shape(a.shape[:-2], b.shape[:-2])
    out: list[Any] = []
    for index in itertools.product(*map(range, lead)):
        a_rows = _rows(a.flat, n, _offset(a.shape[:-2], index) * m, m)
        start = _offset(b.shape[:-2], index) * n * inner
        b_columns = [b.flat[start + c : start + n * inner : inner] for c in range(inner)]
        out += [sum(map(mul, row, column)) for row in a_rows for column in b_columns]
    return Values((*lead, m, inner), out)


def linear(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """x @ weight^T + bias."""
    x, weight = _given(inputs[:2])
    bias = inputs[2]
    n, k = weight.shape
    w_rows = _rows(weight.flat, k, 0, n)
    rows = math.prod(x.shape[:-1])
    added: Sequence[Any] = [0] * n if bias is None else bias.flat
    out = [
        sum(map(mul, row, w)) + more for row in _rows(x.flat, k, 0, rows) for w, more in zip(w_rows, added, strict=True)
    ]
    return Values((*x.shape[:-1], n), out)


def softmax(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = _given(inputs)
    dim = attrs["dim"]
    extent, step = x.shape[dim], math.prod(x.shape[dim + 1 :])
    out = [0.0] * len(x.flat)
    for start in range(len(x.flat)):
        if (start // step) % extent:
            continue  # not the first of its line
        line = slice(start, start + extent * step, step)
        powers = [math.exp(value - max(x.flat[line])) for value in x.flat[line]]
        out[line] = [power / sum(powers) for power in powers]
    return Values(x.shape, out)


def layer_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def normalize(row: Sequence[float]) -> list[float]:
        mean = math.fsum(row) / len(row)
        variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
        return [(value - mean) / math.sqrt(variance + attrs["eps"]) for value in row]

    return _normalized(inputs, attrs, normalize)


def rms_norm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def normalize(row: Sequence[float]) -> list[float]:
        mean_square = math.fsum(value * value for value in row) / len(row)
        return [value / math.sqrt(mean_square + attrs["eps"]) for value in row]

    return _normalized(inputs, attrs, normalize)


def gelu(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = _given(inputs)
    if attrs["approximate"] == "tanh":
        c = math.sqrt(2 / math.pi)
        return Values(x.shape, [v / 2 * (1 + math.tanh(c * (v + 0.044715 * v**3))) for v in x.flat])
    return Values(x.shape, [v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.flat])


def silu(inputs: Sequence[Values | None], _: Attrs) -> Values:
    (x,) = _given(inputs)
    return Values(x.shape, [v / (1 + math.exp(-v)) for v in x.flat])


def embedding(inputs: Sequence[Values | None], _: Attrs) -> Values:
    ids, weight = _given(inputs)
    wide = weight.shape[1]
    out = [value for i in ids.flat for value in weight.flat[i * wide : (i + 1) * wide]]
    return Values((*ids.shape, wide), out)


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values]] = {
    "attention": attention,
    "matmul": matmul,
    "linear": linear,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu": gelu,
    "silu": silu,
    "embedding": embedding,
}


def _given(inputs: Sequence[Values | None]) -> list[Values]:
    return [values for values in inputs if values is not None]


def _rows(flat: Sequence[Any], width: int, first: int, count: int) -> list[Sequence[Any]]:
    return [flat[(first + i) * width : (first + i + 1) * width] for i in range(count)]


def _normalized(
    inputs: Sequence[Values | None], attrs: Attrs, normalize: Callable[[Sequence[float]], list[float]]
) -> Values:
    x, weight, bias = (*inputs, None, None)[:3]
    assert x is not None
    width = math.prod(x.shape[len(x.shape) - attrs["ndim"] :])
    out: list[float] = []
    for row in _rows(x.flat, width, 0, math.prod(x.shape) // width if width else 0):
        values = normalize(row)
        values = values if weight is None else list(map(mul, values, weight.flat))
        out += values if bias is None else [value + more for value, more in zip(values, bias.flat, strict=True)]
    return Values(x.shape, out)


def _broadcast_shape(one: Shape, other: Shape) -> Shape:
    pairs = itertools.zip_longest(reversed(one), reversed(other), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


def _offset(shape: Shape, index: Sequence[int]) -> int:
    """The flat position of a broadcast index; extra leading dimensions of the index do not count."""
    place = 0
    for extent, i in zip(shape, index[len(index) - len(shape) :], strict=True):
        place = place * extent + (0 if extent == 1 else i)
    return place


def _broadcast(values: Values, index: Sequence[int]) -> Any:
    return values.flat[_offset(values.shape, index)]
