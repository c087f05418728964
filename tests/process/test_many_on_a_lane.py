"""Several calls of one client on a lane at once, and what becomes of each when something breaks among them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import HANG, KILL, PAUSE, RAISE
from tests.process.harness import PATIENCE_S, Site, is_paused, wait_ended, wait_until
from tests.process.test_express import X, bad, forked, settle, settled_client, settled_site, silu

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.client.connection.express import Lane
from layerzero.ipc.shm import lane

MANY = 40  # more than enough, fewer than there are places


@pytest.fixture
def connected(connected: Site) -> Site:
    connected.wait_ready("alpha", "beta")
    settle()
    return connected


def submitted(count: int, *odd: np.ndarray) -> tuple[list[np.ndarray], list[lz.Future]]:
    """Calls like X's, the first ones `odd`. Once calls of this kind are on a lane, these are, too."""
    rng = np.random.default_rng(0)
    inputs = [*odd, *(rng.standard_normal(8, dtype=np.float32) for _ in range(count - len(odd)))]
    return inputs, [lz.submit(lz.silu, x) for x in inputs]


def check(inputs: list[np.ndarray], futures: list[lz.Future]) -> list[lz.SelectionReport]:
    """All have their own results; the reports."""
    reports = []
    for x, future in zip(inputs, futures, strict=True):
        np.testing.assert_allclose(future.result(), silu(x), rtol=1e-6)
        assert future.report is not None
        reports.append(future.report)
    return reports


def paused(count: int) -> tuple[int, list[np.ndarray], list[lz.Future]]:
    """Calls of which the worker is in the first one, and stopped: its pid."""
    pid = settle().worker_pid
    inputs, futures = submitted(count, bad(PAUSE, "alpha"))
    wait_until(lambda: is_paused(pid))
    return pid, inputs, futures


# --- the normal case


@pytest.mark.parametrize("count", [1, MANY, lane.DEPTH, 3 * lane.DEPTH])
def test_submitted_calls_ride_a_lane(connected: Site, count: int) -> None:
    """Those that find no place on it go by the broker meanwhile."""
    pid, inputs, futures = paused(count)
    assert not any(future.done() for future in futures)
    os.kill(pid, signal.SIGCONT)
    reports = check(inputs[1:], futures[1:])
    futures[0].result()
    assert sum(report.path == "express" for report in reports) == min(count, lane.DEPTH) - 1
    assert all(future.done() for future in futures)


def test_a_program_that_only_submits_gets_a_lane(connected: Site) -> None:
    """It need not make a call and wait for it first."""
    x = np.linspace(0, 1, 16, dtype=np.float32)

    def path() -> str:
        future = lz.submit(lz.silu, x)
        np.testing.assert_allclose(future.result(), silu(x), rtol=1e-6)
        assert future.report is not None
        return future.report.path

    wait_until(lambda: path() == "express")


