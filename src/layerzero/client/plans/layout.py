"""Slots: one block of memory for all that a plan's steps leave for each other, laid out once by when each is needed."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.client.plans.passes import SLOT, Program
from layerzero.client.plans.recording import Storage
from layerzero.ipc.shm.memory import ALIGNMENT


@dataclass(frozen=True)
class Slot:
    """Bytes `offset` to `offset + nbytes` of the block, from step `first` to step `last`, which have it to themselves
    meanwhile."""

    storage: int
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """`peak_bytes` is the block's size, `sum_bytes` what the slots would take without sharing."""

    slots: dict[int, Slot]
    peak_bytes: int
    sum_bytes: int


def lay_out(program: Program) -> Layout:
    """The largest first, each at the lowest place that is free for as long as it is needed."""
    wanted = sorted(_needed(program), key=lambda one: (-one.nbytes, one.first))
    placed: list[Slot] = []
    for one in wanted:
        offset = 0
        for other in sorted((p for p in placed if p.first <= one.last and one.first <= p.last), key=lambda p: p.offset):
            if offset + one.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        placed.append(Slot(one.storage, offset, one.nbytes, one.first, one.last))
    peak = max((slot.offset + slot.nbytes for slot in placed), default=0)
    return Layout({slot.storage: slot for slot in placed}, peak, sum(slot.nbytes for slot in placed))


def _needed(program: Program) -> list[Slot]:
    """Each slot's bytes, and the places of the first and the last step that need it."""
    spans: dict[int, tuple[Storage, int, int]] = {}
    for place, step in enumerate(program.steps):
        for storage in (*step.fresh, *(value.storage for value in program.reads(step)), *step.writes):
            if program.homes[storage.number] == SLOT:
                first = spans[storage.number][1] if storage.number in spans else place
                spans[storage.number] = (storage, first, place)
    return [
        Slot(storage.number, 0, -(-storage.nbytes // ALIGNMENT) * ALIGNMENT, first, last)
        for storage, first, last in spans.values()
    ]
