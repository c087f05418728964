"""Results on a GPU of calls without arrays there, by the option `device`, over the GPU of threads (tests/soft_gpu). The
program has torch, and the environment CuPy. tests/gpu/test_function_device.py has those of a real one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import device_functions as fn
from tests.process import forks
from tests.process.gpu_express_site import new_site, path_of
from tests.process.gpu_site import finish, soft
from tests.process.harness import Site, wait_until
from tests.soft_gpu import soft_cupy, soft_torch
from tests.soft_gpu.soft_gpu import driver

import layerzero as lz
from layerzero.functions.express import ExpressCall
from layerzero.functions.gpu_express import GpuExpressCall

__all__ = ["soft"]
NO_STREAM = r"or by \.options\(device=\"cuda\"\), .*, or return it with \.cpu\(\)"


@pytest.fixture(scope="module")
def torch(soft: None) -> Iterator[None]:
    with soft_torch.installed():
        yield


@pytest.fixture(scope="module")
def site(torch: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker with the GPU, whose workers may open others' memory as a driver does."""
    forks.start_server()
    one = new_site(tmp_path_factory.mktemp("store"))
    with one.environment():
        for env in (fn.THERE, fn.OTHER, fn.PAIR, fn.BARE):
            env.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


@pytest.fixture(autouse=True)
def there(site: Site) -> int:
    """The worker's pid; it has the GPU."""
    return fn.prepare()


def check(result: Any, *expected: float) -> None:
    assert type(result) is soft_torch.Tensor
    np.testing.assert_array_equal(result.numpy(), np.array(expected, result.array.dtype))


def test_a_result_is_the_callers_tensor(there: int) -> None:
    """Of any dtype, size and place; the worker that has made it may be gone."""
    for count in (3, 5, 5, 1):
        for dtype in ("float32", "float64", "int32"):
            check(fn.load(count, 2.0, dtype), *[2.0] * count)
            report = fn.load.last_report()
            assert (report.device, report.selection.worker_pid) == ("cuda:0", there)  # type: ignore[union-attr]
            assert report.copies
            assert {copy.where for copy in report.copies} == {"worker"}
    assert "results on a GPU lie on cuda:0" in str(fn.load.last_report())
    found = fn.act("several", "x")
    check(found["ones"], 1, 1, 1)
    check(found["rest"][1][0], 2, 2, 2, 2, 2)
    assert (found["rest"][0], found["rest"][1][1]) == ("x", None)
    assert fn.act("empty").shape == (0,)
    kept = fn.load(3, 9.0)
    finish()
    os.kill(there, signal.SIGKILL)
    wait_until(lambda: fn.prepare() != there)
    check(kept, 9, 9, 9)


def test_results_of_the_cpu_stay_those(there: int) -> None:
    assert fn.act("number") == 7
    np.testing.assert_array_equal(fn.act("host"), np.arange(4.0))
    assert fn.act.last_report().device == "cuda:0"
    with pytest.raises(lz.RemoteError, match="LookupError: none"):
        fn.act("raise", "none")


def test_without_the_option_it_is_refused_with_what_to_do(there: int) -> None:
    with pytest.raises(lz.InvalidArgument, match=NO_STREAM):
        fn.made(3)
    check(fn.made.options(device="cuda")(3, 4.0), 4, 4, 4)
    with pytest.raises(lz.InvalidArgument, match=NO_STREAM):
        fn.made.options(device=None)(3)
    assert fn.made.options(device="cuda").explain(3).device == "cuda:0"
    assert "results on a GPU lie on cuda:0" in str(fn.load.explain(3))
    assert fn.made.explain(3).device == ""


def test_results_are_in_the_order_of_the_callers_stream(there: int, tmp_path: Path) -> None:
    """Nobody waits for the GPU, and what is enqueued next sees the result."""
    gate = tmp_path / "gate"
    fn.slow(4, str(gate))  # its first time is waited for
    with soft_cupy.stream():
        gate.touch()
        result = fn.slow(4, str(gate))
        assert not driver.is_stream_idle(soft_cupy.current().ptr)
        more = result.array + 1.0
        gate.unlink()
        np.testing.assert_array_equal(more.get(), np.full(4, 5.0))


