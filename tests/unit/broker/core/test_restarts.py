"""Starts and ends of workers and of the broker, by example."""

from __future__ import annotations

import math

import pytest
from tests.unit.broker.driver import CLIENT, GENTLE, Driver, kinds, refusal

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.worker_fsm import TRANSITIONS, IllegalTransition, Signal, WorkerState, step
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import EnvError

# --- rest ----------------------------------------------------------------------------------------------------


def test_worker_that_nobody_needs_ends_and_starts_when_it_is_needed() -> None:
    """What it holds of a GPU is free meanwhile. It is no crash: no back-off, no budget, no cause."""
    driver = Driver("alpha", restart_budget=0)
    driver.ran(driver.serve(1))
    for generation in (1, 2):
        assert kinds(driver(ev.WorkerSpared("alpha"))) == ["Kill"]
        assert "Spawn" not in kinds(driver.dies("alpha"))
        worker = driver.state.workers["alpha"]
        assert (worker.state, worker.cause, worker.restarts) == (WorkerState.ABSENT, None, 0)
        assert "alpha" not in driver.state.unavailable
        assert worker.generation == generation
        driver.ran(driver.serve(10 * generation))


def test_worker_that_has_something_to_do_does_not_rest() -> None:
    driver = Driver("alpha")
    assert not driver(ev.WorkerSpared("alpha")), "it does not run"
    run = driver.serve(1)
    assert not driver(ev.WorkerSpared("alpha"))
    driver.ran(run)
    assert driver(ev.WorkerSpared("alpha"))


def test_call_that_comes_while_a_worker_ends_to_rest_is_served() -> None:
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver(ev.WorkerSpared("alpha"))
    driver.call(2)
    driver.dies("alpha")
    driver(ev.ProbeEnded("alpha", None))
    driver.ready("alpha")
    assert driver.state.workers["alpha"].state is WorkerState.READY
    assert driver.state.workers["alpha"].running, "the call has gone to the next worker"


def test_pinned_call_that_comes_while_a_worker_ends_to_rest_is_served() -> None:
    """It has nowhere else to go, and has not begun."""
    driver = Driver("alpha", restart_budget=0)
    driver.route(2, backend="alpha")
    driver.ran(driver.serve(1, 2))
    driver(ev.WorkerSpared("alpha"))
    driver.call(2, 2)
    assert not [one for one in driver.dies("alpha") if type(one).__name__ == "Refuse"]
    driver.ready("alpha")
    assert driver.state.workers["alpha"].running


# --- restarts ------------------------------------------------------------------------------------------------


def test_worker_that_is_in_a_trial_for_too_long_ends_and_its_calls_go_to_the_next_one() -> None:
    """It was at no call of theirs; and it has not crashed."""
    driver = Driver("alpha", restart_budget=0)
    driver.route(2, backend="alpha")
    run = driver.serve(1, 2)
    assert kinds(driver(ev.WorkerMisbehaved("alpha", 1, "a trial ran too long", is_late=True))) == ["Kill"]
    assert not driver(ev.WorkerMisbehaved("alpha", 1, "a trial ran too long", is_late=True))
    driver.call(2, 2)
    assert not [one for one in driver.dies("alpha", exit_code=-9) if type(one).__name__ == "Refuse"]
    worker = driver.state.workers["alpha"]
    assert (worker.state, len(worker.deaths_s)) == (WorkerState.BACKOFF, 0)
    driver.tick(1.0)
    driver.ready("alpha")
    assert [call.seq for call in worker.running] == [1, 2]
    assert worker.running[0].dispatch != run.dispatch


def test_restarts_back_off_and_end_at_the_budget_with_a_repair() -> None:
    """A backend that keeps dying must not eat the machine, and somebody must learn how to repair it."""
    driver = Driver("alpha", restart_budget=2)
    driver.ran(driver.serve(1))
    delays = []
    for _ in range(2):
        driver.dies("alpha")
        delays.append(driver.state.wakeup_s - driver.now_s)
        driver.now_s = driver.state.wakeup_s
        assert kinds(driver(ev.Tick())) == ["Spawn"]
        driver.ready("alpha")
    assert [0.75 * s <= delay <= 1.25 * s for delay, s in zip(delays, (0.5, 1.0), strict=True)] == [True, True]
    driver.dies("alpha")
    assert driver.state.workers["alpha"].state is WorkerState.DISABLED
    refuse = refusal(driver.call(2))
    (reason,) = refuse.candidates[0]["reasons"]
    assert reason["code"] == "BACKEND_DISABLED"
    assert reason["repair"] == "lz restart alpha"


