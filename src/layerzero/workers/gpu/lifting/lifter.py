"""A kernel of a worker as a lifted call: captured on two sets of memory, compared, and run on inputs for the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.nodes import Allocation, KernelNode, Node
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.form import ALIGNMENTS, Lifted, Step
from layerzero.ipc.lifting.gpu_digest import GpuDigest
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.results import Result, is_near, read_digest, read_sample
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.lifting.trial import UNWRITTEN, named, pattern, write
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.gpu.lifting.compare import Capture, compare
from layerzero.workers.gpu.lifting.direct import written_directly
from layerzero.workers.gpu.lifting.modules import Modules
from layerzero.workers.gpu.lifting.placement import TrialMemory, room_for
from layerzero.workers.gpu.lifting.refusal import CannotLift
from layerzero.workers.provider import Bind, Block, Bound, Call, CaptureResource
from layerzero.workers.recording import OnStream, record

_OTHER = b"\xa3"  # what outputs hold before the second run


@dataclass(frozen=True)
class Request:
    """What to lift, all else as in messages.Lift. Without seeds it is to be compared with a proved neighbour: it
    is not run, where it can be captured so, and its machine code is left out."""

    call: Call
    bind: Bind
    alignments: tuple[int, ...]
    seeds: tuple[int, ...]
    is_repeatable: bool = True

    @classmethod
    def of(
        cls,
        call: Call,
        bind: Bind,
        alignments: Sequence[object],
        seeds: Sequence[object],
        is_repeatable: bool = True,
    ) -> Request:
        """Raises ValueError for what fits no call."""
        specs = (*call.inputs, *call.outputs)
        classes = tuple(one for one in alignments if type(one) is int)
        if len(classes) != len(alignments) or len(classes) != len(specs):
            raise ValueError(f"{len(alignments)} alignments; needed: {len(specs)} integers")
        for alignment, spec in zip(classes, specs, strict=True):
            if alignment not in ((0,) if spec is None else ALIGNMENTS):
                raise ValueError(f"an alignment of {alignment} bytes for {spec}; allowed: {ALIGNMENTS}, 0 for none")
        numbers = tuple(one for one in seeds if type(one) is int)
        if len(numbers) != len(seeds):
            raise ValueError("seeds must be integers")
        return cls(call, bind, classes, numbers, is_repeatable)


class _Output(NamedTuple):
    """What a run left. `sample` is empty where bytes are compared."""

    digest: str
    sample: bytes


def _pass_on(error: Exception) -> None:
    """Raise what says that the GPU is lost, or why it cannot be lifted."""
    if isinstance(error, CannotLift) or (isinstance(error, CudaError) and error.is_sticky):
        raise error


def _said(error: Exception) -> str:
    """Its first line: libraries put advice for all errors of a GPU behind it."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:500]


class Lifter:
    """For the loop's thread."""

    def __init__(self, on_stream: OnStream, modules: Modules, versions: Mapping[str, str]) -> None:
        """`on_stream` and `versions`: of Loaded. `modules` were watched since before `load()`."""
        self.on_stream, self.modules, self.versions = on_stream, modules, versions
        self._streams: dict[str, int] = {}  # by GPU
        self._digests: dict[str, GpuDigest] = {}  # likewise

    def digests(self, context: Context) -> GpuDigest:
        return self._digests.setdefault(context.gpu, GpuDigest(context.driver))

    def lift(self, request: Request, context: Context, when_idle: Callable[[Callable[[], None]], None]) -> Specimen:
        """Raises CannotLift, CudaError, and what the library raises. `when_idle(free)` calls `free` once no stream
        waits."""
        if self.modules.problem:
            raise CannotLift(LiftReason.NO_CUPTI, self.modules.problem)
        stack = ExitStack()
        try:
            with context:
                return _Lifting(self, request, context, self._stream(context), stack).specimen()
        finally:
            when_idle(lambda: _close(context, stack))

    def _stream(self, context: Context) -> int:
        return self._streams.get(context.gpu) or self._streams.setdefault(context.gpu, context.driver.create_stream())


def _close(context: Context, stack: ExitStack) -> None:
    with context:
        stack.close()


def _release(bound: Bound) -> None:
    """Until then it is kept."""
    if isinstance(bound, CaptureResource):
        bound.release()


