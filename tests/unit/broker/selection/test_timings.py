from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.broker.selection.timings import ENOUGH, WINDOW, PerfRow, PerfTable, Stat

K, KEY = "torch.matmul", "matmul float32 64x64"
OLD = Stat(count=40, median_us=100.0, p95_us=120.0, variance_us=4.0, warmup_ms=9.0, measured_at_s=-50.0)


def noted(*samples: float, table: PerfTable | None = None) -> PerfTable:
    table = table or PerfTable()
    for at_s, us in enumerate(samples):
        table.note(K, KEY, us, float(at_s))
    return table


def test_statistics_are_those_of_the_samples() -> None:
    """The score and `lz tune` trust these figures."""
    samples = [float(n) for n in range(1, 21)]
    assert noted(*samples).stat(K, KEY) == Stat(20, 10.5, 19.0, statistics.variance(samples), 0.0, 19.0)


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=200))
def test_only_the_newest_window_counts(samples: list[float]) -> None:
    """A machine that became slow must not be judged by its better days; the count still says how often it ran."""
    stat = noted(*samples).stat(K, KEY)
    newest = samples[-WINDOW:]
    assert stat is not None
    assert stat.count == len(samples)
    assert stat.median_us == pytest.approx(statistics.median(newest))
    assert min(newest) <= stat.median_us <= stat.p95_us * (1 + 1e-9) <= max(newest) * (1 + 2e-9)
    assert stat.variance_us >= 0.0


def test_a_first_run_is_kept_apart() -> None:
    """A compilation of seconds is no estimate of the next call."""
    table = PerfTable()
    table.note(K, KEY, 2_000_000.0, 1.0, is_warmup=True)
    assert table.stat(K, KEY) is None
    table.note(K, KEY, 10.0, 2.0)
    assert table.stat(K, KEY) == Stat(1, 10.0, 10.0, 0.0, 2000.0, 2.0)


@pytest.mark.parametrize("us", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_stay_out(us: float) -> None:
    """The number comes from another process."""
    table = noted(us)
    assert (table.stat(K, KEY), len(table)) == (None, 0)


def test_disturbed_runs_stay_out() -> None:
    """A run beside a dying worker says nothing about the kernel."""
    table = noted(10.0)
    table.note(K, KEY, 9999.0, 5.0, is_clean=False)
    stat = table.stat(K, KEY)
    assert stat is not None
    assert (stat.median_us, stat.count) == (10.0, 1)


def test_fresh_samples_take_over_from_stored_ones() -> None:
    """One odd first run must not overturn a stored median; sixteen must."""
    table = PerfTable()
    table.load([PerfRow(K, KEY, OLD)])
    medians = []
    for n in range(ENOUGH):
        table.note(K, KEY, 20.0, float(n))
        stat = table.stat(K, KEY)
        assert stat is not None
        medians.append(stat.median_us)
    assert medians[0] == pytest.approx(95.0)
    assert medians == sorted(medians, reverse=True)
    assert stat == Stat(40 + ENOUGH, 20.0, 20.0, 0.0, 9.0, 15.0)


def test_stored_rows_that_arrive_late_join_fresh_ones() -> None:
    """The database may take a second to open; calls do not wait for it."""
    table = noted(20.0)
    assert table.load([PerfRow(K, KEY, OLD)]) == 1
    stat = table.stat(K, KEY)
    assert stat is not None
    assert (stat.count, stat.median_us, stat.warmup_ms, stat.measured_at_s) == (41, pytest.approx(95.0), 9.0, 0.0)


def test_a_warm_up_of_a_stored_row_renews_its_cost_only() -> None:
    """After a restart the caches are warm or cold again; the kernel is as fast as it was."""
    table = PerfTable()
    table.load([PerfRow(K, KEY, OLD)])
    table.note(K, KEY, 3000.0, 1.0, is_warmup=True)
    assert table.stat(K, KEY) == Stat(40, 100.0, 120.0, 4.0, 3.0, -50.0)


def test_the_table_is_bounded_and_lets_the_unused_go() -> None:
    """A client with ever new shapes must not fill the broker."""
    table = PerfTable(max_rows=2)
    table.note(K, "a", 1.0, 0.0)
    table.note(K, "b", 1.0, 1.0)
    table.note(K, "a", 1.0, 2.0)
    table.note(K, "c", 1.0, 3.0)
    assert [table.stat(K, key) is not None for key in "abc"] == [True, False, True]
    assert len(table) == 2
    assert table.load([PerfRow(K, "d", OLD)]) == 0


def test_loaded_rows_go_before_noted_ones() -> None:
    """What is in use now matters more than what was in use some day."""
    table = PerfTable(max_rows=3)
    table.load([PerfRow(K, "newer", OLD), PerfRow(K, "older", OLD)])
    table.note(K, "a", 1.0, 0.0)
    table.note(K, "b", 1.0, 1.0)
    assert [table.stat(K, key) is not None for key in ("newer", "older", "a", "b")] == [True, False, True, True]


def test_dirty_rows_are_told_once() -> None:
    """The database is written with what changed, not with everything."""
    table = noted(10.0)
    table.note(K, "warm only", 5.0, 0.0, is_warmup=True)
    assert table.take_dirty() == [PerfRow(K, KEY, Stat(1, 10.0, 10.0, 0.0, 0.0, 0.0))]
    assert table.take_dirty() == []
    table.note(K, "warm only", 5.0, 1.0)
    assert [row.key for row in table.take_dirty()] == ["warm only"]


def test_many_dirty_rows_are_taken_in_parts() -> None:
    """The loop must not stand still for a minute's worth of new shapes."""
    table = PerfTable()
    for n in range(5):
        table.note(K, str(n), 1.0, 0.0)
    assert [[row.key for row in table.take_dirty(limit=2)] for _ in range(4)] == [["0", "1"], ["2", "3"], ["4"], []]


def test_forgetting_kernels_leaves_those_whose_ids_begin_likewise() -> None:
    """A rebuilt environment is another program; lib.attention is not lib.attention_varlen."""
    table = noted(10.0)
    table.note(f"{K}_wide", KEY, 5.0, 0.0)
    table.forget({K})
    assert table.stat(K, KEY) is None
    assert [row.kernel_id for row in table.take_dirty()] == [f"{K}_wide"]


def test_steady_fast_runs_are_stable_and_scattered_ones_are_not() -> None:
    """Tuning stops at rows that would not change."""
    steady, scattered = noted(*[10.0] * ENOUGH).stat(K, KEY), noted(*[10.0, 30.0] * ENOUGH).stat(K, KEY)
    few = noted(10.0).stat(K, KEY)
    assert [s is not None and s.is_stable for s in (steady, scattered, few)] == [True, False, False]
