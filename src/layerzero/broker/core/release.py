"""Ends of calls and of clients: what each has taken is given back when nobody needs it any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core.call_fsm import CallState, move
from layerzero.broker.core.compile_waits import CompileWaits
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.grants import Grants
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.model import Call, Client, Route, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.stream_order import OpenPoint, StreamOrder
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.ipc.errors import BrokerLost, LayerZeroError

_CLOSED = CallState.CLOSED  # as in call_fsm.py: each call needs it


@dataclass(eq=False, kw_only=True)
class Release:
    lifecycle: WorkerLifecycle
    signatures: PreparedCalls
    grants: Grants
    leases: Leases
    points: StreamOrder
    compiling: CompileWaits
    effects: Effects
    waiting: dict[int, Client] = field(init=False, default_factory=dict)  # for `give_back`

    # --- calls ---------------------------------------------------------------------------------------

    def close(self, call: Call) -> None:
        """The call is over for the broker: its client has its answer or has left, and no worker has it."""
        client = call.client
        self.effects.tally.close(call)
        move(call, _CLOSED)
        self.signatures.release(call.route.signature)
        if call.point is not None:
            self.points.end(call.point)
        if call.graph_slot is not None:
            call.free_graph_slot()
        if client.retiring or call.attempts or client.routes.get(call.route.number) is not call.route:
            self.waiting[client.number] = client
        if client.has_left:
            self.release_if_done(client)

    def refuse(self, call: Call, error: LayerZeroError) -> None:
        """It has failed for good."""
        facts = {"op": call.route.signature.spec.op, "code": error.code, "detail": error.message}
        self.effects.emit(act.Note("call.failed", {**facts, "attempts": call.attempts, "client": call.client.number}))
        self.end_in_error(call, error)

    def end_in_error(self, call: Call, error: LayerZeroError) -> None:
        """One on a GPU ends when its client's stream has come to it."""
        self.effects.tally.refuse(call, error.code)
        candidates = [v.to_wire() for v in self.lifecycle.as_of_now(call.route.signature.ranked)]
        refusal = act.Refuse(call.client.identity, call.seq, error, call.attempts, candidates)
        if call.point is None:
            self.effects.emit(refusal)
            self.close(call)
        else:
            move(call, CallState.REFUSED)
            self.points.fail(call.point, refusal)

    def end_for_shutdown(self, call: Call) -> None:
        if call.is_unwanted:
            self.close(call)
        else:
            self.refuse(call, BrokerLost("the broker was shut down before the call ended"))

    def tell(self, failed: list[OpenPoint]) -> None:
        """These points have ended in errors, and their streams have come to them: their clients may know."""
        for point in failed:
            refusal = point.refusal
            assert refusal is not None
            if not point.client.has_left:
                self.effects.emit(act.FailTurn(point.client.number, point.gpu, point.point, refusal.error.code))
                self.effects.emit(refusal)
            if point.call is not None:
                self.close(point.call)

    def give_back(self) -> None:
        """Close arenas that their clients gave up and no call refers to any more, and take others back from workers
        that nothing of their client's needs. At the end of an event: before it, other calls may be in hand, where
        `users` does not look."""
        for client in self.waiting.values():
            for arena in sorted(client.retiring):
                if not self.users(client, arena):
                    self.grants.close_arena(client, arena)
            if not client.has_left:  # then all are closed
                self._take_back_idle(client)
        self.waiting.clear()

    def _take_back_idle(self, client: Client) -> None:
        """A worker maps a client's arenas while it has served a route that the client has, has a call of it, or a lane
        to it."""
        served = {backend for route in client.routes.values() for backend in route.backends}
        served |= {lane.worker.backend for lane in self.leases.of(client)}
        for worker in self.lifecycle.succession.all():
            if worker.backend not in served and not any(call.client is client for call in _calls_at(worker)):
                self.grants.take_back_arenas(client, worker)

    def users(self, client: Client, arena: int) -> list[Call]:
        """Open calls that refer to it."""
        return [call for call in self._calls() if call.client is client and arena in call.arenas]

    def _calls(self) -> list[Call]:
        calls = self.compiling.calls()
        for worker in self.lifecycle.succession.all():
            calls += _calls_at(worker)
        return calls

    def bereft(self, clients: Iterable[Client]) -> list[Client]:
        """Between two events: the clients with an open call that is nowhere, since handling an event raised an error
        while the call was in hand. Nothing will answer it. It counts as open no more."""
        found = []
        where = Counter(call.client.number for call in self._calls() if not call.was_answered)
        for client in clients:
            refused = sum(point.call is not None for point in self.points.of(client) if point.refusal is not None)
            if client.open_calls != where[client.number] + refused:
                client.open_calls = where[client.number] + refused
                found.append(client)
        return found

    # --- clients that have left ------------------------------------------------------------------------

    def has_rings(self, client: Client) -> bool:
        """Whether something may be on rings of a client that has left."""
        return bool(self.leases.of(client))

    def finish_leaving(self, client: Client) -> None:
        """What is on its rings needs the plans of its routes."""
        if client.has_left and not self.has_rings(client):
            for route in list(client.routes.values()):
                self.drop_route(client, route)
            self.release_if_done(client)

    def drop_route(self, client: Client, route: Route) -> None:
        del client.routes[route.number]
        del client.poisons[route.number]
        self.waiting[client.number] = client
        client.route_bytes -= len(route.signature.key)
        self.leases.drop_route(client, route)
        for signature in (route.signature, *route.variants.values()):
            self.signatures.release(signature)

    def release_if_done(self, client: Client) -> None:
        """A client's memory is given back when it has left and no worker may write into it any more."""
        if client.has_left and client.open_calls == client.enqueued == 0 and not self.has_rings(client):
            for arena in list(client.arenas):
                self.grants.close_arena(client, arena)
            self.grants.tell_left(client)
            for gpu in list(client.gpus):
                self.points.forget(client, gpu)
                self.grants.close_gpu(client, gpu)


def _calls_at(worker: Worker) -> list[Call]:
    return [*worker.running, *worker.waiting, *worker.enqueued.values(), *worker.graph_slots.values()]
