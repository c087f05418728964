"""Architectures of Transformers by LayerZero: the logits of their own formula, and the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.transformer_models import comparing
from tests.transformer_models.architectures import ARCHITECTURES, NOT_ASKED, REFUSED, Architecture

import layerzero.transformers as lzt

# One of each kind, and those whose attention is not the ordinary one; the others say little that is new.
HANDFUL = {"llama", "gpt_oss", "bert", "splinter", "t5", "vit", "whisper", "llava", "bloom"}


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, id=one.name, marks=() if one.name in HANDFUL else (pytest.mark.long,)) for one in ARCHITECTURES],
)
def test_logits_and_tokens_are_those_of_the_model_itself(architecture: Architecture) -> None:
    """Also of padding on either side, of beams, of caches, of an encoder's keys."""
    if architecture.outcome == REFUSED:
        with pytest.raises(KeyError, match="layerzero"):
            architecture.build("layerzero")
        return
    eager, ours = architecture.build("eager"), architecture.build("layerzero")
    for batch in comparing.fed(architecture):
        seen = None if architecture.kind == "seq2seq" else batch.get("attention_mask")
        found, expected = comparing.logits(ours, batch), comparing.logits(eager, batch)
        assert comparing.error(found, expected, seen) <= comparing.LARGEST_ERROR
    for batch in comparing.prompts(architecture):
        for options in (comparing.GREEDY, comparing.BEAMS):
            found, expected = _tokens(ours, batch, options), _tokens(eager, batch, options)
            assert found.tolist() == expected.tolist()
    outcomes = {row.outcome for row in lzt.report().rows}
    assert outcomes == (set() if architecture.outcome == NOT_ASKED else {"served"})


def _tokens(model: Any, batch: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    return comparing.tokens(model, batch, **options)


def test_there_are_enough() -> None:
    """Of each kind some, and names only once."""
    names = [one.name for one in ARCHITECTURES]
    assert len(names) == len(set(names)) >= 100
    assert sum(one.outcome == "served" for one in ARCHITECTURES) >= 90
