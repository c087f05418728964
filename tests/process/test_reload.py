"""What a running broker takes up, and what outlives it: the policy file while calls run, and measured times."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import Site, wait_until

import layerzero as lz

X = np.ones((64, 512), np.float32)
Make = Callable[..., Site]


class Callers:
    """Two threads that call silu in a loop.

    `served`: the backend of each one's last call. `failed`: what went wrong.
    """

    def __init__(self) -> None:
        self.served = ["", ""]
        self.calls = [0, 0]
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(2)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        x = np.full((3, 4), number, np.float32)
        try:
            while not self._stop.is_set():
                result = lz.silu(x)
                assert np.allclose(result, x / (1 + np.exp(-x)))
                report = lz.last_report()
                assert report is not None
                self.served[number] = report.backend or ""
                self.calls[number] += 1
        except BaseException as exc:
            self.failed.append(exc)

    def wait_for(self, backend: str) -> None:
        """Both are served by it soon: within a second, says docs/policy.md, and this machine may be busy."""
        wait_until(lambda: self.failed or self.served == [backend, backend])
        assert self.failed == []


def problems() -> list[str]:
    found: list[str] = lz.status()["problems"]
    return found


def test_policy_file_changes_while_calls_run_and_none_is_lost(new_site: Make) -> None:
    """The choice follows; a broken file changes nothing but what lz.status() says; without a file there is no lock."""
    site = new_site()
    site.start().connect()
    site.wait_ready("alpha", "beta")
    with Callers() as callers:
        callers.wait_for("alpha")
        site.set_policy("locks: {silu: beta.silu}\n")
        callers.wait_for("beta")
        site.set_policy("locks: {silu: alpha.silu}\n")
        callers.wait_for("alpha")
        site.set_policy("locks: {silu: beta.silu}\n")
        callers.wait_for("beta")
        site.set_policy("locks: {silu: gama.silu}\n")
        said = wait_until(problems)
        assert "policy.yaml:2: no kernel is called 'gama.silu'; did you mean 'gamma.silu'" in said[0]
        before = sum(callers.calls)
        wait_until(lambda: callers.failed or sum(callers.calls) > before + 20)
        assert callers.served == ["beta", "beta"]
        site.set_policy()
        callers.wait_for("alpha")
        assert problems() == []
        site.set_policy("locks: {silu: beta.silu}\n")
        callers.wait_for("beta")
        (site.folder / "layerzero" / "policy.yaml").unlink()
        wait_until(lambda: lz.policy()["values"]["weights.perfdb"]["origin"] == "default")
        assert "locks.silu" not in lz.policy()["values"]
    assert callers.failed == []
    assert all(calls > 20 for calls in callers.calls)


def restart(site: Site) -> None:
    """End the broker as `lz down` does, and start another."""
    pid = site.broker_pid
    lz.connect(runtime_dir=site.folder).ask("shutdown")
    lz.disconnect()
    wait_until(lambda: site.broker_pid != pid)
    site.start().connect()


def measured(backend: str = "alpha") -> float | None:
    return next(c.measured_us for c in lz.explain("silu", X).candidates if c.backend == backend)


def test_times_outlive_the_broker(new_site: Make) -> None:
    """The next broker knows what was measured before it has run anything."""
    site = new_site()
    site.start().connect()
    assert measured() is None
    for _ in range(5):
        lz.silu(X, backend="alpha")
    before = measured()
    assert before is not None
    restart(site)
    assert wait_until(measured) == pytest.approx(before, rel=0.5)
    assert measured("beta") is None
    assert site.backend("alpha")["answered"] == 0
    assert lz.status()["times"]["path"] == site.environ["LAYERZERO_PERF_DB"]


def test_corrupt_file_of_times_costs_no_call_and_is_a_problem(new_site: Make) -> None:
    """It is put aside, and a new one begun."""
    site = new_site()
    Path(site.environ["LAYERZERO_PERF_DB"]).write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    site.start().connect()
    assert lz.silu(X).shape == X.shape
    said = wait_until(problems)
    assert site.environ["LAYERZERO_PERF_DB"] in said[0]
    lz.silu(X)
    assert measured() is not None
    restart(site)
    assert wait_until(measured) is not None


def test_times_that_cannot_be_stored_cost_no_call_and_are_a_problem(new_site: Make) -> None:
    """A folder that nobody may write to; here, one that is none."""
    site = new_site()
    (site.folder / "file").touch()
    site.environ["LAYERZERO_PERF_DB"] = str(site.folder / "file" / "perf.db")
    site.start().connect()
    for _ in range(3):
        assert lz.silu(X).shape == X.shape
    said = wait_until(problems)
    assert site.environ["LAYERZERO_PERF_DB"] in said[0]
    assert measured() is not None


def test_a_policy_file_that_nobody_could_read_holds_nobody_up(new_site: Make) -> None:
    """Deadlines of all clients would wait for whoever writes into the pipe."""
    site = new_site().start()
    session = site.connect()
    file = site.folder / "layerzero" / "policy.yaml"
    pipe = file.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(file)
    said = wait_until(problems)
    assert str(file) in said[0]
    assert session.ask("ping")["pid"] == site.broker_pid
    assert lz.silu(X).shape == X.shape
    with pytest.raises(OSError, match="No such device or address"):  # nobody has it open
        os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    pipe.write_text("strict_mode: true\n")
    pipe.replace(file)
    wait_until(lambda: lz.policy()["values"]["strict_mode"]["value"])
    assert not problems()
