"""tiktoken: byte-level byte pairs of tokenizer.json files whose merges say an order of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from layerzero.ipc.vocabulary.tokenizer_identity import TIKTOKEN, BytePairs, byte_symbols
from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers._byte_pairs import ByteRowsKept, Offsets
from layerzero.workers.providers._texts import given, rows_of, write


def load() -> Loaded:
    import importlib.metadata

    import tiktoken

    kept = ByteRowsKept(TIKTOKEN, lambda pairs: _Encoder(tiktoken.Encoding, pairs))
    kernels = {"tiktoken.tokenize": kept.tokenize, "tiktoken.detokenize": _Detokenize(kept).detokenize}
    return Loaded(versions={"tiktoken": importlib.metadata.version("tiktoken")}, kernels=kernels)


class _Encoder:
    """tiktoken's ranks are the order of tokens; the file's ids may be others."""

    def __init__(self, encoding: Any, pairs: BytePairs) -> None:
        byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        order = pairs.order
        tokens = [*byte_of, *order.made, *(order.whole if pairs.is_whole_first else ())]
        ranks = {bytes(byte_of[symbol] for symbol in token): rank for rank, token in enumerate(tokens)}
        self._encode = encoding(
            "layerzero", pat_str=pairs.pattern, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary
        self._ids = [pairs.vocab[token] for token in tokens]
        self._lengths = {pairs.vocab[token]: len(token) for token in tokens}

    def ids(self, text: str) -> list[int]:
        table = self._ids
        return [table[rank] for rank in self._encode(text)]

    def offsets(self, text: str, ids: Sequence[int]) -> Offsets:
        """A token with some bytes of a character has all of it."""
        lengths = [self._lengths[index] for index in ids]
        ends = list(accumulate(lengths))
        if text.isascii():
            return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        of_byte = [index for index, character in enumerate(text) for _ in character.encode()]
        return [(of_byte[end - length], of_byte[end - 1] + 1) for end, length in zip(ends, lengths, strict=True)]


class _Detokenize:
    """The bytes of each token, one after the other; what is no UTF-8 is U+FFFD."""

    def __init__(self, kept: ByteRowsKept) -> None:
        self._kept = kept
        self._bytes: dict[str, dict[int, bytes]] = {}

    def detokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        file, ids, splits = given(inputs)
        digest, skips = call.attrs["tokenizer_digest"], call.attrs["skip_special_tokens"]

        def bound() -> dict[str, list[int]]:
            pairs = self._kept.of(file, digest).pairs
            special = {one.index for one in pairs.added if one.is_special} if skips else frozenset()
            table = self._table(digest, pairs)
            found = [
                b"".join(table.get(index, b"") for index in row if index not in special).decode("utf-8", "replace")
                for row in rows_of(ids, splits)
            ]
            texts = [text.encode() for text in found]
            ends = array("q", accumulate(map(len, texts), initial=0))
            return write(outputs, array("B", b"".join(texts)), ends)

        return bound

    def _table(self, digest: str, pairs: BytePairs) -> dict[int, bytes]:
        """Of the newest file."""
        if digest not in self._bytes:
            byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
            texts = {**{index: token for token, index in pairs.vocab.items()}, **{a.index: a.text for a in pairs.added}}
            self._bytes = {digest: {index: _bytes(text, byte_of) for index, text in texts.items()}}
        return self._bytes[digest]


def _bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """As the ByteLevel decoder: of a token with another character, its text."""
    if all(symbol in byte_of for symbol in token):
        return bytes(byte_of[symbol] for symbol in token)
    return token.encode()
