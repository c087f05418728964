"""Calls that pass the broker by: the same answers, the same reports, and the same ends when something breaks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import HANG, KILL, PAUSE, RAISE, fault
from tests.process.harness import PATIENCE_S, Site, is_paused, is_running, wait_ended, wait_until

import layerzero as lz
from layerzero.client.connection.arena import pool

X = np.linspace(-3, 3, 8, dtype=np.float32)
PHASES = ("received", "mapped", "executing", "written", "sent")
SEEN_AS = {"received": "mapped", "mapped": "mapped", "executing": "executing", "written": "written"}
ON_LANE = 7  # passages of a worker until it is sure to be in a call on a lane
BY_BOTH = pytest.mark.parametrize("timeout_s", [None, 60], ids=["compiled", "python"])  # _repeats.c takes no timeouts
SHORT_S = 1.0  # a deadline of calls that hang, and of the next kernel, which may have to wait for a core


@pytest.fixture
def connected(connected: Site) -> Site:
    """No worker is about to be ready: that is news to the broker, which takes leases back for it."""
    connected.wait_ready("alpha", "beta")
    return connected


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def call(x: np.ndarray, **kwargs: object) -> lz.SelectionReport:
    """Run silu, check its numbers, return the report."""
    np.testing.assert_allclose(lz.silu(x, **kwargs), silu(x), rtol=1e-6)  # type: ignore[arg-type]
    report = lz.last_report()
    assert report is not None
    return report


def settle(x: np.ndarray = X, **kwargs: object) -> lz.SelectionReport:
    """Call until the call is on a lane."""
    return wait_until(lambda: report if (report := call(x, **kwargs)).path == "express" else None)


def shaped(ndim: int) -> np.ndarray:
    return X.reshape(*[1] * (ndim - 1), 8)


def bad(action: int, backend: str = "") -> np.ndarray:
    """Of X's shape, so that it goes where X goes."""
    return np.array([fault(action, backend), *X[1:]], np.float32)


def faulty_site(new_site: Callable[..., Site], points: dict[str, str], **settings: object) -> Site:
    """Backends with a failpoint each, first choice for arrays of 1, 2, ... dimensions; beta is the second for all."""
    failpoints = ";".join(f"{name}:{point}@{ON_LANE}" for name, point in points.items())
    site = new_site(failpoints=failpoints, standby=0, **{"backoff_s": 600, "backoff_max_s": 600, **settings})
    for ndim, name in enumerate(points, start=1):
        site.add_backend(name, ndim=ndim)
    site.connect()
    site.wait_ready("beta", *points)  # passes a failpoint once
    return site


def settled_site(new_site: Callable[..., Site], **settings: object) -> Site:
    """X is on a lane, and nothing that would take its lease back is under way."""
    site = new_site(**settings)
    site.connect()
    site.wait_ready("alpha", "beta")  # the standby worker's start is news to the broker, and so the end of leases
    settle()
    return site


