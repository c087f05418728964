"""What becomes of a worker's calls when its exit is confirmed: one may be to blame, the others lost their place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import NOBODY, Blame, Evidence, blame_for, has_begun
from layerzero.broker.core.call_fsm import take
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.ring_calls import RingCalls, Stranded
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle, exit_text
from layerzero.ipc.errors import BackendError, DeadlineExceeded, EnvError, LayerZeroError, ProtocolError
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STALLED_EXIT, STICKY_EXIT, lane_of

_FAULTS = {
    DeadlineExceeded.code: "deadline",
    ProtocolError.code: "protocol",
    EnvError.code: "start",
}  # why it was killed
NEEDS_MEMORY = "raise the limit of that cgroup or container, or run less in it"


class Move(NamedTuple):
    """A call of a worker that is gone, and how it goes on."""

    client: Client
    seq: int
    is_on_gpu: bool
    do: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class WorkerExits:
    lifecycle: WorkerLifecycle
    calls: Dispatch
    leases: Leases
    rings: RingCalls
    closing: Release
    effects: Effects

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        """The worker; None when its exit is known."""
        worker = self.lifecycle.take_exit(event)
        if worker is None:
            return None
        is_retirement = worker.state is WorkerState.RETIRED and worker.retired_s < math.inf and not event.exit_code
        is_renewal = self._begins_anew(worker, event) or is_retirement
        was_stopping = worker.state is WorkerState.STOPPED
        is_beside = self.lifecycle.succession.is_beside(worker)
        how = exit_text(event.exit_code)
        error = worker.fault or _death(worker, event, how)
        facts = {
            "backend": worker.backend,
            "pid": worker.pid,
            "exit": how,
            "cause": _told(was_stopping, is_retirement, event) or error.message,
            "phase": event.phase,
        }
        self.effects.emit(act.Note("worker.exited", {**facts, "stderr_tail": event.stderr_tail}))
        lanes, stranded = self.leases.lanes_to(worker), self.rings.stranded(worker, event)
        blame = self.blame_for(evidence_of(worker, event, stranded, is_renewal=is_renewal))
        self.effects.emit(*self.leases.end_worker(worker, error, event, blame.mark, is_crash=worker.fault is None))
        on_gpu, running, waiting = self.take_calls(worker)
        if was_stopping:
            for call in (*on_gpu, *running, *waiting):
                self.closing.end_for_shutdown(call)
            for one in stranded:
                self.rings.come_back(one, is_blamed=False)
        else:
            restarts, cause = worker.restarts, "lost" if event.is_departure else _cause(worker, event, is_renewal)
            successor = self.lifecycle.succession.successors.get(worker.backend)
            if successor is not None and successor is not worker and successor.fault is None and not is_beside:
                self.lifecycle.take_over(successor)
            elif event.is_departure:
                self.lifecycle.replace(worker, error)
            else:
                self.lifecycle.plan_restart(worker, error, event.stderr_tail, is_renewal=is_renewal)
            self.effects.tally.restarts[worker.backend, cause] += worker.restarts - restarts
            moves = [self._move(worker, call, blame, error, event, "executing") for call in on_gpu]
            moves += [self._move(worker, call, blame, error, event, event.phase) for call in running]
            moves += [self._move(worker, call, NOBODY, error, event, "") for call in waiting]
            moves += [self._move_stranded(one, blame, event) for one in stranded]
            for one_move in in_order(moves):
                one_move.do()
        for lane in lanes:
            self.closing.finish_leaving(lane.client)
        return worker

    def blame_for(self, end: Evidence) -> Blame:
        """Whom the worker's end is to blame on."""
        return blame_for(end)

    def take_calls(self, worker: Worker) -> tuple[list[Call], list[Call], list[Call]]:
        """The worker is dead: its calls are in hand. Those that it had answered and its GPU was not done with, those
        that it had not answered, those that waited for it."""
        on_gpu = (*worker.enqueued.values(), *worker.graph_slots.values())
        return take(on_gpu), take(worker.running), take(worker.waiting)

    def _begins_anew(self, worker: Worker, event: ev.WorkerExited) -> bool:
        """It says that the order of its calls on a GPU was the cause. Of each call a worker of a backend may say so
        once."""
        if event.exit_code not in (RENEWAL_EXIT, STALLED_EXIT) or worker.fault is not None:
            return False
        call = next((call for call in worker.running if call.dispatch == event.executing), None)
        if call is None:
            ring = self.leases.lanes.get(lane_of(event.executing))
            return ring is not None and bool(ring.gpu)
        is_new = call.point is not None and worker.backend not in call.excused
        call.excused |= {worker.backend}
        return is_new

    def _move(
        self, worker: Worker, call: Call, blame: Blame, error: LayerZeroError, event: ev.WorkerExited, phase: str
    ) -> Move:
        """The call that is to blame has failed with this error; others only lost their place."""
        is_blamed = blame.is_on(call.dispatch)

        def do() -> None:
            if is_blamed:
                call.deaths += worker.fault is None
                self.calls.attempt_failed(call, worker, error, exit_code=event.exit_code, phase=phase)
            else:
                call.has_begun = has_begun(call.dispatch, event.executing, event.phase, event.exit_code)
                self.calls.requeue(call, worker, event.exit_code, worker.pid)

        return Move(call.client, call.seq, call.point is not None, do)

    def _move_stranded(self, one: Stranded, blame: Blame, event: ev.WorkerExited) -> Move:
        is_blamed = one.mark == blame.mark
        began = has_begun(one.mark, event.executing, event.phase, event.exit_code)
        its = {"is_blamed": is_blamed, "has_begun": began and not is_blamed and not one.is_enqueued}
        do = partial(self.rings.come_back, one, **its)
        return Move(one.lane.client, one.call.seq, True, do)


