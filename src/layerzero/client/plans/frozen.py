"""A frozen plan: its memory laid out, its steps in order, run as one."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.arrays.recognition import describe
from layerzero.client.connection import observing
from layerzero.client.connection.overlay import Overlay, Scope, on_top
from layerzero.client.connection.record import kernel_of
from layerzero.client.plans.layout import NOBODY, lay_out
from layerzero.client.plans.memory import Memory, Place, array_at, array_on
from layerzero.client.plans.passes import FIXED, OUTPUT, SLOT, Program
from layerzero.client.plans.recording import Step, Use, Value
from layerzero.client.plans.segments import CALLED, NO_WISHES, OWN, Segment, StepRun, Tell
from layerzero.client.plans.traced import map_leaves
from layerzero.client.session.session import Session

_BY_OPERATOR = {
    operator.add: "add", operator.sub: "subtract", operator.mul: "multiply", operator.truediv: "true_divide",
    operator.neg: "negative",
}  # fmt: skip
"""Ufuncs that do what operators do with arrays, and take `out`."""


class FrozenPlan:
    """Of one program and one connection. For one thread at a time."""

    def __init__(
        self,
        session: Session,
        program: Program,
        wish: Overlay | None = None,
        workers: Mapping[int, str] = NOBODY,
        tell: Tell | None = None,
        asked: Overlay | None = None,
        wishes: Mapping[int, Overlay] = NO_WISHES,
    ) -> None:
        """`asked`: what the caller asks of selection; `wish`: what its calls ask besides, `wishes` by their step;
        `workers`: who `served` its steps before, so that those of several can run at the same time; `tell` is told of
        links and fallbacks. Raises OutOfMemory."""
        self.session, self.program, self.wish, self.workers = session, program, wish, workers
        self.link, self._tell = session.link, tell
        self._policy, self._wishes = asked if wish is None else on_top(asked, wish), wishes
        self._needed = self._find_needed()
        own = (step for step in program.steps if step.number not in program.chained)
        skipped = {step.number for step in own if self._is_skipped(step, self._needed)}
        self.layout = lay_out(program, skipped, workers)
        chained = [step for step in program.steps if step.number in program.chained]
        self.memory = Memory(program, self.layout, sum(Segment.table_bytes(step) for step in chained))
        self.timings: dict[int, StepRun] = {}
        self.is_spoilt = False
        self.copied_bytes = 0
        self._static: dict[int, Any] = {}
        self.items = self._make_items()
        self._scope = None if wish is None else Scope(wish)
        if self._scope is not None:
            self._scope.end()  # until a run

    @property
    def segments(self) -> list[Segment]:
        return [item for item in self.items if isinstance(item, Segment)]

    @property
    def is_linked(self) -> bool:
        """Whether all its calls have leases."""
        return all(segment.is_linked for segment in self.segments)

    def served(self) -> Mapping[int, str]:
        """The backend of each step that crosses, by the step's number; nothing where that is one for all."""
        found: dict[int, str] = {}
        for segment in self.segments:
            for chain in segment.chains:
                for number, lease in zip(chain.numbers, chain.leases, strict=True):
                    found[segment.steps[number].number] = lease.decision.backend
        return found if len(set(found.values())) > 1 else NOBODY

    def run(self, inputs: Sequence[Any]) -> Any:
        """The function's result. `inputs`: the arrays of its arguments, in order. Raises what its steps raise: a worker
        may still write to the memory of a plan that was interrupted, which is not used again."""
        scope = self._scope
        if scope is not None:
            scope.__enter__()
        try:
            frame = _Frame(self, inputs)
            for item in self.items:
                if isinstance(item, Segment):
                    item.run(frame.places, (self.memory.block, frame.fresh, inputs))
                else:
                    frame.run_here(item)
            self.copied_bytes = frame.copied_bytes
            return frame.output()
        except BaseException:
            self.is_spoilt = True
            raise
        finally:
            if scope is not None:
                scope.end()

    def debug(self, inputs: Sequence[Any]) -> Any:
        """A generator that runs step by step, each as a call of its own, and gives each step, its results, and the
        arrays that it takes, where it is a call."""
        frame = _Frame(self, inputs)
        for item in self.items:
            if isinstance(item, Segment):
                for number, step in enumerate(item.steps):
                    item.call(number, frame.places)
                    made = tuple(item.array(self.program.value(number), frame.places) for number in step.made)
                    yield step, made, item.arguments(step, frame.places)
            else:
                frame.run_here(item)
                made = tuple(frame.array(self.program.value(number)) for number in item.made)
                yield item, made, map_leaves(item.args, frame.filled) if item.request is not None else ()
        return frame.output()

    def _find_needed(self) -> set[int]:
        """Values whose arrays this process needs: those of its own steps, of calls that go one by one, and of the
        result."""
        needed = {value.number for value in self.program.outputs()}
        for step in reversed(self.program.steps):
            if step.number not in self.program.chained and not self._is_skipped(step, needed):
                needed |= {value.number for value in self.program.reads(step)}
        return needed

    def _is_skipped(self, step: Step, needed: set[int]) -> bool:
        """A view that nobody needs as an array, or that can be made from where it lies."""
        if step.request is not None or step.fresh or step.writes:
            return False
        made = [self.program.value(number) for number in step.made]
        return all(value.number not in needed or self._is_placed(value) for value in made)

    def _is_placed(self, value: Value) -> bool:
        """Whether where it lies tells all of its array."""
        home = self.program.homes[value.storage.number]
        if home == FIXED:
            return True
        return home in (SLOT, OUTPUT) and value.array is not None and not value.array.needs_copy

    def _make_items(self) -> list[Segment | Step]:
        items: list[Segment | Step] = []
        table_at = self.memory.table_at
        for step in self.program.steps:
            if step.number in self.program.chained:
                if not items or not isinstance(items[-1], Segment):
                    its = (self.session, self.program, self.memory, list[Step](), table_at, self.timings, self._policy)
                    items.append(Segment(*its, self._tell, self._wishes))
                items[-1].steps.append(step)  # type: ignore[union-attr]
                table_at += Segment.table_bytes(step)
            elif not self._is_skipped(step, self._needed):
                items.append(step)
        return items

    def static(self, value: Value) -> Any:
        """The array of a value that lies in the plan's own memory."""
        found = self._static.get(value.number)
        if found is None:
            reach = self.memory.reach(value)
            assert reach.arena is not None
            assert value.array is not None
            found = array_at(reach.arena, reach.offset, value.array.spec, value.array)
            self._static[value.number] = found
        return found


