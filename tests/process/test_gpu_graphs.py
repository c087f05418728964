"""Calls in the application's own CUDA graphs, from end to end over the GPU of threads: a replay runs the remote kernels
without a message, and outlives its worker."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
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
    new_site,
    randn,
    report,
    silu,
    soft,
)
from tests.process.harness import PATIENCE_S, Site, wait_ended, wait_until
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import SLOW

import layerzero as lz
from layerzero.client.facade import default_session

__all__ = ["broker", "connected", "new_site", "soft"]


def capture(work: Callable[[], Any]) -> tuple[soft_cupy.Graph, Any]:
    """The graph of some work, and what the work returned: arrays that each replay fills."""
    with soft_cupy.stream() as handle:
        stream = soft_cupy.current()
        assert stream.ptr == handle
        stream.begin_capture()
        try:
            result = work()
        finally:
            graph = stream.end_capture()
    return graph, result


def replay(graph: soft_cupy.Graph) -> None:
    """In the current stream, and wait for it, but not for ever."""
    graph.launch(soft_cupy.current())
    finish()


def chain(x: Any, weight: Any, count: int = 4, **options: Any) -> Any:
    for _ in range(count):
        x = lz.matmul(lz.silu(x, **options), weight, **options)
    return x


def expected_chain(x: np.ndarray, weight: np.ndarray, count: int = 4) -> np.ndarray:
    wide = x.astype(np.float64)
    for _ in range(count):
        wide = silu(wide) @ weight
    return wide


def fill(array: Any, values: np.ndarray) -> None:
    array[...] = values


def test_several_results_are_filled_by_each_replay(connected: Site) -> None:
    made = [randn(1, 2, 3, 8) for _ in "qkv"]
    (q, values), *_ = made
    lz.attention_forward(*(x for x, _ in made))
    graph, (out, lse) = capture(lambda: lz.attention_forward(*(x for x, _ in made)))
    for step in range(4):
        inputs = values * (step + 1) / 4
        fill(q, inputs)
        replay(graph)
        for found, expected in zip((out, lse), attention_forward(inputs, *(y for _, y in made[1:])), strict=True):
            np.testing.assert_allclose(found.get(), expected, rtol=1e-3, atol=1e-4)


def test_replays_run_the_remote_kernels(connected: Site) -> None:
    """On whatever the inputs hold by then; the graph is captured once."""
    (x, values), (weight, weights) = randn(16, 16), randn(16, 16)
    chain(x, weight)
    graph, result = capture(lambda: chain(x, weight))
    for step in range(20):
        inputs = values * (step + 1) / 10
        fill(x, inputs)
        replay(graph)
        np.testing.assert_allclose(result.get(), expected_chain(inputs, weights), rtol=1e-3, atol=1e-4)
    told = report()
    assert (told.backend, told.copies) == ("one", ())


def test_nothing_runs_before_the_replay(connected: Site) -> None:
    """The memory of a result may be somebody else's until then."""
    x, values = randn(64)
    out = soft_cupy.empty(64)
    lz.silu(x, out=out)
    out.fill(7)
    graph, _ = capture(lambda: lz.silu(x, out=out))
    lz.synchronize(PATIENCE_S)
    assert (out.get() == 7).all()
    replay(graph)
    close(out, silu(values))


def test_graphs_of_several_streams_run_side_by_side(connected: Site) -> None:
    """Each waits for its own graph slots."""
    made = []
    for size in (8, 24, 40):
        x, values = randn(size)
        lz.silu(x)
        made.append((capture(lambda x=x: lz.silu(lz.silu(x))), values))
    for _ in range(10):
        for (graph, _), _ in made:
            with soft_cupy.stream():
                graph.launch(soft_cupy.current())
        driver.synchronize()
    for (_, result), values in made:
        close(result, silu(silu(values)))


def test_eager_calls_and_replays_mix(connected: Site) -> None:
    """In one stream, in its order."""
    x, values = randn(32)
    lz.silu(x)
    graph, inner = capture(lambda: lz.silu(x))
    for _ in range(10):
        replayed = lz.silu(x)
        graph.launch(soft_cupy.current())
        after = lz.silu(inner)
    close(replayed, silu(values))
    close(after, silu(silu(values)))


def test_a_call_that_was_never_made_is_refused_and_the_capture_stays_whole(connected: Site) -> None:
    """No kernel is known to serve it; what else was captured goes on."""
    x, _ = randn(18)
    y, _ = randn(19)
    lz.silu(y)

    def work() -> Any:
        with pytest.raises(lz.CudaGraphUnsafe, match=r"silu: the stream is being captured.*make it once outside"):
            lz.silu(x)
        return lz.silu(y)

    graph, result = capture(work)
    replay(graph)
    assert result.shape == (19,)


