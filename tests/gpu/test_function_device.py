"""Isolated functions that are called without arrays on a GPU, and give some there, by their option `device`, on a real
one. tests/process/test_function_device.py has what needs none."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
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
        fn.scaled.options(device="cuda:1")(torch.randn(3, device="cuda"))
    y = torch.arange(4.0, device="cuda:1")
    assert torch.equal(fn.scaled.options(device="cuda:1")(y), y * 2)
