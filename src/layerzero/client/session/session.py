"""A connection of this process to a broker, and the trip of a call: plan, lend, submit, wait, wrap."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.capsules.taking import Capsules
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import observing, overlay, start
from layerzero.client.connection.arena_registry import ArenaRegistry
from layerzero.client.connection.call import (
    Request,
    Submitted,
    describe_all,
    describe_args,
    error_of,
    microseconds,
    seconds,
)
from layerzero.client.connection.express import Lane, Lease, Lost, Ran, Receipt
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.question import ask
from layerzero.client.connection.record import (
    Record,
    attempts_of,
    explanation,
    failure,
    report_of,
    waited,
    with_refusal,
)
from layerzero.client.connection.report import BROKER, IN_PROCESS, Attempt, Copy, SelectionReport
from layerzero.client.connection.routes import Routes, route_message
from layerzero.client.gpu import lent_calls, lent_ring
from layerzero.client.gpu.arrays import device_of, gpu_name, named_device
from layerzero.client.gpu.calls import GpuCalls
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.lifting.lifts import Lifts
from layerzero.client.gpu.outcomes import Enqueued, OnRing
from layerzero.client.planning.plans import Plan
from layerzero.client.session import kept
from layerzero.client.session.lanes import Lanes, OnLane
from layerzero.client.session.local import Local
from layerzero.client.session.preparation import prepare, prepare_placed
from layerzero.client.session.repeats import Repeats
from layerzero.client.session.shadow import NEVER, Shadow
from layerzero.ipc.errors import (
    AdaptationRequired,
    BrokerLost,
    DigestRequired,
    LayerZeroError,
    Poison,
    ProtocolError,
    RunInProcess,
    WorkerUnreachable,
)
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.transport.wire import Kind

REPR_S = 1.0  # so long may it take to say what this is
QUIET_S = 2.0  # a call may take so long without a word to whoever looks at a terminal
_DOING = {"probing": "being probed", "starting": "starting", "backoff": "restarting", "killing": "being killed"}
CLOSE_S = 10.0  # so long a session that is closed waits for its calls on GPUs
ADAPTED_S = 1.0  # so long the copies that a kernel needs are made without asking the broker: policy may change
_FAILED = int(Kind.FAILED)  # enums are slow


class Session:
    """Threads may share it. A forked child gets a connection of its own at its next call."""

    def __init__(self, path: Path, package: str, key: bytes | None = None) -> None:
        """`key`: the secret of the broker's stack."""
        self.path = path
        self._package = package
        self._key = key
        self._lock = threading.RLock()
        self.last = threading.local()
        self.shadow = Shadow(self)
        self.capsules = Capsules(self.ask, Endpoints(path.parent).worker_log)
        self._open()
        _sessions.add(self)

    def _open(self) -> None:
        routes = Routes(self.ask, self.shadow.follow_decision)
        link = Link(self.path, self._package, routes.note_decision, routes.note_lease, self._key)
        self.routes = routes
        self.arena_registry = ArenaRegistry(link)
        self.repeats = Repeats(self, link, self.arena_registry, self.last)
        self.lanes = Lanes(link, self.shadow, self.repeats, self.last)
        self.local = Local(link, routes, self.ask)
        self.gpus = GpuCalls(self, link)
        self.lifts = Lifts(self, link, self.gpus)
        self._link = link  # last: who sees that it is of this process goes on to use the others

    @property
    def link(self) -> Link:
        """The connection of this very process."""
        if self._link.forks != arenas.forks:
            with self._lock:
                if self._link.forks != arenas.forks:
                    inherited = self.lanes
                    self.shadow = Shadow(self, rate=self.shadow.own_rate, references=self.shadow.references)
                    self._open()
                    inherited.abandon()
        return self._link

    @property
    def sampler(self) -> Shadow:
        """What decides which calls on a GPU are sampled."""
        return self.shadow

    @property
    def is_alive(self) -> bool:
        """False once the broker is known to be gone or the session was closed."""
        return self._link.is_alive

    def refusals(self) -> dict[str, str]:
        """Backends (and single kernels) that the policy wants in this process and that cannot run here, with the
        reason."""
        return self.local.refusals()

    @property
    def broker_pid(self) -> int:
        return self._link.welcome.broker_pid

    def __repr__(self) -> str:
        """With the backends that can serve, where the broker tells that at once."""
        if self._link.forks != arenas.forks or not self._link.is_alive:
            return f"<lz.Session in {self.path.parent}: not connected>"
        text = f"<lz.Session with broker pid {self.broker_pid} in {self.path.parent}"
        with contextlib.suppress(LayerZeroError):
            rows = self.ask("status", within_s=REPR_S)["backends"]
            text += f", backends: {', '.join(row['name'] for row in rows if not row['unavailable']) or 'none'}"
        return f"{text}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Open calls of other threads end as Cancelled; those that a GPU's streams wait for are waited for."""
        is_own = self._link.forks == arenas.forks
        if is_own:
            self.lifts.finish()
            self.gpus.finish(CLOSE_S)
            self.lanes.see_ends()
        self._link.close()
        self.lanes.close()
        self.repeats.close()
        self.arena_registry.close()
        if is_own:
            kept.copies.clear()
            self.lifts.close()
            self.gpus.close()

    # --- a call --------------------------------------------------------------------------------------

    def run(self, request: Request, *, is_recorded: bool = False) -> Any:
        """Run one op and return its result. Raises what client/facade/ops.py documents. `is_recorded`: by a trace."""
        if observing.recorder is not None and not is_recorded:
            return observing.recorder.run(self, request)
        start_ns = time.perf_counter_ns()
        if request.places is not None:
            return self._run_prepared(prepare_placed(self, request, start_ns))
        if self._link.forks == arenas.forks and self.shadow.next_seq == NEVER:  # of this very process, and not sampled
            result = self.lifts.run_again(request, start_ns)
            if result is MISS:
                result = self.repeats.run(request, start_ns)
            if result is not MISS:
                return result
        arrays, outs = describe_all(request)
        if device_of(request.op, arrays, outs) != CPU:
            return self.gpus.run(request, arrays, outs, start_ns)
        return self._run_prepared(prepare(self, request, (), arrays, outs, start_ns))

    def _run_prepared(self, submitted: Submitted) -> Any:
        request = submitted.request
        if request.on_gpu is not None:
            asked = None if self.shadow.is_on else lent_ring.put(self.gpus, submitted)
            if asked is not None:
                if asked.await_answer(self._link):
                    return self.lanes.end_asked(submitted, asked)
                submitted.pending = asked  # the broker's answer
                return self.finish(submitted)
        place = None if submitted.pending.is_done or request.on_gpu is not None else self.lanes.of(submitted.route)
        if place is not None:
            lane, lease = place
            self.last.record = None  # until the call has ended
            end = lane.run(lease, submitted.refs, seconds(request, lane.default_s), submitted.pending.hold)
            if isinstance(end, Ran):
                return self.lanes.finish(submitted, lane, lease, end)
            self.lanes.leave(submitted, lane, lease, end)
        return self.wait(self._start(submitted))

    def send(self, request: Request) -> Submitted | Receipt | OnLane:
        """Send a call: by its lane, of which the next step is `take`, or as `submit`."""
        start_ns = time.perf_counter_ns()
        if request.places is not None:
            placed = prepare_placed(self, request, start_ns)
            return (request.on_gpu is None and self.lanes.put(placed)) or self._start(placed)
        if not self.link or self.shadow.is_on:  # of this very process
            return self.submit(request)
        receipt = self.repeats.submit(request, start_ns)
        if receipt is not MISS:
            return receipt  # type: ignore[no-any-return]
        submitted = prepare(self, request, (), *describe_all(request), start_ns)
        place = None if submitted.pending.is_done else self.lanes.of(submitted.route)
        if place is not None:
            self.repeats.remember(submitted, *place)
            receipt = self.repeats.submit(request, start_ns)
            if receipt is not MISS:
                return receipt  # type: ignore[no-any-return]
        return self._start(submitted)

    def take(self, receipt: Any, until_s: float = math.inf) -> Any:
        """The result of a call that is on a lane. MISS: it has not ended at `until_s`; a Submitted: it goes on by the
        broker, and is to be waited for."""
        if isinstance(receipt, OnLane):
            found = MISS if receipt.is_awaited(until_s) else self.lanes.end(receipt)
            return self._start(found) if found is receipt.submitted else found
        lane = receipt.site.lane
        while not lane.is_inherited:
            result = self.repeats.take(receipt, until_s - time.monotonic())
            if result is not MISS:
                return result
            now_s = time.monotonic()
            is_late = 1e9 * now_s >= receipt.due_ns
            if not lane.is_under_way(receipt) or (is_late and not lane.gives_time(receipt, lane.default_s)):
                return self._look(receipt)
            if now_s >= until_s:
                return MISS
        self.last.record = None
        raise BrokerLost("the call was submitted before a fork, and its answer goes to the parent; call again here")

    def resume(self, receipt: Any) -> Any:
        """The result of a call that was put on a lane in C and did not end well there, or not soon."""
        found = self._look(receipt)
        return self.wait(found) if isinstance(found, Submitted) else found

    def _look(self, receipt: Any) -> Any:
        """What became of a call on a lane: as `take`."""
        lane, lease = receipt.site.lane, receipt.site.lease
        self.last.record = None  # until the call has ended
        end = lane.resume(receipt, lease, lane.default_s)
        if isinstance(end, Ran):
            return self.repeats.take(receipt, 0.0)
        self.repeats.leave(receipt.key)
        return self.leave_lane(receipt.request, receipt.start_ns, lane, lease, end)

    def leave_lane(
        self, request: Request, start_ns: int, lane: Lane, lease: Lease, end: Lost | LayerZeroError | None
    ) -> Submitted:
        """Bring a call to the broker that did not end well on a lane."""
        submitted = prepare(self, request, (), *describe_all(request), start_ns)
        if not submitted.pending.is_done:
            self.lanes.leave(submitted, lane, lease, end)
        return self._start(submitted)

    def run_apart(self, request: Request) -> tuple[Any, SelectionReport]:
        """A call of a tool, waited for also on a GPU. Its result and report; there `kernel_us` is that of an earlier
        run, 0 when none is new (GpuCalls.run_apart). Raises what the op raises."""
        if self.link:  # of this very process
            arrays, outs = describe_all(request)
        if device_of(request.op, arrays, outs) != CPU:
            return self.gpus.run_apart(request, arrays, outs)
        value, report = self.run(request), self.last_report()
        assert report is not None
        return value, report

    def submit(self, request: Request, prior: tuple[Attempt, ...] = ()) -> Submitted:
        """Send a call; `finish` takes its answer after `Link.wait`. `prior`: attempts that failed in this process."""
        start_ns = time.perf_counter_ns()
        if request.places is not None:
            return self._start(prepare_placed(self, request, start_ns))
        return self._start(prepare(self, request, prior, *describe_all(request), start_ns))

    def _start(self, submitted: Submitted) -> Submitted:
        """Send a call to the broker, unless it ran in this process."""
        if not submitted.pending.is_done:
            seq = self._send(submitted)
            if seq >= self.shadow.next_seq:
                submitted.sample = self.shadow.take(submitted, seq)
        return submitted

    def _send(self, submitted: Submitted) -> int:
        route, timeout_s = submitted.route, submitted.request.timeout_s
        self.routes.tell(submitted.link, route, submitted.near)
        if submitted.request.on_gpu is not None:
            lent_calls.send(self.gpus, submitted)
            return -1
        flags, body = 0, submitted.refs
        if route.needs_digest:
            flags, body = wire.pack_call(body, digest=submitted.digest())
        if not submitted.prior and submitted.request.places is None and time.monotonic() >= route.worker_until_s:
            flags, route.stays_out = flags | wire.MAY_RUN_HERE, ""
        time_us = 0 if timeout_s is None else microseconds(timeout_s)
        number, lane, call = route.number, submitted.after_lane, submitted.after_call
        return submitted.link.submit(
            submitted.pending,
            lambda seq: wire.pack_execute(flags, number, seq, body, time_us, lane, call),
        )

    def finish(self, submitted: Submitted) -> Any:
        """Result of a call whose answer is here."""
        pending = submitted.pending
        if pending.error is not None:
            self.last.record = None
            raise pending.error
        header = pending.header
        assert header is not None
        attempts: list[Any] = []
        waits = ""
        if header.kind == _FAILED:
            error, outcome = error_of(pending.body)
            if isinstance(error, AdaptationRequired):
                return self.wait(self.submit(self._adapt(submitted, error), submitted.prior))
            may_repeat = not submitted.writes_to_caller and submitted.request.places is None
            if isinstance(error, WorkerUnreachable) and may_repeat:
                return self.wait(self.submit(submitted.request, (*submitted.prior, *attempts_of(outcome))))
            if isinstance(error, RunInProcess):
                self.local.take_grant(submitted.route, error, outcome)
                return self.run(submitted.request, is_recorded=True)
            if isinstance(error, DigestRequired) and not submitted.route.needs_digest:
                submitted.route.needs_digest = True
                if submitted.request.on_gpu is not None:
                    raise error  # its maker lends the memory anew
                hold = (submitted.arrays, submitted.blocks, submitted.outputs, submitted.outs)
                submitted.pending = Pending(hold, submitted.request.timeout_s)
                self._send(submitted)
                return self.wait(submitted)
            if isinstance(error, Poison) and not submitted.route.needs_digest:
                submitted.route.needs_digest = True
                number = submitted.route.number
                self._link.send(wire.pack(Kind.POISONED, route=number, body=submitted.digest()))
            failed = failure(submitted, outcome)
            self._count_failed(submitted, error, failed)
            kept = self.capsules.take(submitted, failed) if failed.attempts else ""
            if kept:
                failed = replace(failed, notes=(*failed.notes, kept))
                error.add_note(kept)  # a traceback shows it
            self.last.record = error.report = failed  # type: ignore[attr-defined]
            raise error
        body = pending.body
        if header.flags & wire.HAS_OUTCOME:
            outcome = messages.decode(body, messages.Outcome)
            attempts, body = outcome.attempts, outcome.result
            waits = waited(outcome)
        decision = submitted.decision or submitted.route.decisions[header.aux]
        if submitted.request.serves is not None:
            submitted.request.serves(decision.backend)
        if submitted.request.on_gpu is not None:
            waits = "; ".join(filter(None, (waits, lent_calls.take(submitted, decision))))
        result = submitted.result(body)
        if submitted.sample is not None:
            self.shadow.check(submitted, submitted.sample, decision)
        note = "; ".join(filter(None, (waits, submitted.route.stays_out or self.routes.why_out(decision.backend))))
        plan, copies = submitted.route.plan, submitted.copies  # not `submitted`: it would keep the arrays alive
        start_ns, end_ns, prior = submitted.start_ns, time.perf_counter_ns(), submitted.prior
        if copies or submitted.decision is not None:
            self._count(plan.op, decision, end_ns - start_ns, copies)
        record = (plan, copies, start_ns, end_ns, header.time, attempts, decision, prior, note)
        if attempts or prior:
            report = report_of(record)
            kept = "" if report is None else self.capsules.take(submitted, report)
            record = (*record[:-1], "; ".join(filter(None, (note, kept))))
        self.last.record = record
        return result

    def _count(self, op: str, decision: messages.Decision, ns: int, copies: Sequence[Copy]) -> None:
        """Of what the broker does not see: a call that ran in this process, and copies."""
        counters, nbytes = self._link.counters, sum([copy.nbytes for copy in copies])
        row = counters.row(op, decision.kernel_id, decision.lane)
        if decision.lane == IN_PROCESS:
            counters.count(row, ns, nbytes)
        else:
            counters.note_copied(row, nbytes)

    def _count_failed(self, submitted: Submitted, error: LayerZeroError, report: SelectionReport) -> None:
        """An error that the broker does not count: of a call that ran in this process, or that would be made again."""
        last, decision = (report.attempts or (None,))[-1], submitted.decision
        counters, kernel_id = self._link.counters, ""
        if decision is not None:
            kernel_id = decision.kernel_id
        elif isinstance(error, WorkerUnreachable) and last is not None:
            kernel_id = last.kernel_id
        if kernel_id:
            path = IN_PROCESS if decision is not None else BROKER
            counters.note_error(counters.row(submitted.request.op, kernel_id, path), error.code)

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

    # --- reports and requests ------------------------------------------------------------------------

    def last_report(self) -> SelectionReport | None:
        """Of this thread's last call. Waits until a worker has taken one that was enqueued on a GPU."""
        record = self.last_record
        report = self.report_of(record)
        if not isinstance(record, Enqueued):  # such a call may yet move to another worker
            self.last.record = report
        return report

    def report_of(self, record: Record | SelectionReport | Enqueued | None) -> SelectionReport | None:
        """The report of what `last_record` said of a call."""
        return self.gpus.outcomes.report_of(record) if isinstance(record, Enqueued) else report_of(record)

    @property
    def last_record(self) -> Record | SelectionReport | Enqueued | None:
        """What `report_of` makes a report of, for this thread's last call; None before the first one."""
        record: Record | SelectionReport | Enqueued | None = getattr(self.last, "record", None)
        return record

    def note(self, record: SelectionReport | Enqueued) -> None:
        """Of this thread's last call, which was on a GPU. One on a ring is counted."""
        if isinstance(record, OnRing):
            record.count(self._link.counters)
        self.last.record = record

    def signature(self, request: Request, device: str | None = None) -> bytes:
        """The encoded Route message of a call; a TensorSpec may stand for an array, which is on `device` then
        (client/gpu/arrays.py: named_device)."""
        arrays = describe_args(request, takes_specs=True)
        specs = tuple(arg if array is None else array.spec for arg, array in zip(request.args, arrays, strict=True))
        found = named_device(request.op, arrays, device)
        plan = request.planner(*request.shape_specs(specs), **request.params)
        return self.route_body(plan, request.backend, gpu_name(found))

    def explain(self, request: Request, device: str | None = None) -> SelectionReport:
        """Which kernel would serve this call now, and why not the others. Runs nothing. `device` as of `signature`."""
        return self.explain_route(request.op, self.signature(request, device))

    def route_body(self, plan: Plan, backend: str | None, device: str = "") -> bytes:
        """What the broker is told of a call with this plan, as policy is here and now. `device`: UUID of a GPU."""
        return messages.encode(route_message(plan, backend, overlay.current(), device))

    def explain_route(self, op: str, body: bytes) -> SelectionReport:
        """As `explain`, for what `route_body` made."""
        found = explanation(op, self.ask("explain", route=body))
        why = self.refusals()
        return replace(found, candidates=tuple([with_refusal(one, why) for one in found.candidates])) if why else found

    def ask(self, method: str, *, within_s: float = math.inf, **params: Any) -> Any:
        """A request to the broker: status, explain, reset, shutdown. Returns plain values. Raises Busy when there is no
        answer `within_s` seconds."""
        return ask(self.link, method, params, within_s)

    def wait(self, submitted: Submitted) -> Any:
        """Wait for a submitted call and take its result."""
        self.await_answer(submitted)
        return self.finish(submitted)

    def await_answer(self, submitted: Submitted, until_s: float = math.inf) -> bool:
        """As Link.wait. On a terminal it says what takes so long, when that is the start of a worker."""
        link, pending = submitted.link, submitted.pending
        if link.wait(pending, min(until_s, time.monotonic() + QUIET_S)) or time.monotonic() >= until_s:
            return pending.is_done
        if start.shows_progress():
            with contextlib.suppress(LayerZeroError):  # it is told by the call itself
                calls = self.ask("waits", identity=link.welcome.identity)["calls"]
                for row in [row for row in calls if row["op"] == submitted.request.op][:1]:
                    doing = _DOING.get(row["state"], row["state"])
                    text = f"layerzero: {row['op']} waits: the {row['backend']} worker is {doing}"
                    print(f"{text}, {row['waited_s']:.0f} s so far", file=sys.stderr, flush=True)
        return link.wait(pending, until_s)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    """A thread of the parent may have held a lock, and nobody here would let go of it; what is known of calls leads to
    lanes of the parent's."""
    for session in list(_sessions):
        session._lock = threading.RLock()
        session.repeats.forget()


os.register_at_fork(after_in_child=_after_fork)
