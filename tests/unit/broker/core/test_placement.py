"""The way of a call that goes well, and why one is refused, by example."""

from __future__ import annotations

import pytest
from tests.simulation import ARENA_BYTES, DEVICES, GPU, GPU_CAPABILITIES, route_body
from tests.unit.broker.driver import BODY, CLIENT, SPEC, Driver, kinds, refusal

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import EnvError
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Decision, Prepare, decode, encode

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


def test_a_replayed_graph_is_told_to_the_client() -> None:
    """Reports say how a call ran."""
    driver = Driver()
    run = driver.serve(7)
    done = driver(ev.CallRan(run.identity, run.dispatch, run.attempt, 5, b"", is_replayed=True))
    assert [action.is_replayed for action in done if isinstance(action, act.Answer)] == [True]
    run = driver.serve(8)
    assert [action.is_replayed for action in driver.ran(run) if isinstance(action, act.Answer)] == [False]
