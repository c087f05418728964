"""Calls in clients' CUDA graphs (docs/protocol.md, section 15) as the core sees them: which are bound to graph slots
at which worker, and which take too long there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import Blame
from layerzero.broker.core.call_fsm import CallState, move
from layerzero.broker.core.compile_waits import CompileWaits
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.release import Release
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, too_long
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, TAKEN


@dataclass(eq=False, kw_only=True)
class GraphCalls:
    """A bound call counts as enqueued. `clients` are by identity."""

    clients: Mapping[bytes, Client]
    lifecycle: WorkerLifecycle
    signatures: PreparedCalls
    compiling: CompileWaits
    closing: Release
    limits: Limits
    effects: Effects
    is_awaited: bool = field(init=False, default=False)  # somebody waits for the broker to look at graph slots closely

    def holds(self, identity: bytes, gpu: str) -> bool:
        """Whether a client has graph slots on a GPU: then its memory must stay as workers reach it."""
        return any(its == gpu for its, _ in self.clients[identity].graph_slots)

    @staticmethod
    def check(client: Client, gpu: str, graph_slot: int) -> None:
        """Raises ProtocolError for a graph slot that is not there or is taken."""
        if not 0 <= graph_slot < GRAPH_SLOTS:
            raise ProtocolError(f"graph slot {graph_slot}; allowed: below {GRAPH_SLOTS}")
        if (gpu, graph_slot) in client.graph_slots:
            raise ProtocolError(f"graph slot {graph_slot} is bound already")

    def bind(self, call: Call, worker: Worker) -> None:
        """The worker has answered: it serves the graph slot from here on."""
        self.is_awaited |= bool(call.tried)
        move(call, CallState.BOUND, worker)
        call.busy_since_s = call.watched_since_s = math.inf

    def on_call_unbound(self, event: ev.CallUnbound) -> None:
        call = self.clients[event.identity].bound.get(event.seq)
        if call is None:
            return  # it has just ended in an error
        call.free_graph_slot()
        call.is_unbound = True
        match call.state:
            case CallState.COMPILING:
                move(call, CallState.IN_HAND)
                self.closing.close(call)
            case CallState.WAITING:
                self.closing.close(call)
            case CallState.RUNNING:  # at once: the graph slot's next call may go to this worker
                self._mute(call)
            case CallState.BOUND:
                self._release(call)

    def end_client(self, client: Client) -> None:
        for worker in self.lifecycle.succession.all():
            for call in [call for call in worker.graph_slots.values() if call.client is client]:
                self._release(call)

    def on_graph_slots_seen(self, event: ev.GraphSlotsPolled) -> None:
        """A graph slot that is seen busy twice may be in another replay by then: one that has been busy for half the
        time is watched closely for the other half. So is one that was moved: what was tried for one replay does not
        count for all later ones."""
        now_s, timeout_s = self.effects.now_s, self.limits.timeout_s
        self.is_awaited = False
        for worker in self.lifecycle.succession.all():
            for call in worker.graph_slots.values():
                word = event.busy.get(call.dispatch)
                if call.tried and (word is None or (call.graph_slot_word >= TAKEN and call.graph_slot_word != word)):
                    call.forget_attempts()  # it came through
                self.is_awaited |= bool(call.tried)
                if word is None or word != call.graph_slot_word or call.busy_since_s == math.inf:
                    call.busy_since_s = now_s if word is not None else math.inf
                    call.graph_slot_word, call.watched_since_s = word or 0, math.inf
                elif now_s - call.busy_since_s >= timeout_s / 2:
                    call.watched_since_s = min(call.watched_since_s, now_s)
                    self.is_awaited = True
                    if now_s - call.watched_since_s >= timeout_s / 2 and worker.fault is None:
                        late = Blame(dispatch=call.dispatch)
                        self.lifecycle.fault(worker, too_long(call.kernel_id, worker, timeout_s), late)

    def _release(self, call: Call) -> None:
        self._mute(call)
        self.closing.close(call)

    def _mute(self, call: Call) -> None:
        worker = call.worker
        if worker is not None and worker.identity and call.graph_slot is not None:
            plan = self.signatures.plan_of(call)
            self.effects.emit(act.SendMute(worker.identity, plan, call.client.number, call.graph_slot))
