"""`lz restart` with real processes under traffic: other workers take over, and no call is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process import forks
from tests.process import isolated_pools as pool
from tests.process.harness import Site, is_running, wait_ended, wait_until
from tests.process.test_cli import command as command_of
from tests.process.test_cli import data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.client.cli.restart import replace

X = np.array([1, 2, 3], np.float32)
STACKS = "most recent call first"
WANTED = X / (1 + np.exp(-X))


class Traffic:
    """Threads that call again and again. `pids`: who served; an error of a call is raised at the end."""

    def __init__(self, *calls: Callable[[], int]) -> None:
        self.pids: list[set[int]] = [set() for _ in calls]
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(call, pids)) for call, pids in zip(calls, self.pids, strict=True)
        ]

    def _run(self, call: Callable[[], int], pids: set[int]) -> None:
        try:
            while not self._is_over.wait(0.001):  # two cores are for those that start, too
                pids.add(call())
        except BaseException as exc:  # raised by __exit__
            self._errors.append(exc)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self._errors or all(self.pids))
        return self

    def are_served_by(self, pid: int) -> None:
        wait_until(lambda: self._errors or all(pid in pids for pids in self.pids))

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def pinned() -> int:
    """On an express lane after some calls; whom the broker loses has nowhere else to go."""
    np.testing.assert_allclose(lz.silu(X, backend="alpha"), WANTED, rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert all("gone before it took" in attempt.detail for attempt in report.attempts[:-1])
    return report.worker_pid


def submitted() -> int:
    for future in [lz.submit(lz.silu, X, backend="alpha") for _ in range(8)]:
        np.testing.assert_allclose(future.result(), WANTED, rtol=1e-6)
    return pinned()


def test_another_worker_takes_over_under_traffic(connected: Site) -> None:
    """Pinned calls on express lanes, by the broker, and several at once: each has its result. One that was put on a
    lane just when its worker went comes back to the broker, which its report says."""
    ask = lz.session().ask
    with Traffic(pinned, submitted, pinned) as traffic:
        for _ in range(3):
            row = replace(ask, "alpha", timeout_s=30, force=False)
            assert row["ok"], row["said"]
            assert row["before"] != row["pid"]
            assert not is_running(row["before"])
            traffic.are_served_by(row["pid"])
    status = connected.backend("alpha")
    assert (status["restarts"], status["failed"], status["unavailable"]) == (3, 0, None)
    assert [one["cause"] for one in connected.events("worker.exited")] == ["another worker has taken over"] * 3


def test_functions_workers_are_replaced_one_by_one_and_objects_waited_for(store_of_functions: Site) -> None:
    """By the environment's short name, also where a program has asked for another one under it. Nobody can take over
    an object: with --force it is lost. Of two workers of one backend each has a log."""
    site, ask = store_of_functions, lz.session().ask
    both = pool.pid.options(workers=2)
    with Traffic(pool.pid, lambda: max(list(both.map([1, 2, 3, 4])))):
        rows = data(command(site, "restart", "pair", "--json"))["backends"]
    assert [row["name"] for row in rows] == [pool.PAIR.backend, f"{pool.PAIR.backend}.2"]
    assert all(row["ok"] and row["before"] != row["pid"] for row in rows)
    handle = pool.kept("here")
    home = handle.fetch()[1]
    (name,) = (row["name"] for row in rows if row["pid"] == home)
    with Traffic(pool.pid):
        waits = threading.Thread(target=lambda: rows.append(replace(ask, name, timeout_s=30, force=False)))
        waits.start()
        wait_until(lambda: [one["state"] for one in site.backend(name)["beside"]] == ["ready"])
        assert handle.fetch() == ["here", home]
        log = site.folder / f"worker-{name}.log"
        os.kill(home, signal.SIGUSR2)
        wait_until(lambda: STACKS in log.with_suffix(".log.1").read_text())
        assert STACKS not in log.read_text()
        handle.close()
        waits.join()
    assert rows[-1]["ok"], rows[-1]["said"]
    wait_ended(home)
    handle = pool.kept("there")
    home = handle.fetch()[1]
    for name in ask("backends_of", name="pair")["backends"]:
        assert replace(ask, name, timeout_s=30, force=True)["ok"]
    with pytest.raises(lz.BackendError, match="the object is lost"):
        handle.fetch()
    assert pool.pid() != home


def test_what_a_restart_waits_for_is_said_while_it_waits(store_of_functions: Site, tmp_path: Path) -> None:
    """On stderr: objects at once, calls that do not end soon."""
    site = store_of_functions
    handle = pool.kept("here")
    home = handle.fetch()[1]
    with _restarting(site, home) as waits:
        assert f": pid {home} keeps 1 object or stream for clients, which nobody can take over" in _line(waits)
        handle.close()
        assert waits.wait() == 0
    call = pool.gather.submit(str(tmp_path), 2)
    (busy,) = wait_until(lambda: [int(one.name) for one in tmp_path.iterdir()])
    with _restarting(site, busy) as waits:
        assert f": pid {busy} has 1 call" in _line(waits)
        (tmp_path / "1").touch()
        assert waits.wait() == 0
    assert call.result() == [1, busy]


def _restarting(site: Site, pid: int) -> subprocess.Popen[str]:
    """`lz restart` of the worker with this pid."""
    name = next(one for one in lz.session().ask("backends_of", name="pair")["backends"] if _pid_of(site, one) == pid)
    how = command_of(site, ("restart", name, "--timeout", "30"))
    return subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _pid_of(site: Site, name: str) -> int:
    return int(site.backend(name)["pid"])


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_a_short_name_is_of_what_a_program_has_declared_last(tmp_path: Path) -> None:
    site = Site(tmp_path)
    one, other = (lz.env("shop", requires=[f"packaging=={version}"]) for version in ("24.0", "24.1"))
    with site.environment():
        for declared in (one, other, one):
            assert declared.unready() is not None
            assert declared.backend in command(site, "env", "show", "shop").stdout
    site.stop()


@pytest.fixture
def store_of_functions(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    forks.start_server()
    other = lz.env("pair", requires=["packaging==24.0"])
    site = Site(tmp_path_factory.mktemp("store"))
    with site.environment():
        pool.PAIR.build(quiet=True)
        assert other.unready() is not None
        site.start().connect()
        list(pool.gather.map([str(tmp_path_factory.mktemp("met"))] * 2, [2] * 2))
        yield site
        lz.disconnect()
    site.stop()