def test_deaths_outside_the_window_are_forgotten() -> None:
    """A crash a day is no crash loop."""
    driver = Driver("alpha", restart_budget=1, restart_window_s=30.0)
    driver.ran(driver.serve(1))
    for _ in range(5):
        driver.dies("alpha")
        assert driver.state.workers["alpha"].state is WorkerState.BACKOFF
        driver.tick(40.0)
        driver.ready("alpha")


def test_worker_that_never_loads_is_a_configuration_failure() -> None:
    """It is not tried again in a loop; the caller learns the cause and the repair, waiting or not."""
    driver = Driver("alpha")
    driver.route(2, backend="alpha")
    driver.call(1, route=2)
    driver(ev.ProbeEnded("alpha", None))
    refuse = refusal(driver.dies("alpha", exit_code=1, stderr="Traceback\nImportError: libfoo.so.9 is missing\n"))
    assert "libfoo.so.9 is missing" in refuse.error.message
    assert refuse.error.facts["repair"] == "lz env probe alpha"
    assert driver.state.workers["alpha"].state is WorkerState.DISABLED
    (reason,) = refusal(driver.call(2, route=2)).candidates[0]["reasons"]
    assert reason["code"] == "BACKEND_IMPORT_FAILED"


@pytest.mark.parametrize("has_served", [False, True])
def test_worker_that_lacked_memory_is_restarted_when_there_is_more(has_served: bool) -> None:
    """Its environment is sound; neither a probe nor a restart alone would help."""
    driver = Driver("alpha", restart_budget=0)
    if has_served:
        driver.ran(driver.serve(1))
    else:
        driver.call(1)
        driver(ev.ProbeEnded("alpha", None))
    driver(ev.WorkerExited("alpha", 1, -9, 0, "idle", "", oom="cgroup /a, limit 400 MiB"))
    reason = driver.state.unavailable["alpha"]
    assert "the kernel killed the alpha worker for lack of memory (signal 9; cgroup /a, limit 400 MiB)" in reason.detail
    assert reason.repair == "raise the limit of that cgroup or container, or run less in it, then lz restart alpha"


def test_provider_that_loads_for_ever_is_killed_and_disabled() -> None:
    """Nothing hangs."""
    driver = Driver("alpha", start_timeout_s=60.0)
    driver.call(1)
    driver(ev.ProbeEnded("alpha", None))
    assert driver.tick(60.0) == [act.Kill("alpha", 1)]
    driver.dies("alpha", exit_code=-9)
    assert driver.state.workers["alpha"].state is WorkerState.DISABLED
    assert driver.state.unavailable["alpha"].code is Reason.BACKEND_DISABLED
    assert driver.state.unavailable["alpha"].repair == "lz env probe alpha"


@pytest.mark.parametrize("step_failed", ["probe", "spawn"])
def test_backend_that_cannot_start_is_passed_over(step_failed: str) -> None:
    """A waiting call goes to the next candidate, with the cause among its attempts."""
    driver = Driver("alpha", "beta")
    driver.call(1)
    error = EnvError("no module named lib", repair="lz env build alpha")
    if step_failed == "probe":
        actions = driver(ev.ProbeEnded("alpha", error))
    else:
        driver(ev.ProbeEnded("alpha", None))
        actions = driver(ev.SpawnFailed("alpha", 1, error))
    assert actions == [act.Probe("beta")]
    (call,) = driver.state.workers["beta"].waiting
    assert call.attempts[0]["detail"] == "the alpha backend is disabled: no module named lib"


