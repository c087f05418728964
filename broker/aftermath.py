"""What becomes of a worker's calls when its exit is confirmed: one may be to blame, the others lost their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from layerzero.broker import actions as act
from layerzero.broker import events as ev
from layerzero.broker.agenda import Agenda
from layerzero.broker.bells import Bells
from layerzero.broker.calls import Calls
from layerzero.broker.closing import Closing
from layerzero.broker.enqueued import Enqueued
from layerzero.broker.fleet import Fleet, exit_text
from layerzero.broker.leases import Leases
from layerzero.broker.records import Call, Client, Worker
from layerzero.broker.rings import Rings, Stranded
from layerzero.broker.worker_fsm import WorkerState
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.worker_codes import RENEWAL_EXIT, STALLED_EXIT, STICKY_EXIT, lane_of

NEEDS_MEMORY = "raise the limit of that cgroup or container, or run less in it"


class Move(NamedTuple):
    """A call of a worker that is gone, and how it goes on."""

    client: Client
    seq: int
    is_on_gpu: bool
    do: Callable[[], None]


class Aftermath:
    def __init__(
        self,
        fleet: Fleet,
        calls: Calls,
        enqueued: Enqueued,
        bells: Bells,
        leases: Leases,
        rings: Rings,
        closing: Closing,
        agenda: Agenda,
    ) -> None:
        self._fleet = fleet
        self._calls = calls
        self._enqueued = enqueued
        self._bells = bells
        self._leases = leases
        self._rings = rings
        self._closing = closing
        self._agenda = agenda

    def take(self, event: ev.WorkerExited) -> Worker | None:
        """The worker; None when its exit is known."""
        worker = self._fleet.take_exit(event)
        if worker is None:
            return None
        is_renewal = self._begins_anew(worker, event)
        if is_renewal:
            event = replace(event, executing=0)
        was_stopping = worker.state is WorkerState.STOPPED
        how = exit_text(event.exit_code)
        error = worker.fault or _death(worker, event, how)
        facts = {
            "backend": worker.backend,
            "pid": worker.pid,
            "exit": how,
            "cause": "it was told to stop" if was_stopping and event.exit_code == 0 else error.message,
            "phase": event.phase,
        }
        self._agenda.do(act.Note("worker.exited", {**facts, "stderr_tail": event.stderr_tail}))
        lanes, stranded = self._leases.lanes_to(worker), self._rings.stranded(worker, event)
        blamed = event.executing if worker.fault is None else worker.fault_call
        self._agenda.do(*self._leases.end_worker(worker, error, event, blamed, is_crash=worker.fault is None))
        on_ring = self._rings.named(worker, stranded, event)
        in_gpu = self._in_gpu(worker, event) if on_ring is None and not is_renewal else None
        if (
            on_ring is None
            and in_gpu is None
            and worker.fault is None
            and not is_renewal
            and not _died_in_running(worker, event)
        ):
            on_ring = next((one for one in stranded if one.is_ready), None)
            in_gpu = self._bells.in_gpu(worker) if on_ring is None else None
        enqueued = self._enqueued.take_all(worker) + self._bells.take_all(worker)
        running, waiting = list(worker.running), worker.take_waiting()
        worker.running.clear()
        if was_stopping:
            for call in (*enqueued, *running, *waiting):
                self._closing.end_for_shutdown(call)
            for one in stranded:
                self._rings.come_back(one, is_blamed=False)
        else:
            if event.is_departure:
                self._fleet.replace(worker, error)
            else:
                self._fleet.plan_restart(worker, error, event.stderr_tail, is_renewal=is_renewal)
            moves = self._moves_of_enqueued(worker, enqueued, in_gpu, error, event)
            if in_gpu is not None or on_ring is not None:  # nobody else is to blame
                event = replace(event, executing=0)
            moves += self._moves(worker, running, waiting, error, event)
            moves += self._moves_of_stranded(stranded, on_ring)
            for move in in_order(moves):
                move.do()
        for lane in lanes:
            self._closing.finish_leaving(lane.client)
        return worker

    @staticmethod
    def _in_gpu(worker: Worker, event: ev.WorkerExited) -> Call | None:
        """The enqueued call to blame for the worker's end: what it was killed for, or what the GPU was in, unless its
        CPU died in another one. Which of several lanes it was in nobody can tell; then it is the oldest."""
        if worker.fault is not None:
            return worker.late
        if _died_in_running(worker, event):
            return None
        begun = (c for c in worker.enqueued.values() if c.turn is not None and c.turn.has_begun)
        return next(begun, None)

    def _moves(
        self, worker: Worker, running: list[Call], waiting: list[Call], error: LayerZeroError, event: ev.WorkerExited
    ) -> list[Move]:
        """The one it was killed for or died in is blamed; those behind it only lost their place."""
        moves = []
        is_open = worker.fault is not None and not worker.fault_call and worker.late is None  # whom it is killed for
        for position, call in enumerate(running):
            is_first = position == 0 and is_open
            is_blamed = is_first if worker.fault is not None else call.dispatch == event.executing
            moves.append(self._move(worker, call, error if is_blamed else None, event, event.phase))
        return [*moves, *(self._move(worker, call, None, event, "") for call in waiting)]

    def _begins_anew(self, worker: Worker, event: ev.WorkerExited) -> bool:
        """It says that the order of its calls on a GPU was the cause. Of each call a backend's may say so once."""
        if event.exit_code not in (RENEWAL_EXIT, STALLED_EXIT) or worker.fault is not None:
            return False
        call = next((call for call in worker.running if call.dispatch == event.executing), None)
        if call is None:
            ring = self._leases.lanes.get(lane_of(event.executing))
            return ring is not None and bool(ring.gpu)
        is_new = call.turn is not None and worker.backend not in call.excused
        call.excused.add(worker.backend)
        return is_new

    def _moves_of_enqueued(
        self, worker: Worker, calls: list[Call], blamed: Call | None, error: LayerZeroError, event: ev.WorkerExited
    ) -> list[Move]:
        return [self._move(worker, call, error if call is blamed else None, event, "executing") for call in calls]

    def _moves_of_stranded(self, stranded: list[Stranded], blamed: Stranded | None) -> list[Move]:
        return [
            Move(one.lane.client, one.call.seq, True, partial(self._rings.come_back, one, is_blamed=one is blamed))
            for one in stranded
        ]

    def _move(
        self, worker: Worker, call: Call, blame: LayerZeroError | None, event: ev.WorkerExited, phase: str
    ) -> Move:
        """`blame`: with this error."""

        def do() -> None:
            if blame is None:
                self._calls.requeue(call, worker, event.exit_code, worker.pid)
            else:
                call.deaths += worker.fault is None
                self._calls.attempt_failed(call, worker, blame, exit_code=event.exit_code, phase=phase)

        return Move(call.client, call.seq, call.turn is not None, do)


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


def _died_in_running(worker: Worker, event: ev.WorkerExited) -> bool:
    """Its CPU was in a call that it had not answered, and its GPU was well."""
    return event.exit_code != STICKY_EXIT and any(call.dispatch == event.executing for call in worker.running)
