"""Bundles of execution plans (docs/bundles.md): what a frozen plan does, written down by numbers and bytes alone."""

from __future__ import annotations

import ctypes
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from layerzero.client.bundles import form
from layerzero.client.bundles.form import ALIGNMENT, Content, Home, Tensor
from layerzero.client.facade import default_session
from layerzero.client.gpu.arrays import gpu_name
from layerzero.client.planning.plans import Plan
from layerzero.client.plans.execution_plan import FROZEN, ExecutionPlan, Variant, plan
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.graph_plan import GraphPlan
from layerzero.client.plans.layout import lay_out
from layerzero.client.plans.passes import ARGUMENT, FIXED, LOOSE, OUTPUT, Program, is_view, may_be_left_out
from layerzero.client.plans.recording import Step, Use, Value
from layerzero.client.plans.segments import Segment
from layerzero.client.session.session import Session
from layerzero.client.tools.executor import Executor
from layerzero.client.tools.replay import request_of
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

_PLAIN = (str, int, float, bool, type(None))


def write_bundle(source: ExecutionPlan | Executor, path: str | Path) -> None:
    """Write what a plan, or an executor, does to a file, which lz.load_bundle, `lz bundle` and the C library run
    without the code that it was recorded of.

    Of a plan that is the one that ran last, with its constants (weights, say) as they are now; it must be FROZEN, and
    have no steps but lz calls and views. One of a plan on a GPU runs in Python alone. Raises InvalidArgument for
    others, and names the step.
    """
    if not isinstance(source, (ExecutionPlan, Executor)):
        raise InvalidArgument(f"give lz.write_bundle a plan of lz.plan or an executor, not a {type(source).__name__}")
    session = default_session.session()
    made, kernel = (source, "") if isinstance(source, ExecutionPlan) else _planned(source)
    function, variant = made.__wrapped__, made.latest()  # type: ignore[attr-defined]
    name = getattr(function, "__name__", type(function).__name__)
    if variant.phase != FROZEN:
        raise InvalidArgument(f"run the plan until it is FROZEN: it is {variant.phase}; {variant.problem}".rstrip("; "))
    if variant.graph is None and variant.frozen is None:
        raise InvalidArgument(f"{name}: run it once more")
    with variant.lock:
        names = names_of(function, variant)
        writing: _Writing
        if variant.graph is not None:
            writing = _WritingOnGpu(variant.graph.program, names, kernel, graph=variant.graph)
        else:
            assert variant.frozen is not None
            writing = _WritingOnCpu(variant.frozen.program, names, kernel, frozen=variant.frozen)
        writing.check()
        content = writing.content(_backends(session, writing))
    backends = sorted({step.backend for step in content.steps})
    locks = {one: session.ask("locks", backends=[one], text=True)["locks"][one] for one in backends}
    unknown = [one for one, told in locks.items() if not told["env"]]
    if unknown:
        raise InvalidArgument(f"{', '.join(unknown)} has no environment that could be asked for elsewhere")
    envs = {one: (told["env"], told["lock"]) for one, told in locks.items()}
    form.write(Path(path), name[: form.MAX_TEXT], __version__, time.time(), content, envs, writing.constants)


def names_of(function: Any, variant: Variant) -> list[str]:
    """Of the arrays in the arguments: the parameters of a function, or of a module's forward, where it has as many,
    else numbers."""
    assert variant.program is not None
    count = len(variant.program.recording.inputs)
    try:
        names = [*inspect.signature(getattr(function, "forward", function)).parameters]
    except (TypeError, ValueError):
        names = []
    return names if len(names) == count else [f"input{n}" for n in range(count)]


def _planned(executor: Executor) -> tuple[ExecutionPlan, str]:
    """A plan of one call, and the kernel that it keeps to."""
    call = executor.call
    if call.is_on_gpu:
        raise InvalidArgument(f"{call.label}: make an lz.plan of it, which may be on a GPU, and write that")
    given = {name: value for name, value in call.arguments().items() if call.arrays.get(name) is not None}
    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in given]

    def function(*arrays: Any) -> Any:
        return call.function(**dict(zip(given, arrays, strict=True)), **call.params)

    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = call.op
    made = plan(function, keep_choice=False)
    for _ in range(2):
        made(*given.values())
    return made, executor.kernel_id


