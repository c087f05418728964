"""Calls on a GPU from end to end, over one of threads and shared memory (tests/soft_gpu): what is right, how
memory crosses, and who waits for whom. tests/gpu/test_calls.py does the same on a real one, and test_gpu_faults.py has
what breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import (
    attention_forward,
    broker,
    close,
    connected,
    finish,
    gelu,
    held,
    new_site,
    randn,
    report,
    silu,
    slow,
    soft,
)
from tests.process.harness import PATIENCE_S, Site
from tests.soft_gpu import soft_cupy, soft_gpu
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import SLOW

import layerzero as lz
from layerzero.client.gpu.device import REQUIRED

__all__ = ["broker", "connected", "new_site", "soft"]


# --- the normal case


def test_results_are_right_for_any_strides(connected: Site) -> None:
    """Contiguous, transposed, offset, reversed, empty."""
    x, values = randn(16, 24)
    for key in (np.s_[:], np.s_[3:7, ::2], np.s_[5], np.s_[:0], np.s_[::-1], np.s_[7:, 5:20]):
        result = lz.silu(x[key])
        assert (type(result), result.shape) == (soft_cupy.ndarray, values[key].shape)
        close(result, silu(values[key]))
    close(lz.silu(x.T), silu(values.T))
    y, more = randn(24, 8)
    close(lz.matmul(x, y), values @ more)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_several_results_are_arrays_of_their_own(connected: Site, layout: str) -> None:
    """By the broker first and on a ring then; each may be kept while the others go."""
    for _ in range(12):
        (q, qs), (k, ks), (v, vs) = (randn(2, 3, rows, 8) for rows in (5, 7, 7))
        if layout == "BSHD":
            q, k, v = (soft_cupy.asarray(np.ascontiguousarray(np.swapaxes(one, 1, 2))) for one in (qs, ks, vs))
        out, lse = lz.attention_forward(q, k, v, layout=layout)
        rows, sums = attention_forward(qs, ks, vs)
        assert (lse.shape, lse.dtype, out.strides) == ((2, 3, 5), np.float32, q.strides)
        close(out, rows if layout == "BHSD" else np.swapaxes(rows, 1, 2))
        del out
        close(lse, sums)
    assert report().kernel_id == "one.attention_forward"
    assert report().copies == ()


@pytest.mark.parametrize("is_allowed", [False, True])
def test_gpus_that_are_shared_by_mps_are_told_of(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    """By lz doctor unless the user allows it, and by each report; workers take fewer connections, which all share."""
    monkeypatch.setenv("LZ_SOFT_MPS", "1")
    site = new_site("one", allow_mps=is_allowed)
    site.environ["LZ_SOFT_MPS"] = "1"
    site.connect()
    x, values = randn(64)
    close(lz.silu(x), silu(values))
    assert "shared by MPS" in str(report())
    (check,) = [check for check in lz.readiness_check(starts_workers=False).checks if check.name == "GPU sharing"]
    assert (check.ok, "allow_mps" in check.repair) == (is_allowed, not is_allowed)
    environ = Path(f"/proc/{site.backend('one')['pid']}/environ").read_bytes().split(b"\0")
    assert b"CUDA_DEVICE_MAX_CONNECTIONS=8" in environ


def test_nothing_is_copied_and_the_report_says_how_memory_crosses(connected: Site) -> None:
    """Memory of the array library is mapped by the worker as it lies."""
    (x, values), (out, _) = randn(1000), randn(1000)
    assert lz.silu(x, out=out) is out
    close(out, silu(values))
    assert (report().backend, report().kernel_id, report().copied_bytes) == ("one", "one.silu", 0)
    assert report().worker_pid == connected.backend("one")["pid"]
    assert any(f"GPU {soft_gpu.UUID}, memory crosses by ipc" in note for note in report().notes)
    lz.silu(x, out=x)
    assert [(copy.arg, copy.nbytes) for copy in report().copies] == [("out", 4000)]
    close(x, silu(values))


def test_a_call_returns_before_its_work_is_done(connected: Site) -> None:
    """What the caller enqueues before and after it is in order all the same."""
    x, values = randn(SLOW)
    slow(x)  # the first call of a route is waited for
    finish()
    with held(connected):
        first = slow(x)
        x.scale(2)
        second = slow(x)
        x.fill(0)
        assert not driver.is_stream_idle(soft_cupy.current().ptr)
    close(first, gelu(values))
    close(second, gelu(2 * values))


def test_inputs_may_go_right_after_the_call(connected: Site) -> None:
    """Their library gives the memory to the next array, in the stream's order."""
    expected, results = [], []
    for step in range(30):
        x, values = randn(500 + step % 3)
        results.append(lz.silu(x))
        expected.append(silu(values))
        x.fill(-1e30)
        del x
    for result, right in zip(results, expected, strict=True):
        close(result, right)


