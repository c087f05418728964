"""The core's rules by example. test_simulation.py has them all at once."""

from __future__ import annotations

import math

import pytest
from tests.simulation import ARENA_BYTES, DEVICES, GPU, GPU_CAPABILITIES, route_body
from tests.unit.broker.driver import BODY, CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.clients import MAX_ROUTE_BYTES
from layerzero.broker.core.worker_fsm import TRANSITIONS, IllegalTransition, Signal, WorkerState, step
from layerzero.broker.selection.certification import Subject
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import BackendError, EnvError, InvalidArgument, LayerZeroError, OutputTooSmall
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Decision, Prepare, decode, encode
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STALLED_EXIT

SPEC = ["float32", [4], [1]]
GENTLE = BackendError("RuntimeError: kernel raised")


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def refusal(actions: list[act.Action]) -> act.Refuse:
    (refuse,) = (action for action in actions if isinstance(action, act.Refuse))
    return refuse


# --- a call that goes well -----------------------------------------------------------------------------------


def test_first_call_probes_spawns_prepares_and_lends_before_it_runs() -> None:
    """A Run that finds no plan or no memory at the worker would fail there."""
    driver = Driver()
    assert driver.call(7) == [act.Probe("alpha")]
    assert driver(ev.ProbeEnded("alpha", None)) == [act.Spawn("alpha", 1)]
    assert driver(ev.WorkerSpawned("alpha", 1, 4711)) == []
    prepare = encode(Prepare(op="silu", kernel_id="alpha.silu", inputs=[SPEC], outputs=[SPEC], attrs={}))
    assert driver(ev.WorkerReady(b"W", "alpha", 1, {"lib": "1"})) == [
        act.SendPrepare(b"W", 1, prepare),
        act.GrantArena("alpha", 1, 1, 1),
        act.Run(b"W", 1, 1, 1, 1, BODY),
    ]
    decide, answer = driver(ev.CallRan(b"W", 1, 1, 5000, b"sizes"))
    assert isinstance(decide, act.SendDecision)
    assert (decide.identity, decide.route, decide.decision) == (CLIENT, 1, 1)
    decision = decode(decide.body, Decision)
    assert (decision.backend, decision.kernel_id, decision.worker_pid) == ("alpha", "alpha.silu", 4711)
    assert [(c["backend"], c["accepted"]) for c in decision.candidates] == [
        ("alpha", True),
        ("beta", True),
        ("gamma", True),
    ]
    assert answer == act.Answer(CLIENT, 7, 1, 1, 5000, b"sizes", [])
    assert driver.state.clients[CLIENT].open_calls == 0


def test_later_call_sends_a_run_and_an_answer_only() -> None:
    """The steady state does the least possible."""
    driver = Driver()
    driver.ran(driver.serve(1))
    driver.ran(driver.serve(2))  # decided anew: a worker has become ready since the first
    actions = driver.call(3)
    assert kinds(actions) == ["Run"]
    assert kinds(driver.ran(driver.run_of(actions))) == ["Answer"]


def test_calls_beyond_the_depth_wait_and_follow_one_by_one() -> None:
    """A worker's queue must stay short, so that a crash takes few calls with it."""
    driver = Driver(depth=2)
    first = driver.serve(1)
    assert kinds(driver.call(2)) == ["Run"]
    assert driver.call(3) == []
    actions = driver.ran(first)
    assert kinds(actions) == ["Run", "SendDecision", "Answer"]


def test_clients_take_points_at_a_worker_that_is_behind() -> None:
    """One that floods must not push others to the end of its queue; its own calls keep their order."""
    driver = Driver("alpha", depth=1)
    run = driver.serve(1)
    for seq in (2, 3, 4, 5):
        assert driver.call(seq) == []
    driver.join(b"C2", 2)
    for seq in (11, 12):
        assert driver.call(seq, identity=b"C2") == []
    order = []
    for _ in range(6):
        run = driver.run_of(driver.ran(run))
        call = driver.state.workers["alpha"].running[0]
        order.append((call.client.number, call.seq))
    assert order == [(1, 2), (2, 11), (1, 3), (2, 12), (1, 4), (1, 5)]