def _backends(session: Session, writing: _Writing) -> Mapping[str, str]:
    """Of each kernel. Raises InvalidArgument for one that the broker does not know."""
    found: dict[str, str] = session.ask("locks", kernels=writing.kernels())["backends"]
    unknown = [kernel for kernel, backend in found.items() if not backend]
    if unknown:
        raise InvalidArgument(f"run the plan once more: nobody has the kernel {unknown[0]!r} any more")
    return found


def canonical_of(op: str, params: Mapping[str, Any], specs: Sequence[TensorSpec | None]) -> Plan:
    """The canonical form of a public call, as any process makes it. Raises InvalidArgument for what is no such call."""
    request = request_of(op, params, dict(zip(OPS[op].inputs, specs, strict=True)), None, None)
    return request.planner(*request.args, **request.params)


def is_same_plan(one: Plan, other: Plan) -> bool:
    ours, theirs = (
        (plan.op, plan.inputs, [(name, type(value), value) for name, value in plan.attrs.items()], plan.outputs)
        for plan in (one, other)
    )
    return ours == theirs and one.results == other.results


@dataclass(eq=False)
class _Writing:
    """One plan. `constants`: their bytes, which follow each other."""

    program: Program
    names: list[str]
    kernel: str  # of all its steps, where that is known
    constants: list[memoryview] = field(default_factory=list)
    _homes: list[Home] = field(default_factory=list)
    _tensors: dict[Tensor, int] = field(default_factory=dict)
    _home_of: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage -> home, and where it begins in it

    def check(self) -> None:
        """Raises InvalidArgument for arguments and results that another process could not have, and for steps that are
        no calls of ops."""
        program = self.program
        for name, number in zip(self.names, program.recording.inputs, strict=True):
            value = program.value(number)
            array = value.array
            if array is None or array.needs_copy or not array.spec.is_contiguous or value.offset or not array.nbytes:
                raise InvalidArgument(f"pass {name} as an array in row-major order, then write the bundle")
        for _ in self._steps():
            pass
        self._check_result(program.recording.output)

    def kernels(self) -> list[str]:
        """Those of its steps, as they ran last."""
        return sorted({self._kernel(step) for step in self._steps()})

    def content(self, backends: Mapping[str, str]) -> Content:
        """`backends`: of each kernel. Raises InvalidArgument for a step that another process could not make."""
        steps, program = [*self._steps()], self.program
        inputs = [program.value(number) for number in program.recording.inputs]
        outputs = program.outputs()
        for place, value in enumerate(inputs):
            self._add_home(value.storage.number, Home(form.INPUT, place, value.storage.nbytes))
        slot_bytes = self._lay_out(outputs)
        constant_bytes = self._take_constants(steps)
        made = tuple(self._step(step, backends) for step in steps)
        its_inputs = tuple((name, self._number(value)) for name, value in zip(self.names, inputs, strict=True))
        named = zip(self._output_names(), outputs, strict=True)
        its_outputs = tuple((name, self._number(value)) for name, value in named)
        homes, tensors = tuple(self._homes), tuple(self._tensors)
        sizes = slot_bytes, constant_bytes
        return Content(homes, tensors, made, its_inputs, its_outputs, self._result(), *sizes, self.is_on_gpu)

    is_on_gpu: ClassVar[bool] = False

    def _steps(self) -> Iterator[Step]:
        """Its calls, in order. Raises InvalidArgument for steps that are none, or none for others to make."""
        raise NotImplementedError

    def _ran(self, step: Step) -> str:
        """The kernel of its last run, "" where that is not known."""
        raise NotImplementedError

    def _copied(self, address: int, nbytes: int) -> memoryview:
        """The bytes of constants."""
        raise NotImplementedError

    def _kernel(self, step: Step) -> str:
        return self.kernel or self._ran(step) or step.kernel

    @staticmethod
    def _refuse(step: Step) -> InvalidArgument:
        told = f"step {step.number}, {step.name} at {step.where}"
        if step.request is None:
            return InvalidArgument(f"do it with an lz op, or outside of the plan: {told}, is code of Python's own")
        return InvalidArgument(
            f"leave out=, timeout_s and ops that write in place away: {told}, cannot cross with others"
        )

    # --- memory

    def _add_home(self, storage: int, home: Home, begin: int = 0) -> None:
        self._home_of[storage] = len(self._homes), begin
        self._homes.append(home)

    def _lay_out(self, outputs: Sequence[Value]) -> int:
        """Give what steps make a place: the caller's memory, where an output is all of a storage, else slots."""
        peak, shared = self._add_slots(), [value.storage.number for value in outputs]
        for place, value in enumerate(outputs):
            storage, array = value.storage, value.array
            assert array is not None
            is_whole = array.spec.is_contiguous and not value.offset and array.nbytes == storage.nbytes
            if storage.number in self._home_of:
                continue
            if is_whole and shared.count(storage.number) == 1:
                self._add_home(storage.number, Home(form.OUTPUT, place, storage.nbytes))
                continue
            self._add_home(storage.number, Home(form.SLOT, peak, storage.nbytes))
            peak += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        return peak

    def _add_slots(self) -> int:
        """Give what steps leave for each other a place; how many bytes that takes."""
        raise NotImplementedError

    def _take_constants(self, steps: Sequence[Step]) -> int:
        """Give constants a place: of each storage what steps read of it, and what lies between."""
        program, at = self.program, 0
        reads: dict[int, list[Value]] = {}
        for step in steps:
            for value in program.reads(step):
                if program.homes[value.storage.number] == FIXED:
                    reads.setdefault(value.storage.number, []).append(value)
        for number, values in reads.items():
            arrays = [(value.offset, value.array.spec.span_bytes) for value in values if value.array is not None]
            begin, end = min(offset for offset, _ in arrays), max(offset + nbytes for offset, nbytes in arrays)
            gap = -at % ALIGNMENT
            if gap:
                self.constants.append(memoryview(bytes(gap)))
            at += gap
            self._add_home(number, Home(form.CONSTANT, at, end - begin), begin)
            self.constants.append(self._copied(values[0].storage.address + begin, end - begin))
            at += end - begin
        return at

    def _number(self, value: Value, spec: TensorSpec | None = None) -> int:
        """The tensor of a value; `spec`: as an op sees it."""
        assert value.array is not None
        home, begin = self._home_of[value.storage.number]
        tensor = Tensor(home, value.offset - begin, value.array.spec if spec is None else spec)
        return self._tensors.setdefault(tensor, len(self._tensors))

    # --- steps

    def _step(self, step: Step, backends: Mapping[str, str]) -> form.Step:
        request, program = step.request, self.program
        assert request is not None
        taken = [program.value(arg) if isinstance(arg, Use) else None for arg in step.args]
        specs = [None if value is None or value.array is None else value.array.spec for value in taken]
        canonical = canonical_of(request.op, request.params, specs)
        its = request.planner(*request.shape_specs(tuple(specs)), **request.params)
        if not is_same_plan(canonical, its):
            raise InvalidArgument(f"step {step.number}, {step.name} at {step.where}, cannot be told to another process")
        inputs = [
            None if value is None or spec is None else self._number(value, spec)
            for value, spec in zip(taken, canonical.inputs, strict=True)
        ]
        made = [program.value(number) for number in step.made]
        outputs = [self._number(value, spec) for value, spec in zip(made, canonical.outputs, strict=True)]
        results = [self._number(value, spec) for value, spec in zip(made, canonical.results, strict=True)]
        kernel = self._kernel(step)
        return form.Step(
            op=canonical.op,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            results=tuple(results),
            attrs=canonical.attrs,
            backend=backends[kernel],
            kernel=kernel,
            is_pinned=request.backend is not None,
            us=float(max(step.kernel_us, 0.0)),
            where=step.where[: form.MAX_TEXT],
            asked=request.op,
            arguments=tuple(None if value is None else self._number(value) for value in taken),
            params=request.params,
        )

    # --- the result

    def _check_result(self, output: Any) -> None:
        program = self.program

        def check(leaf: Any) -> None:
            if not isinstance(leaf, Use):
                if not isinstance(leaf, _PLAIN):
                    raise InvalidArgument(f"return arrays, plain values, and lists and maps of them, no {leaf!r:.80}")
                return
            home = program.homes[program.value(leaf).storage.number]
            if home in (ARGUMENT, FIXED):
                what = "an argument" if home == ARGUMENT else "an array of the function's own"
                raise InvalidArgument(f"return what steps make: the result has {what}, as it came")
            assert home in (OUTPUT, LOOSE), "other steps were refused"

        _each(output, check)

    def _output_names(self) -> list[str]:
        names: list[str] = []
        _each(self.program.recording.output, lambda leaf: None, names)
        return [name or "result" for name in names]

    def _result(self) -> Any:
        count = 0

        def told(value: Any) -> Any:
            nonlocal count
            if isinstance(value, Use):
                count += 1
                return {"output": count - 1}
            if isinstance(value, dict):
                return {"map": [[key, told(one)] for key, one in value.items()]}
            if isinstance(value, (list, tuple)):
                return {"list" if isinstance(value, list) else "tuple": [told(one) for one in value]}
            return {"value": value}

        return told(self.program.recording.output)


