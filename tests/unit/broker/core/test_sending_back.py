"""Calls that end at once because their client must do the next step: copy inputs, or run the kernel itself."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation import CAPABILITIES
from tests.unit.broker.driver import BODY, CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.ipc.errors import BackendError
from layerzero.ipc.transport.messages import Decision, Route, decode, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

FAILURE = BackendError("RuntimeError: kernel raised")


def with_policy(driver: Driver, **values: Any) -> None:
    driver(ev.PolicyChanged(Policy.of(Layer("test", values))))


def open_breaker(driver: Driver, backend: str = "alpha") -> None:
    """Fail until it is open, then let the time pass until one call may try."""
    engine = driver.state.engine
    while not engine.health.view(backend, "silu", engine.device.device_uuid, driver.now_s).is_open:
        engine.note_failure(backend, "silu", FAILURE, driver.now_s)
    while not engine.health.view(backend, "silu", engine.device.device_uuid, driver.now_s).may_probe:
        driver.now_s += 1.0
    engine.epoch += 1


def test_grant_is_given_to_clients_that_can_use_it() -> None:
    driver = Driver("alpha")
    with_policy(driver, backend_isolation={"alpha": "in_process"})
    (refuse,) = driver.call(1, may_run_here=True)
    assert isinstance(refuse, act.Refuse)
    assert (refuse.error.code, refuse.error.facts["kernel_id"]) == ("RUN_IN_PROCESS", "alpha.silu")
    assert driver.call(2) == [act.Probe("alpha")]


def test_kernel_that_failed_of_late_is_not_run_in_the_callers_process() -> None:
    """Nor is its one trial given away to a process that would not say how it went."""
    driver = Driver("alpha")
    with_policy(driver, backend_isolation={"alpha": "in_process"})
    open_breaker(driver)
    assert driver.call(1, may_run_here=True) == [act.Probe("alpha")]


def test_call_that_is_sent_back_for_copies_does_not_use_up_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries nothing; the call that comes again with the copies does."""
    known = CAPABILITIES["alpha"]
    ops = {**known.ops, "silu": (known.ops["silu"][0].model_copy(update={"requires_contiguous": True}),)}
    monkeypatch.setitem(CAPABILITIES, "alpha", known.model_copy(update={"ops": ops}))
    driver = Driver("alpha", "beta")
    strided, dense = TensorSpec("float32", (4,), (2,)), TensorSpec.contiguous("float32", (4,))
    body = encode(Route(op="silu", inputs=[strided.to_wire()], outputs=[dense.to_wire()], attrs={}))
    driver(ev.RouteDefined(CLIENT, 2, body))
    open_breaker(driver)
    (refuse,) = driver.call(1, route=2, body=BODY)
    assert isinstance(refuse, act.Refuse)
    assert refuse.error.facts == {"transforms": ["contiguous x"]}
    assert driver.call(2, route=1) == [act.Probe("alpha")]
    assert driver.call(3, route=1) == [act.Probe("beta")]


def test_decision_tells_the_client_what_to_sample() -> None:
    """Told anew when the policy changes."""
    driver = Driver("alpha")

    def decided(seq: int) -> tuple[float, bool]:
        (told,) = (a for a in driver.ran(driver.serve(seq)) if isinstance(a, act.SendDecision))
        decision = decode(told.body, Decision)
        return decision.shadow_rate, decision.offers_samples

    assert decided(1) == (0.0, False)
    with_policy(driver, shadow_rate=0.25, tune_budget=0.1)
    assert decided(2) == (0.25, True)