def test_repeated_calls_pass_the_broker(there: int) -> None:
    """By their values; others have memory of their own, and what comes in the place of a tensor is one attempt."""

    def is_settled(*args: Any) -> bool:
        fn.load(*args)
        return isinstance(fn.load._last.call, GpuExpressCall) and path_of(fn.load.last_report()) == "express"

    for args in ((4, 1.0), (4, 2.0), (4, -0.0), (4, 0.0), (6, 1.0)):
        wait_until(lambda: is_settled(*args))  # noqa: B023
    for number in range(20):
        args = ((4, 1.0), (4, 2.0), (6, 1.0))[number % 3]
        check(fn.load(*args), *[args[1]] * args[0])
        assert path_of(fn.load.last_report()) == "express"
        assert fn.load.last_report().device == "cuda:0"
    assert np.signbit(fn.load(4, -0.0).numpy()).all()
    assert not np.signbit(fn.load(4, 0.0).numpy()).any()
    for _ in range(5):
        assert fn.act("number") == 7
        assert fn.act("text", None) == "text"
        found = fn.act("several", 3)
        check(found["rest"][1][0], 2, 2, 2, 2, 2)
    futures = [fn.load.submit(4, float(number % 2 + 1)) for number in range(30)]
    for number, future in enumerate(futures):
        check(future.result(), *[number % 2 + 1.0] * 4)


def test_submit_map_and_coroutines(there: int) -> None:
    futures = [fn.load.submit(2, float(number)) for number in range(40)]
    for number, future in enumerate(futures):
        check(future.result(), number, number)
    for size in (1, 4):
        for number, result in enumerate(fn.load.map([2] * 10, range(10), chunksize=size)):
            check(result, number, number)
        assert bool(fn.load.last_report().not_chunked) == (size > 1)
    assert "device=" in fn.load.last_report().not_chunked

    async def both() -> list[Any]:
        return await asyncio.gather(fn.later(1.0), fn.later(2.0))

    one, two = asyncio.run(both())
    check(one, 1, 1, 1, 1)
    check(two, 2, 2, 2, 2)


