"""Who made what a step of a program reads, and who else reads it: what passes that join steps must know."""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable
from typing import Any

from layerzero.client.plans.passes import Program, is_view
from layerzero.client.plans.recording import CONSTANT, Step, Storage, Use, Value
from layerzero.client.plans.traced import MethodCall

_PLAIN_NAMES = {
    "multiply": "mul", "imul": "mul", "mul_": "mul", "divide": "truediv", "true_divide": "truediv", "div": "truediv",
    "itruediv": "truediv", "div_": "truediv", "iadd": "add", "add_": "add", "subtract": "sub", "isub": "sub",
    "sub_": "sub", "bmm": "matmul", "amax": "max", "exp_": "exp",
}  # fmt: skip


class Flow:
    """Of a program as it is now: made anew after each change."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = {step.number: place for place, step in enumerate(program.steps)}
        self.given = {value.storage.number for value in program.outputs()}
        self._makers: dict[int, list[Step]] = {}
        self._readers: dict[int, list[Step]] = {}
        for step in program.steps:
            for storage in (*step.fresh, *step.writes):
                self._makers.setdefault(storage.number, []).append(step)
            for value in program.reads(step):
                self._readers.setdefault(value.storage.number, []).append(step)

    def source(self, use: Any, reader: Step) -> Step | None:
        """The step whose result the reader takes here, whole and as it was made; None where there is no such one."""
        if not isinstance(use, Use):
            return None
        value = self.program.value(use)
        place = self.place[reader.number]
        earlier = [step for step in self._makers.get(value.storage.number, ()) if self.place[step.number] < place]
        if not earlier or value.array is None or not is_whole(value):
            return None
        step = earlier[-1]
        made = [self.program.value(number) for number in step.made]
        return step if len(made) == 1 and is_same(made[0], value) else None

    def readers(self, storage: Storage) -> list[Step]:
        return self._readers.get(storage.number, [])

    def is_inside(self, steps: Collection[Step], last: Step) -> bool:
        """Whether nobody but these steps and the last one needs what they make, and they write to nothing else."""
        made = {storage.number: storage for step in steps for storage in step.fresh}
        numbers = {step.number for step in steps} | {last.number}
        if made.keys() & self.given or any(w.number not in made for step in steps for w in step.writes):
            return False
        return all(step.number in numbers or is_view(step) for home in made for step in self._readers.get(home, ()))

    def is_steady(self, values: Iterable[Value], steps: Collection[Step]) -> bool:
        """Whether nobody writes to these after the first of the steps has begun and before the last one has ended."""
        places = [self.place[step.number] for step in steps]
        written = {s.number for step in self.program.steps[min(places) : max(places) + 1] for s in step.writes}
        return not any(value.storage.number in written for value in values)


def is_whole(value: Value) -> bool:
    """Whether it is all of its memory, in row-major order."""
    array = value.array
    return (
        array is not None
        and not array.needs_copy
        and array.spec.is_contiguous
        and not value.offset
        and array.nbytes == value.storage.nbytes > 0
    )


def is_same(one: Value, other: Value) -> bool:
    """Whether two values are the same elements of the same memory."""
    if one is other:
        return True
    return (
        one.array is not None
        and other.array is not None
        and not one.array.needs_copy
        and not other.array.needs_copy
        and one.storage is other.storage
        and one.offset == other.offset
        and one.array.spec == other.array.spec
        and one.array.kind == other.array.kind
    )


def kind_of(step: Step) -> str:
    """What the step computes: "lz.softmax" for an op, "softmax", "add" and the like for a function of NumPy or torch
    that is known by that name, whatever it is called there; "" for others."""
    if step.request is not None:
        return f"lz.{step.request.op}"
    name, function = step.name, step.function
    if type(function).__module__ == MethodCall.__module__ and name != "asarray":  # a method, or an attribute
        return _PLAIN_NAMES.get(name, name)
    homes: list[Any] = [operator, sys.modules.get("numpy")]
    torch = sys.modules.get("torch")
    if torch is not None:
        homes += [torch, torch.nn.functional, torch.Tensor]
    if any(home is not None and getattr(home, name, None) is function for home in homes):
        return _PLAIN_NAMES.get(name, name)
    return ""


def number_of(program: Program, arg: Any) -> float | None:
    """A number of Python, or one in NumPy's clothes."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return float(arg)
    if isinstance(arg, Use):
        value = program.value(arg)
        is_number = value.storage.origin == CONSTANT and not value.storage.nbytes and not value.obj.shape
        if is_number and value.obj.dtype.kind in "fiu":
            return float(value.obj)
    return None
