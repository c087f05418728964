"""Hugging Face tokenizers. Serves one backend per release line ("tokenizers-0.13", "tokenizers-0.23"); no NumPy."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers._texts import check_max_length, file_bytes, given, rows_of, texts_of, write

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
        text = file_bytes(file, digest)
        tokenizer = _guarded(lambda: self.tokenizer_class.from_buffer(text))
        tokenizer.no_padding()  # rows are ragged; a padding rule in the file does not apply
        self.parsed[digest] = tokenizer
        if len(self.parsed) > MAX_TOKENIZERS:
            self.parsed.popitem(last=False)
        return tokenizer

    def tokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """A truncation rule in the file does not apply: `max_length` alone decides (None: no limit)."""
        file, text, text_splits = given(inputs)
        digest, max_length = call.attrs["tokenizer_digest"], call.attrs["max_length"]
        with_special, with_offsets = call.attrs["add_special_tokens"], call.attrs["return_offsets"]

        def bound() -> dict[str, list[int]]:
            tokenizer = self.tokenizer(file, digest)
            if max_length is None:
                tokenizer.no_truncation()
            else:
                check_max_length(tokenizer.num_special_tokens_to_add(False) if with_special else 0, max_length)
                tokenizer.enable_truncation(max_length)
            texts = texts_of(text, text_splits)
            rows = _guarded(lambda: tokenizer.encode_batch(texts, add_special_tokens=with_special))
            ids = array("i", chain.from_iterable(row.ids for row in rows))
            splits = array("q", accumulate((len(row) for row in rows), initial=0))
            pairs = chain.from_iterable(row.offsets for row in rows) if with_offsets else ()
            return write(outputs, ids, splits, array("i", chain.from_iterable(pairs)))

        return bound

    def detokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        file, ids, splits = given(inputs)
        digest, skip_special = call.attrs["tokenizer_digest"], call.attrs["skip_special_tokens"]

        def bound() -> dict[str, list[int]]:
            tokenizer = self.tokenizer(file, digest)
            rows = rows_of(ids, splits)
            decoded = _guarded(lambda: tokenizer.decode_batch(rows, skip_special_tokens=skip_special))
            texts = [text.encode() for text in decoded]
            ends = array("q", accumulate(map(len, texts), initial=0))
            return write(outputs, array("B", b"".join(texts)), ends)

        return bound


def _guarded(action: Callable[[], T]) -> T:
    """Run library code; a Rust panic, which is no Exception in Python, becomes a RuntimeError."""
    try:
        return action()
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":
            raise RuntimeError(f"tokenizers panicked: {exc}") from exc
        raise
