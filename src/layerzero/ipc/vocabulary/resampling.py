"""Interpolation along one dimension: of which elements, and with which weights, each element of a result is made.

The formulas are torch's (aten/src/ATen/native/UpSample.h), for numbers of Python."""

from __future__ import annotations

import math

MODES = ("nearest", "nearest_exact", "linear", "cubic")
# Of torch's names of modes: ours, and how many dimensions it has; 0: any.
INTERPOLATIONS = {
    "nearest": ("nearest", 0),
    "nearest-exact": ("nearest_exact", 0),
    "linear": ("linear", 1),
    "bilinear": ("linear", 2),
    "trilinear": ("linear", 3),
    "bicubic": ("cubic", 2),
}
Taps = list[tuple[int, float]]


def text_of(scales: tuple[float, ...]) -> str:
    """As an attribute; exact."""
    return ",".join(map(repr, scales))


def scales_of(text: object) -> tuple[float, ...] | None:
    """The factors that an attribute says, () where sizes count; None where it says none."""
    if type(text) is not str or len(text) > 100:
        return None
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        return None
    is_fit = all(math.isfinite(n) and n > 0.0 for n in found) and text_of(found) == text
    return found if is_fit else None


def made_of(size: int, scale: float) -> int:
    """The extent that a factor gives."""
    return math.floor(size * scale)


def taps(size: int, made: int, scale: float | None, mode: str, *, is_aligned: bool, is_smoothed: bool) -> list[Taps]:
    """Of each place. `scale`: the factor that coordinates are computed with, None for that of the extents.
    `is_aligned`: the centres of the first elements, and of the last ones, lie on each other (align_corners).
    `is_smoothed`: antialias."""
    if mode.startswith("nearest"):
        return [[(_nearest(o, size, made, scale, mode), 1.0)] for o in range(made)]
    step = 1 / scale if scale else size / made
    if is_aligned:
        step = (size - 1) / (made - 1) if made > 1 else 0.0
    if is_smoothed:
        return [_smoothed(o, size, step, mode) for o in range(made)]
    return [_weighed(o * step if is_aligned else (o + 0.5) * step - 0.5, size, mode) for o in range(made)]


def rows(found: list[Taps], size: int) -> list[list[float]]:
    """As a matrix (made, size)."""
    made = [[0.0] * size for _ in found]
    for row, one in zip(made, found, strict=True):
        for place, weight in one:
            row[place] += weight
    return made


def even(found: list[Taps]) -> tuple[list[list[int]], list[list[float]], list[list[bool]]]:
    """As many of each place: elements, weights, and which count."""
    width = max(map(len, found))
    filled = [one + [(one[-1][0], 0.0)] * (width - len(one)) for one in found]
    counts = [[t < len(one) for t in range(width)] for one in found]
    return [[place for place, _ in one] for one in filled], [[w for _, w in one] for one in filled], counts


def _nearest(o: int, size: int, made: int, scale: float | None, mode: str) -> int:
    is_exact = mode == "nearest_exact"
    if scale is None:
        return min((2 * o + 1) * size // (2 * made) if is_exact else o * size // made, size - 1)
    return min(math.floor((o + 0.5 * is_exact) / scale), size - 1)


def _weighed(at: float, size: int, mode: str) -> Taps:
    if mode == "linear":
        at = min(max(at, 0.0), size - 1.0)
        low = math.floor(at)
        return [(low, 1 - (at - low)), (min(low + 1, size - 1), at - low)]
    low = math.floor(at)
    return [(min(max(low + t, 0), size - 1), _cubic(abs(at - low - t), -0.75)) for t in range(-1, 3)]


def _smoothed(o: int, size: int, step: float, mode: str) -> Taps:
    """With a wider filter where the result is smaller: as Pillow has it, with its a of -0.5."""
    wide = max(step, 1.0)
    reach = (1.0 if mode == "linear" else 2.0) * wide
    centre = (o + 0.5) * step
    low, high = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), size)
    found = []
    for place in range(low, high):
        distance = abs(place - centre + 0.5) / wide
        found.append((place, max(1.0 - distance, 0.0) if mode == "linear" else _cubic(distance, -0.5)))
    total = sum(weight for _, weight in found)
    return [(place, weight / total) for place, weight in found]


def _cubic(x: float, a: float) -> float:
    """Keys 1981, eq. 4 and 15."""
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0
