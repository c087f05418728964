"""Flat buffers of texts, ids and positions, as kernels of tokenize and detokenize read and write them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from layerzero.ipc.errors import InvalidArgument, OutputTooSmall
from layerzero.workers.provider import Block


def given(inputs: Sequence[Block | None]) -> list[Block]:
    """Those that are there."""
    return [block for block in inputs if block is not None]


def file_bytes(file: Block, digest: str) -> bytes:
    """The bytes of a tokenizer's file. Raises InvalidArgument when they do not have this digest."""
    data = bytes(file.host[: file.spec.span_bytes])
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise InvalidArgument(f"tokenizer_digest is {digest!r:.80}; the SHA-256 of the tokenizer's bytes is {actual}")
    return data


def texts_of(text: Block, text_splits: Block) -> list[str]:
    """The texts of a call. Raises InvalidArgument for what is no UTF-8, and for splits that are none."""
    memory = text.host[: text.spec.span_bytes]
    splits = _integers(text_splits, "q")
    try:
        return [str(memory[start:end], "utf-8") for start, end in _spans(splits, len(memory), "text_splits")]
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"text is not UTF-8: {exc}") from exc


def rows_of(ids: Block, splits: Block) -> list[list[int]]:
    """The sequences of ids of a call. Raises InvalidArgument for negative ones, and for splits that are none."""
    flat = _integers(ids, "i").tolist()
    if flat and min(flat) < 0:
        raise InvalidArgument(f"token id {min(flat)} is negative; ids start at 0")
    return [flat[start:end] for start, end in _spans(_integers(splits, "q"), len(flat), "splits")]


def check_max_length(special: int, max_length: int) -> None:
    """Below the number of special tokens the releases differ, and none keeps to the limit."""
    if max_length < special:
        raise InvalidArgument(f"max_length {max_length} has no room for the {special} special tokens of each text")


def write(outputs: Sequence[Block], *results: array[int]) -> dict[str, list[int]]:
    """Copy the results out. Raises OutputTooSmall when one does not fit; then nothing is written."""
    rows = [
        len(result) // (out.spec.shape[1] if out.spec.ndim > 1 else 1)
        for out, result in zip(outputs, results, strict=True)
    ]
    capacity = [out.spec.shape[0] for out in outputs]
    if any(need > have for need, have in zip(rows, capacity, strict=True)):
        raise OutputTooSmall(f"outputs have room for {capacity} rows, {rows} are needed", needed=rows)
    for out, result in zip(outputs, results, strict=True):
        data = memoryview(result).cast("B")
        out.host[: len(data)] = data
    return {"sizes": rows}


def _integers(block: Block, code: Literal["i", "q"]) -> memoryview[int]:
    return block.host[: block.spec.span_bytes].cast(code)


def _spans(splits: memoryview[int], length: int, name: str) -> Iterable[tuple[int, int]]:
    """(start, end) of each row. Raises InvalidArgument when the splits do not cover 0 to `length` in order."""
    if not len(splits) or splits[0] != 0 or splits[-1] != length:
        raise InvalidArgument(f"{name} must go from 0 to {length}, got {splits.tolist()!r:.200}")
    for start, end in pairwise(splits):
        if start > end:
            raise InvalidArgument(f"{name} must not decrease, got {start} before {end}")
        yield start, end
