"""Faults of workers in the middle of calls: the caller gets the right answer from another backend, soon, with facts."""

from __future__ import annotations

import signal
from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.toy import ABORT, EXIT0, HANG, KILL, RAISE, SCRIBBLE, SEGV, SPIN, fault
from tests.process.harness import PATIENCE_S, Site, is_running

import layerzero as lz

PHASES = ("received", "mapped", "executing", "written", "sent")
SHORT_S = 1.0  # a deadline of calls that hang, and of the next kernel, which may have to wait for a core


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def call(x: np.ndarray, timeout_s: float | None = None) -> lz.SelectionReport:
    """Run silu, check its numbers, return the report. What does not hang may not be told by its deadline."""
    result = lz.silu(x, timeout_s=timeout_s or 600)
    np.testing.assert_allclose(result, silu(x), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    return report


def faulty_site(new_site: Callable[..., Site], points: dict[str, str]) -> Site:
    """A broker with one more backend for each failpoint, first choice for arrays of 1, 2, ... dimensions; beta is the
    second choice for all. Failpoints strike in the second call, the first warms up. Nothing restarts."""
    failpoints = ";".join(f"{name}:{point}@2" for name, point in points.items())
    site = new_site(failpoints=failpoints, standby=0, backoff_s=600, backoff_max_s=600)
    for ndim, name in enumerate(points, start=1):
        site.add_backend(name, ndim=ndim)
    site.connect()
    site.wait_ready("beta", *points)
    return site


def shaped(ndim: int) -> np.ndarray:
    return np.linspace(-3, 3, 8, dtype=np.float32).reshape(*[1] * (ndim - 1), 8)


DEATHS = {
    "kill": ("BACKEND_ERROR", signal.SIGKILL, None),
    "segv": ("BACKEND_ERROR", signal.SIGSEGV, None),
    "abort": ("BACKEND_ERROR", signal.SIGABRT, None),
    "exit0": ("BACKEND_ERROR", None, 0),
    "hang": ("DEADLINE", signal.SIGKILL, None),
}
SEEN_AS = {"received": "mapped", "mapped": "mapped", "executing": "executing", "written": "written"}


@pytest.mark.parametrize("action", DEATHS)
def test_a_worker_lost_in_any_phase_costs_one_attempt(new_site: Callable[..., Site], action: str) -> None:
    """Whatever ends a worker, and whenever, the call goes to the next backend once the kernel has confirmed its end."""
    site = faulty_site(new_site, {f"at-{phase}": f"{phase}={action}" for phase in PHASES})
    timeout_s = SHORT_S if action == "hang" else None
    for ndim, phase in enumerate(SEEN_AS, start=1):
        report = call(shaped(ndim), timeout_s=timeout_s)
        failed, served = report.attempts
        assert (failed.backend, failed.outcome, failed.exit_signal, failed.exit_code) == (
            f"at-{phase}",
            *DEATHS[action],
        )
        assert failed.phase == SEEN_AS[phase]
        assert (served.backend, served.outcome) == ("beta", None)
        assert not is_running(failed.worker_pid)
        assert [e["backend"] for e in site.events("worker.exited")][-1] == f"at-{phase}"
    # The last phase is after the answer was sent: it may be lost with its sender, but not be given twice or spoilt.
    report = call(shaped(5), timeout_s=timeout_s)
    assert report.backend in ("at-sent", "beta")
    if report.backend == "at-sent":
        report = call(shaped(5), timeout_s=timeout_s)
        assert report.backend in ("alpha", "beta")


def test_an_exception_in_any_phase_costs_an_attempt_and_no_worker(new_site: Callable[..., Site]) -> None:
    """A kernel that raises is wrong about this call only; killing its worker would punish the others."""
    phases = PHASES[:-1]
    site = faulty_site(new_site, {f"at-{phase}": f"{phase}=raise" for phase in phases})
    for ndim, phase in enumerate(phases, start=1):
        report = call(shaped(ndim))
        failed = report.attempts[0]
        assert (failed.backend, failed.outcome, failed.exit_signal) == (f"at-{phase}", "BACKEND_ERROR", None)
        assert f"RuntimeError: failpoint {phase}=raise" in failed.detail
        assert is_running(failed.worker_pid)
        assert call(shaped(ndim)).backend == f"at-{phase}"
    assert site.events("worker.exited") == []


def test_replies_that_make_no_sense_cost_the_worker_its_life(new_site: Callable[..., Site]) -> None:
    """A worker that breaks the protocol cannot be trusted with memory; silence ends at the deadline."""
    outcomes = {"garbage": "BAD_MESSAGE", "truncated": "BAD_MESSAGE", "stale": "BAD_MESSAGE", "silent": "DEADLINE"}
    faulty_site(new_site, {reply: f"written={reply}" for reply in outcomes})
    for ndim, (reply, outcome) in enumerate(outcomes.items(), start=1):
        timeout_s = SHORT_S if reply == "silent" else None
        report = call(shaped(ndim), timeout_s=timeout_s)
        failed = report.attempts[0]
        assert (failed.backend, failed.outcome, failed.exit_signal) == (reply, outcome, signal.SIGKILL)
        assert report.backend == "beta"
        assert not is_running(failed.worker_pid)


PINNED = {
    KILL: ({"exit_code": -signal.SIGKILL}, "signal 9"),
    SEGV: ({"exit_code": -signal.SIGSEGV}, "signal 11"),
    ABORT: ({"exit_code": -signal.SIGABRT}, "signal 6"),
    EXIT0: ({"exit_code": 0}, "exit code 0"),
}


@pytest.mark.parametrize("action", PINNED, ids=["kill", "segv", "abort", "exit0"])
def test_pinned_callers_get_the_death_itself(connected: Site, action: int) -> None:
    """Whoever pins a backend wants its failure, not another backend's answer."""
    (pid,) = connected.wait_ready("gamma")
    facts, text = PINNED[action]
    with pytest.raises(lz.BackendError, match=f"the gamma worker died \\({text}\\)") as failure:
        lz.silu(np.array([fault(action)]), backend="gamma")
    assert failure.value.facts["backend"] == "gamma"
    assert facts.items() <= failure.value.facts.items()
    assert failure.value.facts["phase"] == "executing"
    assert [(a.backend, a.worker_pid) for a in failure.value.report.attempts] == [("gamma", pid)]
    if action == SEGV:
        assert "Segmentation fault" in failure.value.facts["stderr_tail"]


@pytest.mark.parametrize("action", [HANG, SPIN], ids=["sleeping", "spinning with the GIL"])
def test_pinned_callers_get_the_deadline(connected: Site, action: int) -> None:
    """timeout_s holds for a kernel that sleeps and for one that burns the processor."""
    connected.wait_ready("gamma")
    with pytest.raises(lz.DeadlineExceeded, match=r"ran longer than 0\.2 s, and its worker was killed") as failure:
        lz.silu(np.array([fault(action)]), backend="gamma", timeout_s=0.2)
    assert failure.value.facts["timeout_s"] == 0.2
    assert not is_running(failure.value.report.attempts[0].worker_pid)


def test_every_backend_failing_names_them_all(connected: Site) -> None:
    """`BackendError` without the list of what was tried cannot be acted on."""
    connected.wait_ready("alpha", "beta", "gamma")
    with pytest.raises(lz.BackendError) as failure:
        lz.silu(np.array([fault(RAISE)]))
    assert [a.backend for a in failure.value.report.attempts] == ["alpha", "beta", "gamma"]
    for name in ("alpha.silu", "beta.silu", "gamma.silu", "the toy raises on request"):
        assert name in str(failure.value)


def test_a_late_write_cannot_reach_the_answer(connected: Site) -> None:
    """The worst fault of all: a worker that is given up and writes later. It must be dead before the fallback runs."""
    connected.wait_ready("alpha", "beta")
    x, out = lz.share(np.array([fault(SCRIBBLE, "alpha"), 1, 2], np.float32)), lz.empty(3)
    for _ in range(3):
        lz.silu(x, out=out, timeout_s=SHORT_S)
        report = lz.last_report()
        assert report is not None
        assert not is_running(report.attempts[0].worker_pid)
        assert [(a.backend, a.outcome) for a in report.attempts] == [("alpha", "DEADLINE"), ("beta", None)]
        assert report.copies == ()
        np.testing.assert_allclose(out, silu(x), rtol=1e-6)
        connected.wait_ready("alpha", "beta")


def test_calls_queued_behind_a_killer_only_lose_their_place(connected: Site) -> None:
    """Only the call that ran is to blame; the others are answered, right, and none of them is poison."""
    connected.wait_ready("alpha", "beta")
    inputs = [np.array([i, 2 * i, -i], np.float32) for i in range(40)]
    inputs[7][0] = fault(KILL, "alpha")
    futures = [lz.submit(lz.silu, x) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        np.testing.assert_allclose(future.result(), silu(x), rtol=1e-6)


# --- poison


def test_inputs_that_kill_two_workers_are_refused_from_then_on(connected: Site) -> None:
    """One poisonous request must not take down every backend in turn, nor again when it is sent again."""
    connected.wait_ready("alpha", "beta", "gamma")
    poison = np.array([fault(KILL), 0.125], np.float32)
    with pytest.raises(lz.Poison, match="killed 2 workers") as failure:
        lz.silu(poison)
    assert [(a.backend, a.exit_signal) for a in failure.value.report.attempts] == [("alpha", 9), ("beta", 9)]
    pids = connected.wait_ready("alpha", "beta", "gamma")
    with pytest.raises(lz.Poison, match="refused for another"):
        lz.silu(poison.copy())
    other = connected.python(
        "import sys, numpy as np\n"
        "lz.connect()\n"
        f"for first in ({poison[0]}, 1.0, {poison[0]}):\n"
        "    try: print(lz.silu(np.array([first, 0.125], np.float32)).shape)\n"
        "    except lz.Poison as exc: print(exc.code)\n"
    )
    assert other.communicate(timeout=PATIENCE_S)[0].split("\n")[:3] == ["POISON", "(2,)", "POISON"]
    assert call(np.array([1, 0.125], np.float32)).backend == "alpha"
    assert connected.wait_ready("alpha", "beta", "gamma") == pids


def test_a_call_that_hangs_everywhere_is_not_poison(connected: Site) -> None:
    """Too slow for its deadline is not deadly: with more time the same call may succeed."""
    connected.wait_ready("alpha", "beta", "gamma")
    with pytest.raises(lz.DeadlineExceeded, match="no kernel is left") as failure:
        lz.silu(np.array([fault(HANG), 0.25], np.float32), timeout_s=0.1)
    assert [a.outcome for a in failure.value.report.attempts] == ["DEADLINE"] * 3
