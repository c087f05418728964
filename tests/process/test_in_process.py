"""The in-process lane: a backend that policy wants in the caller's own interpreter, with real probes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import RAISE, fault
from tests.process.harness import BACKENDS, PATIENCE_S, Site, wait_until

import layerzero as lz

X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
TOY = (BACKENDS / "toy.py").read_text().replace('os.environ.get("LZ_TOY_NAME")', "NAME")


def expected(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def report() -> lz.SelectionReport:
    found = lz.last_report()
    assert found is not None
    return found


def settle(backend: str = "alpha", x: np.ndarray = X) -> lz.SelectionReport:
    """Call until the probe in this interpreter has ended: the first report that is not about waiting for it."""

    def called() -> lz.SelectionReport | None:
        lz.silu(x, backend=backend)
        return None if any("has not ended yet" in note for note in report().notes) else report()

    return wait_until(called)  # type: ignore[return-value]


Make = Callable[..., Site]


@pytest.fixture
def here(new_site: Make) -> Site:
    """A client of a broker whose policy wants alpha in the caller's process."""
    site = new_site()
    site.set_policy("backend_isolation: {alpha: in_process}\n")
    site.start().connect()
    return site


def own(site: Site, name: str, provider: str) -> None:
    """A backend that policy wants here, with a provider of its own that needs no variables."""
    site.add_backend(name, priority=90, provider=provider)
    site.set_policy(f"backend_isolation: {{{name}: in_process}}\n")
    site.start().connect()


def test_calls_run_here_once_the_probe_has_passed(here: Site) -> None:
    """Until then in the worker, and the report says why; then without a process between, and without a copy."""
    assert np.allclose(lz.silu(X), expected(X))
    first = report()
    assert (first.backend, first.lane) == ("alpha", "broker")
    assert first.worker_pid == here.backend("alpha")["pid"]
    assert "alpha does not run in this process: its probe in this interpreter has not ended yet" in first.notes[0]
    assert "has not ended yet" in str(first)
    settled = settle()
    assert (settled.lane, settled.worker_pid) == ("in_process", os.getpid())
    wait_until(lambda: lz.silu(X) is not None and report().path == "in_process")
    answered = here.backend("alpha")["answered"]
    result = lz.silu(X)
    assert np.allclose(result, expected(X))
    there = report()
    assert (there.lane, there.worker_pid, there.backend) == ("in_process", os.getpid(), "alpha")
    assert (there.copies, there.notes) == ((), ())
    assert there.plan is not None
    assert there.plan.path == "in_process"
    assert [(a.backend, a.outcome, a.worker_pid) for a in there.attempts] == [("alpha", None, os.getpid())]
    assert here.backend("alpha")["answered"] == answered


def test_broker_learns_the_times_of_calls_that_it_did_not_see(here: Site) -> None:
    """Selection goes by measured times, wherever the kernel ran."""
    settle()
    x = np.ones((64, 512), np.float32)
    wait_until(lambda: lz.silu(x) is not None and report().path == "in_process")
    answered = here.backend("alpha")["answered"]
    for _ in range(4):
        lz.silu(x)
    times = {c.backend: c.measured_us for c in lz.explain("silu", x).candidates}
    assert times["alpha"] is not None
    assert times["beta"] is None
    assert here.backend("alpha")["answered"] == answered


