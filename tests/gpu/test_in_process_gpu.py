"""Backends of a GPU in the caller's own process, on a real one: the toy's torch kernels, run by this process' own
torch on its streams and in its graphs. tests/process/test_gpu_in_process.py has what needs no GPU.

All tests share a broker and a session, whose first test waits for a probe in this interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.backends.torch_toy import RAISE, TRAP, TRAPPED
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, ROOT, Site, in_threads, made_on, wait_until

import layerzero as lz

pytest.importorskip("torch")
from tests.gpu.test_calls import F, close, randn, report, torch

SLEEP_CYCLES = 1_000_000_000  # some 0.5 s


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(store: Path) -> Iterator[Site]:
    """Connected. "one" fits this process; "two" does not: here the toy is "one". An idle worker ends after a second."""
    isolation = "one=in_process;two=in_process;*=subprocess"
    made = gpu_site(store, "one", "two", isolation=isolation, rest_s=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LZ_TOY_NAME", "one")
        patch.setenv("LZ_TESTS", str(ROOT))
        try:
            made.start().connect()
            yield made
        finally:
            lz.disconnect()
            made.stop()


def here(call: Callable[[], Any]) -> Any:
    """Make the call until this process runs its kernel; the result of that."""

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize()
        return result

    return made_on("in_process", finished)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_calls_run_in_this_process(site: Site, dtype: str) -> None:
    """Tensors in, tensors out, equal to torch's own; no worker answers any."""
    kind = getattr(torch, dtype)
    q, k, v = (randn(2, 8, 256, 64, dtype=kind) for _ in "qkv")
    x, w, out = (
        randn(64, 1024, dtype=kind),
        randn(1024, 512, dtype=kind),
        torch.empty(64, 1024, device="cuda", dtype=kind),
    )
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "silu": (lambda: lz.silu(x), lambda: F.silu(x)),
        "silu into": (lambda: lz.silu(x, out=out), lambda: F.silu(x)),
        "silu of columns": (lambda: lz.silu(x[:, ::2]), lambda: F.silu(x[:, ::2])),
        "silu at an odd address": (lambda: lz.silu(x.flatten()[1:99]), lambda: F.silu(x.flatten()[1:99])),
        "matmul": (lambda: lz.matmul(x, w), lambda: x @ w),
        "layer_norm": (lambda: lz.layer_norm(x, (1024,)), lambda: F.layer_norm(x, (1024,))),
        "attention": (
            lambda: lz.attention(q, k, v, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    }
    for name, (ours, torchs) in calls.items():
        close(here(ours), torchs())
        answered = site.backend("one")["answered"]
        for _ in range(5):
            result = ours()
            told = report()
            assert (told.path, told.backend, told.worker_pid) == ("in_process", "one", os.getpid()), name
            assert told.copies == (), name
            assert (type(result), result.is_cuda, result.dtype) == (torch.Tensor, True, kind), name
            close(result, torchs())
        assert site.backend("one")["answered"] == answered, name
    assert lz.silu(x, out=out) is out
    assert f"of torch {torch.__version__} ran in this process, on its own stream" in report().notes[0]


def test_what_is_written_in_place_is_the_callers(site: Site) -> None:
    key, value = randn(3, 2, 16), randn(3, 2, 16)
    k_cache, v_cache = randn(4, 8, 2, 16), randn(4, 8, 2, 16)
    slots = torch.tensor([5, 31, 9], device="cuda")
    wanted = k_cache.flatten(0, 1).clone(), v_cache.flatten(0, 1).clone()
    for cache, rows in zip(wanted, (key, value), strict=True):
        cache[slots] = rows
    here(lambda: lz.append_kv(key, value, k_cache, v_cache, slots))
    assert torch.equal(k_cache.flatten(0, 1), wanted[0])
    assert torch.equal(v_cache.flatten(0, 1), wanted[1])


def test_order_on_a_side_stream_and_nobody_waits(site: Site) -> None:
    x = randn(512, 512)
    here(lambda: lz.silu(x))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
        x.fill_(1.0)  # a kernel's first launch loads it, which waits for those that run
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        here(lambda: lz.silu(x))
        torch.cuda._sleep(SLEEP_CYCLES)
        x.fill_(2.0)
        y = lz.silu(x)
        done = side.record_event()
        assert not done.query(), "the call returns before the GPU has come to it"
        x.fill_(-7.0)
        z = lz.silu(y) * 2
    assert report().path == "in_process"
    side.synchronize()
    two = F.silu(torch.full_like(x, 2.0))
    assert torch.equal(y, two)
    assert torch.equal(z, F.silu(two) * 2)


def test_order_on_the_default_stream(site: Site) -> None:
    """After what is enqueued before it, and before what is enqueued after it."""
    x = torch.zeros(48, 1024, device="cuda")
    here(lambda: lz.silu(x))
    torch.cuda._sleep(SLEEP_CYCLES)
    x.fill_(2.0)
    y = lz.silu(x)
    z = y + 1
    assert report().path == "in_process"
    close(z, F.silu(torch.full_like(x, 2.0)) + 1)


def test_threads_on_streams_of_their_own(site: Site) -> None:
    x, w = randn(256, 1024, dtype=torch.float16), randn(1024, 1024, dtype=torch.float16)
    here(lambda: lz.matmul(x, w))
    wanted = x @ w
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [lz.matmul(x, w) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        assert all(torch.equal(result, wanted) for result in results)
        assert report().path == "in_process"

    in_threads(3, work)


def test_graph_of_the_application_holds_its_kernels_as_nodes(site: Site) -> None:
    """After a call outside of it; without any worker, and whatever else the memory is used for later."""
    x, w = randn(66, 256), randn(256, 128)
    here(lambda: lz.silu(x))
    here(lambda: lz.matmul(x, w))
    pid = site.backend("one")["pid"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lz.matmul(lz.silu(x), w)
        path = report().path
    assert path == "in_process"
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)
    for seed in range(3):
        x.copy_(torch.full_like(x, seed))
        graph.replay()
        torch.cuda.synchronize()
        close(y, F.silu(x) @ w)
        gc.collect()
        for _ in range(8):  # as other calls' memory would
            lz.matmul(lz.silu(x + 1), w).fill_(float("nan"))
    new, other = randn(67, 256), torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        with pytest.raises(lz.CudaGraphUnsafe, match="outside of the capture"):
            lz.silu(new)
        doubled = new * 2
    other.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, new * 2), "the capture is whole"
    close(lz.silu(x), F.silu(x))


def test_what_the_application_says_of_torch_is_not_said_of_kernels(site: Site) -> None:
    """Autocast and gradients; afterwards they are as they were."""
    x, w = randn(128, 128), randn(128, 128)
    right = here(lambda: lz.matmul(x, w)).clone()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = lz.matmul(x, w)
        assert report().path == "in_process"
        assert torch.is_autocast_enabled()
    assert result.dtype == torch.float32
    assert torch.equal(result, right)
    assert torch.is_grad_enabled()
    assert not result.requires_grad


def test_kernel_that_raises_here_goes_to_a_worker(site: Site) -> None:
    """Its own calls for a while, and the report says why."""
    x = randn(40, 256)
    here(lambda: lz.layer_norm(x, (256,)))
    close(lz.layer_norm(x, (256,), eps=RAISE), F.layer_norm(x, (256,), eps=RAISE))
    told = report()
    assert told.path == "broker", told
    assert any("one does not run in this process for 5 s" in note for note in told.notes), told.notes
    assert "the toy raises" in str(told)
    close(lz.layer_norm(x, (256,)), F.layer_norm(x, (256,)))


def test_library_that_does_not_fit_stays_in_its_worker(site: Site) -> None:
    x = randn(41, 256)

    def why() -> str:
        close(lz.silu(x, backend="two"), F.silu(x))
        assert report().path != "in_process"
        return next((note for note in report().notes if "its probe says" in note), "")

    assert "two does not run in this process: its probe says: the descriptor lists" in wait_until(why)
    noted = {c.backend: c.notes for c in lz.explain("silu", x).candidates}
    assert any("does not run in this process" in note for note in noted["two"])
    assert not any("does not run in this process" in note for note in noted["one"])
    assert list(lz.session().refusals()) == ["two"]


def test_deadlines_need_a_worker(site: Site) -> None:
    x = randn(42, 256)
    here(lambda: lz.silu(x))
    close(lz.silu(x, timeout_s=PATIENCE_S), F.silu(x))
    assert report().path == "broker"


def test_broker_learns_the_gpus_times(site: Site) -> None:
    x = randn(2048, 2048)
    here(lambda: lz.silu(x))

    def measured() -> float | None:
        lz.silu(x)
        torch.cuda.synchronize()
        return {c.backend: c.measured_us for c in lz.explain("silu", x).candidates}["one"]

    us = wait_until(measured)
    assert us is not None
    assert 1.0 < us < 10_000.0


def test_worker_that_nobody_needs_is_ended(site: Site) -> None:
    x = randn(43, 256)
    here(lambda: lz.silu(x))

    def is_gone() -> bool:
        close(lz.silu(x), F.silu(x))
        return site.backend("one")["pid"] is None

    wait_until(is_gone)
    close(lz.silu(x), F.silu(x))
    assert (report().path, site.backend("one")["pid"]) == ("in_process", None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_gpu_than_the_current_one(site: Site) -> None:
    xs = [torch.randn(33, 65, device=f"cuda:{n}") for n in range(2)]
    for x in (*xs, *reversed(xs)):
        result = here(lambda x=x: lz.silu(x))
        assert result.device == x.device
        assert torch.equal(result, F.silu(x))
        assert torch.cuda.current_device() == 0


CLIENT = f"""
import json, os, sys, time, torch
os.environ.update(LZ_TOY_NAME="one", LZ_TESTS={str(ROOT)!r})
lz.connect(runtime_dir=sys.argv[1])
x = torch.zeros({TRAPPED}, device="cuda")
said, end_s = {{}}, time.monotonic() + {PATIENCE_S}
while time.monotonic() < end_s and said.get("path") != "in_process" and "FAULTED" not in str(said.get("notes")):
    lz.gelu(x)
    torch.cuda.synchronize()
    report = lz.last_report()
    said = {{"path": report.path, "notes": report.notes}}
x.fill_({10 * TRAP})
try:
    lz.gelu(x)
    lz.synchronize({PATIENCE_S})
    torch.cuda.synchronize()
except Exception as exc:
    said["error"] = type(exc).__name__
try:
    said["sum"] = float(torch.ones(8, device="cuda").sum())
except Exception as exc:
    said["lost"] = str(exc)
print(json.dumps(said, default=str), flush=True)
"""


def test_a_fault_costs_one_process_its_gpu_and_no_later_one(site: Site, store: Path) -> None:
    """The next is isolated again: there the same call ends its worker, and the client goes on."""
    said = []
    for _ in range(2):
        with site.python(CLIENT) as client:
            out, _ = client.communicate(timeout=4 * PATIENCE_S)
        said.append(json.loads(out.splitlines()[-1]))
    first, second = said
    assert first["path"] == "in_process", said
    assert "lost" in first, said
    assert second["path"] != "in_process", said
    assert "FAULTED" in str(second["notes"]), said
    assert (second.get("sum"), "lost" in second) == (8.0, False), said