class _Lifting:
    """One request. The context is current, and what `stack` holds is freed later."""

    def __init__(self, lifter: Lifter, request: Request, context: Context, stream: int, stack: ExitStack) -> None:
        self._lifter, self._request, self._stack = lifter, request, stack
        self._context, self._driver, self._stream = context, context.driver, stream
        self._known: dict[int, Allocation | None] = {}

    def specimen(self) -> Specimen:
        self._demand_room()
        if not self._request.seeds:
            try:  # a run waits until the GPU is done with other processes, which takes longer than all the rest
                lifted, _ = self._compared(runs=False)
            except CannotLift:  # a library that prepares something at the first call of a shape
                lifted, _ = self._compared(runs=True)
            return Specimen(lifted, {}, {})
        lifted, (memory, bound) = self._compared(runs=True)
        codes = {code: self._lifter.modules.image(code) for code in lifted.codes}
        return Specimen(lifted, codes, {seed: self._try(memory, bound, seed) for seed in self._request.seeds})

    def _compared(self, *, runs: bool) -> tuple[Lifted, tuple[TrialMemory, Bound]]:
        """What two captures show, and the kernel on the first's memory. `runs`: it is run there before."""
        first = self._bound(is_reversed=False, runs=runs)
        captures = [self._capture(*first), self._capture(*self._bound(is_reversed=True, runs=runs))]
        return written_directly(self._lifted(*compare(captures, self._find, self._code_of))), first

    def _lifted(self, steps: tuple[Step, ...], scratch: tuple[int, ...]) -> Lifted:
        call = self._request.call
        return Lifted(
            op=call.op,
            kernel_id=call.kernel_id,
            inputs=call.inputs,
            outputs=call.outputs,
            attrs=call.attrs,
            alignments=self._request.alignments,
            scratch=scratch,
            steps=steps,
            gpu=self._driver.name(self._context.ordinal),
            driver=str(self._driver.version()),
            versions={name: str(version) for name, version in self._lifter.versions.items()},
        )

    def _demand_room(self) -> None:
        needed = 2 * room_for(self._request.call, self._request.alignments)
        free, _ = self._driver.memory_info()
        if needed > free // 2:
            raise CannotLift(LiftReason.TOO_LARGE, f"trying it takes {needed:,} bytes; {free:,} of the GPU are free")

    def _bound(self, *, is_reversed: bool, runs: bool) -> tuple[TrialMemory, Bound]:
        """The kernel on new memory, after a first run there, if it `runs`."""
        call, alignments = self._request.call, self._request.alignments
        memory = TrialMemory.make(self._context, call, alignments, is_reversed=is_reversed)
        self._stack.callback(self._driver.free, memory.base)
        if runs:
            self._fill_inputs(memory, next(iter(self._request.seeds), 1))
        try:
            with self._enqueued():
                bound = self._request.bind(call, memory.inputs, memory.outputs)
                self._stack.callback(_release, bound)
                if runs:
                    bound()
        except Exception as exc:  # whatever a library raises
            _pass_on(exc)
            raise CannotLift(LiftReason.NOT_CAPTURABLE, f"its first run failed: {_said(exc)}") from exc
        return memory, bound

    @contextmanager
    def _enqueued(self) -> Iterator[None]:
        """What is enqueued inside, goes to our stream, and is over afterwards, also when it fails."""
        try:
            with self._lifter.on_stream(self._stream):
                yield
        finally:
            self._driver.synchronize_stream(self._stream)

    def _capture(self, memory: TrialMemory, bound: Bound) -> Capture:
        return Capture(self._nodes(bound), memory.input_extents, memory.output_extents, memory.allocation)

    def _nodes(self, bound: Bound) -> tuple[Node, ...]:
        driver = self._driver
        try:
            graph = record(
                bound,
                driver,
                self._lifter.on_stream,
                self._stream,
                end=driver.end_recording,
                discard=driver.discard_recording,
            )
        except Exception as exc:  # whatever a library raises
            _pass_on(exc)
            raise CannotLift(LiftReason.NOT_CAPTURABLE, _said(exc)) from exc
        try:
            return driver.nodes(graph)
        except CudaError as exc:
            _pass_on(exc)
            raise CannotLift(LiftReason.PARAMETERS_HIDDEN, exc.message) from exc
        finally:
            driver.discard_recording(graph)

    def _find(self, address: int) -> Allocation | None:
        if address not in self._known:
            self._known[address] = self._driver.allocation(address)
        return self._known[address]

    def _code_of(self, node: KernelNode) -> str:
        found = self._lifter.modules.find(node.name, node.module)
        if found is None:
            raise CannotLift(LiftReason.CODE_UNKNOWN, f"no module that was loaded has {node.name:.500}")
        return found

    # Runs

    def _fill_inputs(self, memory: TrialMemory, seed: int) -> None:
        call = self._request.call
        specs = named(call.op, call.inputs)
        for name, block in zip(OPS[call.op].inputs, memory.inputs, strict=True):
            if block is not None and block.spec.span_bytes:
                data = pattern(call.op, name, specs, seed, call.attrs)
                write(self._driver, block.device.pointer, block.spec.span_bytes, data, self._stream)

    def _try(self, memory: TrialMemory, bound: Bound, seed: int) -> tuple[Result, ...]:
        """What each output is. What a kernel leaves as it was shows in the second run."""
        call, found = self._request.call, list[Result]()
        first = self._run(memory, bound, seed, UNWRITTEN)
        second = self._run(memory, bound, seed, _OTHER)
        for name, spec, one, other in zip(OPS[call.op].outputs, call.outputs, first, second, strict=True):
            if one.sample and is_near(spec, one.sample, other.sample):
                found.append(one.sample)
            elif one.digest == other.digest:
                found.append(one.digest)
            else:
                raise CannotLift(LiftReason.NOT_DETERMINISTIC, f"two runs on the same inputs (seed {seed}): {name}")
        return tuple(found)

    def _run(self, memory: TrialMemory, bound: Bound, seed: int, before: bytes) -> tuple[_Output, ...]:
        driver, stream = self._driver, self._stream
        self._fill_inputs(memory, seed)
        for block in memory.outputs:
            if all(block is not given for given in memory.inputs):
                # Between the elements of a strided output there is what was there.
                has_gaps = block.spec.numel * block.spec.itemsize < block.spec.span_bytes
                filling = UNWRITTEN if has_gaps else before
                write(driver, block.device.pointer, block.spec.span_bytes, filling, stream)
        try:
            with self._enqueued():
                bound()
        except Exception as exc:  # whatever a library raises
            _pass_on(exc)
            raise CannotLift(LiftReason.NOT_DETERMINISTIC, f"a later run failed: {_said(exc)}") from exc
        return tuple(self._read(block, seed) for block in memory.outputs)

    def _read(self, block: Block, seed: int) -> _Output:
        driver, address, spec, stream = self._driver, block.device.pointer, block.spec, self._stream
        sample = b"" if self._request.is_repeatable else read_sample(driver, address, spec, seed, stream)
        digests = self._lifter.digests(self._context)
        return _Output(read_digest(driver, address, spec.span_bytes, stream, digests), sample)