def evidence_of(worker: Worker, event: ev.WorkerExited, stranded: Iterable[Stranded], *, is_renewal: bool) -> Evidence:
    """What a worker that has ended leaves behind, before its calls are taken."""
    return Evidence(
        killed_for=worker.blame if worker.fault is not None and not worker.is_forced else None,
        is_renewal=is_renewal,
        is_gpu_lost=event.exit_code == STICKY_EXIT,
        executing=event.executing,
        running=[call.dispatch for call in worker.running],
        begun=[n for n, call in worker.enqueued.items() if call.point is not None and call.point.has_begun],
        rings={one.mark: one.is_ready for one in stranded},
        rung=[n for n, call in worker.graph_slots.items() if call.busy_since_s < math.inf],
    )


def _told(was_stopping: bool, is_retirement: bool, event: ev.WorkerExited) -> str:
    """Why it ended, when that was wanted."""
    if is_retirement:
        return "another worker has taken over"
    return "it was told to stop" if was_stopping and event.exit_code == 0 else ""


def _cause(worker: Worker, event: ev.WorkerExited, is_renewal: bool) -> str:
    """Why it has ended, in one word of few, for counts."""
    if is_renewal:
        return "renewal"
    if worker.is_forced:
        return "asked"
    if worker.fault is not None:
        return _FAULTS.get(worker.fault.code, "killed")
    return "out_of_memory" if event.oom else "crash"


def _death(worker: Worker, event: ev.WorkerExited, how: str) -> BackendError:
    """The error of one that the broker did not kill."""
    text, facts = f"the {worker.backend} worker died ({how})", {}
    if event.oom:
        text = f"the kernel killed the {worker.backend} worker for lack of memory ({how}; {event.oom})"
        facts["repair"] = NEEDS_MEMORY
    return BackendError(
        text,
        backend=worker.backend,
        exit_code=event.exit_code,
        phase=event.phase,
        stderr_tail=event.stderr_tail,
        **facts,
    )


def in_order(moves: list[Move]) -> list[Move]:
    """A client's calls on GPUs in the order in which it made them, wherever the worker had them: a later one waits for
    an earlier one, and a worker that loads a kernel waits for all that waits in it. Others stay in their places."""
    slots: dict[int, list[int]] = defaultdict(list)
    for at, move in enumerate(moves):
        if move.is_on_gpu:
            slots[move.client.number].append(at)
    ordered = list(moves)
    for places in slots.values():
        made = sorted((moves[at] for at in places), key=lambda move: move.seq)
        for at, move in zip(places, made, strict=True):
            ordered[at] = move
    return ordered
