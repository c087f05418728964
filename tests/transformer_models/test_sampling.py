"""What is done to logits, against Transformers' own logits processors and warpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

import layerzero as lz

ROWS, VOCABULARY = 4, 1000


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def processed(scores: torch.Tensor, *processors: Any) -> torch.Tensor:
    ids = torch.zeros(ROWS, 1, dtype=torch.long)
    for processor in processors:
        scores = processor(ids, scores)
    return scores


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_k": 10**6},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.5},
    ],
    ids=str,
)
def test_filters_are_transformers_warpers(settings: dict[str, Any], backend: str) -> None:
    """Applied in the order in which generate applies them; no two logits are equal, for of ties theirs keep some."""
    warpers = {
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    expected = processed(logits(), *(warpers[name](value) for name, value in settings.items()))
    found = lz.filter_logits(logits(), **settings, backend=backend)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_repetition_penalty_is_transformers(backend: str) -> None:
    ids = torch.randint(VOCABULARY, (ROWS, 60), generator=torch.Generator().manual_seed(1))
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits())
    found = lz.penalize_logits(logits(), ids, repetition_penalty=1.3, backend=backend)
    torch.testing.assert_close(found, expected)
