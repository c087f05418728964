"""Lifted calls from end to end, over a GPU of threads (tests/soft_gpu): client, broker, worker, proof, store, and
launches in the client. tests/gpu/test_lifted_calls.py does the same on a real one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import close, finish, gelu, randn, report, silu, slow, soft
from tests.process.harness import wait_until
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store, rows
from tests.process.test_counters import counts, grown, reported
from tests.soft_gpu import soft_cupy

import layerzero as lz
from layerzero.client.gpu.lifting import lifted_library, loaded

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launching: by what is compiled, and by the Python."""
    if request.param == "python":
        monkeypatch.setattr(lifted_library, "lifted", None)
    elif lifted_library.lifted is None:
        pytest.skip(lifted_library.why_not)


def test_a_repeated_call_is_launched_by_this_process(lifted_site: LiftedSites, kernels: Any, way: None) -> None:
    """Whatever its kernel is made of: fills, copies and scratch, arguments of any strides."""
    lifted_site().start().connect()
    (x, a), (y, b) = randn(16, 24), randn(24, 8)
    z, c = randn(500)
    out = soft_cupy.empty((16, 24))
    calls: dict[str, tuple[Callable[[], Any], np.ndarray]] = {
        "silu": (lambda: lz.silu(x), silu(a)),
        "silu into": (lambda: lz.silu(x, out=out), silu(a)),
        "silu of rows": (lambda: lz.silu(x[3:7, ::2]), silu(a[3:7, ::2])),
        "silu turned": (lambda: lz.silu(x.T), silu(a.T)),
        "silu of 500": (lambda: lz.silu(z), silu(c)),
        "matmul": (lambda: lz.matmul(x, y), a @ b),
        "gelu": (lambda: slow(x), gelu(a)),
    }
    for name, (call, right) in calls.items():
        close(lift(call), right)
        before = kernels.launches
        for _ in range(3):
            close(call(), right)
            told = report()
            assert (told.path, told.backend, told.worker_pid, told.copied_bytes) == ("lifted", "one", 0, 0), name
        assert kernels.launches >= before + 3
    assert lz.silu(x, out=out) is out
    assert {row[1:] for row in rows()} == {("lifted", "")}
    x.scale(2)
    close(lz.silu(x), silu(2 * a))


def test_each_launch_is_counted_once(lifted_site: LiftedSites, way: None) -> None:
    """By its caller, whom no worker and no broker hears of."""
    lifted_site().start().connect()
    x, _ = randn(16, 24)
    lift(lambda: lz.silu(x))
    before, seen = counts(), reported(lambda: lz.silu(x), 40)
    assert seen["silu", "one", "lifted"] > 20
    assert grown(before, counts()) == dict(seen)


def test_caches_are_written_in_place(lifted_site: LiftedSites, way: None) -> None:
    lifted_site().start().connect()
    rng = np.random.default_rng(0)
    held = [rng.standard_normal((3, 4, 2, dim), dtype=np.float32) for dim in (8, 6)]
    caches, step = [soft_cupy.asarray(cache) for cache in held], iter(range(1 << 20))

    def append() -> None:
        slots = np.array([next(step) % 12, -1, 12])
        new = [rng.standard_normal((3, 2, dim), dtype=np.float32) for dim in (8, 6)]
        lz.append_kv(*map(soft_cupy.asarray, new), *caches, soft_cupy.asarray(slots))
        for cache, rows_of in zip(held, new, strict=True):
            cache[divmod(int(slots[0]), 4)] = rows_of[0]

    lift(append)
    for _ in range(12):
        append()
        assert report().path == "lifted"
    for cache, want in zip(caches, held, strict=True):
        np.testing.assert_array_equal(cache.get(), want)


def test_views_at_odd_addresses_have_a_lifted_call_of_their_own(lifted_site: LiftedSites, way: None) -> None:
    lifted_site().start().connect()
    whole, values = randn(1064)
    for offset, count in {0: 1, 1: 2, 2: 3, 4: 4, 64: 4}.items():  # 64 elements further is as good an address as 0
        x = whole[offset : offset + 1000]
        close(lift(lambda x=x: lz.silu(x)), silu(values[offset : offset + 1000]))
        assert [row[1] for row in rows()] == ["lifted"] * count


def test_a_worker_that_is_not_needed_gives_its_memory_back(lifted_site: LiftedSites, kernels: Any) -> None:
    """And starts again for a call that is not lifted yet."""
    site = lifted_site(rest_s=0.3)
    site.start().connect()
    x, values = randn(40)
    close(lift(lambda: lz.silu(x)), silu(values))

    def is_gone() -> bool:
        close(lz.silu(x), silu(values))
        return bool(report().path == "lifted" and site.backend("one")["pid"] is None)

    wait_until(is_gone)
    row = site.backend("one")
    assert (row["state"], row["cause"], row["unavailable"], row["restarts"]) == ("absent", None, None, 0)
    y, others = randn(41)
    close(lz.silu(y), silu(others))
    assert site.backend("one")["pid"] is not None
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"


def test_streams_do_not_mix(lifted_site: LiftedSites, way: None) -> None:
    """Each has memory of its own for what a call's steps leave to each other."""
    lifted_site().start().connect()
    x, _ = randn(40, 30)
    lift(lambda: slow(x))
    results: list[tuple[Any, np.ndarray]] = []
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(soft_cupy.stream())
            x, values = randn(40, 30)
            results += [(slow(x), gelu(values)) for _ in range(20)]
            assert report().path == "lifted"
        for result, right in results:
            finish()
            close(result, right)


def test_a_graph_of_the_application_holds_it_as_a_node_of_its_own(lifted_site: LiftedSites, way: None) -> None:
    site = lifted_site().start()
    site.connect()
    with soft_cupy.stream():
        x, values = randn(23, 5)
        lift(lambda: slow(x))
        stream = soft_cupy.current()
        stream.begin_capture()
        result = slow(x)
        graph = stream.end_capture()
        assert report().path == "lifted"
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
        for _ in range(3):
            x.scale(2)
            values = 2 * values
            graph.launch()
            close(result, gelu(values))


def test_a_graph_may_hold_a_call_whose_leave_has_just_ended(lifted_site: LiftedSites, way: None) -> None:
    """It was lifted from the first, and no worker has ever served it here: leave is asked for during the capture. So it
    is for one that is made for the first time there."""
    site = lifted_site()
    site.connect()
    (x, values), (y, others) = randn(29, 5), randn(31, 5)
    for one in (x, y):
        lift(lambda one=one: slow(one))
    lz.disconnect()
    loaded.forget()
    site.connect()
    answered = site.backend("one")["answered"]
    with soft_cupy.stream():
        close(slow(x), gelu(values))
        assert report().path == "lifted"
        before = lz.status()["selection"]["policy"]
        site.set_policy("strict_mode: true\n")
        wait_until(lambda: lz.status()["selection"]["policy"] != before)
        stream = soft_cupy.current()
        stream.begin_capture()
        results = slow(x), slow(y)
        graph = stream.end_capture()
        assert report().path == "lifted"
        graph.launch()
        close(results[0], gelu(values))
        close(results[1], gelu(others))
    assert site.backend("one")["answered"] == answered
