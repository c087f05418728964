"""Isolated functions with CUDA tensors, on a real GPU: what crosses, in which order, and what is refused.
tests/process/test_gpu_functions.py has what needs none.

The functions' environment is a venv of the test's own, beside which lies what this interpreter has installed (torch,
NumPy, pyzmq, msgpack): nothing is built or downloaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from tests.gpu.function_sites import served
from tests.process.harness import PATIENCE_S, wait_until

import layerzero as lz

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no NVIDIA GPU", allow_module_level=True)
CYCLES = 400_000_000  # some 0.2 s


@pytest.fixture(scope="module")
def fn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    with served(tmp_path_factory) as functions:
        yield functions


def randn(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


def test_tensors_cross_as_they_lie(fn: ModuleType) -> None:
    """Of any dtype and strides; the function has torch's, over the same memory."""
    base = randn(64, 96)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        x = base.to(dtype) if dtype is not torch.bool else base > 0
        for view in (x, x.t(), x[3:17, ::2], x[5], x[0, 0], x[:0]):
            assert fn.described(view) == [("torch", "cuda:0", str(dtype), list(view.shape))]
            assert torch.equal(fn.same(view), view)
    x = randn(1 << 20)
    assert torch.equal(fn.scaled(x), x * 2)
    report = fn.scaled.last_report()
    assert {(copy.arg, copy.where) for copy in report.copies} == {("result", "worker")}
    assert report.uncopied_bytes == x.nbytes
    assert any("memory crosses by ipc" in note for note in report.selection.notes)
    assert report.selection.worker_pid != os.getpid()


def test_results_of_any_shape_and_number(fn: ModuleType) -> None:
    """On the GPU and on the CPU, nested, of other sizes than the last time."""
    for rows in (2, 7, 7, 3):
        x, y = randn(rows, 4), randn(rows, 4)
        found = fn.parts(x, y, "text")
        assert torch.equal(found["sum"], x + y)
        assert torch.equal(found["both"][0], x.t())
        assert torch.equal(found["both"][1][0], y[1:])
        assert found["both"][1][1] == "text"
        assert (found["on_cpu"].device.type, found["none"]) == ("cpu", None)
        assert torch.equal(found["on_cpu"], x.cpu())
        assert found["empty"].shape == (0, 4)
        assert found["sum"].device == x.device


def test_a_shape_function_saves_the_copy(fn: ModuleType) -> None:
    x = randn(1000)
    for _ in range(3):
        assert torch.equal(fn.into(x), x * 3)
        report = fn.into.last_report()
        assert report.copies == ()
        assert report.uncopied_bytes == 2 * x.nbytes


def test_nobody_waits_for_the_gpu(fn: ModuleType) -> None:
    """The function sees what the caller's stream has done before, and the caller goes on while it is busy."""
    x = randn(1 << 16)
    first = x.clone()
    for is_measured in (False, True):  # kernels are loaded when they are first used
        x.copy_(first)
        torch.cuda.synchronize()
        if is_measured:
            torch.cuda._sleep(CYCLES)
        x.mul_(3)
        start_s = time.monotonic()
        result = fn.busy(x, CYCLES)
        took_s = time.monotonic() - start_s
        x.zero_()
        is_idle = torch.cuda.current_stream().query()
        torch.testing.assert_close(result, first * 6)
    assert not is_idle
    assert took_s < 0.2


def test_inputs_may_change_and_go_right_after_the_call(fn: ModuleType) -> None:
    expected, results = [], []
    for step in range(50):
        x = torch.full((4096,), float(step), device="cuda")
        results.append(fn.scaled(x))
        expected.append(2.0 * step)
        x.fill_(-1e30)
        del x
    for result, value in zip(results, expected, strict=True):
        assert bool((result == value).all())


