"""A recorded function split over ranks: each rank's steps, its parts of the weights, and where ranks must meet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.plans.recording import CONSTANT, Recording, Step, Use, Value
from layerzero.client.plans.traced import map_leaves
from layerzero.groups.layouts import WHOLE, Applied, CannotSplit, Layout, Look
from layerzero.groups.split_rules import rule_of, takes_summands
from layerzero.ipc.errors import InvalidArgument

JOINED_BYTES = 256 << 10  # sums that could be one are, up to so much: larger ones cost more to copy than to call
_HELP = "docs/groups.md has the ops that are split"


@dataclass(frozen=True)
class LocalStep:
    """A step as each rank makes it."""

    step: Step
    applied: Applied


@dataclass(frozen=True)
class Stretch:
    """Steps that need no other rank: `takes` and `makes` are values."""

    steps: tuple[LocalStep, ...]
    takes: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One call of all ranks: the sum of these values, or the parts of one along `dim`, put together."""

    values: tuple[int, ...]
    dim: int | None = None


@dataclass(frozen=True)
class Split:
    """`whole`: steps with weights that every rank makes whole, and why. `layouts` are of values."""

    recording: Recording
    size: int
    items: tuple[Stretch | Collective, ...]
    layouts: dict[int, Layout]
    whole: dict[int, str]
    constants: frozenset[int]

    def steps(self) -> Iterator[LocalStep]:
        for item in self.items:
            if isinstance(item, Stretch):
                yield from item.steps

    def outputs(self) -> list[int]:
        """Values of the function's result."""
        return list(dict.fromkeys(_uses_of(self.recording.output)))

    def lines(self) -> list[str]:
        """The same on all ranks that have split the same function alike."""
        told = []
        for item in self.items:
            if isinstance(item, Collective):
                told.append(f"collect {item.values} {item.dim}")
            else:
                told += [f"{one.step.number} {one.step.name} {one.applied}" for one in item.steps]
        described = [f"{v.number} {self.text_of(v.number)} {self.layouts.get(v.number)}" for v in self.recording.values]
        return [str(self.size), *told, *described]

    @property
    def digest(self) -> bytes:
        """Of `lines`."""
        return hashlib.sha256("\n".join(self.lines()).encode()).digest()

    def text_of(self, value: int) -> str:
        """Its dtype and shape, on one rank."""
        shape = list(shape_of(self.recording.values[value]))
        layout = self.layouts.get(value, WHOLE)
        if layout.dim is not None:
            shape[layout.dim] //= self.size
        return f"{dtype_of(self.recording.values[value])}{shape}"


def split(recording: Recording, size: int) -> Split:
    """Raises InvalidArgument, which names the step that cannot be split, and why."""
    _demand_splittable(recording)
    whole: dict[int, str] = {}
    while True:
        try:
            return _Splitting(recording, size, whole).made()
        except CannotSplit as exc:
            left = exc.origins - whole.keys()
            assert left, "a part comes of a step that is not whole"
            whole.update(dict.fromkeys(left, str(exc)))


def shape_of(value: Value) -> tuple[int, ...]:
    return tuple(value.obj.shape if value.array is None else value.array.spec.shape)


def dtype_of(value: Value) -> str:
    return str(value.obj.dtype).removeprefix("torch.") if value.array is None else str(value.array.spec.dtype)


def nbytes_of(value: Value) -> int:
    return 0 if value.array is None else int(value.array.nbytes)


def _demand_splittable(recording: Recording) -> None:
    if recording.device not in (None, CPU) and recording.kind != "torch":
        raise InvalidArgument(f"give it torch tensors: of a GPU, no plans of {recording.kind} arrays are split")
    for step in recording.steps:
        if step.writes:
            raise InvalidArgument(
                f"let {step.name} at {step.where} make a new array: it writes in place, which has no rule to be split"
            )


