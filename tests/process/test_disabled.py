"""Backends that faults from outside have disabled come back by themselves, and those that cannot load do not."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process import forks
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz

X = np.array([1, 2, 3], np.float32)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
TOY = (Path(__file__).parents[1] / "backends" / "toy.py").read_text()
LOAD = "def load() -> Loaded:\n"
IS_WORKER = "'layerzero.workers.probe' not in sys.orig_argv"
# Loads when a file is there.
WAITS = TOY.replace(
    LOAD,
    f"{LOAD}    import sys\n    while {IS_WORKER} and not os.path.exists(os.environ['LZ_GATE']): time.sleep(0.01)\n",
)
# Cannot load as a worker, and takes for ever to end.
LINGERS = TOY.replace(
    LOAD,
    f"{LOAD}    import atexit, sys\n"
    f"    if {IS_WORKER}:\n"
    "        atexit.register(lambda: threading.Event().wait())\n"
    "        raise OSError('no such device')\n",
)


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def state(site: Site, name: str) -> str:
    return str(site.backend(name)["state"])


def test_a_storm_of_signals_passes(new_site: Callable[..., Site]) -> None:
    """Workers are killed whatever they do, loading included, until every backend is disabled. Nobody repairs anything,
    and all of them serve again."""
    site = new_site(restart_budget=1, backoff_s=0.01, retry_disabled_s=0.05, retry_disabled_max_s=0.4)
    site.connect()
    names = {"alpha", "beta", "gamma"}
    site.wait_ready(*names)
    rng = random.Random(7)

    def strike() -> set[str]:
        for pid in site.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, rng.choice(SIGNALS))
        return {event["backend"] for event in site.events("backend.disabled")}

    wait_until(lambda: strike() >= names)
    site.wait_ready(*names)
    for name in names:
        np.testing.assert_allclose(lz.silu(X, backend=name), silu(X), rtol=1e-6)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_while_it_loads_is_started_again(
    new_site: Callable[..., Site], tmp_path: Path, number: int
) -> None:
    """Its environment has done nothing wrong. The call that waits for it gets its answer."""
    gate = tmp_path / "gate"
    site = new_site(standby=0, backoff_s=0.01)
    site.add_backend("slow", provider=WAITS, env={"LZ_GATE": str(gate)})
    site.connect()
    future = lz.submit(lz.silu, X, backend="slow")
    wait_until(lambda: state(site, "slow") == "starting" and site.backend("slow")["pid"])
    os.kill(site.backend("slow")["pid"], number)
    wait_until(lambda: len(site.events("worker.started")) == 2)
    gate.touch()
    np.testing.assert_allclose(future.result(timeout=60), silu(X), rtol=1e-6)
    assert site.backend("slow")["restarts"] == 1


def test_a_provider_that_cannot_load_says_so_however_long_it_takes_to_end(new_site: Callable[..., Site]) -> None:
    """The broker kills a worker whose connection is gone; an end by that signal would be taken for a crash."""
    site = new_site(standby=0, backoff_s=0.01)
    site.add_backend("lingers", provider=LINGERS)
    site.connect()
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    status = site.backend("lingers")
    assert (status["state"], status["restarts"], status["retry_in_s"]) == ("disabled", 0, None)
    assert "never became ready: the lingers worker died (exit code 1)" in status["cause"]
    assert "OSError: no such device" in status["cause"]
    assert "again" not in status["unavailable"]["detail"]


def test_status_and_errors_say_when_a_disabled_backend_is_tried_again(new_site: Callable[..., Site]) -> None:
    """A person must know whether to wait or to act; `lz restart` does not wait."""
    site = new_site(restart_budget=0, retry_disabled_s=300, standby=0)
    site.connect()
    (pid,) = site.wait_ready("alpha")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state(site, "alpha") == "disabled")
    status = site.backend("alpha")
    assert 0 < status["retry_in_s"] <= 300
    assert "; tries again in " in status["unavailable"]["detail"]
    assert status["unavailable"]["repair"] == "lz restart alpha"
    with pytest.raises(lz.NoBackend, match=r"tries again in \d+ s; repair: lz restart alpha") as failure:
        lz.silu(X, backend="alpha")
    assert "tries again in " in str(failure.value.report)
    assert "tries again in " in str(lz.explain("silu", X))
    shown = " ".join(_cli(site, "status").split())
    assert "tries again in " in shown
    assert "alpha: its failures are forgotten" in _cli(site, "restart", "alpha")
    np.testing.assert_allclose(lz.silu(X, backend="alpha"), silu(X), rtol=1e-6)
    assert site.backend("alpha")["retry_in_s"] is None


def _cli(site: Site, *words: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    environ |= {**site.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-P", "-m", "layerzero.client.cli.app", *words]
    ended = forks.run(command, env=environ)
    ended.check_returncode()
    return ended.stdout


# --- the only backend


ONLY = "allow_sources: [only]\n"


def only_site(new_site: Callable[..., Site], *, strikes_at: int = 2, point: str = "executing=kill") -> Site:
    """One backend may serve, and its worker dies in its second call, or in the one that `strikes_at` says."""
    site = new_site(failpoints=f"only:{point}@{strikes_at}", standby=0, backoff_s=0.05)
    site.add_backend("only")
    site.set_policy(ONLY)
    site.connect()
    site.wait_ready("only")
    return site


@pytest.mark.parametrize(("point", "has_out"), [("executing=kill", False), ("written=segv", True)])
def test_a_killed_worker_is_not_the_callers_error_where_it_is_the_only_one(
    new_site: Callable[..., Site], point: str, has_out: bool
) -> None:
    """The restarted one serves the call, from inputs that are as they were; the report shows both attempts."""
    site = only_site(new_site, point=point)
    x, out = (lz.share(X), lz.empty(3)) if has_out else (X.copy(), None)
    result = lz.silu(x, out=out)
    np.testing.assert_allclose(result, silu(X), rtol=1e-6)
    np.testing.assert_array_equal(x, X)
    report = lz.last_report()
    assert report is not None
    first, second = report.attempts
    assert (first.backend, first.outcome, second.backend, second.outcome) == ("only", "BACKEND_ERROR", "only", None)
    assert first.worker_pid != second.worker_pid == site.backend("only")["pid"]
    assert (report.backend, site.backend("only")["restarts"]) == ("only", 1)


def test_a_pinned_call_is_not_tried_again(new_site: Callable[..., Site]) -> None:
    """Whoever names a backend wants to hear of its failures."""
    only_site(new_site)
    with pytest.raises(lz.BackendError, match=r"the only worker died \(signal 9\)"):
        lz.silu(X, backend="only")


def test_a_call_on_an_express_lane_is_tried_again(new_site: Callable[..., Site]) -> None:
    """The broker hears of the call when its worker is dead, and then does as with any other."""
    strikes_at = 12
    only_site(new_site, strikes_at=strikes_at)
    lanes = []
    for _ in range(strikes_at - 2):
        lz.silu(X)
        report = lz.last_report()
        assert report is not None
        lanes.append(report.path)
    assert lanes[-1] == "express"
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.exit_signal) for a in report.attempts] == [("only", 9), ("only", None)]


def test_calls_that_were_queued_say_how_their_worker_died(new_site: Callable[..., Site]) -> None:
    """It is the death of the call before them."""
    site = new_site(standby=0, backoff_s=600, backoff_max_s=600)
    site.connect()
    alpha, _ = site.wait_ready("alpha", "beta")
    os.kill(alpha, signal.SIGSTOP)
    futures = [lz.submit(lz.silu, X) for _ in range(3)]
    wait_until(lambda: site.backend("alpha")["running"] == 3)
    os.kill(alpha, signal.SIGKILL)
    for future in futures:
        np.testing.assert_allclose(future.result(timeout=60), silu(X), rtol=1e-6)
    queued = [a for a in itertools.chain(*(f.report.attempts for f in futures)) if a.phase == "queued"]
    assert queued
    for attempt in queued:
        assert attempt.detail == "the alpha worker died (signal 9) while the call was queued"
