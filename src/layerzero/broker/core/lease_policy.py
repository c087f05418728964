"""Which routes get a lease: those whose next call would go where the last ones went, for as long as that is so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layerzero.broker.core.effects import Effects
from layerzero.broker.core.leases import SETTLED_CALLS, Leases
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Call, Client, Kind, Route, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import Quarantine
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.ranking import Engine, TimingBucket
from layerzero.broker.selection.signature import Signature

MAX_KINDS = 1024  # of calls, remembered per client
WATCH_S = 1.0  # after new times leases are looked at by then: another kernel may have become the better one


@dataclass(eq=False, kw_only=True)
class LeasePolicy:
    engine: Engine
    signatures: PreparedCalls
    quarantine: Quarantine
    leases: Leases
    limits: Limits
    effects: Effects
    leased_epoch: int = field(init=False, default=0)  # of the engine: what it decided then
    watch_at_s: float = field(init=False, default=math.inf)

    def settle(self, call: Call, worker: Worker) -> None:
        """Lend a lane to a route that one worker serves well, and would serve again."""
        route = call.route
        is_known = call.client.routes.get(route.number) is route  # it may have been forgotten meanwhile
        if route.is_leased or not is_known or not self.limits.express or worker.is_joined:
            return
        client = call.client
        if client.forced_s and client.has_forced_too_many(self.effects.now_s):
            return
        server = (call.kernel_id, worker.generation)
        if route.settled_on != server:
            route.settled_on, route.settled = server, 0
        route.settled += 1
        if worker.state is not WorkerState.READY or worker.is_held or self.effects.stopping:
            return
        kind = self._kind(call, worker)
        if route.settled >= SETTLED_CALLS - 1:
            self._lend(call, worker, route, route.settled)
        elif (
            kind is not None
            and kind.count >= SETTLED_CALLS - 1
            and not kind.route.is_leased
            and self.signatures.neighbours(kind.route.signature) is not None
        ):
            self._lend(call, worker, kind.route, kind.count)

    def _lend(self, call: Call, worker: Worker, route: Route, count: int) -> None:
        """Calls of this route have been settled, or nearly so: `count` of them, or of its neighbours, in a row."""
        signature = route.signature
        self.revoke_outdated()
        plan = self.signatures.plans.get((signature.place, call.kernel_id))
        if plan is None or plan not in worker.plans or not self._is_settled(call.client, signature, call.kernel_id):
            return
        if route.decided_for != (call.kernel_id, worker.generation, signature.seen[0]):
            return  # its client was told of another server, or what held earlier of this one
        near = self.signatures.neighbours(signature) if self.quarantine.is_empty(self.effects.now_s) else None
        self.effects.emit(*self.leases.tell(call, worker, plan, near))
        if count >= SETTLED_CALLS:
            self.effects.emit(*self.leases.grant(call, worker, plan, route, near))

    def _kind(self, call: Call, worker: Worker) -> Kind | None:
        """The kind that a call is of, with it counted; None on a GPU, where each length is lifted."""
        client, route, signature = call.client, call.route, call.route.signature
        if call.gpu:
            return None
        spec, server = signature.spec, (call.kernel_id, worker.generation)
        key = (signature.cell.key, spec.pinned, spec.policy_key)
        kind = client.kinds.get(key)
        if kind is None or kind.server != server or client.routes.get(kind.route.number) is not kind.route:
            if len(client.kinds) >= MAX_KINDS:
                client.kinds.clear()
            kind = client.kinds[key] = Kind(server, route)
        elif not kind.route.is_leased and _epoch(kind.route) < _epoch(route):
            kind.route = route  # whose client knows what holds now
        kind.count += 1
        return kind

    def _is_settled(self, client: Client, signature: Signature, kernel_id: str) -> bool:
        """The next call of this signature would go to the same kernel, without a look at it."""
        best = next(iter(self.signatures.order(signature)), None)
        return (
            best is not None
            and best.kernel_id == kernel_id
            and not signature.spec.is_pooled  # the one that is free serves the next call
            and not (best.transforms or best.is_in_doubt or client.may_run(best))
            and not self.quarantine.asks_for_digests(signature.key)
            and self.engine.policy.tune_budget == 0
            and self.engine.policy_for(signature.spec).shadow_rate == 0
        )

    def revoke_outdated(self) -> None:
        """The engine may decide otherwise by now."""
        if self.engine.epoch != self.leased_epoch:
            self.revoke()

    def revoke(self) -> None:
        """Take all leases back."""
        self.leased_epoch = self.engine.epoch
        self.effects.emit(*self.leases.revoke())

    def note_time(self, kernel_id: str, cell: TimingBucket, kernel_ns: int, *, is_clean: bool) -> None:
        now_s = self.effects.now_s
        self.engine.note_time(kernel_id, cell, kernel_ns, now_s, is_clean=is_clean)
        if self.leases and self.watch_at_s == math.inf:  # an idle broker has nothing to watch
            self.watch_at_s = now_s + WATCH_S
            self.effects.wake_by(self.watch_at_s)

    def watch(self) -> None:
        """Leases whose calls would be decided in another way by now, for the times of others, end."""
        if self.effects.now_s < self.watch_at_s:
            return
        stale = [
            lane
            for lane in self.leases.lanes.values()
            if any(not self._is_settled(lane.client, r.signature, lane.kernels[r.number]) for r in lane.routes.values())
        ]
        self.effects.emit(*self.leases.revoke(stale))
        self.watch_at_s = math.inf


def _epoch(route: Route) -> int:
    """Of what its client was told of it last."""
    return -1 if route.decided_for is None else route.decided_for[2]
