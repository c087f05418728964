"""What the ops of sampling mean, in plain Python. As workers/certify/reference.py; docs/ops.md has the formulas."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from layerzero.ipc.vocabulary.sampling import exponential, weight_bits
from layerzero.workers.certify.values import Attrs, Values, given, rows_of
from layerzero.workers.philox import uniforms


def penalize_logits(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """x / r where it is above 0, else x r, less frequency times count, less presence; of tokens that are there."""
    logits, token_ids, *penalties = inputs
    assert logits is not None
    assert token_ids is not None
    (batch, vocabulary), length = logits.shape, token_ids.shape[1]
    out: list[float] = []
    for b in range(batch):
        repetition, presence, frequency = map(_of_row, penalties, (b, b, b), (1.0, 0.0, 0.0))
        row = list(logits.flat[b * vocabulary : (b + 1) * vocabulary])
        for token, count in Counter(token_ids.flat[b * length : (b + 1) * length]).items():
            if token >= 0:
                x = row[token]
                row[token] = (x / repetition if x > 0 else x * repetition) - frequency * count - presence
        out += row
    return Values(logits.shape, out)


def filter_logits(inputs: Sequence[Values | None], _: Attrs) -> Values:
    logits, *settings = inputs
    assert logits is not None
    out: list[float] = []
    for b, row in enumerate(rows_of(logits.flat, logits.shape[1], 0, logits.shape[0])):
        temperature, *filters = settings_of(settings, b)
        weights = weights_of(row, temperature, *filters)
        out += [-math.inf if weight is None else x / temperature for x, weight in zip(row, weights, strict=True)]
    return Values(logits.shape, out)


def sample(inputs: Sequence[Values | None], _: Attrs) -> Values:
    """The first token up to which weights sum to more than a share of all of them, or the first of the largest."""
    logits, seed, offset, *settings = inputs
    assert logits is not None
    assert seed is not None
    assert offset is not None
    numbers = uniforms(seed.flat, offset.flat, logits.shape[0])
    out = []
    for b, row in enumerate(rows_of(logits.flat, logits.shape[1], 0, logits.shape[0])):
        temperature, *filters = settings_of(settings, b)
        if temperature:
            weights = [weight or 0 for weight in weights_of(row, temperature, *filters)]
            sums = list(itertools.accumulate(weights))
            out.append(bisect.bisect_right(sums, numbers[b] * sums[-1]))
        else:
            out.append(row.index(max(row)))
    return Values(logits.shape[:1], out)


def speculative_verify(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, Values]:
    """The accepted drafts, and a token of what the target gives more than the draft, or of what it gives after all."""
    target, draft_ids, draft, seed, offset = inputs
    assert target is not None
    assert draft_ids is not None
    assert seed is not None
    assert offset is not None
    rows, steps, vocabulary = target.shape
    numbers = [uniforms(seed.flat, offset.flat, rows, draw) for draw in range(steps)]
    tokens: list[int] = []
    counts: list[int] = []
    for b in range(rows):
        p = rows_of(target.flat, vocabulary, b * steps, steps)
        q = None if draft is None else rows_of(draft.flat, vocabulary, b * (steps - 1), steps - 1)
        found: list[int] = []
        masses = p[-1]
        for n, x in enumerate(draft_ids.flat[b * (steps - 1) : (b + 1) * (steps - 1)]):
            masses = p[n]
            if x < 0:
                break
            of_draft = [float(token == x) for token in range(vocabulary)] if q is None else q[n]
            if numbers[n][b] * of_draft[x] >= p[n][x]:
                more = [max(one - other, 0.0) for one, other in zip(p[n], of_draft, strict=True)]
                masses = more if any(more) else masses
                break
            found.append(x)
            masses = p[n + 1]
        counts.append(len(found))
        found.append(_drawn(masses, numbers[-1][b]))
        tokens += found + [-1] * (steps - len(found))
    return Values((rows, steps), tokens), Values((rows,), counts)


def _drawn(masses: Sequence[float], number: float) -> int:
    """A token in proportion to masses, as integers of at most 2^s; -1 where there is none."""
    top = max(masses)
    if not top:
        return -1
    sums = list(itertools.accumulate(math.floor(one / top * 2 ** weight_bits(len(masses))) for one in masses))
    return bisect.bisect_right(sums, number * sums[-1])


def tree_accept(inputs: Sequence[Values | None], _: Attrs) -> tuple[Values, ...]:
    """From node 0 on to the first child with the target's token, while there is one."""
    rows, count = given(inputs)[0].shape
    tokens: list[int] = []
    nodes: list[int] = []
    counts: list[int] = []
    for drafts, above, wanted in zip(*(rows_of(one.flat, count, 0, rows) for one in given(inputs)), strict=True):
        path = [0]
        while True:
            last = path[-1]
            fit = (n for n in range(last + 1, count) if above[n] == last and 0 <= drafts[n] == wanted[last])
            following = next(fit, None)
            if following is None:
                break
            path.append(following)
        padding = [-1] * (count - len(path))
        tokens += [*(drafts[n] for n in path[1:]), wanted[path[-1]], *padding]
        nodes += path + padding
        counts.append(len(path) - 1)
    return Values((rows, count), tokens), Values((rows, count), nodes), Values((rows,), counts)


def settings_of(settings: Sequence[Values | None], row: int) -> list[float]:
    """Of temperature, top_k, top_p and min_p what holds for a row."""
    return [_of_row(one, row, neutral) for one, neutral in zip(settings, (1.0, 0, 1.0, 0.0), strict=True)]


def weights_of(row: Sequence[float], temperature: float, top_k: float, top_p: float, min_p: float) -> list[int | None]:
    """Of each token of a row, None for those that are removed."""
    top = max(row)
    shares = [exponential((x - top) / temperature) for x in row]
    weights: list[int | None] = [math.floor(share * 2 ** weight_bits(len(row))) for share in shares]
    if top_k:
        least = sorted(row, reverse=True)[min(int(top_k), len(row)) - 1]
        weights = [weight if x >= least else None for x, weight in zip(row, weights, strict=True)]
    if top_p < 1:
        counts = Counter(weight for weight in weights if weight is not None)
        total, before, lowest = sum(weight * count for weight, count in counts.items()), 0, max(counts)
        for weight, count in sorted(counts.items(), reverse=True):
            if before >= top_p * total:
                break
            lowest, before = weight, before + weight * count
        weights = [weight if weight is not None and weight >= lowest else None for weight in weights]
    return [weight if share >= min_p else None for share, weight in zip(shares, weights, strict=True)]


def _of_row(setting: Values | None, row: int, neutral: float) -> float:
    if setting is None:
        return neutral
    return float(setting.flat[row % len(setting.flat)])


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values | tuple[Values, ...]]] = {
    "penalize_logits": penalize_logits,
    "filter_logits": filter_logits,
    "sample": sample,
    "speculative_verify": speculative_verify,
    "tree_accept": tree_accept,
}
