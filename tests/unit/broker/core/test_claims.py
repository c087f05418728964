"""What one client says or asks for does not harm the others."""

from __future__ import annotations

import math

import pytest
from tests.simulation import route_body
from tests.unit.broker.driver import CLIENT, Driver, kinds, poisoned, refusal

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.clients import MAX_ROUTE_BYTES
from layerzero.broker.selection.certification import Subject
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec


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
