"""Calls that are made while the application captures a CUDA graph: a replay runs the remote kernels, with no message.

The route must be settled: the call was made before, outside of the capture, and its worker is known to be reached.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import Any, NamedTuple

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection.call import Request, Route, error_of, overlap
from layerzero.client.connection.link import Link
from layerzero.client.gpu import torch_graphs
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.outcomes import Outcomes, Sent
from layerzero.client.gpu.placement import Placing
from layerzero.client.gpu.results import layout_of, result_like
from layerzero.client.gpu.session_view import SessionView
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.errors import CudaGraphUnsafe, LayerZeroError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.tensors import TensorSpec

_FAILED = int(Kind.FAILED)


def unsettled(op: str) -> CudaGraphUnsafe:
    return CudaGraphUnsafe(
        f"{op}: the stream is being captured into a CUDA graph, and no kernel is known yet that serves this call; "
        "make it once outside of the capture, as a warm-up"
    )


class Captured(Sent):
    """A call in a graph of the application. It is answered once by who binds it, and again by each who takes over.
    `hold` keeps its memory until the first answer."""

    def __init__(
        self, outcomes: Outcomes, gpu: Gpu, op: str, route: Route, start_ns: int, graph_slot: int, hold: Any
    ) -> None:
        super().__init__(outcomes, gpu, gpu.transport, op, route, (), start_ns)
        self.graph_slot, self.seq, self.hold = graph_slot, 0, hold
        self.is_awaited = True

    @property
    def has_failed(self) -> bool:
        return self.header is not None and self.header.kind == _FAILED

    def answer_again(self, header: wire.Header, body: bytes) -> None:
        """A worker has died, and another has taken the call over, or none can."""
        self.header, self.body = header, body
        self.outcomes.look_at_attempts(self)
        if header.kind == _FAILED:
            self.gpu.graph_slots.fail(self.graph_slot)
        else:
            self.gpu.graph_slots.answered(self.graph_slot)


class _Tail(NamedTuple):
    """The last graph slot that was added to a graph."""

    gpu: Gpu
    place: tuple[int, tuple[int, ...]]  # the capture and the graph slot's node
    graph_slot: int


class Captures:
    """Of one connection. Threads may share it."""

    def __init__(self, session: SessionView, link: Link, outcomes: Outcomes) -> None:
        self._session, self._link, self._outcomes = session, link, outcomes
        self._tail: _Tail | None = None
        self._lock = threading.Lock()

    def add(
        self,
        request: Request,
        route: Route,
        specs: tuple[TensorSpec | None, ...],
        arrays: tuple[Array | None, ...],
        out: Array | None,
        gpu: Gpu,
        stream: int,
        start_ns: int,
    ) -> Any:
        """Add a call to the graph. Returns its result, which each replay fills.

        Raises CudaGraphUnsafe, and leaves the capture whole, for a call that is not settled, that would need a copy, or
        that no kernel serves from a graph. Needs the GPU's context to be current.
        """
        op, driver = request.op, gpu.memory.context.driver
        like = next(array for array in arrays if array is not None)
        if gpu.memory.why_no_memops:
            raise CudaGraphUnsafe(f"{op}: streams cannot wait for words here: {gpu.memory.why_no_memops}")
        if like.kind in ("dlpack", "own"):
            raise CudaGraphUnsafe(f"{op}: graphs of arrays that are not torch's or CuPy's are not known")
        before = driver.exchange_capture_mode(CAPTURE_RELAXED)  # showing memory to others is no work, nor is a look
        try:
            if not route.is_armed or not gpu.is_signed(route.slot):
                raise unsettled(op)
            result, address = result_like(like, out, route.plan.results)
            refs = self._refs(request, route, specs, arrays, out, gpu, stream, address)
            captured = self._bind(op, route, gpu, refs, (arrays, result), start_ns)
        finally:
            driver.exchange_capture_mode(before)
        self._session.note(captured)
        graph = torch_graphs.graph_of(driver.capture_id(stream)) if driver.has_context_events else None
        if graph is not None:
            torch_graphs.tell_end(graph, partial(gpu.graph_slots.let_go, captured))
        else:
            try:
                driver.retain_in_graph(stream, gpu.graph_slots.counter(captured.graph_slot))
            except BaseException:  # nothing rings it
                self._unbind(gpu, captured)
                raise
        self._enqueue(gpu, stream, captured.graph_slot)
        captured.end_ns = time.perf_counter_ns()
        return result

    def _enqueue(self, gpu: Gpu, stream: int, graph_slot: int) -> None:
        """Add the graph slot to the graph. Right behind another one and nothing else, the caller's GPU need not ring
        it: who answers that one does, at once."""
        driver, before = gpu.memory.context.driver, None
        with self._lock:  # a graph slot is followed by one at most
            tail = self._tail
            if tail is not None and tail.gpu is gpu and driver.capture_tail(stream) == tail.place:
                self._tail, before = None, tail.graph_slot
        if before is None:
            gpu.order.ring(stream, graph_slot)
        else:
            gpu.order.await_graph_slot(stream, graph_slot)
            gpu.order.page.link_graph_slots(before, graph_slot)
        place = driver.capture_tail(stream)
        with self._lock:
            self._tail = _Tail(gpu, place, graph_slot) if place[1] else None

    def _refs(
        self,
        request: Request,
        route: Route,
        specs: tuple[TensorSpec | None, ...],
        arrays: tuple[Array | None, ...],
        out: Array | None,
        gpu: Gpu,
        stream: int,
        address: int,
    ) -> bytes:
        """Raises CudaGraphUnsafe for memory that a worker does not reach as it lies."""
        op = request.op
        if out is not None and any(overlap(out, array) for array in arrays if array is not None):
            raise CudaGraphUnsafe(f"{op}: out= shares memory with an input, and a copy cannot be part of a graph here")
        for array, spec in zip(arrays, specs, strict=True):
            if array is not None and array.spec != spec:
                raise CudaGraphUnsafe(f"{op}: no kernel takes an input with these strides; make it contiguous before")
        ends = [(array.address, array.spec.span_bytes) for array in arrays if array is not None]
        results = layout_of(tuple(route.plan.results)).offsets
        made = [(address + at, spec.span_bytes) for at, spec in zip(results, route.plan.results, strict=True)]
        for at, nbytes in (*ends, *made):
            found = gpu.memory.find(at, nbytes, gpu.transport) if nbytes else ""
            if isinstance(found, str):
                raise CudaGraphUnsafe(f"{op}: a tensor must be copied, which a graph cannot: {found or 'it is empty'}")
        placing = Placing(gpu, gpu.transport, stream)
        try:
            return placing.place(route, arrays, specs, address).refs
        finally:
            placing.end()

    def _bind(self, op: str, route: Route, gpu: Gpu, refs: bytes, hold: Any, start_ns: int) -> Captured:
        """Have a worker answer a graph slot of the call. Raises what that ends in."""
        self.unbind_gone(gpu, is_capturing=True)
        graph_slot, binding = gpu.graph_slots.take()
        captured = Captured(self._outcomes, gpu, op, route, start_ns, graph_slot, hold)
        call = wire.pack_call(refs, graph_slot=graph_slot, binding=binding)
        try:
            self._link.submit(captured, lambda seq: self._frame(captured, seq, call, route.number))
            self._link.wait(captured)
            if captured.error is not None:
                raise captured.error
            assert captured.header is not None
            if captured.header.kind == _FAILED:
                raise error_of(captured.body)[0]
        except BaseException:
            self._unbind(gpu, captured)
            raise
        gpu.graph_slots.bind(graph_slot, captured)
        gpu.watch_graph_slots()
        return captured

    def unbind_gone(self, gpu: Gpu, *, is_capturing: bool = False) -> None:
        """Let go of calls whose graphs are gone. Thread-safe. `is_capturing`: this thread does."""
        for captured in gpu.graph_slots.gone(is_capturing=is_capturing):
            self._unbind(gpu, captured)

    def _unbind(self, gpu: Gpu, captured: Captured) -> None:
        self._outcomes.forget(captured.seq)
        with contextlib.suppress(
            LayerZeroError
        ):  # a broker that is gone knows no graph slots; a full queue costs this one
            if captured.seq:
                self._link.send(wire.pack(Kind.UNBIND, seq=captured.seq))
                self._link.abandon(captured.seq)
            gpu.graph_slots.give_back(captured.graph_slot)

    def _frame(self, captured: Captured, seq: int, call: tuple[int, bytes], route: int) -> bytes:
        captured.seq = seq
        self._outcomes.keep(seq, captured)
        flags, body = call
        return wire.pack_execute(flags, route, seq, body)
