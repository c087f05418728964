"""A compiled sum."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import numba
    import numpy as np

    @numba.njit  # type: ignore[untyped-decorator,unused-ignore]
    def total(values: Any) -> Any:
        result = 0.0
        for row in values:
            for value in row:
                result += value
        return result

    return [total(np.asarray(memory.left))], [sum(sum(row) for row in memory.left.tolist())]
