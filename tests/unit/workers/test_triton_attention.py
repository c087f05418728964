"""How Triton's attention divides its work."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from layerzero.workers.providers._triton_attention import ROWS, decode_tile, prefill_tile, prefill_tiles, splits_for, up

ROOT = Path(__file__).parents[3]
DIMS = (64, 128, 192, 256)
SHARED_BYTES = 227 << 10  # of an SM of Hopper, for one program


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_fit_into_shared_memory(dim: int) -> None:
    """A program whose tiles do not fit fails when it is launched. An element has two bytes."""
    for tile in prefill_tiles(dim):
        assert up(dim) * 2 * (tile.rows + 2 * tile.stages * tile.keys) <= SHARED_BYTES
    tile = decode_tile(dim)
    assert up(dim) * 2 * 2 * tile.stages * tile.keys <= SHARED_BYTES


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_are_what_a_tensor_core_multiplies(dim: int) -> None:
    """A warp group of 4 has at least 64 rows of a prompt; keys are the depth of the second product."""
    for tile in prefill_tiles(dim):
        assert tile.rows >= 64
        assert tile.keys >= 16
    assert decode_tile(dim).keys >= 16


@pytest.mark.parametrize(
    ("programs", "tiles", "dim", "splits"),
    [
        (32, 8, 64, 8),
        (4, 256, 64, 66),
        (128, 16, 64, 1),
        (32, 32, 128, 4),
        (4, 512, 128, 33),
        (1, 1, 256, 1),
        (5000, 100, 64, 1),
    ],
)
def test_splits_fill_the_gpu_once(programs: int, tiles: int, dim: int, splits: int) -> None:
    """No more than there are tiles; none where there are programs enough."""
    assert splits_for(programs, tiles, dim, 132) == splits


def test_parts_are_no_more_than_memory_is_declared_for() -> None:
    """`workspace_bytes` of the descriptor. Each part has rows and their sums."""
    kernels = json.loads((ROOT / "src/layerzero/capabilities/descriptors/triton.json").read_text())["ops"]["attention"]
    declared = next(k["workspace_bytes"] for k in kernels if k["kernel_id"] == "triton.attention.decode")
    for programs, tiles, dim in itertools.product(range(1, 300, 7), (1, 2, 3, 17, 100, 1000), DIMS):
        splits = splits_for(programs, tiles, dim, 132)
        assert 1 <= splits <= tiles
        assert splits == 1 or programs * splits * ROWS * (up(dim) + 1) * 4 <= declared


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_of_prompts_are_those_that_are_compiled(dim: int) -> None:
    """A call must not compile."""
    sizes = [2**n for n in range(18)]
    chosen = {prefill_tile(dim, *case) for case in itertools.product(sizes, sizes, (1, 4))}
    assert chosen == set(prefill_tiles(dim))