def test_client_has_few_calls_at_a_worker_that_others_call() -> None:
    """What was sent ahead runs first: a flood of 16 would be in front of each call of another client."""
    driver = Driver("alpha", depth=4, share=2)
    runs = [driver.serve(1)]
    driver.join(b"C2", 2)
    for seq, identity in ((11, b"C2"), (12, b"C2"), (2, CLIENT), (3, CLIENT), (4, CLIENT)):
        runs += [action for action in driver.call(seq, identity=identity) if isinstance(action, act.Run)]
        driver.tick(0.01)
    running = driver.state.workers["alpha"].running
    assert [call.seq for call in running] == [1, 11, 12, 2]
    runs.append(driver.run_of(driver.ran(runs.pop(0))))
    assert [call.seq for call in running] == [11, 12, 2, 3]
    driver.ran(runs.pop(0))
    assert [call.seq for call in running] == [12, 2, 3]
    driver.tick(0.2)  # nobody else has called meanwhile
    driver.ran(runs.pop(0))
    assert [call.seq for call in running] == [2, 3, 4]


def test_one_that_waits_for_each_call_finds_one_of_a_flood_before_it() -> None:
    """A client that keeps many open does not notice: another of its calls is on the way."""
    driver = Driver("alpha", depth=4, share=2)
    runs = [driver.serve(1)]
    driver.join(b"C2", 2)
    for seq, identity in ((11, b"C2"), (2, CLIENT), (3, CLIENT)):
        runs += [action for action in driver.call(seq, identity=identity) if isinstance(action, act.Run)]
    running = driver.state.workers["alpha"].running
    assert [call.seq for call in running] == [1, 11]
    runs.append(driver.run_of(driver.ran(runs.pop(0))))
    assert [call.seq for call in running] == [11, 2]
    driver.ran(runs.pop(0))
    assert [call.seq for call in running] == [2]
    driver.call(12, identity=b"C2")
    assert [call.seq for call in running] == [2, 12]
    driver.tick(0.02)  # it has not called again meanwhile
    driver.ran(runs.pop(0))
    assert [call.seq for call in running] == [12, 3]


def test_client_of_a_moment_ago_takes_nothing_from_the_next_one() -> None:
    """A worker is shared by those that call it now."""
    driver = Driver("alpha", depth=8, share=2)
    driver.ran(driver.serve(1))
    driver.tick(0.2)
    driver.join(b"C2", 2)
    for seq in (11, 12, 13):
        driver.call(seq, identity=b"C2")
    assert [call.seq for call in driver.state.workers["alpha"].running] == [11, 12, 13]
    driver(ev.ClientLeft(b"C2"))
    driver.join(b"C3", 3)
    for seq in (21, 22, 23):
        driver.call(seq, identity=b"C3")
    assert [call.seq for call in driver.state.workers["alpha"].running] == [11, 12, 13, 21, 22, 23]


def test_runner_up_is_kept_warm() -> None:
    """A fallback that must start a worker first is slow."""
    driver = Driver(standby=1)
    assert driver.call(1) == [act.Probe("alpha"), act.Probe("beta")]


def test_pinned_call_warms_no_other_backend() -> None:
    """It would never fall back to it."""
    driver = Driver(standby=1)
    driver.route(2, backend="beta")
    assert driver.call(1, route=2) == [act.Probe("beta")]


# --- refusals ------------------------------------------------------------------------------------------------


def test_call_above_the_limit_is_busy() -> None:
    """An unbounded queue only hides that too much is asked."""
    driver = Driver(max_in_flight=2)
    driver.call(1)
    driver.call(2)
    refuse = refusal(driver.call(3))
    assert (refuse.seq, refuse.error.code, refuse.error.facts) == (3, "BUSY", {"limit": 2})
    assert driver.state.clients[CLIENT].open_calls == 2


def test_busy_tells_the_limit_and_not_how_many_are_open() -> None:
    """They differ when calls have come back from a GPU whose worker died."""
    driver = Driver("alpha", max_in_flight=1, changed={"alpha": GPU_CAPABILITIES["alpha"]}, gpus=(DEVICES[GPU],))
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    driver.ran(driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs))
    driver.call(2, 2, point=TimelinePoint(0, 2), body=refs)
    driver.dies("alpha")
    error = refusal(driver.call(3)).error
    assert (error.code, error.facts) == ("BUSY", {"limit": 1})
    assert "2 calls are open; allowed: 1" in error.message


