"""The worker's life after boot: hello, load, then RUN -> kernel -> RAN or RAISED, one at a time and in order."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path

import msgpack
import zmq

from layerzero.ipc import control, memory, messages, sockets, wire
from layerzero.ipc.errors import BackendError, LayerZeroError, ProtocolError, from_wire
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec
from layerzero.ipc.wire import HEADER_BYTES, NO_ARENA, Header, Kind
from layerzero.workers.boot import BootConfig, import_provider
from layerzero.workers.failpoint import Failpoints
from layerzero.workers.provider import Bind, Block, Bound, Call

IDLE, MAPPED, EXECUTING, WRITTEN = range(4)
MAX_BOUND = 64  # sets of blocks kept bound per signature
CONTROL_TIMEOUT_S = 10.0
HWM = 4096
_NOBLOCK, _RUN, _RAN = int(zmq.NOBLOCK), int(Kind.RUN), int(Kind.RAN)  # enums are slow


@dataclass
class _Arena:
    """A client's arena: inputs are seen through the read-only map, outputs through the writable one."""

    nbytes: int
    read: memoryview
    write: memoryview


@dataclass
class _Prepared:
    call: Call
    bind: Bind
    is_sized: bool
    bound: dict[tuple[int, bytes], Bound] = field(default_factory=dict)


def serve(config: BootConfig) -> int:
    """Say hello, load the provider, serve until STOP or until the broker is gone. Returns the exit code."""
    sock = control.connect(Path(config.control_path), timeout_s=CONTROL_TIMEOUT_S)
    hello = messages.Hello(
        protocols=[wire.PROTOCOL], role="worker", package=config.package, pid=os.getpid(), ticket=config.ticket
    )
    control.send(sock, hello)
    answer, fds = control.receive(sock, messages.Welcome, messages.Refused)
    if isinstance(answer, messages.Refused):
        raise from_wire(answer.error)
    page = memory.ControlPage(fds[0], writable=True)
    os.close(fds[0])
    loaded = import_provider(config.provider).load()

    context = zmq.Context()
    dealer = sockets.connect_dealer(context, answer.endpoint, answer.identity, HWM)
    ready = messages.Ready(versions=dict(loaded.versions), kernels=sorted(loaded.kernels))
    dealer.send(wire.pack(Kind.READY, body=messages.encode(ready)))
    try:
        _Loop(dealer, sock, page, loaded.kernels, Failpoints(config.failpoints)).run()
    finally:
        dealer.close()
        context.term()
    return 0


