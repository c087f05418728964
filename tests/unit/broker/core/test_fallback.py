"""What becomes of a call that fails, by example: on to the next kernel, to an error, or to quarantine."""

from __future__ import annotations

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import CLIENT, GENTLE, Driver, kinds, poisoned, refusal

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, OutputTooSmall
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STALLED_EXIT

# --- failures and fallback -----------------------------------------------------------------------------------


def test_raise_falls_back_and_is_recorded() -> None:
    """Nothing is silent: the report shows the attempt that failed."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    assert kinds(driver.raised(run, GENTLE)) == ["Probe"]
    again = driver.run_of(driver.ready("beta"))
    assert again.attempt == 2
    answer = next(action for action in driver.ran(again) if isinstance(action, act.Answer))
    assert answer.attempts == [
        {
            "backend": "alpha",
            "kernel_id": "alpha.silu",
            "worker_pid": 1,
            "code": "BACKEND_ERROR",
            "detail": "RuntimeError: kernel raised",
            "exit_signal": None,
            "exit_code": None,
            "phase": "",
        }
    ]
    assert driver.state.workers["alpha"].state is WorkerState.READY


def test_fallback_prefers_a_warm_backend() -> None:
    """The caller has waited for one failure already."""
    driver = Driver()
    driver.route(2, backend="gamma")
    driver.ran(driver.serve(1, route=2))
    driver.route(3)
    run = driver.serve(2, route=3)
    actions = driver.raised(run, GENTLE)
    assert driver.run_of(actions).identity == driver.state.workers["gamma"].identity


@pytest.mark.parametrize("error", [InvalidArgument("id 9 is outside [0, 4)"), OutputTooSmall("small", needed=[8])])
def test_error_of_the_call_itself_ends_it(error: LayerZeroError) -> None:
    """Another kernel would say the same."""
    driver = Driver()
    refuse = refusal(driver.raised(driver.serve(1), error))
    assert (refuse.error, refuse.attempts) == (error, [])


def test_crash_falls_back_with_signal_and_phase() -> None:
    """A crash is a routing event."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    assert kinds(driver.dies("alpha", run.dispatch)) == ["Probe"]
    answer = driver.ran(driver.run_of(driver.ready("beta")))[-1]
    assert isinstance(answer, act.Answer)
    (attempt,) = answer.attempts
    assert (attempt["code"], attempt["exit_signal"], attempt["phase"]) == ("BACKEND_ERROR", 11, "executing")


def test_exit_without_an_error_is_a_crash_while_a_call_is_owed() -> None:
    """os._exit(0) in a kernel must not look like an answer."""
    driver = Driver("alpha")
    driver.route(2, backend="alpha")
    run = driver.serve(1, route=2)
    refuse = refusal(driver.dies("alpha", run.dispatch, exit_code=0))
    assert refuse.error.code == "BACKEND_ERROR"
    assert (refuse.attempts[0]["exit_signal"], refuse.attempts[0]["exit_code"]) == (None, 0)


def test_calls_behind_a_crash_move_on_unblamed() -> None:
    """They only lost their place."""
    driver = Driver("alpha", "beta", depth=4)
    first = driver.serve(1)
    driver.call(2)
    driver.dies("alpha", first.dispatch)
    waiting = driver.state.workers["beta"].waiting
    assert [(call.seq, call.deaths, call.attempts[0]["phase"]) for call in waiting] == [
        (1, 1, "executing"),
        (2, 0, "queued"),
    ]


