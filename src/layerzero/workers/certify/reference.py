"""What each tensor op means, in plain Python: float64 arithmetic, or exact integers that the caller wraps. Norms are in
workers/certify/norm_reference.py, ops on one element after the other in elementwise_reference.py, convolutions in
vision_reference.py.

No library takes part, so a kernel in any environment can be compared with it. Tensors are flat row-major lists beside
their shapes. tests/reference.py says the same in NumPy; a test holds the two against each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import add, mul
from typing import Any

from layerzero.workers.certify import (
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
    rows_of,
)


def attention(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """softmax(cap(q k^T * scale) + mask) v; a row that sees no key is 0."""
    return attention_forward(inputs, attrs)[0]


def attention_forward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """As attention, and the log-sum-exp of each row's scores; -inf where it sees no key."""
    q, k, v = given(inputs[:3])
    wide = v.shape[3]
    out: list[float] = []
    lse: list[float] = []
    of_head, columns = None, []
    for head, _, weights, row_lse in _rows_of_weights(q, k, inputs[3:], attrs):
        if head != of_head:
            start, stop = head.start * wide, head.stop * wide
            of_head, columns = head, [v.flat[start + c : stop : wide] for c in range(wide)]
        lse.append(row_lse)
        out += [sum(map(mul, weights, column)) for column in columns] if weights else [0.0] * wide
    shape = q.shape[:3]
    return Values((*shape, wide), out), Values(shape, lse)


def attention_backward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, ...]:
    """The gradients of attention by q, k and v. Takes neither `output` nor `lse` for granted."""
    grad_out, q, k, v = given(inputs[:4])
    keys, queries = k.shape[2], q.shape[2]
    grad_q: list[float] = []
    grads_k: dict[range, list[list[float]]] = {}
    grads_v: dict[range, list[list[float]]] = {}
    rows = _rows_of_weights(q, k, (inputs[6], None, None), attrs)
    while of_head := list(itertools.islice(rows, queries)):
        head, first, *_ = of_head[0]
        weights = [found or [0.0] * keys for _, _, found, _ in of_head]
        gs, qs = ([_row(values, first + i) for i in range(queries)] for values in (grad_out, q))
        ks, vs = ([_row(values, place) for place in head] for values in (k, v))
        scores = []
        for g, row in zip(gs, weights, strict=True):
            by_weight = [sum(map(mul, g, value)) for value in vs]
            mean = sum(map(mul, row, by_weight))
            scores.append([weight * (by - mean) * attrs["scale"] for weight, by in zip(row, by_weight, strict=True)])
        grad_q += itertools.chain.from_iterable(_product(scores, ks))
        for grads, matrix, others in ((grads_k, scores, qs), (grads_v, weights, gs)):
            found = _product(list(zip(*matrix, strict=True)), others)
            known = grads.get(head)
            grads[head] = found if known is None else [list(map(add, *both)) for both in zip(known, found, strict=True)]
    found_k, found_v = ([x for rows in grads.values() for row in rows for x in row] for grads in (grads_k, grads_v))
    flat = (
        (q, grad_q or [0.0] * len(q.flat)),
        (k, found_k or [0.0] * len(k.flat)),
        (v, found_v or [0.0] * len(v.flat)),
    )
    return tuple(Values(values.shape, grad) for values, grad in flat)


