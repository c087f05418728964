"""Slots of an execution plan: memory is shared only by what is not needed at the same time."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.plans.layout import lay_out
from layerzero.client.plans.passes import SLOT, Program
from layerzero.client.plans.recording import STEP, Recording, Step, Storage, Value
from layerzero.ipc.shm.memory import ALIGNMENT


def program(steps: list[tuple[int, list[int]]], own: Collection[int] = ()) -> Program:
    """Each step makes a storage of so many bytes and reads those that the steps of these numbers made. `own`: steps of
    this process."""
    recording = Recording()
    for number, (nbytes, _) in enumerate(steps):
        storage = Storage(number, STEP, number, 0, nbytes)
        recording.storages.append(storage)
        recording.values.append(Value(number, None, None, storage, 0))
    for number, (_, reads) in enumerate(steps):
        made = recording.storages[number]
        step = Step(number, "op", "", (), {}, tuple(reads), made=(number,), fresh=(made,))
        recording.steps.append(step)
    homes = {storage.number: SLOT for storage in recording.storages}
    return Program(recording, list(recording.steps), chained=set(range(len(steps))) - set(own), homes=homes)


@st.composite
def flows(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    count = draw(st.integers(1, 30))
    sizes = st.integers(1, 5000)
    return [
        (draw(sizes), draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True)) if n else []) for n in range(count)
    ]


@given(flows())
def test_no_two_that_are_needed_at_once_overlap(steps: list[tuple[int, list[int]]]) -> None:
    """A step reads its arguments while it writes its result, so both ends of a lifetime count."""
    layout = lay_out(program(steps))
    last = {n: max([n, *(m for m, (_, reads) in enumerate(steps) if n in reads)]) for n in range(len(steps))}
    for n, (nbytes, _) in enumerate(steps):
        one = layout.slots[n]
        assert one.nbytes >= nbytes
        assert one.offset % ALIGNMENT == one.nbytes % ALIGNMENT == 0
        assert (one.first, one.last) == (n, last[n])
        assert one.offset + one.nbytes <= layout.peak_bytes
        for m in range(n):
            other = layout.slots[m]
            is_apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            assert is_apart or last[m] < n


@given(flows())
def test_a_layout_takes_at_most_all_slots_and_at_least_what_is_live(
    steps: list[tuple[int, list[int]]],
) -> None:
    """The sum is what there would be without sharing."""
    layout = lay_out(program(steps))
    live = [
        sum(slot.nbytes for slot in layout.slots.values() if slot.first <= at <= slot.last) for at in range(len(steps))
    ]
    assert max(live) <= layout.peak_bytes <= layout.sum_bytes


def test_a_line_of_equal_results_needs_two() -> None:
    """Whatever its length."""
    layout = lay_out(program([(4096, [n - 1] if n else []) for n in range(50)]))
    assert (layout.peak_bytes, layout.sum_bytes) == (2 * 4096, 50 * 4096)


@given(flows(), st.data())
def test_what_may_run_at_the_same_time_shares_nothing(steps: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    """Of two slots with bytes in common all steps of one come before all of the other, whatever the workers' pace:
    because they need it, or because one worker has both."""
    workers = dict(enumerate(data.draw(st.lists(st.sampled_from("xyz"), min_size=len(steps), max_size=len(steps)))))
    layout = lay_out(program(steps), (), workers)
    ended_before: list[set[int]] = []
    for n, (_, reads) in enumerate(steps):
        direct = {*reads, *(m for m in range(n) if workers[m] == workers[n])}
        ended_before.append(direct.union(*(ended_before[m] for m in direct)))
    users = [{n, *(m for m, (_, reads) in enumerate(steps) if n in reads)} for n in range(len(steps))]
    for n, one in layout.slots.items():
        assert one.offset + one.nbytes <= layout.peak_bytes
        for m in range(n):
            other = layout.slots[m]
            is_apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            assert is_apart or users[m] <= ended_before[n] or users[n] <= ended_before[m]


def test_branches_have_memory_of_their_own_only_where_workers_differ() -> None:
    """Two lines, one after the other."""
    steps: list[tuple[int, list[int]]] = [(4096, [n - 1] if n not in (0, 10) else []) for n in range(20)]
    for workers, slots in (("x" * 20, 2), ("x" * 10 + "y" * 10, 4), ("", 2)):
        assert lay_out(program(steps), (), dict(enumerate(workers))).peak_bytes == slots * 4096


def test_steps_that_touch_nothing_need_nothing() -> None:
    """A view that nobody takes as an array keeps no slot alive."""
    steps: list[tuple[int, list[int]]] = [(4096, []), (4096, [0]), (4096, [1]), (4096, [2]), (64, [0])]
    assert lay_out(program(steps)).peak_bytes == 3 * 4096
    assert lay_out(program(steps), {4}).peak_bytes == 2 * 4096


@given(flows(), st.data())
def test_a_step_of_this_process_may_write_over_what_it_takes(
    steps: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """And a worker's may not; nor do two results of one step share anything, or what is needed later."""
    own = data.draw(st.sets(st.integers(0, len(steps) - 1)))
    layout = lay_out(program(steps, own=own))
    over = set()
    for n, one in layout.slots.items():
        for m in range(n):
            other = layout.slots[m]
            if one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes:
                assert other.last < one.first or (other.last == one.first and n in own)
                over |= {n} if other.last == one.first else set()
    assert layout.in_place == len(over)
    assert layout.peak_bytes <= lay_out(program(steps)).sum_bytes


def test_a_line_of_this_process_needs_one() -> None:
    """Whatever its length; with a worker's step in it, two."""
    steps: list[tuple[int, list[int]]] = [(4096, [n - 1] if n else []) for n in range(50)]
    layout = lay_out(program(steps, own=range(50)))
    assert (layout.peak_bytes, layout.in_place) == (4096, 49)
    assert lay_out(program(steps, own=set(range(50)) - {7})).peak_bytes == 2 * 4096


def test_results_of_one_step_never_share() -> None:
    """Also where nobody needs the one that is written last."""
    made = program([(4096, []), (4096, [])], own={1})
    made.recording.steps[1].fresh = tuple(made.recording.storages)
    made.steps = [made.recording.steps[1]]
    assert lay_out(made).peak_bytes == 2 * 4096
