"""Rollouts in the core: what becomes of routes, of calls on their way, and of what is kept of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.simulation import CAPABILITIES
from tests.unit.broker.driver import CLIENT, GENTLE, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.selection.rollout import Rollout, Rules
from layerzero.capabilities.descriptor import Capability

NEW = "alpha@2"


def newer() -> Capability:
    """The same claims under the version's name."""
    text = CAPABILITIES["alpha"].model_dump_json(by_alias=True)
    value = json.loads(text.replace('"alpha.', f'"{NEW}.').replace('"backend":"alpha"', f'"backend":"{NEW}"'))
    return Capability.model_validate(value)


@pytest.fixture
def driver() -> Driver:
    return Driver("alpha", "beta", changed={NEW: newer()}, express=True)


def begin(driver: Driver, **rules: Any) -> list[act.Action]:
    return driver(ev.RolloutAsked(Rollout("alpha", NEW, (1.0,), Rules(**rules))))


def test_the_next_call_of_a_known_route_goes_to_the_new_version(driver: Driver) -> None:
    before = driver.serve(1)
    assert isinstance(begin(driver)[-1], act.KeepRollouts)
    assert [type(one) for one in driver.ran(before)][-1:] == [act.Answer]  # it stays where it is
    assert driver.state.clients[CLIENT].routes[1].signature.spec.rolled == (NEW,)
    driver.ran(driver.serve(2))
    assert driver.state.workers[NEW].answered == 1
    driver(ev.RollbackAsked("alpha", "enough"))
    driver.ran(driver.serve(3))
    assert (driver.state.workers[NEW].answered, driver.state.workers["alpha"].answered) == (1, 2)


def test_leases_end_with_each_step(driver: Driver) -> None:
    for seq in range(1, 5):
        driver.ran(driver.serve(seq))
    assert driver.state.clients[CLIENT].routes[1].is_leased
    assert any(isinstance(one, act.RevokeLane) for one in begin(driver))
    assert not driver.state.clients[CLIENT].routes[1].is_leased


def test_no_signature_outlives_its_routes(driver: Driver) -> None:
    """Each variant that a route has had is given back with it, and its plans with that."""
    for seq in range(1, 9, 2):
        driver.ran(driver.serve(seq))
        begin(driver)
        driver.ran(driver.serve(seq + 1))
        driver(ev.RollbackAsked("alpha", "enough"))
    assert len(driver.state.signatures.known) == 2
    assert not any(isinstance(one, act.SendDrop) for one in begin(driver))  # calls may be on their way under its plan
    dropped = driver(ev.RouteForgotten(CLIENT, 1))
    assert sum(isinstance(one, act.SendDrop) for one in dropped) == 2
    assert driver.state.signatures.known == {}
    assert driver.state.signatures.plans == {}


def test_a_call_that_the_new_version_fails_is_the_old_ones_and_ends_it(driver: Driver) -> None:
    begin(driver)
    run = driver.serve(1)
    actions = driver.raised(run, GENTLE)
    if not any(isinstance(one, act.Run) for one in actions):
        actions = driver.ready("alpha")
    actions = driver.ran(driver.run_of(actions))
    (answer,) = (one for one in actions if isinstance(one, act.Answer))
    assert [attempt["backend"] for attempt in answer.attempts] == [NEW]
    (kept,) = (one.rollouts[0] for one in actions if isinstance(one, act.KeepRollouts))
    assert kept.state == "rolled back"
    assert "alpha@2.silu failed a call that alpha.silu then served" in kept.why
    assert driver.state.clients[CLIENT].routes[1].signature.spec.rolled == ()


def test_a_step_by_time_ends_at_its_time(driver: Driver) -> None:
    begin(driver, after_calls=0, after_s=60)
    for seq in range(1, 22):
        driver.ran(driver.serve(seq))
    assert driver.state.wakeup_s <= driver.now_s + 60
    assert not any(isinstance(one, act.KeepRollouts) for one in driver.tick(59))
    (kept,) = (one.rollouts[0] for one in driver.tick(2) if isinstance(one, act.KeepRollouts))
    assert kept.state == "promoted"


def test_what_was_kept_holds_for_clients_that_come(driver: Driver) -> None:
    kept = Rollout("alpha", NEW, (0.5,)).ended("promoted", "well done")
    gone = Rollout("beta", "beta@9", (0.5,)).ended("promoted", "its environment was removed since")
    driver(ev.RolloutsKept((kept, gone)))
    driver.join(b"C2", 2)
    assert driver.state.clients[b"C2"].routes[1].signature.spec.rolled == (NEW,)
    driver.route(2, backend="alpha", identity=b"C2")
    assert driver.state.clients[b"C2"].routes[2].signature.spec.rolled == ()
