"""Calls with new extents under a lease that covers them: right, explained, and brought back when something breaks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.backends.toy import KILL, fault
from tests.process.harness import Site, wait_until

import layerzero as lz

LENGTHS = range(65, 129)  # what is measured as one


@pytest.fixture
def connected(connected: Site) -> Site:
    connected.wait_ready("alpha", "beta")  # news to the broker, which takes leases back for it
    return connected


def call(length: int, first: float = 0.5, **more: object) -> lz.SelectionReport:
    """Run silu on so many numbers, check what it gives, return the report."""
    x = np.linspace(-3, 3, length, dtype=np.float32)
    x[0] = first
    wide = x.astype(np.float64)
    np.testing.assert_allclose(lz.silu(x, **more), wide / (1 + np.exp(-wide)), rtol=1e-6)  # type: ignore[arg-type]
    report = lz.last_report()
    assert report is not None
    return report


def settle(length: int = 100, **more: object) -> None:
    wait_until(lambda: call(length, **more).path == "express")


def test_a_new_length_leaves_the_broker_out(connected: Site) -> None:
    """At its first call, with a report that says whose decision it follows."""
    settle()
    before = connected.backend("alpha")["answered"]
    reports = [call(length) for length in LENGTHS]
    assert {report.path for report in reports} == {"express"}
    assert {report.kernel_id for report in reports} == {"alpha.silu"}
    assert "decided for a call with other extents" in str(reports[0])
    assert {c.backend for c in reports[0].candidates} >= {"alpha", "beta"}
    assert connected.backend("alpha")["answered"] == before + len(LENGTHS)


def test_lengths_that_come_once_settle_together(connected: Site) -> None:
    """As a decoder's, which never come again."""
    paths = [call(length).path for length in LENGTHS]
    assert paths[0] == "broker"
    assert paths[-1] == "express"


def test_what_is_measured_apart_is_decided_apart(connected: Site) -> None:
    settle()
    assert call(129).path == call(64).path == "broker"


def test_other_dtypes_and_attributes_are_other_calls(connected: Site) -> None:
    settle()
    lz.silu(np.zeros(90))
    report = lz.last_report()
    assert report is not None
    assert report.path == "broker"
    assert call(91, backend="beta").backend == "beta"


def test_threads_with_new_lengths_get_their_own_results(connected: Site) -> None:
    """One has the lane, the others' calls go by the broker, which hears of those lengths then."""
    settle()
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(call, [*LENGTHS] * 2))
    assert {report.kernel_id for report in reports} == {"alpha.silu"}
    assert "express" in {report.path for report in reports}


def test_new_lengths_write_where_the_caller_says(connected: Site) -> None:
    settle()
    for length in LENGTHS:
        x, out = np.full(length, length / 64, np.float32), lz.empty((length,), np.float32)
        lz.silu(x, out=out)
        np.testing.assert_allclose(out, x / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6)
        report = lz.last_report()
        assert report is not None
        assert report.path == "express"


def test_a_policy_change_takes_neighbours_back(new_site: Callable[..., Site]) -> None:
    site = new_site()
    site.connect()
    site.wait_ready("alpha", "beta")
    settle()
    assert call(90).path == "express"
    site.set_policy("avoid_kernels: [alpha.*]\n")
    wait_until(lambda: call(91).backend == "beta")
    assert call(90).backend == "beta"
    assert call(92).backend == "beta"


def test_a_worker_that_dies_of_a_neighbour_costs_one_attempt(connected: Site) -> None:
    """The next kernel has the answer, and the report the attempt."""
    settle()
    report = call(77, fault(KILL, "alpha"))
    assert (report.backend, [attempt.outcome for attempt in report.attempts]) == ("beta", ["BACKEND_ERROR", None])
    assert report.attempts[0].kernel_id == "alpha.silu"
    connected.wait_ready("alpha")
    assert call(78).backend == "alpha"


def test_inputs_that_kill_every_worker_are_poison_also_as_a_neighbour(connected: Site) -> None:
    """Two deaths, not more; and as long as that is remembered, each new length is looked at."""
    settle()
    with pytest.raises(lz.Poison) as caught:
        call(77, fault(KILL))
    assert [attempt.outcome for attempt in caught.value.report.attempts] == ["BACKEND_ERROR"] * 2
    connected.wait_ready("alpha", "beta")
    with pytest.raises(lz.Poison) as caught:
        call(77, fault(KILL))
    assert caught.value.report.attempts == ()
    settle()
    assert call(79).path == "broker"
