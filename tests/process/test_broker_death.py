"""Brokers that are killed, again and again: what clients see, what is left, and who starts the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.backends.toy import HANG, fault
from tests.process.harness import PATIENCE_S, ROOT, Site, open_files, wait_ended, wait_until
from tests.process.invariants import promises, silu

import layerzero as lz

KILLS = 4


def test_clients_go_on_after_each_of_many_brokers(new_site: Callable[..., Site]) -> None:
    """One death may be survived by luck; what leaks shows after some."""
    site = new_site()
    site.connect()
    files = open_files()
    for n in range(KILLS):
        workers = site.wait_ready("alpha", "beta")
        pid = site.broker_pid
        assert pid is not None
        with promises(site, is_broker_same=False) as asked:
            ended: list[str] = []

            def hang(name: str, ended: list[str] = ended, n: int = n) -> None:
                with pytest.raises(lz.BrokerLost):
                    lz.silu(np.array([fault(HANG), n], np.float32), backend=name, timeout_s=600)
                ended.append(name)

            threads = [threading.Thread(target=hang, args=(name,)) for name in ("alpha", "beta") for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda: sum(site.backend(name)["running"] for name in ("alpha", "beta")) == 8)
            os.kill(pid, signal.SIGKILL)
            for thread in threads:
                thread.join(PATIENCE_S)  # long before their calls' deadline
            assert len(ended) == 8
            for worker in workers:
                wait_ended(worker)
            assert isinstance(asked.silu(), lz.BrokerLost)
            site.connect()
            assert asked.silu() is None
            assert site.broker_pid != pid
    assert [name.name for name in site.folder.glob("client-*")] != []
    assert len(list(site.folder.glob("client-*"))) == 1
    assert sum((open_files() - files).values()) <= 4  # of arenas' and lanes' own; none for each broker


def test_what_a_broker_was_doing_as_it_crashed_is_in_its_log(new_site: Callable[..., Site]) -> None:
    site = new_site().start()
    site.connect()
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    wait_ended(pid)
    with pytest.raises(lz.BrokerLost, match=f"pid {pid}"):
        lz.silu(np.zeros(2, np.float32))
    log = site.endpoints.log.read_text()
    assert "Segmentation fault" in log
    assert "broker/server.py" in log


@pytest.fixture
def watchdog(new_site: Callable[..., Site]) -> Iterator[tuple[Site, subprocess.Popen[str]]]:
    """A site whose broker has a watchdog; `next_event` reads what it says."""
    site = new_site()
    with site.environment():
        process = subprocess.Popen(
            [sys.executable, "-m", "layerzero.client.cli.app", "up", "--watchdog", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
    yield site, process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def said(process: subprocess.Popen[str]) -> tuple[str, int]:
    """The next event and the pid in it."""
    assert process.stdout is not None
    event = json.loads(process.stdout.readline())
    return event["event"], event["pid"]


def test_a_watchdog_replaces_brokers_that_die_until_they_die_too_often(
    watchdog: tuple[Site, subprocess.Popen[str]],
) -> None:
    """A service must come back by itself; one that cannot must say so and not heat the room."""
    site, process = watchdog
    event, pid = said(process)
    assert (event, pid) == ("started", site.broker_pid)
    session = site.connect()
    np.testing.assert_allclose(lz.silu(np.ones(3, np.float32)), silu(np.ones(3)), rtol=1e-6)
    for n in range(5):
        os.kill(pid, signal.SIGKILL)
        assert said(process) == ("died", pid)
        event, pid = said(process)
        assert (event, pid) == ("started", site.broker_pid)
        if n == 0:
            wait_until(lambda: not session.is_alive)
            assert site.connect().broker_pid == pid
            np.testing.assert_allclose(lz.silu(np.ones(3, np.float32)), silu(np.ones(3)), rtol=1e-6)
    os.kill(pid, signal.SIGKILL)
    assert said(process) == ("given up", pid)
    assert process.wait(PATIENCE_S) == 1


def test_a_watchdog_ends_with_a_broker_that_was_told_to_end(watchdog: tuple[Site, subprocess.Popen[str]]) -> None:
    """`lz down` means down; who waits for the prompt is told that it does not come before."""
    site, process = watchdog
    assert process.stdout is not None
    started = json.loads(process.stdout.readline())
    assert "stays in the foreground" in started["detail"]
    pid = started["pid"]
    with site.environment():
        subprocess.run(
            [sys.executable, "-m", "layerzero.client.cli.app", "down"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    assert said(process) == ("ended", pid)
    assert process.wait(PATIENCE_S) == 0
    assert site.broker_pid is None


def test_a_watchdog_that_is_told_to_end_ends_its_broker(watchdog: tuple[Site, subprocess.Popen[str]]) -> None:
    """Whoever supervises it sends SIGTERM, and means both."""
    _, process = watchdog
    _, pid = said(process)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    wait_ended(pid)


def test_a_watchdog_takes_over_a_broker_that_a_client_has_started(new_site: Callable[..., Site]) -> None:
    """It would end with that client."""
    site = new_site()
    pid = site.connect().broker_pid
    with site.environment():
        process = subprocess.Popen(
            [sys.executable, "-m", "layerzero.client.cli.app", "up", "--watchdog", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
    try:
        assert said(process) == ("found", pid)
        assert lz.status()["broker"]["stays"]
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        process.stdout.close()
