from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.broker.selection.timings import ENOUGH, PerfTable
from layerzero.broker.selection.tuning import HOPELESS, REFRESH_S, Sample, Usage, next_sample

USAGE = Usage(b"sig", "key", 100, "a.op", ("b.op", "c.op"))


def table(**runs: tuple[float, int]) -> PerfTable:
    """`a=(10.0, 3)`: kernel a.op ran three times, 10 us each."""
    made = PerfTable()
    for name, (us, count) in runs.items():
        for _ in range(count):
            made.note(f"{name}.op", "key", us, 0.0)
    return made


def ask(
    made: PerfTable, *usages: Usage, now_s: float = 1.0, share: float = 0.01, spent_s: float = 0.0
) -> Sample | None:
    return next_sample(usages or (USAGE,), made, now_s, share=share, spent_s=spent_s, elapsed_s=100.0)


def test_a_kernel_that_never_ran_comes_first() -> None:
    """A descriptor's priority is all the broker knows of it."""
    assert ask(table(a=(10.0, 50), b=(10.0, 3))) == Sample(b"sig", "c.op")


def test_then_the_one_with_the_fewest_runs() -> None:
    """One run may have met a busy machine."""
    assert ask(table(a=(10.0, 50), b=(10.0, 3), c=(10.0, 2))) == Sample(b"sig", "c.op")


def test_what_is_known_well_is_left_alone() -> None:
    """Tuning ends; it is not a load."""
    assert ask(table(a=(10.0, 50), b=(10.0, ENOUGH), c=(10.0, ENOUGH))) is None


def test_a_hopeless_kernel_is_not_run_again() -> None:
    """Four runs of something eight times slower have told enough."""
    made = table(a=(10.0, 50), b=(10.0, ENOUGH), c=(10.0 * HOPELESS + 1, 4))
    assert ask(made) is None
    assert ask(made, now_s=REFRESH_S + 1, share=1.0) is not None


def test_busy_signatures_come_before_idle_ones() -> None:
    """A run for a signature that is never called teaches nothing."""
    idle, busy = Usage(b"idle", "key", 1, "a.op", ("b.op",)), Usage(b"busy", "other", 50, "a.op", ("b.op",))
    assert ask(PerfTable(), idle, busy) == Sample(b"busy", "b.op")


@pytest.mark.parametrize(("share", "spent_s"), [(0.0, 0.0), (0.01, 1.0), (0.01, 2.0)])
def test_a_spent_budget_ends_it(share: float, spent_s: float) -> None:
    """Background work must stay in the background."""
    assert ask(PerfTable(), share=share, spent_s=spent_s) is None


def test_a_run_that_would_break_the_budget_waits_and_a_cheaper_one_goes() -> None:
    """A second of work is not started for the last millisecond."""
    slow = Usage(b"slow", "key", 100, "a.op", ("b.op",))
    fast = Usage(b"fast", "other", 1, "a.op", ("b.op",))
    made = table(a=(2e6, 5))
    assert ask(made, slow) is None
    assert ask(made, slow, fast) == Sample(b"fast", "b.op")


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(st.floats(1.0, 1e4), st.integers(1, 40)), max_size=3))
def test_it_never_asks_for_the_chosen_kernel_and_always_ends(runs: dict[str, tuple[float, int]]) -> None:
    """Calls measure the chosen one; the rest needs a bounded number of runs."""
    made = table(**runs)
    for _ in range(3 * ENOUGH):
        sample = ask(made)
        if sample is None:
            break
        assert sample.kernel_id in USAGE.others
        made.note(sample.kernel_id, "key", 10.0, 0.5)
    assert ask(made) is None
