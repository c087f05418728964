"""Rollouts as they begin, go on and end: which calls the new versions get, and what becomes of routes at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Client, Route, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.rollout import ROLLED_BACK, Rollout
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec, Signature
from layerzero.ipc.errors import DeadlineExceeded
from layerzero.ipc.transport.attempts import FailedAttempt
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STALLED_EXIT

S = WorkerState


@dataclass(eq=False, kw_only=True)
class RolloutSteps:
    """`clients` are by identity. Calls that are placed stay where they are; a route's next ones follow the rollout."""

    clients: Mapping[bytes, Client]
    engine: Engine
    signatures: PreparedCalls
    effects: Effects

    # --- what people want ----------------------------------------------------------------------------

    def on_rollouts_kept(self, event: ev.RolloutsKept) -> None:
        """What an earlier broker has kept, before there are clients."""
        for rollout in event.rollouts:
            self.engine.rollouts.put(rollout, self.effects.now_s)
        self._follow(())

    def on_rollout_asked(self, event: ev.RolloutAsked) -> None:
        self._put(event.rollout, "asked for")

    def on_rollback_asked(self, event: ev.RollbackAsked) -> None:
        rollout = self.engine.rollouts.known.get(event.backend)
        if rollout is not None and rollout.is_standing:
            self._put(rollout.ended(ROLLED_BACK, event.why), event.why)

    # --- what happens to calls -----------------------------------------------------------------------

    def settle(self) -> None:
        """Do what the rules ask for."""
        if not self.engine.rollouts.is_watched:
            return
        for rollout, why in self.engine.rollouts.changes(self.effects.now_s):
            self._put(rollout, why)

    def note_served(self, spec: CallSpec, kernel_id: str, attempts: Iterable[FailedAttempt]) -> None:
        """A worker has answered a call that these attempts failed before."""
        if self.engine.rollouts.is_watched:
            failed = [one["kernel_id"] for one in attempts if _is_of_kernel(one)]
            self.engine.rollouts.note_call(spec, kernel_id, failed, self.effects.now_s)

    def note_end(self, worker: Worker, exit_code: int) -> None:
        """The worker's process has ended, for the one reason or the other."""
        fault = worker.fault
        is_new = worker.state not in (S.STOPPED, S.BACKOFF, S.DISABLED, S.ABSENT)
        if not (self.engine.rollouts.is_watched and is_new) or worker.is_resting or self.effects.stopping:
            return
        if exit_code in (RENEWAL_EXIT, STALLED_EXIT):  # it begins anew
            return
        if fault is not None and fault.code == DeadlineExceeded.code:
            return  # the caller's doing, unless another kernel serves the call in time
        how = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
        why = f"the {worker.backend} worker died ({how})" if fault is None else fault.message
        self.engine.rollouts.note_death(worker.backend, why)
        self.settle()

    def note_compared(self, comparison: Comparison) -> bool:
        """Whether it compares two versions of a rollout."""
        one = comparison
        return self.engine.rollouts.note_compared(
            one.subject.kernel_id,
            one.reference,
            one.error,
            one.allowed,
            self.effects.now_s,
            is_beyond=one.is_beyond,
        )

    # --- routes --------------------------------------------------------------------------------------

    def rolled(self, spec: CallSpec, client: Client | None, bucket: str = "") -> tuple[str, ...]:
        """The versions that stand in for their backends in such a call of a client. `bucket`: its perf key, where that
        is known. Raises LayerZeroError for a call that nobody could make."""
        if not self.engine.rollouts:
            return ()
        process = 0 if client is None else client.process
        return self.engine.rollouts.rolled(
            spec,
            process,
            lambda: bucket or self.engine.context(spec).perf_key(),
            lambda backend, op: backend in self.engine.capabilities and op in self.engine.capabilities[backend].ops,
        )

    def _put(self, rollout: Rollout, why: str) -> None:
        engine, now_s = self.engine, self.effects.now_s
        engine.rollouts.put(rollout, now_s)
        facts = {"backend": rollout.backend, "to": rollout.to, "state": rollout.state, "share": rollout.share}
        self.effects.emit(act.Note("rollout.changed", {**facts, "why": why}))
        self.effects.emit(act.KeepRollouts(tuple(engine.rollouts.known.values())))
        self._follow(self.clients.values())

    def _follow(self, clients: Iterable[Client]) -> None:
        self.engine.epoch += 1  # leases end, and each route's next call is ranked anew
        self.effects.wake_by(self.engine.rollouts.due_s(self.effects.now_s))
        for client in clients:
            for route in list(client.routes.values()):
                signature = route.signature
                rolled = self.rolled(signature.spec, client, signature.cell.key)
                if rolled != signature.spec.rolled:
                    client.routes[route.number] = self._with(route, rolled)

    def _with(self, route: Route, rolled: tuple[str, ...]) -> Route:
        """The route with another signature. It keeps those that it had: calls may be on their way under their plans."""
        variants = {**route.variants, route.signature.spec.rolled: route.signature}
        signature = variants.get(rolled)
        if signature is None:
            signature = self._signature(route.signature, rolled)
            signature.users += 1
        return Route(
            route.number,
            signature,
            route.checked,
            served_by=route.served_by,
            failed_by=route.failed_by,
            backends=route.backends,
            near=route.near,
            variants={key: one for key, one in variants.items() if one is not signature},
        )

    def _signature(self, signature: Signature, rolled: tuple[str, ...]) -> Signature:
        known = self.signatures.known.get((signature.key, rolled))
        return known or self.signatures.add(signature.key, replace(signature.spec, rolled=rolled))


def _is_of_kernel(attempt: FailedAttempt) -> bool:
    """Whether a kernel failed the call, or took too long; a death counts by itself."""
    has_ended = attempt["exit_code"] is not None or attempt["exit_signal"] is not None
    return attempt["phase"] != "queued" and (not has_ended or attempt["code"] == DeadlineExceeded.code)
