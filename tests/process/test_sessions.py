"""Clients and their broker: sharing, threads, forks, futures, back-pressure and leaving."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import HANG, PAUSE, RAISE, fault
from tests.process.harness import PATIENCE_S, Site, is_paused, is_running, wait_ended, wait_until

import layerzero as lz
from layerzero.client.facade import default_session

X = np.array([1, 2, 3], np.float32)
may_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns in threaded processes


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def check(x: np.ndarray, result: np.ndarray) -> None:
    np.testing.assert_allclose(result, silu(x), rtol=1e-5)


# --- one broker for all


def test_processes_share_one_broker(connected: Site) -> None:
    """One set of workers, one view of what is broken."""
    other = connected.python("print(lz.connect().broker_pid, lz.session().broker_pid)")
    assert other.communicate(timeout=PATIENCE_S)[0].split() == [str(lz.session().broker_pid)] * 2
    assert connected.connect() is lz.session()


CROWD = """
import os, sys
start_read, start_write = os.pipe()
stop_read, stop_write = os.pipe()
children = 8
for _ in range(children):
    if os.fork() == 0:
        os.close(start_write), os.close(stop_write)
        os.read(start_read, 1)
        os.write(1, f"{lz.connect().broker_pid}\\n".encode())
        os.read(stop_read, 1)
        os._exit(0)
os.close(start_write)
sys.stdin.read()
"""


def test_eight_processes_that_connect_at_once_start_one_broker(new_site: Callable[..., Site]) -> None:
    """A launcher starts all ranks in the same millisecond; two brokers would split the machine."""
    site = new_site(linger_s=0.1)
    crowd = site.python(CROWD, stdin=subprocess.PIPE)
    assert crowd.stdin is not None
    assert crowd.stdout is not None
    pids = {crowd.stdout.readline().strip() for _ in range(8)}
    assert len(pids) == 1
    assert len(site.events("broker.started")) == 1
    crowd.stdin.close()
    crowd.wait()
    crowd.stdout.close()
    wait_ended(int(pids.pop()))


def test_a_broker_ends_with_its_last_client(new_site: Callable[..., Site]) -> None:
    """lz.connect() must not leave daemons behind, nor end a broker that others use."""
    site = new_site(linger_s=0.05)
    pid = site.connect().broker_pid
    second = site.python("lz.connect()\nprint(1, flush=True)\ninput()", stdin=subprocess.PIPE)
    assert second.stdin is not None
    assert second.stdout is not None
    second.stdout.readline()
    workers = site.wait_ready("alpha")
    lz.disconnect()
    assert is_running(pid)
    second.stdin.close()
    second.wait()
    second.stdout.close()
    wait_ended(pid)
    assert not any(is_running(worker) for worker in workers)


def test_connecting_while_the_broker_ends_starts_another(new_site: Callable[..., Site]) -> None:
    """Short scripts one after the other hit the moment when the last client has just left."""
    site = new_site(linger_s=0.001)
    pids = set()
    for _ in range(6):
        pids.add(site.connect().broker_pid)
        lz.null(backend="null")
        lz.disconnect()
    assert len(site.events("broker.started")) == len(pids)


def test_a_broker_that_stays_outlives_its_clients(connected: Site) -> None:
    """`lz up` is for services; they keep warm workers between clients."""
    pid = lz.session().broker_pid
    (alpha,) = connected.wait_ready("alpha")
    lz.disconnect()
    connected.connect()
    assert lz.session().broker_pid == pid
    assert connected.wait_ready("alpha") == [alpha]


# --- threads, futures, forks


@pytest.mark.usefixtures("connected")
def test_sixteen_threads_get_their_own_answers() -> None:
    """Crossed replies would be wrong results that look right."""

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for i in range(60):
            shape = rng.choice([(3,), (2, 5), (64, 64), (0, 4), ()])
            dtype = rng.choice(["float32", "float64"])
            x = (np.arange(int(np.prod(shape))) + 1000 * seed + i).reshape(shape).astype(dtype) / 1000
            kind = rng.randrange(5)
            if kind == 0:
                check(x, lz.silu(x, backend=rng.choice(["alpha", "beta", "gamma"])))
            elif kind == 1:
                out = lz.empty(shape, dtype)
                check(x, lz.silu(lz.share(x), out=out))
            elif kind == 2:
                a = np.full((2, 2), seed, dtype)
                np.testing.assert_allclose(lz.matmul(a, a), a @ a)
            elif kind == 3:
                with pytest.raises(lz.BackendError):
                    lz.silu(np.array([fault(RAISE), seed, i]))
            else:
                futures = [lz.submit(lz.silu, x + n) for n in range(3)]
                for n in (2, 0, 1):
                    check(x + n, futures[n].result())
            report = lz.last_report()
            assert report is not None
            assert report.op == ("matmul" if kind == 2 else "silu")

    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(work, seed) for seed in range(16)]:
            done.result(timeout=PATIENCE_S)


class Gate(threading.Event):
    """An event whose waiter goes on only when the gate is open too: a thread that the scheduler forgot."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) and self.gate.wait(timeout)


