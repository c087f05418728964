"""Backends that are disabled: by crashes, until they are tried again; by their configuration, until it is repaired."""

from __future__ import annotations

import math

import pytest
from tests.unit.broker.driver import Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.ipc.errors import EnvError, OutOfMemory

S = WorkerState


def disabled_driver(**limits: float) -> Driver:
    """Its one backend has died once too often."""
    driver = Driver("alpha", restart_budget=0, **limits)
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    assert driver.state.workers["alpha"].state is S.DISABLED
    return driver


def starts_after(driver: Driver) -> float:
    """When the next start comes by itself."""
    since_s = driver.now_s
    while True:
        driver.now_s = driver.state.wakeup_s
        assert driver.now_s < math.inf
        if any(isinstance(action, act.Spawn) for action in driver(ev.Tick())):
            return driver.now_s - since_s


def reason_of(driver: Driver) -> str:
    """Why the backend is unavailable, as an error says now."""
    (refuse,) = (action for action in driver.call(100) if isinstance(action, act.Refuse))
    (reason,) = refuse.candidates[0]["reasons"]
    assert reason["code"] == "BACKEND_DISABLED"
    assert reason["detail"] in refuse.error.message
    return f"{reason['detail']}; repair: {reason['repair']}"


def test_backend_that_crashes_have_disabled_is_tried_again() -> None:
    """A storm of faults passes; a machine must not be left without backends by it."""
    driver = disabled_driver()
    driver.tick(2.4)
    assert "; tries again in 28 s; repair: lz restart alpha" in reason_of(driver)
    assert driver.state.lifecycle.retry_in_s(driver.state.workers["alpha"], driver.now_s) == pytest.approx(27.6)
    assert driver.tick(27.5) == []
    assert driver.tick(0.2) == [act.Spawn("alpha", 2)]
    assert "; is being tried again; repair: lz restart alpha" in reason_of(driver)
    driver.ready("alpha")
    assert [type(action) for action in driver.ran(driver.serve(2))][-1] is act.Answer


def test_tries_come_later_and_later_while_they_fail() -> None:
    """What is broken for good costs one start in ten minutes."""
    driver = disabled_driver()
    delays_s = []
    for number in range(8):
        delays_s.append(starts_after(driver))
        if number % 2:
            driver.ready("alpha")
            driver.tick(1.0)
        driver.dies("alpha", exit_code=-9 if number % 2 else 1)
    assert delays_s == pytest.approx([30, 60, 120, 240, 480, 600, 600, 600])
    assert "was tried again, and failed" in reason_of(driver)


def test_backend_that_stays_well_is_as_good_as_new() -> None:
    """Its next crash is one like any other's first."""
    driver = Driver("alpha", restart_budget=1, restart_window_s=10.0)
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    starts_after(driver)
    driver.ready("alpha")
    driver.dies("alpha")
    assert driver.state.workers["alpha"].state is S.DISABLED
    assert starts_after(driver) == pytest.approx(30)
    driver.ready("alpha")
    driver.tick(10.0)
    driver.dies("alpha")
    assert driver.state.workers["alpha"].state is S.BACKOFF
    starts_after(driver)
    driver.ready("alpha")
    driver.dies("alpha")
    assert starts_after(driver) == pytest.approx(30)


def test_deadline_of_a_call_is_no_failure_of_the_try() -> None:
    """A short timeout_s is its caller's doing."""
    driver = disabled_driver()
    starts_after(driver)
    driver.ready("alpha")
    driver.serve(2)
    driver.tick(10.0)
    driver.dies("alpha", exit_code=-9)
    assert driver.state.workers["alpha"].state is S.BACKOFF


@pytest.mark.parametrize("exit_code", [-9, -15, -11])
def test_worker_that_a_signal_ends_while_it_loads_has_crashed(exit_code: int) -> None:
    """The signal may have come from outside; an environment that cannot load says so."""
    driver = Driver("alpha")
    driver.call(1)
    driver(ev.ProbeEnded("alpha", None))
    assert driver.dies("alpha", exit_code=exit_code, phase="idle") == []
    assert driver.state.workers["alpha"].state is S.BACKOFF
    starts_after(driver)
    driver.run_of(driver.ready("alpha"))


