"""Compilation: for which units kernels are compiled, and which jobs are under way.

It decides only, and starts nothing: one job at a time for each backend, in the order in which they were asked for; jobs
that a call waits for come first, among themselves in that order, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason

MAX_QUEUED = 64  # jobs of one backend, and as many that calls wait for; a job that finds no room is asked for again


@dataclass(frozen=True, slots=True)
class Job:
    """A unit to be compiled by a worker of its backend. `body`: the encoded Prepare message of a call of this unit."""

    backend: str
    unit: Unit
    body: bytes


@dataclass(slots=True)
class _Queue:
    """The jobs of one backend."""

    running: Job | None = None
    urgent: deque[Job] = field(default_factory=deque)
    jobs: deque[Job] = field(default_factory=deque)

    def start_next(self) -> Job | None:
        waiting = self.urgent or self.jobs
        self.running = waiting.popleft() if waiting else None
        return self.running


class Compilation:
    """What is compiled and what is to be. `compiled`: units that earlier brokers had compiled, by backend."""

    def __init__(self, compiled: Mapping[str, Iterable[Unit]] | None = None) -> None:
        self._compiled: set[Unit] = {unit for units in (compiled or {}).values() for unit in units}
        self._failed: dict[Unit, str] = {}
        self._queues: dict[str, _Queue] = {}

    @property
    def failures(self) -> Mapping[Unit, str]:
        """The units that could not be compiled, and why."""
        return self._failed

    def rejection(self, unit: Unit) -> Rejection | None:
        """Why the unit's kernel may not serve its calls yet, or at all; None when the unit is compiled."""
        if unit in self._compiled:
            return None
        if unit in self._failed:
            return Rejection(Reason.COMPILE_FAILED, f"{unit.calls}: {self._failed[unit]}")
        return Rejection(Reason.NOT_COMPILED, f"for {unit.calls}; this is done beside calls, or by lz.warmup")

    def ask(self, job: Job, *, is_urgent: bool = False) -> Job | None:
        """Queue a job, unless its unit is queued, compiled or has failed. `is_urgent`: a call waits for it. Returns the
        job to start now: this one, or None."""
        if job.unit in self._compiled or job.unit in self._failed:
            return None
        queue = self._queues.setdefault(job.backend, _Queue())
        if queue.running is None:
            queue.running = job
            return job
        if queue.running.unit == job.unit:
            return None
        if any(other.unit == job.unit for other in queue.urgent):
            return None
        queued = next((other for other in queue.jobs if other.unit == job.unit), None)
        if is_urgent and len(queue.urgent) < MAX_QUEUED:
            queue.urgent.append(job)
            if queued is not None:
                queue.jobs.remove(queued)
        elif queued is None and len(queue.jobs) < MAX_QUEUED:
            queue.jobs.append(job)
        return None

    def is_under_way(self, job: Job) -> bool:
        """Whether the job's unit is being compiled, or is queued."""
        queue = self._queues.get(job.backend, _Queue())
        return any(other.unit == job.unit for other in (queue.running, *queue.urgent, *queue.jobs) if other is not None)

    def end(self, backend: str, unit: Unit, failure: str) -> Job | None:
        """The backend's job of this unit is over; `failure` is empty when it went well. Returns its next job to
        start."""
        if failure:
            self._failed[unit] = failure
        else:
            self._compiled.add(unit)
        return self._queues[backend].start_next()

    def forgive(self, kernel_ids: Iterable[str]) -> None:
        """These kernels' backend was repaired: units of theirs that have failed may be tried again."""
        gone = set(kernel_ids)
        self._failed = {unit: why for unit, why in self._failed.items() if unit.kernel_id not in gone}

    def running(self) -> list[Unit]:
        """The units that are being compiled."""
        return [queue.running.unit for queue in self._queues.values() if queue.running is not None]

    def count(self) -> int:
        """How many units are compiled."""
        return len(self._compiled)
