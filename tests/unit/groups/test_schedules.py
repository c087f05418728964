"""The order in which ranks of a pipeline make their stages."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from layerzero.groups.pipeline import _specs_of
from layerzero.groups.schedules import Schedule, Task, schedule
from layerzero.ipc.errors import InvalidArgument, ProtocolError

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


def program(its: Schedule, rank: int) -> list[Task | tuple[Task, int, int]]:
    """What a rank does, one after the other: stages, and transfers that it has a part in."""
    steps: list[Task | tuple[Task, int, int]] = []
    for tick, row in enumerate(its.ticks):
        task = row[rank]
        if task is not None:
            steps.append(task)
        steps += [moved for moved in its.transfers(tick) if rank in moved[1:]]
    return steps


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_transfers_have_one_order_for_both_ranks_of_each_pair_and_none_waits_for_ever(ranks: int) -> None:
    """As a stream of a GPU has them: each starts once the one before has ended, and ends when both sides are in it."""
    for stages, count in itertools.product(range(ranks, 9, ranks), range(1, 9)):
        its = schedule(ranks, stages, count)
        programs = [program(its, rank) for rank in range(ranks)]
        for one, other in itertools.combinations(range(ranks), 2):
            both = [
                [step for step in programs[rank] if isinstance(step, tuple) and {one, other} == set(step[1:])]
                for rank in (one, other)
            ]
            assert both[0] == both[1]
        left = [deque(steps) for steps in programs]
        here = [{Task(-1, n) for n in range(count)} if not rank else set() for rank in range(ranks)]
        went = True
        while went:
            went = False
            for rank, steps in enumerate(left):
                while steps and isinstance(steps[0], Task):
                    made = steps.popleft()
                    assert Task(made.stage - 1, made.micro_batch) in here[rank]
                    here[rank].add(made)
                    went = True
                if steps:
                    moved, source, target = steps[0]
                    if source == rank and left[target] and left[target][0] == steps[0]:
                        assert moved in here[source]
                        here[target].add(moved)
                        steps.popleft()
                        left[target].popleft()
                        went = True
        assert not any(left), (ranks, stages, count, left)


def test_what_the_last_rank_says_of_the_result_is_looked_at() -> None:
    assert _specs_of(b'[["float32", [2, 3]], ["int64", []]]') == [("float32", (2, 3)), ("int64", ())]
    for told in (
        b"",
        b"what",
        b"7",
        b'[["float33", [1]]]',
        b'[["float32", [-1]]]',
        b'[["float32", [true]]]',
        b'[["float32", 3]]',
        b'[["float32", [1], 2]]',
    ):
        with pytest.raises(ProtocolError, match="the last stage's rank told"):
            _specs_of(told)
