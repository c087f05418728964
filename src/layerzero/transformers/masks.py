"""Masks: how a model's are made for our attention, and the two forms that they have. A bool mask says what may be
attended to, a float mask is added to the scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask

from layerzero.transformers.modeling import takes_bool_masks


def mask(*args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """A model's mask, in the form that the model takes. The mask function of Transformers' AttentionMaskInterface:
    without one it drops padding in silence.

    A bool mask, or None where is_causal says it all, for models that know SDPA. Else a float mask: their layers may
    add it to scores themselves."""
    make = sdpa_mask if takes_bool_masks(config) else eager_mask
    return make(*args, config=config, **options)


def as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in the form that Transformers' eager attention adds: the smallest number where nothing may be seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.where(mask, torch.zeros((), device=mask.device, dtype=dtype), torch.finfo(dtype).min)


def causal(query: Tensor, key: Tensor) -> Tensor:
    """The bool mask of Transformers' is_causal: query i sees key i and those before it, as in torch's SDPA."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    return (torch.arange(key.shape[2], device=query.device)[None, :] <= rows)[None, None]


def selected(indices: Tensor, seq_k: int) -> Tensor:
    """The bool mask of keys that a sparse layer has selected: (batch, seq_q, some) -> (batch, 1, seq_q, seq_k)."""
    batch, seq_q, _ = indices.shape
    seen = torch.zeros((batch, seq_q, seq_k), dtype=torch.bool, device=indices.device)
    return seen.scatter(-1, indices.long(), True).unsqueeze(1)


def both(one: Tensor | None, other: Tensor) -> Tensor:
    """A mask that allows what both allow, the second of which is bool."""
    if one is None:
        return other
    if one.dtype == torch.bool:
        return one & other
    return one.masked_fill(~other, torch.finfo(one.dtype).min)
