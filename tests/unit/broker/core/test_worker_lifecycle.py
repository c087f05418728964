"""When workers start again."""

from __future__ import annotations

from tests.unit.broker.driver import LIMITS, Driver


def test_workers_that_died_together_do_not_start_together() -> None:
    """Whatever was too much for the machine, such as all their imports at once, would be so again."""
    names = ("alpha", "beta", "gamma")
    driver = Driver(*names)
    for seq, name in enumerate(names, start=2):
        driver.route(seq, backend=name)
        driver.ran(driver.serve(seq, seq))
    for name in names:
        driver.dies(name)
    delays_s = [driver.state.workers[name].retry_at_s - driver.now_s for name in names]
    assert len(set(delays_s)) == len(names)
    assert all(0.75 * LIMITS["backoff_s"] <= delay_s <= 1.25 * LIMITS["backoff_s"] for delay_s in delays_s)
