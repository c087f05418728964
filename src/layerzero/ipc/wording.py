"""Sentences that more than one process makes, so that they read the same everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

MAX_TEXT = 4096  # characters of a text of another process that are repeated to a peer or to the log
MAX_ITEMS = 64  # of a list or map, likewise


def counted(count: int, noun: str) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def shared_causes(groups: Iterable[str]) -> list[str]:
    """For the kernels that are refused for a cause which others share, given what each needs ("need an NVIDIA GPU"):
    one line for each cause, the most frequent first."""
    lines = []
    for group, count in Counter(groups).most_common():
        lines.append(f"{counted(count, 'kernel')} {group.replace('need ', 'needs ', 1) if count == 1 else group}")
    return lines


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """A text of at most so many characters: of a longer one its beginning and its end, which says what went wrong."""
    if len(text) <= limit:
        return text
    gap = f" [... of {len(text):,} characters ...] "
    head = (limit - len(gap)) // 2
    return f"{text[:head]}{gap}{text[len(text) - (limit - len(gap) - head) :]}"


def bounded(value: Any) -> Any:
    """Plain values with their texts shortened and their lists and maps cut off, as deep as they are."""
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, dict):
        return {shortened(key) if isinstance(key, str) else key: bounded(value[key]) for key in list(value)[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [bounded(one) for one in value[:MAX_ITEMS]]
    return value
