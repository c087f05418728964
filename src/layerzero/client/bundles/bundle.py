"""lz.load_bundle: an execution plan from a file, run without the code that it was recorded of (docs/bundles.md)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.addresses import address_of
from layerzero.client.arrays.recognition import CPU, Array, Kind, describe
from layerzero.client.arrays.wrapping import import_numpy
from layerzero.client.bundles import form
from layerzero.client.bundles.form import BundleFile, Content, Environment
from layerzero.client.bundles.on_gpu import ORIGINS, GpuRuns
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay
from layerzero.client.connection.overlay import Overlay
from layerzero.client.facade import default_session
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.graph_library import LIBRARIES
from layerzero.client.plans.passes import Program, place
from layerzero.client.plans.recording import CONSTANT, Recording, Step, Storage, Use, Value
from layerzero.client.plans.segments import StepRun
from layerzero.client.session.session import Session
from layerzero.client.tools.compile import BONUS
from layerzero.client.tools.replay import request_of
from layerzero.ipc.errors import EnvChanged, InvalidArgument, VersionMismatch
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.wording import counted


class Bundle:
    """A plan from a file. Made by lz.load_bundle.

    Called with NumPy arrays or torch tensors on the CPU, or, of a plan on a GPU, with torch tensors there, in the order
    of `inputs` or by name, of their very shapes and dtypes and in row-major order: the result that the function gave,
    of arrays of the same kind. Each call prefers the
    kernel that it had when the bundle was written; where that fails, or may not serve it, the next best one answers,
    and `timings` tells. One run is under way at a time; other threads wait.
    """

    def __init__(self, file: BundleFile, session: Session, *, any_lock: bool) -> None:
        """Raises as load_bundle."""
        self._file, self._any_lock = file, any_lock
        self._asked_of = session.link  # whose kernels `_wishes` names
        self._wishes = wishes_of(session, file, any_lock=any_lock)
        self._room, _, _ = arenas.pool.allocate(1 if file.content.is_on_gpu else max(file.content.constant_bytes, 1))
        self._bytes: bytearray | None = None  # constants on their way to a GPU
        if file.content.is_on_gpu:
            self._bytes = bytearray(file.content.constant_bytes)
            file.constants(memoryview(self._bytes))
        else:
            file.constants(self._room[: file.content.constant_bytes])
        for number, step in enumerate(file.content.steps):
            _step(number, file.content, step, ())
        _result(file.content.result, [number for _, number in file.content.outputs])
        self._lock = threading.Lock()
        self._programs: dict[str, Program] = {}
        self._frozen: FrozenPlan | None = None
        self._on_gpu: GpuRuns | None = None  # in its place, on a GPU
        self._asked: Any = None  # what it was laid out for
        self._is_settled = False  # it was laid out for the workers that serve it

    @property
    def name(self) -> str:
        """Of the function that it was recorded of."""
        return self._file.manifest.name

    @property
    def is_on_gpu(self) -> bool:
        """Whether it takes arrays on a GPU, as its plan did."""
        return self._file.content.is_on_gpu

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """What it takes, in order."""
        return _named(self._file.content, self._file.content.inputs)

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The arrays of its result, in order."""
        return _named(self._file.content, self._file.content.outputs)

    @property
    def environments(self) -> tuple[Environment, ...]:
        """What its calls ran in when it was written."""
        return self._file.manifest.environments

    def arrays_of(self, value: Any) -> dict[str, Any]:
        """The arrays of a result of it, by the names of `outputs`."""
        content, found = self._file.content, dict[str, Any]()

        def look(told: Any, one: Any) -> None:
            [(kind, inner)] = told.items()
            if kind == "output":
                found[content.outputs[inner][0]] = one
            elif kind == "map":
                for key, part in inner:
                    look(part, one[key])
            elif kind in ("list", "tuple"):
                for part, item in zip(inner, one, strict=True):
                    look(part, item)

        look(content.result, value)
        return found

    def timings(self) -> list[StepRun]:
        """How each step was run the last time: in a chain or as a call, by which kernel; empty before the first run. On
        a GPU by which way, and the kernel is "" of a call that a worker has only enqueued."""
        with self._lock:
            if self._on_gpu is not None:
                return self._on_gpu.timings()
            if self._frozen is None:
                return []
            for segment in self._frozen.segments:
                segment.read_times()
            return [self._frozen.timings[number] for number in sorted(self._frozen.timings)]

    def __repr__(self) -> str:
        steps = counted(len(self._file.content.steps), "call")
        return f"<lz.Bundle of {self.name}({', '.join(map(str, self.inputs.values()))}): {steps}>"

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """The function's result. Raises InvalidArgument for arrays that it was not made for, and what its calls
        raise."""
        given = self._given(arrays, named)
        session = default_session.session()
        kind, device = self._kind(given)
        with self._lock:
            if device != CPU:
                return self._gpu_runs(session, kind, device).run(given)
            frozen = self._laid_out(session, kind)
            value = frozen.run(given)
            if not self._is_settled and frozen.is_linked:
                self._is_settled = True
                if frozen.served() != frozen.workers:  # steps of several can run at the same time
                    self._frozen = self._lay_out(session, frozen)
            return value

    def _given(self, arrays: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        names = [*self.inputs]
        left = names[len(arrays) :]
        if unknown := sorted(named.keys() - set(left)):
            raise InvalidArgument(
                f"{unknown[0]!r:.80} is no input of it, or was given twice; allowed: {', '.join(names)}"
            )
        given = [*arrays, *(named[name] for name in left if name in named)]
        if len(given) != len(names):
            raise InvalidArgument(f"{self.name}: {len(given)} arrays were given; needed: {', '.join(names) or 'none'}")
        return given

    def _kind(self, given: Sequence[Any]) -> tuple[Kind, int]:
        """That of the arrays, and where they are. Raises InvalidArgument for arrays that it was not made for."""
        is_on_gpu = self._file.content.is_on_gpu
        kind: Kind = "torch" if is_on_gpu else "numpy"
        device = CPU
        if is_on_gpu and not given:
            raise InvalidArgument(f"{self.name}: write it of a function that takes an array, whose GPU it runs on")
        for number, ((name, wanted), one) in enumerate(zip(self.inputs.items(), given, strict=True)):
            array = describe(one)
            if is_on_gpu and (array.kind not in LIBRARIES or array.device == CPU):
                kinds = " or ".join(f"{one}'s" for one in LIBRARIES)
                raise InvalidArgument(f"{self.name}: pass {name} as an array of {kinds} on a GPU: it was made for one")
            if number and (array.kind, array.device) != (kind, device):
                raise InvalidArgument(f"{self.name}: pass arrays of one library and device; {name} is of {array.kind}")
            kind, device = array.kind, array.device
            if not is_on_gpu and (kind not in ("numpy", "torch") or array.device != CPU):
                raise InvalidArgument(f"{self.name}: pass {name} as a NumPy array or a torch tensor on the CPU")
            if (array.spec.dtype, array.spec.shape) != (wanted.dtype, wanted.shape):
                raise InvalidArgument(f"{self.name}: {name} is {array.spec}; this bundle was made for {wanted}")
            if array.needs_copy or not array.spec.is_contiguous:
                raise InvalidArgument(f"{self.name}: pass {name} in row-major order: a copy of it")
            if array.requires_grad and sys.modules["torch"].is_grad_enabled():
                raise InvalidArgument(f"{self.name}: pass {name}.detach(): bundles have no gradients")
        return kind, device

    # --- as a plan of this process

    def _laid_out(self, session: Session, kind: Kind) -> FrozenPlan:
        self._ask_again(session)
        asked = overlay.current()
        key = (session, session.link, kind, "" if asked is None else asked.text)
        if self._frozen is None or self._frozen.is_spoilt or self._asked != key:
            if kind not in self._programs:
                self._programs[kind] = self._program(kind)
            self._frozen = FrozenPlan(session, self._programs[kind], asked=asked, wishes=self._wishes)
            self._asked, self._is_settled = key, False
        return self._frozen

    def _gpu_runs(self, session: Session, kind: Kind, device: int) -> GpuRuns:
        """As `_laid_out`, on a GPU."""
        asked = overlay.current()
        key = (session, session.link, kind, device, "" if asked is None else asked.text)
        if self._on_gpu is None or self._asked != key:
            self._ask_again(session)
            content = self._file.content
            data = self._bytes
            if data is None:  # it has been on another GPU, or of another session
                data = bytearray(content.constant_bytes)
                self._file.constants(memoryview(data))
            output = _result(content.result, [number for _, number in content.outputs])
            self._on_gpu = GpuRuns(session, content, data, self._wishes, (kind, device), _step, output)
            self._asked, self._bytes = key, None
        return self._on_gpu

    def _ask_again(self, session: Session) -> None:
        if session.link is not self._asked_of:  # another broker, or another process
            self._wishes = wishes_of(session, self._file, any_lock=self._any_lock)
            self._asked_of = session.link

    def _lay_out(self, session: Session, frozen: FrozenPlan) -> FrozenPlan:
        return FrozenPlan(
            session, frozen.program, workers=frozen.served(), asked=overlay.current(), wishes=self._wishes
        )

    def _program(self, kind: Kind) -> Program:
        """What a recording would have led to."""
        content, base = self._file.content, address_of(self._room)
        storages = []
        for number, home in enumerate(content.homes):
            address = base + home.place if home.kind == form.CONSTANT else 0
            storages.append(Storage(number, ORIGINS[home.kind], home.place, address, home.nbytes))
        values = []
        for number, tensor in enumerate(content.tensors):
            storage, obj = storages[tensor.home], _empty(kind, tensor.spec.dtype)
            address = storage.address + tensor.offset if storage.origin == CONSTANT else 0
            values.append(Value(number, obj, Array(kind, tensor.spec, address, obj, None), storage, tensor.offset))
        steps = []
        for number, told in enumerate(content.steps):
            made = [storages[content.tensors[n].home] for n in told.results]
            for storage in made:
                storage.made_by = number
            steps.append(_step(number, content, told, tuple(made)))
        recording = Recording(steps, values, storages, device=CPU)
        recording.inputs = [number for _, number in content.inputs]
        recording.output = _result(content.result, [number for _, number in content.outputs])
        program = Program(recording, steps, {step.number for step in steps})
        place(program)
        return program


def _step(number: int, content: Content, told: form.Step, fresh: tuple[Storage, ...]) -> Step:
    """Raises VersionMismatch for a call that this version makes otherwise."""

    def specs(numbers: Sequence[int | None]) -> tuple[TensorSpec | None, ...]:
        return tuple(None if n is None else content.tensors[n].spec for n in numbers)

    named = dict(zip(OPS[told.asked].inputs, specs(told.arguments), strict=True))
    try:
        request = request_of(told.asked, told.params, named, told.backend if told.is_pinned else None, None)
        plan = request.planner(*request.args, **request.params)
    except (InvalidArgument, TypeError) as exc:
        raise VersionMismatch(f"write the bundle again with this version: step {number}, {told.asked}: {exc}") from exc
    its = told.op, specs(told.inputs), dict(told.attrs), specs(told.outputs), specs(told.results)
    if (plan.op, plan.inputs, dict(plan.attrs), plan.outputs, plan.results) != its:
        raise VersionMismatch(
            f"write the bundle again with this version: step {number}, {told.asked}, is another call by it"
        )
    uses = [Use(n) for n in told.results]
    return Step(
        number,
        told.asked,
        told.where,
        tuple(None if n is None else Use(n) for n in told.arguments),
        {},
        tuple(n for n in told.arguments if n is not None),
        request=replace(request, args=()),
        result=uses[0] if len(uses) == 1 else tuple(uses),
        made=told.results,
        fresh=fresh,
        kernel=told.kernel,
        kernel_us=told.us,
    )


def _result(told: Any, outputs: Sequence[int]) -> Any:
    """What a form's result stands for, with Use in place of arrays. Raises InvalidArgument."""
    try:
        [(kind, value)] = told.items()
        if kind == "output":
            return Use(outputs[value])
        if kind == "map":
            return {str(key): _result(one, outputs) for key, one in value}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(_result(one, outputs) for one in value)
        if kind == "value" and not isinstance(value, (dict, list)):
            return value
    except (AttributeError, IndexError, TypeError, ValueError) as exc:
        raise InvalidArgument(f"write the bundle again: its result is {told!r:.80}") from exc
    raise InvalidArgument(f"write the bundle again: its result is of a kind {kind!r:.40}")


def _named(content: Content, named: Sequence[tuple[str, int]]) -> dict[str, TensorSpec]:
    return {name: content.tensors[number].spec for name, number in named}


def _empty(kind: Kind, dtype: str) -> Any:
    """An array without numbers: what results look like."""
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(0, dtype=getattr(torch, dtype))
    numpy, more = import_numpy("this bundle"), sys.modules.get("ml_dtypes")
    found = getattr(numpy, "bool_" if dtype == "bool" else dtype, None) or getattr(more, dtype, None)
    if found is None:
        raise InvalidArgument(f"import ml_dtypes, or pass torch tensors: NumPy has no {dtype} of its own")
    return numpy.empty(0, found)


def load_bundle(path: str | Path, *, any_lock: bool = False) -> Bundle:
    """Open what lz.write_bundle has written: every byte is compared with its SHA-256, the environments with those of
    this process's broker.

    any_lock: run it also where an environment is locked otherwise, or is not there: results may then differ within the
    ops' tolerances. Raises InvalidArgument for what is no bundle or is damaged, VersionMismatch for one of another
    format, EnvChanged for other locks, NotConnected, OutOfMemory.
    """
    return Bundle(form.read(Path(path)), default_session.session(), any_lock=any_lock)


def wishes_of(session: Session, file: BundleFile, *, any_lock: bool) -> dict[int, Overlay]:
    """What each step asks of selection: the kernel that it had, where the broker knows that. Raises EnvChanged where an
    environment or a kernel is not the bundle's, unless `any_lock`."""
    named = {one.backend: one.env for one in file.manifest.environments}
    kernels = sorted({step.kernel for step in file.content.steps})
    told = session.ask("locks", backends=[*named], kernels=kernels)
    if not any_lock:
        for backend, env in named.items():
            here = told["locks"][backend]["env"]
            if here != env:
                how = f"lz bundle show {file.path} --lock {backend}" if here else f"lz env build {backend}"
                raise EnvChanged(
                    f"have {backend} locked as the bundle has it ({how}), or pass "
                    f"any_lock=True: {file.path} was written with its environment {env}, here it is "
                    f"{here or 'not known'}",
                    env=backend,
                    cause=f"{env} in the bundle, {here or 'none'} here",
                    repair=f"{how}, or run it with --any-lock" if here else how,
                )
        for kernel, owner in told["backends"].items():
            if not owner:
                text = f"write the bundle again, or pass any_lock=True: {file.path} needs {kernel}, which is not here"
                raise EnvChanged(
                    text, env=kernel.partition(".")[0], cause=f"no kernel {kernel}", repair="lz bundle write"
                )
    return {n: _held(step.kernel) for n, step in enumerate(file.content.steps) if told["backends"][step.kernel]}


@functools.lru_cache(maxsize=1024)
def _held(kernel_id: str) -> Overlay:
    return Overlay.of({"origin": "a bundle", "values": {"rules": [{"prefer": [kernel_id], "bonus": BONUS}]}})