@pytest.mark.parametrize("code", [RENEWAL_EXIT, STALLED_EXIT])
def test_worker_that_begins_anew_blames_nobody(code: int) -> None:
    """It could not run its calls in the order in which they came (docs/protocol.md, section 13)."""
    both = {name: GPU_CAPABILITIES[name] for name in ("alpha", "beta")}
    driver = Driver("alpha", "beta", depth=4, changed=both, gpus=(DEVICES[GPU],))
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    first = driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs)
    driver.call(2, 2, point=TimelinePoint(0, 2), body=refs)
    driver.dies("alpha", first.dispatch, exit_code=code)
    beta = driver.state.workers["beta"]
    assert [(call.seq, call.deaths) for call in beta.waiting] == [(1, 0), (2, 0)]
    driver.ready("beta")
    for deaths in (0, 1):  # each backend is excused once
        (call, _) = beta.running
        driver.dies("beta", call.dispatch, exit_code=code)
        assert call.deaths == deaths
        driver.tick(0.7)
        driver.ready("beta")


def test_worker_that_begins_anew_is_not_given_up_for_it() -> None:
    """It is well, however often the order of calls is against it."""
    driver = Driver(
        "alpha", depth=4, restart_budget=1, changed={"alpha": GPU_CAPABILITIES["alpha"]}, gpus=(DEVICES[GPU],)
    )
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    run = driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs)
    driver.ran(run)
    for seq in (2, 3, 4):
        run = driver.run_of(driver.call(seq, 2, point=TimelinePoint(0, seq), body=refs))
        driver.dies("alpha", run.dispatch, exit_code=RENEWAL_EXIT)
        assert driver.tick(0.7) == [act.Spawn("alpha", seq)]
        for again in [action for action in driver.ready("alpha") if isinstance(action, act.Run)]:
            driver.ran(again)
    run = driver.run_of(driver.call(5, 2, point=TimelinePoint(0, 5), body=refs))
    driver.dies("alpha", run.dispatch)
    assert driver.tick(0.7) == [act.Spawn("alpha", 5)]  # the first death that counts


@pytest.mark.parametrize("code", [RENEWAL_EXIT, STALLED_EXIT])
def test_order_is_no_excuse_for_calls_on_the_cpu(code: int) -> None:
    """They have none."""
    driver = Driver("alpha", "beta", depth=4)
    first = driver.serve(1)
    driver.dies("alpha", first.dispatch, exit_code=code)
    assert [(call.seq, call.deaths) for call in driver.state.workers["beta"].waiting] == [(1, 1)]


def test_pinned_call_behind_a_crash_waits_for_the_restart() -> None:
    """It was not at fault, and it has nowhere else to go."""
    driver = Driver("alpha", depth=4)
    driver.route(2, backend="alpha")
    first = driver.serve(1, route=2)
    driver.call(2, route=2)
    refuse = refusal(driver.dies("alpha", first.dispatch))
    assert refuse.seq == 1
    assert driver.tick(0.7) == [act.Spawn("alpha", 2)]
    assert kinds(driver.ready("alpha")) == ["SendPrepare", "GrantArena", "Run"]


def test_call_whose_only_backend_restarts_waits_for_it() -> None:
    """A crash of the one provider of an op must not point the next half second of calls away."""
    driver = Driver("alpha", "gamma")
    driver.route(2, op="gelu")
    driver.ran(driver.serve(1, route=2))
    driver.dies("alpha")
    assert driver.call(2, route=2) == []
    driver.route(3, backend="alpha")
    assert driver.call(3, route=3) == []
    assert driver.tick(0.7) == [act.Spawn("alpha", 2)]
    assert [kind for kind in kinds(driver.ready("alpha")) if kind == "Run"] == ["Run", "Run"]


def test_call_behind_a_crash_of_the_only_backend_waits_for_the_restart() -> None:
    """It was not at fault."""
    driver = Driver("alpha", depth=4)
    driver.route(2, backend="alpha")
    first = driver.serve(1, route=2)
    driver.call(2)
    refuse = refusal(driver.dies("alpha", first.dispatch))
    assert (refuse.seq, refuse.error.code) == (1, "BACKEND_ERROR")
    driver.tick(0.7)
    answer = driver.ran(driver.run_of(driver.ready("alpha")))[-1]
    assert isinstance(answer, act.Answer)
    assert (answer.seq, answer.attempts) == (2, [])


