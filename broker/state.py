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
from typing import Any, TypeVar

from layerzero.broker import actions as act
from layerzero.broker import events as ev
from layerzero.broker.admission import Admission
from layerzero.broker.aftermath import Aftermath
from layerzero.broker.agenda import Agenda
from layerzero.broker.answers import Answers
from layerzero.broker.bells import Bells
from layerzero.broker.blame import Blame
from layerzero.broker.call_fsm import take
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
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.worker_codes import LANE_CALL, mark

S = WorkerState
P = TypeVar("P")


class BrokerState:
    """`engine` knows what each usable backend claims. `unusable`: why the others cannot start. `joined`: those whose
    workers the broker does not start. `parts`: subclasses that stand in for parts of the core, by the class that each
    replaces; the simulation plants bugs with them."""

    def __init__(
        self,
        engine: Engine,
        unusable: Mapping[str, Rejection],
        limits: Limits,
        rng: random.Random,
        *,
        joined: Collection[str] = (),
        parts: Mapping[type, type] | None = None,
    ) -> None:

        def part(kind: type[P]) -> type[P]:
            return (parts or {}).get(kind, kind)

        self.engine = engine
        self.capabilities = engine.capabilities
        self.limits = limits
        self.clients: dict[bytes, Client] = {}
        self._shadow = ShadowLedger()
        self.agenda = agenda = Agenda()
        self.leases = leases = part(Leases)()
        self.turns = turns = part(Turns)()
        quarantine = Quarantine(limits.poison_quarantine_s)
        decisions = part(Decisions)(engine=engine, agenda=agenda)
        self.fleet = fleet = part(Fleet)(engine, unusable, limits, rng, agenda, joined)
        self.compiling = compiling = part(Compiling)(engine=engine, fleet=fleet, agenda=agenda)
        self.signatures = signatures = part(Signatures)(engine=engine, fleet=fleet, agenda=agenda)
        loans = part(Loans)(fleet=fleet, agenda=agenda)
        self.settling = settling = part(Settling)(
            engine=engine, signatures=signatures, quarantine=quarantine, leases=leases, limits=limits, agenda=agenda
        )
        self.closing = closing = part(Closing)(
            fleet=fleet,
            signatures=signatures,
            loans=loans,
            leases=leases,
            turns=turns,
            compiling=compiling,
            agenda=agenda,
        )
        self.calls = calls = part(Calls)(
            engine=engine,
            fleet=fleet,
            signatures=signatures,
            loans=loans,
            compiling=compiling,
            closing=closing,
            quarantine=quarantine,
            limits=limits,
            agenda=agenda,
        )
        self.enqueued = enqueued = part(Enqueued)(
            engine=engine, fleet=fleet, turns=turns, decisions=decisions, closing=closing, agenda=agenda
        )
        self.bells = bells = part(Bells)(
            clients=self.clients,
            fleet=fleet,
            signatures=signatures,
            compiling=compiling,
            closing=closing,
            limits=limits,
            agenda=agenda,
        )
        answers = part(Answers)(
            engine=engine,
            fleet=fleet,
            calls=calls,
            decisions=decisions,
            settling=settling,
            enqueued=enqueued,
            bells=bells,
            closing=closing,
            agenda=agenda,
        )
        sessions = part(Sessions)(
            clients=self.clients,
            engine=engine,
            fleet=fleet,
            signatures=signatures,
            loans=loans,
            leases=leases,
            settling=settling,
            turns=turns,
            enqueued=enqueued,
            bells=bells,
            compiling=compiling,
            closing=closing,
            agenda=agenda,
        )
        admission = part(Admission)(
            clients=self.clients,
            sessions=sessions,
            fleet=fleet,
            signatures=signatures,
            calls=calls,
            settling=settling,
            turns=turns,
            bells=bells,
            quarantine=quarantine,
            limits=limits,
            agenda=agenda,
        )
        self.rings = rings = part(Rings)(
            fleet=fleet,
            leases=leases,
            turns=turns,
            admission=admission,
            calls=calls,
            closing=closing,
            limits=limits,
            agenda=agenda,
        )
        self.aftermath = part(Aftermath)(
            fleet=fleet, calls=calls, leases=leases, rings=rings, closing=closing, agenda=agenda
        )
        self.unreachable = unreachable = part(Unreachable)(fleet=fleet, calls=calls, closing=closing, agenda=agenda)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.ClientJoined: sessions.on_client_joined,
            ev.ClientLeft: sessions.on_client_left,
            ev.ArenaOffered: sessions.on_arena_offered,
            ev.ArenaGivenUp: sessions.on_arena_given_up,
            ev.GpuOffered: sessions.on_gpu_offered,
            ev.LaneOpened: sessions.on_lane_opened,
            ev.RouteDefined: sessions.on_route_defined,
            ev.RouteForgotten: sessions.on_route_forgotten,
            ev.RanInClient: sessions.on_ran_in_client,
            ev.CallArrived: admission.on_call_arrived,
            ev.CallPoisoned: admission.on_call_poisoned,
            ev.CallUnbound: bells.on_call_unbound,
            ev.BellsSeen: bells.on_bells_seen,
            ev.LaneOverdue: self.on_lane_overdue,
            ev.LaneSeen: self.on_lane_seen,
            ev.CallLeft: rings.on_call_left,
            ev.RingsSeen: rings.on_rings_seen,
            ev.TurnsReached: enqueued.on_turns_reached,
            ev.TurnsSeen: enqueued.on_turns_seen,
            ev.ProbeEnded: self.on_probe_ended,
            ev.CompileAsked: compiling.on_compile_asked,
            ev.CompileEnded: self.on_compile_ended,
            ev.WorkerSpawned: fleet.note_spawned,
            ev.SpawnFailed: self.on_spawn_failed,
            ev.WorkerReady: self.on_worker_ready,
            ev.CallRan: answers.on_call_ran,
            ev.CallRaised: answers.on_call_raised,
            ev.WorkerMisbehaved: fleet.note_misbehaviour,
            ev.WorkerExited: self.on_worker_exited,
            ev.WorkerLost: self.on_worker_lost,
            ev.WorkerGone: unreachable.on_worker_gone,
            ev.BackendOffered: fleet.take_offer,
            ev.BackendReset: self.on_backend_reset,
            ev.PolicyChanged: self.on_policy_changed,
            ev.ShadowCompared: self.on_shadow_compared,
            ev.TimesLoaded: self.on_times_loaded,
            ev.Tick: self.on_tick,
            ev.ShutdownAsked: self.on_shutdown_asked,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Take one event; returns what must be done, in order."""
        agenda = self.agenda
        agenda.now_s, agenda.actions = now_s, []
        self._handlers[type(event)](event)
        if self.engine.epoch != self.settling.leased_epoch:  # it may decide otherwise by now
            self.settling.revoke()
        return agenda.actions

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
        return self.turns.is_awaited or self.rings.is_awaited or self.bells.is_awaited

    def explain(self, body: bytes, now_s: float) -> tuple[CallSpec, tuple[Verdict, ...], list[dict[str, Any]]]:
        """What would be decided for a signature now; changes nothing. Raises LayerZeroError for a bad one."""
        spec = CallSpec.parse(body)
        return spec, *explain(self.engine, spec, self.unavailable_at(now_s), now_s)

    # --- workers -------------------------------------------------------------------------------------

    def on_probe_ended(self, event: ev.ProbeEnded) -> None:
        if event.record is not None:
            self.engine.set_certification(self.engine.certification.with_record(event.record))
        worker = self.fleet.end_probe(event)
        if worker is not None:
            self.calls.leave_disabled(worker)
            self.calls.leave_uncertified(worker)

    def on_compile_ended(self, event: ev.CompileEnded) -> None:
        for call in self.compiling.end(event):
            self.calls.place(call)

    def on_spawn_failed(self, event: ev.SpawnFailed) -> None:
        worker = self.fleet.fail_spawn(event)
        if worker is not None:
            self.calls.leave_disabled(worker)
            self._exit_if_stopped()

    def on_worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self.fleet.note_ready(event)
        if worker is not None:
            self.calls.send_waiting(worker)

    def on_worker_exited(self, event: ev.WorkerExited) -> None:
        if self.aftermath.on_worker_exited(event) is not None:
            self._exit_if_stopped()

    def on_worker_lost(self, event: ev.WorkerLost) -> None:
        self.unreachable.on_worker_lost(event)
        self._exit_if_stopped()

    def on_lane_overdue(self, event: ev.LaneOverdue) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is not None and lane.client.identity == event.identity:
            name = lane.kernels.get(event.route, f"a call of {lane.worker.backend}")
            error: LayerZeroError = too_long(name, lane.worker, event.timeout_s)
            if event.nonsense:
                error = ProtocolError(event.nonsense)
            self.fleet.fault(lane.worker, error, Blame(mark=mark(lane.number, event.call)))

    def on_lane_seen(self, event: ev.LaneSeen) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None:
            return
        lane.worker.answered += event.calls
        route = lane.route_of(event.plan)
        if route is not None:
            kernel_id, cell = lane.kernels[route.number], route.signature.cell
            self.settling.note_time(kernel_id, cell, event.kernel_ns, is_clean=True)

    def on_backend_reset(self, event: ev.BackendReset) -> None:
        if event.backend in self.workers:
            self.engine.forgive(event.backend)
            self._shadow.forget(self.capabilities[event.backend].kernel_ids)
            self.fleet.reset(event)

    # --- what the broker learns ------------------------------------------------------------------------

    def on_policy_changed(self, event: ev.PolicyChanged) -> None:
        """Calls that are placed stay where they are; those that come next are ranked anew."""
        self.engine.set_policy(event.policy)
        self.agenda.do(act.Note("policy.changed", {"hash": event.policy.hash}))

    def on_shadow_compared(self, event: ev.ShadowCompared) -> None:
        subject = event.comparison.subject
        evidence = self._shadow.note(event.comparison)
        if evidence is not None:
            self.engine.set_certification(self.engine.certification.with_quarantine(subject, evidence))
            self.agenda.do(act.Note("kernel.quarantined", {**subject._asdict(), "evidence": evidence}))

    def on_times_loaded(self, event: ev.TimesLoaded) -> None:
        self.engine.load_times(event.rows)

    # --- time and the end ------------------------------------------------------------------------------

    def on_tick(self, event: ev.Tick) -> None:
        agenda = self.agenda
        self.calls.watch_health()
        self.settling.watch()
        agenda.wakeup_s = min(self.calls.health_at_s, self.settling.watch_at_s)
        self.enqueued.end_late()
        self.calls.end_waits()
        for worker in self.workers.values():
            if worker.state in (S.READY, S.STOPPING) and worker.running and worker.fault is None:
                if agenda.now_s >= worker.head_deadline_s:
                    self.end_what_takes_too_long(worker, event.executing.get((worker.backend, worker.generation), 0))
                if worker.fault is None:
                    agenda.wake_by(worker.head_deadline_s)
            else:
                self.fleet.tick(worker)
                self.calls.leave_disabled(worker)

    def end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
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
            self.fleet.fault(worker, too_long("a call on an express lane", worker, timeout_s), Blame(mark=executing))

    def on_shutdown_asked(self, _: ev.ShutdownAsked) -> None:
        if self.stopping:
            return
        self.agenda.stopping = True
        self.settling.revoke()
        for call in self.compiling.take():
            self.closing.end_for_shutdown(call)
        for worker in self.workers.values():
            for call in take(worker.waiting):
                self.closing.end_for_shutdown(call)
            self.fleet.stop(worker)
        self._exit_if_stopped()

    def _exit_if_stopped(self) -> None:
        if self.stopping and self.fleet.is_stopped:
            self.closing.tell(self.turns.drop_held())  # nobody runs anything any more, and nobody will look at pages
            self.agenda.do(act.Exit())