def test_call_that_no_kernel_accepts_names_every_reason() -> None:
    """Without the reasons nobody could repair it."""
    missing = Rejection(Reason.NOT_INSTALLED, "its environment is not built", "lz env build gamma")
    driver = Driver("alpha", "gamma", unusable={"gamma": missing})
    driver.route(2, dtype="float16")
    refuse = refusal(driver.call(1, route=2))
    assert refuse.error.code == "NO_BACKEND"
    assert "lz env build gamma" in refuse.error.message
    assert [[r["code"] for r in c["reasons"]] for c in refuse.candidates] == [
        ["DTYPE_UNSUPPORTED"],
        ["DTYPE_UNSUPPORTED", "NOT_INSTALLED"],
    ]


def test_pinned_call_tells_the_others_reason() -> None:
    """NOT_PINNED is the one reason that the caller gave."""
    driver = Driver("alpha", "beta")
    driver.route(2, op="gelu", backend="beta")
    driver(ev.ProbeEnded("beta", None))
    driver.call(1, route=2)
    refuse = refusal(driver(ev.ProbeEnded("beta", EnvError("no module named lib", repair="lz env build beta"))))
    assert refuse.error.code == "BACKEND_ERROR"
    reasons = {c["backend"]: [r["code"] for r in c["reasons"]] for c in refuse.candidates}
    assert reasons["alpha"] == ["NOT_PINNED"]


@pytest.mark.parametrize(
    "event",
    [
        ev.CallArrived(CLIENT, 99, 1, 0.0, BODY),
        ev.CallArrived(CLIENT, 1, 1, 0.0, BODY[:-1]),
        ev.CallArrived(CLIENT, 1, 1, 0.0, wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(2, 0, 0, 64)])),
        ev.CallArrived(CLIENT, 1, 1, 0.0, wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(1, 0, 65, 64)])),
        ev.CallArrived(CLIENT, 1, 1, 0.0, wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(1, 0, 2**64 - 8, 16)])),
        ev.CallArrived(CLIENT, 1, 1, 0.0, wire.pack_refs([wire.Ref(1, 0, 0, 15), wire.Ref(1, 0, 64, 64)])),
        ev.CallArrived(CLIENT, 1, 1, 0.0, wire.pack_refs([wire.Ref(wire.NO_ARENA, 0, 0, 64)] * 2)),
        ev.RouteDefined(CLIENT, 1, route_body()),
        ev.RouteDefined(CLIENT, 2, b"\xc1"),
        ev.RouteDefined(CLIENT, 2, route_body(op="nonsense", device="GPU-1")),
        ev.ArenaOffered(CLIENT, 1, ARENA_BYTES),
    ],
)
def test_client_that_breaks_the_protocol_is_dropped(event: ev.Event) -> None:
    """Its memory layout cannot be trusted any more; the other clients' can."""
    driver = Driver()
    driver.join(b"C2", 2)
    actions = driver(event)
    assert kinds(actions) == ["DropClient", "CloseArena"]
    assert list(driver.state.clients) == [b"C2"]


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


def poisoned() -> Driver:
    driver = Driver()
    run = driver.serve(1)
    driver.dies("alpha", run.dispatch)
    run = driver.run_of(driver.ready("beta"))
    refuse = refusal(driver.dies("beta", run.dispatch))
    assert (refuse.error.code, refuse.error.facts) == ("POISON", {"quarantine_s": 600.0})
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "beta"]
    return driver


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


# --- restarts ------------------------------------------------------------------------------------------------


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


# --- clients that leave, memory, signatures -------------------------------------------------------------------


def test_memory_of_a_client_that_left_is_closed_after_its_last_call() -> None:
    """A worker may still write into it."""
    driver = Driver("alpha")
    run = driver.serve(1)
    driver.call(2)
    driver.call(3)
    assert kinds(driver(ev.ClientLeft(CLIENT))) == []
    assert driver.ran(run) == []
    second = act.Run(run.identity, 1, run.dispatch + 1, 1, 1, BODY)
    assert driver.ran(second) == [
        act.SendDrop(run.identity, 1),
        act.TakeBackArena("alpha", 1, 1, 1),
        act.CloseArena(1, 1),
    ]


def test_memory_of_a_client_that_left_is_closed_after_a_confirmed_exit() -> None:
    """A kill that is on its way stops no write."""
    driver = Driver("alpha")
    driver.serve(1, timeout_s=2.0)
    driver(ev.ClientLeft(CLIENT))
    assert driver.tick(2.0) == [act.Kill("alpha", 1)]
    assert driver.dies("alpha", 1, exit_code=-9) == [act.CloseArena(1, 1)]


