"""Plans whose calls are served by several workers: branches that do not need each other are under way at the same time,
and what goes wrong in one of them leaves the others whole."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import PAUSE, fault
from tests.process.harness import Site, in_threads, is_paused, wait_until
from tests.process.planned import agree, settled, silu, some, two_ready

import layerzero as lz

X = np.linspace(-2, 2, 36, dtype=np.float32).reshape(6, 6)
W = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)


def branches(x: Any) -> Any:
    """Two that alternate, and their join."""
    a, b = lz.silu(x, backend="alpha"), lz.silu(x, backend="beta")
    a, b = lz.matmul(a, W, backend="alpha"), lz.matmul(b, 2 * W, backend="beta")
    return lz.matmul(a, b, backend="alpha"), a


def wanted(x: Any) -> Any:
    a, b = silu(x) @ W, silu(x) @ (2 * W)
    return a @ b, a


def agree_all(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        agree(one, other)


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return two_ready(new_site)


@pytest.fixture
def pids(site: Site) -> Iterator[list[int]]:
    """Of the two workers; they go on in the end."""
    found = [site.backend(name)["pid"] for name in ("alpha", "beta")]
    yield found
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it may have ended with its broker
            os.kill(pid, signal.SIGCONT)


def test_calls_of_two_workers_that_alternate_cross_as_three_messages(site: Site) -> None:
    """Those of a worker are drawn together; the join waits for both."""
    plan = settled(lz.plan(branches, bake_constants=True), X, messages=3)
    assert plan.explain().at_once == 2
    assert "in 3 messages, 2 at once" in str(plan.explain())
    assert plan.show().count("[one message, 2 at once]") == 2
    assert plan.show().count("[one message]") == 1
    for seed in range(30):
        agree_all(plan(some(seed, 6, 6)), wanted(some(seed, 6, 6)))
    assert [t.kernel_id.partition(".")[0] for t in plan.timings()] == ["alpha", "beta", "alpha", "beta", "alpha"]


def test_both_branches_are_under_way_at_the_same_time(site: Site, pids: list[int]) -> None:
    """Each of the two workers pauses in its first call, and neither waits for the other."""
    plan = settled(lz.plan(branches, bake_constants=True), X, messages=3)
    paused = X.copy()
    paused.flat[0] = fault(PAUSE)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(plan(paused)))
    thread.start()
    wait_until(lambda: all(map(is_paused, pids)))
    for pid in pids[::-1]:
        os.kill(pid, signal.SIGCONT)
    thread.join()
    agree_all(results[0], wanted(paused))
    assert {t.how for t in plan.timings()} == {"chain"}


def test_a_line_over_two_workers_keeps_its_order(site: Site) -> None:
    """Each step takes what the other worker has just made, in memory that is used again and again."""

    def line(x: Any) -> Any:
        for name in ("alpha", "beta") * 4:
            x = lz.silu(x, backend=name)
        return x

    plan = settled(lz.plan(line), X, messages=8)
    assert plan.explain().at_once == 1
    for seed in range(20):
        expected = some(seed, 6, 6)
        for _ in range(8):
            expected = silu(expected)
        agree(plan(some(seed, 6, 6)), expected)


def test_steps_of_its_own_part_what_may_cross_together(site: Site) -> None:
    """What they read has been made, and what they write is there for those behind them."""

    def function(x: Any) -> Any:
        a, b = lz.silu(x, backend="alpha"), lz.silu(x, backend="beta")
        a += b
        c, d = lz.silu(a, backend="beta"), lz.matmul(a, W, backend="alpha")
        return lz.matmul(c.reshape(6, 6), d, backend="alpha")

    plan = settled(lz.plan(function), X, messages=5)
    for seed in range(20):
        x = some(seed, 6, 6)
        agree(plan(x), silu(2 * silu(x)) @ (2 * silu(x) @ W))


@pytest.mark.parametrize("nth", [600, 601])
@pytest.mark.parametrize("lost", ["faulty", "alpha"])
@pytest.mark.parametrize("action", ["kill", "exit0", "raise"])
def test_a_worker_lost_in_a_branch_costs_one_attempt_and_no_result(
    new_site: Callable[..., Site], lost: str, action: str, nth: int
) -> None:
    """In any of its steps; what the other branch made is whole."""
    site = new_site(failpoints=f"{lost}:executing={action}@{nth}", standby=0, backoff_s=600, backoff_max_s=600)
    site.add_backend("faulty", ndim=2)
    site.set_policy("rules:\n- prefer: [faulty.silu, alpha.matmul]\n  bonus: 9000\n")
    site.connect()
    site.wait_ready("faulty", "alpha", "beta")

    def function(x: Any) -> Any:
        a, b = lz.silu(x), lz.matmul(x, W)
        a, b = lz.silu(a), lz.matmul(b, W)
        return lz.matmul(a, b)

    plan = lz.plan(function)
    wait_until(lambda: plan(X) is not None and " for all (" in plan.explain().choice)
    settled(plan, X, messages=3)
    assert plan.explain().at_once == 2
    for seed in range(nth):
        x = some(seed, 6, 6)
        agree(plan(x), silu(silu(x)) @ (x @ W @ W))
        runs = {t.name: [run for run in plan.timings() if run.name == t.name] for t in plan.timings()}
        if any(run.attempts for its in runs.values() for run in its):
            break
    else:
        pytest.fail("the failpoint was never passed")
    its, others = (runs["silu"], runs["matmul"][:2]) if lost == "faulty" else (runs["matmul"], runs["silu"])
    at = next(n for n, run in enumerate(its) if run.attempts)
    assert its[at].how == "call"
    assert not any(run.attempts for run in others), "as a chain, or as calls where its leases ended with that death"
    for seed in range(10):
        x = some(seed, 6, 6)
        agree(plan(x), silu(silu(x)) @ (x @ W @ W))


def test_an_interrupt_while_branches_are_under_way_ends_them_all(site: Site, pids: list[int]) -> None:
    """Their memory is not used again, and the next run has both lanes."""
    plan = settled(lz.plan(branches, bake_constants=True), X, messages=3)
    paused = X.copy()
    paused.flat[0] = fault(PAUSE)

    def interrupt() -> None:
        wait_until(lambda: all(map(is_paused, pids)))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        plan(paused)
    thread.join()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for seed in range(10):
        agree_all(plan(some(seed, 6, 6)), wanted(some(seed, 6, 6)))
    settled(plan, X, messages=3)


def test_a_broker_that_dies_while_branches_are_under_way_is_said(site: Site, pids: list[int]) -> None:
    """And the plan goes on with the next one."""
    plan = settled(lz.plan(branches, bake_constants=True), X, messages=3)
    paused = X.copy()
    paused.flat[0] = fault(PAUSE)
    pid = site.broker_pid
    assert pid is not None

    def kill() -> None:
        wait_until(lambda: all(map(is_paused, pids)))
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(lz.BrokerLost):
        plan(paused)
    thread.join()
    site.connect()
    settled(plan, X, messages=3)
    agree_all(plan(some(1, 6, 6)), wanted(some(1, 6, 6)))


def test_threads_with_plans_of_their_own_share_the_lanes(site: Site) -> None:
    """One chain is on a lane at a time: others' steps are calls meanwhile."""

    def work() -> None:
        plan = lz.plan(branches, bake_constants=True)
        for seed in range(60):
            agree_all(plan(some(seed, 6, 6)), wanted(some(seed, 6, 6)))

    in_threads(4, work)