def test_reset_gives_a_disabled_backend_another_chance() -> None:
    """After a repair nobody should have to restart the broker."""
    driver = Driver("alpha")
    driver.call(1)
    driver(ev.ProbeEnded("alpha", EnvError("broken")))
    assert driver(ev.BackendReset("alpha", None)) == []
    assert driver.call(2) == [act.Probe("alpha")]


def test_reset_of_a_backend_in_back_off_serves_those_who_wait() -> None:
    """They must not be forgotten with its failures."""
    driver = Driver("alpha", depth=2)
    driver.route(2, backend="alpha")
    first = driver.serve(1, route=2)
    driver.call(2, route=2)
    driver.dies("alpha", first.dispatch)
    assert driver(ev.BackendReset("alpha", None)) == [act.Probe("alpha")]
    assert driver.run_of(driver.ready("alpha")).dispatch == 3


# --- the end -------------------------------------------------------------------------------------------------


def test_shutdown_finishes_what_runs_and_refuses_the_rest() -> None:
    """A running kernel's result is worth the wait; a queue is not."""
    driver = Driver("alpha", depth=1)
    run = driver.serve(1)
    driver.call(2)
    refuse, stop = driver(ev.ShutdownAsked())
    assert isinstance(refuse, act.Refuse)
    assert (refuse.seq, refuse.error.code) == (2, "BROKER_LOST")
    assert stop == act.StopWorker("alpha", 1, run.identity)
    assert kinds(driver.ran(run)) == ["SendDecision", "Answer"]
    assert refusal(driver.call(3)).error.code == "BROKER_LOST"
    assert driver.dies("alpha", exit_code=0) == [act.Exit()]


def test_idle_broker_ends_at_once() -> None:
    """There is nobody to wait for."""
    assert Driver()(ev.ShutdownAsked()) == [act.Exit()]


def test_failure_during_shutdown_ends_the_call() -> None:
    """The worker it would fall back to will not come."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    driver(ev.ShutdownAsked())
    assert refusal(driver.raised(run, GENTLE)).error.code == "BROKER_LOST"


def test_worker_that_misbehaves_during_shutdown_is_killed_at_once() -> None:
    """Its late answers must not count, and the grace period is for those that behave."""
    driver = Driver("alpha")
    run = driver.serve(1)
    driver(ev.ShutdownAsked())
    assert driver(ev.WorkerMisbehaved("alpha", 1, "garbage")) == [act.Kill("alpha", 1)]
    assert driver.ran(run) == []
    assert kinds(driver.dies("alpha", run.dispatch, exit_code=-9)) == ["Refuse", "Exit"]


def test_deadlines_hold_during_shutdown() -> None:
    """A hang must not point into the grace period."""
    driver = Driver("alpha")
    driver.serve(1, timeout_s=2.0)
    driver(ev.ShutdownAsked())
    assert driver.tick(2.0) == [act.Kill("alpha", 1)]


def test_memory_of_those_who_left_is_closed_at_shutdown() -> None:
    """Nothing is left behind."""
    driver = Driver("alpha")
    driver.serve(1)
    driver(ev.ShutdownAsked())
    driver(ev.ClientLeft(CLIENT))
    assert driver.dies("alpha", exit_code=-9) == [act.CloseArena(1, 1), act.Exit()]


def test_tick_without_anything_due_plans_no_other() -> None:
    """An idle broker sleeps."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver.tick(100.0)
    assert driver.state.wakeup_s == math.inf


# --- the table -----------------------------------------------------------------------------------------------


def test_step_knows_the_table_and_nothing_else() -> None:
    """A signal out of place is a bug of the core and must not pass."""
    for state in WorkerState:
        for signal in Signal:
            if (state, signal) in TRANSITIONS:
                assert step(state, signal) is TRANSITIONS[state, signal]
            else:
                with pytest.raises(IllegalTransition, match=f"{signal.name} in state {state.name}"):
                    step(state, signal)


def test_every_state_can_be_reached_and_left() -> None:
    """Only STOPPED and RETIRED are final."""
    assert {state for state, _ in TRANSITIONS} == set(WorkerState) - {WorkerState.STOPPED, WorkerState.RETIRED}
    assert set(TRANSITIONS.values()) == set(WorkerState)
