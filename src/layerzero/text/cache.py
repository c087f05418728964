"""Token ids of texts that come again: system prompts, labels, examples."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import NamedTuple

# What a text was tokenized with: the text, add_special_tokens, max_length, whether offsets are wanted.
Key = tuple[str, bool, int | None, bool]
_ENTRY_BYTES = 400  # of an entry's objects, text and ids not counted


class CacheInfo(NamedTuple):
    """hits, misses: texts that were found, or not. entries, nbytes: texts that are kept. max_nbytes: the bound."""

    hits: int
    misses: int
    entries: int
    nbytes: int
    max_nbytes: int


class Tokens(NamedTuple):
    """Of one text. offsets: start, end, start, end ..., empty where none were asked for."""

    ids: array[int]
    offsets: array[int]


class TokenCache:
    """The tokens of the texts that were used last, up to `max_nbytes`. For several threads."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._kept: OrderedDict[Key, Tokens] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = self._hits = self._misses = 0

    def find(self, key: Key) -> Tokens | None:
        with self._lock:
            tokens = self._kept.get(key)
            if tokens is None:
                self._misses += 1
                return None
            self._kept.move_to_end(key)
            self._hits += 1
            return tokens

    def add(self, key: Key, tokens: Tokens) -> None:
        nbytes = _nbytes(key, tokens)
        if nbytes > self._max_nbytes:
            return
        with self._lock:
            before = self._kept.pop(key, None)
            self._nbytes += nbytes - (_nbytes(key, before) if before is not None else 0)
            self._kept[key] = tokens
            while self._nbytes > self._max_nbytes:
                self._nbytes -= _nbytes(*self._kept.popitem(last=False))

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._nbytes = self._hits = self._misses = 0

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self._hits, self._misses, len(self._kept), self._nbytes, self._max_nbytes)


def _nbytes(key: Key, tokens: Tokens) -> int:
    return _ENTRY_BYTES + 4 * len(key[0]) + 4 * (len(tokens.ids) + len(tokens.offsets))
