"""Backends of a GPU in the caller's own process, end to end over the GPU of threads: probes in this interpreter, calls
on the caller's streams and in its graphs, and what becomes of those that cannot run here.
tests/gpu/test_in_process_gpu.py does the same on a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import (
    attention_forward,
    close,
    finish,
    gelu,
    gpu_site,
    held,
    randn,
    report,
    silu,
    slow,
    soft,
)
from tests.process.harness import PATIENCE_S, ROOT, Site, in_threads, made_on, wait_until
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import ILLEGAL, RAISE, SLOW

import layerzero as lz

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]
Make = Callable[..., Site]


@pytest.fixture
def new_site(store: Path, soft: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make sites, started, and connect to them. The kernels of the backend "one" are the same here as in its worker."""
    made: list[Site] = []
    monkeypatch.setenv("LZ_SOFT_ROOT", str(ROOT))
    monkeypatch.setenv("LZ_TOY_NAME", "one")

    def make(*names: str, isolation: str = "one=in_process;*=subprocess", **settings: Any) -> Site:
        variables = {"LZ_SOFT_VERSION": "1", "LZ_SOFT_WRONG": ""}
        site = gpu_site(store, *(names or ("one",)), isolation=isolation, variables=variables, **settings)
        made.append(site)
        site.start().connect()
        return site

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def here(call: Callable[[], Any]) -> Any:
    """Make the call until it runs in this process; the result of that."""
    return made_on("in_process", call)


def settle(call: Callable[[], Any]) -> lz.SelectionReport:
    """Make the call until the probe in this interpreter has ended."""

    def told() -> lz.SelectionReport | None:
        call()
        is_open = any("has not ended yet" in note or "no leave yet" in note for note in report().notes)
        return None if is_open else report()

    return wait_until(told)  # type: ignore[return-value]


def test_several_results_are_made_here_too(new_site: Make) -> None:
    new_site()
    made = [randn(1, 2, 3, 8) for _ in "qkv"]
    out, lse = here(lambda: lz.attention_forward(*(x for x, _ in made)))
    for found, expected in zip((out, lse), attention_forward(*(values for _, values in made)), strict=True):
        close(found, expected)


def test_calls_run_here_once_the_probe_has_passed(new_site: Make) -> None:
    """Until then by the worker, and the report says why; then without it: in the caller's memory, of any strides."""
    site = new_site()
    (x, a), (y, b) = randn(16, 24), randn(24, 8)
    close(lz.silu(x), silu(a))
    assert (report().path, report().backend) == ("broker", "one")
    assert any(note.startswith("one does not run in this process: ") for note in report().notes)
    out = soft_cupy.empty((16, 24))
    calls: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
        "silu": (lambda: lz.silu(x), silu(a)),
        "silu into": (lambda: lz.silu(x, out=out), silu(a)),
        "silu of rows": (lambda: lz.silu(x[3:7, ::2]), silu(a[3:7, ::2])),
        "matmul": (lambda: lz.matmul(x, y), a @ b),
        "gelu": (lambda: slow(x), gelu(a)),
    }
    for name, (call, right) in calls.items():
        close(here(call), right)
        answered = site.backend("one")["answered"]
        for _ in range(3):
            close(call(), right)
            told = report()
            assert (told.path, told.backend, told.worker_pid) == ("in_process", "one", os.getpid()), name
            assert (told.copies, told.attempts[-1].outcome) == ((), None)
        assert site.backend("one")["answered"] == answered, name
    assert "of soft 1 ran in this process, on its own stream" in report().notes[0]
    assert lz.silu(x, out=out) is out
    assert {row["state"] for row in lz.status()["lifted"]} == {"in process"}
    x.scale(2)
    close(lz.silu(x), silu(2 * a))


def test_order_is_that_of_the_callers_streams(new_site: Make) -> None:
    """Side streams, those of threads, and calls that go to workers in between."""
    new_site("one", "two")
    values = randn(16, 16)[1] / 8
    x = soft_cupy.asarray(values)
    here(lambda: lz.silu(x))

    def chain() -> None:
        with soft_cupy.stream():
            mine = soft_cupy.asarray(values)
            value, expected = mine, values.astype(np.float64)
            for _ in range(20):
                value = lz.silu(lz.matmul(value, mine, backend="two"))
                expected = silu(expected @ values)
            assert report().path == "in_process"
            np.testing.assert_allclose(value.get(), expected, rtol=1e-3, atol=1e-5)

    in_threads(3, chain)


