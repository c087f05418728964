"""Calls on a GPU: enqueued in the caller's stream, not waited for. What goes wrong later is raised by the next call."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.client import overlay
from layerzero.client.arrays import Array
from layerzero.client.call import Request, Route, error_of, microseconds, overlap, place_key, refuse_gradients
from layerzero.client.gpu import Gpu
from layerzero.client.gpu_arrays import current_stream, give, new_like
from layerzero.client.gpu_memory import Place, memory_of, uuid_of
from layerzero.client.link import Link, Pending
from layerzero.client.overlay import Overlay
from layerzero.client.record import failure_of, report_of
from layerzero.client.report import Copy, SelectionReport
from layerzero.ipc import cuda, messages, wire
from layerzero.ipc.cuda import Context
from layerzero.ipc.cuda_handles import STAGED
from layerzero.ipc.errors import CudaError, CudaGraphUnsafe, InvalidArgument, LayerZeroError, NoBackend, NoTransport
from layerzero.ipc.ops import OPS
from layerzero.ipc.order import Turn
from layerzero.ipc.tensors import TensorSpec
from layerzero.ipc.wire import HAS_TURN, NO_ARENA, REF, TURN, Header, Kind

if TYPE_CHECKING:
    from layerzero.client.session import Session

AS_IT_LIES = Overlay.of({"origin": "a call on a GPU is not sent back", "values": {"allow_adaptation": False}})
DENSE = "no kernel takes it with these strides"
MAX_LATE = 4096  # calls that may still get a second answer
MAX_KNOWN, MAX_PLACES = 1024, 256
LOOK_EVERY = 16  # calls of a lane; then it is seen whether too many are open
READ_EVERY = 8  # calls; then the answers that are here are taken
_EXECUTE, _FAILED = int(Kind.EXECUTE), int(Kind.FAILED)
_NO_REF = REF.pack(NO_ARENA, 0, 0, 0)


class Enqueued(Pending):
    """A call that its caller does not wait for."""

    __slots__ = ("calls", "copies", "end_ns", "gpu", "is_awaited", "op", "route", "rung", "start_ns")

    def __init__(
        self, calls: GpuCalls, gpu: Gpu, rung: str, op: str, route: Route, copies: Sequence[Copy], start_ns: int
    ) -> None:
        super().__init__()
        self.rung = rung
        self.is_awaited = False  # its caller raises its error
        self.calls, self.gpu, self.op, self.route, self.copies = calls, gpu, op, route, copies
        self.start_ns, self.end_ns = start_ns, 0

    def finish(self) -> None:
        super().finish()
        if self.header is not None and self.header.kind == _FAILED and not self.is_awaited:
            self.calls.note_failure(self)

    def answer_again(self, header: Header, body: bytes) -> None:
        """The worker died after its answer: what counts is how the call ended elsewhere."""
        self.header, self.body = header, body
        if header.kind == _FAILED:
            self.calls.note_failure(self)


class _Memory(NamedTuple):
    """Where a call's tensors lie for a worker."""

    refs: bytes
    places: Sequence[Place | None]  # inputs, then the output
    copies: Sequence[Copy]
    holds: Sequence[Array]  # until the call is enqueued


class _OtherRung(Exception):
    """Memory crosses in another way by now."""


class _Known(NamedTuple):
    """Calls that need no planning when they are made again: where their tensors have been so far, by their addresses,
    and whose memory that was. `specs` are those whose ids are in the key: they must not be another's."""

    route: Route
    result: TensorSpec
    rung: str
    places: dict[tuple[int, ...], tuple[bytes, tuple[tuple[int, int], ...]]]  # references; addresses and buffer ids
    specs: tuple[TensorSpec | None, ...]


