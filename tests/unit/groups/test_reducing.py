"""In which order elements are added up, and in which precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerzero.groups import reducing
from layerzero.ipc.errors import InvalidArgument


def total(op: str, *rows: list[float], dtype: str = "float32") -> Any:
    parts = [np.array(row, dtype).view(np.uint8) for row in rows]
    out = np.empty_like(parts[0])
    reducing.reduce_into(out, parts, op, dtype)
    return out.view(dtype)


def test_additions_go_in_the_order_of_the_ranks() -> None:
    """In another order the small one is lost, or is not."""
    assert total("sum", [1e8], [-1e8], [1.0]) == [1.0]
    assert total("sum", [1e8], [1.0], [-1e8]) == [0.0]
    assert total("mean", [1.0], [2.0], dtype="float64") == [1.5]


def test_half_precision_is_rounded_once() -> None:
    """In float16 each of these ones would be lost."""
    assert total("sum", [2048.0], [1.0], [1.0], dtype="float16") == [2050.0]


@pytest.mark.parametrize("count", [0, 1, (1 << 14) + 3])
def test_blocks_are_joined_and_the_result_may_be_an_argument(count: int) -> None:
    rows = [np.arange(count, dtype=np.int64) + n for n in range(3)]
    parts = [row.view(np.uint8) for row in rows]
    expected = rows[0] + rows[1] + rows[2]
    reducing.reduce_into(parts[1], parts, "sum", "int64")
    assert np.array_equal(rows[1], expected)


def test_what_cannot_be_added_up_is_refused() -> None:
    for op, dtype in (("sum", "bool"), ("mean", "int32"), ("max", "float8_e4m3fn"), ("xor", "int32")):
        with pytest.raises(InvalidArgument, match="allowed: "):
            reducing.demand(op, dtype)
    reducing.demand("max", "bool")
