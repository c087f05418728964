"""The broker's core: `BrokerState.handle(event, now_s) -> [action]`. No I/O, no clock, no randomness of its own.

This puts its parts together; each is given those that it uses, and none knows those that use it. Their order in
`BrokerState` is one in which they can be read.

Invariants, checked by tests/unit/broker/core/test_simulation.py over thousands of seeded schedules:
every call ends in exactly one Answer or Refuse; a call runs on at most one worker at a time, and is given to another
only when the one before has answered or its exit is confirmed; the step that picks a worker reserves it. A call on a
GPU is answered when it is enqueued there, and once more when it had to run again; turns of a lane end in their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.admission import Admission
from layerzero.broker.core.clients import ClientLifecycle
from layerzero.broker.core.compile_waits import CompileWaits
from layerzero.broker.core.completion import Completion
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.gpu_in_flight import GpuInFlight
from layerzero.broker.core.grants import Grants
from layerzero.broker.core.graph_calls import Bells
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Client, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import Quarantine
from layerzero.broker.core.release import Release
from layerzero.broker.core.ring_calls import RingCalls
from layerzero.broker.core.stream_order import Turns
from layerzero.broker.core.worker_exit import WorkerExits
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.broker.core.worker_unreachable import UnreachableWorkers
from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.shadow import ShadowLedger
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.match import Rejection
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.lane import EXECUTING, mark

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
        self.effects = effects = Effects()
        self.leases = leases = Leases()
        self.turns = turns = Turns()
        quarantine = Quarantine(limits.poison_quarantine_s)
        decisions = Decisions(engine, effects)
        self.lifecycle = lifecycle = WorkerLifecycle(engine, unusable, limits, rng, effects, joined)
        self.compiling = compiling = CompileWaits(engine, lifecycle, effects)
        self.signatures = signatures = PreparedCalls(engine, lifecycle, effects)
        grants = Grants(lifecycle, effects)
        self._lease_policy = lease_policy = LeasePolicy(engine, signatures, quarantine, leases, limits, effects)
        self._releases = closing = Release(lifecycle, signatures, grants, leases, turns, compiling, effects)
        self._calls = calls = Dispatch(
            engine, lifecycle, signatures, grants, compiling, closing, quarantine, limits, effects
        )
        self._enqueued = enqueued = GpuInFlight(engine, lifecycle, turns, decisions, closing, effects)
        self.bells = bells = Bells(self.clients, lifecycle, signatures, compiling, closing, limits, effects)
        answers = Completion(engine, lifecycle, calls, decisions, lease_policy, enqueued, bells, closing, effects)
        sessions = ClientLifecycle(
            self.clients,
            engine,
            lifecycle,
            signatures,
            grants,
            leases,
            lease_policy,
            turns,
            enqueued,
            bells,
            compiling,
            closing,
            effects,
        )
        admission = Admission(
            self.clients,
            sessions,
            lifecycle,
            signatures,
            calls,
            lease_policy,
            turns,
            bells,
            quarantine,
            limits,
            effects,
        )
        self._rings = rings = RingCalls(lifecycle, leases, turns, admission, calls, closing, limits, effects)
        self._worker_exits = WorkerExits(lifecycle, calls, enqueued, bells, leases, rings, closing, effects)
        self.unreachable = unreachable = UnreachableWorkers(lifecycle, calls, closing, effects)
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
            ev.GraphSlotsPolled: bells.see,
            ev.LaneOverdue: self._lane_overdue,
            ev.LanePolled: self._lane_seen,
            ev.CallHandedBack: rings.take,
            ev.RingsPolled: rings.see,
            ev.TurnsReached: enqueued.reach,
            ev.TimelinesPolled: enqueued.see,
            ev.ProbeEnded: self._probe_ended,
            ev.CompileAsked: compiling.start_asked,
            ev.CompileEnded: self._compile_ended,
            ev.WorkerSpawned: lifecycle.note_spawned,
            ev.SpawnFailed: self._spawn_failed,
            ev.WorkerReady: self._worker_ready,
            ev.CallRan: answers.take,
            ev.CallRaised: answers.take_error,
            ev.WorkerMisbehaved: lifecycle.note_misbehaviour,
            ev.WorkerExited: self._worker_exited,
            ev.WorkerLost: self._worker_lost,
            ev.WorkerGone: unreachable.release,
            ev.BackendOffered: lifecycle.take_offer,
            ev.BackendReset: self._backend_reset,
            ev.PolicyChanged: self._policy_changed,
            ev.ShadowCompared: self._shadow_compared,
            ev.TimesLoaded: self._times_loaded,
            ev.Tick: self._tick,
            ev.ShutdownAsked: self._shutdown_asked,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Take one event; returns what must be done, in order."""
        self.effects.begin(now_s)
        self._handlers[type(event)](event)
        self._lease_policy.revoke_outdated()
        return self.effects.actions

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

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to look at order pages and rings."""
        return self.turns.is_awaited or self._rings.is_awaited or self.bells.is_awaited

    def explain(self, body: bytes, now_s: float) -> tuple[CallSpec, tuple[Verdict, ...], list[dict[str, Any]]]:
        """What would be decided for a signature now; changes nothing. Raises LayerZeroError for a bad one."""
        spec = CallSpec.parse(body)
        return spec, *explain(self.engine, spec, self.unavailable, now_s)

    # --- workers -------------------------------------------------------------------------------------

    def _probe_ended(self, event: ev.ProbeEnded) -> None:
        if event.record is not None:
            self.engine.set_certification(self.engine.certification.with_record(event.record))
        worker = self.lifecycle.end_probe(event)
        if worker is not None:
            self._calls.leave_disabled(worker)
            self._calls.leave_uncertified(worker)

    def _compile_ended(self, event: ev.CompileEnded) -> None:
        for call in self.compiling.end(event):
            self._calls.place(call)

    def _spawn_failed(self, event: ev.SpawnFailed) -> None:
        worker = self.lifecycle.fail_spawn(event)
        if worker is not None:
            self._calls.leave_disabled(worker)
            self._exit_if_stopped()

    def _worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self.lifecycle.note_ready(event)
        if worker is not None:
            self._calls.send_waiting(worker)

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        if self._worker_exits.take(event) is not None:
            self._exit_if_stopped()

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        self.unreachable.lose(event)
        self._exit_if_stopped()

    def _lane_overdue(self, event: ev.LaneOverdue) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is not None and lane.client.identity == event.identity:
            name = lane.kernels.get(event.route, f"a call of {lane.worker.backend}")
            error = too_long(name, lane.worker, event.timeout_s)
            self.lifecycle.fault(
                lane.worker, ProtocolError(event.nonsense) if event.nonsense else error, mark(lane.number, event.call)
            )

    def _lane_seen(self, event: ev.LanePolled) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None:
            return
        lane.worker.answered += event.calls
        route = lane.route_of(event.plan)
        if route is not None:
            kernel_id, cell = lane.kernels[route.number], route.signature.cell
            self._lease_policy.note_time(kernel_id, cell, event.kernel_ns, is_clean=True)

    def _backend_reset(self, event: ev.BackendReset) -> None:
        if event.backend in self.workers:
            self.engine.forgive(event.backend)
            self._shadow.forget(self.capabilities[event.backend].kernel_ids)
            self.lifecycle.reset(event)

    # --- what the broker learns ------------------------------------------------------------------------

    def _policy_changed(self, event: ev.PolicyChanged) -> None:
        """Calls that are placed stay where they are; those that come next are ranked anew."""
        self.engine.set_policy(event.policy)
        self.effects.emit(act.Note("policy.changed", {"hash": event.policy.hash}))

    def _shadow_compared(self, event: ev.ShadowCompared) -> None:
        subject = event.comparison.subject
        evidence = self._shadow.note(event.comparison)
        if evidence is not None:
            self.engine.set_certification(self.engine.certification.with_quarantine(subject, evidence))
            self.effects.emit(act.Note("kernel.quarantined", {**subject._asdict(), "evidence": evidence}))

    def _times_loaded(self, event: ev.TimesLoaded) -> None:
        self.engine.load_times(event.rows)

    # --- time and the end ------------------------------------------------------------------------------

    def _tick(self, event: ev.Tick) -> None:
        effects = self.effects
        self._calls.watch_health()
        self._lease_policy.watch()
        effects.wakeup_s = min(self._calls.health_at_s, self._lease_policy.watch_at_s)
        self._enqueued.end_late()
        self._calls.end_waits()
        for worker in self.workers.values():
            if worker.state in (S.READY, S.STOPPING) and worker.running and worker.fault is None:
                if effects.now_s >= worker.head_deadline_s:
                    self._end_what_takes_too_long(worker, event.executing.get((worker.backend, worker.generation), 0))
                if worker.fault is None:
                    effects.wake_by(worker.head_deadline_s)
            else:
                self.lifecycle.tick(worker)
                self._calls.leave_disabled(worker)

    def _end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        """The head is due. One that waits for a call of an express lane gets more time, but not for ever: that call's
        client watches its deadline, unless it has left."""
        head, now_s, timeout_s = worker.running[0], self.effects.now_s, self.limits.timeout_s
        if not executing & EXECUTING:
            self.lifecycle.fault(worker, too_long(head.kernel_id, worker, head.timeout_s))
        elif worker.lane_call != executing:
            worker.lane_call, worker.lane_call_since_s = executing, now_s
            worker.head_since_s = now_s
        elif now_s < worker.lane_call_since_s + timeout_s:
            worker.head_since_s = now_s
        else:
            self.lifecycle.fault(worker, too_long("a call on an express lane", worker, timeout_s), executing)

    def _shutdown_asked(self, _: ev.ShutdownAsked) -> None:
        if self.stopping:
            return
        self.effects.stopping = True
        self._lease_policy.revoke()
        for call in self.compiling.take():
            self._releases.end_for_shutdown(call)
        for worker in self.workers.values():
            for call in worker.take_waiting():
                self._releases.end_for_shutdown(call)
            self.lifecycle.stop(worker)
        self._exit_if_stopped()

    def _exit_if_stopped(self) -> None:
        if self.stopping and self.lifecycle.is_stopped:
            self._releases.tell(self.turns.drop_held())  # nobody runs anything any more, and nobody will look at pages
            self.effects.emit(act.Exit())
