"""What the core counts: each call once, however it ends."""

from __future__ import annotations

from tests.unit.broker.driver import CLIENT, GENTLE, Driver, poisoned

from layerzero.broker.core import events as ev
from layerzero.broker.core.tally import Tally
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.shm.counter_words import BUCKETS, REST, Growth, Label


def tally_of(driver: Driver) -> Tally:
    return driver.state.effects.tally


def answered(driver: Driver) -> dict[tuple[str, ...], int]:
    return {key: its.count for key, its in tally_of(driver).durations.items()}


def test_a_call_counts_once_and_its_failed_attempt_apart() -> None:
    """With the time from its arrival to its answer, and the time that it waited."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    driver.now_s += 0.5
    driver.raised(run, GENTLE)
    driver.now_s += 0.25
    driver.ran(driver.run_of(driver.ready("beta")))
    assert answered(driver) == {("silu", "beta", "broker"): 1}
    assert tally_of(driver).durations["silu", "beta", "broker"].sum_ns == 750_000_000
    assert tally_of(driver).fallbacks == {("silu", "alpha", "BACKEND_ERROR"): 1}
    assert not tally_of(driver).errors
    assert [its.count for its in tally_of(driver).queued.values()] == [1]


def test_an_error_is_no_call_that_ended_well() -> None:
    """By its code, and the last backend that was tried."""
    driver = Driver()
    driver.raised(driver.serve(1), InvalidArgument("wrong"))
    assert answered(driver) == {}
    assert tally_of(driver).errors == {("silu", "none", "INVALID_ARGUMENT"): 1}
    assert tally_of(poisoned()).errors == {("silu", "beta", "POISON"): 1}
    assert tally_of(poisoned()).restarts == {("alpha", "crash"): 1, ("beta", "crash"): 1}


def test_a_call_that_never_became_one_is_an_error() -> None:
    """Refused as it came."""
    driver = Driver(max_in_flight=1)
    driver.serve(1)
    driver.call(2)
    assert tally_of(driver).errors == {("silu", "none", "BUSY"): 1}


def test_a_call_whose_client_has_left_is_cancelled() -> None:
    """Once, when its worker is done with it."""
    driver = Driver()
    run = driver.serve(1)
    driver(ev.ClientLeft(CLIENT))
    driver.ran(run)
    assert answered(driver) == {}
    assert tally_of(driver).errors == {("silu", "none", "CANCELLED"): 1}


def test_pages_of_counters_add_up() -> None:
    """Of several clients, and of those that had no room for a name."""
    driver = Driver()
    some = Growth(
        Label("silu", "alpha.silu", "express"), [2] + [0] * (BUCKETS - 1), 900, 64, {"CUDA": 1}, {"DEADLINE": 2}
    )
    rest = Growth(REST, [1] + [0] * (BUCKETS - 1), 100, 0, {}, {})
    for client in (1, 2):
        driver(ev.CountersPolled(client, [("alpha", some), ("", rest)]))
    assert answered(driver) == {("silu", "alpha", "express"): 4, ("other", "other", "other"): 2}
    tally = tally_of(driver)
    assert tally.durations["silu", "alpha", "express"].sum_ns == 1800
    assert tally.copied == {("silu", "express"): 128}
    assert (tally.errors, tally.fallbacks) == ({("silu", "alpha", "CUDA"): 2}, {("silu", "alpha", "DEADLINE"): 4})
