"""How Triton's gradients of norms divide their work."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from layerzero.workers.providers._triton_norms import LEAST_TILES, MAX_COLUMNS, PER_SM, tile_for

ROOT = Path(__file__).parents[3]
COLUMNS = (1, 2, 15, 16, 17, 64, 100, 128, 1000, 2048, 2049, 4096, 5000, 8192, MAX_COLUMNS)
ROWS = (1, 2, 3, 33, 264, 1024, 100_000)
MOST_SMS = 160  # of the GPUs that there are


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_program_holds_whole_rows(columns: int) -> None:
    """A power of two at least, and no more elements for each thread than its registers hold, of four tensors."""
    for rows in ROWS:
        tile = tile_for(rows, columns, 132)
        assert columns <= tile.block < 2 * max(columns, 16)
        assert tile.rows * tile.block <= 16 * 32 * tile.warps
        assert tile.warps & (tile.warps - 1) == 0
        assert tile.warps <= 32


def test_what_is_compiled_does_not_depend_on_how_many_rows_there_are() -> None:
    """`compiled_for` of the descriptor names the row's elements alone."""
    for columns in COLUMNS:
        assert len({tile_for(rows, columns, sms)._replace(programs=0) for rows in ROWS for sms in (1, 132)}) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "programs"), [(1, 4096, 1), (3, 4096, 2), (1024, 4096, 264), (32_768, 128, 264), (64, 128, 2)]
)
def test_programs_fill_the_gpu_and_have_several_rows(rows: int, columns: int, programs: int) -> None:
    tile = tile_for(rows, columns, 132)
    assert tile.programs == programs
    assert tile.programs <= PER_SM * 132
    assert (
        rows <= tile.rows or tile.programs == PER_SM * 132 or -(-rows // tile.programs) > tile.rows * (LEAST_TILES - 1)
    )


@pytest.mark.parametrize(("op", "sums"), [("layer_norm_backward", 2), ("rms_norm_backward", 1)])
def test_parts_are_no_more_than_memory_is_declared_for(op: str, sums: int) -> None:
    """`workspace_bytes` of the descriptor; and what can be lifted has 64 MiB of scratch at most."""
    (kernel,) = json.loads((ROOT / "src/layerzero/capabilities/descriptors/triton.json").read_text())["ops"][op]
    most = max(
        sums * tile_for(rows, columns, MOST_SMS).programs * columns * 4
        for rows, columns in itertools.product(ROWS, COLUMNS)
    )
    assert most <= kernel["workspace_bytes"] < 64 << 20
