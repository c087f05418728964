"""A lifted call in one connection: all that is needed to launch it again, and what a report says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.client.arrays.recognition import Array
from layerzero.client.arrays.recognition import Kind as ArrayKind
from layerzero.client.connection.call import Route
from layerzero.client.connection.report import LIFTED, Attempt, Candidate, SelectionReport
from layerzero.client.gpu.arrays import new_like
from layerzero.client.gpu.call_cache import context_watcher, maker, streamer
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.lifting.keys import Key
from layerzero.client.gpu.lifting.lifted_library import why_not
from layerzero.client.gpu.lifting.loaded import LoadedLift
from layerzero.client.gpu.lifting.scratch import ScratchRooms
from layerzero.client.gpu.results import layout_of
from layerzero.client.gpu.session_view import Placed
from layerzero.client.planning.plans import Plan, plan_out
from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import BackendError, CudaError, InvalidArgument, ProtocolError
from layerzero.ipc.lifting.form import Copy, Fill, Lifted
from layerzero.ipc.lifting.program import SCRATCH_STEP
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.ops import COUNTED_AS, OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.client.gpu._lifted import LiftedSite

FIRST_LATER_CALLS = 4
FIRST_PAUSE_S, MAX_PAUSE_S = 0.004, 0.064
TRIED = "its worker is asked for it, or it is being tried"


class Caller(NamedTuple):
    """How arrays of the caller's library are dealt with, without one of them. `make`: a new array for a result, like an
    argument, and its address; None where the op gives none."""

    kind: ArrayKind
    device: int  # ordinal
    dtype: str
    stream: Callable[[], int]
    is_here: Callable[[], bool]  # the GPU's context is current in this thread
    make: Callable[[Any], tuple[Any, int]] | None

    @classmethod
    def of(cls, like: Array, gpu: Gpu, results: Sequence[TensorSpec]) -> Caller:
        make = maker(like, results) if results else None
        return cls(like.kind, like.device, like.spec.dtype, streamer(like), context_watcher(like, gpu), make)

    def with_results(self, results: Sequence[TensorSpec]) -> Caller:
        """The same for a call with other results."""
        like = Array(self.kind, TensorSpec.contiguous(self.dtype, (1,)), 0, None, None, device=self.device)
        return self._replace(make=maker(like, results) if results else None)


class Leave(NamedTuple):
    """The broker's, to launch calls as long as the GPU's page has `epoch`. `number`: by which the broker knows them."""

    number: int
    epoch: int
    backend: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Leave:
        """Of an answer that says "ready". Raises KeyError, ValueError, TypeError."""
        return cls(int(answer["number"]), int(answer["epoch"]), str(answer["backend"]))


class Sharing(NamedTuple):
    """Two tensors of a call, inputs counted before outputs, that must not share memory; `is_same_only`: that must not
    begin at one address (client/connection/call.py: refuse_sharing)."""

    one: int
    other: int
    is_same_only: bool


class Given(NamedTuple):
    """What a call's plan was made of: the specs of the caller's arrays, of `out` if there was one, and the values."""

    specs: tuple[TensorSpec | None, ...]
    out: TensorSpec | None
    params: Mapping[str, Any]
    planner: Callable[..., Plan]

    @classmethod
    def of(cls, call: Placed) -> Given:
        request, specs = call.request, tuple(None if array is None else array.spec for array in call.arrays)
        return cls(specs, None if call.out is None else call.out.spec, request.params, request.planner)

    def plan(self) -> Plan:
        """Raises LayerZeroError for what is no call."""
        made = self.planner(*self.specs, **self.params)
        return made if self.out is None else plan_out(made, self.out)


class Tensors(NamedTuple):
    """Where the tensors of a call may lie, inputs before outputs. `spans`: bytes of each. `aliases`: outputs that are
    inputs as well, and which; `offsets`: of the outputs from the address of the first, for those that are not."""

    spans: tuple[int, ...]
    aliases: dict[int, int]
    offsets: tuple[int, ...]
    sharings: tuple[Sharing, ...]

    @classmethod
    def of(cls, plan: Plan, *, has_out: bool) -> Tensors:
        """`has_out`: the caller says where its result goes."""
        op, count = OPS[plan.op], len(plan.inputs)
        spans = tuple([0 if spec is None else spec.span_bytes for spec in (*plan.inputs, *plan.outputs)])
        aliases = {n: op.inputs.index(name) for n, name in enumerate(op.outputs) if name in op.in_place}
        written, given = tuple(aliases.values()) or (count,) * has_out, [n for n in range(count) if spans[n]]
        sharings = [Sharing(at, n, n in written) for at in written for n in given if n != at and spans[at]]
        return cls(spans, aliases, layout_of(tuple(plan.outputs)).offsets, tuple(sharings))

    def memory(self, inputs: Sequence[int], result: int) -> list[int]:
        """Where they are. `result`: the address of those that are no inputs."""
        outputs = [result + at for at in self.offsets]
        for n, alias in self.aliases.items():
            outputs[n] = inputs[alias]
        return [*inputs, *outputs]

    def may_lie(self, memory: Sequence[int]) -> bool:
        """Whether those there share no memory that they must not share."""
        for one, other, is_same_only in self.sharings:
            at, its = memory[one], memory[other]
            if at == its if is_same_only else at < its + self.spans[other] and its < at + self.spans[one]:
                return False
        return True


@dataclass(eq=False, slots=True)
class Asked:
    """A call whose lifting the broker was asked for. `alignments`: of each input and each output, in bytes."""

    key: Key
    route: Route
    gpu: Gpu
    caller: Caller
    has_out: bool
    alignments: list[int]
    pinned: str | None = None  # the backend that the caller insists on
    refused_at: int | None = None  # the epoch; it is asked for again in another one
    is_waiting: bool = False  # for the broker's answer, or to ask again
    is_overtaken: bool = False  # meanwhile what was answered has come to its end: it is asked for again
    is_alone: bool = False  # no worker can serve it: who calls waits for the answer
    later_calls: int = FIRST_LATER_CALLS  # until it is asked for again, if there is too little evidence by now
    is_probed: Callable[[], bool] | None = None  # before that there is nothing to ask again
    not_here_until_s: float = 0.0  # its provider has failed in this process
    given: Given | None = None
    place: int = 0  # among the calls that grow as it does (client/gpu/lifting/growth.py)
    is_lifted: bool = False  # the broker has given leave for it at some time
    pause_s: float = FIRST_PAUSE_S  # before it is asked for again while it is pending

    @property
    def is_ahead(self) -> bool:
        """It was not asked for by a call: the broker does not know its route."""
        return not self.route.number

    @property
    def question(self) -> dict[str, Any]:
        """What the broker is asked by."""
        return {"route": self.route.number, "alignments": self.alignments, **self.route.beside}

    def is_unknown(self, refusal: InvalidArgument) -> bool:
        """Whether a broker that refuses the question knows nothing of lifting; else this call is at fault."""
        if self.route.beside:
            self.route.not_lifted = refusal.message
        return not self.route.beside

    def pause(self) -> float:
        """In how many seconds to ask again: a like call's neighbour is lifted in a few ms, a proof takes seconds."""
        self.route.awaits = TRIED
        now_s, self.pause_s = self.pause_s, min(2 * self.pause_s, MAX_PAUSE_S)
        return now_s

    def stay_out(self, backend: str, why: str) -> None:
        """Its reports say why its provider does not run it in this process."""
        self.route.stays_out = f"{backend} does not run in this process: {why}"


