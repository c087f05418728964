"""A program: what a recording is made into before it is laid out. Here: which steps a worker may run in a chain, whose
memory is whose, and the passes that leave steps out and the results as they are. Every pass says what it did."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection import arena as arenas
from layerzero.client.plans.recording import CONSTANT, INPUT, STEP, Recording, Step, Storage, Use, Value
from layerzero.client.plans.traced import map_leaves
from layerzero.ipc.vocabulary.ops import OPS

# Where a storage lies while the plan runs.
SLOT, OUTPUT, ARGUMENT, FIXED, LOOSE = "slot", "output", "argument", "constant", "own"


@dataclass(eq=False)
class Program:
    """`steps` are those that are left, in order. `chained`: numbers of those that a worker may run in a chain; `homes`:
    where each storage lies; `renamed`: values that are others'; `done`: what the passes did, a line each. `immutable`:
    storages of constants whose numbers cannot change; `fresh_constants` are made anew by the function at each run;
    `fused`: names of passes that joined steps; `without`: passes that were left out to see whether that is faster."""

    recording: Recording
    steps: list[Step]
    chained: set[int] = field(default_factory=set)
    homes: dict[int, str] = field(default_factory=dict)
    renamed: dict[int, int] = field(default_factory=dict)
    immutable: set[int] = field(default_factory=set)
    fresh_constants: set[int] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    without: tuple[str, ...] = ()

    def value(self, use: Use | int) -> Value:
        number = use if isinstance(use, int) else use.value
        return self.recording.values[self.renamed.get(number, number)]

    def reads(self, step: Step) -> Iterator[Value]:
        return map(self.value, step.reads)

    def outputs(self) -> list[Value]:
        found: list[Value] = []

        def note(leaf: Any) -> None:
            if isinstance(leaf, Use):
                found.append(self.value(leaf))

        map_leaves(self.recording.output, note)
        return found


# --- which steps may cross in a chain


def choose_chained(program: Program) -> None:
    may_be = may_be_left_out if program.recording.device not in (None, CPU) else may_be_chained
    program.chained = {step.number for step in program.steps if may_be(program, step)}


def may_be_left_out(program: Program, step: Step) -> bool:
    """Whether a call does nothing but make its result."""
    request = step.request
    if request is None or step.writes or OPS[request.op].in_place or "out" in step.kwargs:
        return False
    return all(value.array is not None for value in program.reads(step))


def may_be_chained(program: Program, step: Step) -> bool:
    request = step.request
    if request is None or request.timeout_s is not None or request.output_bytes is not None or step.writes:
        return False
    if OPS[request.op].in_place or "out" in step.kwargs or not step.made:
        return False
    made = [program.recording.values[number] for number in step.made]
    if any(v.array is None or not v.array.spec.is_contiguous or not v.array.nbytes or v.offset for v in made):
        return False
    return all(_is_in_reach(program, value) for value in program.reads(step))


def _is_in_reach(program: Program, value: Value) -> bool:
    """Whether a worker can be told where this array lies in each run."""
    array, home = value.array, value.storage
    if array is None or array.needs_copy or not array.nbytes or not home.nbytes:  # NumPy's scalars have no memory
        return False
    if home.origin == CONSTANT:
        is_shared = arenas.pool.find(array.address, array.spec.span_bytes) is not None
        return is_shared or (home.is_whole and not home.writers)
    if home.origin == INPUT:
        first = program.recording.values[program.recording.inputs[home.made_by]].array
        return home.is_whole and not home.writers and first is not None and first.spec.is_contiguous
    maker = program.recording.steps[home.made_by]
    if maker.request is not None and "out" not in maker.kwargs:
        return home.is_whole
    first_made = next(v for v in map(program.value, maker.made) if v.storage is home)
    whole = first_made.array
    return home.is_whole and whole is not None and not whole.needs_copy and whole.spec.span_bytes == whole.nbytes


# --- passes


def fold_constants(program: Program) -> None:
    """Steps on constants that cannot change are done: what they made when they were recorded is a constant, too. Not
    what the function gives: that is its caller's to write to, the recorded one and each later one."""
    given = {value.storage.number for value in program.outputs()}
    folded = []
    for step in program.steps:
        homes = {value.storage for value in program.reads(step)}
        is_fixed = homes and all(h.number in program.immutable and not h.writers for h in homes)
        is_known = step.request is not None or is_view(step) or _is_pure(step)  # another one may draw random numbers
        is_own = all(not storage.writers and storage.number not in given for storage in step.fresh)
        if is_fixed and is_known and not step.writes and is_own:
            folded.append(step)
            for storage in step.fresh:
                storage.origin = CONSTANT
                program.immutable.add(storage.number)
    leave_out(program, folded, "constant folding", "on constants alone")