def test_all_ways_of_calling_run_here(here: Site) -> None:
    """out=, pinned backends, lz.submit, strided and empty inputs, arrays in shared memory."""
    settle()

    def ran_here(value: object, wanted: np.ndarray) -> lz.SelectionReport:
        assert np.allclose(value, wanted)  # type: ignore[arg-type]
        return report()

    def until_here(call: Callable[[], object], wanted: np.ndarray) -> lz.SelectionReport:
        return wait_until(lambda: found if (found := ran_here(call(), wanted)).path == "in_process" else None)

    out = np.zeros_like(X)
    assert until_here(lambda: lz.silu(X, out=out), expected(X)).copies == ()
    assert np.allclose(out, expected(X))
    shared, target = lz.share(X), lz.empty(X.shape)
    assert until_here(lambda: lz.silu(shared, out=target), expected(X)).copies == ()
    assert until_here(lambda: lz.silu(shared.T), expected(X.T)).copies == ()
    outside = until_here(lambda: lz.silu(X.T), expected(X.T))
    assert [(c.arg, c.nbytes, c.where) for c in outside.copies] == [("x", X.nbytes, "client")]
    assert "lz.share()" in outside.copies[0].reason
    assert until_here(lambda: lz.silu(X, backend="alpha"), expected(X)).backend == "alpha"
    empty = np.zeros((0, 4), np.float32)
    assert until_here(lambda: lz.silu(empty), empty).copies == ()
    x = X.copy()
    until_here(lambda: lz.silu(x, out=x) is x, np.array(True))
    a, b = np.ones((3, 5), np.float32), np.ones((5, 2), np.float32)
    until_here(lambda: lz.matmul(a, b), np.full((3, 2), 5, np.float32))
    assert lz.null() is None

    def submitted() -> lz.SelectionReport | None:
        future = lz.submit("silu", X)
        assert np.allclose(future.result(), expected(X))
        return future.report if future.report is not None and future.report.path == "in_process" else None

    wait_until(submitted)
    with pytest.raises(lz.InvalidArgument, match="timeout_s is -1"):
        lz.silu(X, timeout_s=-1)


def test_threads_share_a_backend(here: Site) -> None:
    """One call at a time, as in a worker; each gets its own result."""
    settle()
    problems: list[object] = []

    def work(n: int) -> None:
        for i in range(50):
            x = np.full((7, 9), n + i / 100, np.float32)
            if not np.allclose(lz.silu(x), expected(x)):
                problems.append((n, i))
        if report().worker_pid != os.getpid():
            problems.append(report())

    wait_until(lambda: lz.silu(np.ones((7, 9), np.float32)) is not None and report().path == "in_process")
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_kernel_that_raises_here_is_answered_by_a_worker(here: Site) -> None:
    """Its failure is an attempt in the report; the worker's libraries may be others."""
    settle()
    x = np.full((3, 4), 1.0, np.float32)
    wait_until(lambda: lz.silu(x) is not None and report().path == "in_process")
    x[0, 0] = fault(RAISE, "alpha")
    assert np.allclose(lz.silu(x), expected(x))
    found = report()
    assert (found.backend, found.lane) == ("beta", "broker")
    assert [(a.backend, a.phase, a.worker_pid == os.getpid()) for a in found.attempts] == [
        ("alpha", "in_process", True),
        ("alpha", "", False),
        ("beta", "", False),
    ]
    assert "the toy raises on request" in found.attempts[0].detail
    assert found.notes[0].endswith("alpha does not run in this process for 5 s: a call failed here")
    failed = wait_until(lambda: here.events("client.kernel_failed"))
    assert (failed[0]["backend"], failed[0]["kernel_id"]) == ("alpha", "alpha.silu")


def test_what_every_kernel_would_say_is_said_here_too(here: Site) -> None:
    """INVALID_ARGUMENT from a kernel ends the call, with a report."""
    settle()
    x = np.full((3, 4), 1.0, np.float32)
    wait_until(lambda: lz.silu(x) is not None and report().path == "in_process")
    x[0, 0] = fault(6666)
    future = lz.submit("silu", x)
    with pytest.raises(lz.InvalidArgument, match="the toy calls this input invalid") as caught:
        future.result()
    assert caught.value.report.kernel_id is None  # type: ignore[attr-defined]


def test_probe_that_crashes_harms_nobody(new_site: Make) -> None:
    """It is a process of its own; calls go to the worker for good, and reports say why."""
    site = new_site()
    load = "def load() -> Loaded:\n"
    crash = f"{load}    if 'LZ_TOY_NAME' not in os.environ:\n        ctypes.string_at(0)\n"
    own(site, "crashy", (BACKENDS / "toy.py").read_text().replace(load, crash))
    found = settle("crashy")
    assert (found.lane, found.backend) == ("broker", "crashy")
    assert found.notes[0].startswith("crashy does not run in this process: its probe ended with signal 11")
    assert list(lz.connect(runtime_dir=site.folder).refusals()) == ["crashy"]
    assert np.allclose(lz.silu(X), expected(X))
    assert report().backend == "crashy"