def test_a_waiting_thread_takes_over_reading_even_from_one_that_was_slow_to_wake(connected: Site) -> None:
    """One thread reads for all. The next reader may be picked when it has its own answer already and is about to
    leave; it must then pick another, or that one sleeps for ever."""
    alpha, beta, _ = pids = connected.wait_ready("alpha", "beta", "gamma")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    reader, slow, last = (lz.submit(lz.silu, X, backend=name) for name in ("alpha", "beta", "gamma"))
    assert slow._submitted is not None
    pending, link = slow._submitted.pending, lz.session().link
    event = pending.event = Gate()
    with ThreadPoolExecutor(3) as threads:
        try:
            first = threads.submit(reader.result)
            wait_until(lambda: link._turn)
            second = threads.submit(slow.result)
            wait_until(lambda: len(link._waiting) == 1)
            third = threads.submit(last.result)
            wait_until(lambda: len(link._waiting) == 2)
            os.kill(beta, signal.SIGCONT)
            wait_until(lambda: pending.is_done)
            os.kill(alpha, signal.SIGCONT)
            check(X, first.result(timeout=PATIENCE_S))
        finally:
            event.gate.set()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        check(X, second.result(timeout=PATIENCE_S))
        check(X, third.result(timeout=PATIENCE_S))


@pytest.mark.usefixtures("connected")
def test_futures_can_be_asked_in_any_order_and_awaited() -> None:
    """Results come back as kernels finish; who asks when must not matter."""
    inputs = [np.full(4, i, np.float32) for i in range(200)]
    futures = [lz.submit("silu", x) for x in inputs]
    for i in random.Random(7).sample(range(200), 100):
        check(inputs[i], futures[i].result())
        check(inputs[i], futures[i].result())  # again gives the same

    async def gather() -> list[Any]:
        return await asyncio.gather(*futures)

    for x, result in zip(inputs, asyncio.run(gather()), strict=True):
        check(x, result)


@pytest.mark.usefixtures("connected")
def test_done_becomes_true_without_anyone_waiting() -> None:
    """Polling is how event loops and progress bars look at futures."""
    future = lz.submit(lz.silu, X)
    wait_until(future.done)
    check(X, future.result())
    failing = lz.submit(lz.silu, np.array([fault(RAISE)]), backend="alpha")
    wait_until(failing.done)
    for _ in range(2):
        with pytest.raises(lz.BackendError):
            failing.result()


def test_a_future_can_be_asked_for_a_while_and_again(connected: Site) -> None:
    """Servers poll with a limit of their own; running out of it must not cost the call."""
    (gamma,) = connected.wait_ready("gamma")
    before = lz.submit(lz.silu, np.array([fault(PAUSE), 1, 2], np.float32), backend="gamma", timeout_s=600)
    wait_until(lambda: is_paused(gamma))
    future = lz.submit(lz.silu, np.array([fault(HANG), 1, 2], np.float32), backend="gamma", timeout_s=0.5)
    assert repr(future) == "<lz.Future of silu: running>"
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError, match="silu is still running"):
            future.result(timeout=timeout)
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(future.result)  # reads for all
        wait_until(lambda: lz.session().link._turn)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        other = lz.submit(lz.silu, X, backend="alpha")
        check(X, other.result(timeout=PATIENCE_S))
        os.kill(gamma, signal.SIGCONT)
        with pytest.raises(lz.DeadlineExceeded, match="larger timeout_s") as failure:
            asked.result(timeout=PATIENCE_S)
    before.result()
    assert repr(future) == "<lz.Future of silu: failed, DEADLINE>"
    assert future.report is failure.value.report
    assert repr(other) == "<lz.Future of silu: done>"
    assert other.report is not None
    assert (other.report.backend, other.report.attempts[-1].outcome) == ("alpha", None)