def test_a_worker_has_arenas_only_while_their_client_has_routes_there() -> None:
    """What a library cannot reach it cannot spoil: not after the last route that it served."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver.route(2, op="gelu")
    driver.ran(driver.run_of(driver.call(2, route=2)))
    assert kinds(driver(ev.RouteForgotten(CLIENT, 1))) == ["SendDrop"]
    taken_back = act.TakeBackArena("alpha", 1, 1, 1)
    assert taken_back in driver(ev.RouteForgotten(CLIENT, 2))
    driver.route(3)
    actions = driver.call(3, route=3)
    assert "GrantArena" in kinds(actions)
    run = driver.run_of(actions)
    assert taken_back not in driver(ev.RouteForgotten(CLIENT, 3))  # a call of it is there
    assert taken_back in driver.ran(run)


def test_a_worker_whose_kernel_failed_has_no_arenas_of_its_caller() -> None:
    """It serves nothing of that client."""
    driver = Driver("alpha", "beta")
    run = driver.serve(1)
    driver.raised(run, GENTLE)
    actions = driver.ran(driver.run_of(driver.ready("beta")))
    assert act.TakeBackArena("alpha", 1, 1, 1) in actions
    assert act.TakeBackArena("beta", 1, 1, 1) not in actions


def test_retired_arena_is_taken_back_and_closed() -> None:
    """Memory that its owner gave up must not stay mapped."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    assert driver(ev.ArenaGivenUp(CLIENT, 1)) == [act.TakeBackArena("alpha", 1, 1, 1), act.CloseArena(1, 1)]
    assert kinds(driver.call(2)) == ["DropClient", "SendDrop"]


@pytest.mark.parametrize("is_running", [True, False])
def test_arena_retired_under_an_open_call_drops_the_client(is_running: bool) -> None:
    """A waiting call would be sent with memory that the broker has closed."""
    driver = Driver("alpha")
    if is_running:
        driver.serve(1)
    else:
        driver.call(1)
    actions = driver(ev.ArenaGivenUp(CLIENT, 1))
    assert kinds(actions)[0] == "DropClient"
    assert ("CloseArena" in kinds(actions)) == (not is_running)


def test_arena_of_a_call_on_a_gpu_stays_until_its_worker_has_answered() -> None:
    """A client whose call was on a ring knows by its turn alone that it is done. Another worker may have run it since,
    and the broker not have read that answer yet."""
    driver = Driver("alpha", changed={"alpha": GPU_CAPABILITIES["alpha"]}, gpus=(DEVICES[GPU],))
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    run = driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs)
    assert driver(ev.ArenaGivenUp(CLIENT, 2)) == []
    assert "CloseArena" not in kinds(driver.ran(run))
    ended = driver(ev.TimelinesPolled("alpha", 1, done=[run.dispatch], ready=set()))
    assert kinds(ended) == ["TakeBackArena", "CloseArena"]


def test_retired_arena_stays_while_a_call_that_uses_it_goes_elsewhere() -> None:
    """Both lose their worker in one event: the first ends with it, the other goes on to the next with that memory."""
    gpu = {name: GPU_CAPABILITIES[name] for name in ("alpha", "beta")}
    driver = Driver("alpha", "beta", changed=gpu, gpus=(DEVICES[GPU],))
    driver(ev.GpuOffered(CLIENT, GPU))
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    driver.route(2, device=GPU, backend="alpha")
    driver.route(3, device=GPU)
    refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
    driver.call(1, 2, graph_slot=1, body=refs)
    driver.call(2, 3, point=TimelinePoint(0, 1), body=refs)
    driver(ev.ArenaGivenUp(CLIENT, 2))
    actions = driver(ev.ProbeEnded("alpha", EnvError("its environment is gone")))
    assert "Refuse" in kinds(actions)
    assert "CloseArena" not in kinds(actions)
    assert 2 in {action.arena for action in driver.ready("beta") if isinstance(action, act.GrantArena)}


def test_gpu_that_a_client_offers_as_it_is_dropped_is_nobodys() -> None:
    """The broker looks at timeline pages first, and a client that does not read what it is told then is cut off."""
    driver = Driver("alpha")
    driver(ev.ClientLeft(CLIENT))
    assert driver(ev.GpuOffered(CLIENT, "GPU-1")) == []


