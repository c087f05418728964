"""Calls on CUDA tensors through a broker: right in the caller's stream, not waited for, and each with an end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.backends.torch_toy import ASSERT, ILLEGAL, MEMORY, RAISE, SLOW
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, Site, is_running, wait_ended, wait_until

import layerzero as lz
from layerzero.client.gpu.device import REQUIRED

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no NVIDIA GPU", allow_module_level=True)
F = torch.nn.functional
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def broker(store: Path) -> Iterator[Site]:
    """Backends "one", the first choice, and "two"."""
    site = gpu_site(store, "one", "two")
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def connected(broker: Site) -> Iterator[Site]:
    session = broker.connect()
    for name in ("one", "two"):
        session.ask("reset", backend=name)
    wait_until(lambda: all(broker.backend(name)["state"] in ("absent", "ready") for name in ("one", "two")))
    yield broker
    lz.disconnect()


@pytest.fixture
def new_site(store: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*names: str, **settings: Any) -> Site:
        made.append(gpu_site(store, *(names or ("one", "two")), **settings))
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def report() -> lz.SelectionReport:
    found = lz.last_report()
    assert found is not None
    return found


def close(result: Any, expected: Any) -> None:
    rtol, atol = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.double(), expected.double(), rtol=rtol, atol=atol)


def busy(cycles: int = 400_000_000) -> None:
    """Keep the current stream busy for some 0.2 s."""
    torch.cuda._sleep(cycles)


# --- the normal case


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_results_are_torchs(connected: Site, dtype: Any) -> None:
    """Against float64, for contiguous, strided, offset, empty and scalar-shaped inputs."""
    base = randn(64, 96, dtype=dtype)
    for x in (base, base.t(), base[3:17, ::2], base[5], base[0, 0], base[:0], base[7:, 5:40].t()):
        result = lz.silu(x)
        assert (result.dtype, result.device, result.shape) == (x.dtype, x.device, x.shape)
        close(result, F.silu(x.double()))
    a, b = randn(5, 32, 48, dtype=dtype) / 4, randn(48, 16, dtype=dtype)
    close(lz.matmul(a, b), a.double() @ b.double())
    q, k, v = (randn(2, 4, 33, 64, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    close(lz.attention(q, k, v, is_causal=True), expected)


def test_nothing_is_copied_and_the_report_says_how_memory_crosses(connected: Site) -> None:
    """The caching allocator's blocks are mapped by the worker as they lie."""
    x, out = randn(1 << 20), randn(1 << 20)
    assert lz.silu(x, out=out) is out
    assert (report().copied_bytes, report().backend, report().kernel_id) == (0, "one", "one.silu")
    assert any("memory crosses by ipc" in note for note in report().notes)
    close(out, F.silu(x.double()))
    lz.silu(x, out=x)
    assert [copy.arg for copy in report().copies] == ["out"]
    close(x, out)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float8_e4m3fn], ids=str)
