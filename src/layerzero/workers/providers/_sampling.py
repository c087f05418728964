"""What providers check of settings and ids of sampling that they can read: on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


def check_masses(op: str, name: str, least: float, most: float) -> None:
    """Raises InvalidArgument for probabilities among which there are others than finite numbers from 0 on."""
    if not 0 <= least <= most < math.inf:  # NaN is none of these
        raise InvalidArgument(f"{op}: {name} has numbers from {least} to {most}; allowed: finite numbers from 0 on")


def check_parents(op: str, bad: Sequence[Sequence[int]], parents: Any) -> None:
    """Raises InvalidArgument for places of nodes whose parent is not before them."""
    for row, node in bad[:1]:
        parent = int(parents[row, node])
        raise InvalidArgument(
            f"{op}: parents[{row}, {node}] is {parent}; allowed: a node before {node}, or -1; put parents first"
        )
