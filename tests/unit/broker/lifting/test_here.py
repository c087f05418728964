"""Leave to run a provider in the caller's process on a GPU: to whom it is given, and what takes it back."""

from __future__ import annotations

import pytest
from tests.unit.broker.lifting.test_lifts import CLIENT, Rig, policy, rig

from layerzero.broker.core import events as ev

__all__ = ["rig"]


@pytest.mark.parametrize("isolation", ["in_process", "auto"])
def test_who_can_run_it_may_where_policy_wants_that(rig: Rig, isolation: str) -> None:
    """On the word of the page's epoch, and its times count. A client that cannot has the next rung of the ladder."""
    rig.driver(ev.PolicyChanged(policy(isolation)))
    assert rig.ask(here=True) == {
        "state": "here",
        "number": 1,
        "backend": "alpha",
        "kernel_id": "alpha.silu",
        "epoch": 1,
        "is_graph_safe": False,
        "copies_inputs": False,
        "copies_outputs": False,
    }
    grant = rig.state.clients[CLIENT].routes[2].grant
    assert grant is not None
    assert grant.kernel_id == "alpha.silu"
    assert [row["state"] for row in rig.lifts.facts()] == ["in process"]
    assert rig.told == []
    without = rig.ask()
    if isolation == "auto":
        assert without == {"state": "pending"}
    else:
        assert (without["state"], without["reason"]) == ("refused", "NOT_ALLOWED")
        assert "backend_isolation is in_process" in without["detail"]


@pytest.mark.parametrize(("isolation", "state"), [("subprocess", "refused"), ("lifted", "pending")])
def test_nobody_may_where_policy_does_not_want_it(rig: Rig, isolation: str, state: str) -> None:
    rig.driver(ev.PolicyChanged(policy(isolation)))
    answer = rig.ask(here=True)
    assert (answer["state"], answer.get("here")) == (state, None)


@pytest.mark.parametrize("here", [None, 1, "yes", []])
def test_only_true_says_that_a_client_can(rig: Rig, here: object) -> None:
    rig.driver(ev.PolicyChanged(policy("auto")))
    assert rig.ask(here=here) == {"state": "pending"}


def test_policy_that_changes_takes_leave_back(rig: Rig) -> None:
    rig.driver(ev.PolicyChanged(policy("in_process")))
    rig.lifts.look()
    assert rig.ask(here=True)["state"] == "here"
    rig.lifts.look()
    assert rig.bumps == 0
    rig.driver(ev.PolicyChanged(policy("subprocess")))
    rig.lifts.look()
    assert rig.bumps == 1


def test_fault_keeps_it_in_its_worker(rig: Rig) -> None:
    """For all, lifted or not; the client is told that it is about running here."""
    rig.driver(ev.PolicyChanged(policy("auto")))
    number = rig.ask(here=True)["number"]
    assert rig.lifts.note_fault(CLIENT, {"numbers": [number]}) == {"kernels": ["alpha.silu"]}
    assert rig.bumps == 1
    refused = rig.ask(here=True)
    assert (refused["state"], refused["reason"], refused["here"]) == ("refused", "FAULTED", True)
    assert refused["backend"] == "alpha"
    assert rig.ask()["reason"] == "FAULTED"


def test_client_that_ends_without_a_word_makes_it_suspect(rig: Rig) -> None:
    rig.driver(ev.PolicyChanged(policy("in_process")))
    rig.last = {rig.ask(here=True)["number"]}
    rig.lifts.on_client_left(1)
    refused = rig.ask(here=True)
    assert (refused["reason"], refused["here"]) == ("FAULTED", True)
    assert "ended without a word" in refused["detail"]