def test_plan_lives_until_the_last_open_call_of_a_forgotten_route() -> None:
    """A call that waited would prepare a plan that nobody drops."""
    driver = Driver("alpha", depth=1)
    first = driver.serve(1)
    driver.call(2)
    assert driver(ev.RouteForgotten(CLIENT, 1)) == []
    second = driver.run_of(driver.ran(first))
    assert second.plan == first.plan
    assert kinds(driver.ran(second)) == ["Answer", "SendDrop", "TakeBackArena"]


def test_equal_signatures_share_a_plan() -> None:
    """Preparing a kernel may take seconds."""
    driver = Driver("alpha")
    driver.join(b"C2", 2)
    first = driver.serve(1)
    actions = driver.call(1, identity=b"C2")
    assert kinds(actions) == ["GrantArena", "Run"]
    assert driver.run_of(actions).plan == first.plan


def test_new_worker_gets_plans_and_memory_again() -> None:
    """It knows nothing of what the one before was told."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    driver.tick(1.0)
    driver.ready("alpha")
    assert kinds(driver.call(2)) == ["SendPrepare", "GrantArena", "Run"]


def test_dead_worker_is_told_nothing() -> None:
    """Its identity leads nowhere."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver.dies("alpha")
    assert driver(ev.ClientLeft(CLIENT)) == [act.CloseArena(1, 1)]


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
    """Only STOPPED is final."""
    assert {state for state, _ in TRANSITIONS} == set(WorkerState) - {WorkerState.STOPPED}
    assert set(TRANSITIONS.values()) == set(WorkerState)


def test_a_replayed_graph_is_told_to_the_client() -> None:
    """Reports say how a call ran."""
    driver = Driver()
    run = driver.serve(7)
    done = driver(ev.CallRan(run.identity, run.dispatch, run.attempt, 5, b"", is_replayed=True))
    assert [action.is_replayed for action in done if isinstance(action, act.Answer)] == [True]
    run = driver.serve(8)
    assert [action.is_replayed for action in driver.ran(run) if isinstance(action, act.Answer)] == [False]


def test_poison_is_believed_of_who_had_it() -> None:
    """Else a client's digest would refuse another's call for ten minutes."""
    driver = poisoned()
    driver.join(b"C2", 2)
    driver(ev.CallPoisoned(b"C2", 1, b"v" * 16))
    assert kinds(driver.call(2, identity=b"C2")) == ["Probe"]
    driver(ev.CallPoisoned(CLIENT, 1, b"b" * 16))
    driver(ev.CallPoisoned(CLIENT, 1, b"v" * 16))  # one POISON, one digest
    assert refusal(driver.call(3, digest=b"b" * 16)).error.code == "POISON"
    assert kinds(driver.call(4, digest=b"v" * 16)) == []


@pytest.mark.parametrize("kernel_ns", [1, 10**12])
def test_times_of_runs_that_nobody_granted_are_none(kernel_ns: int) -> None:
    """They rank kernels for all clients, and the next broker reads them."""
    driver = Driver()
    for _ in range(64):
        driver(ev.RanInClient(CLIENT, 1, "gamma.silu", kernel_ns))
    assert (
        driver.state.engine.perf.stat("gamma.silu", driver.state.clients[CLIENT].routes[1].signature.cell.key) is None
    )


def test_times_of_granted_runs_fit_into_the_time_that_passed() -> None:
    """Two runs of a second cannot have ended within one; nor may a run have begun when the grant was over."""
    driver = Driver()
    driver(ev.PolicyChanged(Policy(backend_isolation={"*": "in_process"})))
    assert refusal(driver.call(1, may_run_here=True)).error.code == "RUN_IN_PROCESS"
    route = driver.state.clients[CLIENT].routes[1]
    cell, told = route.signature.cell, (0.2, 0.2, 0.6, 0.1)
    driver.now_s += 0.5
    for seconds in told:
        driver(ev.RanInClient(CLIENT, 1, "alpha.silu", int(seconds * 1e9)))
    driver(ev.RanInClient(CLIENT, 1, "beta.silu", 5))
    driver.now_s += 10.0
    driver(ev.RanInClient(CLIENT, 1, "alpha.silu", 5))
    stat = driver.state.engine.perf.stat("alpha.silu", cell.key)
    assert stat is not None
    assert stat.count == 2  # the first is apart as a warm-up, and the one of 0.6 s is none
    assert driver.state.engine.perf.stat("beta.silu", cell.key) is None


