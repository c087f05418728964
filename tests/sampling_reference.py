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
