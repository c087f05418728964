"""Calls on a GPU: enqueued in the caller's stream, not waited for. What goes wrong later is raised by the next call."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection import overlay, retained
from layerzero.client.connection.call import (
    Request,
    Route,
    error_of,
    microseconds,
    overlap,
    refuse_gradients,
    refuse_sharing,
)
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link
from layerzero.client.connection.overlay import Overlay
from layerzero.client.connection.report import SelectionReport
from layerzero.client.gpu import torch_graphs
from layerzero.client.gpu.arrays import current_stream, device_name, give, refuse_mixture
from layerzero.client.gpu.call_cache import MAX_KNOWN, Known, key_of
from layerzero.client.gpu.capture import Captures, unsettled
from layerzero.client.gpu.deaths import Deaths
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.fastpath import MISS, learn, repeats_of
from layerzero.client.gpu.memory import memory_of, uuid_of
from layerzero.client.gpu.outcomes import OnRing, Outcomes, Sent
from layerzero.client.gpu.placement import Memory, Placing, dense_key
from layerzero.client.gpu.results import copied_to, result_like
from layerzero.client.gpu.ring import GpuLane
from layerzero.client.gpu.samples import complete, sampled
from layerzero.client.gpu.session_view import Placed, SessionView
from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import (
    InvalidArgument,
    LayerZeroError,
    NoBackend,
    NotConnected,
    NoTransport,
    OutOfMemory,
)
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Kind, arenas_of
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

AS_IT_LIES = Overlay.of({"origin": "a call on a GPU is not sent back", "values": {"allow_adaptation": False}})
LOOK_EVERY = 16  # calls of a lane; then it is seen whether too many are open
CATCH_UP_S, LOOK_S = 0.002, 50e-6
READ_EVERY, READ_OFTEN = 64, 8  # calls on rings, and by the broker; then the answers that are here are taken
_FAILED = int(Kind.FAILED)


class _OtherTransport(Exception):
    """Memory crosses in another way by now."""


class GpuCalls:
    """Of one session's connection. Threads may share it."""

    def __init__(self, session: SessionView, link: Link) -> None:
        self._session, self._link = session, link
        self._gpus: dict[int, Gpu] = {}
        self.is_used = False  # there was a call on a GPU
        self._lock, self._count = threading.Lock(), itertools.count(1)
        self._dense: set[tuple[Any, ...]] = set()  # signatures that no kernel takes as they lie
        self.known: dict[Hashable, Known] = {}
        self.is_closing = False  # no call is begun any more
        self._lanes: dict[int, GpuLane] = {}
        self.deaths = Deaths(session.capsules, link)
        self.outcomes = Outcomes(link, session.ask, self.deaths)
        self._repeats = repeats_of(self, link, session.last)
        self.run_again = self.run_known if self._repeats is None else self._repeats.run
        self._captures = Captures(session, link, self.outcomes)

    def has(self, ordinal: int) -> bool:
        return ordinal in self._gpus

    def gpu(self, ordinal: int) -> Gpu:
        """Raises CudaError, NoTransport."""
        gpu = self._gpus.get(ordinal)
        if gpu is None:
            with self._lock:
                gpu = self._gpus.get(ordinal)
                if gpu is None:
                    on_failure, unbind = self.outcomes.note_failure, self._captures.unbind_gone
                    gpu = Gpu(self._link, self._session.arena_registry, memory_of(ordinal), on_failure, unbind)
                    self._gpus[ordinal], self.is_used = gpu, True
        return gpu

    def run_known(self, request: Request, start_ns: int) -> Any:
        """As `run`, for a call that was made before on the same memory; MISS for others. Touches nothing then.

        `run_again` is this, in C where that was compiled."""
        if not self.known:
            return MISS
        try:
            key = key_of(request, self._repeats)
            known = self.known.get(key) if key is not None else None
        except (TypeError, RuntimeError):  # what cannot be hashed, a tensor without memory: what checks it names it
            return MISS
        if known is None:
            return MISS
        if not known.is_current():
            self.known.pop(key, None)
            return MISS
        gpu, stream = known.gpu, known.stream()
        self.glance(gpu, stream, READ_EVERY)
        out, context = request.out, gpu.memory.context
        is_pushed = not known.is_here()
        if is_pushed:
            context.__enter__()
        try:
            if known.is_capturing(stream):
                return MISS
            if out is None:
                result, address = known.make(request.args[0])  # of no op it may be left out
            else:
                result, address = out, next(iter(known.places), 0)  # its address is in the key
            refs = known.refs(address, context.driver)
            if refs is None:
                return MISS
            enqueued = OnRing(self.outcomes, gpu, known.lane, known.lease, request.op, known.route, (), start_ns)
            with gpu.lock:
                # Another thread may have closed it meanwhile.
                if self.is_closing or not known.lane.holds(known.lease) or gpu.is_behind():
                    return MISS
                point = self.put(enqueued, stream, refs, (request.args, result))
        finally:
            if is_pushed:
                context.__exit__()
        if not point.value % LOOK_EVERY:
            gpu.wait_for_room(point)
        enqueued.end_ns = time.perf_counter_ns()
        self._session.note(enqueued)
        return result

    def run(self, request: Request, arrays: tuple[Array | None, ...], outs: tuple[Array, ...], start_ns: int) -> Any:
        """The result, valid in the caller's current stream. Raises what the op raises, and the error of an earlier call
        that failed after it had returned."""
        if len(outs) > 1:
            return copied_to(request, arrays, outs, lambda plain: self.run(plain, arrays, (), start_ns))
        out = outs[0] if outs else None
        like = next(array for array in arrays if array is not None)
        if not OPS[request.op].runs_on_gpus:
            raise InvalidArgument(
                f"{request.op}: move the arrays to the CPU; it has no kernel for {device_name(like.device)}"
            )
        refuse_mixture(request.op, like, arrays, outs)
        refuse_gradients(request.op, arrays)
        refuse_sharing(request.op, arrays)
        stream = current_stream(like)
        if like.device not in self._gpus:  # making it would break a capture
            with Context(driver.load(), uuid_of(like.device)) as context:
                if context.driver.is_capturing(stream):
                    raise unsettled(request.op)
        gpu = self.gpu(like.device)
        if like.kind == "torch":
            torch_graphs.follow(sys.modules["torch"].cuda, gpu.memory.context.driver)
        if not request.is_apart:
            self.glance(gpu, stream, READ_OFTEN)
        with gpu.memory.context as context:
            if context.driver.is_capturing(stream):
                asked_in, (route, specs) = overlay.process(), self._route(request, arrays, out, gpu)
                if self._session.sampler.is_on and self._session.sampler.draw_on_gpu(route) is not None:
                    self._session.sampler.count("captured")  # a copy would be one of each replay
                if not route.is_armed:  # no worker has served it: was it lifted from the first?
                    before = context.driver.exchange_capture_mode(CAPTURE_RELAXED)
                    try:
                        result, address = result_like(like, out, route.plan.results)
                        placed = Placed(request, route, arrays, out, like, gpu, stream, address, start_ns, asked_in)
                        if self._session.lifts.serve(placed, waits=True):
                            return result if out is not None else give(like, result)
                    finally:
                        context.driver.exchange_capture_mode(before)
                return self._captures.add(request, route, specs, arrays, out, gpu, stream, start_ns)
            while True:
                transport = gpu.transport
                try:
                    return self._run(request, arrays, out, start_ns, gpu, transport, stream, like)
                except _OtherTransport:
                    continue

    def run_apart(
        self, request: Request, arrays: tuple[Array | None, ...], outs: tuple[Array, ...]
    ) -> tuple[Any, SelectionReport]:
        """The result and report of a call of a tool, waited for: `elapsed_us` is until the result was there. It goes by
        the broker, which hears the times of its kernel: `kernel_us` is that of an earlier such call, 0 when none is
        new. Raises the call's own errors, whenever they are found, and those of no other."""
        start_ns = time.perf_counter_ns()
        result = self.run(replace(request, is_apart=True), arrays, outs, start_ns)
        sent = self._session.last.record
        assert isinstance(sent, Sent)
        sent.gpu.wait_for(sent.point)
        elapsed_us = (time.perf_counter_ns() - start_ns) / 1e3
        error = self.outcomes.error_of(sent)
        if error is not None:
            raise error
        return result, replace(self.outcomes.report_of(sent), elapsed_us=elapsed_us)

    def _route(
        self, request: Request, arrays: tuple[Array | None, ...], out: Array | None, gpu: Gpu
    ) -> tuple[Route, tuple[TensorSpec | None, ...]]:
        """The call's route, and the specs of its inputs as a worker gets them."""
        specs = tuple([None if array is None else array.spec for array in arrays])
        if self._dense and dense_key(request, specs) in self._dense:
            specs = tuple([None if s is None else TensorSpec.contiguous(s.dtype, s.shape) for s in specs])
        bake = overlay.baked.get()
        policy = overlay.current() if bake is None else bake(request, specs, gpu.uuid)
        policy = overlay.on_top(policy, AS_IT_LIES)
        outs = () if out is None else (out,)
        route = self._session.routes.find(self._link, request, specs, outs, policy, device=gpu.uuid)
        route.asks = route.asks or (request.params, specs)
        return route, specs

    def _run(
        self,
        request: Request,
        arrays: tuple[Array | None, ...],
        out: Array | None,
        start_ns: int,
        gpu: Gpu,
        transport: str,
        stream: int,
        like: Array,
    ) -> Any:
        asked_in, (route, specs) = overlay.process(), self._route(request, arrays, out, gpu)
        result, address = result_like(like, out, route.plan.results)
        placed = Placed(request, route, arrays, out, like, gpu, stream, address, start_ns, asked_in)
        if (
            not self._session.sampler.is_on
            and not request.is_apart
            and specs == tuple([None if array is None else array.spec for array in arrays])
            and self._session.lifts.serve(placed)
        ):
            return result if out is not None else give(like, result)
        is_direct = out is None or not any(overlap(out, array) for array in arrays if array is not None)
        is_first = not route.is_armed or not gpu.is_signed(route.slot)
        placing = Placing(gpu, transport, stream)
        sample = sampled(self._session.sampler, request, arrays, route, gpu, stream)
        may_pass = request.timeout_s is None and not request.is_apart and sample is None
        if route.lease is not None and may_pass:
            self._catch_up(gpu, stream)
        # First calls one by one: a worker that could not use an offer is given up until there is another offer.
        with gpu.settling if is_first else contextlib.nullcontext():
            if gpu.transport != transport:
                raise _OtherTransport
            try:
                memory = placing.place(route, arrays, specs, address if is_direct else 0)
                placing.publish(route.plan.inputs)
                hold = (arrays, result)
                with gpu.lock:
                    if self.is_closing:
                        raise NotConnected("the session is being closed; lz.connect() opens another")
                    may_pass = may_pass and not is_first and not gpu.is_behind()
                    arenas = arenas_of(memory.refs)
                    place = self.lane_of(gpu, route, arenas) if may_pass else None
                    its = (request.op, route, memory.copies, start_ns)
                    if place is not None:
                        put = OnRing(self.outcomes, gpu, place[0], place[1], *its)
                        enqueued: OnRing | Sent = put
                    else:
                        enqueued = sent = Sent(self.outcomes, gpu, transport, *its)
                        sent.is_awaited, sent.is_apart, sent.arenas = is_first, request.is_apart, arenas
                    self.deaths.give(enqueued, memory.refs, arrays, out, is_direct=is_direct)
                    if place is not None:
                        point = self.put(put, stream, memory.refs, hold)
                    else:
                        point = self.send(request, sent, stream, memory.refs, hold)
                self.deaths.hold(enqueued)
                placing.take_outputs(route.plan, arrays, address)
                if sample is not None and isinstance(enqueued, Sent):
                    complete(self._session.sampler, sample, enqueued, address, like.device, stream)
            finally:  # in the stream's order
                placing.end()
            try:
                if is_first and isinstance(enqueued, Sent):
                    self._settle(enqueued)
            except NoTransport as exc:
                gpu.step_down(transport, exc.facts.get("reason") or exc.message)
                self._session.routes.clear()
                raise _OtherTransport from exc
            except NoBackend:
                if OPS[request.op].in_place or all(spec is None or spec.is_contiguous for spec in specs):
                    raise
                self._dense.add(dense_key(request, tuple([None if a is None else a.spec for a in arrays])))
                return self._run(request, arrays, out, start_ns, gpu, transport, stream, like)
        if isinstance(enqueued, OnRing) and transport == "ipc":
            self._remember(placed, enqueued, memory)
        if not point.value % LOOK_EVERY:
            gpu.wait_for_room(point)
        enqueued.end_ns = time.perf_counter_ns()
        self._session.note(enqueued)
        return result if out is not None else give(like, result)

    def _remember(self, placed: Placed, enqueued: OnRing, memory: Memory) -> None:
        like = placed.like
        if like.kind in ("dlpack", "own") or not memory.is_in_place or self.deaths.holds:
            return
        if self._repeats is not None:
            learn(self._repeats, like)
        key = key_of(placed.request, self._repeats)
        if key is None or not placed.has_its_policy:
            return
        known = self.known.get(key)
        if known is None or known.lease is not enqueued.lease:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            known = self.known[key] = Known.of(enqueued, like, self._repeats)
        known.remember(placed.address, memory, enqueued.gpu.memory.context.driver)

    # --- enqueueing. The GPU's lock is held: a lane's calls are told of in their order. Whatever happens, somebody ends
    # the point. `hold` keeps what a worker may write to although its caller was interrupted.

    def send(
        self, request: Request, enqueued: Sent, stream: int, refs: bytes, hold: object, digest: bytes = b""
    ) -> TimelinePoint:
        """READY, the call to the broker, and the stream waits for DONE."""
        gpu, number = enqueued.gpu, enqueued.route.number
        time_us = 0 if request.timeout_s is None else microseconds(request.timeout_s)
        point = enqueued.point = gpu.order.begin(stream)
        is_out, (flags, body) = False, wire.pack_call(refs, point, digest=digest)

        def frame(seq: int) -> bytes:
            self.outcomes.expect(seq, enqueued)
            gpu.on_the_way[point.timeline] = enqueued
            return wire.pack_execute(flags, number, seq, body, time_us)

        try:
            self._link.submit(enqueued, frame)
            is_out = True
            if gpu.memory.why_no_memops:
                self._link.wait(enqueued)  # the CPUs wait in place of the streams
                gpu.wait_for(point)
            gpu.order.await_done(stream, point)
        except BaseException as exc:
            if is_out and not gpu.memory.why_no_memops:  # somebody has it: as in _end_turn
                retained.keep(hold)
                gpu.order.await_done(stream, point)
                raise
            is_sent = is_out or not isinstance(exc, LayerZeroError)
            if not is_sent:
                gpu.on_the_way.pop(point.timeline, None)
            gpu.give_up(stream, point, hold if is_sent else None)
            raise
        return point

    def put(self, enqueued: OnRing, stream: int, refs: bytes, hold: object) -> TimelinePoint:
        """The call onto its ring, READY, and the stream waits for DONE."""
        lane, order, route = enqueued.lane, enqueued.gpu.order, enqueued.route
        point, before, is_told = order.reserve(stream), lane.head, False
        try:
            enqueued.point, seq = point, self._link.reserve()
            self.outcomes.expect(seq, enqueued)
            is_seen = lane.put(route, enqueued.lease.plan, seq, point, refs, enqueued.timeout_s)
            enqueued.call = lane.head
            if not is_seen:
                self._tell(enqueued, seq, refs)
            is_told = True
            order.enter(stream, point)
        except BaseException:
            enqueued.end(stream, hold, is_out=lane.head != before and (is_told or not lane.is_ended))
            raise
        return point

    def _tell(self, enqueued: OnRing, seq: int, refs: bytes) -> None:
        """Of a call whose worker is gone: the broker may not have seen it on the ring."""
        (flags, body), call = wire.pack_call(refs, enqueued.point), enqueued.call & 0xFFFF_FFFF
        self._link.send(wire.pack_execute(flags, enqueued.route.number, seq, body, 0, enqueued.lane.number, call))

    def tell_and_enter(self, enqueued: OnRing, seq: int, stream: int, refs: bytes, hold: object) -> None:
        """As the end of `put`, for a call that was put in C."""
        try:
            self._tell(enqueued, seq, refs)
        except BaseException:
            enqueued.end(stream, hold, is_out=False)
            raise
        self.enter(enqueued, stream, hold)

    def enter(self, enqueued: OnRing, stream: int, hold: object) -> None:
        """As the end of `put`, for a call that was put in C and the driver refused."""
        try:
            enqueued.gpu.order.enter(stream, enqueued.point)
        except BaseException:
            enqueued.end(stream, hold, is_out=True)
            raise

    def lane_of(self, gpu: Gpu, route: Route, arenas: frozenset[int]) -> tuple[GpuLane, Lease] | None:
        """The ring that a call may be put on, if any. A worker leaves a call on memory that is new to it to the broker,
        and later ones of its lane would pass it: the first on such memory goes there at once."""
        lease = route.lease
        if lease is None or gpu.memory.why_no_memops or not route.is_armed or not gpu.is_signed(lease.decision.slot):
            return None
        if not gpu.has_reached(lease.decision.slot, arenas):
            return None
        lane = self._lanes.get(lease.lane)
        if lane is None:
            with contextlib.suppress(OSError, OutOfMemory):  # no memory or descriptors: the broker takes the calls
                lane = self._lanes[lease.lane] = GpuLane(self._link, lease.lane, gpu)
        if lane is not None and lane.holds(lease):
            return lane, lease
        route.lease = None
        if lane is not None and lane.is_ended:
            del self._lanes[lease.lane]
            lane.close()
        return None

    def _catch_up(self, gpu: Gpu, stream: int) -> None:
        """Wait a moment for the broker's answer to this stream's last call: a ring is faster, and a worker that gets a
        lane's calls in another order may be blocked by it. Without, the next one goes the same way."""
        sent, until_s = gpu.on_the_way.get(gpu.order.timeline(stream)), time.monotonic() + CATCH_UP_S
        while sent is not None and not sent.is_done and time.monotonic() < until_s:
            self._link.read_nowait()  # not its wait, which is for one thread
            if not sent.is_done:
                time.sleep(LOOK_S)

    def _settle(self, enqueued: Sent) -> None:
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
            error.report = self.outcomes.failed_report(enqueued, outcome)  # type: ignore[attr-defined]
            self._session.note(error.report)  # type: ignore[attr-defined]
            raise error
        decision = route.decisions.get(header.aux)
        if decision is None or not gpu.is_signed(decision.slot):
            text = f"{enqueued.transport}: the client saw other bytes than the worker wrote"
            raise NoTransport(f"GPU memory does not reach the worker: {text}", reason=text)
        route.is_armed = True
        enqueued.is_awaited = False  # its worker may still die with it

    def glance(self, gpu: Gpu, stream: int, every: int) -> None:
        """Raises the error of a call that failed after it had returned."""
        if next(self._count) % every == 0 or gpu.order.has_news(stream):
            self.look(gpu)  # else it costs more than it is worth
        elif self.outcomes.has_failure:
            self._raise_failure(gpu)

    def look(self, gpu: Gpu) -> None:
        """As `glance`, now. What calls on rings lent that are over is let go."""
        self._link.read_nowait()
        for lane in list(self._lanes.values()):
            lane.see_awaited()
        if self.outcomes.has_failure:
            self._raise_failure(gpu)

    def _raise_failure(self, gpu: Gpu) -> None:
        gpu.order.take_news()
        self.outcomes.raise_failure()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Until all calls so far are done. Raises the error of one that failed, DeadlineExceeded."""
        for gpu in list(self._gpus.values()):
            gpu.wait_all(timeout_s)
        if self._gpus:
            self._session.ask("ping")  # what the broker has said of them is here when the answer is
            self.look(next(iter(self._gpus.values())))

    def finish(self, timeout_s: float) -> None:
        """Before the link is closed: what is enqueued needs the broker and its workers. No other call begins."""
        self.is_closing = True
        for gpu in list(self._gpus.values()):
            with gpu.lock:  # who is at it has ended
                pass
        with contextlib.suppress(LayerZeroError):
            self.synchronize(timeout_s)
        self.deaths.finish()

    def close(self) -> None:
        """The link must have been closed."""
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self.known.clear()
