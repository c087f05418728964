"""Calls that workers have enqueued on GPUs: their clients have gone on, and the broker keeps them until the GPU is done
(docs/protocol.md, section 13)."""

from __future__ import annotations

import math

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.stream_order import OpenTurn, Turns
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.broker.selection.ranking import Engine


class GpuInFlight:
    def __init__(
        self,
        engine: Engine,
        lifecycle: WorkerLifecycle,
        turns: Turns,
        decisions: Decisions,
        closing: Release,
        effects: Effects,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._turns = turns
        self._decisions = decisions
        self._releases = closing
        self._effects = effects

    def add(self, call: Call, worker: Worker, turn: OpenTurn) -> None:
        """The worker has answered: the call's client goes on, the call stays until the GPU is done with it."""
        worker.enqueued[call.dispatch] = call
        turn.worker, turn.began_s = worker, math.inf
        call.client.open_calls -= 1
        call.client.enqueued += 1
        call.is_enqueued = call.was_answered = True

    def take_all(self, worker: Worker) -> list[Call]:
        """The worker is dead: these are to run again, or to end."""
        calls = list(worker.enqueued.values())
        worker.enqueued.clear()
        for call in calls:
            assert call.turn is not None
            call.turn.worker = None
            call.client.open_calls += 1
            call.client.enqueued -= 1
            call.is_enqueued = False
        return calls

    def reach(self, event: ev.TurnsReached) -> None:
        self._releases.tell(self._turns.reach(event.keys))

    def see(self, event: ev.TimelinesPolled) -> None:
        worker = self._lifecycle.current(event.backend, event.generation)
        if worker is None:
            return
        for dispatch in event.done:
            call = worker.enqueued.pop(dispatch, None) or self._take_unanswered(worker, dispatch)
            spec = call.route.signature.spec
            self._engine.note_success(worker.backend, spec.op, self._effects.now_s, spec.device)
            self._releases.close(call)
        for dispatch in event.ready:
            begun = worker.enqueued.get(dispatch)
            if begun is not None and begun.turn is not None and not begun.turn.has_begun:
                begun.turn.began_s = self._effects.now_s
                self._effects.wake_by(begun.turn.due_s)
        for turn in list(self._turns.first()):
            client = turn.client
            is_ready = turn.call is None or turn.call.dispatch in event.ready
            if turn.worker is worker and client.has_left and not is_ready and not self._releases.has_rings(client):
                # It is this one's turn; or a stream of the client's has overwritten the word.
                self._effects.emit(act.ReleaseTurn(client.number, turn.gpu, turn.turn))

    def _take_unanswered(self, worker: Worker, dispatch: int) -> Call:
        """The worker has ended before it could answer, and the GPU was done: the client's stream has gone on."""
        call = next(call for call in worker.running if call.dispatch == dispatch)
        if worker.fault is not None and not worker.fault_call and worker.late is None and call is worker.running[0]:
            worker.late = call  # it was killed for this one, and is not for the next
        worker.running.remove(call)
        client = call.client
        if not client.has_left:
            decision = self._decisions.number(call, worker)
            self._effects.emit(act.Answer(client.identity, call.seq, decision, call.attempt, 0, b"", call.attempts))
        return call

    def release(self, client: Client) -> None:
        """A client has left: nobody but the broker says that inputs are ready. One after the other: in a lane DONE of
        one says that all before are done."""
        if self._releases.has_rings(client):
            return  # those come between; rings.py sees them all
        for turn in list(self._turns.first()):
            if turn.client is client and turn.call is not None:
                self._effects.emit(act.ReleaseTurn(client.number, turn.gpu, turn.turn))

    def end_late(self) -> None:
        """Workers whose GPU takes too long for a call are killed."""
        for worker in self._lifecycle.workers.values():
            for call in worker.enqueued.values():
                if worker.fault is not None:
                    break
                if call.turn is None or not call.turn.has_begun:
                    continue
                if self._effects.now_s >= call.turn.due_s:
                    worker.late = call
                    self._lifecycle.fault(worker, too_long(call.kernel_id, worker, call.timeout_s))
                else:
                    self._effects.wake_by(call.turn.due_s)
