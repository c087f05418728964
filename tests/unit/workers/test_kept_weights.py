"""Weights that workers make ready once: found by few bytes, given out only for the same ones."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from layerzero.ipc.errors import ConfigError
from layerzero.workers.providers._kept_weights import MOST_BYTES, KeptWeights, read_most_bytes

SIZE = 1000


class Weight:
    """Bytes, and how often they were made into something."""

    def __init__(self, content: bytes) -> None:
        self.bytes = ctypes.create_string_buffer(content, len(content))
        self.count = 0

    def made(self, kept: KeptWeights, kind: str = "") -> Any:
        return kept.get(kind, [(ctypes.addressof(self.bytes), len(self.bytes))], SIZE, self._make)

    def _make(self, copies: Any) -> bytes:
        self.count += 1
        return bytes(copies[0])


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


@pytest.mark.parametrize("bounds", [(4 * SIZE,), (MOST_BYTES, 2)])
def test_what_calls_still_come_for_stays_where_there_is_no_place_for_all(bounds: tuple[int, ...]) -> None:
    """Of a model that is too large the same part is found at each pass; what no call comes for any more makes room."""
    kept = KeptWeights(*bounds)
    weights = [Weight(bytes([number]) * SIZE) for number in range(4)]  # each with as many bytes of copies
    for _ in range(3):
        for number, weight in enumerate(weights[:3]):
            assert (weight.made(kept) is None) == (number == 2)
    assert [weight.count for weight in weights] == [1, 1, 0, 0]
    assert (len(kept), kept.nbytes) == (2, 4 * SIZE)
    while weights[3].made(kept) is None:
        weights[0].made(kept)
    assert weights[1].made(kept) is None
    assert weights[0].made(kept)
    assert [weight.count for weight in weights] == [1, 1, 0, 1]
    assert (len(kept), kept.nbytes) == (2, 4 * SIZE)


def test_what_is_greater_than_all_that_may_be_kept_is_not_made() -> None:
    kept, weight = KeptWeights(most_bytes=SIZE), Weight(b"a" * SIZE)
    assert weight.made(kept) is weight.made(kept) is None
    assert (weight.count, len(kept), kept.nbytes) == (0, 0, 0)


def test_how_much_is_kept_can_be_set() -> None:
    name = "LAYERZERO_WORKER_WEIGHTS_MIB"
    assert [read_most_bytes(env) for env in ({}, {name: ""}, {name: "0"}, {name: "3"})] == [
        MOST_BYTES, MOST_BYTES, 0, 3 << 20
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=f"{name}='much'; allowed: a whole number of MiB"):
        read_most_bytes({name: "much"})