class _Loop:
    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        sock: socket.socket,
        page: memory.ControlPage,
        kernels: Mapping[str, Bind],
        failpoints: Failpoints,
    ) -> None:
        self._dealer = dealer
        self._control = sock
        self._page = page
        self._kernels = kernels
        self._failpoints = failpoints
        self._arenas: dict[tuple[int, int], _Arena] = {}
        self._prepared: dict[int, _Prepared] = {}

    def run(self) -> None:
        """Serve. Returns on STOP and when the broker's end of the control socket closes."""
        poll = select.poll()
        poll.register(sockets.poll_fd(self._dealer), select.POLLIN)
        poll.register(self._control, select.POLLIN)
        control_fd = self._control.fileno()
        while True:
            while sockets.has_input(self._dealer):  # also after each send, which may eat the edge that announces input
                frame = self._dealer.recv(_NOBLOCK)
                header = wire.unpack(frame)
                if header.kind == _RUN:
                    self._run(header, frame[HEADER_BYTES:])
                elif header.kind == Kind.PREPARE:
                    self._prepare(header.route, frame[HEADER_BYTES:])
                elif header.kind == Kind.DROP:
                    self._prepared.pop(header.route, None)
                elif header.kind == Kind.STOP:
                    return
                else:
                    raise ProtocolError(f"a worker does not take kind {header.kind}")
            if any(fd == control_fd for fd, _ in poll.poll()):
                try:
                    self._take_control()
                except control.Closed:
                    return

    def _prepare(self, route: int, body: bytes) -> None:
        message = messages.decode(body, messages.Prepare)
        inputs = tuple(None if i is None else TensorSpec.from_wire(i) for i in message.inputs)
        outputs = tuple(TensorSpec.from_wire(o) for o in message.outputs)
        call = Call(message.op, message.kernel_id, inputs, outputs, message.attrs)
        self._prepared[route] = _Prepared(call, self._kernels[message.kernel_id], OPS[message.op].sized_output)

    def _run(self, header: Header, body: bytes) -> None:
        dispatch, page, failpoints = header.seq, self._page, self._failpoints
        page.write(dispatch, MAPPED)
        fault = ""
        try:
            if failpoints:
                failpoints.hit("received")
            prepared = self._prepared[header.route]
            key = (header.aux, body)
            bound = prepared.bound.get(key)
            if bound is None:
                bound = self._bind(prepared, header.aux, body)
                if len(prepared.bound) >= MAX_BOUND:
                    del prepared.bound[next(iter(prepared.bound))]
                prepared.bound[key] = bound
            if failpoints:
                failpoints.hit("mapped")
            page.write(dispatch, EXECUTING)
            if failpoints:
                failpoints.hit("executing")
            start_ns = time.perf_counter_ns()
            result = bound()
            elapsed_ns = time.perf_counter_ns() - start_ns
            page.write(dispatch, WRITTEN)
            if failpoints:
                fault = failpoints.hit("written")
            reply = wire.pack(
                _RAN,
                seq=dispatch,
                attempt=header.attempt,
                time=elapsed_ns,
                body=b"" if result is None else msgpack.packb(result),
            )
        except Exception as exc:  # whatever a library raises is this call's outcome, not the worker's
            body = _error_body(exc)
            reply = wire.pack(Kind.RAISED, seq=dispatch, attempt=header.attempt, body=body)
        if fault:
            reply = _spoil(reply, fault)
        if reply:
            self._dealer.send(reply)
        if failpoints:
            failpoints.hit("sent")
        page.write(0, IDLE)

    def _bind(self, prepared: _Prepared, client: int, body: bytes) -> Bound:
        call = prepared.call
        refs = wire.unpack_refs(body, len(call.inputs) + len(call.outputs))
        inputs: list[Block | None] = []
        for spec, ref in zip(call.inputs, refs, strict=False):
            inputs.append(None if spec is None else self._block(prepared, client, spec, ref, writable=False))
        outputs = [
            self._block(prepared, client, spec, ref, writable=True)
            for spec, ref in zip(call.outputs, refs[len(call.inputs) :], strict=True)
        ]
        return prepared.bind(call, inputs, outputs)

    def _block(self, prepared: _Prepared, client: int, spec: TensorSpec, ref: wire.Ref, *, writable: bool) -> Block:
        if ref.arena == NO_ARENA:
            raise ProtocolError("a required tensor has no arena")
        arena = self._arenas.get((client, ref.arena))
        while arena is None:  # its descriptor was sent before this RUN; take what is queued until it is here
            self._take_control()
            arena = self._arenas.get((client, ref.arena))
        if ref.offset + ref.nbytes > arena.nbytes:
            raise ProtocolError(f"bytes {ref.offset}+{ref.nbytes} are outside an arena of {arena.nbytes}")
        if prepared.is_sized:  # the leading extent is as long as the bytes given
            row = spec.itemsize
            for extent in spec.shape[1:]:
                row *= extent
            spec = TensorSpec.contiguous(spec.dtype, (ref.nbytes // row, *spec.shape[1:]))
        if spec.span_bytes > ref.nbytes:
            raise ProtocolError(f"{spec} spans {spec.span_bytes} bytes, the reference has {ref.nbytes}")
        view = arena.write if writable else arena.read
        return Block(view[ref.offset : ref.offset + ref.nbytes], spec)

    def _take_control(self) -> None:
        """Take one message from the control socket; waits for it."""
        message, fds = control.receive(self._control, messages.MapArena, messages.UnmapArena)
        if isinstance(message, messages.MapArena):
            fd = fds[0]
            nbytes = message.nbytes
            try:
                read: mmap = memory.map_fd(fd, nbytes, writable=False, populate=True)
                write: mmap = memory.map_fd(fd, nbytes, writable=True, populate=True)
                arena = _Arena(nbytes, memoryview(read), memoryview(write))
            except (OSError, ValueError) as exc:  # no memory, too many maps: calls that use it fail, the worker lives
                print(f"cannot map an arena of {nbytes} bytes: {exc}", file=sys.stderr)
                arena = _Arena(0, memoryview(b""), memoryview(b""))
            finally:
                os.close(fd)
            self._arenas[message.client, message.arena] = arena
        else:
            self._arenas.pop((message.client, message.arena), None)
            for prepared in self._prepared.values():  # views keep the maps alive
                prepared.bound.clear()


def _error_body(exc: Exception) -> bytes:
    """The error as it travels. Texts that UTF-8 cannot hold and facts that are not plain are reduced to ASCII."""
    try:
        packed: bytes = msgpack.packb(_describe(exc).to_wire())
    except (TypeError, ValueError, OverflowError):
        packed = msgpack.packb(BackendError(ascii(exc)[:2000], exception=type(exc).__name__).to_wire())
    return packed


def _describe(exc: Exception) -> LayerZeroError:
    if isinstance(exc, LayerZeroError):
        exc.message = exc.message[:2000]
        return exc
    text = "".join(traceback.format_exception(exc))
    return BackendError(f"{type(exc).__name__}: {exc}"[:2000], exception=type(exc).__name__, traceback=text[-4000:])


def _spoil(reply: bytes, fault: str) -> bytes:
    """What a faulty worker may send instead of `reply`; see failpoint.py."""
    header = wire.unpack(reply)
    return {
        "garbage": b"\xff" * 64,
        "truncated": reply[: HEADER_BYTES // 2],
        "stale": wire.pack(Kind.RAN, seq=header.seq + 1_000_000, attempt=header.attempt),
        "silent": b"",
    }[fault]
