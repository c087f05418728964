"""Restarts that people ask for: another worker starts beside the one that runs, takes over once it is ready, and the
one before finishes what it has and ends. No call is lost by that, unless somebody forces it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import NOBODY
from layerzero.broker.core.call_fsm import take
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.model import Worker
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.selection.ranking import Engine
from layerzero.ipc.errors import BackendError
from layerzero.ipc.vocabulary.ops import FUNCTION

RETIRE_GRACE_S = 5.0  # so long a worker that was told to exit may take, besides the calls of lanes that it is in
S = WorkerState


@dataclass(eq=False, kw_only=True)
class Replacements:
    """Workers of functions may keep objects for clients, which nobody can take over: one that does is waited for."""

    engine: Engine
    lifecycle: WorkerLifecycle
    calls: Dispatch
    leases: Leases
    effects: Effects
    keeping: frozenset[str] = frozenset({FUNCTION})  # as those of Grants
    _until_s: dict[str, float] = field(init=False, default_factory=dict)  # by backend, of what starts
    _free: set[str] = field(init=False, default_factory=set)  # workers that were seen to keep nothing, in no call

    def on_restart_asked(self, event: ev.RestartAsked) -> None:
        """A backend whose worker does not run, or is another one already, is as good as restarted."""
        worker, succession = self.lifecycle.workers[event.backend], self.lifecycle.succession
        if worker.is_joined or self.effects.stopping:
            return
        succession.failures.pop(event.backend, None)
        if event.is_forced:
            for one in succession.of(event.backend):
                self._end(one)
        elif worker.state is S.READY and event.missing is not None:
            succession.failures[event.backend] = str(event.missing)
        elif worker.state is S.READY and event.backend not in succession.successors:
            self._until_s[event.backend] = event.until_s
            self.effects.wake_by(event.until_s)
            self.lifecycle.begin_replacement(worker)

    def _end(self, worker: Worker) -> None:
        succession = self.lifecycle.succession
        if worker.state is S.PROBING and succession.is_beside(worker):
            succession.dismiss(worker, "it was ended by lz restart --force")
        elif worker.state in (S.STARTING, S.READY, S.DRAINING):
            self.lifecycle.end_at_once(worker)

    def __bool__(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._until_s or self.lifecycle.succession)

    # --- from one to the other -----------------------------------------------------------------------

    @property
    def awaited(self) -> list[Worker]:
        """Workers that others wait to take over from, and that may keep something for clients."""
        found = self.lifecycle.succession.successors
        workers = [self.lifecycle.workers[name] for name, one in found.items() if one.state is S.READY]
        return [one for one in workers if one.state is S.READY and self.may_keep(one)]

    def may_keep(self, worker: Worker) -> bool:
        """Something for clients, between calls."""
        return not self.keeping.isdisjoint(self.engine.capabilities[worker.backend].ops)

    def on_kept_polled(self, event: ev.KeptPolled) -> None:
        """Before another takes over from a worker that keeps nothing, it gets no calls until it has ended those that it
        has: one may leave an object there."""
        for worker in self.awaited:
            if worker.backend in event.kept:
                self._let_go(worker)
                continue
            if not worker.is_held:
                worker.is_held = True
                self.effects.emit(*self.leases.revoke(self.leases.lanes_to(worker)))
            elif worker.backend not in event.busy and not worker.running:
                self._free.add(worker.backend)

    def _let_go(self, worker: Worker) -> None:
        if worker.is_held:
            worker.is_held = False
            if worker.state is S.READY:
                self.calls.send_waiting(worker)

    def settle(self) -> None:
        """At the end of an event: whoever may take over does, and whoever has nothing left is told to exit."""
        succession = self.lifecycle.succession
        for backend, successor in list(succession.successors.items()):
            old = self.lifecycle.workers[backend]
            is_free = old.state is not S.READY or not self.may_keep(old) or backend in self._free
            if successor.state is S.READY and is_free:
                self.take_over(successor)
        for backend in [name for name in self._until_s if name not in succession.successors]:
            del self._until_s[backend]  # it has taken over, or will not
            self._free.discard(backend)
            self._let_go(self.lifecycle.workers[backend])
        for worker in succession.draining.values():
            if (
                worker.state is S.DRAINING
                and worker.fault is None
                and worker.retired_s == math.inf
                and self.has_drained(worker)
            ):
                worker.retired_s = self.effects.now_s
                self.effects.wake_by(worker.retired_s + RETIRE_GRACE_S)
                self.effects.emit(act.RetireWorker(worker.backend, worker.generation, worker.identity))

    def take_over(self, successor: Worker) -> None:
        """Calls that wait go to it, and all that come; those that were sent stay where they are."""
        old = self.lifecycle.take_over(successor)
        facts = {"backend": old.backend, "pid": successor.pid, "before": old.pid}
        self.effects.emit(act.Note("worker.replaced", facts))
        for call in take(old.waiting):
            self.calls.place(call)

    def has_drained(self, worker: Worker) -> bool:
        """What clients' graphs have bound moves on when it ends; on lanes of the CPU its end is seen between calls."""
        if worker.running or worker.enqueued:
            return False
        return worker.has_clear_rings or not self.leases.rings(worker)

    def note_rings(self, event: ev.RingsPolled) -> None:
        for worker in self.lifecycle.succession.draining.values():
            rings = [(lane, event.page_poller.get(lane.number)) for lane in self.leases.rings(worker)]
            worker.has_clear_rings = all(
                look is not None and all(one.call in lane.left for one in look.calls) for lane, look in rings
            )

    def watch(self, event: ev.Tick) -> None:
        """What takes too long is ended."""
        succession, now_s = self.lifecycle.succession, self.effects.now_s
        for backend, until_s in list(self._until_s.items()):
            successor = succession.successors.get(backend)
            if now_s < until_s:
                self.effects.wake_by(until_s)
            elif successor is not None and successor.state is S.PROBING:
                succession.dismiss(successor, "its environment was being probed when the time was up")
            elif successor is not None:
                is_ready = successor.state is S.READY
                why = "the worker kept objects of clients, or was in a call" if is_ready else "it was still starting"
                self.lifecycle.fault(successor, BackendError(f"{why} when the time was up"), NOBODY)
        for worker in list(succession.draining.values()):
            if worker.retired_s == math.inf or worker.fault is not None:
                continue
            if event.executing.get((worker.backend, worker.generation)):  # of a lane: its client watches its time
                worker.retired_s = now_s
            if now_s >= worker.retired_s + RETIRE_GRACE_S:
                text = f"it was told to exit, and has not within {RETIRE_GRACE_S:g} s"
                self.lifecycle.fault(worker, BackendError(text), NOBODY)
            else:
                self.effects.wake_by(worker.retired_s + RETIRE_GRACE_S)

    def is_wanted_end(self, worker: Worker, exit_code: int) -> bool:
        """Whether nothing is wrong with a worker that ends: somebody wanted it to, or another one goes on serving."""
        is_told = worker.state is S.DRAINING and worker.retired_s < math.inf and exit_code == 0
        return is_told or worker.is_forced or self.lifecycle.succession.successors.get(worker.backend) is worker