def test_a_future_reports_its_own_call(connected: Site) -> None:
    """lz.last_report() is of the last call of a thread, which is seldom the one in question."""
    connected.wait_ready("alpha", "beta")
    futures = {name: lz.submit(lz.silu, X, backend=name) for name in ("alpha", "beta")}
    assert futures["alpha"].report is None
    for future in futures.values():
        future.result()
    assert {name: future.report.backend for name, future in futures.items() if future.report} == {
        "alpha": "alpha",
        "beta": "beta",
    }


def test_submit_takes_ops_only() -> None:
    """A function that is no op would run here, in the caller's process, at once."""
    for wrong in (len, "len", "connect", None):
        with pytest.raises(lz.InvalidArgument, match="is not an op"):
            lz.submit(wrong)  # type: ignore[arg-type]


def in_fork(work: Callable[[], object]) -> object:
    """Run `work` in a forked child and return what it returned; raises what it raised."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def main() -> None:
        try:
            sender.send(work())
        except BaseException as exc:
            sender.send(exc)

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    sender.close()
    with receiver:
        assert receiver.poll(30), "the child hangs"
        answer = receiver.recv()
    child.join()
    child.close()
    if isinstance(answer, BaseException):
        raise answer
    return answer


@may_fork
def test_a_forked_child_gets_a_connection_of_its_own(connected: Site) -> None:
    """Data loaders and servers fork after set-up; answers must not cross, and neither side may notice the other."""
    shared = lz.share(X)
    check(X, lz.silu(shared))

    def work() -> tuple[np.ndarray, int, bool]:
        result = lz.silu(shared)
        return np.array(result), lz.session().broker_pid, lz.connect() is lz.session()

    for _ in range(2):
        result, pid, is_same = in_fork(work)  # type: ignore[misc]
        check(X, result)
        assert (pid, is_same) == (connected.broker_pid, True)
        check(X, lz.silu(shared))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if lz.silu(X).shape == (3,) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    wait_until(lambda: len(lz.status()["clients"]) == 1)


@may_fork
def test_a_fork_in_the_middle_of_other_threads_calls_works(connected: Site) -> None:
    """Locks that another thread held at the fork belong to nobody in the child."""
    stop = threading.Event()

    def call() -> None:
        n = 0
        while not stop.is_set():
            n = n % 500 + 1
            check(np.ones(n, np.float32), lz.silu(np.ones(n, np.float32)))

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call) for _ in range(4)]
        try:
            for _ in range(8):
                check(X, in_fork(lambda: np.array(lz.silu(X))))  # type: ignore[arg-type]
        finally:
            stop.set()
        for done in calls:
            done.result()


@may_fork
@pytest.mark.usefixtures("connected")
def test_a_future_from_before_the_fork_is_refused_in_the_child() -> None:
    """Its answer goes to the parent; a child that waited would wait for ever, or steal it."""
    future = lz.submit(lz.silu, X)
    with pytest.raises(lz.BrokerLost, match=r"submitted before a fork.*call again here"):
        in_fork(future.result)
    check(X, future.result())


# --- back-pressure and leaving


def test_more_open_calls_than_allowed_are_busy(new_site: Callable[..., Site]) -> None:
    """A queue without a limit hides overload until memory is gone; one that is full says so and recovers."""
    site = new_site(max_in_flight=4, standby=0, backoff_s=0.01)
    site.connect()
    (alpha,) = site.wait_ready("alpha")
    os.kill(alpha, signal.SIGSTOP)
    waiting = [lz.submit(lz.silu, X, backend="alpha", timeout_s=600) for _ in range(4)]
    with pytest.raises(lz.Busy, match="allowed: 4") as failure:
        lz.silu(X)
    assert failure.value.facts["limit"] == 4
    os.kill(alpha, signal.SIGCONT)
    for call in waiting:
        check(X, call.result())
    check(X, lz.silu(X))


@pytest.mark.usefixtures("connected")
def test_who_submits_without_waiting_is_slowed_down_and_not_cut_off() -> None:
    """Answers that nobody reads must not fill the broker's queue until it takes the client for dead."""
    futures: list[Any] = []
    while len(futures) < 6_000:
        try:
            futures.append(lz.submit("null", backend="alpha"))
        except lz.Busy:
            futures[-1].result()
    for future in futures:
        assert future.result() is None