@dataclass(eq=False, slots=True)
class Site:
    """Calls with one key, as long as the page has `epoch`. `number`: by which the broker knows it."""

    asked: Asked
    loaded: LoadedLift
    number: int
    epoch: int
    rooms: ScratchRooms
    decision: messages.Decision
    note: str
    tensors: Tensors
    compiled: LiftedSite | None = None  # for the C
    is_ahead: bool = False  # no such call was made yet
    row: int = 0  # of counters

    @classmethod
    def of(cls, asked: Asked, loaded: LoadedLift, leave: Leave, rooms: ScratchRooms) -> Site:
        """Raises ProtocolError for what the broker lifted of another call."""
        lifted, plan = loaded.lifted, asked.route.plan
        if (lifted.op, lifted.inputs, lifted.outputs) != (plan.op, tuple(plan.inputs), tuple(plan.outputs)):
            raise ProtocolError(f"a lifted {lifted.op} of other tensors than those of the call was given")
        if any(need and has % need for need, has in zip(lifted.alignments, asked.alignments, strict=True)):
            raise ProtocolError(f"{lifted.alignments} as alignments were given; the call has {asked.alignments}")
        decision = told_of(asked.route, lifted.kernel_id, leave.backend, 0, LIFTED, (False, False))
        tensors, note = Tensors.of(plan, has_out=asked.has_out), _note(asked, lifted)
        row = asked.gpu.counters.row(COUNTED_AS.get(lifted.op, lifted.op), lifted.kernel_id, LIFTED)
        return cls(asked, loaded, leave.number, leave.epoch, rooms, decision, note, tensors, row=row)

    @property
    def gpu(self) -> Gpu:
        return self.asked.gpu

    @property
    def driver(self) -> Driver:
        return self.asked.gpu.memory.context.driver

    def may_lie(self, memory: Sequence[int]) -> bool:
        """Whether the lifted call works on memory there."""
        alignments = self.loaded.lifted.alignments
        if any(need and at % need for at, need in zip(memory, alignments, strict=True)):
            return False
        return self.tensors.may_lie(memory)

    def launch(self, memory: Sequence[int], scratch: Sequence[int], stream: int) -> None:
        """Raises CudaError. Needs the GPU's context to be current."""
        count = len(self.loaded.lifted.inputs)
        self.loaded.call.launch(memory[:count], memory[count:], scratch, stream)

    def error_at(self, step: int, number: int) -> CudaError:
        """The driver's error of this number, at a step."""
        at = self.loaded.lifted.steps[step]
        entry = f"fill_{8 * at.itemsize}" if isinstance(at, Fill) else "copy" if isinstance(at, Copy) else "launch"
        return self.driver.error_of(abi.LAUNCH_ENTRIES[entry], number)

    def failure(self, exc: CudaError) -> BackendError:
        """What the caller gets of a launch that the driver refused, with its report. It is counted."""
        op, told = self.loaded.lifted.op, self.decision
        self.gpu.counters.note_error(self.row, BackendError.code)
        text = f"{op}: {told.kernel_id}, which is lifted, was not launched: {exc.message}"
        error = BackendError(text, backend=told.backend, kernel_id=told.kernel_id, **exc.facts)
        error.report = SelectionReport(
            op=op,
            kernel_id=None,
            backend=None,
            worker_pid=None,
            path=LIFTED,
            attempts=(Attempt(told.backend, told.kernel_id, CudaError.code, exc.message),),
            candidates=tuple(Candidate.from_wire(one) for one in told.candidates),
        )
        return error

    def record(self, start_ns: int, end_ns: int) -> tuple[Any, ...]:
        """Of a call that was launched, which is counted: what a report is made of (client/connection/record.py)."""
        self.gpu.counters.count(self.row, end_ns - start_ns)
        return (self.asked.route.plan, (), start_ns, end_ns, 0, (), self.decision, (), self.note)


