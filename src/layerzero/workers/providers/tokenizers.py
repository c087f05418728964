"""Hugging Face tokenizers. Serves one backend per release line ("tokenizers-0.13", "tokenizers-0.23"); no NumPy."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, TypeVar

from layerzero.ipc.errors import InvalidArgument, OutputTooSmall
from layerzero.workers.provider import Block, Bound, Call, Loaded

MAX_TOKENIZERS = 8  # parsed tokenizers kept; one takes some 10 to 100 MB

T = TypeVar("T")


def load() -> Loaded:
    import tokenizers

    library = _Tokenizers(tokenizers.Tokenizer)
    line = ".".join(tokenizers.__version__.split(".")[:2])
    kernels = {f"tokenizers-{line}.tokenize": library.tokenize, f"tokenizers-{line}.detokenize": library.detokenize}
    return Loaded(versions={"tokenizers": tokenizers.__version__}, kernels=kernels)


class _Tokenizers:
    def __init__(self, tokenizer_class: Any) -> None:
        self.tokenizer_class = tokenizer_class
        self.parsed: OrderedDict[str, Any] = OrderedDict()

    def tokenizer(self, file: Block, digest: str) -> Any:
        """The tokenizer of a file, parsed once. Raises InvalidArgument when its bytes do not have this digest."""
        tokenizer = self.parsed.get(digest)
        if tokenizer is not None:
            self.parsed.move_to_end(digest)
            return tokenizer
        text = bytes(file.host[: file.spec.span_bytes])
        actual = hashlib.sha256(text).hexdigest()
        if actual != digest:
            raise InvalidArgument(
                f"tokenizer_digest is {digest!r:.80}; the SHA-256 of the tokenizer's bytes is {actual}"
            )
        tokenizer = _guarded(lambda: self.tokenizer_class.from_buffer(text))
        tokenizer.no_padding()  # rows are ragged; a padding rule in the file does not apply
        self.parsed[digest] = tokenizer
        if len(self.parsed) > MAX_TOKENIZERS:
            self.parsed.popitem(last=False)
        return tokenizer

    def tokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """A truncation rule in the file does not apply: `max_length` alone decides (None: no limit)."""
        file, text, text_splits = _given(inputs)
        digest, max_length = call.attrs["tokenizer_digest"], call.attrs["max_length"]
        with_special, with_offsets = call.attrs["add_special_tokens"], call.attrs["return_offsets"]

        def bound() -> dict[str, list[int]]:
            tokenizer = self.tokenizer(file, digest)
            if max_length is None:
                tokenizer.no_truncation()
            else:
                _check_max_length(tokenizer, max_length, with_special)
                tokenizer.enable_truncation(max_length)
            texts = _texts(text, _integers(text_splits, "q"))
            rows = _guarded(lambda: tokenizer.encode_batch(texts, add_special_tokens=with_special))
            ids = array("i", chain.from_iterable(row.ids for row in rows))
            splits = array("q", accumulate((len(row) for row in rows), initial=0))
            pairs = chain.from_iterable(row.offsets for row in rows) if with_offsets else ()
            return _write(outputs, ids, splits, array("i", chain.from_iterable(pairs)))

        return bound

    def detokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        file, ids, splits = _given(inputs)
        digest, skip_special = call.attrs["tokenizer_digest"], call.attrs["skip_special_tokens"]

        def bound() -> dict[str, list[int]]:
            tokenizer = self.tokenizer(file, digest)
            flat = _integers(ids, "i").tolist()
            if flat and min(flat) < 0:
                raise InvalidArgument(f"token id {min(flat)} is negative; ids start at 0")
            rows = [flat[start:end] for start, end in _spans(_integers(splits, "q"), len(flat), "splits")]
            decoded = _guarded(lambda: tokenizer.decode_batch(rows, skip_special_tokens=skip_special))
            texts = [text.encode() for text in decoded]
            ends = array("q", accumulate(map(len, texts), initial=0))
            return _write(outputs, array("B", b"".join(texts)), ends)

        return bound


def _given(inputs: Sequence[Block | None]) -> list[Block]:
    return [block for block in inputs if block is not None]


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


def _texts(text: Block, splits: memoryview) -> list[str]:
    memory = text.host[: text.spec.span_bytes]
    try:
        return [str(memory[start:end], "utf-8") for start, end in _spans(splits, len(memory), "text_splits")]
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"text is not UTF-8: {exc}") from exc


def _check_max_length(tokenizer: Any, max_length: int, with_special: bool) -> None:
    """Below the number of special tokens the releases differ, and none keeps to the limit."""
    special = tokenizer.num_special_tokens_to_add(False) if with_special else 0
    if max_length < special:
        raise InvalidArgument(f"max_length {max_length} has no room for the {special} special tokens of each text")


def _write(outputs: Sequence[Block], *results: array[int]) -> dict[str, list[int]]:
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


def _guarded(action: Callable[[], T]) -> T:
    """Run library code; a Rust panic, which is no Exception in Python, becomes a RuntimeError."""
    try:
        return action()
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":
            raise RuntimeError(f"tokenizers panicked: {exc}") from exc
        raise
