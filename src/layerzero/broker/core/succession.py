"""Workers beside those that get a backend's calls: some start to take over, others finish what they have."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

from layerzero.broker.core.model import Worker


@dataclass(eq=False)
class Succession:
    """`workers`: those that get calls, by backend. `failures`: why the last one that was to take over did not; no entry
    where it did."""

    workers: MutableMapping[str, Worker]
    successors: dict[str, Worker] = field(default_factory=dict)
    draining: dict[tuple[str, int], Worker] = field(default_factory=dict)  # by backend and generation
    failures: dict[str, str] = field(default_factory=dict)
    _generations: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.successors or self.draining)

    def all(self) -> Iterator[Worker]:
        """Whoever may have a process."""
        yield from self.workers.values()
        if self:
            yield from self.successors.values()
            yield from self.draining.values()

    def of(self, backend: str) -> list[Worker]:
        """The backend's, first the one that gets its calls."""
        if not self:
            return [self.workers[backend]] if backend in self.workers else []
        return [worker for worker in self.all() if worker.backend == backend]

    def is_beside(self, worker: Worker) -> bool:
        """Whether another one gets the backend's calls."""
        return self.workers[worker.backend] is not worker

    def find(self, backend: str, generation: int) -> Worker | None:
        """By its start."""
        return next((one for one in self.of(backend) if one.generation == generation), None)

    def next_generation(self, backend: str) -> int:
        number = self._generations[backend] = self._generations.get(backend, 0) + 1
        return number

    def add(self, worker: Worker) -> Worker:
        """One that is to take over from this."""
        self.failures.pop(worker.backend, None)
        successor = self.successors[worker.backend] = Worker(
            worker.backend, has_served=worker.has_served, restarts=worker.restarts + 1
        )
        return successor

    def put_in_place(self, successor: Worker) -> Worker:
        """It gets the calls from now on. Returns the one that did."""
        backend = successor.backend
        old = self.workers[backend]
        del self.successors[backend]
        self.workers[backend] = successor
        successor.answered, successor.failed = old.answered, old.failed
        old.answered = old.failed = 0
        return old

    def dismiss(self, worker: Worker, why: str) -> None:
        """It has no process. `why`: it does not take over, if that was what it was there for."""
        if self.successors.get(worker.backend) is worker:
            del self.successors[worker.backend]
            self.failures[worker.backend] = why
        elif self.draining.pop((worker.backend, worker.generation), None) is not None:
            current = self.workers[worker.backend]
            current.answered += worker.answered
            current.failed += worker.failed
