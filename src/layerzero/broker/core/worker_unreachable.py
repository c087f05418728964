"""Joined workers as the core sees them: they come when they like, and one may be out of reach, dead or not, with calls.

What a worker that nobody can reach was given is never given to another: it may still write. Such calls end, and their
clients call again with other memory; that memory is theirs again when the end of that worker is confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.call_fsm import take
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.ipc.errors import BackendError, BrokerLost, LayerZeroError, WorkerUnreachable


@dataclass(eq=False, kw_only=True)
class UnreachableWorkers:
    lifecycle: WorkerLifecycle
    calls: Dispatch
    closing: Release
    effects: Effects
    # Clients and seqs of calls that lost workers may still write for, by backend and generation.
    _lent: dict[tuple[str, int], list[tuple[Client, int]]] = field(init=False, default_factory=dict)

    def on_worker_lost(self, event: ev.WorkerLost) -> None:
        """Nobody can say when it ends. One with calls on a GPU is waited for all the same: streams wait for them, and
        their memory is in use until then."""
        worker = self.lifecycle.current(event.backend, event.generation)
        if worker is None or worker.state not in (WorkerState.KILLING, WorkerState.STOPPING):
            return
        waiting = take(worker.waiting)
        if not (worker.enqueued or worker.graph_slots or any(call.gpu for call in worker.running)):
            self._let_go(worker)
        for call in waiting:
            self.calls.leave(call, worker, BackendError(f"the {worker.backend} worker cannot be reached"))

    def _let_go(self, worker: Worker) -> None:
        fault = worker.fault or BackendError("it was told to stop")
        is_stopping = worker.state is WorkerState.STOPPING
        running = take(worker.running)
        blamed = worker.blame.dispatch if worker.fault is not None else running[0].dispatch if running else 0
        behind = BackendError(f"the {worker.backend} worker cannot be reached: {fault.message}")
        self.lifecycle.part_from(worker)
        facts = {"backend": worker.backend, "calls": len(running), "cause": fault.message}
        self.effects.emit(act.Note("worker.lost", facts))
        if not is_stopping:
            self.lifecycle.replace(worker, fault)
        lent = self._lent[worker.backend, worker.generation] = []
        for call in running:
            if call.is_unwanted:
                self.closing.close(call)
            else:
                lent.append((call.client, call.seq))
                is_blamed = call.dispatch == blamed
                self.refuse(call, worker, fault if is_blamed else behind, is_final=is_stopping)

    def refuse(self, call: Call, worker: Worker, fault: LayerZeroError, *, is_final: bool) -> None:
        """`fault`: what the worker was killed for, if it was for this call."""
        spec = call.route.signature.spec
        self.calls.note_attempt(call, worker, fault, phase="unreachable")
        error: LayerZeroError
        if is_final:
            error = BrokerLost("the broker was shut down before the call ended")
        elif spec.pinned and len(spec.candidates) == 1:
            error = fault
        elif not self.calls.can_place(call):
            error = self.calls.unserved(call)
        else:
            error = WorkerUnreachable(f"{spec.op}: {fault.message}", backend=worker.backend)
        self.effects.tally.refuse(call, error.code)
        self.effects.emit(act.Refuse(call.client.identity, call.seq, error, call.attempts, [], is_lent=True))
        self.closing.close(call)

    def has_let_go(self, backend: str, generation: int) -> bool:
        """Whether WorkerGone is awaited of this worker. Else it is WorkerExited, whoever could not reach it."""
        return (backend, generation) in self._lent

    def on_worker_gone(self, event: ev.WorkerGone) -> None:
        """Its end is confirmed."""
        for client, seq in self._lent.pop((event.backend, event.generation), ()):
            if not client.has_left:
                self.effects.emit(act.ReleaseCall(client.identity, seq))
