"""Sentences that more than one process makes, so that they read the same everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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
