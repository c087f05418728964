"""A connection of this process to a broker, and the trip of a call: plan, lend, submit, wait, wrap."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.client import arena as arenas
from layerzero.client import overlay
from layerzero.client.arena import Arena
from layerzero.client.arrays import Array, copy_into, describe, wrap
from layerzero.client.express import Lane as ExpressLane
from layerzero.client.express import Lease, Lost, Ran
from layerzero.client.in_process import Grant, Lane, Refusal, Runner, is_abi_failure
from layerzero.client.link import Link, Pending
from layerzero.client.overlay import Overlay
from layerzero.client.plans import Plan, plan_out
from layerzero.client.report import ADAPTED, Attempt, Candidate, Copy, SelectionReport
from layerzero.client.shadow import NEVER, Sample, Shadow
from layerzero.ipc import messages, wire
from layerzero.ipc.errors import (
    AdaptationRequired,
    BackendError,
    Busy,
    DigestRequired,
    InvalidArgument,
    LayerZeroError,
    OutOfMemory,
    OutputTooSmall,
    Poison,
    ProtocolError,
    RunInProcess,
    from_wire,
)
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec
from layerzero.ipc.wire import NO_ARENA, REF, Header, Kind
from layerzero.workers.provider import Call

MAX_ROUTES = 4096
MAX_CHECKED = 4096
MAX_TICKETS = 1024
MAX_DECISIONS = 2048  # kept per route, for futures that nobody has asked yet
MAX_TIMEOUT_S = 86_400
MAX_LEASE_S = 60.0
ADAPTED_S = 1.0  # so long the copies that a kernel needs are made without asking the broker: policy may change
RETRY_HERE_S = 5.0  # so long a route's calls go to workers after one failed in this process
NO_MORE_COPIES = Overlay.of({"origin": "copies did not help", "values": {"allow_adaptation": False}})
LANE, EXPRESS, IN_PROCESS = "broker", "express", "in_process"
_BACKEND_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_EXECUTE, _FAILED = int(Kind.EXECUTE), int(Kind.FAILED)  # enums are slow
_NO_REF = REF.pack(NO_ARENA, 0, 0, 0)


@dataclass(slots=True)
class Request:
    """One public call before it runs. `params` are its scalars: with the specs of `args` they settle the plan."""

    op: str
    args: tuple[Any, ...]  # the op's tensor arguments as given, None where left out
    params: dict[str, Any]
    planner: Callable[..., Plan]  # of the specs of `args` and `params`
    out: Any = None
    backend: str | None = None
    timeout_s: float | None = None
    output_bytes: tuple[int, ...] | None = None  # ops with sized outputs: how much to allocate for each
    finish: Callable[[list[memoryview], bytes], Any] | None = None  # what to make of those for the caller
    is_rigid: bool = False  # copies did not help before: the broker must not ask for any

    def shape_specs(self, specs: tuple[TensorSpec | None, ...]) -> tuple[TensorSpec | None, ...]:
        """What settles the plan: for ops with sized outputs without the lengths, which travel with each call."""
        if self.output_bytes is None:
            return specs
        return tuple(None if s is None else TensorSpec.contiguous(s.dtype, (0, *s.shape[1:])) for s in specs)


@dataclass(slots=True, eq=False)
class Here:
    """A grant to run a route's calls in this process, while it lasts."""

    runner: Runner
    decision: messages.Decision
    until_s: float


@dataclass(slots=True, weakref_slot=True, eq=False)
class Route:
    """A call signature that the broker knows under `number`."""

    number: int
    plan: Plan
    body: bytes
    overlay: str = ""  # the caller's policy, as text
    decisions: dict[int, messages.Decision] = field(default_factory=dict)
    needs_digest: bool = False
    dense: frozenset[str] = frozenset()  # inputs that the chosen kernel takes only contiguous
    dense_until_s: float = 0.0  # then the broker is asked again: policy or timings may have changed
    here: Here | None = None  # what runs this route's calls in this process
    worker_until_s: float = 0.0  # not here: its probe has not ended, or it failed here
    stays_out: str = ""  # and what of that is to be said in a report
    lease: Lease | None = None  # calls may go straight to the worker


@dataclass(slots=True)
class Submitted:
    """A call on its way, with all that its answer needs."""

    link: Link
    route: Route
    request: Request
    pending: Pending
    arrays: tuple[Array | None, ...]
    blocks: list[memoryview]
    outputs: list[memoryview]
    result_spec: TensorSpec | None
    out: Array | None
    out_is_direct: bool
    copies: list[Copy]
    start_ns: int
    refs: bytes
    adapted: frozenset[str]
    sample: Sample | None = None
    prior: tuple[Attempt, ...] = ()  # attempts that failed in this process or on an express lane
    decision: messages.Decision | None = None  # of a call that ran in this process
    after_lane: int = 0  # the express lane that ended with this call on it, and which call of the lane it was
    after_call: int = 0