def test_disconnect_ends_open_calls_as_cancelled(connected: Site) -> None:
    """Whoever waits in another thread must be told, at once; the memory of the call is not used again."""
    (gamma,) = connected.wait_ready("gamma")
    session = lz.session()

    def wait_for(first: float) -> None:
        lz.submit(lz.silu, np.array([first, 1], np.float32), backend="gamma", timeout_s=600).result()

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(wait_for, fault(PAUSE))]
        wait_until(lambda: is_paused(gamma))
        calls += [threads.submit(wait_for, 1.0) for _ in range(2)]
        wait_until(lambda: connected.backend("gamma")["running"] == 3)
        lz.disconnect()
        for call in calls:
            with pytest.raises(lz.Cancelled, match="session was closed"):
                call.result(timeout=PATIENCE_S)
    os.kill(gamma, signal.SIGCONT)
    with pytest.raises(lz.NotConnected, match=r"lz\.connect\(\)"):
        lz.silu(X)
    with pytest.raises(lz.NotConnected, match=r"lz\.connect\(\)"):
        session.ask("status")
    lz.disconnect()
    connected.connect()
    check(X, lz.silu(X))
    from layerzero.client.connection import retained

    assert len(retained._quarantine) == 3
    wait_until(lambda: connected.backend("gamma")["running"] == 0)
    retained._quarantine.clear()  # that worker is dead now


def test_disconnecting_under_load_neither_hangs_nor_crashes(connected: Site) -> None:
    """Shutdown code runs while other threads still work."""

    def call() -> str:
        while True:
            try:
                check(X, lz.silu(X))
            except (lz.Cancelled, lz.NotConnected) as exc:
                return exc.code

    with ThreadPoolExecutor(6) as threads:
        for _ in range(10):
            calls = [threads.submit(call) for _ in range(6)]
            for _ in range(20):
                lz.status()
            lz.disconnect()
            assert {c.result(timeout=PATIENCE_S) for c in calls} <= {"CANCELLED", "NOT_CONNECTED"}
            connected.connect()
    from layerzero.client.connection import retained

    wait_until(lambda: all(b["running"] + b["waiting"] == 0 for b in lz.status()["backends"]))
    retained._quarantine.clear()


@pytest.mark.usefixtures("connected")
def test_a_session_that_is_closed_while_a_thread_begins_to_read_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looked just before must not touch the socket just after. Found by a chaos run, one call of 484,000."""
    link = lz.session().link
    take_turn = link._take_turn

    def others_close_first() -> bool:
        monkeypatch.setattr(link, "_take_turn", take_turn)
        thread = threading.Thread(target=lz.disconnect)
        thread.start()
        thread.join()
        return take_turn()

    monkeypatch.setattr(link, "_take_turn", others_close_first)
    link.read_nowait()
    assert not link.is_alive


def test_using_an_op_before_connect_says_so() -> None:
    """The first error of most new users."""
    lz.disconnect()
    for use in (lambda: lz.silu(X), lz.status, lz.last_report, lambda: lz.explain("silu", X)):
        with pytest.raises(lz.NotConnected, match=r"call lz\.connect\(\) first"):
            use()


def test_a_broker_that_cannot_start_shows_why(new_site: Callable[..., Site]) -> None:
    """The daemon's stderr is a file; its last words belong into the error."""
    site = new_site(depth="many")
    with pytest.raises(lz.ConfigError, match=r"LAYERZERO_DEPTH.*got 'many'"):
        site.connect()


def test_integrations_stay_with_the_broker_that_the_program_chose(
    new_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Also after it was lost, whatever the variables say by then."""
    site = new_site()
    session = site.connect()
    with site.environment():
        os.environ["LAYERZERO_RUNTIME_DIR"] = str(tmp_path)
        assert lz.ensure_connected() is session
        os.kill(session.broker_pid, signal.SIGKILL)
        wait_until(lambda: not session.is_alive)
        later = lz.ensure_connected()
        assert later is not session
        assert (later.path, default_session.session()) == (session.path, later)
    assert not list(tmp_path.iterdir())
