"""The broker's core: `BrokerState.handle(event, now_s) -> [action]`. No I/O, no clock, no randomness of its own.

This puts its parts together; each is given those that it uses, and none knows those that use it. Their order in
`BrokerState` is one in which they can be read.

Invariants, checked by tests/unit/broker/core/test_simulation.py over thousands of seeded schedules:
every call ends in exactly one Answer or Refuse; a call runs on at most one worker at a time, and is given to another
only when the one before has answered or its exit is confirmed; the step that picks a worker reserves it. A call on a
GPU is answered when it is enqueued there, and once more when it had to run again; points of a lane end in their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.admission import Admission
from layerzero.broker.core.blame import Blame
from layerzero.broker.core.call_fsm import take
from layerzero.broker.core.clients import ClientLifecycle
from layerzero.broker.core.compile_waits import CompileWaits
from layerzero.broker.core.completion import Completion
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.gpu_in_flight import GpuInFlight
from layerzero.broker.core.grants import Grants
from layerzero.broker.core.graph_calls import GraphCalls
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Client, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import Quarantine
from layerzero.broker.core.release import Release
from layerzero.broker.core.replacements import Replacements
from layerzero.broker.core.ring_calls import RingCalls
from layerzero.broker.core.rollout_steps import RolloutSteps
from layerzero.broker.core.stream_order import StreamOrder
from layerzero.broker.core.worker_exit import WorkerExits
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.broker.core.worker_unreachable import UnreachableWorkers
from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.shadow import ShadowLedger
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.vocabulary.worker_codes import LANE_CALL, mark

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
        self.effects = effects = Effects()
        self.leases = leases = part(Leases)()
        self.points = points = part(StreamOrder)()
        quarantine = Quarantine(limits.poison_quarantine_s)
        decisions = part(Decisions)(engine=engine, effects=effects)
        self.lifecycle = lifecycle = part(WorkerLifecycle)(engine, unusable, limits, rng, effects, joined)
        self.compiling = compiling = part(CompileWaits)(engine=engine, lifecycle=lifecycle, effects=effects)
        self.signatures = signatures = part(PreparedCalls)(engine=engine, lifecycle=lifecycle, effects=effects)
        grants = part(Grants)(lifecycle=lifecycle, effects=effects)
        self.lease_policy = lease_policy = part(LeasePolicy)(
            engine=engine, signatures=signatures, quarantine=quarantine, leases=leases, limits=limits, effects=effects
        )
        self.closing = closing = part(Release)(
            lifecycle=lifecycle,
            signatures=signatures,
            grants=grants,
            leases=leases,
            points=points,
            compiling=compiling,
            effects=effects,
        )
        self.calls = calls = part(Dispatch)(
            engine=engine,
            lifecycle=lifecycle,
            signatures=signatures,
            grants=grants,
            compiling=compiling,
            closing=closing,
            quarantine=quarantine,
            limits=limits,
            effects=effects,
        )
        self.enqueued = enqueued = part(GpuInFlight)(
            engine=engine, lifecycle=lifecycle, points=points, decisions=decisions, closing=closing, effects=effects
        )
        self.graph_slots = graph_slots = part(GraphCalls)(
            clients=self.clients,
            lifecycle=lifecycle,
            signatures=signatures,
            compiling=compiling,
            closing=closing,
            limits=limits,
            effects=effects,
        )
        self.rollouts = rollouts = part(RolloutSteps)(
            clients=self.clients, engine=engine, signatures=signatures, effects=effects
        )
        answers = part(Completion)(
            engine=engine,
            lifecycle=lifecycle,
            calls=calls,
            decisions=decisions,
            lease_policy=lease_policy,
            enqueued=enqueued,
            graph_slots=graph_slots,
            closing=closing,
            rollouts=rollouts,
            effects=effects,
        )
        sessions = part(ClientLifecycle)(
            clients=self.clients,
            engine=engine,
            lifecycle=lifecycle,
            signatures=signatures,
            grants=grants,
            leases=leases,
            lease_policy=lease_policy,
            points=points,
            enqueued=enqueued,
            graph_slots=graph_slots,
            rollouts=rollouts,
            compiling=compiling,
            closing=closing,
            effects=effects,
        )
        admission = part(Admission)(
            clients=self.clients,
            sessions=sessions,
            lifecycle=lifecycle,
            signatures=signatures,
            calls=calls,
            lease_policy=lease_policy,
            points=points,
            graph_slots=graph_slots,
            quarantine=quarantine,
            limits=limits,
            effects=effects,
        )
        self.rings = rings = part(RingCalls)(
            lifecycle=lifecycle,
            leases=leases,
            points=points,
            admission=admission,
            calls=calls,
            closing=closing,
            limits=limits,
            effects=effects,
        )
        self.worker_exits = part(WorkerExits)(
            lifecycle=lifecycle, calls=calls, leases=leases, rings=rings, closing=closing, effects=effects
        )
        self.replacements = part(Replacements)(
            engine=engine, lifecycle=lifecycle, calls=calls, leases=leases, effects=effects
        )
        self.unreachable = unreachable = part(UnreachableWorkers)(
            lifecycle=lifecycle, calls=calls, closing=closing, effects=effects
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.ClientJoined: partial(self._on_clients_changed, sessions.on_client_joined),
            ev.ClientLeft: partial(self._on_clients_changed, sessions.on_client_left),
            ev.ArenaOffered: sessions.on_arena_offered,
            ev.ArenaGivenUp: sessions.on_arena_given_up,
            ev.GpuOffered: sessions.on_gpu_offered,
            ev.LaneOpened: sessions.on_lane_opened,
            ev.RouteDefined: sessions.on_route_defined,
            ev.RouteForgotten: sessions.on_route_forgotten,
            ev.RanInClient: sessions.on_ran_in_client,
            ev.CallArrived: admission.on_call_arrived,
            ev.CallPoisoned: admission.on_call_poisoned,
            ev.CallUnbound: graph_slots.on_call_unbound,
            ev.GraphSlotsPolled: graph_slots.on_graph_slots_seen,
            ev.LaneOverdue: self.on_lane_overdue,
            ev.LanePolled: self.on_lane_seen,
            ev.CountersPolled: lambda event: effects.tally.take(event.grown),
            ev.CallHandedBack: rings.on_call_left,
            ev.RingsPolled: self.on_rings_seen,
            ev.PointsReached: enqueued.on_points_reached,
            ev.TimelinesPolled: enqueued.on_points_seen,
            ev.ProbeEnded: self.on_probe_ended,
            ev.CompileAsked: compiling.on_compile_asked,
            ev.CompileEnded: self.on_compile_ended,
            ev.WorkerSpawned: lifecycle.note_spawned,
            ev.SpawnFailed: self.on_spawn_failed,
            ev.WorkerReady: self.on_worker_ready,
            ev.CallRan: answers.on_call_ran,
            ev.CallRaised: answers.on_call_raised,
            ev.WorkerMisbehaved: lifecycle.note_misbehaviour,
            ev.WorkerExited: self.on_worker_exited,
            ev.WorkerLost: self.on_worker_lost,
            ev.WorkerGone: unreachable.on_worker_gone,
            ev.BackendOffered: lifecycle.take_offer,
            ev.BackendLearned: self.on_backend_learned,
            ev.BackendReset: self.on_backend_reset,
            ev.RestartAsked: self.on_restart_asked,
            ev.KeptPolled: self.replacements.on_kept_polled,
            ev.WorkerSpared: self.on_worker_spared,
            ev.PolicyChanged: self.on_policy_changed,
            ev.RolloutsKept: rollouts.on_rollouts_kept,
            ev.RolloutAsked: rollouts.on_rollout_asked,
            ev.RollbackAsked: rollouts.on_rollback_asked,
            ev.ShadowCompared: self.on_shadow_compared,
            ev.TimesLoaded: self.on_times_loaded,
            ev.Tick: self.on_tick,
            ev.ShutdownAsked: self.on_shutdown_asked,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Take one event; returns what must be done, in order."""
        effects = self.effects
        effects.now_s, effects.actions = now_s, []
        self._handlers[type(event)](event)
        self.rollouts.settle()
        if self.replacements:
            self.replacements.settle()
        if self.engine.epoch != self.lease_policy.leased_epoch:  # it may decide otherwise by now
            self.lease_policy.revoke()
        if self.closing.waiting:
            self.closing.give_back()
        return effects.actions

    # --- what others may know --------------------------------------------------------------------------

    @property
    def wakeup_s(self) -> float:
        """The server sends a Tick at this time."""
        return self.effects.wakeup_s

    @property
    def stopping(self) -> bool:
        return self.effects.stopping

    @property
    def workers(self) -> dict[str, Worker]:
        return self.lifecycle.workers

    @property
    def unavailable(self) -> dict[str, Rejection]:
        """Why backends do not serve now."""
        return self.lifecycle.unavailable

    def unavailable_at(self, now_s: float) -> dict[str, Rejection]:
        """As `unavailable`, with the time until the next try of those that crashes have disabled."""
        return self.lifecycle.unavailable_at(now_s)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to look at timeline pages and rings."""
        return self.points.is_awaited or self.rings.is_awaited or self.graph_slots.is_awaited

    def bereft(self) -> list[Client]:
        """Clients that would wait for ever, since handling an event raised an error."""
        return self.closing.bereft(self.clients.values())

    def explain(
        self, body: bytes, now_s: float, *, with_lifted_only: bool = False, client: bytes = b""
    ) -> tuple[CallSpec, tuple[Verdict, ...], list[dict[str, Any]]]:
        """What would be decided for a signature now; changes nothing. `with_lifted_only`: counting what callers launch
        themselves and no worker can. `client`: whose call it would be. Raises LayerZeroError for a bad one."""
        spec, unavailable = CallSpec.parse(body), self.unavailable_at(now_s)
        spec = replace(spec, rolled=self.rollouts.rolled(spec, self.clients.get(client)))
        if with_lifted_only:
            unavailable = {name: why for name, why in unavailable.items() if why.code is not Reason.LIFTED_ONLY}
        return spec, *explain(self.engine, spec, unavailable, now_s)

    # --- workers -------------------------------------------------------------------------------------

    def on_probe_ended(self, event: ev.ProbeEnded) -> None:
        if event.record is not None:
            self.engine.set_certification(self.engine.certification.with_record(event.record))
        worker = self.lifecycle.end_probe(event)
        if worker is not None:
            self.calls.leave_disabled(worker)
            self.calls.leave_uncertified(self.workers[event.backend])

    def on_compile_ended(self, event: ev.CompileEnded) -> None:
        for call in self.compiling.end(event):
            self.calls.place(call)

    def on_spawn_failed(self, event: ev.SpawnFailed) -> None:
        worker = self.lifecycle.fail_spawn(event)
        if worker is not None:
            self.calls.leave_disabled(worker)
            self._exit_if_stopped()

    def on_worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self.lifecycle.note_ready(event)
        if worker is not None:
            self.calls.send_waiting(worker)

    def on_worker_exited(self, event: ev.WorkerExited) -> None:
        worker = self.lifecycle.current(event.backend, event.generation)
        if worker is not None and not (event.is_departure or self.replacements.is_wanted_end(worker, event.exit_code)):
            self.rollouts.note_end(worker, event.exit_code)
        if self.worker_exits.on_worker_exited(event) is not None:
            self._exit_if_stopped()

    def on_worker_lost(self, event: ev.WorkerLost) -> None:
        self.unreachable.on_worker_lost(event)
        self._exit_if_stopped()

    def on_rings_seen(self, event: ev.RingsPolled) -> None:
        self.rings.on_rings_seen(event)
        self.replacements.note_rings(event)

    def on_lane_overdue(self, event: ev.LaneOverdue) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None or lane.client.identity != event.identity:
            return
        if not event.is_running and lane.client.has_forced_too_many(self.effects.now_s):
            return  # a client whose call was really lost asks again
        name = lane.kernels.get(event.route, f"a call of {lane.worker.backend}")
        error: LayerZeroError = too_long(name, lane.worker, event.timeout_s)
        if event.nonsense:
            error = ProtocolError(event.nonsense)
        if lane.worker.fault is None:
            self.rings.note_forced(lane.client, event.timeout_s if event.is_running else 0.0)
        self.lifecycle.fault(lane.worker, error, Blame(mark=mark(lane.number, event.call)))

    def on_lane_seen(self, event: ev.LanePolled) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None:
            return
        lane.worker.answered += event.calls
        if self.engine.rollouts.is_watched:
            specs = [one.signature.spec for one in lane.routes.values()]
            self.engine.rollouts.note_express(lane.worker.backend, specs, event.calls, self.effects.now_s)
        route = lane.route_of(event.plan)
        if route is not None:
            kernel_id, cell = lane.kernels[route.number], route.signature.cell
            self.lease_policy.note_time(kernel_id, cell, event.kernel_ns, is_clean=True)

    def on_backend_learned(self, event: ev.BackendLearned) -> None:
        if event.backend not in self.workers:
            self.engine.note_backend(event.backend, event.capability, event.env)
            self.lifecycle.add(event.backend, event.missing, is_joined=event.is_joined)
            self.signatures.note_backend(event.capability)
            self.effects.emit(act.Note("backend.learned", {"backend": event.backend}))

    def on_worker_spared(self, event: ev.WorkerSpared) -> None:
        """Calls on lanes of the CPU are not the broker's: the worker rests once none can come for a while."""
        worker = self.workers[event.backend]
        leased = [lane for lane in self.leases.lanes_to(worker) if lane.routes and not lane.gpu]
        if leased:
            self.effects.emit(*self.leases.revoke(leased))
        else:
            self.lifecycle.rest(worker)

    def on_backend_reset(self, event: ev.BackendReset) -> None:
        if event.backend in self.workers:
            self.engine.forgive(event.backend)
            self._shadow.forget(self.capabilities[event.backend].kernel_ids)
            self.lifecycle.reset(event)

    def on_restart_asked(self, event: ev.RestartAsked) -> None:
        if event.backend in self.workers:
            self.on_backend_reset(ev.BackendReset(event.backend, event.missing))
            self.replacements.on_restart_asked(event)

    # --- what the broker learns ------------------------------------------------------------------------

    def on_policy_changed(self, event: ev.PolicyChanged) -> None:
        """Calls that are placed stay where they are; those that come next are ranked anew."""
        self.engine.set_policy(event.policy)
        self.effects.emit(act.Note("policy.changed", {"hash": event.policy.hash}))

    def on_shadow_compared(self, event: ev.ShadowCompared) -> None:
        client = self.clients.get(event.identity)
        if client is None or not client.has_compared(event):
            return
        if self.rollouts.note_compared(event.comparison):
            return
        if event.comparison.is_beyond:
            signature = next(one.signature for one in client.routes.values() if one.signature.key == event.route)
            backend = dict(signature.kernels)[event.comparison.subject.kernel_id]
            self.effects.tally.mismatches[signature.spec.op, backend] += 1
        if self._shadow.note(event.comparison, client.number) is not None:
            self._follow_shadow_checks()

    def _follow_shadow_checks(self) -> None:
        """Who has found what wrong, or who is there, is another."""
        numbers = {client.number for client in self.clients.values()}
        certification, wrong = self.engine.certification, self._shadow.quarantined(numbers)
        if wrong.keys() == certification.quarantined.keys():
            return
        for subject, evidence in wrong.items():
            if subject not in certification.quarantined:
                self.effects.emit(act.Note("kernel.quarantined", {**subject._asdict(), "evidence": evidence}))
        self.engine.set_certification(certification.with_quarantines(wrong))

    def _on_clients_changed(self, take: Callable[[Any], None], event: ev.Event) -> None:
        take(event)
        if self._shadow:
            self._follow_shadow_checks()

    def on_times_loaded(self, event: ev.TimesLoaded) -> None:
        self.engine.load_times(event.rows)

    # --- time and the end ------------------------------------------------------------------------------

    def on_tick(self, event: ev.Tick) -> None:
        effects = self.effects
        self.calls.watch_health()
        self.lease_policy.watch()
        rolls_at_s = self.engine.rollouts.due_s(effects.now_s)
        effects.wakeup_s = min(self.calls.health_at_s, self.lease_policy.watch_at_s, rolls_at_s)
        self.enqueued.end_late()
        self.calls.end_waits()
        self.replacements.watch(event)
        for worker in list(self.lifecycle.succession.all()):
            if worker.state in (S.READY, S.DRAINING, S.STOPPING) and worker.running and worker.fault is None:
                if effects.now_s >= worker.head_deadline_s:
                    self.end_what_takes_too_long(worker, event.executing.get((worker.backend, worker.generation), 0))
                if worker.fault is None:
                    effects.wake_by(worker.head_deadline_s)
            else:
                self.lifecycle.tick(worker)
                self.calls.leave_disabled(worker)

    def end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        """The head is due. One that waits for a call of an express lane gets more time."""
        head = worker.running[0]
        if not executing & LANE_CALL:
            self.rings.note_forced(head.client, head.timeout_s)
            self.lifecycle.fault(worker, too_long(head.kernel_id, worker, head.timeout_s))
        else:
            worker.head_since_s = self.effects.now_s
            self.rings.end_lane_call(worker, executing)

    def on_shutdown_asked(self, _: ev.ShutdownAsked) -> None:
        if self.stopping:
            return
        self.effects.stopping = True
        self.lease_policy.revoke()
        for call in self.compiling.take():
            self.closing.end_for_shutdown(call)
        for worker in list(self.lifecycle.succession.all()):
            for call in take(worker.waiting):
                self.closing.end_for_shutdown(call)
            self.lifecycle.stop(worker)
        self._exit_if_stopped()

    def _exit_if_stopped(self) -> None:
        if self.stopping and self.lifecycle.is_stopped:
            self.closing.tell(self.points.drop_held())  # nobody runs anything any more, and nobody will look at pages
            self.effects.emit(act.Exit())
