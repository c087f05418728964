"""Isolated functions with CUDA tensors, on a real GPU: what crosses, in which order, and what is refused.
tests/process/test_gpu_functions.py has what needs none.

The functions' environment is a venv of the test's own, beside which lies what this interpreter has installed (torch,
NumPy, pyzmq, msgpack): nothing is built or downloaded.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from tests.gpu.function_sites import interpreter
from tests.process.harness import PATIENCE_S, Site, wait_until

import layerzero as lz

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no NVIDIA GPU", allow_module_level=True)
CYCLES = 400_000_000  # some 0.2 s


@pytest.fixture(scope="module")
def fn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The functions, and a broker that serves them."""
    path = interpreter(tmp_path_factory.mktemp("venv") / "v")
    site = Site(tmp_path_factory.mktemp("store"), restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    with mock.patch.dict(os.environ, {"LZ_TEST_INTERPRETER": str(path)}):
        sys.modules.pop("tests.gpu.function_calls", None)
        functions = importlib.import_module("tests.gpu.function_calls")
    try:
        with site.environment():
            functions.GPU.build(quiet=True)
            functions.PAIR.build(quiet=True)
            site.start().connect()
            functions.place()
            yield functions
            lz.disconnect()
    finally:
        site.stop()


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


def test_results_of_calls_without_arrays_are_on_the_named_gpu(fn: ModuleType) -> None:
    """Of any dtype and size; by functions that say so, and by options of others."""
    for dtype in ("float32", "float16", "bfloat16", "int64", "bool", "uint8"):
        for count in (5, 1000, 1000, 0, 1):
            found = fn.load(count, 1.0, dtype)
            assert torch.equal(found, torch.ones(count, dtype=getattr(torch, dtype), device="cuda"))
    report = fn.load.last_report()
    assert (report.device, report.selection.worker_pid) == ("cuda:0", fn.place())
    assert fn.load.explain(1, 1.0).device == "cuda:0"
    for prompt in ("a red bicycle", "a sheep", "a goose"):
        found = fn.draw(prompt)
        letters = torch.tensor(list(prompt.encode()), device="cuda").view(1, -1).expand(3, -1)
        assert torch.equal(found["image"], letters)
        assert torch.equal(found["half"], letters.half() / 2)
        assert (found["size"], found["on_cpu"].device.type) == (len(prompt), "cpu")
        assert torch.equal(found["on_cpu"], letters.cpu())
    named = fn.made_there.options(device=torch.device("cuda", 0))
    for _ in range(3):
        assert torch.equal(named(), torch.ones(3, device="cuda"))
    for number in range(3):
        assert torch.equal(fn.filled(100, float(number)), torch.full((100,), float(number), device="cuda"))
        assert fn.filled.last_report().copies == ()


def test_such_calls_that_repeat_pass_the_broker(fn: ModuleType) -> None:
    def is_past() -> bool:
        assert torch.equal(fn.load(1 << 16, 3.0), torch.full((1 << 16,), 3.0, device="cuda"))
        return bool(fn.load.last_report().selection.path == "express")

    wait_until(is_past)
    kept = [fn.load(1 << 16, 3.0) for _ in range(50)]
    futures = [fn.load.submit(1 << 16, float(number % 3)) for number in range(60)]
    for number, future in enumerate(futures):
        assert torch.equal(future.result(), torch.full((1 << 16,), float(number % 3), device="cuda"))
    assert all(bool((one == 3).all()) for one in kept)
    assert len({one.data_ptr() for one in kept}) == 50


def test_such_results_are_in_the_order_of_the_callers_stream(fn: ModuleType) -> None:
    """The caller goes on while the GPU is busy."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        assert bool((fn.load(1 << 20, 7.0) * 2 == 14).all())
        for is_measured in (False, True):  # the first result of its shapes takes a second trip
            torch.cuda.synchronize()
            start_s = time.monotonic()
            result = fn.stored(1 << 16, 3.0, CYCLES if is_measured else 1000)
            took_s = time.monotonic() - start_s
            is_idle = torch.cuda.current_stream().query()
            assert bool((result + 1 == 4).all())
    assert not is_idle
    assert took_s < 0.2


def test_such_calls_in_threads_with_streams_of_their_own(fn: ModuleType) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(30):
                value = float(seed * 100 + step)
                if not bool((fn.load(1 << 14, value) + 1 == value + 1).all()):
                    wrong.append(f"{seed}.{step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []


def test_generators_maps_and_coroutines_give_such_results(fn: ModuleType) -> None:
    other = torch.cuda.Stream()
    items = fn.pages(8)
    for number in range(8):
        with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
            item = next(items)
            if number % 3:
                assert torch.equal(item, torch.arange(number + 1.0, device="cuda"))
            else:
                assert item == {"number": number}
    assert list(items) == []
    for size in (1, 4):
        for number, result in enumerate(fn.load.map([3] * 9, range(9), chunksize=size)):
            assert result.tolist() == [number] * 3

    async def both() -> list[Any]:
        return [*await asyncio.gather(fn.later(1.0), fn.later(2.0))]

    assert [one.tolist() for one in asyncio.run(both())] == [[1.0] * 4, [2.0] * 4]


def test_an_object_that_is_made_on_the_gpu_gives_its_state(fn: ModuleType) -> None:
    """Its memory is its caller's, whatever becomes of the worker."""
    with fn.Net(6) as net:
        expected = torch.arange(6.0, device="cuda")
        assert torch.equal(net.weights, expected)
        for number in range(8):
            expected = expected + number
            assert torch.equal(net.run(float(number)), expected)
        for number, row in enumerate(net.rows(4)):
            assert torch.equal(row, expected * number)
        kept, pid = net.run(0.0), net.pid()
        torch.cuda.synchronize()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(lz.LayerZeroError):
            wait_until(lambda: net.run(0.0) is None)
    assert torch.equal(kept, expected)
    assert torch.equal(kept + 1, expected + 1)


def test_such_a_call_is_repeated_and_kept(fn: ModuleType, tmp_path: Path) -> None:
    kept = fn.load(1 << 20, 5.0)
    assert torch.equal(fn.survives(str(tmp_path / "once")), torch.ones(3, device="cuda"))
    assert fn.survives.last_report().attempts == 2
    assert bool((kept == 5).all())
    with fn.load.options(keep=True)(8, 2.0) as handle:
        assert torch.equal(handle.fetch(), torch.full((8,), 2.0, device="cuda"))


def test_a_named_gpu_that_is_another_ones_is_refused(fn: ModuleType) -> None:
    with pytest.raises(lz.InvalidArgument, match=r"\Asay device= of a GPU that is there, cuda:0"):
        fn.load.options(device="cuda:4096")(3, 1.0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(lz.CudaGraphUnsafe), torch.cuda.graph(graph):
        fn.load(3, 1.0)
    torch.cuda.synchronize()
    assert fn.load(3, 1.0).tolist() == [1.0] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_gpu_is_named(fn: ModuleType) -> None:
    """By its number, and as torch's current device; the function's is that one, too."""
    second = fn.load.options(device="cuda:1")
    for number in range(8):
        found = second(1000, float(number))
        assert (str(found.device), second.last_report().device) == ("cuda:1", "cuda:1")
        assert bool((found == number).all())
        assert str(fn.load(10, 1.0).device) == "cuda:0"
        with torch.cuda.device(1):
            there = fn.load(10, float(number))
            assert str(there.device) == "cuda:1"
            assert there.tolist() == [number] * 10
    with torch.cuda.device(1):
        items = list(fn.pages(5))
    assert [str(one.device) for one in items if not isinstance(one, dict)] == ["cuda:1"] * 3
    with fn.Net.options(device="cuda:1")(4) as net:
        assert str(net.run(1.0).device) == "cuda:1"
        assert net.run(1.0).tolist() == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(lz.InvalidArgument, match="move the arrays of a call to cuda:1"):
        fn.scaled.options(device="cuda:1")(randn(3))
    y = torch.arange(4.0, device="cuda:1")
    assert torch.equal(fn.scaled.options(device="cuda:1")(y), y * 2)


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
