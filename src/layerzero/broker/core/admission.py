"""Calls as they come to the broker: from clients, and back from lanes whose worker ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.call_fsm import begin
from layerzero.broker.core.clients import ClientLifecycle
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.graph_calls import GraphCalls
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.leases import Lost
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import FORCED_WINDOW_S, MAX_FORCED, Call, Client, Route
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import Quarantine
from layerzero.broker.core.stream_order import OpenPoint, StreamOrder
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.ipc.errors import BrokerLost, Busy, LayerZeroError, Poison, ProtocolError
from layerzero.ipc.vocabulary.worker_codes import mark

MIN_TIMEOUT_S = 1e-3  # less is the noise of a healthy worker, which would be killed for it
MAX_TIMEOUT_S = 86_400.0  # who waits for longer holds others up without end


def bounded(timeout_s: float) -> float:
    """What is kept of a timeout."""
    return min(max(timeout_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)


@dataclass(eq=False, kw_only=True)
class Admission:
    """`clients` are by identity."""

    clients: Mapping[bytes, Client]
    sessions: ClientLifecycle
    lifecycle: WorkerLifecycle
    signatures: PreparedCalls
    calls: Dispatch
    lease_policy: LeasePolicy
    points: StreamOrder
    graph_slots: GraphCalls
    quarantine: Quarantine
    limits: Limits
    effects: Effects

    def on_call_arrived(self, event: ev.CallArrived) -> None:
        client = self.clients[event.identity]
        lost = client.lost.get(event.after_lane)
        if lost is not None and lost.has_taken(event.after_call):
            return
        call = self.admit(event)
        if call is None:
            return
        if lost is None:
            self.calls.place(call)
        elif lost.is_ring:  # it was put when nobody would take it any more
            call.is_counted = True
            self.resume(call, lost, is_blamed=False)
        else:
            del client.lost[event.after_lane]
            is_blamed = lost.blames(event.after_lane, event.after_call)
            call.has_begun = not is_blamed and lost.begun == mark(event.after_lane, event.after_call)
            self.resume(call, lost, is_blamed=is_blamed)

    def admit(self, event: ev.CallArrived, *, is_bounded: bool = True) -> Call | None:
        """A call comes to the broker. None when it has ended in an error, or its client is dropped for it."""
        client = self.clients[event.identity]
        route = client.routes.get(event.route)
        if route is None:
            missing = client.refused_routes.get(event.route)
            if missing is not None:
                self.effects.emit(act.Refuse(client.identity, event.seq, missing))
            else:
                self.sessions.drop(client, f"call on unknown route {event.route}")
            return None
        try:
            point = self._begin_point(client, route, event)
            if self.effects.stopping:
                self._refuse(client, event.seq, point, BrokerLost("the broker is shutting down"), route)
                return None
            limit = self.limits.max_in_flight
            if is_bounded and client.open_calls >= limit:
                error = Busy(f"{client.open_calls} calls are open; allowed: {limit}", limit=limit)
                self._refuse(client, event.seq, point, error, route)
                return None
            arenas = route.checked.get(event.body)
            if arenas is None:
                arenas = route.check(event.body, client.arenas)
        except ProtocolError as exc:
            self.sessions.drop(client, str(exc))
            return None
        refusal = self.quarantine.refusal(route.signature.key, event.digest, self.effects.now_s)
        if refusal is None:
            refusal = self._forces_deaths(client, event.timeout_s) if client.forced_s and is_bounded else None
        elif isinstance(refusal, Poison):
            client.poisons[route.number] += 1
        if refusal is not None:
            self._refuse(client, event.seq, point, refusal, route)
            return None
        route.signature.users += 1
        timeout_s = bounded(event.timeout_s or self.limits.timeout_s)
        call = Call(client, route, event.seq, timeout_s, event.body, arenas, may_run_here=event.may_run_here)
        call.arrived_s = self.effects.now_s
        begin(call)
        if point is not None:
            call.point, point.call = point, call
        if event.graph_slot is not None:
            call.take_graph_slot(event.graph_slot, event.binding)
        if point is not None or event.graph_slot is not None:  # it is on a GPU
            self._pass_by_those_without_transport(call)
        return call

    def _refuse(self, client: Client, seq: int, point: OpenPoint | None, error: LayerZeroError, route: Route) -> None:
        """It never becomes a call."""
        self.effects.tally.refuse_early(route.signature.spec.op, error.code)
        refusal = act.Refuse(client.identity, seq, error)
        if point is None:
            self.effects.emit(refusal)
        else:
            self.points.fail(point, refusal)

    def _begin_point(self, client: Client, route: Route, event: ev.CallArrived) -> OpenPoint | None:
        """None for a call on the CPU, or with a graph slot. Raises ProtocolError for a call without the point or
        graph slot that its device asks for, or with a senseless one."""
        gpu = route.signature.spec.device
        places = (event.point is not None) + (event.graph_slot is not None)
        if places != bool(gpu):
            has = {0: "without a point", 1: "with a point or a graph slot", 2: "with a point and a graph slot"}[places]
            raise ProtocolError(f"a call on {gpu or 'the CPU'} comes {has}")
        if not gpu:
            return None
        if gpu not in client.gpus:
            raise ProtocolError(f"a call on {gpu}, which the client has not added")
        if event.point is None:
            assert event.graph_slot is not None
            self.graph_slots.check(client, gpu, event.graph_slot)
            return None
        return self.points.begin(client, gpu, event.point)

    def _pass_by_those_without_transport(self, call: Call) -> None:
        """The call goes past workers that its client's memory is known not to reach, and is not run by the client."""
        call.may_run_here = False
        workers = self.lifecycle.workers
        for worker in workers.values():
            if worker.no_transport:
                break
        else:
            return
        for verdict in self.signatures.order(call.route.signature):
            error = workers[verdict.backend].no_transport.get((call.client.number, call.gpu))
            if error is not None:
                call.tried.add(verdict.backend)
                call.last_error = error

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        """A call comes back from an express lane whose worker ended: its attempt there counts like any other."""
        worker = self.lifecycle.workers[lost.backend]
        kernel_id = lost.kernels.get(call.route.number) or lost.kernels.get(call.route.near)
        if kernel_id not in dict(call.route.signature.kernels) and not call.is_spent:
            self.calls.place(call)
            return
        call.kernel_id = kernel_id or call.kernel_id
        call.attempt = 1
        if is_blamed:
            call.deaths += lost.is_crash
            error, code = lost.error, lost.exit_code
            self.calls.attempt_failed(call, worker, error, exit_code=code, phase=lost.phase, pid=lost.worker_pid)
        elif call.is_spent or worker.state in (WorkerState.BACKOFF, WorkerState.DISABLED):
            self.calls.requeue(call, worker, lost.exit_code, lost.worker_pid)
        else:  # the worker is back already
            self.calls.place(call)

    def _forces_deaths(self, client: Client, timeout_s: float) -> LayerZeroError | None:
        """Why a client's call with a timeout shorter than the broker's own is refused for a while, or None: workers
        start for all, and as many as its short timeouts have ended are enough."""
        now_s, own_s = self.effects.now_s, self.limits.timeout_s
        if timeout_s == 0 or timeout_s >= own_s or not client.has_forced_too_many(now_s):
            return None
        text = (
            f"{len(client.forced_s)} workers were killed for short timeouts of this client within "
            f"{FORCED_WINDOW_S:g} s. Calls with a timeout of {own_s:g} s or more go on; others in "
            f"{client.forced_s[0] + FORCED_WINDOW_S - now_s:.0f} s"
        )
        return Busy(text, limit=MAX_FORCED)

    def on_call_poisoned(self, event: ev.CallPoisoned) -> None:
        client = self.clients[event.identity]
        route = client.routes.get(event.route)
        if route is not None and client.poisons[route.number]:  # else it has no reason to say so of anybody's inputs
            client.poisons[route.number] -= 1
            self.quarantine.add(route.signature.key, event.digest, self.effects.now_s)
            self.lease_policy.revoke()  # calls of this signature must show what they bring