def test_streams_and_threads_do_not_mix(fn: ModuleType) -> None:
    """Each thread has its stream; all are served by one worker, whose state is in order."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                x = torch.full((1 << 14,), float(seed * 100 + step), device="cuda")
                y = fn.scaled(x)
                if fn.total(y) != 2.0 * (seed * 100 + step) * (1 << 14):
                    wrong.append(f"{seed}.{step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []


def test_state_of_an_object_is_ordered(fn: ModuleType) -> None:
    """Added to on three streams; told by a call without tensors."""
    with fn.Counter(torch.zeros(1 << 20, device="cuda")) as counter:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for step in range(12):
            with torch.cuda.stream(streams[step % 2]):
                counter.add(torch.full((1 << 20,), float(step), device="cuda"))
        assert counter.mean() == 66.0
        assert bool((counter.sums(torch.ones(1 << 20, device="cuda")) == 66.0).all())


def test_submitted_calls_and_generators(fn: ModuleType) -> None:
    x = randn(3, 5)
    futures = [fn.scaled.submit(x, float(n)) for n in range(8)]
    for n, future in enumerate(futures):
        assert torch.equal(future.result(), x * n)
    assert torch.equal(torch.stack(list(fn.rows(x))), x.cpu())


def test_items_of_generators_are_on_the_gpu(fn: ModuleType) -> None:
    """In the order of the stream that takes them; what they are made of is the generator's own."""
    x = randn(1 << 16)
    before, other = x.clone(), torch.cuda.Stream()
    for number, item in enumerate(fn.steps(x, 9)):
        x.zero_()
        with torch.cuda.stream(other) if number % 2 else torch.cuda.stream(torch.cuda.current_stream()):
            other.wait_stream(torch.cuda.default_stream())
            torch.testing.assert_close(item, before + number + 1)
        item.fill_(-1)


