"""What providers check of settings and ids of sampling that they can read: on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.sampling import problem


def check_settings(op: str, name: str, values: Sequence[float]) -> None:
    """Raises InvalidArgument for a value that the setting may not have."""
    for row, value in enumerate(values):
        if allowed := problem(op, name, value):
            raise InvalidArgument(f"{op}: {name}[{row}] is {value}; allowed: {allowed}")


def check_highest(op: str, token: int, vocabulary: int) -> None:
    """Raises InvalidArgument for an id of a token that is none of the vocabulary's."""
    if token >= vocabulary:
        raise InvalidArgument(
            f"{op}: token id {token} is not below {vocabulary}, the extent of logits; check token_ids", id=token
        )


def check_rows(op: str, are_fit: Sequence[bool]) -> None:
    """Raises InvalidArgument for a row that no token can be drawn from: its largest logit is not finite."""
    for row, is_fit in enumerate(are_fit):
        if not is_fit:
            raise InvalidArgument(
                f"{op}: row {row} of logits has a NaN, infinity, or nothing but -infinity; allowed: finite numbers, "
                "and -infinity for what is never drawn",
                row=row,
            )
