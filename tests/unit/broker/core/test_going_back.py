"""Calls whose worker has ended, when nobody else is left: they may have the restarted one of the same backend once."""

from __future__ import annotations

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.shm.timeline_page import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Lease, decode
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT, mark

GENTLE = BackendError("RuntimeError: kernel raised")


def refusal(actions: list[act.Action]) -> act.Refuse:
    (refuse,) = (action for action in actions if isinstance(action, act.Refuse))
    return refuse


def rerun(driver: Driver, backend: str = "alpha") -> act.Run:
    """What the worker runs that comes after the back-off."""
    assert driver.tick(0.7) == [act.Spawn(backend, driver.state.workers[backend].generation)]
    return driver.run_of(driver.ready(backend))


def test_worker_that_dies_is_not_the_callers_error_where_it_is_the_only_one() -> None:
    """Many an op has one backend on a CPU."""
    driver = Driver("alpha")
    assert driver.dies("alpha", driver.serve(1).dispatch, exit_code=-9) == []
    run = rerun(driver)
    assert run.attempt == 2
    answer = driver.ran(run)[-1]
    assert isinstance(answer, act.Answer)
    (attempt,) = answer.attempts
    assert (attempt["backend"], attempt["exit_signal"], attempt["phase"]) == ("alpha", 9, "executing")


def test_call_that_kills_its_worker_twice_is_poison() -> None:
    """There is room for one more try, and for no third."""
    driver = Driver("alpha")
    driver.dies("alpha", driver.serve(1).dispatch)
    refuse = refusal(driver.dies("alpha", rerun(driver).dispatch))
    assert refuse.error.code == "POISON"
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "alpha"]


def test_others_are_tried_before() -> None:
    """What killed a worker may do so again; another backend is the better guess."""
    driver = Driver("alpha", "beta")
    driver.dies("alpha", driver.serve(1).dispatch)
    driver.tick(0.7)
    driver.ready("alpha")
    run = driver.run_of(driver.ready("beta"))
    again = driver.run_of(driver.raised(run, GENTLE))
    assert again.identity == driver.state.workers["alpha"].identity
    (answer,) = (action for action in driver.ran(again) if isinstance(action, act.Answer))
    assert [attempt["backend"] for attempt in answer.attempts] == ["alpha", "beta"]


def test_it_is_once() -> None:
    """An error in the second try is the call's end."""
    driver = Driver("alpha")
    driver.dies("alpha", driver.serve(1).dispatch)
    refuse = refusal(driver.raised(rerun(driver), GENTLE))
    assert refuse.error.code == "BACKEND_ERROR"
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "alpha"]


def test_pinned_call_ends_at_its_first_failure() -> None:
    """Whoever pins a backend wants to hear of its failures."""
    driver = Driver("alpha")
    driver.route(2, backend="alpha")
    refuse = refusal(driver.dies("alpha", driver.serve(1, route=2).dispatch))
    assert "the alpha worker died (signal 11)" in refuse.error.message


@pytest.mark.parametrize("error", [GENTLE, None], ids=["raised", "took too long"])
def test_what_the_kernel_or_the_deadline_says_is_said_once(error: LayerZeroError | None) -> None:
    """The same kernel would raise again, and take as long again."""
    driver = Driver("alpha")
    run = driver.serve(1)
    if error is not None:
        refuse = refusal(driver.raised(run, error))
    else:
        driver.tick(10.0)
        refuse = refusal(driver.dies("alpha", run.dispatch, exit_code=-9))
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha"]


def test_who_gives_little_time_does_not_wait_for_the_restart() -> None:
    """The back-off is half a second."""
    driver = Driver("alpha")
    run = driver.serve(1, timeout_s=0.1)
    assert "died (signal 11)" in refusal(driver.dies("alpha", run.dispatch)).error.message


def test_nobody_waits_for_a_backend_that_is_disabled() -> None:
    """Its next try is far, and may fail."""
    driver = Driver("alpha", restart_budget=0)
    refuse = refusal(driver.dies("alpha", driver.serve(1).dispatch))
    assert refuse.error.code == "BACKEND_ERROR"
    assert "tries again in 30 s" in str(refuse.candidates)


def test_call_of_an_express_lane_comes_back_to_the_same_backend() -> None:
    """Its attempt there counts like any other."""
    driver = Driver("alpha", express=True)
    lease = None
    for seq in range(1, 10):
        actions = driver.ran(driver.serve(seq))
        lease = next((a for a in actions if isinstance(a, act.SendLease)), lease)
    assert lease is not None
    lane = decode(lease.body, Lease).lane
    driver(ev.LaneOpened(CLIENT, lane, ""))
    driver.dies("alpha", mark(lane, 1), exit_code=-9)
    assert driver.call(20, after_lane=lane, after_call=1) == []
    run = rerun(driver)
    assert run.attempt == 2
    answer = driver.ran(run)[-1]
    assert isinstance(answer, act.Answer)
    assert [attempt["exit_signal"] for attempt in answer.attempts] == [9]


def test_call_that_a_gpu_was_in_comes_back_to_the_same_backend() -> None:
    """Its client has gone on, and its stream waits; so do those of the calls behind it."""
    driver = Driver("alpha", depth=4, changed={"alpha": GPU_CAPABILITIES["alpha"]}, gpus=(DEVICES[GPU],))
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    first = driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs)
    driver.ran(first)
    driver.ran(driver.run_of(driver.call(2, 2, point=TimelinePoint(0, 2), body=refs)))
    driver(ev.TimelinesPolled("alpha", 1, done=[], ready={first.dispatch}))
    assert "FailTurn" not in [type(action).__name__ for action in driver.dies("alpha", exit_code=STICKY_EXIT)]
    driver.tick(0.7)
    runs = [action for action in driver.ready("alpha") if isinstance(action, act.Run)]
    assert [(run.point, run.attempt) for run in runs] == [(TimelinePoint(0, 1), 2), (TimelinePoint(0, 2), 2)]


def test_attempt_says_how_the_worker_of_a_queued_call_died() -> None:
    """It is the same death as that of the call before it."""
    driver = Driver("alpha", "beta", depth=2)
    run = driver.serve(1)
    driver.call(2)
    driver.dies("alpha", run.dispatch, exit_code=-9)
    driver.ready("beta")
    calls = driver.state.workers["beta"].running
    details = {call.seq: call.attempts[0]["detail"] for call in calls}
    assert details == {
        1: "the alpha worker died (signal 9)",
        2: "the alpha worker died (signal 9) while the call was queued",
    }


def test_call_that_only_lost_its_place_may_go_back_to_it() -> None:
    """It has not even been tried there."""
    driver = Driver("alpha", "beta", depth=2)
    run = driver.serve(1)
    driver.call(2)
    driver.dies("alpha", run.dispatch)
    first, second = (action for action in driver.ready("beta") if isinstance(action, act.Run))
    driver.ran(first)
    assert driver.raised(second, GENTLE) == []
    answer = driver.ran(rerun(driver))[-1]
    assert isinstance(answer, act.Answer)
    assert [(attempt["backend"], attempt["phase"]) for attempt in answer.attempts] == [
        ("alpha", "queued"),
        ("beta", ""),
    ]