def settled_client(site: Site, program: str, **options: Any) -> subprocess.Popen[str]:
    """Another process, whose calls like those of its `x` are on a lane; from there it goes on with the program."""
    client = site.python(
        "import numpy as np\n"
        "from tests.backends.toy import PAUSE, fault\n"
        "lz.connect()\n"
        "x = np.linspace(-3, 3, 8, dtype=np.float32)\n"
        "lz.silu(x)\n"
        "while lz.last_report().path != 'express': lz.silu(x)\n"
        "print('settled', flush=True)\n" + program,
        **options,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "settled\n"
    return client


def forked(say: Callable[[], object]) -> Callable[[], str]:
    """A child of this process begins with `say`, and is not waited for before it is asked what that said."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(int(PATIENCE_S))  # on its parent's lane it would wait for good
            os.write(write, str(say()).encode())
        finally:
            os._exit(0)
    os.close(write)

    def said() -> str:
        with open(read) as end:
            text = end.read()
        os.waitpid(child, 0)
        return text

    return said


def before_the_fault(x: np.ndarray) -> None:
    """All calls but the one that a failpoint hits; the last ones are on a lane."""
    lanes = [call(x).lane for _ in range(ON_LANE - 2)]
    assert lanes[0] == "broker"
    assert lanes[-1] == "express"


# --- the normal case


def test_a_settled_route_leaves_the_broker_out(connected: Site) -> None:
    """The report says so, with the same facts, and `lz status` counts the calls all the same."""
    settle()
    before = connected.backend("alpha")["answered"]
    reports = [call(X) for _ in range(10)]
    assert {report.path for report in reports} == {"express"}
    assert (reports[0].backend, reports[0].kernel_id) == ("alpha", "alpha.silu")
    assert reports[0].worker_pid == connected.backend("alpha")["pid"]
    assert reports[0].kernel_us > 0
    assert {c.backend for c in reports[0].candidates} >= {"alpha", "beta", "gamma"}
    assert connected.backend("alpha")["answered"] == before + 10


def test_results_on_a_lane_are_those_of_each_call(connected: Site) -> None:
    """Inputs, outputs and out= change from call to call under one lease."""
    settle()
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(200):
        x = rng.standard_normal(8, dtype=np.float32)
        kept.append((x, lz.silu(x)))
    for x, result in kept:
        np.testing.assert_allclose(result, silu(x), rtol=1e-6)
    out = lz.empty(8)
    for _ in range(6):
        assert lz.silu(X, out=out) is out
    np.testing.assert_allclose(out, silu(X), rtol=1e-6)


def test_arrays_of_calls_on_a_lane_are_let_go(connected: Site) -> None:
    """What a session remembers of a call, to make it again soon, must not keep the caller's memory."""
    x, out = lz.share(X), lz.empty(8)
    settle()
    gc.collect()
    before = pool.stats()["slots"]
    for _ in range(ON_LANE):
        lz.silu(x, out=out)
    report = lz.last_report()
    assert report is not None
    assert report.path == report.lane == "express"
    del x, out
    gc.collect()
    assert pool.stats()["slots"] == before - 2


def test_threads_share_lanes_and_get_their_own_results(connected: Site) -> None:
    """One call at a time is on a lane; the others go through the broker meanwhile."""
    settle()

    def work(seed: int) -> set[str]:
        rng, lanes = np.random.default_rng(seed), set()
        for _ in range(100):
            lanes.add(call(rng.standard_normal(8, dtype=np.float32)).lane)
        return lanes

    with ThreadPoolExecutor(8) as threads:
        lanes = set().union(*threads.map(work, range(8)))
    assert "express" in lanes


def test_the_lane_is_a_setting(new_site: Callable[..., Site]) -> None:
    """Who suspects it can switch it off."""
    new_site(express="false").connect()
    assert {call(X).path for _ in range(10)} == {"broker"}


def test_a_call_on_a_new_arena_comes_by_the_broker_once(connected: Site) -> None:
    """Only the broker can lend memory to a worker."""
    settle()
    before = pool.stats()["arenas"]
    big = []  # until a new arena is needed
    while pool.stats()["arenas"] == before:
        big.append(lz.empty(1 << 20))
    kept = [lz.empty(8) for _ in range(3)]
    for out in kept:
        lz.silu(X, out=out)
        np.testing.assert_allclose(out, silu(X), rtol=1e-6)
    assert settle().path == "express"


# --- what ends a lease


def test_a_policy_change_takes_leases_back(new_site: Callable[..., Site]) -> None:
    """A file that forbids a backend counts for settled routes as well, within the second in which it is looked at."""
    site = new_site()
    site.connect()
    settle()
    site.set_policy("avoid_kernels: [alpha.*]\n")
    wait_until(lambda: call(X).backend == "beta")
    assert {call(X).backend for _ in range(20)} == {"beta"}
    assert settle().backend == "beta"


def test_a_callers_own_policy_is_another_route(connected: Site) -> None:
    """`lz.prefer` takes effect at once, lease or not."""
    settle()
    with lz.prefer("gamma"):
        assert call(X).backend == "gamma"
    assert call(X).backend == "alpha"


def test_shadow_checks_see_every_call(new_site: Callable[..., Site]) -> None:
    """A rate of checks is of all calls, so that calls are not lent a lane that hides them from it."""
    site = new_site()
    site.set_policy("shadow_rate: 0.5\n")
    site.connect()
    assert {call(X).path for _ in range(20)} == {"broker"}


# --- deaths


@pytest.mark.parametrize("action", ["kill", "exit0", "hang"])
def test_a_worker_lost_in_any_phase_costs_one_attempt(new_site: Callable[..., Site], action: str) -> None:
    """As on the broker's lane: one attempt with its facts, then the next backend's right answer."""
    site = faulty_site(new_site, {f"at-{phase}": f"{phase}={action}" for phase in SEEN_AS})
    timeout_s = SHORT_S if action == "hang" else None
    outcome = {"kill": ("BACKEND_ERROR", 9, None), "exit0": ("BACKEND_ERROR", None, 0), "hang": ("DEADLINE", 9, None)}
    for ndim, phase in enumerate(SEEN_AS, start=1):
        before_the_fault(shaped(ndim))
        report = call(shaped(ndim), timeout_s=timeout_s)
        failed, served = report.attempts
        assert (failed.backend, failed.outcome, failed.exit_signal, failed.exit_code) == (
            f"at-{phase}",
            *outcome[action],
        )
        assert failed.phase == SEEN_AS[phase]
        assert served.backend in ("alpha", "beta")
        assert report.path == "broker"
        assert not is_running(failed.worker_pid)
        assert [e["backend"] for e in site.events("worker.exited")][-1] == f"at-{phase}"
        assert settle(shaped(ndim)).backend != failed.backend


def test_a_worker_that_dies_after_its_answer_loses_nothing(new_site: Callable[..., Site]) -> None:
    """The end of the call was on the page before the worker's."""
    faulty_site(new_site, {"at-sent": "sent=kill"})
    before_the_fault(X)
    assert call(X).backend == "at-sent"
    assert call(X).backend in ("alpha", "beta")  # alpha where it is up by now


def test_nothing_is_left_of_a_worker_that_ended_between_two_calls(new_site: Callable[..., Site]) -> None:
    """One lane is there at a time, however often its worker starts."""
    site = new_site(backoff_s=0.01, backoff_max_s=0.01)
    site.connect()
    pids, lanes = site.wait_ready("alpha", "beta"), set()
    for exits in range(0, 6, 2):
        settle()
        gc.collect()
        lanes.add(Path("/proc/self/maps").read_text().count("memfd:lz-lane"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
        wait_until(lambda: len(site.events("worker.exited")) >= exits + 2)  # noqa: B023
        lz.session().ask("reset")
        pids = site.wait_ready("alpha", "beta")
    assert len(lanes) == 1


def test_ends_that_make_no_sense_cost_the_worker_its_life(new_site: Callable[..., Site]) -> None:
    """A worker that breaks the protocol cannot be trusted with memory; silence ends at the deadline."""
    outcomes = {"garbage": "BAD_MESSAGE", "truncated": "BAD_MESSAGE", "stale": "BAD_MESSAGE", "silent": "DEADLINE"}
    faulty_site(new_site, {reply: f"written={reply}" for reply in outcomes})
    for ndim, (reply, outcome) in enumerate(outcomes.items(), start=1):
        before_the_fault(shaped(ndim))
        report = call(shaped(ndim), timeout_s=SHORT_S if reply == "silent" else None)
        failed = report.attempts[0]
        assert (failed.backend, failed.outcome, failed.exit_signal) == (reply, outcome, signal.SIGKILL)
        assert report.backend in ("alpha", "beta")
        assert not is_running(failed.worker_pid)


def test_a_kernel_that_raises_goes_on_to_the_broker(connected: Site) -> None:
    """Only the broker may try another kernel; the attempt on the lane is in the report, and the worker lives."""
    settle()
    lz.silu(bad(RAISE, "alpha"))
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.outcome, a.phase) for a in report.attempts] == [
        ("alpha", "BACKEND_ERROR", "express"),
        ("alpha", "BACKEND_ERROR", ""),
        ("beta", None, ""),
    ]
    assert settle().backend == "alpha"


def test_inputs_that_kill_every_worker_are_poison_also_from_a_lane(new_site: Callable[..., Site]) -> None:
    """The death on the lane counts: two workers, not three, and the same inputs are refused from then on."""
    connected = settled_site(new_site, backoff_s=0.01)
    deaths = len(connected.events("worker.exited"))
    with pytest.raises(lz.Poison):
        lz.silu(bad(KILL))
    assert len(connected.events("worker.exited")) == deaths + 2
    with pytest.raises(lz.Poison):
        lz.silu(bad(KILL))
    assert len(connected.events("worker.exited")) == deaths + 2
    connected.wait_ready("alpha")
    assert call(X).path == "broker"  # a poisoned signature's inputs are looked at one by one


def test_a_busy_lane_is_no_fault_of_the_calls_behind_it(new_site: Callable[..., Site]) -> None:
    """The deadline of a call through the broker runs while its own kernel does, not while a lane's call does."""
    site = settled_site(new_site)
    slow = settled_client(
        site,
        "x[0] = fault(PAUSE, 'alpha')\nlz.silu(x)\nprint(lz.last_report().path, lz.last_report().backend)\n",
    )
    alpha = site.backend("alpha")["pid"]
    wait_until(lambda: is_paused(alpha))
    behind = lz.submit(lz.silu, X, backend="alpha", timeout_s=SHORT_S)
    with pytest.raises(TimeoutError):
        behind.result(timeout=1.2 * SHORT_S)  # its deadline would have passed
    os.kill(alpha, signal.SIGCONT)
    behind.result()
    assert slow.communicate()[0] == "express alpha\n"
    assert site.events("worker.exited") == []


# --- the other ends


@BY_BOTH
def test_the_brokers_death_ends_a_call_on_a_lane(new_site: Callable[..., Site], timeout_s: float | None) -> None:
    """Its workers die with it, so that nobody is left to answer."""
    site = settled_site(new_site)
    pid = site.broker_pid
    assert pid is not None
    session = lz.session()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call, X).result()
        hanging = thread.submit(lz.silu, bad(HANG, "alpha"), timeout_s=timeout_s)
        wait_until(lambda: _in_lane_call(site))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(lz.BrokerLost):
            hanging.result(PATIENCE_S)
        assert thread.submit(session.last_report).result() is None, "not that of an earlier call"
    wait_ended(pid)