class _Frame:
    """One run: arrays of this process by value, and where variables lie."""

    def __init__(self, plan: FrozenPlan, inputs: Sequence[Any]) -> None:
        self._plan, self._program, self._memory = plan, plan.program, plan.memory
        self.places: list[Place]
        self.places, self.fresh, copied = self._memory.lend(inputs)
        self.copied_bytes = copied + self._memory.refresh()
        recording = self._program.recording
        self._arrays: dict[int, Any] = dict(zip(recording.inputs, inputs, strict=True))

    def array(self, value: Value) -> Any:
        """The array of a value in this run."""
        found = self._arrays.get(value.number)
        if found is None:
            found = self._arrays[value.number] = self._make(value)
        return found

    def _make(self, value: Value) -> Any:
        home = self._program.homes[value.storage.number]
        if home == FIXED:
            return value.obj
        if home == SLOT:
            return self._plan.static(value)
        assert home == OUTPUT, f"{value.storage.origin} of a step that was left out"
        assert value.array is not None
        return array_on(self.fresh[value.storage.number], value.offset, value.array.spec, value.array)

    def run_here(self, step: Step) -> None:
        """A function of the caller's own, or a call that cannot be in a chain."""
        args, kwargs = map_leaves((step.args, step.kwargs), self.filled)
        start_ns = time.perf_counter_ns()
        if step.request is not None:
            result = self._plan.session.run(replace(step.request, args=args, out=kwargs.get("out")))
            kernel_id, how = kernel_of(self._plan.session.last_record)[0], CALLED
        else:
            function, target = self._into(step)
            if target is not None:
                kwargs["out"] = target
            assert function is not None
            result, kernel_id, how = function(*args, **kwargs), "", OWN
        self._keep(step.result, result)
        if observing.recorder is not None and step.request is None:
            self._note_fresh(step, observing.recorder)
        us = (time.perf_counter_ns() - start_ns) / 1e3
        self._plan.timings[step.number] = StepRun(step.number, how, kernel_id, us)

    def _note_fresh(self, step: Step, recorder: observing.Recorder) -> None:
        """What the caller's own code has made lies where an earlier step's result may have lain."""
        fresh = {storage.number for storage in step.fresh}
        for value in map(self._program.value, step.made):
            if value.storage.number in fresh and self._is_laid_out(value):
                array = describe(self.array(value))
                recorder.note_fresh(array.address, array.spec.span_bytes)

    def _into(self, step: Step) -> tuple[Callable[..., Any] | None, Any]:
        """A ufunc writes where its result is to lie."""
        function = step.function
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(step.result, Use) or not step.fresh or step.kwargs:
            return function, None
        value = self._program.value(step.result)
        read = [self._program.value(number) for number in step.reads]
        if not self._is_laid_out(value) or any(not isinstance(v.obj, (numpy.ndarray, numpy.generic)) for v in read):
            return function, None
        name = _BY_OPERATOR.get(function)  # type: ignore[arg-type]
        ufunc = function if name is None else getattr(numpy, name)
        is_one = isinstance(ufunc, numpy.ufunc) and ufunc.nout == 1
        return (ufunc, self.array(value)) if is_one else (function, None)

    def _is_laid_out(self, value: Value) -> bool:
        return self._program.homes[value.storage.number] in (SLOT, OUTPUT)

    def _keep(self, made: Any, result: Any) -> None:
        if isinstance(made, (list, tuple)):
            for one, part in zip(made, result, strict=True):
                self._keep(one, part)
        elif isinstance(made, dict):
            for name, one in made.items():
                self._keep(one, result[name])
        elif isinstance(made, Use):
            value = self._program.value(made)
            if not self._is_laid_out(value):
                self._arrays[value.number] = result
                return
            target = self.array(value)
            if target is not result and not _is_same_memory(target, result):
                _assign(target, result)

    def filled(self, leaf: Any) -> Any:
        return self.array(self._program.value(leaf)) if isinstance(leaf, Use) else leaf

    def output(self) -> Any:
        return map_leaves(self._program.recording.output, self._given)

    def _given(self, leaf: Any) -> Any:
        if not isinstance(leaf, Use):
            return leaf
        value = self._program.value(leaf)
        is_new = value.storage.number in self._program.fresh_constants
        found = self.array(value)
        return _copy(found) if is_new else found


def _assign(target: Any, result: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        target.copy_(result)
    else:
        target[...] = result


def apart(program: Program, value: Any) -> Any:
    """The result of the run that was recorded, with copies of the arrays that the plan has baked."""
    values = program.recording.values
    baked = {id(one.obj) for one in values if one.storage.number in program.fresh_constants}
    return map_leaves(value, lambda leaf: _copy(leaf) if id(leaf) in baked else leaf) if baked else value


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _is_same_memory(one: Any, other: Any) -> bool:
    """Views of one slot: what was written there is there."""
    pointer = getattr(one, "data_ptr", None)
    if pointer is not None:
        return bool(pointer() == other.data_ptr())
    return bool(one.ctypes.data == other.ctypes.data)