def _product(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of two matrices, each as its rows."""
    columns = list(zip(*other, strict=True))
    return [[sum(map(mul, row, column)) for column in columns] for row in one]


def _rows_of_weights(
    q: Values, k: Values, beside: Sequence[Values | None], attrs: Attrs
) -> Iterator[tuple[range, int, list[float], float]]:
    """For each query: the rows of k and v that its head has, its own row, the weights of those keys, none where it sees
    nothing, and the logarithm of what they were divided by. `beside`: mask, sinks and slopes."""
    mask, sinks, slopes = beside
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    shift = keys - queries if attrs["causal_alignment"] == "bottom_right" else 0
    left, right = attrs.get("window_left", math.inf), 0 if attrs["is_causal"] else attrs.get("window_right", math.inf)
    cap = attrs.get("softcap")
    for b, h in itertools.product(range(batch), range(heads)):
        head = b * kv_heads + h // (heads // kv_heads)
        k_rows = rows_of(k.flat, dim, head * keys, keys)
        places = range(head * keys, (head + 1) * keys)
        slope = 0.0 if slopes is None else broadcast_value(slopes, (b, h))
        sink = -math.inf if sinks is None else sinks.flat[h]
        for i in range(queries):
            number = (b * heads + h) * queries + i
            row = q.flat[number * dim :][:dim]
            scores = []
            for j in range(keys):
                bias = -slope * abs(i + shift - j)
                if mask is not None:
                    value = broadcast_value(mask, (b, h, i, j))
                    bias += (0.0 if value else -math.inf) if isinstance(value, bool) else value
                if not -left <= j - (i + shift) <= right:
                    bias = -math.inf
                score = sum(map(mul, row, k_rows[j])) * attrs["scale"]
                scores.append((score if cap is None else cap * math.tanh(score / cap)) + bias)
            top = max(scores, default=-math.inf)
            if top == -math.inf:
                yield places, number, [], sink
                continue
            top = max(top, sink)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + math.exp(sink - top)
            yield places, number, [weight / total for weight in weights], top + math.log(total)


def attention_varlen(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """As attention, within each sequence."""
    q, k, v, ends_q, ends_k = given(inputs)
    heads, kv_heads = q.shape[1], k.shape[1]
    is_bottom_right = attrs["causal_alignment"] == "bottom_right"
    out: list[float] = []
    for n in range(len(ends_q.flat) - 1):
        (first_q, last_q), (first_k, last_k) = ends_q.flat[n : n + 2], ends_k.flat[n : n + 2]
        queries, keys = last_q - first_q, last_k - first_k
        shift = keys - queries if is_bottom_right else 0
        for i, h in itertools.product(range(queries), range(heads)):
            seen = min(max(i + 1 + shift, 0), keys) if attrs["is_causal"] else keys
            rows = [(first_k + j) * kv_heads + h // (heads // kv_heads) for j in range(seen)]
            out += _attended(_row(q, (first_q + i) * heads + h), k, v, rows, attrs["scale"])
    return Values((*q.shape[:2], v.shape[2]), out)


def paged_attention(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """One query a sequence, to the keys that its block table leads to."""
    q, k, v, tables, lengths = given(inputs)
    batch, heads, _ = q.shape
    page, kv_heads, wide = k.shape[1], k.shape[2], tables.shape[1]
    out: list[float] = []
    for b, h in itertools.product(range(batch), range(heads)):
        slots = [tables.flat[b * wide + j // page] * page + j % page for j in range(lengths.flat[b])]
        rows = [slot * kv_heads + h // (heads // kv_heads) for slot in slots]
        out += _attended(_row(q, b * heads + h), k, v, rows, attrs["scale"])
    return Values((batch, heads, v.shape[3]), out)


def append_kv(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, Values]:
    """The caches with the rows of key and value in their slots."""
    key, value, k_cache, v_cache, slots = given(inputs)
    made = []
    for rows, cache in ((key, k_cache), (value, v_cache)):
        flat, wide = list(cache.flat), math.prod(rows.shape[1:])
        for token, slot in enumerate(slots.flat):
            if slot >= 0:
                flat[slot * wide : (slot + 1) * wide] = rows.flat[token * wide : (token + 1) * wide]
        made.append(Values(cache.shape, flat))
    return made[0], made[1]


def rope(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Each pair (a, b) of a head's first elements becomes (a cos - b sin, b cos + a sin)."""
    x, cos, sin = given(inputs)
    _, sequence, heads, dim = x.shape
    pairs, shared = cos.shape[2], cos.shape[0] == 1
    out: list[float] = []
    for number, row in enumerate(rows_of(x.flat, dim, 0, len(x.flat) // dim if dim else 0)):
        place = number // heads % sequence if shared else number // heads
        turned = list(row)
        for i, (c, s) in enumerate(zip(_row(cos, place), _row(sin, place), strict=True)):
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
    """exp(-v) has no number of float64 for v below -709."""
    return v / (1 + math.exp(-v)) if v > -700.0 else 0.0


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
    "attention": attention,
    "attention_forward": attention_forward,
    "attention_backward": attention_backward,
    "attention_varlen": attention_varlen,
    "paged_attention": paged_attention,
    "append_kv": append_kv,
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
    "sigmoid": _each(lambda v: 1 / (1 + math.exp(-v))),
    "tanh": _each(math.tanh),
    "quick_gelu": _each(lambda v: v / (1 + math.exp(-1.702 * v))),
    "hardswish": _each(lambda v: v * min(max(v + 3, 0.0), 6.0) / 6),
    "mish": _each(lambda v: v * math.tanh(math.log1p(math.exp(v)))),
    **elementwise_reference.OPS,
    "conv": conv,
    "conv_transpose": conv_transpose,
    **vision_reference.RESIZED,
    **quantized_reference.OPS,
    "embedding": embedding,
}


def _row(values: Values, number: int) -> Sequence[Any]:
    """A row of the last dimension."""
    width = values.shape[-1]
    return values.flat[number * width : (number + 1) * width]


def _attended(query: Sequence[float], k: Values, v: Values, rows: Sequence[int], scale: float) -> list[float]:
    """The attention of one query to some rows of k and v; 0 where there are none."""
    if not rows:
        return [0.0] * v.shape[-1]
    scores = [sum(map(mul, query, _row(k, row))) * scale for row in rows]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [sum(map(mul, weights, column)) / total for column in zip(*(_row(v, row) for row in rows), strict=True)]
