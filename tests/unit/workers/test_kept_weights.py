"""Weights that workers make ready once: found by few bytes, given out only for the same ones."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from layerzero.workers.providers._kept_weights import KeptWeights

SIZE = 1000


class Weight:
    """Bytes, and how often they were made into something."""

    def __init__(self, content: bytes) -> None:
        self.bytes = ctypes.create_string_buffer(content, len(content))
        self.count = 0

    def made(self, kept: KeptWeights, kind: str = "") -> Any:
        return kept.get(kind, [(ctypes.addressof(self.bytes), len(self.bytes))], self._make)

    def _make(self, copies: Any) -> tuple[bytes, int]:
        self.count += 1
        return bytes(copies[0]), SIZE


def test_the_same_bytes_are_made_once_wherever_they_lie() -> None:
    kept = KeptWeights()
    one, other = Weight(b"a" * SIZE), Weight(b"a" * SIZE)
    assert one.made(kept) is one.made(kept) is other.made(kept)
    assert (one.count, other.count, len(kept)) == (1, 0, 1)
    assert one.made(kept, "in another shape") is not one.made(kept)


@pytest.mark.parametrize("place", [0, 1, 40, 500, 998, 999])
def test_bytes_that_somebody_has_changed_are_made_anew(place: int) -> None:
    """Also those that it is not found by."""
    kept, weight = KeptWeights(), Weight(b"a" * SIZE)
    weight.made(kept)
    weight.bytes[place] = b"b"
    assert weight.made(kept) == bytes(weight.bytes)
    assert weight.count == 2
    weight.bytes[place] = b"a"
    assert weight.made(kept) == b"a" * SIZE


def test_it_keeps_no_more_than_its_bytes_and_lets_go_of_what_was_unused_for_longest() -> None:
    kept = KeptWeights(most_bytes=4 * SIZE)
    weights = [Weight(bytes([number]) * SIZE) for number in range(3)]  # each with as many bytes of copies
    for number in (0, 1, 0, 2, 0, 2):
        weights[number].made(kept)
        assert kept.nbytes == len(kept) * 2 * SIZE <= kept.most_bytes
    assert [weight.count for weight in weights] == [1, 1, 1]
    weights[1].made(kept)
    assert weights[1].count == 2


def test_what_is_greater_than_all_that_may_be_kept_is_made_each_time() -> None:
    kept, weight = KeptWeights(most_bytes=SIZE), Weight(b"a" * SIZE)
    assert weight.made(kept) == weight.made(kept)
    assert (weight.count, len(kept), kept.nbytes) == (2, 0, 0)
