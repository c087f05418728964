"""In which order the steps of a segment go to their workers, and which of them at the same time.

A step comes after all those whose bytes it reads or writes over, and after those that read what it writes over; else
their order is free. So they go in waves, as few as that leaves: of each worker all steps that need only what earlier
waves made, and each other. The groups of a wave are sent together, and waited for together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

MAX_REORDERED = 512  # steps of a segment; those of a longer one stay in their order


class Access(NamedTuple):
    """A step reads, or writes, bytes `begin` to `end` of some memory."""

    memory: Hashable
    begin: int
    end: int
    is_write: bool


def in_order(count: int) -> list[int]:
    """As `dependencies`, of steps that come one after the other."""
    return [(1 << number) - 1 for number in range(count)]


def dependencies(steps: Sequence[Iterable[Access]]) -> list[int]:
    """Of each step, as bits, the earlier steps that it must come after."""
    if len(steps) > MAX_REORDERED:
        return in_order(len(steps))
    found: list[int] = []
    seen: dict[Hashable, list[tuple[int, int, bool, int]]] = {}
    for number, its in enumerate(map(list, steps)):
        mask = 0
        for memory, begin, end, is_write in its:
            for first, last, was_write, other in seen.get(memory, ()):
                if first < end and begin < last and (is_write or was_write):
                    mask |= 1 << other
        for memory, begin, end, is_write in its:
            seen.setdefault(memory, []).append((begin, end, is_write, number))
        found.append(mask)
    return found


def waves(
    workers: Sequence[Hashable], after: Sequence[int], room: Callable[[], Callable[[int], bool]]
) -> list[list[list[int]]]:
    """Steps in groups, each of one worker, in waves: what a group comes after is in waves before it, or in itself. A
    step whose worker is None is alone. `room` makes, for a group, what takes one step more and says whether there was
    room; for the first there is."""
    left, done, found = list(range(len(workers))), 0, []
    while left:
        wave = [[left[0]]] if workers[left[0]] is None else _wave(left, workers, after, done, room)
        for number in (number for group in wave for number in group):
            done |= 1 << number
        left = [number for number in left if not done >> number & 1]
        found.append(wave)
    return found


def _wave(
    left: Sequence[int],
    workers: Sequence[Hashable],
    after: Sequence[int],
    done: int,
    room: Callable[[], Callable[[int], bool]],
) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    inside: dict[Hashable, int] = {}
    takers: dict[Hashable, Callable[[int], bool]] = {}
    full: set[Hashable] = {None}
    for number in left:
        worker = workers[number]
        if worker in full or after[number] & ~(done | inside.get(worker, 0)):
            continue
        if worker not in groups:
            takers[worker] = room()
        if not takers[worker](number) and worker in groups:
            full.add(worker)
            continue
        groups.setdefault(worker, []).append(number)
        inside[worker] = inside.get(worker, 0) | 1 << number
    return list(groups.values())