def _in_lane_call(site: Site) -> bool:
    """The session's lane has a call that nobody waits to claim."""
    return any(lane.page.calls > lane.page.done for lane in list(lz.session().lanes.by_number.values()))


@BY_BOTH
def test_closing_the_session_cancels_a_call_on_a_lane(new_site: Callable[..., Site], timeout_s: float | None) -> None:
    """As on the broker's lane."""
    site = settled_site(new_site)
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(lz.silu, bad(HANG, "alpha"), timeout_s=timeout_s)
        wait_until(lambda: _in_lane_call(site))
        lz.disconnect()
        with pytest.raises(lz.Cancelled):
            hanging.result(PATIENCE_S)


@pytest.mark.parametrize("hears", ["who waits", "another thread"])
def test_an_interrupt_keeps_the_memory_and_the_lane_until_the_call_ends(connected: Site, hears: str) -> None:
    """The worker may still write: neither its memory nor its lane may be given to the next call. A signal that another
    thread hears, as one that comes just before the wait, breaks no sleep off: it is looked for once a second."""
    settle()
    main, alpha = threading.main_thread().ident, connected.backend("alpha")["pid"]
    assert main is not None
    with ThreadPoolExecutor(1) as thread:

        def interrupt() -> None:
            wait_until(lambda: is_paused(alpha))
            signal.pthread_kill(main if hears == "who waits" else threading.get_ident(), signal.SIGINT)

        done, start_s = thread.submit(interrupt), time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            lz.silu(bad(PAUSE, "alpha"), timeout_s=2 * PATIENCE_S)
        assert time.monotonic() - start_s < PATIENCE_S
        done.result()
    assert {call(X, backend="beta").lane for _ in range(3)} == {"broker"}
    os.kill(alpha, signal.SIGCONT)
    assert settle().path == "express"


