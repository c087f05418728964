"""lz.plan on a GPU, from end to end over the GPU of threads: one CUDA graph, of kernels that this process launches and
of calls in slots of their workers. What the broker would say of lifting is said by the test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import broker, close, connected, finish, new_site, randn, silu, soft
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.test_counters import counts, grown
from tests.process.test_gpu_lifted import Lifting, kernels
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_graphs import SoftGraphs

import layerzero as lz
from layerzero.client.plans import graph_plan
from layerzero.client.plans.graph_library import LIBRARIES

__all__ = ["broker", "connected", "kernels", "new_site", "soft"]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> SoftGraphs:
    made = SoftGraphs()
    monkeypatch.setitem(LIBRARIES, "cupy", made)  # type: ignore[arg-type]
    monkeypatch.setattr(graph_plan, "WAIT_S", 0.0)  # nothing more is lifted by waiting
    monkeypatch.setattr(graph_plan, "WAIT_RUNS", 16)
    return made


@pytest.fixture
def lifting(connected: Site, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lifting]:
    lz.disconnect()  # what it has asked so far was answered by the broker
    yield Lifting(connected.connect(), monkeypatch)
    finish()  # a graph of the driver's goes when its replays are over; one of the tests', at once


def captured(plan: lz.ExecutionPlan, *args: Any) -> lz.ExecutionPlan:
    """Run until its last run was a replay."""

    def is_there() -> bool:
        before = plan.counters()["replays"]
        plan(*args)
        assert plan.phase in ("WARM", "FROZEN"), plan.explain()
        return bool(plan.counters()["replays"] > before)

    wait_until(is_there)
    return plan


def twice(x: Any) -> Any:
    y = lz.silu(x) + x
    return lz.silu(y * 2.0)


def expected(x: np.ndarray) -> np.ndarray:
    return silu((silu(x) + x) * 2.0)


def test_a_plan_of_lifted_kernels_is_one_graph(lifting: Lifting, graphs: SoftGraphs) -> None:
    """Own code is part of it; results are new at each run, arguments in other memory are copied."""
    plan = captured(lz.plan(twice), randn(40)[0])
    told = plan.explain()
    assert told.graph.calls == {"lifted": 2}
    assert told.graph.nodes == 4
    assert told.graph.difference == 0.0
    assert "in one CUDA graph of 4 nodes: 2 lifted" in str(told)
    assert plan.counters()["peak_bytes"] == graphs.made[-1].nbytes + 160
    kept = []
    for seed in range(20):
        values = np.random.default_rng(seed).standard_normal(40, dtype=np.float32)
        kept.append((plan(soft_cupy.asarray(values)), values))
    for result, values in kept:
        close(result, expected(values))
    assert len({result.data.ptr for result, _ in kept}) == 20
    assert plan.counters()["misses"].keys() <= {"recorded", "its calls are not settled"}


def test_arguments_in_the_same_memory_are_not_copied(lifting: Lifting, graphs: SoftGraphs) -> None:
    """A second graph works on them; others go by copies as before."""
    x, _ = randn(41)
    plan = captured(lz.plan(twice), x)
    for factor in range(1, 30):
        x.fill(factor / 8)
        close(plan(x), expected(np.full(41, factor / 8)))
    assert plan.explain().graph.is_direct
    assert plan.explain().copied_bytes == 41 * 4, "the result"
    assert len(graphs.made) == 2
    other, values = randn(41)
    close(plan(other), expected(values))
    assert plan.explain().copied_bytes == 2 * 41 * 4


def test_calls_that_are_not_lifted_are_in_slots_of_their_worker(lifting: Lifting) -> None:
    """explain() has which ones, and why."""
    (x, values), (w, weights) = randn(16, 16), randn(16, 16)
    plan = captured(lz.plan(lambda x: lz.silu(lz.matmul(lz.silu(x), w))), x)
    told = plan.explain()
    assert told.graph.calls == {"lifted": 2, "worker": 1}
    assert "NOT_DETERMINISTIC: two runs differ" in str(told)
    for factor in (1.0, 0.5, 0.25):
        result = plan(soft_cupy.asarray(values * np.float32(factor)))
        np.testing.assert_allclose(result.get(), silu(silu(values * factor) @ weights), rtol=1e-3, atol=1e-4)


def test_a_plan_in_slots_survives_its_worker(new_site: Callable[..., Site]) -> None:
    site = new_site()
    site.connect()
    (x, values), (w, weights) = randn(16, 16), randn(16, 16)
    plan = captured(lz.plan(lambda x: lz.matmul(lz.silu(x), w)), x)
    for name in ("one", "two", "one"):
        wait_until(lambda: site.backend(name)["state"] == "ready" or name == "two")  # noqa: B023
        pid = site.backend(name)["pid"]
        if pid:
            os.kill(pid, signal.SIGKILL)
        result = plan(soft_cupy.asarray(values))
        finish()
        np.testing.assert_allclose(result.get(), silu(values) @ weights, rtol=1e-3, atol=1e-4)
    lz.synchronize(PATIENCE_S)


def test_without_leave_it_goes_by_calls_and_with_leave_it_goes_on(lifting: Lifting, graphs: SoftGraphs) -> None:
    """The graph that there is serves the same kernels again."""
    x, values = randn(42)
    plan = captured(lz.plan(twice), x)
    count = len(graphs.made)
    lifting.page.bump_lift_epoch()
    close(plan(x), expected(values))
    assert plan.counters()["misses"]["the leave to launch kernels in this process has ended"] >= 1
    captured(plan, x)
    assert len(graphs.made) == count


def test_a_kernel_that_is_taken_away_is_not_replayed(lifting: Lifting, graphs: SoftGraphs) -> None:
    """The calls go to the worker, and their slots into a new graph."""
    x, values = randn(43)
    plan = captured(lz.plan(twice), x)
    before = graphs.made[-1]
    lifting.answer = {"state": "refused", "reason": "FAULTED", "detail": "it struck"}
    lifting.page.bump_lift_epoch()
    replays = before.replays
    captured(plan, x)
    close(plan(x), expected(values))
    assert before.replays == replays
    assert plan.explain().graph.calls == {"worker": 2}
    wait_until(lambda: "FAULTED: it struck" in str((plan(x), plan.explain())[1]))


def test_arguments_that_it_writes_to_are_written(lifting: Lifting) -> None:
    def function(x: Any, total: Any) -> Any:
        y = lz.silu(x)
        total += y
        return y

    (x, values), total = randn(44), soft_cupy.asarray(np.zeros(44, np.float32))
    plan = lz.plan(function)
    for run in range(1, 40):
        close(plan(x, total), silu(values))
        np.testing.assert_allclose(total.get(), run * silu(values), rtol=1e-4, atol=1e-4)
    assert plan.counters()["replays"] > 0


def test_a_function_that_returns_its_arguments_returns_the_callers(lifting: Lifting) -> None:
    plan = captured(lz.plan(lambda x: (x, x[2:5], lz.silu(x))), randn(45)[0])
    x, values = randn(45)
    same, part, y = plan(x)
    assert same is x
    assert part.data.ptr == x.data.ptr + 8
    close(part, values[2:5])
    close(y, silu(values))


def test_runs_on_several_streams_keep_their_order(lifting: Lifting) -> None:
    """They share the plan's memory."""
    plan = captured(lz.plan(twice), randn(46)[0])
    made = []
    streams = [soft_cupy.stream() for _ in range(3)]
    for seed in range(30):
        values = np.random.default_rng(seed).standard_normal(46, dtype=np.float32)
        with streams[seed % 3] if seed < 3 else soft_cupy.stream():
            made.append((plan(soft_cupy.asarray(values)), values))
    soft_cupy.driver.synchronize()
    for result, values in made:
        close(result, expected(values))