def test_workers_of_a_pool_have_streams_of_their_own(fn: ModuleType) -> None:
    """Calls of one stream go to one worker; of several, side by side."""
    x = randn(3, 5)
    seen = []
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            futures = [fn.spread.submit(x) for _ in range(16)]
            pids = set()
            for future in futures:
                found, pid = future.result()
                pids.add(pid)
                assert torch.equal(found, x + 1)
            seen.append(pids)
    assert [len(pids) for pids in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 2


def test_what_stays_is_a_copy(fn: ModuleType) -> None:
    x = randn(8)
    before = x.clone()
    kept = fn.same.options(keep=True)(x)
    x.zero_()
    assert fn.total(kept) == pytest.approx(float(before.sum()), rel=1e-4, abs=1e-4)
    kept.close()


def test_writes_to_what_was_lent_are_an_error(fn: ModuleType) -> None:
    """No GPU maps memory for reading alone; torch counts writes."""
    with pytest.raises(lz.InvalidArgument, match=r"has to write to a copy, such as x\.clone"):
        fn.written(randn(4))


def test_chunks_of_a_map_go_call_by_call(fn: ModuleType) -> None:
    """Those with a tensor on the GPU, which the report says."""
    xs = [randn(n) for n in (2, 300, 2, 5)]
    found = list(fn.scaled.map(xs, chunksize=2))
    assert all(torch.equal(y, x * 2) for x, y in zip(xs, found, strict=True))
    assert fn.scaled.last_report().not_chunked
    assert [y.tolist() for y in fn.scaled.map([x.cpu() for x in xs], chunksize=2)] == [(x * 2).tolist() for x in xs]
    assert not fn.scaled.last_report().not_chunked
    fn.scaled(xs[0])
    assert not fn.scaled.last_report().not_chunked


def test_what_cannot_go_is_refused_by_name(fn: ModuleType) -> None:
    with pytest.raises(lz.InvalidArgument, match=r"return it with \.cpu\(\)"):
        fn.made_there()
    with pytest.raises(lz.InvalidArgument, match="requires gradients"):
        fn.scaled(randn(4).requires_grad_())
    if torch.cuda.device_count() > 1:
        with pytest.raises(lz.InvalidArgument, match="move the arrays of a call to one GPU"):
            fn.parts(randn(2), torch.ones(2, device="cuda:1"), "")
        y = torch.arange(4.0, device="cuda:1")
        assert torch.equal(fn.scaled(y), y * 2)
    graph, x = torch.cuda.CUDAGraph(), randn(4)
    with pytest.raises(lz.CudaGraphUnsafe), torch.cuda.graph(graph):
        fn.scaled(x)
    torch.cuda.synchronize()


def test_cupy_arrays_are_the_functions_too(fn: ModuleType) -> None:
    """Of the caller's library, where the environment has it."""
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    [(library, *_)] = fn.described(x)
    assert library == "cupy"
    for view in (x, x.T, x[::-1], x[1:, ::2]):
        cupy.testing.assert_array_equal(fn.scaled(view), view * 2)
    with cupy.cuda.Stream(non_blocking=True):
        y = cupy.full(1 << 20, 3.0)
        assert float(fn.scaled(y).sum()) == 6.0 * (1 << 20)


def test_jax_arrays_are_read_by_torch(fn: ModuleType) -> None:
    """Nobody makes JAX's here; what comes back is JAX's."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = jax.numpy.arange(6.0).reshape(2, 3)
    [(library, *_)] = fn.described(x)
    assert library == "torch"
    result = fn.scaled(x)
    assert isinstance(result, jax.Array)
    assert (result + 1).tolist() == (x * 2 + 1).tolist()
    for number, item in enumerate(fn.steps(x, 4)):
        assert isinstance(item, jax.Array)
        assert (item * 2).tolist() == ((x + number + 1) * 2).tolist()


@pytest.mark.parametrize("how", ["strike", "leave", "endless"])
def test_a_worker_that_loses_its_gpu_takes_nobody_along(fn: ModuleType, how: str) -> None:
    """The caller hears of it, by the call itself or by the next one, and its own GPU and streams go on."""
    x = randn(16)

    def strike() -> None:
        getattr(fn, how)(x)
        wait_until(lambda: fn.total(x) is None)

    with pytest.raises(lz.LayerZeroError) as told:
        strike()
    assert told.value.code in ("BACKEND_ERROR", "DEADLINE", "REMOTE_EXCEPTION"), told.value
    torch.cuda.synchronize()
    assert float((x - x).sum()) == 0.0

    def serves() -> bool:
        try:
            return bool(torch.equal(fn.scaled(x), x * 2))
        except lz.LayerZeroError:
            return False

    wait_until(serves)
    for _ in range(3):
        assert torch.equal(fn.scaled(x), x * 2)


def test_a_function_is_an_op_of_torch_on_the_gpu(fn: ModuleType) -> None:
    """Eagerly, with gradients, compiled; of tensors of the CPU, too. What fake= says of the device is compared."""
    op = fn.scaled.as_torch_op(
        "lzgpufn::scaled",
        "(Tensor x, float factor=2.0) -> Tensor",
        fake=lambda x, factor: torch.empty_like(x),
        backward=lambda grad, x, factor: grad * factor,
    )
    cube = fn.cube.as_torch_op(
        "lzgpufn::cube", "(Tensor x) -> Tensor", fake=torch.empty_like, backward=fn.cube_backward
    )
    wrong = fn.scaled.as_torch_op(
        "lzgpufn::wrong", "(Tensor x, float factor=2.0) -> Tensor", fake=lambda x, factor: torch.empty_like(x).cpu()
    )
    for device in ("cuda", "cpu"):
        x = torch.randn(64, 32, device=device, dtype=torch.float64, requires_grad=True)
        for _ in range(8):
            result = op(x, 3.0)
            assert torch.equal(result, x.detach() * 3)
            assert result.device == x.device
        assert torch.autograd.gradcheck(lambda x: op(x, 3.0), x[:2, :2].detach().requires_grad_())
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(lambda x: op(x * 2, 3.0) + cube(x), fullgraph=True, backend=backend)
            x.grad = None
            found = compiled(x)
            torch.testing.assert_close(found, x.detach() * 6 + x.detach() ** 3)
            found.sum().backward()
            torch.testing.assert_close(x.grad, 6 + 3 * x.detach() ** 2)
        torch.library.opcheck(op, (x.detach(), 3.0))
    with pytest.raises(lz.InvalidArgument, match=r"fake= says .* on cpu"):
        wrong(torch.randn(3, device="cuda"))
    graph, y = torch.cuda.CUDAGraph(), torch.randn(4, device="cuda")
    with pytest.raises(lz.CudaGraphUnsafe), torch.cuda.graph(graph):
        op(y)
    torch.cuda.synchronize()


def test_what_a_call_costs(fn: ModuleType) -> None:
    """Not a limit: printed, for the record."""
    x = randn(1 << 18)
    told = {}
    for name, call in (
        ("scaled", lambda: fn.scaled(x)),
        ("into", lambda: fn.into(x)),
        ("same argument, number back", lambda: fn.described(x)),
        ("no array", fn.place),
    ):
        for _ in range(30):
            call()
        torch.cuda.synchronize()
        times = []
        for _ in range(200):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        torch.cuda.synchronize()
        told[name] = sorted(times)[100] / 1e3
    print("\nmedian us, 1 MiB:", told)
