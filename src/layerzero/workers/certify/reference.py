"""What each tensor op means, in plain Python: float64 arithmetic, or exact integers that the caller wraps. Attention is
in workers/certify/attention_reference.py, norms in norm_reference.py, ops on one element after the other in
elementwise_reference.py, convolutions in vision_reference.py.

No library takes part, so a kernel in any environment can be compared with it. Tensors are flat row-major lists beside
their shapes. tests/reference.py says the same in NumPy; a test holds the two against each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

from layerzero.workers.certify import (
    attention_reference,
    elementwise_reference,
    expert_reference,
    loss_reference,
    norm_reference,
    quantized_reference,
    sampling_reference,
    vision_reference,
)
from layerzero.workers.certify.values import (
    Attrs,
    Values,
    broadcast_shape,
    broadcast_value,
    given,
    offset,
    row_of,
    rows_of,
)


def rope(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Each pair (a, b) of a head's first elements becomes (a cos - b sin, b cos + a sin)."""
    x, cos, sin = given(inputs)
    _, sequence, heads, dim = x.shape
    pairs, shared = cos.shape[2], cos.shape[0] == 1
    out: list[float] = []
    for number, row in enumerate(rows_of(x.flat, dim, 0, len(x.flat) // dim if dim else 0)):
        place = number // heads % sequence if shared else number // heads
        turned = list(row)
        for i, (c, s) in enumerate(zip(row_of(cos, place), row_of(sin, place), strict=True)):
            one, other = (2 * i, 2 * i + 1) if attrs["interleaved"] else (i, i + pairs)
            a, b = row[one], row[other]
            turned[one], turned[other] = a * c - b * s, b * c + a * s
        out += turned
    return Values(x.shape, out)


def rope_qk(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """rope, twice."""
    q, k, *tables = inputs
    return rope([q, *tables], attrs), rope([k, *tables], attrs)


def matmul(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """a @ b with broadcast leading dimensions."""
    a, b = given(inputs)
    (m, n), inner = a.shape[-2:], b.shape[-1]
    lead = broadcast_shape(a.shape[:-2], b.shape[:-2])
    out: list[Any] = []
    for index in itertools.product(*map(range, lead)):
        a_rows = rows_of(a.flat, n, offset(a.shape[:-2], index) * m, m)
        start = offset(b.shape[:-2], index) * n * inner
        b_columns = [b.flat[start + c : start + n * inner : inner] for c in range(inner)]
        out += [sum(map(mul, row, column)) for row in a_rows for column in b_columns]
    return Values((*lead, m, inner), out)


def addmm(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """beta * x + alpha * a @ b."""
    x, a, b = given(inputs)
    made, beta = matmul([a, b], {}), attrs["beta"]
    columns = made.shape[1]
    added = [beta * broadcast_value(x, divmod(n, columns)) if beta else 0.0 for n in range(len(made.flat))]
    return Values(made.shape, [attrs["alpha"] * v + more for v, more in zip(made.flat, added, strict=True)])


def linear(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """x @ weight^T + bias, and the activation of that."""
    x, weight = given(inputs[:2])
    bias = inputs[2]
    n, k = weight.shape
    w_rows = rows_of(weight.flat, k, 0, n)
    rows = math.prod(x.shape[:-1])
    added: Sequence[Any] = [0] * n if bias is None else bias.flat
    x_rows = rows_of(x.flat, k, 0, rows)
    out = [sum(map(mul, row, w)) + more for row in x_rows for w, more in zip(w_rows, added, strict=True)]
    return _activated(Values((*x.shape[:-1], n), out), attrs)


def _activated(made: Values, attrs: Attrs) -> Values:
    """Through the activation, if there is one."""
    if not attrs.get("activation"):
        return made
    op, _, approximate = attrs["activation"].partition("_")
    return _one(OPS[op]([made], {"approximate": approximate or "none"}))


def conv(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    return _activated(vision_reference.conv(inputs, attrs), attrs)


def conv_transpose(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    return _activated(vision_reference.conv_transpose(inputs, attrs), attrs)


def gated_mlp(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Gates are the first half of what gate_up makes of each row."""
    x, gate_up, down = given(inputs)
    made, half = linear([x, gate_up, None], {"activation": ""}), down.shape[1]
    rows = rows_of(made.flat, 2 * half, 0, math.prod(x.shape[:-1]))
    gates = Values((len(rows), half), [v for row in rows for v in row[:half]])
    others = [v for row in rows for v in row[half:]]
    op, _, approximate = attrs["activation"].partition("_")
    opened = _one(OPS[op]([gates], {"approximate": approximate or "none"}))
    hidden = Values((*x.shape[:-1], half), list(map(mul, opened.flat, others)))
    return linear([hidden, down, None], {"activation": ""})


def moe_mlp(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Of each token the weighted sum of what its experts make of it."""
    x, gate_up, down, ids, weights = given(inputs)
    each, features = ids.shape[1], down.shape[1]
    out = []
    for token, row in enumerate(rows_of(x.flat, x.shape[1], 0, x.shape[0])):
        total = [0.0] * features
        for place in range(token * each, (token + 1) * each):
            if ids.flat[place] >= 0:
                of = [expert_reference.page(w, ids.flat[place]) for w in (gate_up, down)]
                made = gated_mlp([Values((1, len(row)), row), *of], attrs).flat
                total = [a + weights.flat[place] * b for a, b in zip(total, made, strict=True)]
        out += total
    return Values((x.shape[0], features), out)


def _one(made: Values | tuple[Values, ...]) -> Values:
    assert isinstance(made, Values)
    return made


def softmax(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def of_line(values: Sequence[float]) -> list[float]:
        top = max(values)
        powers = [math.exp(value - top) for value in values]
        total = sum(powers)
        return [power / total for power in powers]

    return _by_lines(inputs, attrs["dim"], of_line)


def log_softmax(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    def of_line(values: Sequence[float]) -> list[float]:
        top = max(values)
        total = math.log(sum(math.exp(value - top) for value in values))
        return [value - top - total for value in values]

    return _by_lines(inputs, attrs["dim"], of_line)


def _by_lines(inputs: Sequence[Values | None], dim: int, of_line: Callable[[Sequence[float]], list[float]]) -> Values:
    """Of each line of a dimension."""
    (x,) = given(inputs)
    extent, step = x.shape[dim], math.prod(x.shape[dim + 1 :])
    out = [0.0] * len(x.flat)
    for start in range(len(x.flat)):
        if (start // step) % extent:
            continue  # not the first of its line
        line = slice(start, start + extent * step, step)
        out[line] = of_line(x.flat[line])
    return Values(x.shape, out)


def gelu(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    (x,) = given(inputs)
    if attrs["approximate"] == "tanh":
        c = math.sqrt(2 / math.pi)
        return Values(x.shape, [v / 2 * (1 + math.tanh(c * (v + 0.044715 * v**3))) for v in x.flat])
    return Values(x.shape, [v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.flat])


def silu(inputs: Sequence[Values | None], _: Attrs) -> Values:
    (x,) = given(inputs)
    return Values(x.shape, [_silu(v) for v in x.flat])


def swiglu(inputs: Sequence[Values | None], _: Attrs) -> Values:
    gate, up = given(inputs)
    return Values(gate.shape, [_silu(v) * w for v, w in zip(gate.flat, up.flat, strict=True)])


def _silu(v: float) -> float:
    """NaN of NaN, and of -infinity, which is multiplied by 0, as in libraries."""
    return v * _sigmoid(v)


def _sigmoid(v: float) -> float:
    """exp(-v) has no number of float64 for v below -709."""
    return 0.0 if v < -700.0 else 1 / (1 + math.exp(-v))


def _each(function: Callable[[float], float]) -> Callable[[Sequence[Values | None], Attrs], Values]:
    """Of each element."""

    def op(inputs: Sequence[Values | None], _: Attrs) -> Values:
        (x,) = given(inputs)
        return Values(x.shape, [function(v) for v in x.flat])

    return op


def geglu(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    gate, up = given(inputs)
    return Values(gate.shape, list(map(mul, gelu([gate], attrs).flat, up.flat)))


def reglu(inputs: Sequence[Values | None], _: Attrs) -> Values:
    gate, up = given(inputs)
    return Values(gate.shape, [max(v, 0.0) * w for v, w in zip(gate.flat, up.flat, strict=True)])


def embedding(inputs: Sequence[Values | None], _: Attrs) -> Values:
    ids, weight = given(inputs)
    wide = weight.shape[1]
    out = [value for i in ids.flat for value in weight.flat[i * wide : (i + 1) * wide]]
    return Values((*ids.shape, wide), out)


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values | tuple[Values, ...]]] = {
    **attention_reference.OPS,
    "rope": rope,
    "rope_qk": rope_qk,
    "matmul": matmul,
    "addmm": addmm,
    "linear": linear,
    "gated_mlp": gated_mlp,
    "grouped_linear": expert_reference.grouped_linear,
    "moe_route": expert_reference.route,
    "moe_permute": expert_reference.permute,
    "moe_combine": expert_reference.combine,
    "moe_mlp": moe_mlp,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "cross_entropy": loss_reference.cross_entropy,
    **norm_reference.OPS,
    "group_norm": lambda inputs, attrs: _activated(norm_reference.group_norm(inputs, attrs), attrs),
    **sampling_reference.OPS,
    "gelu": gelu,
    "silu": silu,
    "swiglu": swiglu,
    "geglu": geglu,
    "reglu": reglu,
    "relu": _each(lambda v: max(v, 0.0)),
    "sigmoid": _each(_sigmoid),
    "tanh": _each(math.tanh),
    "quick_gelu": _each(lambda v: v * _sigmoid(1.702 * v)),
    "hardswish": _each(lambda v: v * min(max(v + 3, 0.0), 6.0) / 6),
    "mish": _each(lambda v: v * math.tanh(math.log1p(math.exp(v)))),
    **elementwise_reference.OPS,
    "conv": conv,
    "conv_transpose": conv_transpose,
    **vision_reference.RESIZED,
    **quantized_reference.OPS,
    "embedding": embedding,
}
