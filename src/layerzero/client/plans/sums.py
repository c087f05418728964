"""The pass that makes sums and products of arrays, which own code makes, calls of lz.add and lz.mul: a plan's calls
before and after one are then one message to their worker, where they were two with a step of this process between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.connection.call import Request
from layerzero.client.planning.elementwise_plans import plan_add, plan_mul
from layerzero.client.planning.plans import Plan
from layerzero.client.plans.dataflow import is_whole, kind_of
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, may_be_chained
from layerzero.client.plans.recording import STEP, Recording, Step, Storage, Use, Value
from layerzero.client.plans.traced import map_leaves
from layerzero.client.session.session import Session

NAME = "sums as calls"
_OPS: dict[str, Callable[..., Plan]] = {"add": plan_add, "mul": plan_mul}
_DTYPES = ("float32", "float64")  # whose sums and products every library rounds once, and alike


def make_calls_of_sums(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for step in list(program.steps):
        is_pair = len(step.args) == 2 and not step.kwargs and len(step.made) == 1
        if step.request is None and kind_of(step) in _OPS and is_pair and _has_calls_around(program, step):
            _replace(fusing, step, kind_of(step))
    fusing.close()


def _has_calls_around(program: Program, step: Step) -> bool:
    """Whether what it takes or makes is a chained call's: elsewhere it is as well in this process."""
    homes = {value.storage.number for value in program.reads(step)}
    homes |= {storage.number for storage in (*step.fresh, *step.writes)}
    others = (one for one in program.steps if one.number in program.chained)
    return any(
        homes & {*(storage.number for storage in one.fresh), *(value.storage.number for value in program.reads(one))}
        for one in others
    )


def _replace(fusing: Fusing, step: Step, op: str) -> None:
    program = fusing.program
    if not all(isinstance(arg, Use) for arg in step.args):
        return fusing.refuse("a number is one of the two")
    one, other = (program.value(arg) for arg in step.args)
    made = program.value(step.made[0])
    dtypes = {str(value.obj.dtype).removeprefix("torch.") for value in (one, other, made)}
    if len(dtypes) > 1 or not dtypes <= {*_DTYPES} or one.array is None or other.array is None:
        return fusing.refuse("they are of several dtypes, or of one that libraries round differently")
    is_in_place = not step.fresh
    if is_in_place and (step.writes != (one.storage,) or made.storage is not one.storage or not is_whole(one)):
        return fusing.refuse("it writes to a part of an array")
    if is_in_place and (one.storage.origin != STEP or other.storage is one.storage):
        return fusing.refuse("it writes to an array of the caller's, or to one that it also adds")
    if not is_in_place and (step.writes or len(step.fresh) != 1):
        return fusing.refuse("it writes to other arrays")
    if getattr(one.obj, "requires_grad", False) or getattr(other.obj, "requires_grad", False):
        return fusing.refuse("gradients are followed through it")
    request = Request(op, (one.obj, other.obj), {}, _OPS[op])
    call = replace(step, name=op, function=None, writes=(), request=replace(request, args=()))
    call.args, call.reads = (Use(one.number), Use(other.number)), (one.number, other.number)
    if is_in_place:
        home = Storage(len(program.recording.storages), STEP, step.number, 0, one.storage.nbytes)
        result = Value(len(program.recording.values), made.obj, made.array, home, 0)
        call.made, call.result, call.fresh = (result.number,), Use(result.number), (home,)
    else:
        home, result = step.fresh[0], made
    expected = one.obj + other.obj if op == "add" else one.obj * other.obj
    if expected.shape != made.obj.shape:
        return fusing.refuse("it writes to a part of an array")
    if is_in_place:
        program.recording.storages.append(home)
        program.recording.values.append(result)
    was = program.recording.steps[step.number]
    program.recording.steps[step.number] = call
    is_in_reach = may_be_chained(program, call)
    if not is_in_reach:
        fusing.refuse("its arrays do not lie where a worker reaches them")
    tried = fusing.tried(request, [expected]) if is_in_reach else None
    if tried is None:
        program.recording.steps[step.number] = was
        return None
    call.kernel, call.kernel_us, _ = tried
    at = program.steps.index(step)
    program.steps[at] = call
    if is_in_place:
        one.storage.writers.remove(step.number)
        _Moved(program, one.storage, home, {made.number: result.number}).rewrite(program.steps[at + 1 :])
    choose_chained(program)
    fusing.done.append(f"{step.number} {step.name} at {step.where} is lz.{op}, tried with {call.kernel}")
    return None


class _Moved:
    """What was written in place lies in memory of its own: whoever came later takes it there."""

    def __init__(self, program: Program, was: Storage, home: Storage, values: dict[int, int]) -> None:
        """`values`: numbers of the new values by those of the old ones, as far as there are any."""
        self._program, self._was, self._home, self._values = program, was, home, values

    def rewrite(self, later: Sequence[Step]) -> None:
        recording = self._program.recording
        for step in later:
            step.args, step.kwargs, step.result = map_leaves((step.args, step.kwargs, step.result), self._leaf)
            step.reads = tuple(map(self._number, step.reads))
            step.made = tuple(map(self._number, step.made))
            if any(storage is self._was for storage in step.writes):
                step.writes = tuple(self._home if storage is self._was else storage for storage in step.writes)
                self._was.writers.remove(step.number)
                self._home.writers.append(step.number)
        recording.output = map_leaves(recording.output, self._leaf)

    def _leaf(self, leaf: Any) -> Any:
        return Use(self._number(leaf.value)) if isinstance(leaf, Use) else leaf

    def _number(self, number: int) -> int:
        recording: Recording = self._program.recording
        value = self._program.value(number)
        if value.storage is not self._was:
            return number
        if value.number not in self._values:
            copy = replace(value, number=len(recording.values), storage=self._home)
            recording.values.append(copy)
            self._values[value.number] = copy.number
        return self._values[value.number]
