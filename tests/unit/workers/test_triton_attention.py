"""How Triton's attention divides its work."""

from __future__ import annotations

import itertools

import pytest

from layerzero.workers.providers._triton_attention import MAX_ROUNDS, decode_tile, prefill_tile, splits_for, up

DIMS = (64, 128, 192, 256)
SIZES = [2**n for n in range(18)]
SHARED_BYTES = 227 << 10  # of an SM of Hopper, for one program


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_fit_into_shared_memory(dim: int) -> None:
    """A program whose tiles do not fit fails when it is launched. An element has two bytes."""
    for tile in {prefill_tile(dim, tiles, keys) for tiles, keys in itertools.product(SIZES, SIZES)}:
        assert up(dim) * 2 * (tile.rows + 2 * tile.stages * tile.keys) <= SHARED_BYTES
    tile = decode_tile(dim)
    assert up(dim) * 2 * 2 * tile.stages * tile.keys <= SHARED_BYTES


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_are_what_a_tensor_core_multiplies(dim: int) -> None:
    """A warp group of 4 has at least 64 rows of a prompt; keys are the depth of the second product."""
    for tile in {prefill_tile(dim, tiles, keys) for tiles, keys in itertools.product(SIZES, SIZES)}:
        assert tile.rows >= 64
        assert tile.keys >= 16
    assert decode_tile(dim).keys >= 16


@pytest.mark.parametrize(
    ("programs", "tiles", "splits"),
    [(32, 8, 8), (4, 256, 64), (128, 16, 2), (256, 32, 1), (1024, 16, 1), (1, 1, 1), (5000, 100, 1)],
)
def test_splits_fill_the_gpu_once(programs: int, tiles: int, splits: int) -> None:
    """Parts in one round, each as long as the others; none where there are programs enough."""
    assert splits_for(programs, tiles, 264) == splits


def test_parts_are_no_more_than_memory_is_declared_for() -> None:
    """`workspace_bytes` of the descriptor."""
    for programs, tiles in itertools.product(range(1, 300, 7), (1, 2, 3, 17, 100, 1000)):
        splits = splits_for(programs, tiles, 264)
        assert 1 <= splits <= tiles
        assert splits == 1 or programs * splits <= MAX_ROUNDS * 264


def test_up_is_the_next_power_of_two() -> None:
    """As the facet `sizes` has it, which says what is compiled."""
    assert [up(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]