def test_caches_are_written_as_they_lie(connected: Site, dtype: Any, slot_dtype: Any) -> None:
    """Nothing of a cache is copied, what is not named keeps its bits, and calls that follow each other keep order.
    Caches of their own, and keys and values side by side in one tensor; padding, and slots that are not there."""
    both = randn(6, 2, 16, 4, 64).to(dtype)
    for caches in ((randn(6, 16, 4, 64).to(dtype), randn(6, 16, 4, 32).to(dtype)), (both[:, 0], both[:, 1])):
        held = [cache.cpu() for cache in caches]
        for step in range(24):
            slots = [step, -1, 95 - step, 96, -(2**31)]
            key, value = (randn(len(slots), 4, cache.shape[3]).to(dtype) for cache in caches)
            lz.append_kv(key, value, *caches, torch.tensor(slots, dtype=slot_dtype, device="cuda"))
            for cache, row in zip(held, (key, value), strict=True):
                for token in (0, 2):
                    cache[slots[token] // 16, slots[token] % 16] = row[token].cpu()
        assert report().copied_bytes == 0
        for cache, want in zip(caches, held, strict=True):
            assert torch.equal(cache.cpu().float(), want.float())


def test_a_worker_that_dies_with_appends_enqueued_is_followed_by_one_that_runs_them_again(connected: Site) -> None:
    """They may have been carried out already: the same values go to the same slots."""
    caches = (randn(4, 16, 2, 64), randn(4, 16, 2, 64))
    held = [cache.cpu() for cache in caches]
    pid = None
    for step in range(40):
        rows = (randn(2, 2, 64), randn(2, 2, 64))
        slots = torch.tensor([step, 63 - step // 2], device="cuda")
        lz.append_kv(*rows, *caches, slots)
        for cache, row in zip(held, rows, strict=True):
            cache.view(64, 2, 64)[[step, 63 - step // 2]] = row.cpu()
        pid = report().worker_pid if step == 20 else pid
        if step == 30:
            busy()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    lz.synchronize()
    for cache, want in zip(caches, held, strict=True):
        assert torch.equal(cache.cpu(), want)


def test_a_call_returns_before_its_work_is_done(connected: Site) -> None:
    """The caller's stream is still busy; what follows in it sees the result all the same."""
    x = randn(1 << 16)
    original = x.clone()
    for is_measured in (False, True):  # torch loads a kernel when it is first used, and waits for the GPU then
        x.copy_(original)
        torch.cuda.synchronize()
        if is_measured:
            busy()
        x.mul_(2)
        result = lz.silu(x)  # the first call of a route is waited for
        x.zero_()
        total = result.double().sum()
    assert not torch.cuda.current_stream().query()
    torch.testing.assert_close(total, F.silu(2 * original.double()).sum(), rtol=1e-5, atol=1e-3)


def test_inputs_may_change_and_go_right_after_the_call(connected: Site) -> None:
    """In the stream's order, as with a kernel of the caller's own."""
    expected, results = [], []
    for step in range(50):
        x = torch.full((4096,), float(step % 7), device="cuda")
        expected.append(F.silu(x.double()))
        results.append(lz.silu(x))
        x.fill_(-1e30)
        del x
    for result, right in zip(results, expected, strict=True):
        close(result, right)


def test_a_call_that_repeats_is_replayed_from_a_graph(new_site: Callable[..., Site]) -> None:
    """The report says so; other contents and other memory give their own results."""
    site = new_site("one")
    site.connect()
    x, out = randn(512), randn(512)
    notes = []
    for step in range(12):
        x.fill_(step)
        lz.silu(x, out=out)
        notes.append(any("replayed a CUDA graph" in note for note in report().notes))
        close(out, F.silu(x.double()))
    assert notes[0] is False
    assert notes[-1] is True
    close(lz.silu(x[:100]), F.silu(x[:100].double()))


def test_jax_arrays_are_taken_and_given_back(connected: Site) -> None:
    """JAX shows no stream: what it has computed is waited for, and it waits for the result."""
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    for shape in ((64, 33), (7,), ()):
        x = jax.random.normal(jax.random.key(1), shape, dtype=jnp.float32)
        result = lz.silu(x)
        assert isinstance(result, jax.Array)
        assert jnp.allclose(result + 1, jax.nn.silu(x) + 1, rtol=1e-4, atol=1e-5)


def test_chains_hop_between_workers(connected: Site) -> None:
    """Each call needs the one before it, which another process runs; nobody's CPU waits."""
    x = randn(256, 256) / 16
    for backend in ("one", "two"):
        lz.matmul(x, x, backend=backend)
    value, expected = x, x.double()
    for step in range(40):
        value = lz.matmul(value, x, backend=("one", "two")[step % 2])
        value = lz.silu(value, backend=("two", "one")[step % 2])
        expected = F.silu(expected @ x.double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-5)


def test_threads_and_streams_do_not_mix(connected: Site) -> None:
    """Each thread has a stream of its own; all share the session and the workers."""

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            generator = torch.Generator("cuda").manual_seed(seed)
            for _ in range(25):
                x = torch.randn(128, 128, device="cuda", generator=generator)
                result = lz.silu(lz.matmul(x, x, backend="two"))
                close(result, F.silu((x @ x).double()))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, seed) for seed in range(6)]:
            future.result(PATIENCE_S)


def test_cupy_arrays_are_taken_and_given_back(connected: Site) -> None:
    """The result is of the caller's kind, in the stream that CuPy works on."""
    cp = pytest.importorskip("cupy")
    x = cp.random.standard_normal((64, 33)).astype(cp.float32)
    for view in (x, x.T, x[::2], x[::-1]):
        result = lz.silu(view)
        assert isinstance(result, cp.ndarray)
        assert result.shape == view.shape
        cp.testing.assert_allclose(result, view / (1 + cp.exp(-view)), rtol=1e-4, atol=1e-6)
    with cp.cuda.Stream():
        doubled = x * 2
        cp.testing.assert_allclose(lz.silu(doubled), doubled / (1 + cp.exp(-doubled)), rtol=1e-4, atol=1e-6)


def test_memory_that_cannot_be_shared_is_copied_once_and_counted(connected: Site) -> None:
    """cudaMallocAsync's pools have no handles."""
    cp = pytest.importorskip("cupy")
    with cp.cuda.using_allocator(cp.cuda.MemoryAsyncPool().malloc):
        x = cp.arange(1000, dtype=cp.float32)
        result = lz.silu(x)
    cp.testing.assert_allclose(result, x / (1 + cp.exp(-x)), rtol=1e-4, atol=1e-6)
    assert {copy.arg: copy.nbytes for copy in report().copies} == {"x": 4000, "out": 4000}
    assert "cudaMallocAsync" in report().copies[0].reason


@pytest.mark.parametrize("transport", ["ipc", "vmm", "staged", "copied"])
def test_every_way_of_crossing_gives_the_same_results(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The lower transports copy, and say so."""
    site = new_site()
    monkeypatch.setenv(REQUIRED, transport)
    site.connect()
    for step in range(12):
        x = randn(1000 + step)
        close(lz.silu(x), F.silu(x.double()))
    assert any(f"memory crosses by {transport}" in note for note in report().notes)
    assert (report().copied_bytes > 0) == (transport != "ipc")


# --- bad input


def test_arrays_on_two_devices_are_refused(connected: Site) -> None:
    """Which copy would be meant is the caller's to say."""
    with pytest.raises(lz.InvalidArgument, match=r"matmul: a is on cuda:0, b on cpu; move all arrays to one device"):
        lz.matmul(randn(4, 4), torch.zeros(4, 4))


# --- the application's own graphs


def captured(work: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph, and what the work in it returned: tensors that each replay fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def test_replays_of_the_callers_graph_run_the_remote_kernels(connected: Site) -> None:
    """Between its own kernels, in order, on whatever the inputs hold by then."""
    x, weight = randn(64, 64), randn(64, 64) / 8

    def work() -> Any:
        value = x * 2
        for _ in range(4):
            value = lz.matmul(lz.silu(value), weight) + x
        return value

    def expected() -> Any:
        value = x.double() * 2
        for _ in range(4):
            value = F.silu(value) @ weight.double() + x
        return value

    work()
    graph, result = captured(work)
    for _ in range(10):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(result.double(), expected(), rtol=1e-3, atol=1e-3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        graph.replay()
        eager = lz.silu(result)
    torch.cuda.synchronize()
    close(eager, F.silu(result.double()))


def test_a_call_that_was_never_made_is_refused_and_the_capture_stays_whole(connected: Site) -> None:
    """No kernel is known to serve it; what else was captured goes on."""
    x = randn(129)

    def work() -> Any:
        doubled = x * 2
        with pytest.raises(lz.CudaGraphUnsafe, match=r"silu: the stream is being captured.*make it once outside"):
            lz.silu(x)
        return doubled

    graph, doubled = captured(work)
    graph.replay()
    torch.testing.assert_close(doubled, x * 2)


def test_a_replay_survives_its_worker(new_site: Callable[..., Site]) -> None:
    """Killed in the middle of it: another kernel takes the graph slots over, those that were rung included."""
    site = new_site()
    site.connect()
    x = randn(SLOW)

    def work() -> Any:
        value = x
        for _ in range(3):
            value = lz.gelu(value, approximate="tanh")
        return value

    work()
    graph, result = captured(work)
    graph.replay()
    finish()
    for victim in ("one", "two"):
        pid = site.backend(victim)["pid"]
        x.normal_()
        graph.replay()
        os.kill(pid, signal.SIGKILL)
        finish()
        value = x.double()
        for _ in range(3):
            value = F.gelu(value, approximate="tanh")
        close(result, value)
    lz.synchronize(PATIENCE_S)


def test_graph_slots_of_graphs_that_are_gone_are_used_again(connected: Site) -> None:
    """The driver says when a graph is gone, without a Python function in its threads."""
    x = randn(77)
    lz.silu(x)
    used = set()
    for _ in range(12):
        graph, _ = captured(lambda: lz.silu(x))
        graph.replay()
        record = lz.session().last_record
        used.add(record.graph_slot)  # type: ignore[union-attr]
        finish()
        graph.reset()
        del graph, record
        gc.collect()
    assert len(used) < 6


def test_the_brokers_death_hangs_no_replay(new_site: Callable[..., Site]) -> None:
    """Its workers die with it."""
    site = new_site("one")
    session = site.connect()
    x = randn(50)
    lz.silu(x)
    graph, _ = captured(lambda: lz.silu(x))
    graph.replay()
    finish()
    os.kill(session.broker_pid, signal.SIGKILL)
    graph.replay()
    graph.replay()
    finish()

    def call() -> None:
        lz.silu(x)  # returns when the death is not known yet
        lz.synchronize(PATIENCE_S)

    with pytest.raises(lz.BrokerLost):
        call()


# --- what breaks


def test_a_worker_killed_with_calls_enqueued_costs_nothing_but_time(connected: Site) -> None:
    """They run on the next backend, in their order, and the report of the last one says so."""
    x = randn(SLOW)
    assert lz.gelu(x, approximate="tanh").shape == x.shape
    lz.silu(x, backend="two")
    pid = connected.backend("one")["pid"]
    busy()
    results = [lz.gelu(x * step, approximate="tanh") for step in range(3)]
    chained = lz.silu(results[-1])
    os.kill(pid, signal.SIGKILL)
    finish()
    for step, result in enumerate(results):
        close(result, F.gelu(step * x.double(), approximate="tanh"))
    close(chained, F.silu(results[-1].double()))


def test_a_call_that_nobody_can_finish_is_an_error_and_no_stream_hangs(new_site: Callable[..., Site]) -> None:
    """A pinned call has no other backend: the next call or synchronisation says what became of it."""
    site = new_site(backoff_s=600, backoff_max_s=600)
    site.connect()
    x = randn(SLOW)
    lz.gelu(x, approximate="tanh", backend="one")
    finish()
    pid = site.backend("one")["pid"]
    busy()  # what is enqueued behind it cannot be done before the worker is dead
    lz.gelu(x, approximate="tanh", backend="one")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed: the one worker died"):
        lz.synchronize(PATIENCE_S)
    finish()
    close(lz.silu(x), F.silu(x.double()))


@pytest.mark.parametrize("eps", [ILLEGAL, ASSERT], ids=["illegal address", "device assert"])
def test_a_broken_context_ends_that_worker_alone(connected: Site, eps: float) -> None:
    """The other worker and the client's own work go on; the call falls back."""
    x = randn(64, 64)
    close(lz.layer_norm(x, (64,), backend="two"), F.layer_norm(x.double(), (64,)))
    pid = connected.backend("one")["pid"] or None
    result = lz.layer_norm(x, (64,), eps=eps)
    others = [lz.silu(x, backend="two") for _ in range(20)]
    finish()
    close(result, F.layer_norm(x.double(), (64,), eps=eps))
    for other in others:
        close(other, F.silu(x.double()))
    assert pid is None or not is_running(pid)
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("eps", [RAISE, MEMORY], ids=["exception", "out of memory"])
def test_a_kernel_that_raises_falls_back(connected: Site, eps: float) -> None:
    """And its worker lives on."""
    x = randn(64, 64)
    result = lz.layer_norm(x, (64,), eps=eps)
    assert [attempt.backend for attempt in report().attempts] == ["one", "two"]
    close(result, F.layer_norm(x.double(), (64,), eps=eps))


def test_the_brokers_death_lets_streams_go(new_site: Callable[..., Site]) -> None:
    """Its workers die with it; what was enqueued is lost, and the next call says so."""
    site = new_site()
    site.connect()
    x = randn(SLOW)
    lz.gelu(x, approximate="tanh")
    pid = site.broker_pid
    assert pid is not None
    for _ in range(3):
        lz.gelu(x, approximate="tanh")
    os.kill(pid, signal.SIGKILL)
    finish()
    with pytest.raises(lz.BrokerLost):
        lz.silu(x)
    wait_ended(pid)
    torch.testing.assert_close(x + x, 2 * x)


def test_a_clients_death_harms_nobody(connected: Site) -> None:
    """Its memory is given back, and the workers serve others."""
    x = randn(1 << 14)
    close(lz.silu(x), F.silu(x.double()))
    other = connected.python(
        "import torch\n"
        "lz.connect()\n"
        "x = torch.ones(4099, device='cuda')\n"
        "lz.gelu(x, approximate='tanh')\n"
        "torch.cuda._sleep(2_000_000_000)\n"
        "for _ in range(5): lz.gelu(x, approximate='tanh')\n"
        "print('enqueued', flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "enqueued\n"
        other.kill()
    for _ in range(10):
        close(lz.silu(x), F.silu(x.double()))
    wait_until(lambda: lz.status()["clients"] is not None)


def test_sessions_come_and_go(connected: Site) -> None:
    """Memory, page and threads of a session end with it."""
    x = randn(4096)
    lz.silu(x)
    threads = threading.active_count()
    for _ in range(3):
        lz.disconnect()
        connected.connect()
        close(lz.silu(x), F.silu(x.double()))
    gc.collect()
    assert threading.active_count() == threads


def finish() -> None:
    """Wait for the current stream, but not for ever."""
    stream = torch.cuda.current_stream()
    wait_until(stream.query)


def test_a_trace_tells_when_calls_ran_on_the_gpu(connected: Site) -> None:
    """By events around them in the caller's stream: in order, on the clock of the CPU, and no call waits for it."""
    x = randn(4096, 4096)
    for _ in range(20):
        lz.silu(x)
    torch.cuda.synchronize()
    before_ns = time.perf_counter_ns()
    with lz.trace() as trace:
        ours = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ours[0].record()
        y = lz.silu(x)
        z = lz.silu(y)
        ours[1].record()
        close(z, F.silu(F.silu(x)))
    torch.cuda.synchronize()
    after_ns = time.perf_counter_ns()
    one, two = trace.calls
    assert [call.device for call in trace.calls] == ["cuda:0"] * 2
    assert [(source.input, source.call) for source in two.sources] == [("x", 0)]
    assert one.gpu_ns is not None
    assert two.gpu_ns is not None
    slack_ns = 1_000_000  # of two clocks that are brought together once in five seconds
    times = [before_ns - slack_ns, one.gpu_ns[0], sum(one.gpu_ns), two.gpu_ns[0], sum(two.gpu_ns), after_ns + slack_ns]
    assert times == sorted(times)
    took_ns = 1e6 * ours[0].elapsed_time(ours[1])
    assert sum(two.gpu_ns) - one.gpu_ns[0] == pytest.approx(took_ns, rel=0.2, abs=100_000)
