"""lz.plan of torch's CUDA tensors, on a real GPU and through a real broker: one CUDA graph, of kernels that this
process launches and of calls in slots of their worker. tests/process/test_gpu_plans.py has what needs no GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, Site, wait_until

import layerzero as lz

pytest.importorskip("torch")
from tests.gpu.test_calls import F, randn, torch

HERE = {"lifted", "in_process"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def new_site(store: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(isolation: str = "lifted", **settings: Any) -> Site:
        made.append(gpu_site(store, "one", isolation=isolation, **settings))
        made[-1].start()
        made[-1].connect()
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


@pytest.fixture(scope="module")
def shared(store: Path) -> Iterator[Site]:
    site = gpu_site(store, "one", isolation="lifted")
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def lifted(shared: Site) -> Iterator[Site]:
    shared.connect()
    yield shared
    lz.disconnect()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def replayed(plan: Any, *args: Any, paths: set[str] | None = None) -> Any:
    """Run until the graph is replayed, with calls that go by `paths`."""

    def is_there() -> bool:
        before = plan.counters()["replays"]
        for _ in range(20):
            plan(*args)
        torch.cuda.synchronize()
        assert plan.phase in ("WARM", "FROZEN"), plan.explain()
        told = plan.explain().graph
        is_so = told is not None and told.is_captured and (paths is None or set(told.calls) <= paths)
        return bool(is_so and plan.counters()["replays"] > before)

    wait_until(is_there)
    return plan


def block(x: Any, w: Any) -> Any:
    y = lz.silu(lz.matmul(lz.silu(x), w))
    return torch.softmax(y.float(), -1).to(x.dtype) + x


def plain(x: Any, w: Any) -> Any:
    y = F.silu(F.silu(x) @ w)
    return torch.softmax(y.float(), -1).to(x.dtype) + x


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_plan_of_lifted_kernels_is_one_graph(lifted: Site, dtype: str) -> None:
    dtype = getattr(torch, dtype)
    x, w = randn(32, 256, dtype=dtype), randn(256, 256, dtype=dtype) / 16
    plan = replayed(lz.plan(block), x, w, paths=HERE)
    print(plan.explain())
    told = plan.explain().graph
    assert told.calls == {"lifted": 3}
    assert told.nodes >= 5
    assert told.difference is not None
    assert plan.counters()["peak_bytes"] > 0
    kept = []
    for seed in range(30):
        torch.manual_seed(seed)
        other = randn(32, 256, dtype=dtype)
        kept.append((plan(other, w), other))
    for result, other in kept:
        close(result, plain(other, w))
    assert len({result.data_ptr() for result, _ in kept}) == 30


def test_weights_are_read_where_they_lie(lifted: Site) -> None:
    """Changed in place, the change is seen."""
    x, w = randn(8, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(lambda x: block(x, w)), x, paths=HERE)
    close(plan(x), plain(x, w))
    w.mul_(0.5)
    close(plan(x), plain(x, w))


def test_arguments_in_the_same_memory_are_not_copied(lifted: Site) -> None:
    x, w = randn(16, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block), x, w, paths=HERE)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        close(plan(x, w), plain(x, w))
    assert plan.explain().graph.is_direct
    assert plan.explain().copied_bytes == x.nbytes
    other = randn(16, 128)
    close(plan(other, w), plain(other, w))
    assert plan.explain().copied_bytes > x.nbytes


def test_calls_in_a_worker_are_in_the_graph_and_survive_it(new_site: Callable[..., Site]) -> None:
    site = new_site("subprocess")
    x, w = randn(24, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block), x, w)
    assert plan.explain().graph.calls == {"worker": 3}
    close(plan(x, w), plain(x, w))
    torch.cuda.synchronize()
    os.kill(site.backend("one")["pid"], signal.SIGKILL)
    for _ in range(3):
        close(plan(x, w), plain(x, w))


def test_new_kernels_behind_replays_do_not_hold_the_worker_up(new_site: Callable[..., Site]) -> None:
    """To load one, a library may wait for all streams of the worker; that of a call which the program made behind its
    replays waits for these, and they for the worker. It stood still until the broker ended it, after 30 s."""
    new_site("subprocess")
    x, w, small = randn(2048, 2048), randn(2048, 2048) / 45, randn(8, 64)
    plan = replayed(lz.plan(block), x, w, paths={"worker"})
    for _ in range(20):
        lz.silu(small)  # by ring, and not waited for
    torch.cuda.synchronize()
    worker = [row["pid"] for row in lz.status()["backends"]]
    news: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (lz.gelu, F.gelu, (randn(8, 72),)),
        (lambda a: lz.layer_norm(a, (80,)), lambda a: F.layer_norm(a, (80,)), (randn(8, 80),)),
        (lz.attention, F.scaled_dot_product_attention, tuple(randn(1, 2, 16, 64) for _ in "qkv")),
        (lz.matmul, torch.matmul, (randn(3, 7, 5), randn(3, 5, 9))),
        (lz.gelu, F.gelu, (randn(8, 72, dtype=torch.float16),)),
        (lambda a: lz.layer_norm(a, (80,)), lambda a: F.layer_norm(a, (80,)), (randn(8, 80, dtype=torch.float16),)),
    ]
    start_s = time.monotonic()
    for call, expected, tensors in news:
        for _ in range(200):
            got = plan(x, w)
        lz.silu(small)
        close(call(*tensors), expected(*tensors))
    close(got, plain(x, w))
    print(f"{6 * 200} replays and {len(news)} new kernels: {time.monotonic() - start_s:.1f} s")
    assert time.monotonic() - start_s < 25
    assert [row["pid"] for row in lz.status()["backends"]] == worker


def test_a_worker_that_dies_costs_lifted_plans_nothing(lifted: Site) -> None:
    x, w = randn(25, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block), x, w, paths=HERE)
    pid = lifted.backend("one")["pid"]
    if pid:
        os.kill(pid, signal.SIGKILL)
    for _ in range(50):
        close(plan(x, w), plain(x, w))


def test_policy_takes_leave_back_and_gives_it(new_site: Callable[..., Site], store: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("backend_isolation: lifted\n")
    site = gpu_site(store, "one", isolation="lifted", policy=policy)
    del site.environ["LAYERZERO_BACKEND_ISOLATION"]
    site.start()
    try:
        site.connect()
        x, w = randn(26, 128), randn(128, 128) / 11
        plan = replayed(lz.plan(block), x, w, paths=HERE)
        policy.write_text("backend_isolation: subprocess\n")

        def is_away() -> bool:
            close(plan(x, w), plain(x, w))
            told = plan.explain().graph
            return bool(told.is_captured and told.calls == {"worker": 3})

        wait_until(is_away)
        close(plan(x, w), plain(x, w))
    finally:
        lz.disconnect()
        site.stop()


def test_runs_on_several_streams_keep_their_order(lifted: Site) -> None:
    x, w = randn(27, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block), x, w, paths=HERE)
    streams, made = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for n in range(60):
        with torch.cuda.stream(streams[n % 3]):
            other = torch.full((27, 128), n / 60, device="cuda")
            made.append((plan(other, w), other))
    torch.cuda.synchronize()
    for result, other in made:
        close(result, plain(other, w))


def test_a_function_that_waits_for_the_gpu_runs_as_calls(lifted: Site) -> None:
    """File and line are named; by how it looks at numbers, or by what waits within torch."""

    def item(x: Any) -> Any:
        return lz.silu(x) * x.sum().item()

    def masked(x: Any) -> Any:
        y = lz.silu(x)
        return y[y > -1e9].sum()

    for function in (item, masked):
        plan = lz.plan(function)
        x = randn(28)
        for _ in range(5):
            close(plan(x), function(x))
        assert plan.phase == "CALLS", plan.explain()
        assert "test_gpu_plans.py:" in plan.explain().problem, plan.explain()


def test_arguments_that_it_writes_to_are_written(lifted: Site) -> None:
    def function(x: Any, total: Any) -> Any:
        total += lz.silu(x)
        return total * 2

    x, total = randn(29), torch.zeros(29, device="cuda")
    plan = lz.plan(function)
    run, end_s = 0, time.monotonic() + PATIENCE_S
    while plan.counters()["replays"] <= 20 and time.monotonic() < end_s:
        run += 1
        close(plan(x, total), 2 * F.silu(x) * run)
        close(total, F.silu(x) * run)
        if run == 100:  # what is added up is not to lose its digits
            run = 0
            total.zero_()
    assert plan.counters()["replays"] > 20, plan.explain()


def test_views_strides_and_results_that_share_memory(lifted: Site) -> None:
    def function(x: Any) -> Any:
        y = lz.silu(x.contiguous())
        return y, y[1:3], x, x.T, y.sum(0)

    base = randn(64, 30)
    x = base.T  # strides of its own
    plan = replayed(lz.plan(function), x)
    y, part, same, turned, total = plan(x)
    close(y, F.silu(x))
    assert part.data_ptr() == y.data_ptr() + y.stride(0) * y.element_size()
    assert same is x
    assert turned.data_ptr() == x.data_ptr()
    close(turned, x.T)
    close(total, F.silu(x).sum(0))


def test_in_a_graph_of_the_caller_its_calls_are_nodes(lifted: Site) -> None:
    x, w = randn(31, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block), x, w, paths=HERE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = plan(x, w)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    close(y, plain(x, w))


def test_gradients_are_refused_and_named(lifted: Site) -> None:
    weight = torch.nn.Parameter(randn(33, 33))
    plan = lz.plan(lambda x: F.linear(lz.silu(x), weight))
    x = randn(5, 33)
    with torch.enable_grad():
        for _ in range(3):
            assert plan(x).requires_grad
        assert "run it under torch.no_grad()" in plan.explain().problem
    close(replayed(plan, x)(x), F.linear(F.silu(x), weight))


def test_times_are_told_if_asked_for(lifted: Site) -> None:
    x, w = randn(34, 128), randn(128, 128) / 11
    plan = replayed(lz.plan(block, timed=True), x, w, paths=HERE)
    other = randn(34, 128)
    plan(other, w)
    torch.cuda.synchronize()
    assert plan.explain().graph.time_us > 0
    assert plan.timings()[0].how == "graph"
    print(plan.explain())
