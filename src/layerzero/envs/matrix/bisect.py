"""Which release of a library broke a test, or mended it: the search of git bisect over versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from layerzero.ipc.errors import ConfigError

_RANGE = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s+(\S+?)\s*\.\.\s*(\S+)\s*")


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the version cannot be installed beside the rest: it says nothing


@dataclass(frozen=True)
class Tried:
    """One version: what the test did, and what tells why."""

    version: str
    outcome: Outcome
    why: str
    evidence: str = ""
    seconds: float = 0.0
    is_kept: bool = False  # from an earlier run


@dataclass(frozen=True)
class Range:
    """Releases of one distribution; the bounds are included, and 1.19 includes 1.19.2."""

    name: str
    first: str
    last: str


@dataclass(frozen=True)
class Found:
    """`answer`: broken (`before` passes, `at` fails), mended (the reverse), passes or fails (both ends do), or nothing
    (no version could be tried). `between`: versions that could not be tried and may be the ones. `tried`: in order."""

    answer: str
    before: str
    at: str
    between: tuple[str, ...]
    tried: tuple[Tried, ...]


def parse_range(text: str) -> Range:
    """ "onnxruntime 1.16..1.19". Raises ConfigError."""
    match = _RANGE.fullmatch(text)
    try:
        if match is None:
            raise InvalidVersion
        if Version(match[2]) >= Version(above(match[3])):
            raise ConfigError(f"name the lower version first: {match[1]} {match[3]}..{match[2]}")
    except InvalidVersion as exc:
        raise ConfigError(
            f'{text!r} is no range of versions; allowed: NAME FROM..TO, such as "onnxruntime 1.16..1.19"'
        ) from exc
    return Range(canonicalize_name(match[1]), match[2], match[3])


def above(prefix: str) -> str:
    """The lowest version above all that start with `prefix`: 1.19 -> 1.20."""
    release = list(Version(prefix).release)
    release[-1] += 1
    return ".".join(map(str, release))


def search(versions: Sequence[str], run: Callable[[str], Tried]) -> Found:
    """Find where the outcome changes between the oldest and the newest version that can be tried. `run` tries one
    version, and is asked once for each."""
    tried: dict[str, Tried] = {}

    def outcome(index: int) -> Outcome:
        version = versions[index]
        if version not in tried:
            tried[version] = run(version)
        return tried[version].outcome

    def result(answer: str, low: int = -1, high: int = -1) -> Found:
        ends = (versions[low], versions[high]) if high >= 0 else ("", "")
        return Found(answer, *ends, tuple(versions[low + 1 : max(high, 0)]), tuple(tried.values()))

    indices = range(len(versions))
    low = next((index for index in indices if outcome(index) is not Outcome.SKIPPED), -1)
    if low < 0:
        return result("nothing")
    high = next(index for index in reversed(indices) if index == low or outcome(index) is not Outcome.SKIPPED)
    start = outcome(low)
    if outcome(high) is start:
        return result("passes" if start is Outcome.PASSED else "fails")
    while True:
        middle = _middle(low, high, lambda index: outcome(index) is not Outcome.SKIPPED)
        if middle is None:
            return result("broken" if start is Outcome.PASSED else "mended", low, high)
        low, high = (middle, high) if outcome(middle) is start else (low, middle)


def _middle(low: int, high: int, can_be_tried: Callable[[int], bool]) -> int | None:
    """An index between, as near to the middle as can be tried; None when there is none."""
    inner = sorted(range(low + 1, high), key=lambda index: abs(2 * index - low - high))
    return next((index for index in inner if can_be_tried(index)), None)
