"""Paged caches of keys and values, as engines describe them, in the form that our ops take: a table of blocks and a
length for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.torch.running import HandedOver


def tables(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Block tables (B, M) and lengths (B), int32, of sequences whose pages are `indices[indptr[b] : indptr[b + 1]]`,
    the last of them with `last_page_len[b]` keys. Reads how many pages the longest has: a GPU is waited for."""
    check_not_captured(indptr)
    indptr = indptr.to(indices.device)
    counts = indptr[1:] - indptr[:-1]
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last_page_len.to(indices.device), 0).int()
    width = max(1, int(counts.max())) if counts.numel() else 1
    columns = torch.arange(width, device=indices.device)
    if not indices.numel():
        return torch.zeros((counts.numel(), width), dtype=torch.int32, device=indices.device), lengths
    places = (indptr[:-1, None] + columns).clamp(max=indices.numel() - 1)
    blocks = torch.where(columns < counts[:, None], indices[places.long()], 0)
    return blocks.int(), lengths


def gathered(k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (T, Hk, D) of all sequences, one after the other, and where each begins, int32 (B + 1). Caches
    are (N, P, Hk, D). Copies what sequences have, and no more; a GPU is waited for."""
    check_not_captured(k_cache)
    page_size = k_cache.shape[1]
    places = torch.arange(block_tables.shape[1] * page_size, device=block_tables.device)
    is_key = places < seq_lens[:, None]
    blocks = block_tables.long().repeat_interleave(page_size, 1)[is_key]
    slots = (places % page_size).expand_as(is_key)[is_key]
    return k_cache[blocks, slots], v_cache[blocks, slots], starts(seq_lens)


def starts(lengths: Tensor) -> Tensor:
    """Where each sequence begins, and the last ends: int32 (B + 1)."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def check_not_captured(tensor: Tensor) -> None:
    """Raises HandedOver while a CUDA graph is captured: what is read on the host then would hold for all replays."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise HandedOver("capture of a CUDA graph")
