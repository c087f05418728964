"""Calls that workers have enqueued on GPUs: their clients have gone on, and the broker keeps them until the GPU is done
(docs/protocol.md, section 13)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import Blame
from layerzero.broker.core.call_fsm import CallState, move
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.stream_order import OpenPoint, StreamOrder
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.broker.selection.ranking import Engine

_ENQUEUED = CallState.ENQUEUED  # as in call_fsm.py: each call on a GPU needs it


@dataclass(eq=False, kw_only=True)
class GpuInFlight:
    engine: Engine
    lifecycle: WorkerLifecycle
    points: StreamOrder
    decisions: Decisions
    closing: Release
    effects: Effects

    def add(self, call: Call, worker: Worker, point: OpenPoint) -> None:
        """The worker has answered: the call's client goes on, the call stays until the GPU is done with it."""
        move(call, _ENQUEUED, worker)
        point.began_s = math.inf

    def on_points_reached(self, event: ev.PointsReached) -> None:
        self.closing.tell(self.points.reach(event.keys))

    def on_points_seen(self, event: ev.TimelinesPolled) -> None:
        worker = self.lifecycle.current(event.backend, event.generation)
        if worker is None:
            return
        for dispatch in event.done:
            call = worker.enqueued.get(dispatch) or self._take_unanswered(worker, dispatch)
            spec = call.route.signature.spec
            self.engine.note_success(worker.backend, spec.op, self.effects.now_s, spec.device)
            self.closing.close(call)
        for dispatch in event.ready:
            begun = worker.enqueued.get(dispatch)
            if begun is not None and begun.point is not None and not begun.point.has_begun:
                begun.point.began_s = self.effects.now_s
                self.effects.wake_by(begun.point.due_s)
        for point in list(self.points.first()):
            client, its = point.client, point.call
            is_its = its is not None and its.state is _ENQUEUED and its.worker is worker
            is_ready = its is None or its.dispatch in event.ready
            if is_its and client.has_left and not is_ready and not self.closing.has_rings(client):
                # It is this one's point; or a stream of the client's has overwritten the word.
                self.effects.emit(act.ReleaseTurn(client.number, point.gpu, point.point))

    def _take_unanswered(self, worker: Worker, dispatch: int) -> Call:
        """The worker has ended before it could answer, and the GPU was done: the client's stream has gone on."""
        call = next(call for call in worker.running if call.dispatch == dispatch)
        move(call, CallState.IN_HAND)
        client = call.client
        if not client.has_left:
            decision = self.decisions.number(call, worker)
            self.effects.emit(act.Answer(client.identity, call.seq, decision, call.attempt, 0, b"", call.attempts))
        return call

    def release(self, client: Client) -> None:
        """A client has left: nobody but the broker says that inputs are ready. One after the other: in a lane DONE of
        one says that all before are done."""
        if self.closing.has_rings(client):
            return  # those come between; rings.py sees them all
        for point in list(self.points.first()):
            if point.client is client and point.call is not None:
                self.effects.emit(act.ReleaseTurn(client.number, point.gpu, point.point))

    def end_late(self) -> None:
        """Workers whose GPU takes too long for a call are killed."""
        for worker in self.lifecycle.succession.all():
            for call in worker.enqueued.values():
                if worker.fault is not None:
                    break
                if call.point is None or not call.point.has_begun:
                    continue
                if self.effects.now_s >= call.point.due_s:
                    late = Blame(dispatch=call.dispatch)
                    self.lifecycle.fault(worker, too_long(call.kernel_id, worker, call.timeout_s), late)
                else:
                    self.effects.wake_by(call.point.due_s)
