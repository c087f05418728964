"""Rows of token ids of different lengths, as the arrays that models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import layerzero as lz

SIDES = ("right", "left")


@dataclass(frozen=True)
class TokenBatch:
    """N texts of up to W tokens each. All arrays have the dtype that was asked for and lie in shared memory.

    ids: (N, W), padded. attention_mask: (N, W), 1 for tokens and 0 for padding. special_tokens_mask: (N, W), 1 for the
    tokenizer's special tokens and for padding. lengths: tokens of each text, padding not counted. offsets: of each
    text the (start, end) character positions of its tokens, None unless asked for. cached: how many texts came from
    the tokenizer's cache.
    """

    ids: Any
    attention_mask: Any
    special_tokens_mask: Any
    lengths: tuple[int, ...]
    offsets: tuple[tuple[tuple[int, int], ...], ...] | None
    cached: int


def padded(
    rows: Sequence[Sequence[int]],
    *,
    width: int,
    pad_id: int,
    side: str,
    special_ids: frozenset[int],
    dtype: Any,
) -> tuple[Any, Any, Any]:
    """Arrays (len(rows), width) of `dtype`: ids, attention mask, special tokens mask. No row is longer than width."""
    shape = (len(rows), width)
    values = np.full(shape, pad_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, tokens in enumerate(rows):
        if tokens:
            here = slice(0, len(tokens)) if side == "right" else slice(width - len(tokens), width)
            values[row, here] = tokens
            mask[row, here] = 1
    special = np.isin(values, list(special_ids)) | (mask == 0)
    return _given(values, dtype), _given(mask, dtype), _given(special, dtype)


def width_of(lengths: Sequence[int], least: int, multiple: int) -> int:
    """The width of a batch: of its longest text, not below `least`, and a multiple of `multiple`."""
    longest = max([least, *lengths])
    return -(-longest // multiple) * multiple


def _given(values: Any, dtype: Any) -> Any:
    """The values in an array of this dtype that workers reach: NumPy's, or torch's for one of torch's dtypes."""
    out = lz.empty(values.shape, dtype)
    np.copyto(np.asarray(out), values, casting="unsafe")  # a tensor of torch shares its memory with NumPy
    return out
