"""The workers' life as the core leads it: probed and started when needed, killed when wrong, restarted within a budget,
disabled beyond it. What becomes of their calls is others' to decide (calls.py, aftermath.py).

A backend that cannot be started, as its environment or its provider says, is disabled until somebody repairs it. One
that crashes have disabled is tried again after a while: a storm of faults may have passed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import NOBODY, Blame
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Worker
from layerzero.broker.core.succession import Succession
from layerzero.broker.core.worker_fsm import Signal, WorkerState, step
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import Verdict
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.cuda.offer import SLOTS
from layerzero.ipc.errors import (
    BackendError,
    DeadlineExceeded,
    EnvChanged,
    EnvError,
    LayerZeroError,
    OutOfMemory,
    ProtocolError,
)
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.pools import environment_of

S = WorkerState


class WorkerLifecycle:
    """`unusable`: why some backends cannot start. `joined`: those whose workers the broker does not start."""

    def __init__(
        self,
        engine: Engine,
        unusable: Mapping[str, Rejection],
        limits: Limits,
        rng: random.Random,
        effects: Effects,
        joined: Collection[str] = (),
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._rng = rng
        self._effects = effects
        self.workers = {name: Worker(name, is_joined=name in joined) for name in engine.capabilities}
        self.succession = Succession(self.workers)
        self.pools: defaultdict[str, list[Worker]] = defaultdict(list)  # of functions, by environment
        for worker in self.workers.values():
            self.pools[environment_of(worker.backend)].append(worker)
        self.unavailable = dict(unusable)
        self.stale = 0  # messages that came too late to count
        self.by_identity: dict[bytes, Worker] = {}
        self._slots = itertools.count(1)  # of starts of GPU workers
        self.observer: Callable[[Worker, Signal], None] | None = None  # hears of each transition before it is made

    def add(self, backend: str, missing: Rejection | None, *, is_joined: bool) -> None:
        """A backend that there was not before; `missing`: why it cannot start."""
        worker = self.workers[backend] = Worker(backend, is_joined=is_joined)
        self.pools[environment_of(backend)].append(worker)
        self.set_unavailable(backend, missing)

    def siblings(self, worker: Worker) -> list[Worker]:
        """The workers of its environment, with itself."""
        return self.pools[environment_of(worker.backend)]

    # --- which one -----------------------------------------------------------------------------------

    def current(self, backend: str, generation: int) -> Worker | None:
        """None when what was said is about an earlier start."""
        return self.succession.find(backend, generation)

    def answering(self, identity: bytes) -> Worker | None:
        """The worker that a message is from, unless it has ended or is being killed."""
        worker = self.by_identity.get(identity)
        return None if worker is None or worker.fault is not None else worker

    def is_back_by(self, backend: str, at_s: float) -> bool:
        """Its back-off, if it is in one, ends in time; loading has a timeout of its own."""
        worker = self.workers[backend]
        return worker.state is not S.BACKOFF or worker.retry_at_s <= at_s

    # --- starts --------------------------------------------------------------------------------------

    def need(self, worker: Worker) -> None:
        if worker.state is S.ABSENT:
            self._signal(worker, Signal.NEEDED)
            self._effects.emit(act.Probe(worker.backend))

    def end_probe(self, event: ev.ProbeEnded) -> Worker | None:
        """The worker that waited for it, if any: it is started now, or disabled."""
        worker = next((one for one in self.succession.of(event.backend) if one.state is S.PROBING), None)
        if worker is None:
            return None
        if event.error is None:
            self._signal(worker, Signal.PROBE_PASSED)
            self._spawn(worker)
        else:
            self._signal(worker, Signal.PROBE_FAILED)
            worker.is_unprobed = isinstance(event.error, OutOfMemory)
            self._disable_or_wait(worker, event.error)
        return worker

    def _spawn(self, worker: Worker) -> None:
        worker.generation = self.succession.next_generation(worker.backend)
        worker.started_s = self._effects.now_s
        worker.was_ready = worker.is_vacant = False
        worker.fault, worker.blame = None, NOBODY
        worker.pid = 0
        capability = self._engine.capabilities[worker.backend]
        is_for_gpus = capability.platform == "cuda"
        if is_for_gpus or (FUNCTION in capability.ops and len(self._engine.devices) > 1):  # beside the CPU
            worker.slot = next(self._slots)
            if worker.slot >= SLOTS and not is_for_gpus:
                worker.slot = 0  # it takes no arrays on a GPU
            elif worker.slot >= SLOTS:
                self._signal(worker, Signal.SPAWN_FAILED)
                text = f"this broker has started {SLOTS} workers for GPUs; offers of memory have no room for more signs"
                error = BackendError(text, repair="lz down")
                if self.succession.is_beside(worker):
                    self.succession.dismiss(worker, text)
                else:
                    self._disable(worker, error, Reason.BACKEND_DISABLED)
                return
        self._effects.wake_by(self._effects.now_s + self._limits.start_timeout_s)
        self._effects.emit(act.Spawn(worker.backend, worker.generation))

    def note_spawned(self, event: ev.WorkerSpawned) -> None:
        worker = self.current(event.backend, event.generation)
        if worker is not None:
            worker.pid = event.pid

    def fail_spawn(self, event: ev.SpawnFailed) -> Worker | None:
        """The worker, which is disabled now, or stopped when it was to stop."""
        worker = self.current(event.backend, event.generation)
        if worker is None:
            return None
        if worker.state is S.STOPPING:
            self._signal(worker, Signal.EXITED)
        else:
            self._signal(worker, Signal.SPAWN_FAILED)
            self._disable_or_wait(worker, event.error)
            if event.vacancy is not None:
                worker.is_vacant = True
                self.set_unavailable(worker.backend, event.vacancy)
        return worker

    def take_offer(self, event: ev.BackendOffered) -> None:
        """Somebody can start a joined worker that is not there, or nobody can. It is started at once: its container is
        there for that alone."""
        worker = self.workers[event.backend]
        is_idle = worker.state is S.ABSENT or (worker.state is S.DISABLED and worker.is_vacant)
        if not is_idle or self._effects.stopping:
            return
        if event.vacancy is not None:
            if self.unavailable.get(event.backend) != event.vacancy:
                self.set_unavailable(event.backend, event.vacancy)
            return
        if worker.state is S.DISABLED:
            self._signal(worker, Signal.RESET)
        worker.cause, worker.is_vacant, worker.times_disabled = None, False, 0
        self.set_unavailable(event.backend, None)
        self.need(worker)

    def note_ready(self, event: ev.WorkerReady) -> Worker | None:
        """The worker, if that is what was awaited of it."""
        worker = self.current(event.backend, event.generation)
        if worker is None or worker.state is not S.STARTING:
            return None
        self._signal(worker, Signal.LOADED)
        worker.identity = event.identity
        worker.versions = dict(event.versions)
        self._engine.note_versions(worker.backend, worker.versions)
        worker.was_ready = worker.has_served = True
        worker.ready_s = self._effects.now_s
        self.by_identity[event.identity] = worker
        self.set_unavailable(worker.backend, None)
        start_s = round(self._effects.now_s - worker.started_s, 3)
        facts = {"backend": worker.backend, "pid": worker.pid, "start_s": start_s}
        self._effects.emit(act.Note("worker.ready", facts))
        return worker

    def tick(self, worker: Worker) -> None:
        """One that is starting, or waits for its next start, may be due."""
        now_s = self._effects.now_s
        if worker.state is S.STARTING:
            due_s = worker.started_s + self._limits.start_timeout_s
            if now_s >= due_s:
                text = f"the provider did not load within {self._limits.start_timeout_s:g} s"
                self.fault(worker, EnvError(text, env=worker.backend, repair=f"lz env probe {worker.backend}"))
            else:
                self._effects.wake_by(due_s)
        elif worker.state in (S.BACKOFF, S.DISABLED):
            if now_s >= worker.retry_at_s and worker.is_unprobed:
                worker.is_unprobed = False
                self._signal(worker, Signal.RESET)
                self.need(worker)
            elif now_s >= worker.retry_at_s:
                is_retry = worker.state is S.DISABLED  # else that was counted when it was planned
                worker.restarts += is_retry
                self._effects.tally.restarts[worker.backend, "retry"] += is_retry
                self._signal(worker, Signal.RETRY_DUE)
                self._spawn(worker)
            else:
                self._effects.wake_by(worker.retry_at_s)

    # --- ends ----------------------------------------------------------------------------------------

    def fault(self, worker: Worker, error: LayerZeroError, blame: Blame | None = None) -> None:
        """Kill a worker that is alive but wrong. Its calls move on when its exit is confirmed, not before. `blame`: for
        which call; None: for the oldest that it has not answered, if any."""
        if worker.state in (S.STARTING, S.READY, S.STOPPING, S.DRAINING) and worker.fault is None:
            self._signal(worker, Signal.FAULT)
            head = worker.running[0].dispatch if worker.running else 0
            worker.fault, worker.blame = error, Blame(dispatch=head) if blame is None else blame
            is_beside = self.succession.is_beside(worker)
            if not is_beside and (worker.was_ready or not worker.times_disabled):  # else it is disabled as before
                killed = Rejection(Reason.BACKEND_RESTARTING, f"being killed: {error.message}")
                self.set_unavailable(worker.backend, killed)
            self._effects.emit(act.Kill(worker.backend, worker.generation))

    def rest(self, worker: Worker) -> None:
        """End a worker that has nothing to do, so that what it holds is free. It starts when it is needed again."""
        if worker.state is S.READY and worker.is_idle and not worker.is_joined and worker.fault is None:
            worker.is_resting = True
            self.fault(
                worker, BackendError("it has had nothing to do for a while; it starts when it is needed"), NOBODY
            )

    def note_misbehaviour(self, event: ev.WorkerMisbehaved) -> None:
        worker = self.current(event.backend, event.generation)
        if worker is not None and event.is_late:
            self.fault(worker, DeadlineExceeded(event.detail, backend=event.backend), NOBODY)
        elif worker is not None:
            self.fault(worker, BackendError(event.detail) if event.is_silent else ProtocolError(event.detail))

    def take_exit(self, event: ev.WorkerExited) -> Worker | None:
        """The worker that has ended, and has nothing of clients any more; None when that is known."""
        worker = self.current(event.backend, event.generation)
        if worker is None or worker.state in (S.STOPPED, S.BACKOFF, S.DISABLED, S.ABSENT):
            return None
        self.part_from(worker)
        return worker

    def part_from(self, worker: Worker) -> None:
        """It is no more, or as good as that."""
        self._signal(worker, Signal.EXITED)
        self.by_identity.pop(worker.identity, None)
        worker.identity = b""
        worker.arenas.clear()
        worker.clients.clear()
        worker.plans.clear()
        worker.gpus.clear()
        worker.no_transport.clear()
        worker.lane_call = 0

    def replace(self, worker: Worker, cause: LayerZeroError) -> None:
        """One that has joined is lost, or somebody has ended it, and nothing is known to be wrong with it: another is
        started at once."""
        worker.cause = cause
        worker.retry_at_s = self._effects.now_s
        worker.restarts += 1
        self._effects.wake_by(worker.retry_at_s)
        self.set_unavailable(worker.backend, Rejection(Reason.BACKEND_RESTARTING, cause.message))

    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        """It has ended: try again after a back-off, or give it up. `is_renewal`: only to begin anew."""
        limits, now_s = self._limits, self._effects.now_s
        if self.succession.is_beside(worker):
            self.succession.dismiss(worker, error.message)
            return
        if worker.is_forced:
            worker.is_forced = False
            self.replace(worker, error)
            return
        if worker.is_resting:
            worker.is_resting = False
            self._signal(worker, Signal.RESET)
            self.set_unavailable(worker.backend, None)
            return
        worker.cause = error
        is_late = worker.fault is not None and worker.fault.code == DeadlineExceeded.code
        is_crash = not (is_late or is_renewal)
        if is_crash:
            worker.deaths_s.append(now_s)
        if worker.was_ready and now_s - worker.ready_s >= limits.restart_window_s:
            worker.times_disabled = 0  # it was well again
        while worker.deaths_s and worker.deaths_s[0] < now_s - limits.restart_window_s:
            worker.deaths_s.popleft()
        needs = error.facts.get("repair") if worker.fault is None else None
        repair = f"{needs}, then lz restart {worker.backend}" if needs else ""
        is_new, lines = not worker.has_served, stderr_tail.strip().splitlines()
        last_words = f"; its last words: {lines[-1][:300]}" if lines and not worker.was_ready else ""
        if is_new and _cannot_load(worker, error):
            self._signal(worker, Signal.GIVEN_UP)
            cause = EnvError(
                f"the {worker.backend} worker never became ready: {error.message}{last_words}",
                env=worker.backend,
                cause=error.message,
                repair=repair or f"lz env probe {worker.backend}",
            )
            self._disable(worker, cause, Reason.BACKEND_IMPORT_FAILED)
        elif is_crash and worker.times_disabled:
            self._disable_for_a_while(worker, f"was tried again, and failed: {error.message}{last_words}", repair)
        elif len(worker.deaths_s) > limits.restart_budget:
            count = len(worker.deaths_s)
            times = f"died {count} times in {limits.restart_window_s:g} s; the last time" if count > 1 else "died once"
            self._disable_for_a_while(worker, f"{times}: {error.message}{last_words}", repair)
        elif is_new and isinstance(worker.fault, EnvError):  # its time is up; callers do not wait for that again
            text = f"never became ready: {error.message}{last_words}"
            self._disable_for_a_while(worker, text, repair or f"lz env probe {worker.backend}")
        else:
            exponent = max(len(worker.deaths_s) - 1, 0)
            delay_s = min(limits.backoff_s * 2**exponent, limits.backoff_max_s) * self._rng.uniform(0.75, 1.25)
            worker.retry_at_s = now_s + delay_s
            worker.restarts += 1
            self._effects.wake_by(worker.retry_at_s)
            detail = f"{error.message}; restarts in {delay_s:.1f} s"
            self.set_unavailable(worker.backend, Rejection(Reason.BACKEND_RESTARTING, detail))

    def _disable_or_wait(self, worker: Worker, error: LayerZeroError) -> None:
        """Of one that could not be started: what the machine lacks for a moment needs no repair."""
        if self.succession.is_beside(worker):
            self.succession.dismiss(worker, error.message)
            return
        if isinstance(error, OutOfMemory):
            self._try_later(worker, f"could not be started: {error.message}", "")
        else:
            self._disable(worker, error, _reason(error))

    def _disable_for_a_while(self, worker: Worker, text: str, repair: str) -> None:
        """Crashes may have passed by then."""
        self._signal(worker, Signal.GIVEN_UP)
        self._try_later(worker, text, repair)

    def _try_later(self, worker: Worker, text: str, repair: str) -> None:
        """Of one that is disabled by now."""
        limits = self._limits
        delay_s = min(limits.retry_disabled_s * 2.0 ** min(worker.times_disabled, 64), limits.retry_disabled_max_s)
        worker.times_disabled += 1
        worker.deaths_s.clear()
        cause = BackendError(text, repair=repair or f"lz restart {worker.backend}")
        self._disable(worker, cause, Reason.BACKEND_DISABLED, retry_s=delay_s)

    def _disable(self, worker: Worker, cause: LayerZeroError, reason: Reason, *, retry_s: float | None = None) -> None:
        """Calls that wait for it are the caller's. `retry_s`: so long; without, until it is repaired."""
        worker.cause = cause
        repair = _repair(worker.backend, cause)
        facts: dict[str, Any] = {"backend": worker.backend, "cause": cause.message, "repair": repair}
        when = ""
        worker.retry_at_s = math.inf
        if retry_s is not None:
            worker.retry_at_s = self._effects.now_s + retry_s
            self._effects.wake_by(worker.retry_at_s)
            facts["retry_s"] = retry_s
            when = "; it is tried again after a while"
        self.set_unavailable(worker.backend, Rejection(reason, f"{cause.message}{when}", repair))
        self._effects.emit(act.Note("backend.disabled", facts))

    def reset(self, event: ev.BackendReset) -> None:
        """Somebody repaired it."""
        worker = self.workers[event.backend]
        is_being_tried, worker.times_disabled = worker.times_disabled and worker.state is S.STARTING, 0
        if is_being_tried:
            self.set_unavailable(worker.backend, event.missing)  # calls may wait for it
        elif worker.state in (S.DISABLED, S.BACKOFF, S.ABSENT):
            self._signal(worker, Signal.RESET)
            worker.cause = None
            worker.deaths_s.clear()
            self.set_unavailable(worker.backend, event.missing)
            if worker.waiting:
                self.need(worker)

    # --- others in their place -------------------------------------------------------------------------

    def begin_replacement(self, worker: Worker) -> None:
        """Start another one, which takes over when it is ready."""
        self.need(self.succession.add(worker))

    def take_over(self, successor: Worker) -> Worker:
        """It gets the backend's calls from now on. Returns the one that did: it drains, or has ended."""
        old = self.succession.put_in_place(successor)
        self._signal(old, Signal.REPLACED)
        if old.state is S.DRAINING:
            self.succession.draining[old.backend, old.generation] = old
        pool = self.siblings(old)
        pool[pool.index(old)] = successor
        self._effects.tally.restarts[old.backend, "asked"] += 1
        self.set_unavailable(old.backend, None)
        return old

    def end_at_once(self, worker: Worker) -> None:
        """Somebody wants that. What it is in has failed; the next one starts without a pause."""
        worker.is_forced = True
        self.fault(worker, BackendError(f"lz restart --force ended the {worker.backend} worker"))

    # --- the end of the broker -------------------------------------------------------------------------

    def stop(self, worker: Worker) -> None:
        if worker.state is not S.STOPPED:
            self._signal(worker, Signal.STOP)
        if worker.state is S.STOPPING:
            self._effects.emit(act.StopWorker(worker.backend, worker.generation, worker.identity))

    @property
    def is_stopped(self) -> bool:
        return all(worker.state is S.STOPPED for worker in self.succession.all())

    def retry_in_s(self, worker: Worker, now_s: float) -> float | None:
        """When a worker that waits for its next start gets it; None for one that does not."""
        is_waiting = worker.state in (S.BACKOFF, S.DISABLED) and worker.retry_at_s < math.inf
        return max(worker.retry_at_s - now_s, 0.0) if is_waiting else None

    def unavailable_at(self, now_s: float) -> dict[str, Rejection]:
        """`unavailable`, and of those that crashes have disabled, when they are tried again."""
        found = dict(self.unavailable)
        for backend, reason in self.unavailable.items():
            worker = self.workers[backend]
            left_s = self.retry_in_s(worker, now_s)
            is_tried = left_s is not None or worker.state is not S.DISABLED
            if worker.times_disabled and reason.code is Reason.BACKEND_DISABLED and is_tried:
                assert worker.cause is not None
                when = "is being tried again" if left_s is None else f"tries again in {math.ceil(left_s)} s"
                repair = _repair(backend, worker.cause)
                found[backend] = Rejection(reason.code, f"{worker.cause.message}; {when}", repair)
        return found

    def as_of_now(self, ranked: Iterable[Verdict]) -> tuple[Verdict, ...]:
        """Candidates whose reasons say when a backend is tried again, for errors: rankings are kept for longer."""
        now = self.unavailable_at(self._effects.now_s)
        fresh = {old: now[backend] for backend, old in self.unavailable.items() if now[backend] is not old}
        if not fresh:
            return tuple(ranked)
        return tuple(replace(v, others=tuple(fresh.get(reason, reason) for reason in v.others)) for v in ranked)

    def set_unavailable(self, backend: str, reason: Rejection | None) -> None:
        if reason is None:
            self.unavailable.pop(backend, None)
        else:
            self.unavailable[backend] = reason
        self._engine.epoch += 1

    def _signal(self, worker: Worker, signal: Signal) -> None:
        if self.observer is not None:
            self.observer(worker, signal)
        worker.state = step(worker.state, signal)


