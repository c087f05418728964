"""The text of token ids that come one by one.

A token may be a part of a character, and what it says may depend on those before it (a blank before a word). So the
tokens since the last text that was given are detokenized together with those of that text, and what is new is given
once it does not end in the middle of a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layerzero import InvalidArgument

Detokenize = Callable[[list[list[int]]], list[str]]
HALF = "\N{REPLACEMENT CHARACTER}"  # what bytes become that are no character, or not yet
# A character has four bytes at most, so no more than that can be missing: so many tokens without one will never be one.
MAX_WAITING = 16


@dataclass
class _State:
    """ids[:given] have been given as text; ids[start:given] are the last of these, by which others are read."""

    ids: list[int] = field(default_factory=list)
    start: int = 0
    given: int = 0

    def forget(self) -> None:
        """What no later token depends on."""
        del self.ids[: self.start]
        self.given -= self.start
        self.start = 0


class DetokenizeStreams:
    """`count` answers that grow side by side, as a batch gives them. One call of lz.detokenize for each step."""

    def __init__(self, detokenize: Detokenize, count: int) -> None:
        """detokenize: texts of sequences of ids. Tokenizer.streams(count) makes one."""
        if count < 1:
            raise InvalidArgument(f"count is {count}; allowed: 1 or more")
        self._detokenize = detokenize
        self._states = [_State() for _ in range(count)]

    def add(self, ids: Sequence[int | Sequence[int] | None]) -> list[str]:
        """The text that each sequence has gained, "" where a character is not complete.

        ids: of each sequence its next token, or several, or None where it has ended."""
        if len(ids) != len(self._states):
            raise InvalidArgument(f"ids has {len(ids)} items; allowed: {len(self._states)}, one for each sequence")
        for state, more in zip(self._states, ids, strict=True):
            if more is not None:
                state.ids.extend(more if isinstance(more, Sequence) else (more,))
        return self._advance([more is not None for more in ids], is_last=False)

    def finish(self) -> list[str]:
        """What is left of each sequence, be its last character complete or not. The streams begin anew."""
        rest = self._advance([True] * len(self._states), is_last=True)
        self._states = [_State() for _ in self._states]
        return rest

    def _advance(self, has_more: Sequence[bool], *, is_last: bool) -> list[str]:
        gained = [""] * len(self._states)
        at = [n for n, state in enumerate(self._states) if has_more[n] and len(state.ids) > state.given]
        if not at:
            return gained
        windows = [
            (state.ids[state.start : state.given], state.ids[state.start :])
            for state in map(self._states.__getitem__, at)
        ]
        texts = self._detokenize([ids for pair in windows for ids in pair])
        for n, before, after in zip(at, texts[::2], texts[1::2], strict=True):
            state = self._states[n]
            is_whole = not after.endswith(HALF) or len(state.ids) - state.given > MAX_WAITING
            if len(after) > len(before) and (is_whole or is_last):
                gained[n] = after[len(before) :]
                state.start, state.given = state.given, len(state.ids)
                state.forget()
        return gained


class DetokenizeStream:
    """One answer, token by token."""

    def __init__(self, detokenize: Detokenize) -> None:
        """detokenize: texts of sequences of ids. Tokenizer.stream() makes one."""
        self._one = DetokenizeStreams(detokenize, 1)

    def add(self, ids: int | Sequence[int]) -> str:
        """The text gained by the next token or tokens, "" where a character is not complete."""
        return self._one.add([ids])[0]

    def finish(self) -> str:
        """What is left, be the last character complete or not. The stream begins anew."""
        return self._one.finish()[0]
