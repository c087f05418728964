"""What losses mean, in plain Python. As workers/certify/reference.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from layerzero.workers.certify.values import Attrs, Values


def cross_entropy(inputs: Sequence[Values | None], attrs: Attrs) -> Values:
    """Each prediction by itself; its classes are `inner` elements apart."""
    x, target, weight = inputs
    assert x is not None
    assert target is not None
    classes, inner = x.shape[1], math.prod(x.shape[2:])
    weights = [1.0] * classes if weight is None else weight.flat
    smoothing, losses, counted = attrs["label_smoothing"], [], []
    for number, index in enumerate(target.flat):
        first = number // inner * classes * inner + number % inner
        scores = x.flat[first : first + (classes - 1) * inner + 1 : inner]
        top = max(scores)
        total = top + math.log(sum(math.exp(score - top) for score in scores))
        if index == attrs["ignore_index"]:
            losses.append(0.0)
            continue
        own = weights[index] * (total - scores[index])
        even = sum(w * (total - score) for w, score in zip(weights, scores, strict=True)) / classes
        losses.append((1 - smoothing) * own + smoothing * even)
        counted.append(weights[index])
    if attrs["reduction"] == "none":
        return Values(target.shape, losses)
    whole = sum(losses)
    if attrs["reduction"] == "mean":
        share = sum(counted)
        whole = whole / share if share else math.nan
    return Values((), [whole])
