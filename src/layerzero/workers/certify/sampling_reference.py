"""What the ops of sampling mean, in plain Python. As workers/certify/reference.py; docs/ops.md has the formulas."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from layerzero.ipc.vocabulary.sampling import exponential, weight_bits
from layerzero.workers.certify.values import Attrs, Values, rows_of
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


OPS: dict[str, Callable[[Sequence[Values | None], Attrs], Values]] = {
    "penalize_logits": penalize_logits,
    "filter_logits": filter_logits,
    "sample": sample,
}