def test_a_kernel_that_no_graph_can_hold_is_refused(connected: Site) -> None:
    """Its error says why."""
    x, values = randn(6, 16)
    lz.layer_norm(x, (16,))

    lz.silu(x)

    def work() -> Any:
        with pytest.raises(lz.CudaGraphUnsafe, match=r"cannot run within a .*graph"):
            lz.layer_norm(x, (16,))
        return lz.silu(x)

    graph, result = capture(work)
    replay(graph)
    close(result, silu(values))


def test_a_replay_survives_its_worker(new_site: Callable[..., Site]) -> None:
    """Killed between two replays and in the middle of one: another kernel takes the graph slots over."""
    site = new_site()
    site.connect()
    (x, values), (weight, weights) = randn(16, 16), randn(16, 16)
    s, _ = randn(SLOW)
    for _ in range(2):
        chain(x, weight)
        lz.gelu(s, approximate="tanh")

    def work() -> Any:
        lz.gelu(s, approximate="tanh")
        return chain(x, weight)

    graph, result = capture(work)
    for step in range(6):
        inputs = values * (step + 1) / 10
        fill(x, inputs)
        graph.launch(soft_cupy.current())
        victim = site.backend("one" if step % 2 else "two")
        if victim["state"] == "ready":
            os.kill(victim["pid"], signal.SIGKILL)
        finish()
        np.testing.assert_allclose(result.get(), expected_chain(inputs, weights), rtol=1e-3, atol=1e-4)
    lz.synchronize(PATIENCE_S)


def test_calls_in_a_row_ring_once(connected: Site) -> None:
    """Who answers one goes on with the next, so that a replay waits for a worker's CPU once. Anything in between ends
    the row."""
    x, _ = randn(24)
    lz.silu(x)
    made: list[Any] = []

    def add(x: Any) -> Any:
        result = lz.silu(x)
        made.append(default_session.session().last_record)
        return result

    def work() -> Any:
        first = add(add(add(x)))
        first.fill(0.5)  # a node of the application
        return add(first)

    graph, result = capture(work)
    page, graph_slots = made[0].gpu.order.page, [one.graph_slot for one in made]
    assert [page.next_graph_slot(graph_slot) for graph_slot in graph_slots] == [
        graph_slots[1],
        graph_slots[2],
        None,
        None,
    ]
    for _ in range(3):
        replay(graph)
        close(result, silu(np.full(24, 0.5)))


@pytest.mark.parametrize("seed", range(2))
def test_a_row_over_two_workers_survives_either(new_site: Callable[..., Site], seed: int) -> None:
    """Killed at any moment of a replay, the next one goes on where it ended."""
    site = new_site()
    site.connect()
    (x, values), (weight, weights) = randn(16, 16), randn(16, 16)
    moments = random.Random(seed)

    def row() -> Any:
        y = x
        for _ in range(4):
            with lz.prefer("one"):
                y = lz.silu(y)
            with lz.prefer("two"):
                y = lz.matmul(y, weight)
        return y

    for _ in range(2):
        row()
    graph, result = capture(row)
    pids = dict.fromkeys(("one", "two"), 0)  # of those that were killed

    def are_back() -> bool:
        return all((b := site.backend(name))["state"] == "ready" and b["pid"] != pids[name] for name in pids)

    for step in range(5):
        inputs = values * (step + 1) / 10
        fill(x, inputs)
        wait_until(are_back)
        name = moments.choice([*pids])
        pids[name] = site.backend(name)["pid"]
        graph.launch(soft_cupy.current())
        end_s = time.perf_counter() + moments.uniform(0, 0.004)
        while time.perf_counter() < end_s:
            pass
        os.kill(pids[name], signal.SIGKILL)
        finish()
        np.testing.assert_allclose(result.get(), expected_chain(inputs, weights), rtol=1e-3, atol=1e-4)
    lz.synchronize(PATIENCE_S)


def test_a_graph_slot_that_nobody_answers_is_an_error_later_and_no_stream_hangs(new_site: Callable[..., Site]) -> None:
    """The replay goes on without a result; the next call says so."""
    site = new_site("one", backoff_s=600, backoff_max_s=600)
    site.connect()
    x, _ = randn(20)
    lz.silu(x)
    graph, _ = capture(lambda: lz.silu(x))
    replay(graph)
    pid = site.backend("one")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    replay(graph)
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, silu, failed"):
        lz.synchronize(PATIENCE_S)


