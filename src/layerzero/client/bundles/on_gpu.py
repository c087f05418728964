"""A bundle's plan on a GPU of this process: its calls, made by lz.plan's own means, so that they are lifted and
captured in a CUDA graph here. Of the process that wrote it there is no machine code in it, and no graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from layerzero.client.arrays.recognition import Array, Kind
from layerzero.client.bundles import form
from layerzero.client.bundles.form import Content
from layerzero.client.connection.overlay import Overlay
from layerzero.client.plans.graph_library import LIBRARIES
from layerzero.client.plans.graph_plan import GraphPlan
from layerzero.client.plans.passes import Program, place
from layerzero.client.plans.recording import CONSTANT, INPUT, STEP, Recording, Step, Storage, Use, Value
from layerzero.client.plans.segments import StepRun
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument

ORIGINS = {form.INPUT: INPUT, form.CONSTANT: CONSTANT, form.OUTPUT: STEP, form.SLOT: STEP}
MakeStep = Callable[[int, Content, form.Step, tuple[Storage, ...]], Step]


class GpuRuns:
    """Of one session and one GPU. For one thread at a time."""

    def __init__(
        self,
        session: Session,
        content: Content,
        constants: bytearray,
        wishes: Mapping[int, Overlay],
        where: tuple[Kind, int],
        make_step: MakeStep,
        output: Any,
    ) -> None:
        """`constants`: their bytes, which are copied to the GPU; `wishes`: of each call; `where`: kind of arrays, and
        the GPU's ordinal; `make_step`: the step of a call; `output`: the function's result, with Use in place of
        arrays."""
        kind, device = where
        library = LIBRARIES[kind]
        with library.on(device):
            memory = library.upload(constants, device) if constants else None
        self.session = session
        made = _Making(content, kind, device, memory, make_step)
        program = made.program(output)
        self._calls = made.calls
        its = {step: wishes[number] for step, number in self._calls.items() if number in wishes}
        self._graph = GraphPlan(session, program, library, is_timed=False, wishes=its)
        self._is_plain = False  # it is no graph, nor will be: its calls go one by one

    def run(self, given: Sequence[Any]) -> Any:
        """The function's result. Raises what its calls raise."""
        if self._is_plain:
            return self._graph.run_plainly(given)
        value = self._graph.run(given)
        self._is_plain = bool(self._graph.problem)
        return value

    def timings(self) -> list[StepRun]:
        """How each call was made the last time, or is in the graph."""
        served = self._graph.served
        found = [(number, served[step]) for step, number in self._calls.items() if step in served]
        return [StepRun(number, one.path, one.kernel_id) for number, one in found]


class _Making:
    """The program of a bundle's content. `calls`: the bundle's number of each step that is a call."""

    def __init__(self, content: Content, kind: Kind, device: int, memory: Any, make_step: MakeStep) -> None:
        self._content, self._kind, self._device, self._make_step = content, kind, device, make_step
        self._library = LIBRARIES[kind]
        self._storages = [
            Storage(number, ORIGINS[home.kind], home.place, 0, home.nbytes) for number, home in enumerate(content.homes)
        ]
        self._values = [self._value(number, memory) for number in range(len(content.tensors))]
        self._steps: list[Step] = []
        self._whole = {content.tensors[number].home: number for _, number in content.inputs}  # of each home, so far
        self._there = {number for _, number in content.inputs}
        self._there |= {n for n, value in enumerate(self._values) if value.storage.origin == CONSTANT}
        self.calls: dict[int, int] = {}

    def _value(self, number: int, memory: Any) -> Value:
        tensor = self._content.tensors[number]
        storage, obj = self._storages[tensor.home], None
        if storage.origin == CONSTANT:
            at = self._content.homes[tensor.home].place + tensor.offset
            obj = self._library.part(memory, tensor.spec, at)
        array = Array(self._kind, tensor.spec, 0, obj, None, device=self._device)
        return Value(number, obj, array, storage, tensor.offset)

    def program(self, output: Any) -> Program:
        content = self._content
        for number, told in enumerate(content.steps):
            for taken in told.arguments:
                self._look(taken, told.where)
            fresh = tuple(self._storages[content.tensors[n].home] for n in told.results)
            for storage, result in zip(fresh, told.results, strict=True):
                storage.made_by = len(self._steps)
                self._whole[storage.number] = result
                self._there.add(result)
            self.calls[len(self._steps)] = number
            self._steps.append(self._make_step(len(self._steps), content, told, fresh))
        for _, number in content.outputs:
            self._look(number, "the result")
        recording = Recording(self._steps, self._values, self._storages, device=self._device, kind=self._kind)
        recording.inputs = [number for _, number in content.inputs]
        recording.output = output
        program = Program(recording, self._steps)
        place(program)
        return program

    def _look(self, number: int | None, where: str) -> None:
        """A tensor is there before it is taken: a view of what is."""
        if number is None or number in self._there:
            return
        tensor = self._content.tensors[number]
        base = self._whole[tensor.home]
        begin = self._content.tensors[base]
        if begin.spec.dtype != tensor.spec.dtype:
            raise InvalidArgument(f"write the bundle again: {where} takes {begin.spec} as {tensor.spec}")
        view = partial(self._library.part, spec=tensor.spec, at=tensor.offset - begin.offset)
        name, its = "a view", len(self._steps)
        self._steps.append(Step(its, name, where, (Use(base),), {}, (base,), view, result=Use(number), made=(number,)))
        self._there.add(number)
