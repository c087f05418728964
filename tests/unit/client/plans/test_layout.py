"""Slots of an execution plan: memory is shared only by what is not needed at the same time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.plans.layout import lay_out
from layerzero.client.plans.passes import SLOT, Program
from layerzero.client.plans.recording import STEP, Recording, Step, Storage, Value
from layerzero.ipc.shm.memory import ALIGNMENT


def program(steps: list[tuple[int, list[int]]]) -> Program:
    """Each step makes a storage of so many bytes and reads those that the steps of these numbers made."""
    recording = Recording()
    for number, (nbytes, _) in enumerate(steps):
        storage = Storage(number, STEP, number, 0, nbytes)
        recording.storages.append(storage)
        recording.values.append(Value(number, None, None, storage, 0))
    for number, (_, reads) in enumerate(steps):
        made = recording.storages[number]
        step = Step(number, "op", "", (), {}, tuple(reads), made=(number,), fresh=(made,))
        recording.steps.append(step)
    return Program(recording, list(recording.steps), homes={storage.number: SLOT for storage in recording.storages})


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