def too_long(what: str, worker: Worker, timeout_s: float) -> DeadlineExceeded:
    """Why a worker is killed whose call takes too long."""
    text = (
        f"{what} ran longer than {timeout_s:g} s, and its worker was killed; pass a larger timeout_s if it needs longer"
    )
    return DeadlineExceeded(text, timeout_s=timeout_s, backend=worker.backend)


def exit_text(exit_code: int) -> str:
    """How a process ended, for people."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def disabled(worker: Worker) -> BackendError:
    """For calls that waited for a worker that will not come."""
    assert worker.cause is not None
    error = BackendError(f"the {worker.backend} backend is disabled: {worker.cause.message}")
    error.facts = {**worker.cause.facts, "repair": _repair(worker.backend, worker.cause)}
    return error


def _cannot_load(worker: Worker, error: LayerZeroError) -> bool:
    """It said so: by an exit code, or by what it sent. A signal may have come from anywhere, and one that is too slow
    may have had no time."""
    if worker.fault is not None:
        return worker.fault.code == ProtocolError.code
    return int(error.facts["exit_code"]) >= 0


def _reason(cause: LayerZeroError) -> Reason:
    """Why a backend whose environment does not serve is unavailable."""
    return Reason.ENV_CHANGED if isinstance(cause, EnvChanged) else Reason.BACKEND_IMPORT_FAILED


def _repair(backend: str, cause: LayerZeroError) -> str:
    return cause.facts.get("repair") or f"lz env probe {backend}"
