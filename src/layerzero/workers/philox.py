"""Philox4x32-10, the counter-based generator of sampling: a number is a function of a key and a counter, and there is
no state. For kernels on the CPU, which read seeds and offsets; docs/ops.md says how these become keys and counters.

Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
"""

from __future__ import annotations

from collections.abc import Sequence

WORD = 0xFFFFFFFF
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)  # what is added to a key after each round
ROUNDS = 10

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        one, other = FACTORS[0] * a, FACTORS[1] * c
        a, b, c, d = other >> 32 ^ b ^ left, other & WORD, one >> 32 ^ d ^ right, one & WORD
        left, right = left + STEPS[0] & WORD, right + STEPS[1] & WORD
    return a, b, c, d


def uniform(seed: int, offset: int, row: int, draw: int) -> float:
    """In [0, 1), of 53 bits. Seed and offset: 64 bits of an integer of any sign; row and draw: 32."""
    counter = (offset & WORD, offset >> 32 & WORD, row, draw)
    low, high, _, _ = philox4x32(counter, (seed & WORD, seed >> 32 & WORD))
    return (high << 21 | low >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], offsets: Sequence[int], rows: int, draw: int = 0) -> list[float]:
    """One for each row. Seeds and offsets are one, or one for each row; a row with a seed of its own counts as row 0,
    so that its numbers do not depend on its place."""
    is_shared = len(seeds) == 1
    return [
        uniform(seeds[row % len(seeds)], offsets[row % len(offsets)], row if is_shared else 0, draw)
        for row in range(rows)
    ]
