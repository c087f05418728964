"""What the broker does about backends that die, cannot start or are stopped, and what is left when it dies itself."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import HANG, KILL, fault
from tests.process.harness import (
    BACKENDS,
    PATIENCE_S,
    Site,
    is_paused,
    is_running,
    processes,
    state_of,
    wait_ended,
    wait_until,
)

import layerzero as lz
from layerzero.broker.processes.supervisor import LOG_KEPT_BYTES, LOG_LIMIT_BYTES
from layerzero.client.connection import link, retained
from layerzero.client.connection.arena import pool

X = np.array([1, 2, 3], np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def kill_worker(site: Site, name: str) -> None:
    """SIGKILL the idle worker of a backend; returns when the broker has taken note."""
    before = site.backend(name)
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: site.backend(name)["pid"] != before["pid"])


def test_a_worker_that_dies_idle_is_back_after_its_back_off(connected: Site) -> None:
    """Nobody calls meanwhile; the next call must find it warm, and its death is on record."""
    connected.wait_ready("alpha", "beta")
    before = connected.backend("alpha")
    kill_worker(connected, "alpha")
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)  # beta or alpha, but never an error
    connected.wait_ready("alpha")
    after = connected.backend("alpha")
    assert after["restarts"] == before["restarts"] + 1
    assert after["pid"] != before["pid"]
    assert after["unavailable"] is None
    lz.silu(X)
    report = lz.last_report()
    assert report is not None
    assert (report.backend, report.worker_pid) == ("alpha", after["pid"])
    assert connected.events("worker.exited")[-1]["exit"] == "signal 9"


def test_a_stopped_worker_is_killed_at_the_deadline(connected: Site) -> None:
    """SIGSTOP looks alive to everything but a deadline."""
    alpha, _ = connected.wait_ready("alpha", "beta")
    os.kill(alpha, signal.SIGSTOP)
    np.testing.assert_allclose(lz.silu(X, timeout_s=1), silu(X), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.outcome, a.exit_signal) for a in report.attempts] == [
        ("alpha", "DEADLINE", signal.SIGKILL),
        ("beta", None, None),
    ]
    assert not is_running(alpha)


def test_what_a_worker_started_ends_with_it(new_site: Callable[..., Site]) -> None:
    """Libraries start compilers and servers; they must not outlive the worker that was killed."""
    site = new_site()
    site.add_backend("parent", provider=PARENT)
    site.connect()
    (pid,) = site.wait_ready("parent")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(pid, signal.SIGKILL)
    wait_ended(int(children[0]))


def test_a_crash_loop_ends_in_disabled_with_cause_and_repair(new_site: Callable[..., Site]) -> None:
    """Restarting for ever hides the fault and heats the room; the report must say what to do instead."""
    site = new_site(restart_budget=1, backoff_s=0.01, standby=0)
    site.connect()
    for _ in range(2):
        (pid,) = site.wait_ready("alpha")
        with pytest.raises(lz.BackendError):
            lz.silu(np.array([fault(KILL)]), backend="alpha")
        wait_ended(pid)
    wait_until(lambda: site.backend("alpha")["state"] == "disabled")
    status = site.backend("alpha")
    assert status["unavailable"]["code"] == "BACKEND_DISABLED"
    assert "2 times in 30 s" in status["cause"]
    assert "signal 9" in status["cause"]
    for fact in ("BACKEND_DISABLED", "2 times in 30 s", "repair: lz restart alpha"):
        with pytest.raises(lz.NoBackend, match=fact):
            lz.silu(X, backend="alpha")
        assert fact in str(lz.explain("silu", X))
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert report.backend == "beta"
    lz.session().ask("reset", backend="alpha")
    site.wait_ready("alpha")
    np.testing.assert_allclose(lz.silu(X, backend="alpha"), silu(X), rtol=1e-6)


BROKEN = {
    "raises": ("def load():\n    raise ImportError(\"No module named 'quux'\")\n", "No module named 'quux'"),
    "dies": ("import os, signal\ndef load():\n    os.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL"),
    "lies": ("from tests_no_such import nothing\n", "tests_no_such"),
    "hangs": ("import threading\ndef load():\n    threading.Event().wait()\n", "did not get on within 6 s"),
}
TOY = (Path(__file__).parents[1] / "backends" / "toy.py").read_text()
PARENT = TOY.replace("def load()", "import subprocess\nsubprocess.Popen(['sleep', '600'])\n\n\ndef load()")
# Passes the probe and fails as a worker.
UNREADY = TOY.replace(
    "def load() -> Loaded:\n",
    "def load() -> Loaded:\n    import sys\n    assert 'layerzero.workers.probe' in sys.orig_argv, 'lost'\n",
)


def test_backends_that_cannot_load_are_disabled_one_by_one(new_site: Callable[..., Site]) -> None:
    """A broken environment is a configuration failure: tried once, named with its repair, harmless to the others."""
    site = new_site(standby=8, start_timeout_s=6)
    for name, (source, _) in BROKEN.items():
        site.add_backend(f"{name}-in-load", provider=source)
    site.connect()
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert report.backend == "alpha"
    for name, (_, cause) in BROKEN.items():
        status = wait_until(lambda name=name: _disabled(site, f"{name}-in-load"))  # type: ignore[misc]
        assert status["unavailable"]["code"] == "BACKEND_IMPORT_FAILED"
        assert cause in status["cause"]
        assert status["unavailable"]["repair"].startswith(f"lz env probe {name}-in-load")
        assert status["restarts"] == 0
        with pytest.raises(lz.NoBackend, match="BACKEND_IMPORT_FAILED"):
            lz.silu(X, backend=f"{name}-in-load")
    assert not [e for e in site.events("worker.started") if e["backend"].endswith("-in-load")]


def _disabled(site: Site, name: str) -> dict[str, object]:
    status = site.backend(name)
    return status if status["state"] == "disabled" else {}


def test_a_worker_that_never_becomes_ready_is_not_restarted(new_site: Callable[..., Site]) -> None:
    """It passed the probe and fails as a worker: trying again would fail again, and the caller waits."""
    site = new_site(standby=0)
    site.add_backend("unready", provider=UNREADY)
    site.connect()
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.outcome) for a in report.attempts] == [("unready", "BACKEND_ERROR"), ("alpha", None)]
    status = site.backend("unready")
    assert (status["state"], status["restarts"]) == ("disabled", 0)
    assert "never became ready" in status["cause"]
    assert "AssertionError: lost" in status["cause"]
    assert len([e for e in site.events("worker.started") if e["backend"] == "unready"]) == 1


def test_a_broken_descriptor_disables_its_backend_and_is_a_problem(new_site: Callable[..., Site]) -> None:
    """A typo in one file must not take the service down, nor go unseen."""
    site = new_site()
    site.add_backend("typo")
    path = site.manifests / "typo.json"
    path.write_text(path.read_text().replace('"deterministic"', '"determinstic"'))
    site.connect()
    assert any("typo.json" in problem and "determinstic" in problem for problem in lz.status()["problems"])
    assert "typo" not in [b["name"] for b in lz.status()["backends"]]
    lz.null(backend="alpha")


def test_an_unbuilt_environment_names_the_command_that_builds_it(connected: Site) -> None:
    """Nothing is built behind the user's back; the way to have it is one command."""
    status = connected.backend("torch")
    assert (status["state"], status["built"]) == ("absent", False)
    assert status["unavailable"] == {
        "code": "NOT_INSTALLED",
        "detail": "its environment is not built",
        "repair": "lz env build torch",
    }
    with pytest.raises(lz.NoBackend, match=r"^gelu: no kernel accepts this call; repair: lz env build mlx\n"):
        lz.gelu(X)


