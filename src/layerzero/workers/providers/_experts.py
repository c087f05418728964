"""What kernels of mixtures of experts refuse: offsets, ids and orders are data, which only they read."""

from __future__ import annotations

import itertools
from typing import NoReturn

from layerzero.ipc.errors import InvalidArgument


def checked_offsets(ends: list[int], rows: int) -> list[int]:
    """The ends of groups. Raises InvalidArgument where they are none."""
    if ends and (ends[0] < 0 or ends[-1] > rows or any(low > high for low, high in itertools.pairwise(ends))):
        raise InvalidArgument(
            f"grouped_linear: offsets is {str(ends)[:200]}; allowed: from 0 to {rows}, the number of rows, and never "
            "down; pass the sums of the groups' sizes"
        )
    return ends


def checked_order(rows: int, is_fit: bool) -> None:
    if not is_fit:
        raise InvalidArgument(
            f"moe_combine: order lacks a number; allowed: each from 0 to {rows - 1} once; pass what moe_permute has "
            "given"
        )


def refuse_id(found: int, experts: int) -> NoReturn:
    raise InvalidArgument(
        f"expert id {found} is not below {experts}, the number of experts; pass ids below it, negative ones for none",
        id=found,
        num_experts=experts,
    )