def test_a_forked_child_has_lanes_of_its_own(connected: Site) -> None:
    """The page of the parent's would be written by two."""
    settle()

    def paths() -> list[str]:
        found = [call(X).path]
        while found[-1] != "express" and len(found) < 1000:
            found.append(call(X).path)
        return sorted(set(found))

    said = forked(paths)
    assert {call(X).path for _ in range(50)} == {"express"}
    assert said() == "['broker', 'express']"


def test_a_forked_child_leaves_the_parents_lane_alone_where_it_makes_the_same_call(connected: Site) -> None:
    """What is remembered of a call on the same memory leads to the parent's lane."""
    x = lz.share(X)
    out = lz.empty(X.shape, X.dtype.name)
    settle(x, out=out)
    settle(x, out=out)
    assert forked(lambda: call(x, out=out).lane)() == "broker"
    settle(x, out=out)


def test_a_client_killed_on_a_lane_harms_nobody(new_site: Callable[..., Site]) -> None:
    """Its call ends, its lane and memory are given back, and the worker serves others."""
    site = settled_site(new_site)
    other = settled_client(site, "x[0] = fault(PAUSE, 'alpha')\nlz.silu(x)\n")
    alpha = site.backend("alpha")["pid"]
    wait_until(lambda: is_paused(alpha))  # its worker is in its call
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    os.kill(alpha, signal.SIGCONT)
    assert call(X).backend == "alpha"
    assert settle().backend == "alpha"
    assert site.events("worker.exited") == []