def test_generators_give_items_there(there: int) -> None:
    """Each in the stream of who takes it; of objects, methods and handles, too."""
    frames = fn.frames(7, 2)
    for number in range(7):
        with soft_cupy.stream() if number % 2 else contextlib.nullcontext():
            item = next(frames)
            check(item if number % 3 else item["x"], *[number] * (2 + number // 3 if number % 3 else 2))
    assert list(frames) == []
    assert fn.frames.last_report().device == "cuda:0"
    with fn.Model(2.0) as model:
        for number, item in enumerate(model.steps(3)):
            check(item, *[2.0 * number] * 4)
        for number, item in enumerate(model):
            check(item, *[2.0 * number] * 4)
    handle = fn.act.options(keep=True)("several", 1)
    assert list(handle) == ["ones", "rest"]
    handle.close()

    async def taken() -> list[Any]:
        return [item async for item in fn.frames(2, 2)]

    check(asyncio.run(taken())[1], 1, 1)


def test_objects_have_it_for_all_of_their_calls(there: int) -> None:
    with fn.Model(1.0) as model:
        for number in range(12):
            check(model.add(1.0), *[number + 2.0] * 4)
        check(model.weights, *[13.0] * 4)
        assert len(model) == 4
        check(model.add.submit(1.0).result(), *[14.0] * 4)
        check(fn.Model.add(model, 1.0), *[15.0] * 4)
        with pytest.raises(lz.InvalidArgument, match=NO_STREAM):
            model.add.options(device=None)(1.0)
        assert list(model.numbers.options(device=None)(50)) == list(range(50))
        assert isinstance(fn.Model._last.call, ExpressCall)
        assert list(model.numbers(20)) == list(range(20))
        model.weights = model.add(0.0)
        check(model.weights, *[16.0] * 4)
    with fn.Plain(3.0) as plain:
        with pytest.raises(lz.InvalidArgument, match=NO_STREAM):
            plain.found()
        check(plain.found.options(device="cuda")(), 3, 3, 3, 3)
    with fn.Plain.options(device="cuda:0")(4.0) as plain:
        check(plain.found(), 4, 4, 4, 4)


def test_an_object_is_made_again_on_it(there: int) -> None:
    with fn.Model.options(on_death="rebuild")(1.0) as model:
        check(model.add(1.0), *[2.0] * 4)
        finish()
        os.kill(there, signal.SIGKILL)
        wait_until(lambda: fn.prepare() != there)
        check(model.add(2.0), *[3.0] * 4)


def test_what_stays_is_fetched_to_it(there: int) -> None:
    with fn.load.options(keep=True)(3, 5.0) as handle:
        check(handle.fetch(), 5, 5, 5)
        check(handle.copy(), 5, 5, 5)
    with fn.made.options(keep=True)(3, 5.0) as handle, pytest.raises(lz.InvalidArgument, match=NO_STREAM):
        handle.fetch()


def test_what_a_method_keeps_is_as_its_own_option_says(there: int) -> None:
    with fn.Plain(3.0) as plain:
        with plain.found.options(keep=True, device="cuda")() as handle:
            check(handle.fetch(), 3, 3, 3, 3)
            check(handle.copy(), 3, 3, 3, 3)
            with handle.copy.options(keep=True)() as another:
                check(another.fetch(), 3, 3, 3, 3)
        with plain.found.options(keep=True)() as handle:
            with pytest.raises(lz.InvalidArgument, match=NO_STREAM):
                handle.fetch()
            check(handle.copy.options(device="cuda")(), 3, 3, 3, 3)
    several = fn.arrays.options(keep=True, device="cuda")(3)
    for number, item in enumerate(several):
        check(item, number, number)
    several.close()


def test_a_shape_function_saves_the_copy(there: int) -> None:
    for number in range(6):
        check(fn.into(3, float(number)), number, number, number)
        assert fn.into.last_report().copies == ()
    assert fn.into.local(2, 8.0).shape == (2,)  # the memory that a result would have


def test_with_arrays_there_they_must_be_on_it(there: int) -> None:
    """Whose library results are of; a second GPU of the program's torch is not this one."""
    x = fn.load(4, 2.0)
    for _ in range(6):
        check(fn.act("add", x), 3, 3, 3, 3)
    cupy = soft_cupy.asarray(np.full(4, 3.0, np.float32))
    np.testing.assert_array_equal(fn.act("add", cupy).get(), np.full(4, 4.0))
    said = "an array on cuda:0, of a call with device='cuda:1'; move the arrays of a call to cuda:1"
    with soft_torch.installed(gpus=2):
        for _ in range(2):
            with pytest.raises(lz.InvalidArgument, match=said):
                fn.act.options(device="cuda:1")("add", cupy)


def test_a_gpu_that_is_not_there_is_refused(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, with what to do."""
    with pytest.raises(lz.InvalidArgument, match=r"\Asay device= of a GPU that is there, cuda:0: "):
        fn.load.options(device="cuda:7")(3)
    with soft_torch.installed(gpus=0):
        calls: list[Callable[[], Any]] = [lambda: fn.load(3), lambda: fn.load.submit(3), lambda: fn.load.explain(3)]
        calls += [lambda: fn.frames(3, 2), lambda: fn.Model(3.0), lambda: next(fn.load.map([3]))]
        for call in calls:
            with pytest.raises(lz.InvalidArgument, match=r"\Aleave device= out, .* sees no GPU"):
                call()
        assert fn.load.options(device=None).explain(3).device == ""
    with soft_torch.installed(), monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(lz.InvalidArgument, match=r"\Aimport torch, with CUDA, before the call, or leave"):
            fn.load(3)


def test_a_worker_without_the_gpu_says_so(there: int) -> None:
    said = r"\Aleave device= of .*without_a_gpu out, or have its worker see the GPU: "
    with pytest.raises(lz.NoTransport, match=said):
        fn.without_a_gpu(3.0)
    assert fn.without_a_gpu.options(device=None)(3.0) == 3.0


def test_a_capture_refuses_it(there: int) -> None:
    for _ in range(6):
        fn.load(4, 1.0)
    driver.begin_capture(soft_cupy.current().ptr)
    try:
        with pytest.raises(lz.CudaGraphUnsafe, match="call the function outside of the CUDA graph's capture"):
            fn.load(4, 1.0)
    finally:
        driver.end_capture(soft_cupy.current().ptr)
    check(fn.load(4, 1.0), 1, 1, 1, 1)


def test_deaths_and_fallbacks_are_as_ever(there: int) -> None:
    with pytest.raises(lz.BackendError, match="it may have run in part"):
        fn.act("die")
    wait_until(lambda: fn.prepare() != there)
    instead = fn.act.options(fallback=lambda what, value=None: f"instead of {what}")
    assert instead("die") == "instead of die"
    assert instead.last_report().device == "cuda:0"
    wait_until(lambda: fn.prepare() > 0)


def test_workers_of_a_pool_and_several_environments(there: int) -> None:
    """A stream's calls go to one worker. Results on a GPU are not compared."""
    fn.spread.warmup()
    fn.anywhere.warmup()
    with soft_cupy.stream():
        found = [future.result() for future in [fn.spread.submit(float(number)) for number in range(12)]]
        for number, (result, _) in enumerate(found):
            check(result, number, number, number)
        assert len({pid for _, pid in found}) == 1
    check(fn.anywhere(3.0), 3, 3, 3)
    assert fn.anywhere.last_report().shadow == "not made: its results may be on a GPU, and are not compared there"
    times_us = fn.anywhere.tune(2.0)
    assert times_us.keys() == {fn.THERE.backend, fn.OTHER.backend}
    assert max(times_us.values()) < math.inf