def test_worker_that_had_no_time_to_load_is_tried_again() -> None:
    """The machine may have been busy; but callers wait for such a start once only."""
    driver = Driver("alpha")
    driver.call(1)
    driver(ev.ProbeEnded("alpha", None))
    driver.tick(60.0)
    driver.dies("alpha", exit_code=-9, phase="idle")
    assert driver.state.workers["alpha"].state is S.DISABLED
    assert starts_after(driver) == pytest.approx(30)


@pytest.mark.parametrize("fault", ["probe", "spawn", "exit code", "message"])
def test_configuration_error_is_not_tried_again(fault: str) -> None:
    """What was said to be missing is missing until somebody repairs it."""
    driver = Driver("alpha")
    driver.call(1)
    error = EnvError("no module named lib")
    if fault == "probe":
        driver(ev.ProbeEnded("alpha", error))
    else:
        driver(ev.ProbeEnded("alpha", None))
    if fault == "spawn":
        driver(ev.SpawnFailed("alpha", 1, error))
    elif fault == "exit code":
        driver.dies("alpha", exit_code=1)
    elif fault == "message":
        driver(ev.WorkerMisbehaved("alpha", 1, "its provider lacks kernels of its descriptor"))
        driver.dies("alpha", exit_code=-9)
    worker = driver.state.workers["alpha"]
    assert worker.state is S.DISABLED
    assert driver.state.lifecycle.retry_in_s(worker, driver.now_s) is None
    driver.tick(0.0)
    assert driver.state.wakeup_s == math.inf
    assert "again" not in driver.state.unavailable_at(driver.now_s)["alpha"].detail


def test_repair_is_believed_at_once() -> None:
    """Whoever says `lz restart` does not want to wait for the next try."""
    driver = disabled_driver()
    driver(ev.BackendReset("alpha", None))
    driver.ran(driver.serve(2))
    driver.dies("alpha")
    assert starts_after(driver) == pytest.approx(30)


def test_calls_wait_for_a_try_that_somebody_has_asked_for() -> None:
    """`lz restart` in the middle of a try: it loads already."""
    driver = disabled_driver()
    starts_after(driver)
    driver(ev.BackendReset("alpha", None))
    assert driver.call(2) == []
    driver.run_of(driver.ready("alpha"))


def test_try_that_hangs_leaves_the_backend_disabled() -> None:
    """Calls must not begin to wait for it because it is being killed."""
    driver = disabled_driver()
    starts_after(driver)
    assert driver.tick(60.0) == [act.Kill("alpha", 2)]
    assert "is being tried again" in reason_of(driver)
    driver.dies("alpha", exit_code=-9)
    assert starts_after(driver) == pytest.approx(60)


def test_broker_that_ends_tries_nothing_again() -> None:
    """Its shutdown would wait for the new worker."""
    driver = disabled_driver()
    assert driver(ev.ShutdownAsked()) == [act.Exit()]
    assert driver.tick(30.0) == []


def test_a_start_that_the_machine_had_no_room_for_is_tried_again() -> None:
    """A disk is full, or descriptors are short, for a moment: nothing is wrong that somebody could repair."""
    driver = Driver("alpha")
    driver.call(1)
    driver(ev.ProbeEnded("alpha", None))
    driver(ev.SpawnFailed("alpha", 1, OutOfMemory("no space left on device")))
    assert "could not be started: no space left on device; tries again in 30 s" in reason_of(driver)
    assert starts_after(driver) == pytest.approx(30)


def test_a_probe_that_the_machine_had_no_room_for_is_run_again() -> None:
    """It is started only after a probe."""
    driver = Driver("alpha")
    driver.call(1)
    driver(ev.ProbeEnded("alpha", OutOfMemory("too many open files")))
    assert driver.state.workers["alpha"].state is S.DISABLED
    driver.now_s = driver.state.wakeup_s
    assert [action for action in driver(ev.Tick()) if isinstance(action, act.Probe | act.Spawn)] == [act.Probe("alpha")]
    driver(ev.ProbeEnded("alpha", None))
    driver.ready("alpha")
    assert driver.state.workers["alpha"].state is S.READY