class Ticket(NamedTuple):
    """A call that needs no planning when it is made again on the same memory, all of which lies in arenas. `kept` keeps
    the specs whose ids are in its key."""

    route: Route
    refs: bytes
    kept: tuple[Array | None, ...]


class Session:
    """Threads may share it. A forked child gets a connection of its own at its next call."""

    def __init__(self, path: Path, package: str) -> None:
        self.path = path
        self._package = package
        self._lock = threading.RLock()
        self._last = threading.local()
        self._providers: dict[str, tuple[str, str]] = {}  # backend -> provider, descriptor
        _sessions.add(self)
        self._open()
        self.shadow = Shadow(self)

    def _open(self) -> None:
        self._routes: OrderedDict[tuple[Any, ...], Route] = OrderedDict()
        self._by_number: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()  # also in flight
        self._arenas: dict[Arena, int] = {}
        self._express: dict[int, ExpressLane] = {}
        self._tickets: dict[tuple[Any, ...] | None, Ticket] = {}
        self._lane = Lane()  # a forked child has neither the probe's thread nor those of the libraries
        self._route_numbers = itertools.count(1)
        self._checked: set[str] = set()  # overlays that the broker has found to be right
        self._forgotten: deque[int] = deque()  # routes to tell the broker of
        self._arena_numbers = itertools.count(1)
        self._link = Link(self.path, self._package, self._note_decision, self._note_lease)

    @property
    def link(self) -> Link:
        """The connection of this very process."""
        if self._link.forks != arenas.forks:
            with self._lock:
                if self._link.forks != arenas.forks:
                    inherited = list(self._express.values())
                    self._open()
                    for lane in inherited:
                        lane.abandon()
                    self.shadow = Shadow(self, rate=self.shadow.own_rate, references=self.shadow.references)
        return self._link

    @property
    def is_alive(self) -> bool:
        """False once the broker is known to be gone or the session was closed."""
        return self._link.is_alive

    def refusals(self) -> dict[str, str]:
        """Backends (and single kernels) that the policy wants in this process and that cannot run here, with the
        reason."""
        return self._lane.refusals()

    @property
    def broker_pid(self) -> int:
        return self._link.welcome.broker_pid

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Open calls of other threads end as Cancelled."""
        self._link.close()
        for lane in list(self._express.values()):
            lane.close()
        self._express.clear()
        for arena in list(self._arenas):
            arena.registrations.remove(self._retire)
        self._arenas.clear()

    # --- a call --------------------------------------------------------------------------------------

    def run(self, request: Request) -> Any:
        """Run one op and return its result. Raises what client/ops.py documents."""
        start_ns = time.perf_counter_ns()
        arrays, out = self._describe(request)
        key = _place_key(request, arrays, out)
        try:
            ticket = self._tickets.get(key)
        except TypeError:  # an argument that cannot be hashed: what checks it names it
            key = ticket = None
        end = None
        if ticket is not None:
            place = self._lane_of(ticket.route)
            if place is not None:
                lane, lease = place
                hold = (request.args, request.out)
                end = lane.run(lease, ticket.route.number, ticket.refs, _seconds(request, lane.default_s), hold)
                if isinstance(end, Ran):
                    self._note_ran(ticket.route, end, lease.decision, start_ns)
                    return request.out
        submitted = self._prepare(request, (), arrays, out, start_ns)
        place = None if submitted.pending.is_done else self._lane_of(submitted.route)
        if place is not None:
            lane, lease = place
            if end is None:
                timeout_s = _seconds(request, lane.default_s)
                end = lane.run(lease, submitted.route.number, submitted.refs, timeout_s, submitted.pending.hold)
            if isinstance(end, Ran):
                if key is not None and not (submitted.blocks or submitted.outputs):
                    self._remember(key, Ticket(submitted.route, submitted.refs, (*arrays, out)))
                return self._take_ran(submitted, end, lease.decision)
            self._leave_lane(submitted, lane, lease, end)
        return self.wait(self._start(submitted))

    def submit(self, request: Request, prior: tuple[Attempt, ...] = ()) -> Submitted:
        """Send a call; `finish` takes its answer after `Link.wait`. `prior`: attempts that failed in this process."""
        start_ns = time.perf_counter_ns()
        return self._start(self._prepare(request, prior, *self._describe(request), start_ns))

    def _start(self, submitted: Submitted) -> Submitted:
        """Send a call to the broker, unless it ran in this process."""
        if not submitted.pending.is_done:
            seq = self._send(submitted)
            if seq >= self.shadow.next_seq:
                submitted.sample = self.shadow.take(submitted, seq)
        return submitted

    def _lane_of(self, route: Route) -> tuple[ExpressLane, Lease] | None:
        """The lane that a route's calls may take, if any."""
        lease = route.lease
        if lease is None or route.needs_digest or self.shadow.next_seq != NEVER:
            return None
        lane = self._express.get(lease.lane) or self._open_lane(self._link, lease.lane)
        if lane is None or lane.is_ended or not lane.holds(lease):
            route.lease = None
            return None
        return lane, lease

    def _leave_lane(
        self, submitted: Submitted, lane: ExpressLane, lease: Lease, end: Lost | LayerZeroError | None
    ) -> None:
        """What the broker, or the report, is to be told of a call that did not end well on a lane."""
        if isinstance(end, Lost):
            submitted.route.lease, submitted.after_lane, submitted.after_call = (
                None,
                lane.number,
                end.call & 0xFFFF_FFFF,
            )
            self._express.pop(lane.number, None)
            lane.close()
        elif end is not None:
            made = lease.decision
            attempt = Attempt(
                made.backend, made.kernel_id, end.code, end.message, phase=EXPRESS, worker_pid=made.worker_pid
            )
            submitted.prior = (attempt,)

    def _take_ran(self, submitted: Submitted, ran: Ran, decision: messages.Decision) -> Any:
        submitted.pending.finish()
        result = self._result(submitted, ran.said)
        self._note_ran(submitted.route, ran, decision, submitted.start_ns, submitted.copies)
        return result

    def _note_ran(
        self, route: Route, ran: Ran, decision: messages.Decision, start_ns: int, copies: Sequence[Copy] = ()
    ) -> None:
        end_ns = time.perf_counter_ns()
        self._last.record = (route.plan, copies, start_ns, end_ns, ran.kernel_ns, (), decision, (), route.stays_out)

    def _remember(self, key: tuple[Any, ...], ticket: Ticket) -> None:
        if len(self._tickets) >= MAX_TICKETS:
            self._tickets.clear()
        self._tickets[key] = ticket

    def _open_lane(self, link: Link, number: int) -> ExpressLane | None:
        """None when its worker is gone, or this process has no memory or descriptors left for it."""
        with self._lock:
            lane = self._express.get(number)
            if lane is None:
                try:
                    lane = ExpressLane(link, number)
                except (OSError, OutOfMemory):
                    return None
                self._express[number] = lane
            return lane

    def _describe(self, request: Request) -> tuple[tuple[Array | None, ...], Array | None]:
        arrays = tuple([None if arg is None else describe(arg) for arg in request.args])
        return arrays, None if request.out is None else self._describe_out(request.out)

    def _prepare(
        self,
        request: Request,
        prior: tuple[Attempt, ...],
        arrays: tuple[Array | None, ...],
        out: Array | None,
        start_ns: int,
    ) -> Submitted:
        link = self.link
        found = [None if a is None or a.needs_copy else arenas.pool.find(a.address, a.spec.span_bytes) for a in arrays]
        specs: list[TensorSpec | None] = []
        for array, place in zip(arrays, found, strict=True):
            if array is None:
                specs.append(None)
            elif place is not None or array.spec.is_contiguous:
                specs.append(array.spec)
            else:
                specs.append(TensorSpec.contiguous(array.spec.dtype, array.spec.shape))
        bake = overlay.baked.get()
        policy = overlay.current() if bake is None else bake(request, tuple(specs))
        if request.is_rigid:
            policy = overlay.on_top(policy, NO_MORE_COPIES)
        route = self._route(link, request, tuple(specs), out, policy)
        names = OPS[request.op].inputs
        adapted: frozenset[str] = frozenset()
        if route.dense and time.monotonic() < route.dense_until_s:
            adapted = route.dense
            for position, name in enumerate(names):
                spec = specs[position]
                if name in adapted and spec is not None:
                    found[position], specs[position] = None, TensorSpec.contiguous(spec.dtype, spec.shape)
            route = self._route(link, request, tuple(specs), out, policy)
        _refuse_gradients(request.op, arrays)
        here = route.here
        if here is not None and time.monotonic() < here.until_s:
            return self._run_here(link, route, here, request, arrays, specs, out, start_ns, adapted)
        copies: list[Copy] = []
        blocks: list[memoryview] = []
        refs: list[bytes] = []
        for name, array, place, spec in zip(names, arrays, found, route.plan.inputs, strict=True):
            if array is None or spec is None:
                refs.append(_NO_REF)
            elif place is not None:
                arena, offset = place
                refs.append(
                    REF.pack(self._arenas.get(arena) or self._lend(link, arena), 0, offset, array.spec.span_bytes)
                )
            else:
                block, arena, offset = arenas.pool.allocate(array.nbytes)
                copy_into(array, block)
                blocks.append(block)
                if array.nbytes:
                    copies.append(Copy(name, array.nbytes, "client", _why_copied(array, name in adapted)))
                refs.append(REF.pack(self._arenas.get(arena) or self._lend(link, arena), 0, offset, array.nbytes))
        outputs: list[memoryview] = []
        out_is_direct = False
        if out is not None and not out.needs_copy and not any(_overlap(out, a) for a in arrays if a is not None):
            place = arenas.pool.find(out.address, out.spec.span_bytes)
            if place is not None:
                arena, offset = place
                number = self._arenas.get(arena) or self._lend(link, arena)
                refs.append(REF.pack(number, 0, offset, out.spec.span_bytes))
                out_is_direct = True
        if not out_is_direct:
            for nbytes in request.output_bytes or [spec.span_bytes for spec in route.plan.outputs]:
                block, arena, offset = arenas.pool.allocate(nbytes)
                outputs.append(block)
                refs.append(REF.pack(self._arenas.get(arena) or self._lend(link, arena), 0, offset, nbytes))
        result = route.plan.results[0] if route.plan.results else None
        return Submitted(
            link,
            route,
            request,
            Pending((arrays, blocks, outputs, out), request.timeout_s),
            arrays,
            blocks,
            outputs,
            result,
            out,
            out_is_direct,
            copies,
            start_ns,
            b"".join(refs),
            adapted,
            prior=prior,
        )

    def _send(self, submitted: Submitted) -> int:
        route, timeout_s = submitted.route, submitted.request.timeout_s
        body, flags = submitted.refs, 0
        if not submitted.prior and time.monotonic() >= route.worker_until_s:
            flags, route.stays_out = wire.MAY_RUN_HERE, ""
        if route.needs_digest:
            body, flags = body + self._digest(submitted), flags | wire.HAS_DIGEST
        time_us = 0 if timeout_s is None else _microseconds(timeout_s)
        number, lane, call = route.number, submitted.after_lane, submitted.after_call
        if lane:
            flags |= wire.AFTER_LANE
        return submitted.link.submit(
            submitted.pending,
            lambda seq: wire.pack(_EXECUTE, flags, number, seq, call, lane, time_us, body),
        )

    def finish(self, submitted: Submitted) -> Any:
        """Result of a call whose answer is here."""
        pending = submitted.pending
        if pending.error is not None:
            self._last.record = None
            raise pending.error
        header = pending.header
        assert header is not None
        attempts: list[Any] = []
        if header.kind == _FAILED:
            error, outcome = _error_of(pending.body)
            if isinstance(error, AdaptationRequired):
                return self.wait(self.submit(self._adapt(submitted, error), submitted.prior))
            if isinstance(error, RunInProcess):
                self._take_grant(submitted.route, error, outcome)
                return self.run(submitted.request)
            if isinstance(error, DigestRequired) and not submitted.route.needs_digest:
                submitted.route.needs_digest = True
                hold = (submitted.arrays, submitted.blocks, submitted.outputs, submitted.out)
                submitted.pending = Pending(hold, submitted.request.timeout_s)
                self._send(submitted)
                return self.wait(submitted)
            self._raise(submitted, error, outcome)
        body = pending.body
        if header.flags & wire.HAS_OUTCOME:
            outcome = messages.decode(body, messages.Outcome)
            attempts, body = outcome.attempts, outcome.result
        result = self._result(submitted, body)
        decision = submitted.decision or submitted.route.decisions[header.aux]
        if submitted.sample is not None:
            self.shadow.check(submitted, submitted.sample, decision)
        plan, copies = submitted.route.plan, submitted.copies  # not `submitted`: it would keep the arrays alive
        self._last.record = (
            plan,
            copies,
            submitted.start_ns,
            time.perf_counter_ns(),
            header.time,
            attempts,
            decision,
            submitted.prior,
            submitted.route.stays_out,
        )
        return result

    def _adapt(self, submitted: Submitted, error: AdaptationRequired) -> Request:
        """The same call with the copies that the chosen kernel asks for; without it, when they did not help."""
        route, request = submitted.route, submitted.request
        if request.is_rigid:
            raise ProtocolError("the broker asks for copies that the call forbids")
        found = {str(text).rpartition(" ")[2] for text in error.facts.get("transforms", ())}
        if found and not submitted.adapted:
            route.dense, route.dense_until_s = frozenset(found), time.monotonic() + ADAPTED_S
            return request
        return replace(request, is_rigid=True)

    def _take_grant(self, route: Route, error: RunInProcess, outcome: messages.Outcome) -> None:
        """Policy wants a backend in this process: take the grant, or note that calls go to its worker for now."""
        try:
            backend, kernel_id = str(error.facts["backend"]), str(error.facts["kernel_id"])
            lease_s = min(float(error.facts["lease_s"]), MAX_LEASE_S)
            copies = bool(error.facts["copies_inputs"]), bool(error.facts["copies_outputs"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"not a grant: {error.facts!r:.200}") from exc
        if backend not in self._providers:
            answer = self.ask("provider", backend=backend)
            self._providers[backend] = answer["provider"], answer["descriptor"]
        plan = route.plan
        call = Call(plan.op, kernel_id, plan.inputs, plan.outputs, plan.attrs)
        runner = self._lane.runner(Grant(backend, *self._providers[backend]), call)
        if isinstance(runner, Refusal):
            route.worker_until_s = time.monotonic() + (RETRY_HERE_S if runner.is_final else lease_s)
            route.stays_out = f"{backend} does not run in this process: {runner.why}"
            return
        decision = messages.Decision(
            kernel_id=kernel_id,
            backend=backend,
            worker_pid=os.getpid(),
            copies_inputs=copies[0],
            copies_outputs=copies[1],
            candidates=outcome.candidates,
            lane=IN_PROCESS,
        )
        route.here = Here(runner, decision, time.monotonic() + lease_s)

    def _run_here(
        self,
        link: Link,
        route: Route,
        here: Here,
        request: Request,
        arrays: tuple[Array | None, ...],
        specs: Sequence[TensorSpec | None],
        out: Array | None,
        start_ns: int,
        adapted: frozenset[str],
    ) -> Submitted:
        """Run a call in this process; when the kernel fails, it goes to the broker like any other. Its `timeout_s` is
        checked, but nobody can end a kernel here."""
        if request.timeout_s is not None:
            _microseconds(request.timeout_s)
        copies: list[Copy] = []
        blocks: list[memoryview] = []
        inputs: list[tuple[int, int] | None] = []
        for name, array, spec in zip(OPS[request.op].inputs, arrays, specs, strict=True):
            if array is None or spec is None:
                inputs.append(None)
            elif array.spec == spec and not array.needs_copy:
                inputs.append((array.address, array.spec.span_bytes))
            else:
                block, arena, offset = arenas.pool.allocate(array.nbytes)
                copy_into(array, block)
                blocks.append(block)
                if array.nbytes:
                    copies.append(Copy(name, array.nbytes, "client", _why_copied(array, name in adapted)))
                inputs.append((arena.address + offset, array.nbytes))
        outputs: list[memoryview] = []
        places: list[tuple[int, int]] = []
        is_direct = out is not None and not out.needs_copy
        if out is not None and is_direct and not any(_overlap(out, a) for a in arrays if a is not None):
            places.append((out.address, out.spec.span_bytes))
        else:
            is_direct = False
            for nbytes in request.output_bytes or [spec.span_bytes for spec in route.plan.outputs]:
                block, arena, offset = arenas.pool.allocate(nbytes)
                outputs.append(block)
                places.append((arena.address + offset, nbytes))
        kind, body = Kind.DONE, b""
        try:
            kernel_ns, body = here.runner.run(inputs, places)
        except (InvalidArgument, OutputTooSmall) as exc:  # the call itself is wrong, and so it is for every kernel
            outcome = messages.Outcome(error=exc.to_wire(), candidates=here.decision.candidates)
            kind, kernel_ns, body = Kind.FAILED, 0, messages.encode(outcome)
        except Exception as exc:  # whatever a library raises is this attempt's outcome
            return self._fail_here(link, route, here, request, arrays, out, start_ns, exc)
        else:
            self._tell(link, route, messages.RanHere(kernel_id=here.decision.kernel_id, kernel_ns=kernel_ns))
        pending = Pending()
        pending.header = Header(wire.PROTOCOL, kind, 0, route.number, 0, 1, 0, kernel_ns)
        pending.body = body
        pending.finish()
        result = route.plan.results[0] if route.plan.results else None
        return Submitted(
            link,
            route,
            request,
            pending,
            arrays,
            blocks,
            outputs,
            result,
            out,
            is_direct,
            copies,
            start_ns,
            b"",
            adapted,
            decision=here.decision,
        )

    def _fail_here(
        self,
        link: Link,
        route: Route,
        here: Here,
        request: Request,
        arrays: tuple[Array | None, ...],
        out: Array | None,
        start_ns: int,
        exc: Exception,
    ) -> Submitted:
        """The kernel failed in this process: the broker is told, and the call goes to the workers."""
        backend, kernel_id = here.decision.backend, here.decision.kernel_id
        error = BackendError(f"{type(exc).__name__}: {exc}"[:2000])
        route.here, route.worker_until_s = None, time.monotonic() + RETRY_HERE_S
        route.stays_out = f"{backend} does not run in this process for {RETRY_HERE_S:g} s: a call failed here"
        if is_abi_failure(exc):
            self._lane.refuse(backend, f"a call of {kernel_id} failed here: {error.message}")
            for other in list(self._routes.values()):
                if other.here is not None and other.here.decision.backend == backend:
                    other.here = None
        self._tell(link, route, messages.RanHere(kernel_id=kernel_id, error=error.to_wire()))
        attempt = Attempt(backend, kernel_id, error.code, error.message, phase=IN_PROCESS, worker_pid=os.getpid())
        return self._prepare(request, (attempt,), arrays, out, start_ns)

    def _tell(self, link: Link, route: Route, ran: messages.RanHere) -> None:
        """For the broker's log and times. The call does not depend on it."""
        try:
            link.send(wire.pack(Kind.RAN_HERE, route=route.number, body=messages.encode(ran)))
        except Busy:  # thousands of messages are on their way: one time more or less
            return

    def _result(self, submitted: Submitted, body: bytes) -> Any:
        request = submitted.request
        if submitted.out is not None:
            if not submitted.out_is_direct:
                spec = submitted.result_spec
                assert spec is not None
                assign(submitted.out, submitted.outputs[0], spec)
                reason = "out= does not lie in an arena, or shares memory with an input"
                submitted.copies.append(Copy("out", submitted.out.nbytes, "client", reason))
            return submitted.out.obj
        if request.finish is not None:
            return request.finish(submitted.outputs, body)
        if submitted.result_spec is None:
            return None
        like = next(a for a in submitted.arrays if a is not None)
        value, was_copied = wrap(submitted.outputs[0], submitted.result_spec, like)
        if was_copied:
            name = type(like.obj).__module__.partition(".")[0]
            submitted.copies.append(
                Copy("out", submitted.result_spec.span_bytes, "client", f"{name} owns its arrays' memory")
            )
        return value

    def _raise(self, submitted: Submitted, error: LayerZeroError, outcome: messages.Outcome) -> None:
        if isinstance(error, Poison) and not submitted.route.needs_digest:
            submitted.route.needs_digest = True
            number = submitted.route.number
            self._link.send(wire.pack(Kind.POISONED, route=number, body=self._digest(submitted)))
        report = SelectionReport(
            op=submitted.request.op,
            kernel_id=None,
            backend=None,
            worker_pid=None,
            lane=LANE,
            copies=tuple(submitted.copies),
            elapsed_us=(time.perf_counter_ns() - submitted.start_ns) / 1e3,
            attempts=(*submitted.prior, *(_attempt(a) for a in outcome.attempts)),
            candidates=tuple(Candidate.from_wire(c) for c in outcome.candidates),
        )
        self._last.record = report
        error.report = report  # type: ignore[attr-defined]
        raise error

    def _digest(self, submitted: Submitted) -> bytes:
        """Of the inputs' contents: tells a poisonous call from a harmless one of the same signature."""
        digest = hashlib.blake2b(digest_size=wire.DIGEST_BYTES)
        for array in submitted.arrays:
            if array is not None:
                scratch = bytearray(array.nbytes)
                copy_into(array, memoryview(scratch))
                digest.update(scratch)
        return digest.digest()

    # --- memory --------------------------------------------------------------------------------------

    def _lend(self, link: Link, arena: Arena) -> int:
        """Show the broker an arena; once for each."""
        with self._lock:
            number = self._arenas.get(arena)
            if number is None:
                number = next(self._arena_numbers)
                link.add_arena(number, arena.fd, arena.nbytes)
                self._arenas[arena] = number
                arena.registrations.append(self._retire)
            return number

    def lent(self, number: int) -> Arena:
        """The arena that the broker knows under this number."""
        return next(arena for arena, known in list(self._arenas.items()) if known == number)

    def lend_bytes(self, owner: Any, data: bytes) -> memoryview:
        """`data` in shared memory, copied once for as long as `owner` lives."""
        block = _lent_bytes.get(owner)
        if block is None:
            block, _, _ = arenas.pool.allocate(len(data))
            block[:] = data
            _lent_bytes[owner] = block
        return block

    def _retire(self, arena: Arena) -> None:
        number = self._arenas.pop(arena, None)
        self._tickets.clear()  # its addresses may come again as other memory
        if number is not None:
            self._link.retire_arena(number)

    def _describe_out(self, out: Any) -> Array:
        array = describe(out)
        is_torch_view = array.kind == "torch" and array.owner is not array.obj and array.obj.is_neg()
        if is_torch_view or not (hasattr(out, "__setitem__") or array.kind == "buffer"):
            raise InvalidArgument(f"out= is a {type(out).__name__} that cannot be written to; pass an array of its own")
        if not array.writable:
            raise InvalidArgument(f"out= is read-only ({array.spec}); pass a writable array")
        if array.kind == "dlpack":
            raise InvalidArgument(f"out= is a {type(out).__name__}, whose memory its library owns; leave it out")
        if array.kind == "buffer" and not array.owner.c_contiguous:
            raise InvalidArgument("out= is a strided buffer; pass a contiguous one")
        if array.requires_grad:
            raise InvalidArgument("out= requires gradients; pass a tensor without, or use torch.no_grad()")
        return array

    # --- routes --------------------------------------------------------------------------------------

    def _route(
        self,
        link: Link,
        request: Request,
        specs: tuple[TensorSpec | None, ...],
        out: Array | None,
        policy: Overlay | None,
    ) -> Route:
        out_spec = None if out is None else out.spec
        specs = request.shape_specs(specs)
        params = tuple([(type(value), value) for value in request.params.values()])  # True, 1 and 1.0 are equal
        asked = None if policy is None else policy.text
        key = (request.op, specs, params, request.backend, out_spec, asked)
        try:
            route = self._routes.get(key)
        except TypeError:  # an argument that cannot be hashed: what checks it names it
            self._route_message(request.planner(*specs, **request.params), request.backend, policy)
            raise InvalidArgument(f"{request.op}: an argument is of a wrong type: {request.params!r:.200}") from None
        if route is not None:
            return route
        plan = request.planner(*specs, **request.params)
        if out is not None:
            plan = plan_out(plan, out.spec)
        if policy is not None:
            self.check_policy(policy)
        return self.define_route(link, key, plan, request.backend, policy)

    def define_route(
        self, link: Link, key: tuple[Any, ...], plan: Plan, backend: str | None, policy: Overlay | None = None
    ) -> Route:
        """The route of a plan, told to the broker once; `key` finds it again."""
        body = messages.encode(self._route_message(plan, backend, policy))
        if len(body) > wire.MAX_MESSAGE_BYTES // 2:
            raise InvalidArgument(f"{plan.op}: the call's description is {len(body)} bytes; pass data as tensors")
        with self._lock:
            route = self._routes.get(key)
            if route is None:
                route = Route(next(self._route_numbers), plan, body, "" if policy is None else policy.text)
                self._by_number[route.number] = route
                link.send(wire.pack(Kind.ROUTE, route=route.number, body=body))
                self._routes[key] = route
                weakref.finalize(route, self._forgotten.append, route.number).atexit = False
                if len(self._routes) > MAX_ROUTES:
                    self._routes.popitem(last=False)  # the oldest; a call in flight may still hold it
            while self._forgotten:  # nobody can call on these any more
                link.send(wire.pack(Kind.FORGET, route=self._forgotten.popleft()))
        return route

    def check_policy(self, policy: Overlay) -> None:
        """Let the broker look at an overlay, once for each. Raises InvalidArgument with what is wrong and the nearest
        names."""
        if policy.text not in self._checked:
            self.ask("policy", overlay=policy.to_wire())
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked.add(policy.text)

    def _route_message(self, plan: Plan, backend: str | None, policy: Overlay | None) -> messages.Route:
        if backend is not None and not (isinstance(backend, str) and _BACKEND_NAME.fullmatch(backend)):
            raise InvalidArgument(f"backend is {backend!r:.80}; allowed: None or a name that lz.status() lists")
        return messages.Route(
            op=plan.op,
            inputs=[None if s is None else s.to_wire() for s in plan.inputs],
            outputs=[s.to_wire() for s in plan.outputs],
            attrs=dict(plan.attrs),
            backend=backend or "",
            policy={} if policy is None else policy.to_wire(),
        )

    def _note_decision(self, header: Header, body: bytes) -> None:
        route = self._by_number.get(header.route)
        if route is not None:
            if len(route.decisions) >= MAX_DECISIONS:
                del route.decisions[next(iter(route.decisions))]
            decision = route.decisions[header.aux] = messages.decode(body, messages.Decision)
            self.shadow.follow(route.overlay, decision.shadow_rate, tunes=decision.offers_samples)

    def _note_lease(self, header: Header, body: bytes) -> None:
        route = self._by_number.get(header.route)
        decision = route.decisions.get(header.aux) if route is not None else None
        if route is not None and decision is not None:
            lease = messages.decode(body, messages.Lease)
            route.lease = Lease(lease.lane, lease.plan, lease.epoch, replace(decision, lane=EXPRESS))

    # --- reports and requests ------------------------------------------------------------------------

    def last_report(self) -> SelectionReport | None:
        """Of this thread's last call."""
        self._last.record = report = self.report_of(self.last_record)
        return report

    @property
    def last_record(self) -> Any:
        """What `report_of` makes a report of, for this thread's last call; None before the first one."""
        return getattr(self._last, "record", None)

    def report_of(self, record: Any) -> SelectionReport | None:
        """The report of a call; making it costs more than most calls, so that it waits until someone asks."""
        if record is None or isinstance(record, SelectionReport):
            return record
        plan, copies, start_ns, end_ns, kernel_ns, attempts, decision, prior, note = record
        copies = list(copies)
        where = "client" if decision.lane == IN_PROCESS else "worker"
        for is_copied, name, specs in (
            (decision.copies_inputs, "inputs", plan.inputs),
            (decision.copies_outputs, "out", plan.outputs),
        ):
            nbytes = sum(spec.numel * spec.itemsize for spec in specs if spec is not None)
            if is_copied and nbytes:
                copies.append(Copy(name, nbytes, where, f"{decision.backend} owns its arrays' memory"))
        good = Attempt(decision.backend, decision.kernel_id, None, worker_pid=decision.worker_pid)
        return SelectionReport(
            op=plan.op,
            kernel_id=decision.kernel_id,
            backend=decision.backend,
            worker_pid=decision.worker_pid,
            lane=decision.lane,
            copies=tuple(copies),
            elapsed_us=(end_ns - start_ns) / 1e3,
            kernel_us=kernel_ns / 1e3,
            attempts=(*prior, *(_attempt(a) for a in attempts), good),
            candidates=tuple(Candidate.from_wire(c) for c in decision.candidates),
            notes=(note,) if note else (),
        )

    def signature(self, request: Request) -> bytes:
        """The encoded Route message of a call; a TensorSpec may stand for an array."""
        specs = tuple(
            None if arg is None else arg if isinstance(arg, TensorSpec) else describe(arg).spec for arg in request.args
        )
        plan = request.planner(*specs, **request.params)
        return self.route_body(plan, request.backend)

    def explain(self, request: Request) -> SelectionReport:
        """Which kernel would serve this call now, and why not the others. Runs nothing."""
        return self.explain_route(request.op, self.signature(request))

    def route_body(self, plan: Plan, backend: str | None) -> bytes:
        """What the broker is told of a call with this plan, as policy is here and now."""
        return messages.encode(self._route_message(plan, backend, overlay.current()))

    def explain_route(self, op: str, body: bytes) -> SelectionReport:
        """As `explain`, for what `route_body` made."""
        answer = self.ask("explain", route=body)
        candidates = tuple(Candidate.from_wire(c) for c in answer["candidates"])
        best = next((c for c in candidates if c.accepted), None)
        return SelectionReport(
            op=op,
            kernel_id=best.kernel_id if best else None,
            backend=best.backend if best else None,
            worker_pid=None,
            lane=LANE if best else None,
            candidates=candidates,
        )

    def ask(self, method: str, **params: Any) -> Any:
        """A request to the broker: status, explain, reset, shutdown. Returns plain values."""
        link, pending = self.link, Pending()
        body = messages.encode(messages.Request(method=method, params=params))
        link.submit(pending, lambda seq: wire.pack(Kind.REQUEST, seq=seq, body=body))
        link.wait(pending)
        if pending.error is not None:
            raise pending.error
        assert pending.header is not None
        if pending.header.kind == _FAILED:
            raise _error_of(pending.body)[0]
        return messages.unpack_body(pending.body)

    def wait(self, submitted: Submitted) -> Any:
        """Wait for a submitted call and take its result."""
        submitted.link.wait(submitted.pending)
        return self.finish(submitted)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    """A thread of the parent may have held a lock, and nobody here would let go of it."""
    for session in list(_sessions):
        session._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
_lent_bytes: weakref.WeakKeyDictionary[Any, memoryview] = weakref.WeakKeyDictionary()


def assign(target: Array, memory: memoryview, result: TensorSpec) -> None:
    """Write a result that lies in `memory` into the caller's own array."""
    if not target.nbytes:
        return
    value, _ = wrap(memory, result, target)
    match target.kind:
        case "torch":
            target.owner.copy_(value)
        case "numpy":
            target.owner[...] = value
        case _:
            target.owner.cast("B")[:] = memoryview(value).tobytes()


def _error_of(body: bytes) -> tuple[LayerZeroError, messages.Outcome]:
    outcome = messages.decode(body, messages.Outcome)
    return from_wire(outcome.error), outcome


def _attempt(value: Any) -> Attempt:
    try:
        return Attempt(
            value["backend"],
            value["kernel_id"],
            value["code"],
            value["detail"],
            value["exit_signal"],
            value["exit_code"],
            value["phase"],
            value["worker_pid"],
        )
    except (KeyError, TypeError) as exc:
        raise ProtocolError(f"not an attempt: {value!r:.200}") from exc


def _place_key(request: Request, arrays: tuple[Array | None, ...], out: Array | None) -> tuple[Any, ...] | None:
    """What makes two calls the same, their memory included; None for calls that must be looked at each time. Specs are
    interned, so that their ids stand for them as long as they are kept."""
    if request.is_rigid or request.output_bytes is not None or overlay.baked.get() is not None:
        return None
    policy = overlay.current()
    key: list[Any] = [request.op, request.backend, None if policy is None else policy.text]
    if request.params:
        key += [(type(value), value) for value in request.params.values()]
    for array in (*arrays, out):
        if array is None:
            key.append(None)
        elif array.needs_copy or array.requires_grad:
            return None
        else:
            key += (array.address, id(array.spec))
    return tuple(key)


def _seconds(request: Request, default_s: float) -> float:
    return default_s if request.timeout_s is None else _microseconds(request.timeout_s) / 1e6


def _microseconds(timeout_s: float) -> int:
    if isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return max(int(timeout_s * 1e6), 1)
    raise InvalidArgument(f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0 and at most {MAX_TIMEOUT_S:,}")


def _refuse_gradients(op: str, arrays: Sequence[Array | None]) -> None:
    for name, array in zip(OPS[op].inputs, arrays, strict=True):
        if array is not None and array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise InvalidArgument(
                f"{op}: {name} requires gradients, and kernels here are forward only; call under torch.no_grad(), "
                f"or pass {name}.detach()"
            )


def _why_copied(array: Array, is_adapted: bool) -> str:
    if is_adapted:
        return ADAPTED
    if array.needs_copy:
        return "its strides cannot be described to a worker"
    return "it does not lie in an arena; lz.share() or lz.empty() avoid this"


def _overlap(one: Array, other: Array) -> bool:
    return one.address < other.address + other.spec.span_bytes and other.address < one.address + one.spec.span_bytes