# --- the broker's own death


def test_broker_death_is_seen_at_once_and_leaves_no_worker(new_site: Callable[..., Site]) -> None:
    """A call in flight ends in BrokerLost, long before its deadline, nothing keeps running, and connecting again brings
    everything back."""
    site = new_site()
    session = site.connect()
    alpha, beta = site.wait_ready("alpha", "beta")
    errors: list[BaseException] = []

    def hang() -> None:
        try:
            lz.silu(np.array([fault(HANG), 1], np.float32), backend="alpha", timeout_s=600)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=hang) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: site.backend("alpha")["running"] == 3)
    os.kill(session.broker_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [type(e) for e in errors] == [lz.BrokerLost] * 3
    for pid in (alpha, beta):
        wait_ended(pid)
    with pytest.raises(lz.BrokerLost, match=r"lz\.connect\(\)"):
        lz.silu(X)
    again = site.connect()
    assert again.broker_pid != session.broker_pid
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    assert len([name for name in os.listdir(site.folder) if name.startswith("client-")]) == 1


def test_broker_told_to_end_finishes_what_runs_and_refuses_the_rest(new_site: Callable[..., Site]) -> None:
    """lz down must not cut off answers, nor wait for a kernel that hangs."""
    site = new_site()
    session = site.connect()
    site.wait_ready("alpha", "beta")
    running = [lz.submit(lz.silu, X) for _ in range(10)]
    hanging = lz.submit(lz.silu, np.array([fault(HANG), 1], np.float32), backend="beta")
    wait_until(lambda: site.backend("beta")["running"] == 1)
    session.ask("shutdown")
    for future in running:
        np.testing.assert_allclose(future.result(), silu(X), rtol=1e-6)
    with pytest.raises(lz.BrokerLost):
        hanging.result()
    wait_ended(session.broker_pid)
    assert processes(site.folder) == {}


def test_a_stopped_broker_that_goes_on_kills_no_healthy_worker(new_site: Callable[..., Site]) -> None:
    """Its own stall (a laptop lid, a debugger) looks like everyone else's; answers that are here count first."""
    site = new_site(timeout_s=1)
    session = site.connect()
    alpha, _ = site.wait_ready("alpha", "beta")
    lz.silu(X)
    os.kill(alpha, signal.SIGSTOP)
    out = lz.empty(X.shape)
    future = lz.submit(lz.silu, X, out=out)
    wait_until(lambda: site.backend("alpha")["running"] == 1)
    start_s = time.monotonic()
    os.kill(session.broker_pid, signal.SIGSTOP)
    os.kill(alpha, signal.SIGCONT)  # it answers, and the deadline passes, while the broker sees nothing of either
    wait_until(lambda: np.allclose(out, silu(X)) and state_of(alpha) == "S")
    wait_until(lambda: time.monotonic() > start_s + 1.2)
    os.kill(session.broker_pid, signal.SIGCONT)
    np.testing.assert_allclose(future.result(), silu(X), rtol=1e-6)
    assert site.events("worker.exited") == []


def test_a_broker_that_stands_still_is_given_up_and_its_calls_memory_is_not_reused(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may wait for ever. Its workers are alive and may write to what they were lent."""
    monkeypatch.setattr(link, "GRACE_S", 0.3)
    site = new_site()
    session = site.connect()
    site.wait_ready("alpha")
    lz.silu(X)
    slots = pool.stats()["slots"]
    os.kill(session.broker_pid, signal.SIGSTOP)
    future = lz.submit(lz.silu, X, timeout_s=0.2)
    with pytest.raises(lz.BrokerLost, match=r"said nothing for 0\.5 s.*lz down --force"):
        future.result(timeout=PATIENCE_S)
    assert not session.is_alive
    with pytest.raises(lz.BrokerLost):
        lz.silu(X)
    del future
    gc.collect()
    assert pool.stats()["slots"] == slots + 2
    assert [until_s for until_s, _ in retained._quarantine] == [math.inf]


def test_a_call_that_takes_longer_than_its_broker_may_be_silent_is_waited_for(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to wait for others. The broker says that it is there when it is asked."""
    monkeypatch.setattr(link, "GRACE_S", 0.2)
    site = new_site()
    site.connect()
    (alpha,) = site.wait_ready("alpha")
    os.kill(alpha, signal.SIGSTOP)
    first = lz.submit(lz.silu, X, backend="alpha", timeout_s=60)
    second = lz.submit(lz.silu, X, backend="alpha", timeout_s=0.1)
    with pytest.raises(TimeoutError):
        second.result(timeout=1)
    os.kill(alpha, signal.SIGCONT)
    for future in (second, first):
        np.testing.assert_allclose(future.result(timeout=PATIENCE_S), silu(X), rtol=1e-6)


# --- a client's death


CLIENT = """
import sys, numpy as np
from tests.backends.toy import PAUSE, fault
lz.connect()
held = lz.share(np.ones(1 << 20, np.float32))
lz.silu(held)
call = lz.submit(lz.silu, np.array([fault(PAUSE), 7], np.float32), backend="gamma", timeout_s=600)
if {forks}:
    import os, signal
    if os.fork() == 0:
        signal.pause()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("forks", [False, True])
def test_a_clients_death_in_a_call_gives_everything_back(connected: Site, forks: bool) -> None:
    """The broker drops its arenas once no worker can write there; the others notice nothing. A child that the client
    forked has copies of its sockets and must not keep it alive."""
    _, _, gamma = connected.wait_ready("alpha", "beta", "gamma")
    lz.silu(X)
    mine = lz.status()["clients"]
    held = _arenas_held(connected.broker_pid)
    client = connected.python(CLIENT.format(forks=forks), stdin=subprocess.PIPE, process_group=0)
    assert client.stdout is not None
    assert client.stdin is not None
    try:
        client.stdout.readline()
        wait_until(lambda: is_paused(gamma))
        (theirs,) = [c for c in lz.status()["clients"] if c not in mine]
        assert theirs["bytes"] >= 4 << 20
        client.kill()
        client.wait()
        wait_until(lambda: [c["number"] for c in lz.status()["clients"]] == [c["number"] for c in mine])
        np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
        os.kill(gamma, signal.SIGCONT)
        wait_until(lambda: connected.backend("gamma")["running"] == 0)
        connected.wait_ready("gamma")
        assert _arenas_held(connected.broker_pid) == held
        for name in ("alpha", "beta", "gamma"):
            pid = connected.backend(name)["pid"]
            wait_until(lambda pid=pid: _arenas_mapped(pid) <= pool.stats()["arenas"])  # type: ignore[misc]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.stdin.close()
        client.stdout.close()


def _arenas_held(pid: int | None) -> int:
    return sum(os.readlink(entry).startswith("/memfd:layerzero") for entry in Path(f"/proc/{pid}/fd").iterdir())


def _arenas_mapped(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:layerzero" in line and line.split()[1] == "r--s" for line in maps)


def test_a_worker_that_writes_without_end_does_not_fill_the_disk(new_site: Callable[..., Site]) -> None:
    """What it said last is kept, and what it says next is there, too."""
    provider = (
        (BACKENDS / "toy.py").read_text()
        + f"""
import os, sys
if "layerzero.workers.loop" in sys.modules:
    os.ftruncate(2, {LOG_LIMIT_BYTES})  # as much as may be; no disk is filled for the test, either
    os.write(2, b"the last word")
"""
    )
    site = new_site()
    site.add_backend("loud", provider=provider)
    with site.connect():
        lz.silu(np.ones(8, np.float32), backend="loud")
        log = site.endpoints.worker_log("loud")
        wait_until(lambda: log.stat().st_size < LOG_KEPT_BYTES)
        old = log.with_suffix(".log.1")
        assert old.stat().st_size == LOG_KEPT_BYTES
        assert old.read_bytes().endswith(b"the last word")
        assert old.stat().st_mode & 0o077 == 0
        os.kill(site.backend("loud")["pid"], signal.SIGUSR2)  # its stacks
        wait_until(lambda: b"most recent call first" in log.read_bytes())