@pytest.mark.parametrize(("asked_s", "given_s"), [(1e-6, 1e-3), (2.0, 2.0), (0.0, 10.0), (1.8e13, 86_400.0)])
def test_timeouts_have_a_floor_and_an_end(asked_s: float, given_s: float) -> None:
    """A microsecond kills a healthy worker; an age holds others up as long."""
    driver = Driver()
    driver.serve(1, timeout_s=asked_s)
    assert driver.state.workers["alpha"].head_deadline_s == pytest.approx(driver.now_s + given_s)


def test_a_client_may_have_so_many_workers_killed_for_short_timeouts() -> None:
    """16 workers of all were killed in 15 s by one client; honest ones pass no time that no kernel meets."""
    driver = Driver("alpha", restart_budget=9)
    for seq in range(1, 6):
        driver.serve(seq, timeout_s=0.001)
        assert kinds(driver.tick(0.01)) == ["Kill"]
        driver.dies("alpha")
        driver.tick(1.0)
        driver.ready("alpha")
    busy = refusal(driver.call(4, timeout_s=0.001))
    assert (busy.error.code, busy.error.facts) == ("BUSY", {"limit": 5})
    assert "5 workers were killed" in busy.error.message
    assert kinds(driver.call(7))[-1] == "Run"  # with the broker's own timeout
    driver.join(b"C2", 2)
    assert not any(isinstance(a, act.Refuse) for a in driver.call(8, identity=b"C2", timeout_s=0.001))
    driver.now_s += 31.0
    assert not any(isinstance(a, act.Refuse) for a in driver.call(9, timeout_s=0.001))


def test_a_clients_routes_have_a_size() -> None:
    """760 routes of 1 MiB were the end of a broker."""
    driver = Driver()
    dropped = driver(ev.RouteDefined(CLIENT, 2, b"x" * ((1 << 16) + 1)))[0]
    assert isinstance(dropped, act.DropClient)
    assert "allowed: 65536" in dropped.detail
    driver.join(b"C2", 2)
    client = driver.state.clients[b"C2"]
    body = len(route_body())
    assert client.route_bytes == body
    driver(ev.RouteForgotten(b"C2", 1))
    assert client.route_bytes == 0
    client.route_bytes = MAX_ROUTE_BYTES - body
    assert driver.route(1, identity=b"C2") == []
    dropped = driver.route(2, identity=b"C2")[0]
    assert isinstance(dropped, act.DropClient)
    assert "bytes of routes" in dropped.detail


def compared(driver: Driver, *clients: bytes, error: float = math.nan) -> dict[str, str]:
    """These clients have run their calls on alpha and on beta, and compared; returns what is in quarantine now."""
    spec = CallSpec.parse(route_body())
    subject = Subject.of("alpha.silu", spec)
    for client in clients:
        driver(ev.ShadowCompared(Comparison(subject, "beta.silu", error), client, route_body()))
    return {subject.kernel_id: text for subject, text in driver.state.engine.certification.quarantined.items()}


def both_served(driver: Driver, identity: bytes, first: int) -> None:
    driver.route(2, identity=identity, backend="beta")
    driver.ran(driver.serve(first, identity=identity))
    driver.ran(driver.serve(first + 1, 2, identity=identity))


def test_one_clients_shadow_checks_bar_no_kernel_for_others() -> None:
    """One frame without a call behind it left an op without a kernel, for all."""
    driver = Driver("alpha", "beta")
    assert compared(driver, CLIENT, b"nobody") == {}  # it has run nothing
    driver.join(b"C2", 2)
    both_served(driver, CLIENT, 1)
    both_served(driver, b"C2", 3)
    assert compared(driver, CLIENT, CLIENT, CLIENT, CLIENT) == {}
    assert [*compared(driver, b"C2")] == ["alpha.silu"]
    driver.join(b"C3", 3)
    assert [*compared(driver)] == ["alpha.silu"]  # two have said so


def test_shadow_checks_of_the_only_client_count_while_it_is_alone() -> None:
    """Then they disturb nobody; who comes later has to find it out, too."""
    driver = Driver("alpha", "beta")
    both_served(driver, CLIENT, 1)
    assert [*compared(driver, CLIENT)] == ["alpha.silu"]
    driver.join(b"C2", 2)
    assert compared(driver) == {}
    driver(ev.ClientLeft(b"C2"))
    assert [*compared(driver)] == ["alpha.silu"]
    driver(ev.BackendReset("alpha", None))
    assert compared(driver) == {}