@dataclass
class _Splitting:
    """One try."""

    recording: Recording
    size: int
    whole: dict[int, str]
    layouts: dict[int, Layout] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)

    def made(self) -> Split:
        recording = self.recording
        self.constants = frozenset(v.number for v in recording.values if v.storage.origin == CONSTANT)
        self.outputs = list(dict.fromkeys(_uses_of(recording.output)))
        self.readers: dict[int, int] = {}
        for step in recording.steps:
            for number in set(step.reads):
                self.readers[number] = self.readers.get(number, 0) + 1
        kind = next((value.array.kind for value in recording.values if value.array is not None), "")
        self.is_torch = kind == "torch"
        steps = [step for step in recording.steps if not step.made or not set(step.made) <= self.constants]
        local = [LocalStep(step, self._applied(step)) for step in steps]
        if not any(one.applied.how for one in local):
            raise InvalidArgument(self._nothing())
        self.summed |= {number for number in self.outputs if self._layout(number).is_summand}
        gathered = {number for number in self.outputs if self._layout(number).dim is not None}
        items = [*self._ordered(local), *(Collective((n,), self._layout(n).dim) for n in self.outputs if n in gathered)]
        return Split(recording, self.size, tuple(items), self.layouts, self.whole, self.constants)

    def _nothing(self) -> str:
        names = {step.number: f"{step.name} at {step.where}" for step in self.recording.steps}
        reasons = "; ".join(f"{names[number]}: {why}" for number, why in self.whole.items())
        text = "give it a function with lz.linear or lz.matmul by weights of its own: nothing of it can be split over"
        return f"{text} {self.size} ranks" + (f" ({reasons})" if reasons else "")

    def _layout(self, number: int) -> Layout:
        return self.layouts.get(number, WHOLE)

    def _applied(self, step: Step) -> Applied:
        rule = rule_of(step)
        seen = dict(self.layouts)
        values = self.recording.values
        summands = [number for number in step.reads if self._layout(number).is_summand]
        if not self._goes_before_sums(step, summands):
            self.summed.update(summands)
            seen.update(dict.fromkeys(summands, WHOLE))
        shapes = (lambda n: shape_of(values[n]), self.constants, self.whole)
        look = Look(step, self.size, seen, *shapes, is_torch=self.is_torch)
        applied = self._without_rule(step, look) if rule is None else rule(look)
        self.layouts.update(zip(step.made, applied.makes, strict=True))
        return applied

    def _goes_before_sums(self, step: Step, summands: list[int]) -> bool:
        is_alone = all(self.readers[number] == 1 and number not in self.outputs for number in summands)
        is_all = len(summands) == len(step.reads)
        return is_all and len(set(summands)) == len(summands) and is_alone and takes_summands(step)

    def _without_rule(self, step: Step, look: Look) -> Applied:
        for number in step.reads:
            layout = look.layouts.get(number, WHOLE)
            if layout.dim is not None:
                value = self.recording.values[number]
                raise InvalidArgument(
                    f"leave {step.name} at {step.where} out of what is split: it has no rule for an array in parts, "
                    f"{dtype_of(value)}{list(shape_of(value))} along dimension {layout.dim}; {_HELP}"
                )
        return Applied(tuple(WHOLE for _ in step.made))

    # --- order

    def _ordered(self, steps: list[LocalStep]) -> Iterator[Stretch | Collective]:
        """All steps that need no sum that is still to be made, in their order; then one sum of all that wait for it."""
        known = set(self.recording.inputs) | self.constants
        left, waiting = list(steps), list[int]()
        while left or waiting:
            ready: list[LocalStep] = []
            later: list[LocalStep] = []
            for one in left:
                if all(number in known for number in one.step.reads):
                    ready.append(one)
                    waiting += [number for number in one.step.made if number in self.summed]
                    known |= set(one.step.made) - self.summed
                else:
                    later.append(one)
            if ready:
                yield self._stretch(ready, later)
            assert ready or waiting, "a step waits for nothing"
            yield from self._joined(waiting)
            known.update(waiting)
            left, waiting = later, []

    def _stretch(self, steps: list[LocalStep], later: list[LocalStep]) -> Stretch:
        made = [number for one in steps for number in one.step.made]
        read = [number for one in steps for number in one.step.reads]
        wanted = {number for one in later for number in one.step.reads} | {*self.outputs} | self.summed
        takes = [n for n in dict.fromkeys(read) if n not in made and n not in self.constants]
        return Stretch(tuple(steps), tuple(takes), tuple(n for n in made if n in wanted))

    def _joined(self, waiting: list[int]) -> Iterator[Collective]:
        values = self.recording.values
        small: dict[str, list[int]] = {}
        for number in waiting:
            if nbytes_of(values[number]) <= JOINED_BYTES:
                small.setdefault(dtype_of(values[number]), []).append(number)
        for numbers in small.values():
            total = 0
            row: list[int] = []
            for number in numbers:
                if row and total + nbytes_of(values[number]) > JOINED_BYTES:
                    yield Collective(tuple(row))
                    row, total = [], 0
                row.append(number)
                total += nbytes_of(values[number])
            yield Collective(tuple(row))
        for number in waiting:
            if nbytes_of(values[number]) > JOINED_BYTES:
                yield Collective((number,))


def _uses_of(structure: Any) -> list[int]:
    found: list[int] = []

    def note(leaf: Any) -> None:
        if isinstance(leaf, Use):
            found.append(leaf.value)

    map_leaves(structure, note)
    return found
