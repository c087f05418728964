"""Backends that a running broker learns of."""

from __future__ import annotations

import pytest
from tests.simulation import CAPABILITIES
from tests.unit.broker.driver import Driver, refusal

from layerzero.broker.core import events as ev
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason

LACKS = Rejection(Reason.NOT_INSTALLED, "is not built", "lz env build beta")


@pytest.mark.parametrize("env", ["", "0123"])
def test_calls_that_were_refused_are_served_by_a_backend_that_has_come(env: str) -> None:
    """Also of a route whose ranking was kept. To hear of it twice changes nothing."""
    driver = Driver("alpha", unusable={"alpha": LACKS})
    assert "alpha" in str(refusal(driver.call(1)).error)
    driver(ev.BackendLearned("beta", CAPABILITIES["beta"], None, env))
    assert driver.notes[-1].event == "backend.learned"
    driver.ran(driver.serve(2))
    driver(ev.BackendLearned("beta", CAPABILITIES["beta"], LACKS, env))
    driver.ran(driver.serve(3))
    assert driver.state.workers["beta"].answered == 2


def test_one_that_is_not_built_yet_waits_for_that() -> None:
    driver = Driver("alpha", unusable={"alpha": LACKS})
    driver(ev.BackendLearned("beta", CAPABILITIES["beta"], LACKS, ""))
    assert "lz env build beta" in str(refusal(driver.call(1)).candidates)
    driver(ev.BackendReset("beta", None))
    driver.ran(driver.serve(2))
    assert driver.state.workers["beta"].answered == 1


def test_one_whose_worker_joins_is_none_of_the_brokers() -> None:
    driver = Driver("alpha", unusable={"alpha": LACKS})
    driver(ev.BackendLearned("beta", CAPABILITIES["beta"], LACKS, "", is_joined=True))
    assert driver.state.workers["beta"].is_joined
