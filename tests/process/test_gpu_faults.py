"""What becomes of calls on a GPU when a worker, a kernel, a way for memory, the broker or a client fails, on the GPU of
threads (tests/soft_gpu)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.process.gpu_site import (
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
from tests.process.harness import PATIENCE_S, Site, wait_ended, wait_until
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import ILLEGAL, RAISE, SLOW, STUCK

import layerzero as lz
from layerzero.client.gpu import device

__all__ = ["broker", "connected", "new_site", "soft"]


def test_a_worker_killed_with_calls_enqueued_costs_nothing_but_time(connected: Site) -> None:
    """They run on the next backend, in their order, and the report says so."""
    x, values = randn(SLOW)
    slow(x)
    lz.silu(x, backend="two")
    finish()
    pid = connected.backend("one")["pid"]
    results = []
    with held(connected):
        for _ in range(3):
            results.append(slow(x))
            x.scale(0.5)
        chained = lz.silu(results[-1])
        os.kill(pid, signal.SIGKILL)
    finish()
    for step, result in enumerate(results):
        close(result, gelu(values / 2**step))
    close(chained, silu(gelu(values / 4)))


def test_the_report_of_a_call_that_moved_says_so(connected: Site) -> None:
    """Although the call had long returned."""
    x, values = randn(SLOW)
    slow(x)
    lz.silu(x, backend="two")
    finish()
    pid = connected.backend("one")["pid"]
    with held(connected):
        result = slow(x)
        assert report().backend == "one"
        os.kill(pid, signal.SIGKILL)
    close(result, gelu(values))
    attempts = wait_until(lambda: a if len(a := report().attempts) == 2 else None)
    assert [(a.backend, a.outcome) for a in attempts] == [("one", "BACKEND_ERROR"), ("two", None)]


def test_a_call_that_nobody_can_finish_is_an_error_and_no_stream_hangs(new_site: Callable[..., Site]) -> None:
    """A pinned call has no other backend: the next call or synchronisation says what became of it."""
    site = new_site(backoff_s=600, backoff_max_s=600)
    site.connect()
    x, values = randn(SLOW)
    slow(x, backend="one")
    finish()
    with held(site):
        slow(x, backend="one")
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed: the one worker died"):
        lz.synchronize(PATIENCE_S)
    finish()
    close(lz.silu(x), silu(values))


def test_a_lost_gpu_ends_that_worker_alone(connected: Site) -> None:
    """The call that broke its context falls back; the other worker never notices."""
    x, values = randn(8, 16)
    wide = values.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + ILLEGAL)
    lz.silu(x, backend="two")
    result = lz.layer_norm(x, (16,), eps=ILLEGAL)
    others = [lz.silu(x, backend="two") for _ in range(5)]
    close(result, expected)
    for other in others:
        close(other, silu(values))
    exits = wait_until(lambda: connected.events("worker.exited"))
    assert "exit code 70" in [line["exit"] for line in exits]
    lz.synchronize(PATIENCE_S)  # and no call ended in an error


def test_an_earlier_call_that_falls_back_to_a_worker_with_later_ones_does_not_hang(
    new_site: Callable[..., Site],
) -> None:
    """Its kernel is new there, and CUDA may wait for all streams of a process to load one: the worker begins anew, with
    this call first, and nobody is to blame."""
    site = new_site()
    site.connect()
    x, values = randn(8, 16)
    lz.silu(x, backend="two")
    wide = values.astype(np.float64)
    result = lz.layer_norm(x, (16,), eps=ILLEGAL)
    later = [lz.silu(x, backend="two") for _ in range(5)]
    finish()
    lz.synchronize(PATIENCE_S)
    close(result, (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + ILLEGAL))
    for other in later:
        close(other, silu(values))
    assert site.backend("two")["state"] == "ready"


def test_a_kernel_that_raises_falls_back(connected: Site) -> None:
    """And its worker lives on."""
    x, values = randn(8, 16)
    wide = values.astype(np.float64)
    close(lz.silu(x), silu(values))
    pid = connected.backend("one")["pid"]
    result = lz.layer_norm(x, (16,), eps=RAISE)
    assert [attempt.backend for attempt in report().attempts] == ["one", "two"]
    close(result, (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + RAISE))
    assert connected.backend("one")["pid"] == pid


def test_memory_that_a_worker_gave_back_may_be_lent_to_it_again(connected: Site) -> None:
    """It is, as soon as a call comes back to one whose kernel failed: the worker may not have unmapped it yet."""
    x, values = randn(8, 16)
    wide = values.astype(np.float64)
    lz.layer_norm(x, (16,), eps=RAISE)
    assert [attempt.backend for attempt in report().attempts] == ["one", "two"]
    for _ in range(3):
        result = lz.layer_norm(x, (16,), backend="one")
        close(result, (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5))


def test_a_call_past_its_timeout_moves_on(connected: Site) -> None:
    """The worker that holds it is killed, as for a call on the CPU."""
    x, values = randn(4, 16)
    first = lz.silu(x)
    lz.silu(x, backend="two")
    wide = values.astype(np.float64)
    stuck = lz.layer_norm(x, (16,), eps=STUCK, timeout_s=1)
    after = lz.silu(stuck)
    close(first, silu(values))
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + STUCK)
    close(stuck, expected)
    close(after, silu(expected))


def test_the_brokers_death_lets_streams_go(new_site: Callable[..., Site]) -> None:
    """Its workers die with it; what was enqueued is lost, and the next call says so."""
    site = new_site()
    site.connect()
    x, _ = randn(SLOW)
    slow(x)
    pid = site.broker_pid
    assert pid is not None
    with held(site):
        for _ in range(3):
            slow(x)
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
    finish()
    with pytest.raises(lz.BrokerLost):
        lz.silu(x)


def test_a_call_on_its_way_to_a_broker_that_dies_is_told_by_the_next_wait(new_site: Callable[..., Site]) -> None:
    """It has returned, as the broker was there."""
    session = new_site("one").connect()
    x, _ = randn(20)
    lz.silu(x)
    os.kill(session.broker_pid, signal.SIGSTOP)
    lz.silu(x)
    os.kill(session.broker_pid, signal.SIGKILL)
    with pytest.raises(lz.BrokerLost):
        lz.synchronize(PATIENCE_S)


def test_a_clients_death_harms_nobody(connected: Site) -> None:
    """Calls whose inputs will never be there end, and the workers serve others."""
    x, values = randn(64)
    close(lz.silu(x), silu(values))
    other = connected.python(
        "import time\n"
        "from tests.soft_gpu import soft_cupy, soft_gpu\n"
        "soft_cupy.install()\n"
        "lz.connect()\n"
        "x = soft_cupy.empty(64)\n"
        "lz.silu(x)\n"
        "soft_gpu.driver.put(0, lambda: time.sleep(600))\n"
        "for _ in range(5): lz.silu(x)\n"
        "print('enqueued', flush=True)\n"
        "time.sleep(60)\n"
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "enqueued\n"
        other.kill()
    for _ in range(10):
        close(lz.silu(x), silu(values))


def test_sessions_come_and_go(connected: Site) -> None:
    """The next one offers the same memory anew."""
    x, values = randn(64)
    for _ in range(3):
        close(lz.silu(x), silu(values))
        lz.disconnect()
        connected.connect()


def test_random_deaths_cost_no_result(new_site: Callable[..., Site]) -> None:
    """Chains of calls in several threads and streams while workers are killed: no result is wrong, no stream hangs and
    no call is lost. LZ_SOAK_S says for how long, LZ_SOAK_SEED how."""
    seconds, seed = float(os.environ.get("LZ_SOAK_S", "3")), int(os.environ.get("LZ_SOAK_SEED", "0"))
    names = ("one", "two", "three")
    site = new_site(*names)
    site.connect()
    x, _ = randn(16, 16)
    for name in names:
        lz.matmul(lz.silu(x, backend=name), x, backend=name)
    is_over, ended = threading.Event(), [0]

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        with soft_cupy.stream():
            while not is_over.is_set():
                values = rng.standard_normal((16, 16), dtype=np.float32) / 4
                x = value = soft_cupy.asarray(values)
                expected = values.astype(np.float64)
                for is_silu in rng.random(rng.integers(1, 12)) < 0.5:
                    value = lz.silu(value) if is_silu else lz.matmul(value, x)
                    expected = silu(expected) if is_silu else expected @ values
                    ended[0] += 1
                np.testing.assert_allclose(value.get(), expected, rtol=1e-3, atol=1e-5)

    kills, rng, until_s = 0, np.random.default_rng(seed), time.monotonic() + seconds
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(work, number) for number in range(3)]
        try:
            while time.monotonic() < until_s and not any(future.done() for future in futures):
                is_over.wait(rng.uniform(0.1, 0.8))
                ready = [b["pid"] for b in lz.status()["backends"] if b["name"] in names and b["state"] == "ready"]
                if len(ready) > 1:
                    os.kill(int(rng.choice(ready)), signal.SIGKILL)
                    kills += 1
        finally:
            is_over.set()
        for future in futures:
            future.result(PATIENCE_S)
    lz.synchronize(PATIENCE_S)
    print(f"{ended[0]} calls, {kills} kills")
    assert kills


def test_threads_that_find_a_way_broken_take_one_step_together(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would otherwise give up the next way, which works."""
    site = new_site("one")
    site.connect()
    monkeypatch.setattr(driver, "ipc_export", lambda base: bytes(64))

    def call(number: int) -> None:
        x, values = randn(50 + number)
        close(lz.silu(x), silu(values))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(call, number) for number in range(6)]:
            future.result(PATIENCE_S)
    x, _ = randn(50)
    lz.silu(x)
    assert any("memory crosses by vmm" in note for note in report().notes)


def test_a_failure_is_told_by_the_very_next_call(new_site: Callable[..., Site]) -> None:
    """By then its caller may have used the result."""
    site = new_site(backoff_s=600, backoff_max_s=600)
    site.connect()
    x, _ = randn(SLOW)
    slow(x, backend="one")
    finish()
    with held(site):
        slow(x, backend="one")
        os.kill(site.backend("one")["pid"], signal.SIGKILL)
    finish()
    lz.status()  # the broker's word on it is on the way by now
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed"):
        lz.silu(x)


def test_closing_a_session_does_not_wait_for_workers_to_end(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own hang-up is not the broker's death."""
    monkeypatch.setattr(device, "WORKERS_END_S", 2 * PATIENCE_S)
    x, values = randn(64)
    close(lz.silu(x), silu(values))
    start_s = time.monotonic()
    lz.disconnect()
    assert time.monotonic() - start_s < PATIENCE_S