def test_a_broker_that_dies_hangs_no_replay(new_site: Callable[..., Site]) -> None:
    """Its workers die with it; the next call says that it is lost."""
    site = new_site("one")
    session = site.connect()
    x, _ = randn(20)
    lz.silu(x)
    graph, _ = capture(lambda: lz.silu(x))
    replay(graph)
    os.kill(session.broker_pid, signal.SIGKILL)
    wait_ended(session.broker_pid)
    replay(graph)
    replay(graph)

    def call() -> None:
        lz.silu(x)  # returns when the death is not known yet
        lz.synchronize(PATIENCE_S)

    with pytest.raises(lz.BrokerLost):
        call()


def test_graph_slots_of_graphs_that_are_gone_are_used_again(connected: Site) -> None:
    """An application that captures anew for each shape never runs out of them."""
    x, _ = randn(20)
    lz.silu(x)
    used = set()
    for _ in range(30):
        graph, _ = capture(lambda: lz.silu(x))
        replay(graph)
        record = default_session.session().last_record
        used.add(record.graph_slot)  # type: ignore[union-attr]
        del graph, record
        gc.collect()
    assert len(used) < 5


def test_an_interrupted_capture_keeps_its_memory_until_the_broker_has_the_call(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That memory is gone the broker hears by another socket: before the call, it would take the client for a liar."""
    session = lz.session()
    x, values = randn(22)

    def interrupted() -> list[weakref.ref[Any]]:
        mine, out = soft_cupy.asarray(values), soft_cupy.empty(22)
        lz.silu(mine, out=out)

        def work() -> None:
            mine.scale(1)  # a node of the application
            os.kill(session.broker_pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(session.link, "wait", lambda _: signal.raise_signal(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    lz.silu(mine, out=out)

        capture(work)
        return [weakref.ref(array.data.block) for array in (mine, out)]

    try:
        kept = interrupted()
        gc.collect()
        assert all(one() is not None for one in kept)
    finally:
        os.kill(session.broker_pid, signal.SIGCONT)
    wait_until(lambda: lz.status() and not any(one() for one in kept))
    assert not session.link._pending
    close(lz.silu(x), silu(values))


def test_a_graph_that_outlives_its_session_does_not_hang(new_site: Callable[..., Site], capfd: Any) -> None:
    """Its results are undefined then, and stderr says so: once its worker knows that the session is over."""
    site = new_site("one")
    site.connect()
    x, _ = randn(20)
    lz.silu(x)
    graph, _ = capture(lambda: lz.silu(x))
    replay(graph)
    lz.disconnect()

    def is_told() -> bool:
        replay(graph)
        return "a session that was closed" in capfd.readouterr().err

    wait_until(is_told)


def test_a_session_is_closed_as_its_last_graph_goes(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that attends to its graphs may be through with them before it is rung for the last time."""
    x, _ = randn(26)
    lz.silu(x)
    graph, _ = capture(lambda: lz.silu(x))
    replay(graph)
    watcher = lz.session().gpus.gpu(0)._watcher
    ring = os.eventfd_write

    def ring_late(fd: int, value: int) -> None:
        nonlocal graph
        graph = None  # type: ignore[assignment]
        gc.collect()
        watcher.join(0.5)
        ring(fd, value)

    monkeypatch.setattr(os, "eventfd_write", ring_late)
    lz.disconnect()
    watcher.join(PATIENCE_S)
    assert not watcher.is_alive()


def test_a_client_that_dies_in_a_replay_leaves_its_worker_well(connected: Site) -> None:
    """Its graph slots are muted; others are served."""
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.soft_gpu import soft_cupy\n"
        "soft_cupy.install()\n"
        "import numpy as np, layerzero as lz\n"
        "lz.connect()\n"
        "x = soft_cupy.asarray(np.ones(4099, np.float32))\n"
        "lz.gelu(x, approximate='tanh')\n"
        "with soft_cupy.stream():\n"
        "    stream = soft_cupy.current(); stream.begin_capture()\n"
        "    y = lz.gelu(x, approximate='tanh'); graph = stream.end_capture()\n"
        "    graph.launch(stream)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)],
        env={**os.environ, **connected.environ},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = connected.backend("one")["pid"]
    x, values = randn(33)
    close(lz.silu(x), silu(values))
    assert connected.backend("one")["pid"] == pid
