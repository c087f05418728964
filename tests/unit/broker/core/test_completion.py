"""What the core learns from an answer."""

from __future__ import annotations

import pytest
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.ipc.errors import BackendError


@pytest.mark.parametrize("is_fallback", [True, False])
def test_a_kernels_time_counts_only_where_nothing_went_before_it(is_fallback: bool) -> None:
    """After a failed attempt caches are cold and the machine is busy with what failed: no fair comparison."""
    driver = Driver("alpha", "beta")
    cell = driver.state.clients[CLIENT].routes[1].signature.cell
    for seq in (1, 2):
        run = driver.serve(seq)
        if is_fallback:
            actions = driver.raised(run, BackendError("boom"))
            run = driver.run_of(driver.ready("beta") if seq == 1 else actions)
        driver.ran(run)
    stat = driver.state.engine.perf.stat(f"{'beta' if is_fallback else 'alpha'}.silu", cell.key)
    assert (stat is None) == is_fallback