def test_a_function_that_looks_at_numbers_runs_as_calls(connected: Site) -> None:
    def function(x: Any) -> Any:
        return lz.silu(x) if x.get()[0] > 100 else lz.silu(lz.silu(x))

    x, values = randn(47)
    plan = lz.plan(function)
    for _ in range(4):
        close(plan(x), silu(silu(values)))
    assert plan.phase == "CALLS"
    assert "test_gpu_plans.py" in plan.explain().problem


def test_arrays_on_two_devices_are_no_plan(connected: Site) -> None:
    plan = lz.plan(lambda x, y: (lz.silu(x), lz.silu(y) if x is None else y + 1))
    x, values = randn(48)
    for _ in range(3):
        close(plan(x, np.ones(3, np.float32))[0], silu(values))
    assert plan.phase == "CALLS"
    assert "works on two devices" in plan.explain().problem


def test_a_kernel_that_no_graph_can_hold_is_named(connected: Site) -> None:
    x, _ = randn(6, 16)
    plan = lz.plan(lambda x: lz.layer_norm(lz.silu(x), (16,)))

    def is_settled() -> bool:
        plan(x)
        return plan.phase == "CALLS"

    wait_until(is_settled)
    assert "layer_norm: no CUDA graph can hold it" in plan.explain().problem
    plan(x)


def test_a_new_connection_captures_anew(new_site: Callable[..., Site], graphs: SoftGraphs) -> None:
    site = new_site("one")
    site.connect()
    x, values = randn(49)
    plan = captured(lz.plan(twice), x)
    lz.disconnect()
    site.connect()
    close(plan(x), expected(values))
    captured(plan, x)
    close(plan(x), expected(values))
    assert len(graphs.made) >= 2


def test_steps_can_be_looked_at_one_by_one(lifting: Lifting) -> None:
    x, values = randn(50)
    plan = captured(lz.plan(twice), x)
    names = [(step.name, [array.shape for array in made]) for step, made in plan.debug(x)]
    assert [name for name, _ in names] == ["silu", "add", "mul", "silu"]
    assert [timing.how for timing in plan.timings()] == ["graph", "lifted", "here", "here", "lifted"]
    assert "one CUDA graph" in plan.show()
    assert plan.verify(x) == 0.0
    gc.collect()
    close(plan(x), expected(values))


def test_the_steps_of_a_replay_count_as_calls(lifting: Lifting) -> None:
    """Of each kernel, though one launch is all that is made."""
    x, _ = randn(8, 16)
    plan = captured(lz.plan(twice), x)
    before, replays = counts(), plan.counters()["replays"]
    for _ in range(10):
        plan(x)
    made = plan.counters()["replays"] - replays
    assert made > 0
    assert sum(n for (*_, path), n in grown(before, counts()).items() if path == "graph") == 2 * made
