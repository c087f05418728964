"""What the ops of sampling mean, in float64 NumPy: by probabilities and their sums, not by the integers that kernels
use. As tests/reference.py, which has these too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]


def penalize_logits(
    logits: Array,
    token_ids: Array,
    repetition_penalty: Array | None = None,
    presence_penalty: Array | None = None,
    frequency_penalty: Array | None = None,
) -> F64:
    out = logits.astype(np.float64)
    rows = len(out)
    for b, ids in enumerate(token_ids):
        repetition, presence, frequency = (
            float(neutral if one is None else np.broadcast_to(one, rows)[b])
            for one, neutral in ((repetition_penalty, 1), (presence_penalty, 0), (frequency_penalty, 0))
        )
        for token, count in zip(*np.unique(ids[(ids >= 0) & (ids < out.shape[1])], return_counts=True), strict=True):
            x = out[b, token]
            out[b, token] = (x / repetition if x > 0 else x * repetition) - count * frequency - presence
    return out


def filter_logits(
    logits: Array,
    temperature: Array | None = None,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
) -> F64:
    x = logits.astype(np.float64)
    steps = np.ones(len(x)) if temperature is None else np.broadcast_to(temperature.astype(np.float64), len(x))
    kept = probabilities(logits, temperature, top_k, top_p, min_p)[1]
    with np.errstate(invalid="ignore"):
        out = np.where(kept, x / steps[:, None], -np.inf)
    for b, row in enumerate(x):
        if np.isnan(row).any() or (row == np.inf).any():
            out[b] = np.nan
    return out


def sample(
    logits: Array,
    seed: Array,
    offset: Array,
    temperature: Array | None = None,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
) -> Array:
    rows = len(logits)
    steps = np.ones(rows) if temperature is None else np.broadcast_to(temperature, rows)
    softened = np.where(steps > 0, steps, 1).astype(np.float64)
    sums = np.cumsum(probabilities(logits, softened, top_k, top_p, min_p)[0], axis=1)
    found = np.argmax(logits, axis=1)
    for b, number in enumerate(uniforms(seed, offset, rows)):
        if steps[b] > 0:
            found[b] = np.searchsorted(sums[b], number * sums[b, -1], side="right")
    return found.astype(np.int64)


def speculative_verify(
    target_probs: Array, draft_ids: Array, draft_probs: Array | None, seed: Array, offset: Array
) -> tuple[Array, Array]:
    rows, steps, vocabulary = target_probs.shape
    numbers = [uniforms(seed, offset, rows, draw) for draw in range(steps)]
    tokens, accepted = np.full((rows, steps), -1), np.zeros(rows, np.int64)
    for b in range(rows):
        n = 0
        while n < steps - 1 and 0 <= (x := draft_ids[b, n]) < vocabulary:
            q = 1.0 if draft_probs is None else float(draft_probs[b, n, x])
            if numbers[n][b] * q >= target_probs[b, n, x]:
                break
            tokens[b, n], n = x, n + 1
        accepted[b], masses = n, target_probs[b, n].astype(np.float64)
        if n < steps - 1 and 0 <= draft_ids[b, n] < vocabulary:
            of_draft = np.eye(vocabulary)[draft_ids[b, n]] if draft_probs is None else draft_probs[b, n]
            more = np.maximum(masses - of_draft, 0)
            masses = more if more.any() else masses
        if masses.any():
            sums = np.cumsum(masses)
            tokens[b, n] = np.searchsorted(sums, numbers[-1][b] * sums[-1], side="right")
    return tokens, accepted


def tree_accept(draft_ids: Array, parents: Array, target_ids: Array) -> tuple[Array, ...]:
    rows, count = draft_ids.shape
    tokens, nodes, accepted = np.full((rows, count), -1), np.full((rows, count), -1), np.zeros(rows, np.int64)
    for b in range(rows):
        path, node = [0], 0
        for n in range(1, count):  # children come after their parents, and the first that fits is taken
            if parents[b, n] == node and 0 <= draft_ids[b, n] == target_ids[b, node]:
                path.append(node := n)
        nodes[b, : len(path)], accepted[b] = path, len(path) - 1
        tokens[b, : len(path)] = [*draft_ids[b, path[1:]], target_ids[b, node]]
    return tokens, nodes, accepted


def uniforms(seed: Array, offset: Array, rows: int, draw: int = 0) -> F64:
    """Of Philox4x32-10, written for all rows at once. A seed for each row: row 0 for each."""
    keys, counts = (np.broadcast_to(one.astype(np.int64).view(np.uint64), rows) for one in (seed, offset))
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    place = np.arange(rows, dtype=np.uint64) * np.uint64(len(seed) == 1)
    x = [counts & word, counts >> shift, place, np.full(rows, draw, np.uint64)]
    key = [keys & word, keys >> shift]
    for _ in range(10):
        product = [np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]]
        high, low = [one >> shift for one in product], [one & word for one in product]
        x = [high[1] ^ x[1] ^ key[0], low[1], high[0] ^ x[3] ^ key[1], low[0]]
        key = [(key[0] + np.uint64(0x9E3779B9)) & word, (key[1] + np.uint64(0xBB67AE85)) & word]
    return ((x[1] << np.uint64(21)) | (x[0] >> np.uint64(11))).astype(np.float64) * 2.0**-53


def probabilities(
    logits: Array,
    temperature: Array | None = None,
    top_k: Array | None = None,
    top_p: Array | None = None,
    min_p: Array | None = None,
) -> tuple[F64, NDArray[np.bool_]]:
    """Of each token that may be drawn, 0 of others; and which these are: none where no logit is finite and largest."""
    found, every = np.zeros(logits.shape), np.zeros(logits.shape, bool)
    for b, row in enumerate(logits.astype(np.float64)):
        of_row = [None if one is None else float(np.broadcast_to(one, len(logits))[b]) for one in (top_k, top_p, min_p)]
        k, p, least = of_row
        if not row.size or not np.isfinite(row.max()):
            continue
        step = 1.0 if temperature is None else float(np.broadcast_to(temperature, len(logits))[b])
        mass = np.exp((row - row.max()) / step)
        kept = np.ones(len(row), bool)
        if k:
            kept &= row >= np.sort(row)[-min(int(k), len(row))]
        if p is not None and p < 1:
            total = mass[kept].sum()
            above = np.array([mass[kept & (mass > one)].sum() for one in mass])
            kept &= (above < p * total) | (mass == mass.max())
        if least:
            kept &= mass >= least
        every[b], found[b] = kept, np.where(kept, mass, 0) / mass[kept].sum()
    return found, every