def test_what_cannot_run_here_is_called_as_if_nobody_had_asked(new_site: Make) -> None:
    """On a lane, also with lengths that were not seen before, and each report says why it is not here."""
    site = new_site()
    load = "def load() -> Loaded:\n"
    missing = f"{load}    if 'LZ_TOY_NAME' not in os.environ:\n        raise ImportError('no library here')\n"
    own(site, "absent", (BACKENDS / "toy.py").read_text().replace(load, missing))
    assert settle("absent").path == "broker"

    def note_of(x: np.ndarray, path: str) -> str:
        def called() -> bool:
            assert np.allclose(lz.silu(x), expected(x))
            return report().path == path

        wait_until(called)
        assert (report().backend, len(report().attempts)) == ("absent", 1)
        return report().notes[-1]

    why = "absent does not run in this process: "
    assert note_of(X, "express").startswith(why)
    assert "no library here" in note_of(X, "express")
    others = [np.linspace(-1, 1, 4 * n, dtype=np.float32).reshape(n, 4) for n in range(33, 64)]
    for x in others:
        assert why in note_of(x, "express")


def test_library_that_does_not_fit_is_moved_out_for_good(new_site: Make) -> None:
    """A missing symbol at the first use in this process: every other call would find it missing, too."""
    site = new_site()
    me = f"os.getpid() == {os.getpid()}"
    toy = TOY.replace("NAME", '"lazy"').replace(
        "        x = read()\n",
        f"        if {me}:\n            raise ImportError('undefined symbol: f')\n        x = read()\n",
    )
    own(site, "lazy", toy)
    lz.silu(X)
    wait_until(lambda: lz.silu(X) is not None and len(report().attempts) > 1)
    found = report()
    assert [(a.backend, a.phase, a.outcome) for a in found.attempts] == [
        ("lazy", "in_process", "BACKEND_ERROR"),
        ("lazy", "", None),
    ]
    why = "a call of lazy.silu failed here: ImportError: undefined symbol: f"
    assert lz.connect(runtime_dir=site.folder).refusals() == {"lazy": why}
    y = np.ones((2, 2), np.float32)
    assert np.allclose(lz.silu(y), expected(y))
    assert (report().path, report().notes) == ("broker", (f"lazy does not run in this process: {why}",))


def test_class_that_computes_wrongly_here_stays_in_the_worker(new_site: Make) -> None:
    """The probe certifies each class by itself in this interpreter, as it does in the worker's."""
    site = new_site()
    wrong = "np.float32(x.size > 256 and os.environ.get('LZ_TOY_NAME') is None)"
    toy = TOY.replace("NAME", '"partly"').replace(
        "            write(x / (1 + np.exp(-x)))", f"            write(x / (1 + np.exp(-x)) + {wrong})"
    )
    own(site, "partly", toy)
    assert settle("partly").path == "in_process"
    large = np.zeros(600, np.float32)
    assert settle("partly", large).path == "broker"
    assert "failed on" in report().notes[0]
    assert not lz.silu(large).any()
    assert list(lz.connect(runtime_dir=site.folder).refusals()) == ["partly.silu"]


def test_policy_that_changes_its_mind_is_followed_within_the_lease(here: Site) -> None:
    """A grant lasts a second; no call fails in between."""
    settle()
    wait_until(lambda: lz.silu(X) is not None and report().path == "in_process")
    here.set_policy()
    wait_until(lambda: lz.silu(X) is not None and report().path == "broker")
    assert (report().backend, report().notes) == ("alpha", ())


def test_caller_alone_may_ask_for_it(new_site: Make) -> None:
    """backend_isolation may come with the calls, and holds for those only."""
    new_site().start().connect()
    lz.silu(X)
    assert report().path == "broker"
    lz.configure(backend_isolation={"alpha": "auto"})
    try:
        assert settle().path == "in_process"
    finally:
        lz.configure(backend_isolation=None)
    lz.silu(X)
    assert report().path == "broker"


def test_forked_child_probes_for_itself(here: Site, tmp_path: Path) -> None:
    """It has neither the parent's threads nor its connection."""
    code = """
import json, os, sys
import numpy as np
lz.connect(runtime_dir=sys.argv[1])
x = np.ones((3, 4), np.float32)
def until_here():
    while True:
        lz.silu(x)
        if lz.last_report().path == "in_process":
            return lz.last_report().worker_pid == os.getpid()
assert until_here()
child = os.fork()
if child == 0:
    os._exit(0 if until_here() else 1)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    with here.python(code) as parent:
        assert json.loads(parent.communicate(timeout=PATIENCE_S)[0]) == 0
