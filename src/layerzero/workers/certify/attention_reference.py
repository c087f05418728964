"""What attention means, and caches of keys and values. As workers/certify/reference.py, which has all ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from operator import add, mul

from layerzero.workers.certify.quantized_reference import quantized
from layerzero.workers.certify.values import Attrs, Shape, Values, broadcast_value, given, row_of, rows_of


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
        gs, qs = ([row_of(values, first + i) for i in range(queries)] for values in (grad_out, q))
        ks, vs = ([row_of(values, place) for place in head] for values in (k, v))
        scores = []
        for g, of_row in zip(gs, weights, strict=True):
            by_weight = [sum(map(mul, g, value)) for value in vs]
            mean = sum(map(mul, of_row, by_weight))
            scores.append([weight * (by - mean) * attrs["scale"] for weight, by in zip(of_row, by_weight, strict=True)])
        grad_q += itertools.chain.from_iterable(_product(scores, ks))
        for grads, matrix, others in ((grads_k, scores, qs), (grads_v, weights, gs)):
            found = _product(list(zip(*matrix, strict=True)), others)
            known = grads.get(head)
            grads[head] = found if known is None else [list(map(add, *both)) for both in zip(known, found, strict=True)]
    found_k, found_v = ([x for rows in grads.values() for line in rows for x in line] for grads in (grads_k, grads_v))
    flat = (
        (q, grad_q or [0.0] * len(q.flat)),
        (k, found_k or [0.0] * len(k.flat)),
        (v, found_v or [0.0] * len(v.flat)),
    )
    return tuple(Values(values.shape, grad) for values, grad in flat)


def _product(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of two matrices, each as its rows."""
    columns = list(zip(*other, strict=True))
    return [[sum(map(mul, line, column)) for column in columns] for line in one]


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
    cap, of_rows, of_keys = attrs.get("softcap"), attrs.get("mask_block_q", 1), attrs.get("mask_block_k", 1)
    for b, h in itertools.product(range(batch), range(heads)):
        head = b * kv_heads + h // (heads // kv_heads)
        k_rows = rows_of(k.flat, dim, head * keys, keys)
        places = range(head * keys, (head + 1) * keys)
        slope = 0.0 if slopes is None else broadcast_value(slopes, (b, h))
        sink = -math.inf if sinks is None else sinks.flat[h]
        for i in range(queries):
            number = (b * heads + h) * queries + i
            query = q.flat[number * dim :][:dim]
            scores = []
            for j in range(keys):
                bias = -slope * abs(i + shift - j)
                if mask is not None:
                    value = broadcast_value(mask, (b, h, i // of_rows, j // of_keys))
                    bias += (0.0 if value else -math.inf) if isinstance(value, bool) else value
                if not -left <= j - (i + shift) <= right:
                    bias = -math.inf
                score = sum(map(mul, query, k_rows[j])) * attrs["scale"]
                scores.append((score if cap is None else cap * math.tanh(score / cap)) + bias)
            top = max(scores, default=-math.inf)
            if top == -math.inf:
                yield places, number, [], sink
                continue
            top = max(top, sink)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + math.exp(sink - top)
            yield places, number, [weight / total for weight in weights], top + math.log(total)


def merge_attention(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, Values]:
    """Each row of each part by its share of the sum of exponentials; a row of lse -inf has none."""
    parts = [values for values in inputs if values is not None]
    outs, sums = parts[::2], [values.flat for values in parts[1::2]]
    wide = outs[0].shape[-1]
    made: list[float] = []
    lse: list[float] = []
    for number, of_row in enumerate(zip(*sums, strict=True)):
        top = max(of_row)
        weights = [math.exp(one - top) if one > -math.inf else 0.0 for one in of_row]
        total = sum(weights)
        lse.append(top + math.log(total) if total else -math.inf)
        found = [0.0] * wide
        for out, weight in zip(outs, weights, strict=True):
            if weight:
                found = [x + weight / total * y for x, y in zip(found, row_of(out, number), strict=True)]
        made += found
    return Values(outs[0].shape, made), Values(outs[0].shape[:-1], lse)


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
            out += _attended(row_of(q, (first_q + i) * heads + h), k, v, rows, attrs["scale"])
    return Values((*q.shape[:2], v.shape[2]), out)


def paged_attention(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """One query a sequence, to the keys that its block table leads to."""
    q, k, v, tables, lengths = given(inputs[:5])
    k, v = (_scaled(*both) for both in zip((k, v), inputs[5:], strict=True))
    batch, heads, _ = q.shape
    page, kv_heads, wide = k.shape[1], k.shape[2], tables.shape[1]
    out: list[float] = []
    for b, h in itertools.product(range(batch), range(heads)):
        slots = [tables.flat[b * wide + j // page] * page + j % page for j in range(lengths.flat[b])]
        rows = [slot * kv_heads + h // (heads // kv_heads) for slot in slots]
        out += _attended(row_of(q, b * heads + h), k, v, rows, attrs["scale"])
    return Values((batch, heads, v.shape[3]), out)


def attention_varlen_forward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """As attention_forward, within each sequence."""
    q, k, v, ends_q, ends_k = given(inputs[:5])
    sinks, slopes = inputs[5:]
    parts = []
    for n in range(len(ends_q.flat) - 1):
        (first_q, last_q), (first_k, last_k) = ends_q.flat[n : n + 2], ends_k.flat[n : n + 2]
        places = range(first_q, last_q), range(first_k, last_k)
        parts.append(_of_sequence(n, (q, k, v), places, sinks, slopes, attrs))
    return _joined(parts, (*q.shape[:2], v.shape[2]))


def paged_attention_forward(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """As attention_forward, of the queries of each sequence to the keys that its block table leads to; the last query's
    own key is the last one."""
    q, k, v, tables, lengths = given(inputs[:5])
    ends, sinks, slopes, *scales = inputs[5:]
    k, v = (_scaled(*both) for both in zip((k, v), scales, strict=True))
    page, wide = k.shape[1], tables.shape[1]
    k, v = (Values((math.prod(cache.shape[:2]), *cache.shape[2:]), cache.flat) for cache in (k, v))
    starts = range(len(lengths.flat) + 1) if ends is None else ends.flat
    parts = []
    for b, length in enumerate(lengths.flat):
        slots = [tables.flat[b * wide + j // page] * page + j % page for j in range(length)]
        places = range(starts[b], starts[b + 1]), slots
        parts.append(_of_sequence(b, (q, k, v), places, sinks, slopes, {**attrs, "causal_alignment": "bottom_right"}))
    return _joined(parts, (*q.shape[:2], v.shape[2]))


def mla_decode(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """Attention to keys of one head, the latent vectors beside the rotated keys; the values are the former."""
    q_nope, q_pe, ckv, kpe, tables, lengths = given(inputs)
    q = _side_by_side(q_nope, q_pe)
    caches = [Values((*one.shape[:2], 1, one.shape[2]), one.flat) for one in (_side_by_side(ckv, kpe), ckv)]
    return paged_attention_forward([q, *caches, tables, lengths, *[None] * 5], {**attrs, "is_causal": False})


def _side_by_side(one: Values, other: Values) -> Values:
    count, wide = math.prod(one.shape[:-1]), one.shape[-1] + other.shape[-1]
    flat = [x for number in range(count) for part in (one, other) for x in row_of(part, number)]
    return Values((*one.shape[:-1], wide), flat)


def _of_sequence(
    number: int,
    tensors: Sequence[Values],
    places: tuple[Sequence[int], Sequence[int]],
    sinks: Values | None,
    slopes: Values | None,
    attrs: Attrs,
) -> tuple[Values, Values]:
    """attention_forward of some tokens of q, and of k and v, each (tokens, heads, extent)."""
    heads = []
    for values, tokens in zip(tensors, (places[0], places[1], places[1]), strict=True):
        count = values.shape[1]
        flat = [x for h in range(count) for token in tokens for x in row_of(values, token * count + h)]
        heads.append(Values((1, count, len(tokens), values.shape[2]), flat))
    if slopes is not None and slopes.shape[0] > 1:
        slopes = Values((1, slopes.shape[1]), row_of(slopes, number))
    return attention_forward([*heads, None, sinks, slopes], attrs)


def _joined(parts: Sequence[tuple[Values, Values]], shape: Shape) -> tuple[Values, Values]:
    """Results of sequences, (1, heads, queries, extent), as tokens one after the other, and their log-sum-exp."""
    out: list[float] = []
    lse: list[float] = []
    for found, sums in parts:
        _, heads, queries, _ = found.shape
        for i, h in itertools.product(range(queries), range(heads)):
            out += row_of(found, h * queries + i)
            lse.append(sums.flat[h * queries + i])
    return Values(shape, out), Values(shape[:2], lse)


def _scaled(cache: Values, scale: Values | None) -> Values:
    """What the numbers of a cache, or of rows of it, stand for."""
    if scale is None:
        return cache
    heads, wide = cache.shape[-2:]
    steps = [step for head in range(heads) for step in [_of_head(scale, head)] * wide]
    return Values(cache.shape, list(map(mul, cache.flat, itertools.cycle(steps)))) if cache.flat else cache


def _of_head(scale: Values, head: int) -> float:
    return float(scale.flat[head if len(scale.flat) > 1 else 0])


def append_kv(inputs: Sequence[Values | None], attrs: Attrs) -> tuple[Values, Values]:
    """The caches with the rows of key and value in their slots; with scales what quantize makes of each head's.
    `kinds`: the dtypes of the inputs."""
    key, value, k_cache, v_cache, slots = given(inputs[:5])
    made = []
    for tokens, cache, scale in ((key, k_cache, inputs[5]), (value, v_cache, inputs[6])):
        rows = tokens if scale is None else _in_eight_bits(tokens, scale, attrs["kinds"][2])
        flat, wide = list(cache.flat), math.prod(rows.shape[1:])
        for token, slot in enumerate(slots.flat):
            if slot >= 0:
                flat[slot * wide : (slot + 1) * wide] = rows.flat[token * wide : (token + 1) * wide]
        made.append(Values(cache.shape, flat))
    return made[0], made[1]


def _in_eight_bits(rows: Values, scale: Values, dtype: str) -> Values:
    heads, dim = rows.shape[1:]
    steps = [_of_head(scale, head) for head in range(heads)]
    return Values(rows.shape, [quantized(x, steps[n // dim % heads], 0, dtype) for n, x in enumerate(rows.flat)])


def gather_kv(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, Values]:
    """The rows of the caches that are in these slots, 0 for a negative one."""
    *caches, slots = given(inputs[:3])
    made = []
    for cache, scale in zip(caches, inputs[3:], strict=True):
        wide = math.prod(cache.shape[2:])
        flat = [x for slot in slots.flat for x in (cache.flat[slot * wide :][:wide] if slot >= 0 else [0] * wide)]
        made.append(_scaled(Values((*slots.shape, *cache.shape[2:]), flat), scale))
    return made[0], made[1]


def copy_kv_blocks(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, Values]:
    """The caches with blocks in the places of others."""
    *caches, sources, targets = given(inputs)
    made = []
    for cache in caches:
        flat, wide = list(cache.flat), math.prod(cache.shape[1:])
        for source, target in zip(sources.flat, targets.flat, strict=True):
            if min(source, target) >= 0:
                flat[target * wide : (target + 1) * wide] = cache.flat[source * wide : (source + 1) * wide]
        made.append(Values(cache.shape, flat))
    return made[0], made[1]


def _attended(query: Sequence[float], k: Values, v: Values, rows: Sequence[int], scale: float) -> list[float]:
    """The attention of one query to some rows of k and v; 0 where there are none."""
    if not rows:
        return [0.0] * v.shape[-1]
    scores = [sum(map(mul, query, row_of(k, place))) * scale for place in rows]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [
        sum(map(mul, weights, column)) / total for column in zip(*(row_of(v, place) for place in rows), strict=True)
    ]


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values | tuple[Values, ...]]] = {
    "attention": attention,
    "attention_forward": attention_forward,
    "attention_backward": attention_backward,
    "merge_attention": merge_attention,
    "attention_varlen": attention_varlen,
    "attention_varlen_forward": attention_varlen_forward,
    "paged_attention": paged_attention,
    "paged_attention_forward": paged_attention_forward,
    "mla_decode": mla_decode,
    "append_kv": append_kv,
    "gather_kv": gather_kv,
    "copy_kv_blocks": copy_kv_blocks,
}