def test_results_are_taken_in_any_order_and_memory_comes_back(connected: Site) -> None:
    """Also those that nobody takes."""
    for _ in range(20):
        inputs, futures = submitted(MANY)
        order = np.random.default_rng(1).permutation(MANY)[: MANY // 2]
        check([inputs[n] for n in order], [futures[n] for n in order])
    out = lz.empty(8)
    assert lz.submit(lz.silu, X, out=out).result() is out
    np.testing.assert_allclose(out, silu(X), rtol=1e-6)


def test_threads_and_tasks_share_a_lane(connected: Site) -> None:
    """Each waits for its own calls, whoever hears the bell."""

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(100):
            x = rng.standard_normal(8, dtype=np.float32)
            future = lz.submit(lz.silu, x) if step % 3 else None
            y = rng.standard_normal(8, dtype=np.float32)
            np.testing.assert_allclose(lz.silu(y), silu(y), rtol=1e-6)
            if future is not None:
                np.testing.assert_allclose(future.result(), silu(x), rtol=1e-6)

    async def tasks() -> None:
        inputs, futures = submitted(MANY)
        for x, result in zip(inputs, await asyncio.gather(*futures), strict=True):
            np.testing.assert_allclose(result, silu(x), rtol=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    asyncio.run(tasks())


def test_two_clients_share_a_worker_in_turns(connected: Site) -> None:
    """A full lane of one is not before the other's single call."""
    other = settled_client(
        connected,
        "input()\n"
        "future = lz.submit(lz.silu, x)\n"
        "print('put', flush=True)\n"
        "future.result()\n"
        "print(future.report.path, flush=True)\n",
        stdin=subprocess.PIPE,
    )
    assert other.stdout is not None
    assert other.stdin is not None
    pid, inputs, futures = paused(MANY)
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "put\n"
    os.kill(pid, signal.SIGCONT)
    assert other.communicate()[0] == "express\n"
    check(inputs[1:], futures[1:])


# --- a worker's end


def test_a_worker_that_is_killed_costs_each_call_on_its_lane_an_attempt(connected: Site) -> None:
    """The one that it was in has failed there; the others had not begun. None is lost."""
    pid, inputs, futures = paused(MANY)
    exits = len(connected.events("worker.exited"))
    os.kill(pid, signal.SIGKILL)
    futures[0].result()
    first = futures[0].report
    assert first is not None
    assert (first.attempts[0].outcome, first.attempts[0].phase) == ("BACKEND_ERROR", "executing")
    for report in check(inputs[1:], futures[1:]):
        assert [(a.outcome, a.backend, a.worker_pid) for a in report.attempts[:1]] == [("BACKEND_ERROR", "alpha", pid)]
        assert report.attempts[0].phase == "express"
    assert len(connected.events("worker.exited")) == exits + 1


def test_inputs_that_kill_are_blamed_alone(new_site: Callable[..., Site]) -> None:
    """Two deaths make them poison, not those on the lane with them."""
    site = settled_site(new_site, backoff_s=0.01)
    exits = len(site.events("worker.exited"))
    inputs, futures = submitted(MANY, X, X, bad(KILL), X)
    with pytest.raises(lz.Poison):
        futures[2].result()
    check(inputs[:2] + inputs[3:], futures[:2] + futures[3:])
    assert len(site.events("worker.exited")) == exits + 2


def test_a_kernel_that_raises_costs_its_own_call_an_attempt(connected: Site) -> None:
    """As a single call; `done` says so when the broker has answered, too."""
    settle()
    inputs, futures = submitted(MANY, X, bad(RAISE, "alpha"), X)
    wait_until(lambda: all(future.done() for future in futures))
    futures[1].result()
    odd = futures[1].report
    assert odd is not None
    assert [(a.backend, a.outcome) for a in odd.attempts[:1]] == [("alpha", "BACKEND_ERROR")]
    assert odd.backend != "alpha"
    for report in check(inputs[:1] + inputs[2:], futures[:1] + futures[2:]):
        assert (report.backend, len(report.attempts)) == ("alpha", 1)


def test_a_call_that_takes_too_long_costs_its_worker_and_not_those_behind_it(new_site: Callable[..., Site]) -> None:
    """Their own time runs, too; the broker gives them more."""
    site = settled_site(new_site, timeout_s=2)
    pid = settle().worker_pid
    inputs, futures = submitted(MANY, X, bad(HANG, "alpha"), X)
    check(inputs[:1], futures[:1])
    futures[1].result()
    late = futures[1].report
    assert late is not None
    assert late.attempts[0].outcome == "DEADLINE"
    check(inputs[2:], futures[2:])
    (gone,) = site.events("worker.exited")
    assert gone["pid"] == pid


def test_a_call_that_waited_for_long_has_its_own_time_when_it_has_begun(new_site: Callable[..., Site]) -> None:
    """It is claimed when its time on the lane is all but over: its worker is not killed for that."""
    site = settled_site(new_site, timeout_s=4)
    pid, inputs, futures = paused(2)
    more = submitted(1, bad(PAUSE, "alpha"))[1]  # put some moments later
    with pytest.raises(TimeoutError):
        futures[1].result(timeout=3.7)
    os.kill(pid, signal.SIGCONT)
    futures[0].result()
    check(inputs[1:], futures[1:])
    wait_until(lambda: is_paused(pid))
    with pytest.raises(TimeoutError):
        more[0].result(timeout=1)
    os.kill(pid, signal.SIGCONT)
    more[0].result()
    assert site.events("worker.exited") == []


# --- one call gives up


def test_a_call_whose_time_is_up_leaves_the_lane_to_the_others(connected: Site) -> None:
    """The worker has not taken it: nobody is to blame."""
    pid, inputs, futures = paused(MANY)
    exits = len(connected.events("worker.exited"))
    with ThreadPoolExecutor(1) as thread:
        short = thread.submit(lz.silu, X, timeout_s=0.2, backend="alpha")
        more, behind = submitted(3)
        wait_until(lambda: any(client["open_calls"] for client in lz.status()["clients"]))  # it went to the broker
        os.kill(pid, signal.SIGCONT)
        np.testing.assert_allclose(short.result(PATIENCE_S), silu(X), rtol=1e-6)
    assert all(report.path == "express" for report in check(inputs[1:] + more, futures[1:] + behind))
    assert len(connected.events("worker.exited")) == exits


def test_an_interrupted_call_leaves_the_lane_to_the_others(connected: Site) -> None:
    """It is withdrawn, and its memory is free at once; those before and behind it run."""
    x = lz.share(X)
    pid, inputs, futures = paused(MANY)
    main = threading.main_thread().ident
    assert main is not None
    page = next(iter(lz.session().lanes.by_number.values())).page
    before = page.calls
    gc.collect()
    slots = pool.stats()["slots"]
    with ThreadPoolExecutor(1) as thread:

        def interrupt() -> None:
            wait_until(lambda: page.calls > before)
            signal.pthread_kill(main, signal.SIGINT)

        done = thread.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            lz.silu(x, timeout_s=PATIENCE_S)
        done.result()
    del x
    gc.collect()
    assert pool.stats()["slots"] == slots - 1
    more, behind = submitted(3)
    os.kill(pid, signal.SIGCONT)
    assert all(report.path == "express" for report in check(inputs[1:] + more, futures[1:] + behind))


def test_a_call_that_is_interrupted_as_it_is_put_leaves_the_lane(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller never had a receipt for it."""
    x = lz.share(X)
    pid, inputs, futures = paused(MANY)
    gc.collect()
    slots, put = pool.stats()["slots"], Lane.put

    def interrupted(self: Lane, *given: Any) -> None:
        assert put(self, *given) is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lz.silu(x, timeout_s=PATIENCE_S)  # with one, not by _repeats.c
    monkeypatch.undo()
    del x
    gc.collect()
    assert pool.stats()["slots"] == slots - 1
    os.kill(pid, signal.SIGCONT)
    check(inputs[1:], futures[1:])


def test_a_result_that_is_asked_for_too_early_can_be_asked_for_again(connected: Site) -> None:
    """The call goes on."""
    pid, inputs, futures = paused(MANY)
    with pytest.raises(TimeoutError):
        futures[-1].result(timeout=0.05)
    os.kill(pid, signal.SIGCONT)
    check(inputs[1:], futures[1:])


# --- the other ends


def test_the_brokers_death_ends_the_calls_that_have_not_ended(new_site: Callable[..., Site]) -> None:
    """What was on the page by then counts."""
    site = settled_site(new_site)
    inputs, futures = submitted(MANY, X, bad(HANG, "alpha"))
    check(inputs[:1], futures[:1])
    broker = site.broker_pid
    assert broker is not None
    os.kill(broker, signal.SIGKILL)
    for future in futures[1:]:
        with pytest.raises(lz.BrokerLost):
            future.result(PATIENCE_S)
    wait_ended(broker)


def test_closing_the_session_cancels_the_calls_that_have_not_ended(new_site: Callable[..., Site]) -> None:
    """Whether somebody waits for them or not."""
    settled_site(new_site)
    inputs, futures = submitted(MANY, X, bad(HANG, "alpha"))
    check(inputs[:1], futures[:1])
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(future.result) for future in futures[1:3]]
        lz.disconnect()
        for one in (*waiting, *futures[3:]):
            with pytest.raises(lz.Cancelled):
                one.result(PATIENCE_S)
    assert [future.report for future in futures[1:]] == [None] * (MANY - 1), "not those of earlier calls"


def test_a_client_that_is_killed_with_many_calls_harms_nobody(new_site: Callable[..., Site]) -> None:
    """Those on its lane may still run; what they are lent stays until then."""
    site = settled_site(new_site)
    other = settled_client(
        site,
        "y = x.copy()\n"
        "y[0] = fault(PAUSE, 'alpha')\n"
        "futures = [lz.submit(lz.silu, one) for one in (y, *[x] * 30)]\n"
        "print('put', flush=True)\n"
        "futures[-1].result()\n",
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "put\n"
    alpha = site.backend("alpha")["pid"]
    wait_until(lambda: is_paused(alpha))
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    os.kill(alpha, signal.SIGCONT)
    inputs, futures = submitted(MANY)
    check(inputs, futures)
    assert site.events("worker.exited") == []


def test_a_forked_child_does_not_wait_for_its_parents_calls(connected: Site) -> None:
    """Their lane is the parent's; a call of the child's own has its own."""
    pid, inputs, futures = paused(5)

    def ask() -> str:
        with pytest.raises(lz.BrokerLost) as refusal:
            futures[1].result()
        return refusal.value.message

    assert forked(ask)().endswith("its answer goes to the parent; call again here")
    os.kill(pid, signal.SIGCONT)
    check(inputs[1:], futures[1:])
