"""The worker's life after boot: hello, load, then RUN -> kernel -> RAN or RAISED, one at a time and in order. Calls on
express lanes and rings take turns with those of the broker."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

from layerzero.ipc import spinning
from layerzero.ipc.errors import ProtocolError, from_wire
from layerzero.ipc.loading import loading
from layerzero.ipc.shm import lane, memory, recent_calls
from layerzero.ipc.transport import control, messages, sockets, wire
from layerzero.ipc.transport.chains import CHAIN, MAX_TABLE_BYTES
from layerzero.ipc.transport.wire import (
    HAS_GRAPH_SLOT,
    HAS_POINT,
    HEADER_BYTES,
    NO_ARENA,
    REF_BYTES,
    Header,
    Kind,
)
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, MAPPED, WRITTEN, mark
from layerzero.workers import boot
from layerzero.workers.arenas import Arena, map_arena
from layerzero.workers.blocks import Blocks
from layerzero.workers.boot import BootConfig, import_provider
from layerzero.workers.chains import run_chain
from layerzero.workers.lanes import Lane, Lanes
from layerzero.workers.outcomes import error_body, said_of
from layerzero.workers.prepared import neighbour, read_call, read_neighbours
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded
from layerzero.workers.serving import Claimed, server_of

if TYPE_CHECKING:
    from layerzero.workers.failpoint import Faults
    from layerzero.workers.gpu.lifting.modules import Modules
    from layerzero.workers.gpu.serving import GpuServing

MAX_BOUND = 256  # sets of blocks kept bound per signature
CONTROL_TIMEOUT_S = 10.0
FINISH_PAUSE_S = 0.001
HWM = 4096
_CONTROL = (
    messages.MapArena,
    messages.UnmapArena,
    messages.ClientLeft,
    messages.MapLane,
    messages.UnmapLane,
    messages.Wake,  # nothing to do: the worker is awake
    messages.MapGpu,
    messages.UnmapGpu,
    messages.MapGpuArena,
    messages.Lift,
)
_NOBLOCK, _RUN, _RAN = int(zmq.NOBLOCK), int(Kind.RUN), int(Kind.RAN)  # enums are slow


@dataclass
class _Prepared:
    call: Call
    bind: Bind
    is_sized: bool
    gpu: str  # UUID; empty for a call on the CPU
    bound: dict[tuple[int, bytes], Bound] = field(default_factory=dict)


def serve(config: BootConfig, on_prepare: Callable[[], object]) -> int:
    """Say hello, load the provider, serve until STOP or until the broker is gone. Returns the exit code."""
    graph_bytes = boot.read_graph_bytes(os.environ)
    sock = control.connect(Path(config.control_path), timeout_s=CONTROL_TIMEOUT_S)
    hello = messages.Hello(
        protocols=[wire.PROTOCOL], role="worker", package=config.package, pid=os.getpid(), ticket=config.ticket
    )
    control.send(sock, hello)
    answer, fds = control.receive(sock, messages.Welcome, messages.Refused)
    if isinstance(answer, messages.Refused):
        raise from_wire(answer.error)
    faults = _faults(config.failpoints, fds[0])
    page = memory.ControlPage(fds[0], writable=True) if faults is None else faults.page
    os.close(fds[0])
    modules = _watched_modules() if config.lifts else None  # before a library loads any
    with loading():
        loaded = import_provider(config.provider).load()
    if loaded.per_client is not None:
        loaded.per_client.begin(page.write_kept, answer.endpoint)

    context = zmq.Context()
    dealer = sockets.connect_dealer(context, answer.endpoint, answer.identity, HWM)
    ready = messages.Ready(versions=dict(loaded.versions), kernels=sorted(loaded.kernels))
    dealer.send(wire.pack(Kind.READY, body=messages.encode(ready)))
    try:
        wire_end = dealer if faults is None else faults.dealer(dealer)
        _Loop(wire_end, sock, page, loaded, faults, graph_bytes, modules, on_prepare).run()
    finally:
        dealer.close()
        context.term()
    return 0


def _watched_modules() -> Modules:
    from layerzero.workers.gpu.lifting import modules

    return modules.watch()


def _faults(text: str, page: int) -> Faults | None:
    if not text:
        return None
    from layerzero.workers.failpoint import Faults

    return Faults(text, page)


class _Loop:
    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        sock: socket.socket,
        page: memory.ControlPage,
        loaded: Loaded,
        faults: Faults | None,
        graph_bytes: int,
        modules: Modules | None,
        on_prepare: Callable[[], object],
    ) -> None:
        self._dealer = dealer
        self._control = sock
        self._page = page
        self._loaded = loaded
        self._kernels = loaded.kernels
        self._faults, self._graph_bytes, self._modules, self._on_prepare = faults, graph_bytes, modules, on_prepare
        self._arenas: dict[tuple[int, int], Arena] = {}
        self._blocks = Blocks(self._arenas, loaded.per_client, self._hear)
        self._prepared: dict[int, _Prepared] = {}
        self._poll = select.poll()
        open_page = lane.Page if faults is None else faults.open_lane
        self._lanes = Lanes(self._poll, open_page, spinning.limit_ns(os.environ))
        self._gpu: GpuServing | None = None  # until the first GPU is offered
        self._lifts: deque[messages.Lift] = deque()  # not answered yet
        if loaded.on_change is not None:
            loaded.on_change(lambda reason: self._tell(messages.Lifted(number=0, reason=reason)))

    def run(self) -> None:
        """Serve. Returns on STOP and when the broker's end of the control socket closes."""
        poll = self._poll
        poll.register(sockets.poll_fd(self._dealer), select.POLLIN)
        poll.register(self._control, select.POLLIN)
        control_fd = self._control.fileno()
        self._lanes.server = server_of(
            self._serve_claimed,
            self._finish_call,
            self._lanes.mute,
            self._page,
            (sockets.poll_fd(self._dealer), control_fd),
            spoils_calls=self._faults is not None,
        )
        while True:
            while sockets.has_input(self._dealer):  # also after each send, which may eat the edge that announces input
                frame = self._dealer.recv(_NOBLOCK)
                header = wire.unpack(frame)
                if header.kind == _RUN:
                    self._run(header, frame[HEADER_BYTES:])
                elif header.kind == Kind.PREPARE:
                    self._prepare(header.route, frame[HEADER_BYTES:])
                elif header.kind == Kind.DROP:
                    self._drop(header.route)
                elif header.kind == Kind.ALLOW:  # which kind of lane it is may not be known yet
                    self._allow(header.aux, header.route, frame[HEADER_BYTES:])
                    if self._gpu is not None:
                        self._gpu.allow(header.aux, header.route)
                elif header.kind == Kind.MUTE:
                    if self._gpu is not None:
                        self._gpu.gpus.mute(header.aux, header.seq, header.route)
                elif header.kind == Kind.STOP:
                    self._finish()
                    return
                else:
                    raise ProtocolError(f"a worker does not take kind {header.kind}")
                if self._lanes:  # they take turns with the broker's calls
                    self._serve_lanes(poll.poll(0))
                if self._gpu is not None:
                    self._gpu.serve()
            if self._lifts:
                self._answer(self._lifts.popleft())
            events = self._serve_until_news() if self._gpu is None and not self._lifts else self._wait()
            self._serve_lanes(events)
            if any(fd == control_fd for fd, _ in events):
                try:
                    self._take_control()
                except control.Closed:
                    return

    def _serve_until_news(self) -> list[tuple[int, int]]:
        """Serve calls of lanes until a socket has something, too. The broker's is not asked meanwhile: nothing of it
        was read or sent, so that what comes can be polled for."""
        poll, lanes = self._poll.poll, self._lanes
        if lanes.server is not None:
            return lanes.server.serve()  # type: ignore[no-any-return]
        while True:
            seen = lanes.watch()
            if seen is not None:
                self._serve_lane(*seen)
            events = poll() if seen is None else poll(0)
            if not lanes.are_doorbells(events) or self._lifts:
                return events
            self._serve_lanes(events)

    def _wait(self) -> list[tuple[int, int]]:
        if self._lifts:  # one at a time: others' calls have their turn
            if self._gpu is not None:
                self._gpu.serve()
            return self._poll.poll(0)
        return self._poll.poll() if self._gpu is None else self._gpu.wait()

    def _answer(self, message: messages.Lift) -> None:
        """Lift a kernel. A broker that does not read is not waited for long."""
        self._tell(*self._gpu_serving().answer(message, self._kernels))

    def _tell(self, said: messages.Lifted, fds: tuple[int, ...] = ()) -> None:
        try:
            control.send(self._control, said, fds)
        except TimeoutError:
            print("the broker does not take a lifted kernel", file=sys.stderr)
        except control.Closed:
            pass  # the loop learns of it, too
        finally:
            for fd in fds:
                os.close(fd)

    def _finish(self) -> None:
        """Serve what is on lanes, and wait for what was enqueued on GPUs; not for longer than the broker does."""
        self._serve_lanes(self._poll.poll(0))
        while self._gpu is not None and self._gpu.gpus.is_busy:
            try:
                if control.is_readable(self._control.fileno(), FINISH_PAUSE_S):
                    self._take_control()
            except control.Closed:
                return
            self._gpu.gpus.watch()

    def _gpu_serving(self) -> GpuServing:
        """Loads what speaks CUDA, for the first GPU that is offered."""
        if self._gpu is None:
            from layerzero.workers.gpu.lifting.lifter import Lifter
            from layerzero.workers.gpu.serving import GpuServing

            lifter, modules = None, self._modules
            if modules is None and self._loaded.modules is not None:
                modules = self._loaded.modules()
            if modules is not None and self._loaded.on_stream is not None:
                lifter = Lifter(self._loaded.on_stream, modules, self._loaded.versions)
            self._gpu = GpuServing(
                self._poll,
                self._page,
                self._loaded.on_stream,
                self._hear,
                self._leave,
                self._blocks,
                graph_bytes=self._graph_bytes,
                faults=self._faults,
                lifter=lifter,
            )
        return self._gpu

    def _prepare(self, route: int, body: bytes) -> None:
        message, call = read_call(body)
        bind = self._kernels[message.kernel_id]
        self._prepared[route] = _Prepared(call, bind, OPS[message.op].sized_output, message.device)
        self._on_prepare()
        if message.device:
            self._gpu_serving().prepare(route, call, bind, message)

    def _allow(self, number: int, plan: int, body: bytes) -> None:
        prepared = self._prepared.get(plan)
        self._lanes.allow(number, plan, None if prepared is None else read_neighbours(body, prepared.call))

    def _drop(self, route: int) -> None:
        self._prepared.pop(route, None)
        if self._gpu is not None:
            self._gpu.drop(route)
        self._lanes.forget_plan(route)

    def _run(self, header: Header, body: bytes) -> None:
        dispatch, is_replayed, how, elapsed_ns = header.seq, False, recent_calls.OK, 0
        noted = self._page.recent.begin(header.route)
        try:
            self._page.write(dispatch, MAPPED)
            if header.flags & HAS_POINT:
                elapsed_ns, result, is_replayed = self._gpu_serving().run(header, body)
                how = recent_calls.ENQUEUED
            elif header.flags & HAS_GRAPH_SLOT:
                self._gpu_serving().bind_graph_slot(header, body)
                result, how = None, recent_calls.BOUND
            else:
                bound = self._bound(header.route, header.aux, body)
                elapsed_ns, result = self._call(dispatch, bound)
            said = b"" if result is None else msgpack.packb(result)
            reply = wire.pack(_RAN, seq=dispatch, attempt=header.attempt, aux=is_replayed, time=elapsed_ns, body=said)
        except Exception as exc:  # whatever a library raises is this call's outcome, not the worker's
            if self._gpu is not None:
                self._gpu.gpus.check(exc)
            body, how = error_body(exc), recent_calls.RAISED
            reply = wire.pack(Kind.RAISED, seq=dispatch, attempt=header.attempt, body=body)
        self._page.recent.end(how, elapsed_ns, noted)
        self._dealer.send(reply)
        self._page.write(0, IDLE)

    def _bound(self, plan: int, client: int, body: bytes) -> Bound:
        prepared = self._prepared[plan]
        key = (client, body)
        bound = prepared.bound.get(key)
        if bound is None:
            bound = self._bind(prepared, prepared.call, client, body)
            if len(prepared.bound) >= MAX_BOUND:
                del prepared.bound[next(iter(prepared.bound))]
            prepared.bound[key] = bound
        return bound

    def _call(self, dispatch: int, bound: Bound) -> tuple[int, Any]:
        """Run a call: (time of the kernel in ns, what it returned)."""
        page = self._page
        page.write(dispatch, EXECUTING)
        start_ns = time.perf_counter_ns()
        result = bound()
        elapsed_ns = time.perf_counter_ns() - start_ns
        page.write(dispatch, WRITTEN)
        return elapsed_ns, result

    def _leave(self, number: int, call: int, error: Exception | None) -> None:
        body = b"" if error is None else error_body(error)
        self._dealer.send(wire.pack(Kind.LEFT, seq=call, aux=number, body=body))

    def _serve_lanes(self, events: list[tuple[int, int]]) -> None:
        """One call of each lane that has one."""
        for one, claimed in self._lanes.claimed(events):
            self._serve_lane(one, claimed)

    def _serve_claimed(self, one: Lane, claimed: Claimed) -> bool:
        """As `_serve_lane`. Whether something came meanwhile that only the loop can serve."""
        self._serve_lane(one, claimed)
        return self._gpu is not None or bool(self._lifts)

    def _serve_lane(self, one: Lane, claimed: Claimed) -> None:
        """workers/_serving.c does the same for calls that are ready."""
        call, plan, body = claimed
        if plan == CHAIN:
            run_chain(one, call, body, self._page, self._bound_on, self._chain_table)
            return
        page, dispatch, elapsed_ns, outcome = self._page, mark(one.number, call), 0, None
        try:
            page.write(dispatch, MAPPED)
            page.recent.begin(plan, body)
            bound = one.ready.get((plan, body)) or self._bound_on(one, plan, body)
            if bound is None:
                page.recent.end(recent_calls.DECLINED)
                one.end(call, lane.DECLINED, plan)
                page.write(0, IDLE)
                return
            page.write(dispatch, EXECUTING)
            start_ns = time.perf_counter_ns()
            outcome = bound()
            elapsed_ns = time.perf_counter_ns() - start_ns
            page.write(dispatch, WRITTEN)
        except Exception as exc:  # as above
            outcome = exc
        self._finish_call(one, call, plan, elapsed_ns, outcome)

    def _finish_call(self, one: Lane, call: int, plan: int, elapsed_ns: int, outcome: Any) -> None:
        """Tell the client of a lane how its call ended, which the broker hears of when it is brought there."""
        status, said = said_of(outcome)
        self._page.recent.end(status + recent_calls.OK, elapsed_ns)
        one.end(call, status, plan, 0 if status == lane.RAISED else elapsed_ns, said)
        self._page.write(0, IDLE)

    def _bound_on(self, one: Lane, plan: int, body: bytes) -> Bound | None:
        """A call on a lane, ready to be run; None for one that the broker did not allow, or whose arenas are not here.
        Raises what its kernel raises when it is bound."""
        signature = self._signature_on(one, plan, body)
        if signature is None:
            return None
        refs = body[: REF_BYTES * _tensors(signature)]
        if len(refs) == len(body):
            bound = self._bound(plan, one.client, body)
        else:
            bound = self._bind(self._prepared[plan], signature, one.client, refs)
        one.remember(plan, body, bound)
        return bound

    def _chain_table(self, client: int, ref: wire.Ref) -> bytes | None:
        """A copy of a chain's table, which its client may change at any time; None where its arena is not here."""
        arena = self._arenas.get((client, ref.arena))
        if arena is None or ref.nbytes > MAX_TABLE_BYTES or ref.offset + ref.nbytes > arena.nbytes:
            return None
        return bytes(arena.read[ref.offset : ref.offset + ref.nbytes])

    def _signature_on(self, one: Lane, plan: int, body: bytes) -> Call | None:
        """Of the call on a lane: that of its plan, or of a neighbour, whose extents follow the references. None for one
        that the broker did not allow, or whose arenas are not here."""
        prepared = self._prepared.get(plan)
        if prepared is None or prepared.gpu or not self._lanes.allows(one.number, plan):
            return None
        call, size = prepared.call, REF_BYTES * _tensors(prepared.call)
        if len(body) > size:
            found = one.neighbours.get((plan, body[size:]))
            if found is None:
                found = neighbour(call, self._lanes.neighbours(one.number, plan), body[size:])
                if found is None:
                    return None
                one.remember_neighbour(plan, body[size:], found)
            call = found
        elif len(body) < size:
            return None
        refs = wire.unpack_refs(body[:size], _tensors(call))
        has_arenas = all(ref.arena == NO_ARENA or (one.client, ref.arena) in self._arenas for ref in refs)
        return call if has_arenas else None

    def _bind(self, prepared: _Prepared, call: Call, client: int, body: bytes) -> Bound:
        if prepared.gpu:
            raise ProtocolError(f"a call on {prepared.gpu} has no point")
        refs, is_sized = wire.unpack_refs(body, len(call.inputs) + len(call.outputs)), prepared.is_sized
        inputs: list[Block | None] = []
        for spec, ref in zip(call.inputs, refs, strict=False):
            inputs.append(
                None if spec is None else self._blocks.of(client, spec, ref, is_sized=is_sized, writable=False)
            )
        outputs = [
            self._blocks.of(client, spec, ref, is_sized=is_sized, writable=True)
            for spec, ref in zip(call.outputs, refs[len(call.inputs) :], strict=True)
        ]
        return self._blocks.bind_of(prepared.bind, client)(call, inputs, outputs)

    def _hear(self, *, waits: bool) -> bool:
        """Take a message from the control socket; whether there was one. Without `waits` only one that is there."""
        if not waits and not control.is_readable(self._control.fileno()):
            return False
        self._take_control()
        return True

    def _take_control(self) -> None:
        """Take one message from the control socket; waits for it."""
        message, fds = control.receive(self._control, *_CONTROL)
        if isinstance(message, messages.MapLane):
            if message.gpu:
                self._gpu_serving().open_ring(message, fds)
            else:
                self._lanes.open(message.lane, message.client, fds)
        elif isinstance(message, messages.UnmapLane):
            if self._gpu is not None:
                self._gpu.close_ring(message.lane)
            self._lanes.close(message.lane)
        elif isinstance(message, messages.MapArena):
            self._arenas[message.client, message.arena] = map_arena(fds[0], message.nbytes)
        elif isinstance(message, messages.UnmapArena):
            self._unmap_arena(message.client, message.arena)
        elif isinstance(message, messages.ClientLeft):
            if self._loaded.per_client is not None:
                self._loaded.per_client.forget(message.client)
        elif isinstance(message, messages.MapGpu):
            self._gpu_serving().gpus.map_gpu(message, fds)
        elif isinstance(message, messages.UnmapGpu):
            if self._gpu is not None:
                self._gpu.gpus.unmap_gpu(message.client, message.gpu)
        elif isinstance(message, messages.MapGpuArena):
            self._gpu_serving().gpus.map_arena(message, fds)
        elif isinstance(message, messages.Lift):
            self._lifts.append(message)  # this may be in the middle of a call

    def _unmap_arena(self, client: int, arena: int) -> None:
        if self._arenas.pop((client, arena), None) is None:
            if self._gpu is not None:
                self._gpu.unmap_arena(client, arena)
            return
        for prepared in self._prepared.values():  # views keep the maps alive
            prepared.bound.clear()
        if self._gpu is not None:
            self._gpu.forget_arena(client, arena)
        self._lanes.forget_ready()


def _tensors(call: Call) -> int:
    return len(call.inputs) + len(call.outputs)