def test_fallback_waits_for_a_candidate_that_restarts() -> None:
    """Half a second is better than an error."""
    driver = Driver("alpha", "beta")
    driver.route(2, backend="beta")
    driver.ran(driver.serve(1, route=2))
    run = driver.serve(2)
    driver.dies("beta")
    assert driver.raised(run, GENTLE) == []
    driver.tick(0.7)
    assert driver.run_of(driver.ready("beta")).attempt == 2


def test_call_does_not_wait_for_a_restart_that_comes_too_late() -> None:
    """Who gives a call a tenth of a second wants an answer by then."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    refuse = refusal(driver.call(2, timeout_s=0.1))
    assert refuse.error.code == "NO_BACKEND"
    assert "restarts in" in refuse.error.message


def test_calls_that_waited_for_a_restart_in_vain_learn_the_cause() -> None:
    """A worker may die again before it is ready."""
    driver = Driver("alpha", restart_budget=1)
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    driver.call(2)
    driver.tick(0.7)
    refuse = refusal(driver.dies("alpha", exit_code=1))
    (reason,) = refuse.candidates[0]["reasons"]
    assert reason["repair"] == "lz restart alpha"
    assert "disabled" in refuse.error.message


def test_first_attempt_prefers_a_ready_backend_to_one_that_restarts() -> None:
    """Only the first start of the best is worth waiting for: it has not failed yet."""
    driver = Driver("alpha", "beta", standby=1)
    driver.call(1)
    driver.ran(driver.run_of(driver.ready("alpha")))
    driver.ready("beta")
    driver.dies("alpha")
    beta = driver.state.workers["beta"].identity
    assert driver.run_of(driver.call(2)).identity == beta
    driver.tick(0.7)
    assert driver.run_of(driver.call(3)).identity == beta


def test_fallback_prefers_a_ready_backend_to_a_standby_that_still_loads() -> None:
    """Importing a library takes seconds."""
    driver = Driver(standby=1)
    driver.route(2, backend="gamma")
    driver.ran(driver.serve(1, route=2))
    driver.call(2)
    run = driver.run_of(driver.ready("alpha"))
    assert driver.state.workers["beta"].state is WorkerState.PROBING
    assert driver.run_of(driver.raised(run, GENTLE)).identity == driver.state.workers["gamma"].identity


def test_pinned_error_reaches_the_caller() -> None:
    """Who insists on a backend gets its answer, not another one's."""
    driver = Driver()
    driver.route(2, backend="beta")
    refuse = refusal(driver.raised(driver.serve(1, route=2), GENTLE))
    assert refuse.error is GENTLE
    assert [attempt["backend"] for attempt in refuse.attempts] == ["beta"]


def test_last_candidate_failing_ends_the_call_with_all_attempts() -> None:
    """BackendError, not NoBackend: kernels were tried."""
    driver = Driver("alpha", "beta")
    driver.raised(driver.serve(1), GENTLE)
    refuse = refusal(driver.raised(driver.run_of(driver.ready("beta")), GENTLE))
    assert refuse.error.code == "BACKEND_ERROR"
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "beta"]


# --- deadlines -----------------------------------------------------------------------------------------------


