"""The memory that a frozen plan has for itself, and references to it as workers take them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.arena import Arena
from layerzero.client.plans.layout import Layout
from layerzero.client.plans.passes import ARGUMENT, FIXED, OUTPUT, SLOT, Program
from layerzero.client.plans.recording import Value
from layerzero.ipc.shm.memory import ALIGNMENT
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Place(NamedTuple):
    """Bytes of an arena."""

    arena: Arena
    offset: int
    nbytes: int


class Reach(NamedTuple):
    """Where a value lies: `offset` is from the arena's begin, or from that of a variable."""

    variable: int | None
    arena: Arena | None
    offset: int
    nbytes: int


@dataclass(eq=False)
class Constant:
    """A constant that a worker reads in the plan's own memory. `rule` says when it is copied there again."""

    value: Value
    place: Place
    rule: str
    version: int = -1


KEPT = "copied once: nobody can change it"
BY_VERSION = "copied when torch says that it has changed"
EACH_RUN = "copied at each run: it could change; lz.share avoids this"


class Memory:
    """Slots, copies of constants and arguments, and room for chains' tables: one block of the pool."""

    def __init__(self, program: Program, layout: Layout, table_bytes: int) -> None:
        """Raises OutOfMemory."""
        self._program, self._layout = program, layout
        self.variables: dict[int, int] = {}  # storage -> number
        self.copied: dict[int, tuple[int, int]] = {}  # argument's storage -> offset and bytes of its copy here
        self.constants: dict[int, Constant] = {}
        read = {v.storage.number: v for s in program.steps if s.number in program.chained for v in program.reads(s)}
        made = [s for step in program.steps for s in step.fresh if program.homes[s.number] == OUTPUT]
        at = layout.peak_bytes
        copies: list[tuple[Value, int]] = []
        for number, value in read.items():
            home, storage = program.homes[number], value.storage
            if home == ARGUMENT:
                self.variables[number] = len(self.variables)
                self.copied[number] = (at, storage.nbytes)
                at += _aligned(storage.nbytes)
            elif home == FIXED and arenas.pool.find(storage.address, storage.nbytes) is None:
                copies.append((_first_of(program, storage.number), at))
                at += _aligned(storage.nbytes)
        for storage in made:
            self.variables[storage.number] = len(self.variables)
        self.table_at = at
        self.block, self.arena, self.offset = arenas.pool.allocate(max(at + table_bytes, 1))
        for value, start in copies:
            place = Place(self.arena, self.offset + start, value.storage.nbytes)
            self.constants[value.storage.number] = Constant(value, place, self._rule(value))
        storages = program.recording.storages
        outputs = {s.number: s.nbytes for s in made}
        # Of each variable, in order: its storage, the argument that it is, and the bytes of an output.
        self._lent = [(n, storages[n].made_by, outputs.get(n)) for n in self.variables]

    @property
    def nbytes(self) -> int:
        return len(self.block)

    def _rule(self, value: Value) -> str:
        if value.storage.number in self._program.immutable:
            return KEPT
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value.obj, torch.nn.Parameter):
            return BY_VERSION
        return EACH_RUN

    def refresh(self) -> int:
        """Copy the constants that may have changed. Returns how many bytes those were."""
        copied = 0
        for one in self.constants.values():
            version = one.value.obj._version if one.rule == BY_VERSION else 0
            if one.rule == EACH_RUN or one.version != version:
                _copy_storage(one.value, one.place)
                one.version = version
                copied += one.place.nbytes
        return copied

    def reach(self, value: Value) -> Reach:
        """Where a worker finds a value that a chained step reads or makes."""
        storage, spec = value.storage, value.array.spec  # type: ignore[union-attr]  # else it is in no chain
        home, nbytes = self._program.homes[storage.number], spec.span_bytes
        if home in (ARGUMENT, OUTPUT):
            return Reach(self.variables[storage.number], None, value.offset, nbytes)
        if home == SLOT:
            return Reach(
                None, self.arena, self.offset + self._layout.slots[storage.number].offset + value.offset, nbytes
            )
        constant = self.constants.get(storage.number)
        if constant is not None:
            return Reach(None, self.arena, constant.place.offset + value.offset, nbytes)
        found = arenas.pool.find(value.array.address, nbytes)  # type: ignore[union-attr]
        assert found is not None, "a constant that is shared stays where it is while the plan has it"
        return Reach(None, found[0], found[1], nbytes)

    def lend(self, inputs: Sequence[Any]) -> tuple[list[Place], dict[int, memoryview], int]:
        """For one run: where each variable lies, the memory of outputs by storage, and how many bytes were copied.
        Raises OutOfMemory."""
        places: list[Place] = []
        fresh: dict[int, memoryview] = {}
        copied = 0
        for number, argument, output_bytes in self._lent:
            if output_bytes is not None:
                fresh[number], arena, offset = arenas.pool.allocate(output_bytes)
                places.append(Place(arena, offset, output_bytes))
                continue
            given = describe(inputs[argument])
            nbytes = given.spec.span_bytes
            found = arenas.pool.find(given.address, nbytes)
            if found is not None:
                places.append(Place(found[0], found[1], nbytes))
            else:
                at, size = self.copied[number]
                copy_into(given, self.block[at : at + size])
                copied += size
                places.append(Place(self.arena, self.offset + at, size))
        return places, fresh, copied


def array_at(arena: Arena, offset: int, spec: TensorSpec, like: Array) -> Any:
    """An array of the kind of `like` on an arena's bytes, which it does not keep from being used again."""
    return wrap(arena.view[offset : offset + spec.span_bytes], spec, like)[0]


def array_on(memory: memoryview, offset: int, spec: TensorSpec, like: Array) -> Any:
    """An array of the kind of `like` on a block of the pool, which is its own while it or a view of it lives."""
    if offset == 0 and spec.span_bytes == len(memory):
        return wrap(memory, spec, like)[0]
    whole, _ = wrap(memory, TensorSpec.contiguous("uint8", (len(memory),)), like)
    part = whole[offset : offset + spec.span_bytes].view(like.obj.dtype)
    if like.kind == "torch":
        return part.as_strided(spec.shape, spec.strides)
    strides = [stride * spec.itemsize for stride in spec.strides]
    return sys.modules["numpy"].lib.stride_tricks.as_strided(part, spec.shape, strides)


def put(result: Any, arena: Arena, offset: int) -> None:
    """Write an array's elements, in row-major order, to an arena's bytes."""
    array = describe(result)
    copy_into(array, arena.view[offset : offset + array.nbytes])


def _copy_storage(value: Value, place: Place) -> None:
    """All bytes of a constant's memory, in the order in which they lie there."""
    target = address_of(place.arena.view[place.offset : place.offset + place.nbytes])
    ctypes.memmove(target, value.storage.address, place.nbytes)


def _first_of(program: Program, storage: int) -> Value:
    return next(value for value in program.recording.values if value.storage.number == storage)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