def share_equal(program: Program) -> None:
    """Calls with the same op, parameters and arrays are made once, unless the second result is the caller's."""
    given = {value.storage.number for value in program.outputs()}
    seen: dict[Any, Step] = {}
    shared = []
    for step in program.steps:
        request = step.request
        if step.number not in program.chained or request is None:
            continue
        reads = list(program.reads(step))
        if any(value.storage.writers for value in reads) or any(s.writers or s.number in given for s in step.fresh):
            continue
        assert all(value.array is not None for value in reads)
        arrays = tuple((v.storage.number, v.offset, v.array.spec) for v in reads)  # type: ignore[union-attr]
        absent = tuple(not isinstance(arg, Use) for arg in step.args)
        params = tuple((name, type(value), repr(value)) for name, value in request.params.items())
        first = seen.setdefault((request.op, params, request.backend, absent, arrays), step)
        if first is not step and not any(storage.writers for storage in first.fresh):
            program.renamed.update(zip(step.made, first.made, strict=True))
            shared.append(step)
            _follow_views(program, step, first)
    leave_out(program, shared, "common subexpressions", "as another call")


def _follow_views(program: Program, step: Step, first: Step) -> None:
    """Views of the second result are views of the first one."""
    homes = {storage.number: other for storage, other in zip(step.fresh, first.fresh, strict=True)}
    for value in program.recording.values:
        other = homes.get(value.storage.number)
        if other is not None:
            value.storage = other


def drop_unused(program: Program) -> None:
    """Steps whose results nobody takes, and that write to nothing, are not made."""
    needed: set[int] = {value.storage.number for value in program.outputs()}
    kept: list[Step] = []
    dropped = []
    for step in reversed(program.steps):
        made = {storage.number for storage in step.fresh}
        is_used = bool(made & needed) or bool(step.writes) or is_view(step)
        if not is_used and (step.number in program.chained or (step.request is None and _is_pure(step))):
            dropped.append(step)
            continue
        kept.append(step)
        needed |= {value.storage.number for value in program.reads(step)} if not is_view(step) else set()
    program.steps = kept[::-1]
    leave_out(program, [step for step in dropped if not is_view(step)], "dead results", "that nobody takes")


def is_view(step: Step) -> bool:
    return step.request is None and not step.fresh and not step.writes


def _is_pure(step: Step) -> bool:
    """Functions of NumPy and torch that are known to do nothing but compute: operators and ufuncs."""
    numpy = sys.modules.get("numpy")
    is_ufunc = numpy is not None and isinstance(step.function, numpy.ufunc)
    return is_ufunc or getattr(step.function, "__module__", None) == "_operator"


def leave_out(program: Program, steps: list[Step], name: str, why: str) -> None:
    numbers = {step.number for step in steps}
    program.steps = [step for step in program.steps if step.number not in numbers]
    program.chained -= numbers
    if steps:
        program.done.append(
            f"{name}: {len(steps)} of the steps, {why}: {', '.join(_label(step) for step in steps[:4])}"
        )


def _label(step: Step) -> str:
    return f"{step.number} {step.name}"


# --- where storages lie


def place(program: Program) -> None:
    given = {value.storage.number for value in program.outputs()}
    reached: set[int] = set()  # by workers
    for step in program.steps:
        if step.number in program.chained:
            reached |= {value.storage.number for value in program.reads(step)}
            reached |= {storage.number for storage in step.fresh}
    for storage in program.recording.storages:
        program.homes[storage.number] = _home(storage, storage.number in reached, storage.number in given)


def _home(storage: Storage, is_reached: bool, is_given: bool) -> str:
    if storage.origin == CONSTANT:
        return FIXED
    if storage.origin == INPUT:
        return ARGUMENT
    assert storage.origin == STEP
    if not is_reached:
        return LOOSE
    return OUTPUT if is_given else SLOT
