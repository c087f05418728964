"""An event whose handling raises an error that nobody has thought of: whose call is lost hears of it."""

from __future__ import annotations

import pytest
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev


def test_a_call_that_is_nowhere_is_found_and_its_clients_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("alpha")
    driver.join(b"C2", 2)
    run = driver.serve(1)
    driver.call(2)
    driver.call(11, identity=b"C2")
    assert driver.state.bereft() == []
    with monkeypatch.context() as patched:
        patched.setattr(driver.state.lease_policy, "note_time", _fail)
        with pytest.raises(OverflowError):
            driver.ran(run)
    (client,) = driver.state.bereft()
    assert client.identity == CLIENT
    assert client.open_calls == 1  # the other one is at the worker
    assert driver.state.bereft() == []
    driver(ev.ClientLeft(CLIENT))
    (call, other) = driver.state.workers["alpha"].running
    assert (call.client.number, call.seq, other.client.number) == (1, 2, 2)
    closed = driver(ev.CallRan(b"W1", call.dispatch, call.attempt, 5000, b""))
    assert act.CloseArena(1, 1) in closed


def _fail(*_: object, **__: object) -> None:
    raise OverflowError
