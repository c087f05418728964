"""workers/philox.py: the generator is Random123's, and what it is given of a call is what the documents say."""

from __future__ import annotations

import numpy as np
import pytest
from tests import sampling_reference

from layerzero.workers.philox import philox4x32, uniform, uniforms


@pytest.mark.parametrize(
    "line",
    [
        # Random123 1.14.0, tests/kat_vectors: counter, key, result
        "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ],
)
def test_known_answers_of_random123(line: str) -> None:
    """Whoever has another implementation must be able to draw our tokens."""
    a, b, c, d, left, right, *expected = (int(word, 16) for word in line.split())
    assert list(philox4x32((a, b, c, d), (left, right))) == expected


def test_a_number_is_the_first_53_bits_of_its_block() -> None:
    """Seed and offset low word first, then the row and the draw; of the result the second word above the first."""
    seed, offset, row, draw = 0x299F31D0A4093822, 0x85A308D3243F6A88, 0x13198A2E, 0x03707344
    assert uniform(seed, offset, row, draw) == (0x94FDCCEBD16CFE09 >> 11) * 2.0**-53
    assert uniform(-1, -1, 0xFFFFFFFF, 0xFFFFFFFF) == uniform(2**64 - 1, 2**64 - 1, 0xFFFFFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize(
    ("seeds", "offsets"), [([5], [1]), ([5], [1, -2, 3]), ([5, -6, 7], [1]), ([5, 5, 7], [1, 2, 3])]
)
def test_rows_have_numbers_of_their_own(seeds: list[int], offsets: list[int]) -> None:
    """By their place where they share a seed, and by their seed alone where each has one. NumPy's are other code."""
    found = uniforms(seeds, offsets, 3, draw=4)
    assert len(set(found)) == 3
    assert found == list(sampling_reference.uniforms(np.array(seeds), np.array(offsets), 3, draw=4))
    for row in range(3) if len(seeds) > 1 else ():
        assert found[row] == uniforms(seeds[row : row + 1], offsets[row % len(offsets) :][:1], 1, draw=4)[0]
