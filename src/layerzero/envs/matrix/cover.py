"""The fewest environments that serve all subjects: the smallest cover of the compatibility graph by sets that work.

Pairs that work do not make a set that works (a needs x<2 or y, b needs x>=2 or z ...), so every set of three and more
is verified, and one that fails is forbidden before the search goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_STEPS = 200_000  # of one search; a second or so
MAX_ROUNDS = 200

Pair = frozenset[str]


@dataclass(frozen=True)
class Cover:
    """`groups` are disjoint, each verified, and cover all subjects. `is_fewest`: no smaller number would do."""

    groups: tuple[tuple[str, ...], ...]
    is_fewest: bool
    refused: tuple[tuple[str, ...], ...]  # sets whose pairs all work, and which do not


class _TooLong(Exception):
    """The search took more steps than it may."""


def fewest(names: Sequence[str], pairs: set[Pair], works: Callable[[tuple[str, ...]], bool]) -> Cover:
    """Cover `names` with the fewest sets. `pairs`: those that work together; `works` verifies a set of three or more,
    and is asked once for each."""
    refused: list[Pair] = []
    verified: dict[Pair, bool] = {}

    def verify(group: tuple[str, ...]) -> bool:
        key = frozenset(group)
        if key not in verified:
            verified[key] = len(group) < 3 or works(group)
        return verified[key]

    try:
        for _ in range(MAX_ROUNDS):
            groups = _search(names, pairs, refused)
            bad = [frozenset(group) for group in groups if not verify(group)]
            if not bad:
                return Cover(groups, True, _sorted(refused, names))
            refused += bad
    except _TooLong:
        pass
    return Cover(_greedy(names, pairs, verify), False, _sorted([s for s, ok in verified.items() if not ok], names))


def _search(names: Sequence[str], pairs: set[Pair], refused: Sequence[Pair]) -> tuple[tuple[str, ...], ...]:
    """An exact cover by the fewest groups, by deepening: subjects with the fewest partners first."""
    partners = {name: sum(frozenset((name, other)) in pairs for other in names) for name in names}
    order = sorted(names, key=lambda name: partners[name])
    steps = 0

    def place(index: int, groups: list[list[str]], limit: int) -> bool:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise _TooLong
        if index == len(order):
            return True
        name = order[index]
        for group in groups:
            if _fits(name, group, pairs, refused):
                group.append(name)
                if place(index + 1, groups, limit):
                    return True
                group.pop()
        if len(groups) < limit:  # all new groups are alike
            groups.append([name])
            if place(index + 1, groups, limit):
                return True
            groups.pop()
        return False

    for limit in range(1, len(order) + 1):
        groups: list[list[str]] = []
        if place(0, groups, limit):
            return _arranged(groups, names)
    return ()


def _fits(name: str, group: Sequence[str], pairs: set[Pair], refused: Sequence[Pair]) -> bool:
    if not all(frozenset((name, other)) in pairs for other in group):
        return False
    joined = {name, *group}
    return not any(bad <= joined for bad in refused)


def _greedy(
    names: Sequence[str], pairs: set[Pair], verify: Callable[[tuple[str, ...]], bool]
) -> tuple[tuple[str, ...], ...]:
    """Put each subject into the first group that takes it: verified, but perhaps not the fewest."""
    groups: list[list[str]] = []
    for name in names:
        for group in groups:
            if _fits(name, group, pairs, ()) and verify((*group, name)):
                group.append(name)
                break
        else:
            groups.append([name])
    return _arranged(groups, names)


def _arranged(groups: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    rank = {name: index for index, name in enumerate(names)}
    inner = [tuple(sorted(group, key=rank.__getitem__)) for group in groups]
    return tuple(sorted(inner, key=lambda group: (-len(group), rank[group[0]])))


def _sorted(sets: Sequence[Pair], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return _arranged([list(one) for one in dict.fromkeys(sets)], names)
