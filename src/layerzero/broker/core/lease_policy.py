"""Which routes get a lease: those whose next call would go where the last ones went, for as long as that is so."""

from __future__ import annotations

import math

from layerzero.broker.core.effects import Effects
from layerzero.broker.core.leases import SETTLED_CALLS, Leases
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Call, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.quarantine import Quarantine
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.ranking import Engine, TimingBucket
from layerzero.broker.selection.signature import Signature

WATCH_S = 1.0  # after new times leases are looked at by then: another kernel may have become the better one


class LeasePolicy:
    def __init__(
        self,
        engine: Engine,
        signatures: PreparedCalls,
        quarantine: Quarantine,
        leases: Leases,
        limits: Limits,
        effects: Effects,
    ) -> None:
        self._engine = engine
        self._prepared = signatures
        self._quarantine = quarantine
        self._leases = leases
        self._limits = limits
        self._effects = effects
        self._leased_epoch = 0  # of the engine: what it decided then
        self.watch_at_s = math.inf

    def settle(self, call: Call, worker: Worker) -> None:
        """Lend a lane to a route that one worker serves well, and would serve again."""
        route, signature = call.route, call.route.signature
        is_known = call.client.routes.get(route.number) is route  # it may have been forgotten meanwhile
        if route.is_leased or not is_known or not self._limits.express or worker.is_joined:
            return
        server = (call.kernel_id, worker.generation)
        if route.settled_on != server:
            route.settled_on, route.settled = server, 0
        route.settled += 1
        if route.settled < SETTLED_CALLS - 1 or worker.state is not WorkerState.READY or self._effects.stopping:
            return
        self.revoke_outdated()
        if self._is_settled(signature, call.kernel_id):
            plan = self._prepared.plan_of(call)
            self._effects.emit(*self._leases.tell(call, worker, plan))
            if route.settled >= SETTLED_CALLS:
                self._effects.emit(*self._leases.grant(call, worker, plan))

    def _is_settled(self, signature: Signature, kernel_id: str) -> bool:
        """The next call of this signature would go to the same kernel, without a look at it."""
        best = next(iter(self._prepared.order(signature)), None)
        return (
            best is not None
            and best.kernel_id == kernel_id
            and not (best.transforms or best.is_on_trial or best.is_last_resort or best.may_run_here)
            and not self._quarantine.asks_for_digests(signature.key)
            and self._engine.policy.tune_budget == 0
            and self._engine.policy_for(signature.spec).shadow_rate == 0
        )

    def revoke_outdated(self) -> None:
        """The engine may decide otherwise by now."""
        if self._engine.epoch != self._leased_epoch:
            self.revoke()

    def revoke(self) -> None:
        """Take all leases back."""
        self._leased_epoch = self._engine.epoch
        self._effects.emit(*self._leases.revoke())

    def note_time(self, kernel_id: str, cell: TimingBucket, kernel_ns: int, *, is_clean: bool) -> None:
        now_s = self._effects.now_s
        self._engine.note_time(kernel_id, cell, kernel_ns, now_s, is_clean=is_clean)
        if self._leases and self.watch_at_s == math.inf:  # an idle broker has nothing to watch
            self.watch_at_s = now_s + WATCH_S
            self._effects.wake_by(self.watch_at_s)

    def watch(self) -> None:
        """Leases whose calls would be decided in another way by now, for the times of others, end."""
        if self._effects.now_s < self.watch_at_s:
            return
        stale = [
            lane
            for lane in self._leases.lanes.values()
            if any(not self._is_settled(r.signature, lane.kernels[r.number]) for r in lane.routes.values())
        ]
        self._effects.emit(*self._leases.revoke(stale))
        self.watch_at_s = math.inf
