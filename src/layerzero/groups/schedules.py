"""In which order ranks of a pipeline make their stages: computed alike by all of them, from three numbers.

Stages are dealt out in turns, stage s to rank s % ranks. A rank with several makes them interleaved: so many
micro-batches as there are ranks by its first stage, these by its next one, and on (Narayanan et al. 2021, section 2.2,
without the backward passes). Transfers have one order for all, so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerzero.ipc.errors import InvalidArgument

FILL, STEADY, DRAIN = "fill", "steady", "drain"


@dataclass(frozen=True)
class Task:
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """`ticks`: of each tick what each rank makes; None where it has nothing to make."""

    ranks: int
    stages: int
    micro_batches: int
    ticks: tuple[tuple[Task | None, ...], ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' ticks in which they have nothing to make, were all stages alike."""
        return 1 - self.stages * self.micro_batches / (len(self.ticks) * self.ranks)

    def phases(self) -> dict[str, int]:
        """How many ticks it fills, is steady and drains: until the last rank has begun, and from where the first one
        has ended."""
        last = self.ranks - 1
        begins = next(n for n, row in enumerate(self.ticks) if row[last] is not None)
        ends = max(n for n, row in enumerate(self.ticks) if row[0] is not None) + 1
        fill, drain = min(begins, ends), len(self.ticks) - max(begins, ends)
        return {FILL: fill, STEADY: len(self.ticks) - fill - drain, DRAIN: drain}

    def transfers(self, tick: int) -> Iterator[tuple[Task, int, int]]:
        """What goes after a tick from one rank to another, in the order of stages: task, source and target."""
        made = [task for task in self.ticks[tick] if task is not None and task.stage + 1 < self.stages]
        for task in sorted(made, key=lambda one: one.stage):
            source, target = task.stage % self.ranks, (task.stage + 1) % self.ranks
            if source != target:
                yield task, source, target

    def chart(self) -> list[str]:
        """A line for each rank: its stages and micro-batches by tick."""
        width = max(len(f"{self.stages - 1}.{self.micro_batches - 1}"), 2)
        rows = [[row[rank] for row in self.ticks] for rank in range(self.ranks)]
        cells = [["" if one is None else f"{one.stage}.{one.micro_batch}" for one in row] for row in rows]
        return [" ".join((cell or ".").rjust(width) for cell in row) for row in cells]


def schedule(ranks: int, stages: int, micro_batches: int) -> Schedule:
    """Raises InvalidArgument."""
    if stages < 1 or stages % ranks:
        raise InvalidArgument(f"stages has {stages}; allowed: {ranks}, or a multiple of that, for {ranks} ranks")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise InvalidArgument(f"micro_batches is {micro_batches!r:.40}; allowed: 1 or more")
    left = {
        rank: sorted(
            (Task(stage, number) for stage in range(rank, stages, ranks) for number in range(micro_batches)),
            key=lambda one: (one.micro_batch // ranks, one.stage, one.micro_batch),
        )
        for rank in range(ranks)
    }
    done: set[Task] = set()
    ticks = []
    while any(left.values()):
        row = [_next(left[rank], done) for rank in range(ranks)]
        for rank, task in enumerate(row):
            if task is not None:
                left[rank].remove(task)
        done.update(task for task in row if task is not None)
        ticks.append(tuple(row))
    return Schedule(ranks, stages, micro_batches, tuple(ticks))


def _next(left: list[Task], done: set[Task]) -> Task | None:
    """The first that has what it takes."""
    return next((one for one in left if not one.stage or Task(one.stage - 1, one.micro_batch) in done), None)
