"""What products by groups and mixtures of experts mean, in float64 NumPy: token by token, without sorting. As
tests/reference.py, which has these too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]


def grouped_linear(x: Array, weight: Array, offsets: Array, bias: Array | None = None) -> F64:
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    starts = np.concatenate(([0], offsets))[:-1] if len(offsets) else offsets
    out = np.zeros((len(x), weight.shape[1]))
    for g, (start, end) in enumerate(zip(starts, offsets, strict=True)):
        out[start:end] = x[start:end] @ weight[g].T + (0 if bias is None else bias[g].astype(np.float64))
    return out


def route(
    logits: Array,
    correction_bias: Array | None = None,
    *,
    top_k: int,
    scoring: str,
    normalize: bool,
    num_groups: int,
    top_groups: int,
    group_score: str,
    scale: float,
) -> tuple[F64, NDArray[np.int64]]:
    """The steps of DeepSeek-V3's own MoEGate, of which the others are cases."""
    x = logits.astype(np.float64)
    powers = np.exp(x - x.max(1, keepdims=True, initial=-np.inf))
    scores = powers / powers.sum(1, keepdims=True) if scoring == "softmax" else 1 / (1 + np.exp(-x))
    by = scores + (0 if correction_bias is None else correction_bias.astype(np.float64))
    groups = np.sort(by.reshape(len(x), num_groups, x.shape[1] // num_groups), -1)[..., ::-1]
    best = groups[..., : 2 if group_score == "top2" else 1].sum(-1)
    kept = np.argsort(-best, 1, kind="stable")[:, :top_groups]
    mask = (kept[:, :, None] == np.arange(num_groups)).any(1).repeat(x.shape[1] // num_groups, 1)
    by = x if correction_bias is None else by  # which has the order of exact scores
    ids = np.argsort(np.where(mask, -by, np.inf), 1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, 1)
    return (weights / weights.sum(1, keepdims=True) if normalize else weights) * scale, ids


def permute(x: Array, ids: Array, *, num_experts: int) -> tuple[F64, NDArray[np.int64], NDArray[np.int32]]:
    flat = ids.reshape(-1)
    order = np.concatenate([np.flatnonzero(flat == e) for e in range(num_experts)] + [np.flatnonzero(flat < 0)])
    ends = np.cumsum([np.count_nonzero(flat == e) for e in range(num_experts)])
    return x.astype(np.float64)[order // max(ids.shape[1], 1)], order.astype(np.int64), ends.astype(np.int32)


def combine(rows: Array, order: Array, weights: Array) -> F64:
    out = np.zeros((len(weights), rows.shape[1]))
    np.add.at(out, order // max(weights.shape[1], 1), rows.astype(np.float64) * weights.reshape(-1)[order][:, None])
    return out


def moe_mlp(
    x: Array,
    gate_up: Array,
    down: Array,
    ids: Array,
    weights: Array,
    *,
    activation: str,
    expert: Callable[..., Any],
) -> F64:
    """`expert`: gated_mlp."""
    out = np.zeros((len(x), down.shape[1]))
    for token, (row, chosen, shares) in enumerate(zip(x, ids, weights.astype(np.float64), strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            if e >= 0:
                out[token] += share * expert(row[None], gate_up[e], down[e], activation=activation)[0]
    return out
