"""The order in which ranks of a pipeline make their stages."""

from __future__ import annotations

import pytest

from layerzero.groups.schedules import Task, schedule
from layerzero.ipc.errors import InvalidArgument

SHAPES = [(ranks, ranks * turns, count) for ranks in (1, 2, 3, 4) for turns in (1, 2, 3) for count in (1, 2, 3, 5, 8)]


@pytest.mark.parametrize("turn", range(3))
def test_each_stage_of_each_micro_batch_is_made_once_where_it_belongs_after_what_it_takes(turn: int) -> None:
    for ranks, stages, count in SHAPES[turn::3]:
        its, made, here = schedule(ranks, stages, count), set[Task](), set[tuple[int, Task]]()
        here |= {(0, Task(-1, n)) for n in range(count)}
        for tick, row in enumerate(its.ticks):
            for rank, task in enumerate(row):
                if task is not None:
                    assert task not in made
                    assert task.stage % ranks == rank
                    assert (rank, Task(task.stage - 1, task.micro_batch)) in here
                    here.add((rank, task))
                    made.add(task)
            here |= {(target, task) for task, source, target in its.transfers(tick) if (source, task) in here}
        assert len(made) == stages * count
        assert sum(its.phases().values()) == len(its.ticks)


def test_interleaved_stages_fill_and_drain_in_less_time() -> None:
    """With as many micro-batches as ranks, or a multiple, there is no more waiting than to fill and to drain."""
    for ranks in (1, 2, 3, 4):
        for turns in (1, 2, 3):
            its = schedule(ranks, ranks * turns, 2 * ranks)
            assert len(its.ticks) == 2 * ranks * turns + ranks - 1
            assert its.phases()["fill"] == its.phases()["drain"] == ranks - 1
    assert schedule(2, 4, 2).bubble < schedule(2, 2, 2).bubble


def test_a_chart_has_a_line_for_each_rank() -> None:
    assert schedule(2, 4, 2).chart() == ["0.0 0.1 2.0 2.1   .", "  . 1.0 1.1 3.0 3.1"]


def test_what_cannot_be_dealt_out_is_refused() -> None:
    for args in ((2, 3, 1), (2, 0, 1), (2, 2, 0), (2, 2, True), (2, 2, 1.5)):
        with pytest.raises(InvalidArgument, match="allowed"):
            schedule(*args)  # type: ignore[arg-type]
