"""What decides about kernels, for CUDA tensors on a real GPU: times by its clock, copies in its order, its own name in
tables. tests/process/test_gpu_decisions.py has the rest, on the GPU of threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import PATIENCE_S, Site, wait_until

import layerzero as lz
from layerzero.broker.selection import dispatch_table
from layerzero.client.gpu.memory import uuid_of
from layerzero.client.tools.inputs import random_inputs
from layerzero.ipc.vocabulary.tensors import TensorSpec

pytest.importorskip("torch")
from tests.gpu.test_calls import F, broker, busy, close, connected, new_site, randn, report, store, torch

__all__ = ["broker", "connected", "new_site", "store"]

SIZE = 4096  # a matmul of float16 that takes a GPU long enough to be told from its launch


def torch_us(a: Any, b: Any) -> float:
    """The median time of torch's own matmul, by events."""
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def test_tuning_measures_what_the_gpu_takes(connected: Site) -> None:
    """The backends run torch's matmul: its time is known. A CPU takes a thousand times as long, an enqueue next to
    nothing."""
    a, b = (randn(SIZE, SIZE, dtype=torch.float16) for _ in "ab")
    expected_us = torch_us(a, b)
    [call] = lz.tune("matmul", a, b, budget_s=20).calls
    assert call.label.endswith(f"on cuda:{a.get_device()}")
    assert {kernel.kernel_id for kernel in call.kernels} == {"one.matmul", "two.matmul"}
    for kernel in call.kernels:
        assert kernel.kernel is not None
        assert kernel.call is not None
        assert 0.5 * expected_us < kernel.kernel.median_us < 3 * expected_us
        assert kernel.call.median_us > kernel.kernel.median_us


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64", "bool"])
def test_invented_arrays_hold_what_torch_reads_there(connected: Site, dtype: str) -> None:
    """Seeded numbers, with the strides that were asked for, in memory of ours; results agree with torch's on them."""
    spec = TensorSpec(dtype, (5, 7), (16, 2))
    made = random_inputs("matmul", {"a": spec}, seed=0, device=torch.cuda.current_device())["a"]
    flat = torch.frombuffer(bytearray(made.load()), dtype=getattr(torch, dtype))
    host = torch.as_strided(flat, spec.shape, spec.strides)
    if dtype == "float32":
        same = random_inputs("matmul", {"a": spec}, seed=0)["a"]
        assert torch.equal(host, torch.from_numpy(same.copy()))
    if dtype in ("float32", "float16", "bfloat16"):
        result = lz.silu(made)
        found = torch.frombuffer(bytearray(result.load()), dtype=host.dtype).reshape(spec.shape)
        torch.testing.assert_close(found.double(), F.silu(host.double()), rtol=2e-2, atol=2e-2)


def test_devices_go_by_torchs_names_and_by_uuid(connected: Site) -> None:
    """The same GPU is meant as by torch, whatever the driver's order and CUDA_VISIBLE_DEVICES."""
    spec = TensorSpec.contiguous("float32", (8, 8))
    for ordinal in range(torch.cuda.device_count()):
        tensor = torch.zeros(8, 8, device=f"cuda:{ordinal}")
        for name in (f"cuda:{ordinal}", uuid_of(ordinal)):
            assert lz.Call.of("silu", spec, device=name) == lz.Call.of("silu", tensor)
        assert lz.explain("silu", spec, device=f"cuda:{ordinal}").kernel_id == lz.explain("silu", tensor).kernel_id
    with pytest.raises(lz.InvalidArgument, match="is not there; pass cpu or one of cuda:0"):
        lz.Call.of("silu", spec, device=f"cuda:{torch.cuda.device_count()}")


def test_plans_are_of_the_gpu_and_their_zeros_lie_there(connected: Site) -> None:
    """A function that looks at its results meets tensors of the GPU that hold zeros."""
    x, seen = randn(64, 64), []

    def function(x: Any) -> Any:
        seen.append(lz.silu(lz.matmul(x, x)))
        return seen[-1]

    plan = lz.dry_run(function, x)
    assert [call.kernel_id for call in plan.calls] == ["one.matmul", "one.silu"]
    assert (seen[0].device, float(seen[0].abs().max())) == (x.device, 0.0)
    fast = lz.compile(function)
    fast.bake(x)
    torch.testing.assert_close(fast(x), F.silu(x.double() @ x.double()).float(), rtol=1e-4, atol=1e-4)
    assert fast.report().planned_calls == 2


def test_a_table_names_the_gpu_and_rules_there(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """With plan_mode: what was measured is served, and nothing else of that GPU."""
    site, path = new_site(), tmp_path / "table.json"
    site.environ |= {"LAYERZERO_DISPATCH_TABLE": str(path), "LAYERZERO_PLAN_MODE": "true"}
    site.connect()
    x = randn(256, 256)
    assert lz.solve("silu", x, path=path, budget_s=5).in_force
    table = dispatch_table.parse(path.read_text(), "t")
    major, minor = torch.cuda.get_device_capability(x.device)
    name = f"cuda {torch.cuda.get_device_name(x.device)} sm_{10 * major + minor}"
    assert list(table.groups) == [name]
    assert table.header.hardware[name].driver
    assert "table" in lz.explain("silu", x).candidates[0].terms
    close(lz.silu(x), F.silu(x.double()).float())
    with pytest.raises(lz.NoBackend, match="PLAN_BUCKET_MISS"):
        lz.silu(randn(10, 100_000))


def test_gpu_backends_are_ready(connected: Site) -> None:
    """The gate of a deployment."""
    result = lz.readiness_check(backends=["one", "two"])
    assert result.ok, str(result)
    assert sum(f"on cuda:0 ({uuid_of(0)})" in check.detail for check in result.checks) == 2


def test_sampled_calls_are_compared_in_the_streams_order_and_not_waited_for(connected: Site) -> None:
    """The caller's stream is busy for 0.2 s, its arrays change right after the call, and it returns at once."""
    session = lz.session()
    x = randn(1 << 16)
    lz.silu(x, backend="one")
    lz.silu(x, backend="two")
    torch.cuda.synchronize()
    session.shadow.references = ("two",)
    session.shadow.rate = 1.0
    try:
        lz.silu(x)  # the first one after the rate was set is not sampled
        torch.cuda.synchronize()
        before = session.shadow.counts["compared"]
        lz.silu(x)
        wait_until(lambda: session.shadow.counts["compared"] == before + 1, PATIENCE_S)  # the thread has its stream
        busy()
        start_s = time.perf_counter()
        result = lz.silu(x)
        took_s = time.perf_counter() - start_s
        expected = F.silu(x.double()).float()
        x.fill_(float("nan"))
        assert took_s < 0.1
        assert [copy.arg for copy in report().copies] == ["x", "out"]
        close(result, expected)
        result.fill_(7)
        wait_until(lambda: session.shadow.counts["compared"] == before + 2, PATIENCE_S)
        assert not session.shadow.counts["beyond"]
        assert not session.shadow.counts["failed"], session.shadow.last_error
    finally:
        session.shadow.rate = None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_two_gpus_are_refused_by_tools(connected: Site) -> None:
    """As by the call itself."""
    x, y = (torch.zeros(8, 8, device=f"cuda:{ordinal}") for ordinal in range(2))
    for tool in (lz.tune, lz.warmup, lz.solve, lz.explain, lz.Call.of):
        with pytest.raises(lz.InvalidArgument, match="a is on cuda:0, b on cuda:1; move all arrays to one device"):
            tool("matmul", x, y)