def lent_by_torch(site: Site, nbytes: int) -> tuple[Any, int]:
    """Scratch for a graph, from where its other memory is: the tensor that keeps it, and the address."""
    spec = TensorSpec.contiguous("uint8", (nbytes + SCRATCH_STEP,))
    like = Array("torch", spec, 0, None, None, device=site.asked.caller.device)
    made, address = new_like(like, spec)
    return made, -(-address // SCRATCH_STEP) * SCRATCH_STEP


def told_of(
    route: Route, kernel_id: str, backend: str, pid: int, lane: str, copies: tuple[bool, bool]
) -> messages.Decision:
    """What serves a route's calls in this process, with what was said of its other kernels, if anything was. `copies`:
    whether the kernel copies inputs and outputs."""
    told = list(route.decisions.values())[-1:]
    facts: dict[str, Any] = {
        "kernel_id": kernel_id,
        "backend": backend,
        "worker_pid": pid,
        "copies_inputs": copies[0],
        "copies_outputs": copies[1],
        "lane": lane,
    }
    return replace(told[0], **facts) if told else messages.Decision(**facts, candidates=[])


def _note(asked: Asked, lifted: Lifted) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in lifted.versions.items())
    first, *more = [_short(step.name) for step in lifted.steps if hasattr(step, "name")] or [""]
    names = f"{first} and {counted(len(more), 'more kernel')}" if more else first
    path = f"; calls are made by the Python alone: {why_not}" if why_not else ""
    path += f"; {asked.route.stays_out}" if asked.route.stays_out else ""
    kernels = f" ({names})" if names else ""
    return (
        f"lifted: {lifted.kernel_id} of {versions or 'an unknown version'}{kernels} ran in this process, on its own "
        f"stream; GPU {asked.gpu.uuid}{path}"
    )


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:77]}..."
