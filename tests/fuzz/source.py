"""Reads numbers and choices off a fuzzer's bytes; what is not there reads as zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Source:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return self._at < len(self._data)

    def take(self, nbytes: int) -> bytes:
        """At most so many."""
        taken = self._data[self._at : self._at + nbytes]
        self._at += len(taken)
        return taken

    def number(self, nbytes: int) -> int:
        """Little-endian, unsigned."""
        return int.from_bytes(self.take(nbytes), "little")

    def pick(self, among: Sequence[T]) -> T:
        return among[self.number(1) % len(among)]

    def chunk(self) -> bytes:
        """Two bytes of length, then as many bytes."""
        return self.take(self.number(2))

    def rest(self) -> bytes:
        return self.take(len(self._data))


def chunk(data: bytes) -> bytes:
    """What `Source.chunk` reads back, as much of it as two bytes of length can say: a mutation may be longer."""
    said = data[:0xFFFF]
    return len(said).to_bytes(2, "little") + said