def test_chains_hop_between_workers(connected: Site) -> None:
    """Each call needs the one before it, which another process runs."""
    values = randn(16, 16)[1] / 8
    x = soft_cupy.asarray(values)
    value, expected = x, values.astype(np.float64)
    for step in range(20):
        value = lz.silu(lz.matmul(value, x, backend=("one", "two")[step % 2]), backend=("two", "one")[step % 2])
        expected = silu(expected @ values)
    np.testing.assert_allclose(value.get(), expected, rtol=1e-3, atol=1e-5)


def test_threads_and_streams_do_not_mix(connected: Site) -> None:
    """Each thread has a stream of its own; all share the session and the workers."""

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            values = rng.standard_normal((8, 8), dtype=np.float32)
            x = soft_cupy.asarray(values)
            close(lz.silu(lz.matmul(x, x, backend="two")), silu(values @ values))

    def in_stream(seed: int) -> None:
        with soft_cupy.stream():
            work(seed)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(in_stream, seed) for seed in range(4)]:
            future.result(PATIENCE_S)


@pytest.mark.parametrize("transport", ["ipc", "vmm", "staged", "copied"])
def test_every_way_of_crossing_gives_the_same_results(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The lower transports copy, and say so."""
    site = new_site()
    monkeypatch.setenv(REQUIRED, transport)
    site.connect()
    for step in range(8):
        x, values = randn(100 + step)
        close(lz.silu(x), silu(values))
    made = [randn(1, 2, 3, 8) for _ in "qkv"]
    found = lz.attention_forward(*(x for x, _ in made))
    for result, expected in zip(found, attention_forward(*(values for _, values in made)), strict=True):
        close(result, expected)
    x, values = randn(107)
    close(lz.silu(x), silu(values))
    assert any(f"memory crosses by {transport}" in note for note in report().notes)
    assert (report().copied_bytes > 0) == (transport != "ipc")
    lz.disconnect()
    pinned_bytes = driver.pinned_bytes
    site.connect()
    close(lz.silu(x), silu(values))
    lz.disconnect()
    assert driver.pinned_bytes == pinned_bytes


def test_the_next_way_is_taken_where_one_fails(new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says of one process proves nothing about two."""
    site = new_site("one")
    site.connect()
    monkeypatch.setattr(driver, "ipc_export", lambda base: bytes(64))
    x, values = randn(100)
    close(lz.silu(x), silu(values))
    (note,) = [note for note in report().notes if "memory crosses by vmm" in note]
    assert "ipc: " in note


def append_in_order(rounds: int = 8) -> tuple[Any, Any]:
    """Keys into two caches, each call at once after the last; the caches, and what must be in them."""
    rng = np.random.default_rng(rounds)
    held = [rng.standard_normal((3, 4, 2, dim), dtype=np.float32) for dim in (8, 6)]
    caches = [soft_cupy.asarray(cache) for cache in held]
    for step in range(rounds):
        slots = np.array([step, -1, 11 - step // 2, 12])
        rows = [rng.standard_normal((4, 2, dim), dtype=np.float32) for dim in (8, 6)]
        lz.append_kv(*(soft_cupy.asarray(row) for row in rows), *caches, soft_cupy.asarray(slots))
        for cache, row in zip(held, rows, strict=True):
            cache[divmod(slots[0], 4)] = row[0]
            cache[divmod(slots[2], 4)] = row[2]
    return caches, held


def equal(caches: Any, held: Any) -> None:
    for cache, want in zip(caches, held, strict=True):
        np.testing.assert_array_equal(cache.get(), want)


def test_caches_are_written_as_they_lie(connected: Site) -> None:
    """They are most of a GPU's memory: nothing of them may be copied, and what is not stored must stay."""
    equal(*append_in_order())
    assert report().copies == ()
    assert report().kernel_id == "one.append_kv"


@pytest.mark.parametrize("transport", ["vmm", "staged", "copied"])
def test_caches_that_no_worker_reaches_are_copied_there_and_back(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The report counts both ways; a cache with gaps is refused, because the copy back would undo what is in them."""
    site = new_site("one")
    monkeypatch.setenv(REQUIRED, transport)
    site.connect()
    caches, held = append_in_order()
    equal(caches, held)
    sizes = [(name, cache.nbytes) for name, cache in zip(("k_cache", "v_cache"), held, strict=True)]
    assert sorted(c for c in ((copy.arg, copy.nbytes) for copy in report().copies) if "cache" in c[0]) == sorted(
        sizes * 2
    )
    rows, slots = soft_cupy.asarray(held[0][0, :1]), soft_cupy.asarray(np.zeros(1, np.int64))
    both = soft_cupy.asarray(np.stack([held[0], held[0]], 1))
    with pytest.raises(lz.InvalidArgument, match="k_cache is written in place, and no worker reaches its memory"):
        lz.append_kv(rows, soft_cupy.asarray(held[0][1, :1]), both[:, 0], both[:, 1], slots)


def test_caches_that_interleave_are_written_each_in_its_own_elements(connected: Site) -> None:
    """Keys and values of a block side by side."""
    (both, values), (rows, row_values) = randn(3, 2, 4, 2, 8), randn(2, 2, 8)
    lz.append_kv(rows, rows[::-1], both[:, 0], both[:, 1], soft_cupy.asarray(np.array([9, 2])))
    for slot, row in ((9, 0), (2, 1)):
        values[slot // 4, 0, slot % 4], values[slot // 4, 1, slot % 4] = row_values[row], row_values[1 - row]
    np.testing.assert_array_equal(both.get(), values)


def test_calls_on_the_cpu_go_on_as_before(connected: Site) -> None:
    """GPU kernels do not take them, and say why."""
    with pytest.raises(lz.NoBackend, match="kernels need tensors on an NVIDIA GPU"):
        lz.silu(np.ones(4, np.float32))


def test_a_call_that_no_kernel_takes_is_refused_at_once(connected: Site) -> None:
    """The broker sees within a millisecond that its place in the stream is reached, not at its next look."""
    (x, _), (weight, _) = randn(16, 24), randn(8, 24)
    taken = []
    for _ in range(20):
        start_s = time.perf_counter()
        with pytest.raises(lz.NoBackend, match=r"torch-cuda\.linear: NOT_INSTALLED"):
            lz.linear(x, weight)
        taken.append(time.perf_counter() - start_s)
    assert min(taken) < 0.01


def test_explain_and_submit_know_the_gpu(connected: Site) -> None:
    """As for the CPU."""
    x, values = randn(64)
    assert lz.explain("silu", x).kernel_id == "one.silu"
    future = lz.submit("silu", x)
    close(future.result(), silu(values))
    assert future.report is not None
    assert future.report.backend == "one"


# --- bad input


def test_arrays_on_two_devices_are_refused(connected: Site) -> None:
    """Which copy would be meant is the caller's to say."""
    with pytest.raises(lz.InvalidArgument, match=r"matmul: a is on cuda:0, b on cpu; move all arrays to one device"):
        lz.matmul(randn(4, 4)[0], np.zeros((4, 4), np.float32))


def test_a_capture_is_refused(connected: Site) -> None:
    """A replay would find nobody at the other end."""
    x, _ = randn(16)
    stream = soft_cupy.current().ptr
    driver.begin_capture(stream)
    try:
        with pytest.raises(lz.CudaGraphUnsafe, match="silu: the stream is being captured"):
            lz.silu(x)
    finally:
        driver.end_capture(stream)
