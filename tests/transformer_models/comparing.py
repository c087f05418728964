"""Runs a model by LayerZero and by its own formula, and compares logits and tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.transformer_models.architectures import IMAGE, IMAGE_TOKEN, VOCABULARY, Architecture
from torch import Tensor
from transformers import PreTrainedModel

LARGEST_ERROR = 2e-5  # of the largest logit, in float32
NEW_TOKENS = 6
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 3}


def ids(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    """Token ids without special ones."""
    return torch.randint(3, VOCABULARY - 1, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str, batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    """A batch whose first text is shorter by three."""
    found = ids(batch, length)
    seen = torch.ones_like(found)
    where = slice(0, 3) if side == "left" else slice(length - 3, length)
    seen[0, where] = 0
    return {"input_ids": found.masked_fill(seen == 0, 0), "attention_mask": seen}


def fed(architecture: Architecture) -> list[dict[str, Any]]:
    """What a model's forward call is given: one batch after the other."""
    generator = torch.Generator().manual_seed(2)
    match architecture.kind:
        case "decoder" | "encoder":
            return [{"input_ids": ids()}, padded("left"), padded("right")]
        case "seq2seq":
            return [{**batch, "decoder_input_ids": ids(2, 5, 3)} for batch in ({"input_ids": ids()}, padded("right"))]
        case "vision":
            return [{"pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator)}]
        case "speech":
            sound = torch.randn(2, 400, generator=generator)
            seen = torch.ones(2, 400, dtype=torch.long)
            seen[0, 250:] = 0
            return [{"input_values": sound}, {"input_values": sound * seen, "attention_mask": seen}]
        case "speech2text":
            sound = torch.randn(2, 16, 32, generator=generator)
            features = sound if architecture.name == "whisper" else sound.transpose(1, 2)
            return [{"input_features": features, "decoder_input_ids": ids(2, 5, 3)}]
        case "vision2text":
            pixels = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
            image = torch.full((2, 4 if architecture.name == "gemma3" else 16), IMAGE_TOKEN)
            text = torch.cat((ids(2, 2, 4), image, ids(2, 4, 5)), 1)
            batch = {"input_ids": text.where(text != 0, 3), "pixel_values": pixels}
            if architecture.name == "gemma3":
                batch["token_type_ids"] = (text == IMAGE_TOKEN).long()
            return [batch]
    raise ValueError(architecture.kind)


def prompts(architecture: Architecture) -> list[dict[str, Any]]:
    """What generate is given; nothing where a model does not generate."""
    match architecture.kind:
        case "decoder":
            return [{"input_ids": ids()}, padded("left")]
        case "seq2seq":
            return [padded("right")]
        case "vision2text":
            return fed(architecture)
        case "speech2text":
            return [{"input_features": fed(architecture)[0]["input_features"]}]
    return []


@torch.no_grad()
def logits(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    found = model(**batch)
    for name in ("logits", "last_hidden_state", "start_logits"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    raise TypeError(f"no logits in {list(found)}")


@torch.no_grad()
def tokens(model: PreTrainedModel, batch: dict[str, Any], **options: Any) -> Tensor:
    settings = copy.deepcopy(model.generation_config)
    settings.eos_token_id, settings.pad_token_id = None, 0
    settings.forced_eos_token_id = settings.forced_bos_token_id = None
    return model.generate(**batch, generation_config=settings, **options)


def error(found: Tensor, expected: Tensor, seen: Tensor | None) -> float:
    """The largest difference, by the largest expected logit. Of padding nobody reads the logits: there a row that may
    see nothing is 0 by LayerZero, and the mean of all values by the formula."""
    difference = (found - expected).abs()
    if seen is not None and seen.shape == difference.shape[:2]:
        difference = difference[seen.bool()]
    assert torch.isfinite(difference).all()
    return float(difference.max() / expected.abs().max())
