"""The broker's core: `BrokerState.handle(event, now_s) -> [action]`. No I/O, no clock, no randomness of its own.

This puts its parts together; each is given those that it uses, and none knows those that use it. Their order in
`BrokerState` is one in which they can be read.

Invariants, checked by tests/unit/broker/test_simulation.py over thousands of seeded schedules:
every call ends in exactly one Answer or Refuse; a call runs on at most one worker at a time, and is given to another
only when the one before has answered or its exit is confirmed; the step that picks a worker reserves it. A call on a
GPU is answered when it is enqueued there, and once more when it had to run again; turns of a lane end in their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layerzero.broker import actions as act
from layerzero.broker import events as ev
from layerzero.broker.admission import Admission
from layerzero.broker.aftermath import Aftermath
from layerzero.broker.agenda import Agenda
from layerzero.broker.answers import Answers
from layerzero.broker.bells import Bells
from layerzero.broker.calls import Calls
from layerzero.broker.closing import Closing
from layerzero.broker.compiling import Compiling
from layerzero.broker.decisions import Decisions
from layerzero.broker.engine import Engine
from layerzero.broker.enqueued import Enqueued
from layerzero.broker.explain import explain
from layerzero.broker.fleet import Fleet, too_long
from layerzero.broker.leases import Leases
from layerzero.broker.limits import Limits
from layerzero.broker.loans import Loans
from layerzero.broker.poison import Quarantine
from layerzero.broker.records import Client, Worker
from layerzero.broker.rings import Rings
from layerzero.broker.selection import CallSpec, Verdict
from layerzero.broker.sessions import Sessions
from layerzero.broker.settling import Settling
from layerzero.broker.shadow import ShadowLedger
from layerzero.broker.signatures import Signatures
from layerzero.broker.turns import Turns
from layerzero.broker.unreachable import Unreachable
from layerzero.broker.worker_fsm import WorkerState
from layerzero.capabilities.match import Rejection
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.worker_codes import LANE_CALL, mark

S = WorkerState


class BrokerState:
    """`engine` knows what each usable backend claims. `unusable`: why the others cannot start. `joined`: those whose
    workers the broker does not start."""

    def __init__(
        self,
        engine: Engine,
        unusable: Mapping[str, Rejection],
        limits: Limits,
        rng: random.Random,
        *,
        joined: Collection[str] = (),
    ) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self.limits = limits
        self.clients: dict[bytes, Client] = {}
        self._shadow = ShadowLedger()
        self.agenda = agenda = Agenda()
        self.leases = leases = Leases()
        self.turns = turns = Turns()
        quarantine = Quarantine(limits.poison_quarantine_s)
        decisions = Decisions(engine, agenda)
        self.fleet = fleet = Fleet(engine, unusable, limits, rng, agenda, joined)
        self.compiling = compiling = Compiling(engine, fleet, agenda)
        self.signatures = signatures = Signatures(engine, fleet, agenda)
        loans = Loans(fleet, agenda)
        self._settling = settling = Settling(engine, signatures, quarantine, leases, limits, agenda)
        self._closing = closing = Closing(fleet, signatures, loans, leases, turns, compiling, agenda)
        self._calls = calls = Calls(engine, fleet, signatures, loans, compiling, closing, quarantine, limits, agenda)
        self._enqueued = enqueued = Enqueued(engine, fleet, turns, decisions, closing, agenda)
        self.bells = bells = Bells(self.clients, fleet, signatures, compiling, closing, limits, agenda)
        answers = Answers(engine, fleet, calls, decisions, settling, enqueued, bells, closing, agenda)
        sessions = Sessions(
            self.clients,
            engine,
            fleet,
            signatures,
            loans,
            leases,
            settling,
            turns,
            enqueued,
            bells,
            compiling,
            closing,
            agenda,
        )
        admission = Admission(
            self.clients,
            sessions,
            fleet,
            signatures,
            calls,
            settling,
            turns,
            bells,
            quarantine,
            limits,
            agenda,
        )
        self._rings = rings = Rings(fleet, leases, turns, admission, calls, closing, limits, agenda)
        self._aftermath = Aftermath(fleet, calls, enqueued, bells, leases, rings, closing, agenda)
        self.unreachable = unreachable = Unreachable(fleet, calls, closing, agenda)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.ClientJoined: sessions.join,
            ev.ClientLeft: sessions.leave,
            ev.ArenaOffered: sessions.offer_arena,
            ev.ArenaGivenUp: sessions.give_up_arena,
            ev.GpuOffered: sessions.offer_gpu,
            ev.LaneOpened: sessions.open_lane,
            ev.RouteDefined: sessions.define_route,
            ev.RouteForgotten: sessions.forget_route,
            ev.RanInClient: sessions.note_own_run,
            ev.CallArrived: admission.take,
            ev.CallPoisoned: admission.poison,
            ev.CallUnbound: bells.unbind,
            ev.BellsSeen: bells.see,
            ev.LaneOverdue: self._lane_overdue,
            ev.LaneSeen: self._lane_seen,
            ev.CallLeft: rings.take,
            ev.RingsSeen: rings.see,
            ev.TurnsReached: enqueued.reach,
            ev.TurnsSeen: enqueued.see,
            ev.ProbeEnded: self._probe_ended,
            ev.CompileAsked: compiling.start_asked,
            ev.CompileEnded: self._compile_ended,
            ev.WorkerSpawned: fleet.note_spawned,
            ev.SpawnFailed: self._spawn_failed,
            ev.WorkerReady: self._worker_ready,
            ev.CallRan: answers.take,
            ev.CallRaised: answers.take_error,
            ev.WorkerMisbehaved: fleet.note_misbehaviour,
            ev.WorkerExited: self._worker_exited,
            ev.WorkerLost: self._worker_lost,
            ev.WorkerGone: unreachable.release,
            ev.BackendOffered: fleet.take_offer,
            ev.BackendReset: self._backend_reset,
            ev.PolicyChanged: self._policy_changed,
            ev.ShadowCompared: self._shadow_compared,
            ev.TimesLoaded: self._times_loaded,
            ev.Tick: self._tick,
            ev.ShutdownAsked: self._shutdown_asked,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Take one event; returns what must be done, in order."""
        self.agenda.begin(now_s)
        self._handlers[type(event)](event)
        self._settling.revoke_outdated()
        return self.agenda.actions

    # --- what others may know --------------------------------------------------------------------------

    @property
    def wakeup_s(self) -> float:
        """The server sends a Tick at this time."""
        return self.agenda.wakeup_s

    @property
    def stopping(self) -> bool:
        return self.agenda.stopping

    @property
    def workers(self) -> dict[str, Worker]:
        return self.fleet.workers

    @property
    def unavailable(self) -> dict[str, Rejection]:
        """Why backends do not serve now."""
        return self.fleet.unavailable

    def unavailable_at(self, now_s: float) -> dict[str, Rejection]:
        """As `unavailable`, with the time until the next try of those that crashes have disabled."""
        return self.fleet.unavailable_at(now_s)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to look at order pages and rings."""
        return self.turns.is_awaited or self._rings.is_awaited or self.bells.is_awaited

    def explain(self, body: bytes, now_s: float) -> tuple[CallSpec, tuple[Verdict, ...], list[dict[str, Any]]]:
        """What would be decided for a signature now; changes nothing. Raises LayerZeroError for a bad one."""
        spec = CallSpec.parse(body)
        return spec, *explain(self.engine, spec, self.unavailable_at(now_s), now_s)

    # --- workers -------------------------------------------------------------------------------------

    def _probe_ended(self, event: ev.ProbeEnded) -> None:
        if event.record is not None:
            self.engine.set_certification(self.engine.certification.with_record(event.record))
        worker = self.fleet.end_probe(event)
        if worker is not None:
            self._calls.leave_disabled(worker)
            self._calls.leave_uncertified(worker)

    def _compile_ended(self, event: ev.CompileEnded) -> None:
        for call in self.compiling.end(event):
            self._calls.place(call)

    def _spawn_failed(self, event: ev.SpawnFailed) -> None:
        worker = self.fleet.fail_spawn(event)
        if worker is not None:
            self._calls.leave_disabled(worker)
            self._exit_if_stopped()

    def _worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self.fleet.note_ready(event)
        if worker is not None:
            self._calls.send_waiting(worker)

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        if self._aftermath.take(event) is not None:
            self._exit_if_stopped()

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        self.unreachable.lose(event)
        self._exit_if_stopped()

    def _lane_overdue(self, event: ev.LaneOverdue) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is not None and lane.client.identity == event.identity:
            name = lane.kernels.get(event.route, f"a call of {lane.worker.backend}")
            error = too_long(name, lane.worker, event.timeout_s)
            self.fleet.fault(
                lane.worker, ProtocolError(event.nonsense) if event.nonsense else error, mark(lane.number, event.call)
            )

    def _lane_seen(self, event: ev.LaneSeen) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None:
            return
        lane.worker.answered += event.calls
        route = lane.route_of(event.plan)
        if route is not None:
            kernel_id, cell = lane.kernels[route.number], route.signature.cell
            self._settling.note_time(kernel_id, cell, event.kernel_ns, is_clean=True)

    def _backend_reset(self, event: ev.BackendReset) -> None:
        if event.backend in self.workers:
            self.engine.forgive(event.backend)
            self._shadow.forget(self.capabilities[event.backend].kernel_ids)
            self.fleet.reset(event)

    # --- what the broker learns ------------------------------------------------------------------------

    def _policy_changed(self, event: ev.PolicyChanged) -> None:
        """Calls that are placed stay where they are; those that come next are ranked anew."""
        self.engine.set_policy(event.policy)
        self.agenda.do(act.Note("policy.changed", {"hash": event.policy.hash}))

    def _shadow_compared(self, event: ev.ShadowCompared) -> None:
        subject = event.comparison.subject
        evidence = self._shadow.note(event.comparison)
        if evidence is not None:
            self.engine.set_certification(self.engine.certification.with_quarantine(subject, evidence))
            self.agenda.do(act.Note("kernel.quarantined", {**subject._asdict(), "evidence": evidence}))

    def _times_loaded(self, event: ev.TimesLoaded) -> None:
        self.engine.load_times(event.rows)

    # --- time and the end ------------------------------------------------------------------------------

    def _tick(self, event: ev.Tick) -> None:
        agenda = self.agenda
        self._calls.watch_health()
        self._settling.watch()
        agenda.wakeup_s = min(self._calls.health_at_s, self._settling.watch_at_s)
        self._enqueued.end_late()
        self._calls.end_waits()
        for worker in self.workers.values():
            if worker.state in (S.READY, S.STOPPING) and worker.running and worker.fault is None:
                if agenda.now_s >= worker.head_deadline_s:
                    self._end_what_takes_too_long(worker, event.executing.get((worker.backend, worker.generation), 0))
                if worker.fault is None:
                    agenda.wake_by(worker.head_deadline_s)
            else:
                self.fleet.tick(worker)
                self._calls.leave_disabled(worker)

    def _end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        """The head is due. One that waits for a call of an express lane gets more time, but not for ever: that call's
        client watches its deadline, unless it has left."""
        head, now_s, timeout_s = worker.running[0], self.agenda.now_s, self.limits.timeout_s
        if not executing & LANE_CALL:
            self.fleet.fault(worker, too_long(head.kernel_id, worker, head.timeout_s))
        elif worker.lane_call != executing:
            worker.lane_call, worker.lane_call_since_s = executing, now_s
            worker.head_since_s = now_s
        elif now_s < worker.lane_call_since_s + timeout_s:
            worker.head_since_s = now_s
        else:
            self.fleet.fault(worker, too_long("a call on an express lane", worker, timeout_s), executing)

    def _shutdown_asked(self, _: ev.ShutdownAsked) -> None:
        if self.stopping:
            return
        self.agenda.stopping = True
        self._settling.revoke()
        for call in self.compiling.take():
            self._closing.end_for_shutdown(call)
        for worker in self.workers.values():
            for call in worker.take_waiting():
                self._closing.end_for_shutdown(call)
            self.fleet.stop(worker)
        self._exit_if_stopped()

    def _exit_if_stopped(self) -> None:
        if self.stopping and self.fleet.is_stopped:
            self._closing.tell(self.turns.drop_held())  # nobody runs anything any more, and nobody will look at pages
            self.agenda.do(act.Exit())
