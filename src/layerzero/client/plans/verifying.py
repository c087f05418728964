"""Whether two results of a function are the same."""

from __future__ import annotations

from typing import Any

from layerzero.client.plans.recording import is_array
from layerzero.client.plans.traced import map_leaves
from layerzero.ipc.errors import InvalidArgument

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 4e-2}
"""Largest difference allowed, by dtype, relative to the largest number: kernels of other libraries may have served."""


def largest_difference(expected: Any, got: Any) -> float:
    """Relative to the largest number of each array. Raises InvalidArgument where the results differ by more than
    TOLERANCES, in shape, or in what is not an array."""
    leaves: list[list[Any]] = [[], []]
    for value, found in zip((expected, got), leaves, strict=True):
        map_leaves(value, found.append)
    if len(leaves[0]) != len(leaves[1]):
        raise InvalidArgument("the results have another structure")
    return max((_difference(one, other) for one, other in zip(*leaves, strict=True)), default=0.0)


def _difference(one: Any, other: Any) -> float:
    if not is_array(one) or not is_array(other):
        if is_array(one) or is_array(other) or not (one is other or one == other):
            raise InvalidArgument(f"{one!r:.80} and {other!r:.80}")
        return 0.0
    import numpy as np

    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        raise InvalidArgument(f"{one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}")
    name = str(one.dtype).removeprefix("torch.")
    first, second = (_wide(v) for v in (one, other))
    is_finite = np.isfinite(first)
    if not np.array_equal(first[~is_finite], second[~is_finite], equal_nan=True):
        raise InvalidArgument(f"{name}{list(one.shape)} differ where numbers are not finite")
    largest = max(float(np.abs(first, where=is_finite, out=np.zeros_like(first)).max(initial=0.0)), 1e-30)
    found = float(np.abs(first[is_finite] - second[is_finite]).max(initial=0.0)) / largest
    if found > TOLERANCES.get(name, 0.0):
        raise InvalidArgument(f"{name}{list(one.shape)} differ by {found:.1e} of the largest number")
    return found


def _wide(array: Any) -> Any:
    """In NumPy's float64, on the CPU."""
    import numpy as np

    if hasattr(array, "detach"):
        array = array.detach().double().cpu()
    elif hasattr(array, "get"):
        array = array.get()
    return np.asarray(array, np.float64)
