"""tokenize by libraries that know byte pairs and nothing around them: added tokens, special tokens, offsets and limits
are here, as the tokenizers library has them."""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Protocol

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tokenizer_identity import AddedToken, BytePairs, Template, byte_pairs
from layerzero.workers.provider import Block, Bound, Call
from layerzero.workers.providers._texts import check_max_length, file_bytes, given, texts_of, write

MAX_TOKENIZERS = 8  # parsed tokenizers kept

Offsets = list[tuple[int, int]]
Row = tuple[list[int], Offsets]


class Encoder(Protocol):
    """What a library makes of one tokenizer."""

    def ids(self, text: str) -> list[int]:
        """Of a text without added tokens."""

    def offsets(self, text: str, ids: Sequence[int]) -> Offsets:
        """The (start, end) characters of each id of `ids(text)`."""


class ByteRows:
    """A tokenizer: added tokens by their texts, and a library for what is between them."""

    def __init__(self, pairs: BytePairs, encoder: Encoder) -> None:
        self.pairs, self.encoder, self.template = pairs, encoder, pairs.template
        # tokenizers looks for the one kind in the whole text first, then for the other in what is left.
        kinds = ([one for one in pairs.added if one.is_normalized is kind] for kind in (False, True))
        self._finders = [
            (_finder(kind), {one.text: one for one in kind})
            for kind in kinds
            if kind  # the leftmost, and of these the longest
        ]

    def row(self, text: str, with_special: bool, max_length: int | None, with_offsets: bool) -> Row:
        """Ids and offsets of a text; no offsets unless they are wanted."""
        ids: list[int] = []
        offsets: Offsets = []
        for start, part, added in self._parts(text, 0, 0):
            if added is not None:
                ids.append(added.index)
                offsets.append((start, start + len(part)))
                continue
            found = self.encoder.ids(part)
            ids += found
            if with_offsets:
                offsets += [(start + a, start + b) for a, b in self.encoder.offsets(part, found)]
        template = self.template if with_special else Template()
        if max_length is not None:
            kept = max_length - len(template)
            ids, offsets = ids[:kept], offsets[:kept]
        around = [(0, 0)] * len(template.before), [(0, 0)] * len(template.behind)
        ids = [*template.before, *ids, *template.behind]
        return ids, [*around[0], *offsets, *around[1]] if with_offsets else []

    def _parts(self, text: str, start: int, depth: int) -> Iterator[tuple[int, str, AddedToken | None]]:
        """Where each part starts, its text, and the added token that it is."""
        if depth == len(self._finders):
            if text:
                yield start, text, None
            return
        finder, tokens = self._finders[depth]
        end = 0
        for found in finder.finditer(text):
            yield from self._parts(text[end : found.start()], start + end, depth + 1)
            end = found.end()
            yield start + found.start(), found.group(), tokens[found.group()]
        yield from self._parts(text[end:], start + end, depth + 1)


class ByteRowsKept:
    """The tokenizers of a worker, parsed once for each file."""

    def __init__(self, library: str, make: Callable[[BytePairs], Encoder]) -> None:
        self._library, self._make = library, make
        self._kept: OrderedDict[str, ByteRows] = OrderedDict()

    def of(self, file: Block, digest: str) -> ByteRows:
        """Raises InvalidArgument for bytes of another digest, and for a file that the library does not compute."""
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
            return found
        pairs = byte_pairs(json.loads(file_bytes(file, digest)))
        if pairs is None or pairs.library != self._library:
            raise InvalidArgument(f"tokenizer {digest:.12} is none that {self._library} computes exactly")
        found = self._kept[digest] = ByteRows(pairs, self._make(pairs))
        if len(self._kept) > MAX_TOKENIZERS:
            self._kept.popitem(last=False)
        return found

    def tokenize(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """The kernel of the op."""
        file, text, text_splits = given(inputs)
        digest, max_length = call.attrs["tokenizer_digest"], call.attrs["max_length"]
        with_special, with_offsets = call.attrs["add_special_tokens"], call.attrs["return_offsets"]

        def bound() -> dict[str, list[int]]:
            rows = self.of(file, digest)
            if max_length is not None:
                check_max_length(len(rows.template) if with_special else 0, max_length)
            texts = texts_of(text, text_splits)
            found = [rows.row(one, with_special, max_length, with_offsets) for one in texts]
            ids = array("i", chain.from_iterable(row for row, _ in found))
            splits = array("q", accumulate((len(row) for row, _ in found), initial=0))
            pairs = chain.from_iterable(chain.from_iterable(offsets for _, offsets in found))
            return write(outputs, ids, splits, array("i", pairs))

        return bound


def _finder(tokens: Sequence[AddedToken]) -> re.Pattern[str]:
    texts = sorted((one.text for one in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))
