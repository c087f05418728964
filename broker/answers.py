"""Workers' words on calls: what they answer becomes the client's answer, or the next attempt."""

from __future__ import annotations

from layerzero.broker import actions as act
from layerzero.broker import events as ev
from layerzero.broker.agenda import Agenda
from layerzero.broker.bells import Bells
from layerzero.broker.calls import Calls
from layerzero.broker.closing import Closing
from layerzero.broker.decisions import Decisions
from layerzero.broker.engine import Engine
from layerzero.broker.enqueued import Enqueued
from layerzero.broker.fleet import Fleet
from layerzero.broker.records import Worker
from layerzero.broker.settling import Settling
from layerzero.ipc.errors import BackendError, CudaGraphUnsafe, ProtocolError


class Answers:
    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        calls: Calls,
        decisions: Decisions,
        settling: Settling,
        enqueued: Enqueued,
        bells: Bells,
        closing: Closing,
        agenda: Agenda,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._calls = calls
        self._decisions = decisions
        self._settling = settling
        self._enqueued = enqueued
        self._bells = bells
        self._closing = closing
        self._agenda = agenda

    def _answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        """The worker whose oldest running call this answers. Late answers of a killed one are counted, not used."""
        worker = self._fleet.answering(identity)
        if worker is None:
            self._fleet.stale += 1
            return None
        head = worker.running[0] if worker.running else None
        if head is None or head.dispatch != dispatch or head.attempt != attempt:
            text = f"answered dispatch {dispatch}.{attempt}, which is not the one it runs"
            self._fleet.fault(worker, ProtocolError(text))
            return None
        return worker

    def take(self, event: ev.CallRan) -> None:
        worker = self._answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call = self._calls.take_head(worker)
        worker.answered += 1
        client, signature, turn = call.client, call.route.signature, call.turn
        if event.kernel_ns or not call.gpu:  # of a GPU, 0 is no new sample
            self._settling.note_time(call.kernel_id, signature.cell, event.kernel_ns, is_clean=not call.attempts)
        if turn is None:
            spec = signature.spec
            self._engine.note_success(worker.backend, spec.op, self._agenda.now_s, spec.device)
        if not call.is_unwanted:
            decision = self._decisions.number(call, worker)
            if call.bell is None:
                self._settling.settle(call, worker)
            answer = act.Answer(client.identity, call.seq, decision, call.attempt, event.kernel_ns, event.body)
            answer.attempts, answer.is_replayed = call.attempts, event.is_replayed
            answer.waited_s = call.start_wait_s
            self._agenda.do(answer)
        if turn is not None:
            self._enqueued.add(call, worker, turn)
        elif call.bell is not None and not call.is_unbound:
            self._bells.bind(call, worker)
            if client.has_left:
                self._bells.end_client(client)
        else:
            self._closing.close(call)

    def take_error(self, event: ev.CallRaised) -> None:
        worker = self._answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call, error = self._calls.take_head(worker), event.error
        if error.code == CudaGraphUnsafe.code and call.bell is None:  # nobody asked
            error = BackendError(f"{error.code}: {error.message}")
        self._calls.attempt_failed(call, worker, error)