class GpuCalls:
    """Of one session's connection. Threads may share it."""

    def __init__(self, session: Session, link: Link) -> None:
        self._session, self._link = session, link
        self._gpus: dict[int, Gpu] = {}
        self._lock = threading.Lock()
        self._failed: deque[Enqueued] = deque()
        self._late: OrderedDict[int, Enqueued] = OrderedDict()
        self._count = itertools.count(1)
        self._dense: set[tuple[Any, ...]] = set()  # signatures that no kernel takes as they lie
        self._known: dict[tuple[Any, ...], _Known] = {}
        link.on_late = self._answer_late

    def gpu(self, ordinal: int) -> Gpu:
        """Raises CudaError, NoTransport."""
        gpu = self._gpus.get(ordinal)
        if gpu is None:
            with self._lock:
                gpu = self._gpus.get(ordinal)
                if gpu is None:
                    gpu = self._gpus[ordinal] = Gpu(self._link, self._session.lent, memory_of(ordinal))
        return gpu

    def run(self, request: Request, arrays: tuple[Array | None, ...], out: Array | None, start_ns: int) -> Any:
        """The result, valid in the caller's current stream. Raises what the op raises, and the error of an earlier call
        that failed after it had returned."""
        like = next(array for array in arrays if array is not None)
        _refuse_mixture(request.op, like, arrays, out)
        refuse_gradients(request.op, arrays)
        stream = current_stream(like)
        if like.device not in self._gpus:  # making it would break a capture
            with Context(cuda.load(), uuid_of(like.device)) as context:
                _refuse_capture(request.op, context, stream)
        gpu = self.gpu(like.device)
        if gpu.order.is_quiet(stream) or next(self._count) % READ_EVERY == 0:
            self._link.read_nowait()  # else it costs more than it is worth: what failed is told a few calls later
        self._raise_failure()
        with gpu.memory.context as context:
            _refuse_capture(request.op, context, stream)
            key = place_key(request, arrays, out, with_addresses=False)
            try:
                known = self._known.get(key) if key is not None else None
            except TypeError:  # an argument that cannot be hashed: what checks it names it
                key = known = None
            if (
                known is not None
                and known.rung == gpu.rung
                and known.route.is_armed
                and gpu.is_signed(known.route.slot)
            ):
                result, address = (out.obj, out.address) if out is not None else new_like(like, known.result)
                where = (*[array.address for array in arrays if array is not None], address)
                refs = self._again(gpu, known, where)
                if refs is not None:
                    enqueued = Enqueued(self, gpu, known.rung, request.op, known.route, (), start_ns)
                    self._enqueue(request, gpu, stream, _Memory(refs, (), (), ()), enqueued, (arrays, result))
                    enqueued.end_ns = time.perf_counter_ns()
                    self._session.note(enqueued)
                    return result if out is not None else give(like, result)
            while True:
                rung = gpu.rung
                try:
                    return self._run(request, arrays, out, start_ns, gpu, rung, stream, like, key)
                except _OtherRung:
                    continue

    def _run(
        self,
        request: Request,
        arrays: tuple[Array | None, ...],
        out: Array | None,
        start_ns: int,
        gpu: Gpu,
        rung: str,
        stream: int,
        like: Array,
        key: tuple[Any, ...] | None,
    ) -> Any:
        specs = tuple([None if array is None else array.spec for array in arrays])
        dense_key = (request.op, specs, tuple(request.params.items()))
        is_dense = bool(self._dense) and dense_key in self._dense
        if is_dense:
            specs = tuple([None if s is None else TensorSpec.contiguous(s.dtype, s.shape) for s in specs])
        bake = overlay.baked.get()
        policy = overlay.current() if bake is None else bake(request, specs)
        policy = overlay.on_top(policy, AS_IT_LIES)
        route = self._session.routes.find(self._link, request, specs, out, policy, device=gpu.uuid)
        result, address = (out.obj, out.address) if out is not None else new_like(like, route.plan.results[0])
        is_direct = out is None or not any(overlap(out, array) for array in arrays if array is not None)
        is_first = not route.is_armed or not gpu.is_signed(route.slot)
        places: list[Place | None] = []
        # First calls one by one: a worker that could not use an offer is given up until there is another offer.
        with gpu.settling if is_first else contextlib.nullcontext():
            if gpu.rung != rung:
                raise _OtherRung
            try:
                memory = self._place(
                    request, arrays, specs, gpu, rung, stream, address if is_direct else 0, route, places
                )
                enqueued = Enqueued(self, gpu, rung, request.op, route, memory.copies, start_ns)
                enqueued.is_awaited = is_first
                self._enqueue(request, gpu, stream, memory, enqueued, (arrays, result))
                self._take_output(gpu, rung, stream, memory, address, route.plan.results[0].span_bytes)
            finally:  # in the stream's order
                pool = gpu.memory.pool(rung)
                for place in places:
                    if place is not None and place.block is not None:
                        pool.give(place.block)
            try:
                if is_first:
                    self._settle(enqueued)
            except NoTransport as exc:
                gpu.step_down(rung, exc.facts.get("reason") or exc.message)
                self._session.routes.clear()
                raise _OtherRung from exc
            except NoBackend:
                if is_dense or all(s is None or s.is_contiguous for s in specs):
                    raise
                self._dense.add(dense_key)
                return self._run(request, arrays, out, start_ns, gpu, rung, stream, like, key)
        if not is_first and key is not None and rung == "ipc" and not memory.copies:
            where = (*[array.address for array in arrays if array is not None], address)
            self._remember(key, gpu, route, (*specs, None if out is None else out.spec), where, memory)
        enqueued.end_ns = time.perf_counter_ns()
        self._session.note(enqueued)
        return result if out is not None else give(like, result)

    # --- calls that are made again

    def _again(self, gpu: Gpu, known: _Known, where: tuple[int, ...]) -> bytes | None:
        """The references of a call whose tensors lie where they lay once; None when that may be other memory by now."""
        found = known.places.get(where)
        if found is None:
            return None
        refs, owners = found
        driver = gpu.memory.context.driver
        try:
            if all(driver.buffer_id(address) == buffer_id for address, buffer_id in owners):
                return refs
        except CudaError as exc:
            if exc.is_sticky:
                raise
        known.places.pop(where, None)
        return None

    def _remember(
        self,
        key: tuple[Any, ...],
        gpu: Gpu,
        route: Route,
        specs: tuple[TensorSpec | None, ...],
        where: tuple[int, ...],
        memory: _Memory,
    ) -> None:
        driver, arenas = gpu.memory.context.driver, {}
        for place in memory.places:
            if place is not None:
                if place.block is not None:  # of no bytes
                    return
                arenas[place.arena] = place.arena.address
        known = self._known.get(key)
        if known is None or known.rung != "ipc" or known.route is not route:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = _Known(route, route.plan.results[0], "ipc", {}, specs)
        if len(known.places) >= MAX_PLACES:
            known.places.clear()
        known.places[where] = (memory.refs, tuple((address, driver.buffer_id(address)) for address in arenas.values()))

    # --- memory

    def _place(
        self,
        request: Request,
        arrays: tuple[Array | None, ...],
        specs: tuple[TensorSpec | None, ...],
        gpu: Gpu,
        rung: str,
        stream: int,
        output: int,
        route: Route,
        places: list[Place | None],
    ) -> _Memory:
        """`output`: the address of the caller's own memory for the result, 0 when it must not be written directly.
        `places` gets what was found, also when this raises: blocks among it are to be given back."""
        copies: list[Copy] = []
        holds: list[Array] = []
        refs: list[bytes] = []
        for name, array, spec in zip(OPS[request.op].inputs, arrays, specs, strict=True):
            if array is None or spec is None:
                places.append(None)
                refs.append(_NO_REF)
                continue
            source, why = array, ""
            if array.spec != spec:
                source, why = _dense_copy(array, spec), DENSE
                holds.append(source)  # its allocator would take it for the next copy, before this one is read
            elif array.needs_copy:
                why = "its strides cannot be described to a worker"
            place = self._input(gpu, rung, stream, source)
            why = why or place.copied
            if why and array.nbytes:
                copies.append(Copy(name, array.nbytes, "client", why))
            places.append(place)
            refs.append(REF.pack(gpu.number(place.arena, rung), 0, place.offset, spec.span_bytes))
        nbytes = route.plan.outputs[0].span_bytes
        found = gpu.memory.find(output, nbytes, rung) if output else "it shares memory with an input"
        if isinstance(found, str):
            block = gpu.memory.pool(rung).take(nbytes, stream)
            place = Place(block.arena, block.offset, block, found)
            if nbytes:
                copies.append(Copy("out", nbytes, "client", found))
        else:
            place = Place(*found)
        places.append(place)
        refs.append(REF.pack(gpu.number(place.arena, rung), 0, place.offset, nbytes))
        return _Memory(b"".join(refs), places, copies, holds)

    def _input(self, gpu: Gpu, rung: str, stream: int, array: Array) -> Place:
        nbytes = array.spec.span_bytes
        found = gpu.memory.find(array.address, nbytes, rung)
        if not isinstance(found, str):
            return Place(*found)
        block = gpu.memory.pool(rung).take(nbytes, stream)
        if nbytes:
            gpu.memory.context.driver.copy_on_device(block.address, array.address, nbytes, stream)
        return Place(block.arena, block.offset, block, found)

    def _take_output(self, gpu: Gpu, rung: str, stream: int, memory: _Memory, address: int, nbytes: int) -> None:
        """The result to where the caller wants it, if it is not there."""
        output = memory.places[-1]
        assert output is not None
        if rung in STAGED and nbytes:
            output.arena.collect(rung, output.offset, nbytes, stream)
        if output.block is not None and nbytes:
            gpu.memory.context.driver.copy_on_device(address, output.block.address, nbytes, stream)

    # --- a call

    def _enqueue(
        self, request: Request, gpu: Gpu, stream: int, memory: _Memory, enqueued: Enqueued, hold: object
    ) -> None:
        """READY, EXECUTE, and the stream waits for DONE. Whatever happens, the turn has somebody who ends it. `hold`
        keeps what a worker may write to although its caller was interrupted."""
        if enqueued.rung in STAGED:
            for place, spec in zip(memory.places, enqueued.route.plan.inputs, strict=False):
                if place is not None and spec is not None and spec.span_bytes:
                    place.arena.publish(enqueued.rung, place.offset, spec.span_bytes, stream)
        time_us = 0 if request.timeout_s is None else microseconds(request.timeout_s)
        number, flags = enqueued.route.number, HAS_TURN
        with gpu.lock:
            turn = gpu.order.begin(stream)
            body = memory.refs + TURN.pack(turn.lane, turn.number)

            def frame(seq: int) -> bytes:
                self._late[seq] = enqueued
                return wire.pack(_EXECUTE, flags, number, seq, 0, 0, time_us, body)

            try:
                self._link.submit(enqueued, frame)
                self._await(gpu, stream, turn, enqueued)
            except BaseException as exc:
                gpu.order.abandon(stream, turn)
                if not isinstance(exc, LayerZeroError):  # an interrupt: the broker may have the call all the same
                    _interrupted.append(hold)
                raise
            while len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
        if not turn.number % LOOK_EVERY:
            gpu.wait_for_room(turn)

    def _await(self, gpu: Gpu, stream: int, turn: Turn, enqueued: Enqueued) -> None:
        if gpu.memory.why_no_memops:
            self._link.wait(enqueued)  # the CPUs wait in place of the streams
            gpu.wait_for(turn)
        gpu.order.await_done(stream, turn)

    def _settle(self, enqueued: Enqueued) -> None:
        """Wait for the first call of a route: what is wrong is raised by the call itself. Its worker's sign is looked
        for."""
        self._link.wait(enqueued)
        if enqueued.error is not None:
            raise enqueued.error
        header = enqueued.header
        assert header is not None
        route, gpu = enqueued.route, enqueued.gpu
        if header.kind == _FAILED:
            error, outcome = error_of(enqueued.body)
            told = {attempt.get("code"): str(attempt.get("detail")) for attempt in outcome.attempts}
            told = told or {error.code: error.message}
            if list(told) == [NoTransport.code]:
                raise NoTransport(error.message, reason=told[NoTransport.code])
            error.report = failure_of(enqueued.op, enqueued.copies, enqueued.start_ns, outcome)  # type: ignore[attr-defined]
            self._session.note(error.report)  # type: ignore[attr-defined]
            raise error
        decision = route.decisions.get(header.aux)
        if decision is None or not gpu.is_signed(decision.slot):
            text = f"{enqueued.rung}: the client saw other bytes than the worker wrote"
            raise NoTransport(f"GPU memory does not reach the worker: {text}", reason=text)
        route.is_armed = True
        enqueued.is_awaited = False  # its worker may still die with it

    # --- failures of calls that have returned

    def _answer_late(self, header: Header, body: bytes) -> None:
        enqueued = self._late.get(header.seq)
        if enqueued is not None:
            enqueued.answer_again(header, body)

    def note_failure(self, enqueued: Enqueued) -> None:
        """It is raised by the next call, which is waited for if it is on the same route."""
        enqueued.route.is_armed = False
        self._failed.append(enqueued)

    def _raise_failure(self) -> None:
        with contextlib.suppress(IndexError):  # another thread has raised it
            enqueued = self._failed.popleft()
            error, outcome = error_of(enqueued.body)
            error.message = f"an earlier call on the GPU, {enqueued.op}, failed: {error.message}"
            error.args = (error.message,)
            error.report = failure_of(enqueued.op, enqueued.copies, enqueued.start_ns, outcome)  # type: ignore[attr-defined]
            raise error

    def report_of(self, enqueued: Enqueued) -> SelectionReport:
        """As far as it is known: waits for the worker's answer, not for the GPU. Raises the link's error."""
        self._link.wait(enqueued)
        self._link.read_nowait()
        if enqueued.error is not None:
            raise enqueued.error
        header, body = enqueued.header, enqueued.body
        assert header is not None
        if header.kind == _FAILED:
            return failure_of(enqueued.op, enqueued.copies, enqueued.start_ns, error_of(body)[1])
        route, gpu = enqueued.route, enqueued.gpu
        replayed = "; the worker replayed a CUDA graph" if header.flags & wire.REPLAYED else ""
        attempts = messages.decode(body, messages.Outcome).attempts if header.flags & wire.HAS_OUTCOME else ()
        record = (
            route.plan,
            enqueued.copies,
            enqueued.start_ns,
            enqueued.end_ns,
            header.time,
            attempts,
            route.decisions[header.aux],
            (),
            gpu.transport_note + replayed,
        )
        report = report_of(record)
        assert report is not None
        return report

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Until all calls so far are done. Raises the error of one that failed, DeadlineExceeded."""
        for gpu in list(self._gpus.values()):
            gpu.wait_all(timeout_s)
        if self._gpus:
            self._session.ask("ping")  # what the broker has said of them is here when the answer is
        self._raise_failure()

    def finish(self, timeout_s: float) -> None:
        """Before the link is closed: what is enqueued needs the broker and its workers."""
        with contextlib.suppress(LayerZeroError):
            self.synchronize(timeout_s)

    def close(self) -> None:
        """The link must have been closed."""
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()


def _refuse_mixture(op: str, like: Array, arrays: tuple[Array | None, ...], out: Array | None) -> None:
    """Each library has a stream of its own, and a call has one. Raises InvalidArgument."""
    for array in (*arrays, out):
        if array is not None and array.kind != like.kind:
            one, other = (f"{type(a.obj).__module__.partition('.')[0]} array" for a in (like, array))
            raise InvalidArgument(f"{op}: a {one} and a {other} on a GPU; pass arrays of one library")


def _refuse_capture(op: str, context: Context, stream: int) -> None:
    """Needs the context to be current. Raises CudaGraphUnsafe."""
    if context.driver.is_capturing(stream):
        raise CudaGraphUnsafe(
            f"{op}: the stream is being captured into a CUDA graph, and a call through the broker cannot be replayed; "
            "call it outside of the capture"
        )


def _dense_copy(array: Array, spec: TensorSpec) -> Array:
    made, address = new_like(array, spec)
    if array.kind == "torch":
        made.copy_(array.owner.detach() if array.requires_grad else array.owner)
    else:
        made[...] = array.owner
    return Array(array.kind, spec, address, made, made, device=array.device)


_interrupted: list[object] = []
