"""Orders of a segment's steps: none comes before what it needs, and few groups are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.plans.scheduling import (
    MAX_REORDERED,
    Access,
    dependencies,
    in_order,
    waves,
)

Flow = list[tuple[str | None, list[Access]]]
ACCESSES = st.builds(
    lambda memory, begin, length, is_write: Access(memory, begin, begin + length, is_write),
    st.sampled_from("ab"),
    st.integers(0, 8),
    st.integers(1, 4),
    st.booleans(),
)
FLOWS: st.SearchStrategy[Flow] = st.lists(
    st.tuples(st.sampled_from(["x", "y", "z", None]), st.lists(ACCESSES, max_size=3)), max_size=14
)


def room(most: int) -> Callable[[], Callable[[int], bool]]:
    def make() -> Callable[[int], bool]:
        taken: list[int] = []

        def take(number: int) -> bool:
            taken.append(number)
            return len(taken) <= most

        return take

    return make


def clash(one: Sequence[Access], other: Sequence[Access]) -> bool:
    return any(
        a.memory == b.memory and a.begin < b.end and b.begin < a.end and (a.is_write or b.is_write)
        for a in one
        for b in other
    )


def bits(mask: int) -> set[int]:
    return {n for n in range(mask.bit_length()) if mask >> n & 1}


@given(FLOWS)
def test_a_step_comes_after_all_that_it_shares_bytes_with(flow: Flow) -> None:
    """But for two that only read them."""
    steps = [accesses for _, accesses in flow]
    for number, mask in enumerate(dependencies(steps)):
        assert bits(mask) == {other for other in range(number) if clash(steps[other], steps[number])}


@given(FLOWS, st.integers(1, 5))
def test_waves_hold_to_the_order_and_their_groups_are_apart(flow: Flow, most: int) -> None:
    workers, steps = [worker for worker, _ in flow], [accesses for _, accesses in flow]
    after = dependencies(steps)
    done: set[int] = set()
    for wave in waves(workers, after, room(most)):
        its = [workers[group[0]] for group in wave]
        assert wave
        assert len(its) == len(set(its))
        assert its == [None] or None not in its
        for group in wave:
            assert len(group) <= most
            assert len({workers[n] for n in group}) == 1
            assert workers[group[0]] is not None or len(group) == 1
            for place, number in enumerate(group):
                assert bits(after[number]) <= done | set(group[:place])
        assert done.isdisjoint(n for group in wave for n in group)
        done |= {n for group in wave for n in group}
    assert done == set(range(len(flow)))


def line(worker: str, place: int) -> list[Access]:
    """A step on what its worker made before."""
    return [Access(worker, 8 * place, 8 * place + 8, False), Access(worker, 8 * place + 8, 8 * place + 16, True)]


def test_branches_that_alternate_are_drawn_together_and_run_at_once() -> None:
    """x and y in turns; then one that takes what both have made, which holds up neither."""
    steps = [line(worker, n // 2) for n, worker in enumerate("yxyxyxyx")]
    join = [Access("x", 32, 40, False), Access("y", 32, 40, False), Access("z", 0, 8, True)]
    found = waves("yxyxyxyxx", dependencies([*steps, join]), room(99))
    assert found == [[[0, 2, 4, 6], [1, 3, 5, 7]], [[8]]]


def test_steps_of_one_worker_stay_in_their_order() -> None:
    assert waves("x" * 7, in_order(7), room(3)) == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]


def test_a_very_long_segment_stays_in_its_order() -> None:
    """What it would take to look at all pairs of its steps is not worth it."""
    assert dependencies([[]] * (MAX_REORDERED + 1)) == in_order(MAX_REORDERED + 1)
