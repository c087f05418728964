"""Memory and plans that nobody needs any more, by example."""

from __future__ import annotations

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import BODY, CLIENT, GENTLE, Driver, kinds

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.ipc.errors import EnvError
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire

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
