"""What a kernel gives of a text, ids and offsets, as the Encoding that the tokenizers library would make of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Encoding

# Of an Encoding, what does not depend on words. All else waits for them.
_WITHOUT_WORDS = frozenset(
    {
        "ids",
        "type_ids",
        "tokens",
        "offsets",
        "attention_mask",
        "special_tokens_mask",
        "n_sequences",
        "sequence_ids",
        "char_to_token",
        "token_to_chars",
        "token_to_sequence",
    }
)

Words = Callable[[], Sequence[Sequence[int | None]]]


def raw_encoding(ids: list[int], tokens: list[str], offsets: list[tuple[int, int]], sequence: int) -> Encoding:
    """The Encoding of a text before truncation, special tokens and padding. `sequence`: 1 for the second of a pair.

    A token's word is its own position, until somebody asks for words: ServedEncoding finds it by that."""
    count = len(ids)
    return _encoding(
        {
            "ids": ids,
            "type_ids": [sequence] * count,
            "tokens": tokens,
            "words": list(range(count)),
            "offsets": offsets,
            "special_tokens_mask": [0] * count,
            "attention_mask": [1] * count,
            "overflowing": [],
            "sequence_ranges": {},
        }
    )


class ServedEncoding:
    """An Encoding whose words, which no kernel gives, the library computes when they are first asked for.

    `words()`: those of each token of the text, or of both texts of a pair."""

    __slots__ = ("_encoding", "_words")

    def __init__(self, encoding: Encoding, words: Words) -> None:
        self._encoding = encoding
        self._words: Words | None = words

    @property
    def overflowing(self) -> list[ServedEncoding | Encoding]:
        """What truncation cut off."""
        words = self._words
        if words is None:
            return list(self._encoding.overflowing)
        return [ServedEncoding(one, words) for one in self._encoding.overflowing]

    def whole(self) -> Encoding:
        """The library's own object, with words."""
        if self._words is not None:
            state = json.loads(self._encoding.__getstate__())
            _put_words(state, self._words())
            self._encoding, self._words = _encoding(state), None
        return self._encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoding if name in _WITHOUT_WORDS else self.whole(), name)

    def __len__(self) -> int:
        return len(self._encoding)

    def __repr__(self) -> str:
        return repr(self._encoding)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files have the library's own."""
        return _from_state, (self.whole().__getstate__(),)


def _put_words(state: dict[str, Any], words: Sequence[Sequence[int | None]]) -> None:
    """The word of each token in place of its position, also in what was cut off. Tokens that were added have none."""
    ranges = {int(sequence): (at["start"], at["end"]) for sequence, at in state["sequence_ranges"].items()}
    found: list[int | None] = []
    for index, position in enumerate(state["words"]):
        sequence = next((one for one, (start, end) in ranges.items() if start <= index < end), 0)
        found.append(None if position is None else words[sequence][position])
    state["words"] = found
    for other in state["overflowing"]:
        _put_words(other, words)


def _encoding(state: dict[str, Any]) -> Encoding:
    return _from_state(json.dumps(state).encode())


def _from_state(state: bytes) -> Encoding:
    encoding = Encoding()
    encoding.__setstate__(state)
    return encoding