def test_deadline_kills_and_falls_back_only_after_the_exit() -> None:
    """A hung kernel may still write into the caller's memory until it is dead."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1, timeout_s=2.0)
    assert driver.state.wakeup_s == driver.now_s + 2.0
    assert driver.tick(2.0) == [act.Kill("alpha", 1)]
    assert driver.ran(run) == []  # too late to count
    assert driver.state.lifecycle.stale == 1
    assert kinds(driver.dies("alpha", run.dispatch, exit_code=-9)) == ["Probe"]
    answer = driver.ran(driver.run_of(driver.ready("beta")))[-1]
    assert isinstance(answer, act.Answer)
    assert [attempt["code"] for attempt in answer.attempts] == ["DEADLINE"]


def test_deadline_counts_from_the_point_of_a_call() -> None:
    """The clock measures the kernel, not the queue before it."""
    driver = Driver("alpha")
    first = driver.serve(1, timeout_s=2.0)
    driver.call(2, timeout_s=2.0)
    driver.now_s += 1.5
    driver.ran(first)
    assert driver.tick(1.5) == []
    assert driver.tick(0.5) == [act.Kill("alpha", 1)]


def test_only_the_overdue_call_is_blamed_for_a_deadline() -> None:
    """The worker may have come to the next call by the time the kill reaches it."""
    driver = Driver("alpha", depth=2)
    driver.route(2, backend="alpha")
    driver.serve(1, route=2, timeout_s=2.0)
    second = driver.run_of(driver.call(2, route=2, timeout_s=2.0))
    driver.tick(2.0)
    refuse = refusal(driver.dies("alpha", second.dispatch, exit_code=-9))
    assert (refuse.seq, refuse.error.code) == (1, "DEADLINE")
    assert [call.seq for call in driver.state.workers["alpha"].waiting] == [2]


def test_deadline_ends_a_call_without_a_candidate_as_such() -> None:
    """The caller must see that it was time that ran out."""
    driver = Driver("alpha")
    run = driver.serve(1, timeout_s=2.0)
    driver.tick(2.0)
    assert refusal(driver.dies("alpha", run.dispatch, exit_code=-9)).error.code == "DEADLINE"


# --- wrong answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dispatch", "attempt"), [(1, 0), (0, 1), (999, 0)])
def test_wrong_answer_kills_its_sender(dispatch: int, attempt: int) -> None:
    """A worker that answers what it was not asked cannot be believed in anything."""
    driver = Driver("alpha")
    run = driver.serve(1)
    assert driver(ev.CallRan(run.identity, run.dispatch + dispatch, run.attempt + attempt, 1, b"")) == [
        act.Kill("alpha", 1)
    ]


def test_second_answer_kills_its_sender() -> None:
    """It would answer the next call."""
    driver = Driver("alpha")
    run = driver.serve(1)
    driver.ran(run)
    assert driver.ran(run) == [act.Kill("alpha", 1)]


def test_bad_bytes_blame_the_call_that_the_worker_had() -> None:
    """A pinned caller learns what happened."""
    driver = Driver("alpha")
    driver.route(2, backend="alpha")
    run = driver.serve(1, route=2)
    assert driver(ev.WorkerMisbehaved("alpha", 1, "bad message: not msgpack")) == [act.Kill("alpha", 1)]
    assert refusal(driver.dies("alpha", run.dispatch, exit_code=-9)).error.code == "BAD_MESSAGE"


def test_answer_of_a_worker_that_is_gone_is_dropped() -> None:
    """Its call has moved on."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    driver.dies("alpha", run.dispatch)
    assert driver.ran(run) == []
    assert driver.state.lifecycle.stale == 1


# --- poison --------------------------------------------------------------------------------------------------


def test_call_that_killed_two_workers_is_refused() -> None:
    """It would kill every backend there is."""
    assert poisoned().state.workers["gamma"].state is WorkerState.ABSENT


def test_quarantine_refuses_the_inputs_and_lets_others_pass() -> None:
    """One bad call must not take a signature from everybody."""
    driver, bad, good = poisoned(), b"b" * 16, b"g" * 16
    driver(ev.CallPoisoned(CLIENT, 1, bad))
    assert refusal(driver.call(2)).error.code == "DIGEST_REQUIRED"
    assert refusal(driver.call(3, digest=bad)).error.code == "POISON"
    assert kinds(driver.call(4, digest=good)) == ["Probe"]


def test_quarantine_ends() -> None:
    """The library may be repaired meanwhile."""
    driver, bad = poisoned(), b"b" * 16
    driver(ev.CallPoisoned(CLIENT, 1, bad))
    driver.now_s += 600.0
    assert kinds(driver.call(2, digest=bad)) == ["Probe"]
    assert kinds(driver.call(3)) == []
