"""Slots: one block of memory for all that a plan's steps leave for each other, laid out once by when each is needed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from layerzero.client.plans.passes import SLOT, Program
from layerzero.client.plans.recording import Step, Storage
from layerzero.client.plans.scheduling import in_order
from layerzero.ipc.shm.memory import ALIGNMENT

NOBODY: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class Slot:
    """Bytes `offset` to `offset + nbytes` of the block, from step `first` to step `last`, which have it to themselves
    meanwhile, but for what `last` makes in its place."""

    storage: int
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """`peak_bytes` is the block's size, `sum_bytes` what the slots would take without sharing; `in_place`: how many
    steps write their result over what they have just taken."""

    slots: dict[int, Slot]
    peak_bytes: int
    sum_bytes: int
    in_place: int


def lay_out(program: Program, skipped: Collection[int] = (), workers: Mapping[int, str] = NOBODY) -> Layout:
    """The largest first, each at the lowest place that is free for as long as it is needed. `skipped`: numbers of steps
    that touch no memory. `workers`: which one each chained step goes to, one for all where it is empty. Steps of
    different ones may run at the same time where they do not need each other, and share no slots then; the others run
    in their order.

    A step of this process may write over what it takes: NumPy's ufuncs mind that, and results of others are copied
    there when they are done. A worker's may not: were it to die half-way, the next one had nothing to begin with.
    """
    steps = [step for step in program.steps if step.number not in skipped]
    before = _before(program, steps, workers) if workers else in_order(len(steps))
    over = [
        mask if step.number in program.chained else mask | 1 << n
        for n, (step, mask) in enumerate(zip(steps, before, strict=True))
    ]
    wanted = sorted(_needed(program, steps), key=lambda one: (-one.slot.nbytes, one.slot.first))
    placed: list[tuple[Slot, int]] = []
    for slot, users in wanted:
        offset = 0
        for other, its in sorted(placed, key=lambda one: one[0].offset):
            is_over = not its & ~over[slot.first] or not users & ~over[other.first]
            if is_over and slot.first != other.first:
                continue  # one is over when the other is made
            if offset + slot.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        placed.append((replace(slot, offset=offset), users))
    places = {step.number: place for place, step in enumerate(program.steps)}
    peak = max((slot.offset + slot.nbytes for slot, _ in placed), default=0)
    slots = [
        replace(slot, first=places[steps[slot.first].number], last=places[steps[slot.last].number])
        for slot, _ in placed
    ]
    laid_out = {slot.storage: slot for slot in slots}
    return Layout(laid_out, peak, sum(slot.nbytes for slot in slots), _count_in_place(slots))


def _count_in_place(slots: Sequence[Slot]) -> int:
    last: dict[int, list[Slot]] = {}
    for slot in slots:
        last.setdefault(slot.last, []).append(slot)
    found = {
        slot.first
        for slot in slots
        for other in last.get(slot.first, ())
        if other is not slot and slot.offset < other.offset + other.nbytes and other.offset < slot.offset + slot.nbytes
    }
    return len(found)


class _Needed(NamedTuple):
    """A slot without its place, and the steps that need it, as bits."""

    slot: Slot
    users: int


def _needed(program: Program, steps: Sequence[Step]) -> list[_Needed]:
    users: dict[int, list[int]] = {}
    storages: dict[int, Storage] = {}
    for place, step in enumerate(steps):
        for storage in _touched(program, step):
            if program.homes[storage.number] == SLOT:
                storages[storage.number] = storage
                users.setdefault(storage.number, []).append(place)
    found = []
    for number, its in users.items():
        nbytes = -(-storages[number].nbytes // ALIGNMENT) * ALIGNMENT
        bits = functools.reduce(operator.or_, (1 << place for place in its))
        found.append(_Needed(Slot(number, 0, nbytes, its[0], its[-1]), bits))
    return found


def _touched(program: Program, step: Step) -> list[Storage]:
    return [*step.fresh, *(value.storage for value in program.reads(step)), *step.writes]


def _before(program: Program, steps: Sequence[Step], workers: Mapping[int, str]) -> list[int]:
    """Of each step, as bits, those that have ended when it begins: those that made what it takes, those of the same
    worker before it, all before a step that runs in this process, and what these came after."""
    found: list[int] = []
    of_worker: dict[str, int] = {}
    of_storage: dict[int, int] = {}
    of_own = 0
    for place, step in enumerate(steps):
        worker = workers.get(step.number, "")
        if step.number in program.chained:
            mask = of_own | of_worker.get(worker, 0)
            for storage in _touched(program, step):
                mask |= of_storage.get(storage.number, 0)
        else:
            mask = (1 << place) - 1
            of_own = mask | 1 << place
        found.append(mask)
        of_worker[worker] = mask | 1 << place
        for storage in (*step.fresh, *step.writes):
            of_storage[storage.number] = mask | 1 << place
    return found