def test_what_is_written_in_place_is_the_callers_memory(new_site: Make) -> None:
    new_site()
    (key, a), (value, b) = randn(2, 2, 4), randn(2, 2, 5)
    (k_cache, c), (v_cache, d) = randn(3, 4, 2, 4), randn(3, 4, 2, 5)
    slots = soft_cupy.asarray(np.array([7, 2], np.int64))
    here(lambda: lz.append_kv(key, value, k_cache, v_cache, slots))
    for cache, was, rows in ((k_cache, c, a), (v_cache, d, b)):
        was[1, 3], was[0, 2] = rows
        close(cache, was)


def test_caller_waits_for_nothing(new_site: Make) -> None:
    site = new_site()
    x, a = randn(SLOW)
    here(lambda: lz.silu(x))
    here(lambda: slow(x[:7]))
    here(lambda: slow(x))
    with held(site):
        y = lz.silu(slow(x))
        assert not driver.is_stream_idle(soft_cupy.current().ptr)
    close(y, silu(gelu(a)))


def test_graph_of_the_application_holds_it_as_ordinary_work(new_site: Make) -> None:
    """After a call outside of it; a kernel that no graph can hold is refused as before."""
    new_site()
    x, _ = randn(9, 11)
    here(lambda: lz.silu(x))
    here(lambda: lz.layer_norm(x, (11,)))
    with soft_cupy.stream():
        stream = soft_cupy.current()
        stream.begin_capture()
        y = lz.silu(x)
        path = report().path
        graph = stream.end_capture()
        assert path == "in_process"
        for n in range(3):
            x.fill(n)
            graph.launch(stream)
            close(y, silu(np.full((9, 11), n)))
        stream.begin_capture()
        with pytest.raises(lz.CudaGraphUnsafe):
            lz.layer_norm(x, (11,))
        lz.silu(x)
        stream.end_capture()
    new, _ = randn(9, 13)
    with soft_cupy.stream():
        stream = soft_cupy.current()
        stream.begin_capture()
        with pytest.raises(lz.CudaGraphUnsafe, match="make it once outside of the capture"):
            lz.silu(new)
        lz.silu(x)
        stream.end_capture()


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("LZ_SOFT_VERSION", "2", "this process has other versions than its environment: soft 2, not 1"),
        ("LZ_SOFT_WRONG", "crash", "its probe ended with signal 11"),
        ("LZ_SOFT_ROOT", "/nowhere", "its probe says: "),
    ],
)
def test_library_that_does_not_fit_stays_in_its_worker(
    new_site: Make, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    """The report, explain and refusals say why; for good."""
    if variable == "LZ_SOFT_ROOT":
        monkeypatch.setenv("LZ_TOY_NAME", "no such backend")
    monkeypatch.setenv(variable, value)
    site = new_site()
    x, a = randn(33)
    told = settle(lambda: lz.silu(x))
    assert told.path in ("broker", "express")
    assert any(note.startswith(f"one does not run in this process: {why}") for note in told.notes)
    session = lz.connect(runtime_dir=site.folder)
    assert session.refusals()["one"].startswith(why)
    noted = {c.kernel_id: c.notes for c in lz.explain("silu", x).candidates}["one.silu"]
    assert any(note.startswith(f"does not run in this process: {why}") for note in noted)
    for _ in range(5):
        close(lz.silu(x), silu(a))
        assert report().path != "in_process"


def test_class_that_computes_wrongly_here_stays_in_the_worker(new_site: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LZ_SOFT_WRONG", "silu")
    site = new_site()
    (small, a), (large, b) = randn(5, 7), randn(600)
    close(here(lambda: lz.silu(small)), silu(a))
    for _ in range(3):
        close(lz.silu(large), silu(b))
    assert report().path in ("broker", "express")
    assert any("failed on" in note for note in report().notes)
    assert list(lz.connect(runtime_dir=site.folder).refusals()) == ["one.silu"]


def test_kernel_that_raises_here_goes_to_a_worker(new_site: Make) -> None:
    """Only its own calls, and the report says so. The broker hears of it."""
    site = new_site("one", "two")
    x, _ = randn(4, 6)
    here(lambda: lz.layer_norm(x, (6,)))
    wide = x.get().astype(np.float64)

    def right(eps: float) -> np.ndarray:
        return (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + eps)

    close(lz.layer_norm(x, (6,), eps=RAISE), right(RAISE))
    told = report()
    assert (told.backend, told.path) == ("two", "broker")
    assert any("one does not run in this process for 5 s: one.layer_norm failed: " in note for note in told.notes)
    assert "the toy raises" in str(told)
    failed = wait_until(lambda: site.events("client.kernel_failed"))
    assert (failed[0]["backend"], failed[0]["kernel_id"]) == ("one", "one.layer_norm")
    close(lz.layer_norm(x, (6,)), right(1e-5))


def test_policy_that_changes_its_mind_is_followed(new_site: Make, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("backend_isolation: {one: in_process, '*': subprocess}\n")
    new_site(policy=policy, isolation="")
    x, a = randn(8, 8)
    close(here(lambda: lz.silu(x)), silu(a))
    policy.write_text("backend_isolation: subprocess\n")
    wait_until(lambda: lz.silu(x) is not None and report().path != "in_process")
    assert not any("in this process" in note for note in report().notes)
    policy.write_text("backend_isolation: {one: auto}\n")
    close(here(lambda: lz.silu(x)), silu(a))


def test_worker_that_nobody_needs_is_ended(new_site: Make) -> None:
    site = new_site(rest_s=0.3)
    x, a = randn(12)
    here(lambda: lz.silu(x))
    wait_until(lambda: lz.silu(x) is not None and site.backend("one")["pid"] is None)
    close(lz.silu(x), silu(a))
    assert (report().path, site.backend("one")["pid"]) == ("in_process", None)


def test_times_of_calls_here_reach_the_broker(new_site: Make) -> None:
    """As the GPU's clock tells them."""
    new_site("one", "two")
    x, _ = randn(70, 90)
    here(lambda: lz.silu(x))

    def measured() -> float | None:
        lz.silu(x)
        finish()
        return {c.backend: c.measured_us for c in lz.explain("silu", x).candidates}["one"]

    assert wait_until(measured)


def test_what_shares_memory_and_what_has_a_deadline_goes_by_a_worker(new_site: Make) -> None:
    new_site()
    x, a = randn(40)
    here(lambda: lz.silu(x))
    close(lz.silu(x, timeout_s=PATIENCE_S), silu(a))
    assert report().path == "broker"
    here(lambda: lz.silu(x, out=soft_cupy.empty(40)))
    lz.silu(x, out=x)
    assert report().path != "in_process"
    close(x, silu(a))


def test_auto_goes_on_with_lifted_calls_where_the_library_does_not_fit(lifted_site: LiftedSites) -> None:
    """Their reports say why they are not in process."""
    lifted_site(isolation="auto").start().connect()
    x, a = randn(44)
    close(lift(lambda: lz.silu(x)), silu(a))
    told = wait_until(lambda: lz.silu(x) is not None and "its probe says" in str(report()) and report())
    assert told.path == "lifted"


FAULT = f"""
import json, os, sys
os.environ.update(LZ_SOFT_ROOT={str(ROOT)!r}, LZ_TOY_NAME="one")
from tests.soft_gpu import soft_cupy
soft_cupy.install()
lz.connect(runtime_dir=sys.argv[1])
x = soft_cupy.asarray(__import__("numpy").ones((4, 6), "float32"))
while True:
    y = lz.layer_norm(x, (6,))
    if lz.last_report().path == "in_process":
        break
    notes = lz.last_report().notes
    if any("FAULTED" in note for note in notes):
        print(json.dumps(list(notes)), flush=True)
        sys.exit()
try:
    while True:
        lz.layer_norm(x, (6,), eps={ILLEGAL})
except Exception as exc:
    print(json.dumps([repr(exc), getattr(exc, "code", "")]), flush=True)
"""


def test_kernel_that_cost_a_process_its_gpu_stays_in_its_worker(new_site: Make) -> None:
    """In later processes, too; the report says why. Other kernels are not concerned."""
    site = new_site("one", isolation="auto")
    here(lambda: lz.layer_norm(soft_cupy.asarray(np.ones((4, 6), np.float32)), (6,)))
    with site.python(FAULT) as first:
        said = json.loads(first.communicate(timeout=PATIENCE_S)[0])
    assert said[1] == "BACKEND_ERROR"
    with site.python(FAULT) as second:
        notes = json.loads(second.communicate(timeout=PATIENCE_S)[0])
    assert any("FAULTED" in note and "lz cache forgive" in note for note in notes)
    x, a = randn(4, 6)
    close(here(lambda: lz.silu(x)), silu(a))
