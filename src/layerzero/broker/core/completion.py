"""Workers' words on calls: what they answer becomes the client's answer, or the next attempt."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.gpu_in_flight import GpuInFlight
from layerzero.broker.core.graph_calls import GraphCalls
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.model import Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.rollout_steps import RolloutSteps
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.selection.ranking import Engine
from layerzero.ipc.errors import BackendError, CudaGraphUnsafe, ProtocolError


@dataclass(eq=False, kw_only=True)
class Completion:
    engine: Engine
    lifecycle: WorkerLifecycle
    calls: Dispatch
    decisions: Decisions
    lease_policy: LeasePolicy
    enqueued: GpuInFlight
    graph_slots: GraphCalls
    closing: Release
    rollouts: RolloutSteps
    effects: Effects

    def answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        """The worker whose oldest running call this answers. Late answers of a killed one are counted, not used."""
        worker = self.lifecycle.answering(identity)
        if worker is None:
            self.lifecycle.stale += 1
            return None
        head = worker.running[0] if worker.running else None
        if head is None or head.dispatch != dispatch or head.attempt != attempt:
            text = f"answered dispatch {dispatch}.{attempt}, which is not the one it runs"
            self.lifecycle.fault(worker, ProtocolError(text))
            return None
        return worker

    def on_call_ran(self, event: ev.CallRan) -> None:
        worker = self.answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call = self.calls.take_head(worker)
        worker.answered += 1
        client, signature, point = call.client, call.route.signature, call.point
        if event.kernel_ns or not call.gpu:  # of a GPU, 0 is no new sample
            self.lease_policy.note_time(call.kernel_id, signature.cell, event.kernel_ns, is_clean=not call.attempts)
        self.rollouts.note_served(signature.spec, call.kernel_id, call.attempts)
        if point is None:
            spec = signature.spec
            self.engine.note_success(worker.backend, spec.op, self.effects.now_s, spec.device)
        if not call.is_unwanted:
            decision = self.decisions.number(call, worker)
            self.effects.tally.answer(call, worker.backend, self.effects.now_s)
            if call.graph_slot is None:
                self.lease_policy.settle(call, worker)
            self.effects.emit(
                act.Answer(
                    client.identity,
                    call.seq,
                    decision,
                    call.attempt,
                    event.kernel_ns,
                    event.body,
                    call.attempts,
                    event.is_replayed,
                    call.start_wait_s,
                )
            )
        if point is not None:
            self.enqueued.add(call, worker, point)
        elif call.graph_slot is not None and not call.is_unbound:
            self.graph_slots.bind(call, worker)
            if client.has_left:
                self.graph_slots.end_client(client)
        else:
            self.closing.close(call)

    def on_call_raised(self, event: ev.CallRaised) -> None:
        worker = self.answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call, error = self.calls.take_head(worker), event.error
        if error.code == CudaGraphUnsafe.code and call.graph_slot is None:  # nobody asked
            error = BackendError(f"{error.code}: {error.message}")
        self.calls.attempt_failed(call, worker, error)
