"""Whether two implementations of a function gave the same: plain values by equality, numbers and arrays within a
tolerance."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any


def difference(one: Any, other: Any, tolerance: float, where: str = "result") -> str:
    """The first place where two results differ, and how; empty where they agree. Numbers agree where they differ by no
    more than `tolerance`, absolute and relative to the second; NaNs agree with NaNs."""
    return next(_differences(one, other, tolerance, where), "")


def _differences(one: Any, other: Any, tolerance: float, where: str) -> Iterator[str]:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and not isinstance(one, bool):
        if not _is_close(one, other, tolerance):
            yield f"{where} is {_told(one)} and {_told(other)}"
    elif type(one) is not type(other):
        yield f"{where} is {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where} has {len(one)} and {len(other)} items"
        for at, (mine, its) in enumerate(zip(one, other, strict=False)):
            yield from _differences(mine, its, tolerance, f"{where}[{at}]")
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            yield f"{where} has the keys {_told(list(one))} and {_told(list(other))}"
        for key in one.keys() & other.keys():
            yield from _differences(one[key], other[key], tolerance, f"{where}[{_told(key)}]")
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            mine, its = getattr(one, field.name), getattr(other, field.name)
            yield from _differences(mine, its, tolerance, f"{where}.{field.name}")
    elif hasattr(one, "shape") and hasattr(one, "dtype"):
        yield from _of_arrays(one, other, tolerance, where)
    elif one != other:
        yield f"{where} is {_told(one)} and {_told(other)}"


def _told(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python writes no integer of more than some thousand digits
        return f"a long {type(value).__name__}"


def _is_close(one: float, other: float, tolerance: float) -> bool:
    if one == other or (one != one and other != other):
        return True
    try:
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float is near to
        return False


def _of_arrays(one: Any, other: Any, tolerance: float, where: str) -> Iterator[str]:
    if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype:
        yield f"{where} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
        return
    torch = sys.modules.get("torch")
    library = torch if torch is not None and isinstance(one, torch.Tensor) else sys.modules["numpy"]
    wide = library.complex128 if "complex" in str(one.dtype) else library.float64
    mine, its = ((array.to(wide) if library is torch else array.astype(wide)).reshape(-1) for array in (one, other))
    is_close = library.isclose(mine, its, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not bool(is_close.all()):
        count, largest = int((~is_close).sum()), float(abs(mine[~is_close] - its[~is_close]).max())
        yield f"{where} differs in {count:,} of {len(mine):,} elements, by up to {largest:g}"
