"""What providers of losses check before they compute."""

from __future__ import annotations

from layerzero.ipc.errors import InvalidArgument


def check_classes(op: str, low: int, high: int, classes: int) -> None:
    """The smallest and the largest index that counts. Raises InvalidArgument for one that is no class."""
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        raise InvalidArgument(
            f"{op}: target has the index {bad}; allowed: 0 to {classes - 1}, or ignore_index; check the labels",
            target=bad,
            classes=classes,
        )
