"""What kernels that compile are compiled for, and what is being compiled.

Decides only: one compilation at a time for each backend, in the order in which they were asked for; those that a call
waits for come first, among themselves in that order, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason

MAX_QUEUED = 64  # of one backend, and as many that calls wait for; what finds no room is asked for again


@dataclass(frozen=True, slots=True)
class Job:
    """`body`: the encoded Prepare message of a call of this unit."""

    backend: str
    unit: Unit
    body: bytes


@dataclass(slots=True)
class _Queue:
    """Of one backend."""

    running: Job | None = None
    urgent: deque[Job] = field(default_factory=deque)
    jobs: deque[Job] = field(default_factory=deque)

    def start_next(self) -> Job | None:
        waiting = self.urgent or self.jobs
        self.running = waiting.popleft() if waiting else None
        return self.running


class Compilation:
    """`compiled`: units of earlier brokers, by backend."""

    def __init__(self, compiled: Mapping[str, Iterable[Unit]] | None = None) -> None:
        self._compiled: set[Unit] = {unit for units in (compiled or {}).values() for unit in units}
        self._failed: dict[Unit, str] = {}
        self._queues: dict[str, _Queue] = {}

    @property
    def failures(self) -> Mapping[Unit, str]:
        """Why units could not be compiled."""
        return self._failed

    def rejection(self, unit: Unit) -> Rejection | None:
        """Why the kernel may not serve calls of this unit yet, or at all."""
        if unit in self._compiled:
            return None
        if unit in self._failed:
            return Rejection(Reason.COMPILE_FAILED, f"{unit.calls}: {self._failed[unit]}")
        return Rejection(Reason.NOT_COMPILED, f"for {unit.calls}; this is done beside calls, or by lz.warmup")

    def ask(self, job: Job, *, is_urgent: bool = False) -> Job | None:
        """Queue a job, unless it is there or over. `is_urgent`: a call waits for it. Returns the job to start now."""
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
        """Whether it is being compiled, or waits for its turn."""
        queue = self._queues.get(job.backend, _Queue())
        return any(other.unit == job.unit for other in (queue.running, *queue.urgent, *queue.jobs) if other is not None)

    def end(self, backend: str, unit: Unit, failure: str) -> Job | None:
        """A job is over; `failure` is empty when it went well. Returns the next one to start."""
        if failure:
            self._failed[unit] = failure
        else:
            self._compiled.add(unit)
        return self._queues[backend].start_next()

    def forgive(self, kernel_ids: Iterable[str]) -> None:
        """After a repair of their backend: what has failed may be tried again."""
        gone = set(kernel_ids)
        self._failed = {unit: why for unit, why in self._failed.items() if unit.kernel_id not in gone}

    def running(self) -> list[Unit]:
        """What is being compiled."""
        return [queue.running.unit for queue in self._queues.values() if queue.running is not None]

    def count(self) -> int:
        """Units that are compiled."""
        return len(self._compiled)