@dataclass(eq=False)
class _WritingOnCpu(_Writing):
    frozen: FrozenPlan = field(kw_only=True)

    def kernels(self) -> list[str]:
        for segment in self.frozen.segments:
            segment.read_times()
        return super().kernels()

    def _steps(self) -> Iterator[Step]:
        for item in self.frozen.items:
            if not isinstance(item, Segment):
                raise self._refuse(item)
            yield from item.steps

    def _add_slots(self) -> int:
        program = self.program
        skipped = {step.number for step in program.steps if step.number not in program.chained}
        layout = lay_out(program, skipped)
        for number, slot in layout.slots.items():
            self._add_home(number, Home(form.SLOT, slot.offset, program.recording.storages[number].nbytes))
        return layout.peak_bytes

    def _ran(self, step: Step) -> str:
        run = self.frozen.timings.get(step.number)
        return run.kernel_id if run is not None else ""

    def _copied(self, address: int, nbytes: int) -> memoryview:
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


@dataclass(eq=False)
class _WritingOnGpu(_Writing):
    """Of calls alone: the graph that they are captured in is of this process."""

    graph: GraphPlan = field(kw_only=True)
    is_on_gpu: ClassVar[bool] = True

    def _steps(self) -> Iterator[Step]:
        for step in self.program.steps:
            if is_view(step):
                continue
            if not may_be_left_out(self.program, step) or step.request is None or step.request.timeout_s is not None:
                raise self._refuse(step)
            yield step

    def _add_slots(self) -> int:
        """Each by itself: who runs the calls takes memory of its own."""
        given, peak = {value.storage.number for value in self.program.outputs()}, 0
        for storage in [storage for step in self._steps() for storage in step.fresh]:
            if storage.number not in given:
                self._add_home(storage.number, Home(form.SLOT, peak, storage.nbytes))
                peak += -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        return peak

    def _ran(self, step: Step) -> str:
        """Of a call that a worker has enqueued that is not told: then the one that would serve it now."""
        served, request, graph = self.graph.served.get(step.number), step.request, self.graph
        if served is not None and served.kernel_id:
            return served.kernel_id
        assert request is not None
        taken = [self.program.value(arg).array if isinstance(arg, Use) else None for arg in step.args]
        specs = request.shape_specs(tuple(None if one is None else one.spec for one in taken))
        plan = request.planner(*specs, **request.params)
        body = graph.session.route_body(plan, request.backend, gpu_name(graph.device))
        return graph.session.explain_route(request.op, body).kernel_id or ""

    def _copied(self, address: int, nbytes: int) -> memoryview:
        return self.graph.copied(address, nbytes)


def _each(value: Any, take: Callable[[Any], None], names: list[str] | None = None, path: str = "") -> None:
    """Each leaf of a result; `names` takes those of its arrays."""
    if isinstance(value, dict):
        for key, one in value.items():
            if type(key) is not str:
                raise InvalidArgument(f"name the results by texts: the key {key!r:.40} is none")
            _each(one, take, names, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            _each(one, take, names, f"{path}.{place}".lstrip("."))
    else:
        take(value)
        if names is not None and isinstance(value, Use):
            names.append(path[: form.MAX_TEXT])
