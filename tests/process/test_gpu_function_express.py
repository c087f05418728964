"""Calls of functions with arrays on a GPU that pass the broker, over the GPU of threads: onto the ring of their worker,
which says when the function has returned. tests/process/test_gpu_functions.py has what they are before, and
tests/process/test_gpu_function_express_ends.py how they end else."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import gpu_functions as fn
from tests.process.gpu_express_site import check, new_site, path_of, settled, site, store, there
from tests.process.gpu_site import finish, randn, soft
from tests.process.harness import PATIENCE_S, ROOT, Site, is_paused, wait_until
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.functions.gpu_express import GpuExpressCall

__all__ = ["site", "soft", "store", "there"]


def test_repeated_calls_pass_the_broker_and_see_each_array_as_it_is(there: int) -> None:
    """Of other memory each time, and of other contents; the report says what was copied."""
    x, values = randn(16, 24)
    several = [soft_cupy.asarray(np.full((16, 24), number, np.float32)) for number in range(4)]
    for one in (x, *several):
        assert settled(one) == there
    for number in range(100):
        check(fn.act(several[number % 4]), np.full((16, 24), 2.0 * (number % 4 + number // 4)))
        several[number % 4].fill(number % 4 + number // 4 + 1.0)
    check(fn.act(x), values * 2)
    report = fn.act.last_report()
    assert (path_of(report), report.served_by, report.attempts) == ("express", fn.THERE.backend, 1)
    assert [(copy.arg, copy.nbytes, copy.where) for copy in report.copies] == [("result", x.size * 4, "worker")]
    assert report.uncopied_bytes == x.size * 4
    assert any("memory crosses by ipc" in note for note in report.selection.notes)


def test_calls_of_a_map_in_chunks_pass_the_broker_one_by_one(there: int) -> None:
    x, values = randn(6, 8)
    settled(x)

    def is_past() -> bool:
        """Once the worker knows the memory of results that are under way."""
        paths = set()
        for result in fn.act.map([x] * 40, chunksize=8):
            check(result, values * 2)
            report = fn.act.last_report()
            assert report.not_chunked
            paths.add(path_of(report))
        return "express" in paths

    wait_until(is_past)
    fn.act(x)
    assert not fn.act.last_report().not_chunked


def test_what_is_alike_is_told_from_what_is_not(there: int) -> None:
    """Values by their types and signs, arrays by their layouts; views lie where they lie."""
    x, values = randn(6, 8)
    for value in (0.0, -0.0, 1, True, 1.0, None, "1", b"1"):
        settled(x, "text", value)
    for value in (0.0, -0.0, 1, True, 1.0, None, "1", b"1"):
        assert fn.act(x, "text", value) == f"(6, 8) {value!r}"
        assert path_of(fn.act.last_report()) == "express"
    views = [(x, values), (x.T, values.T), (x[2:4, ::2], values[2:4, ::2]), (x[3], values[3]), (x[1:], values[1:])]
    for view, _ in views:
        settled(view)
    for _ in range(3):
        for view, expected in views:
            check(fn.act(view), expected * 2)


def test_results_of_any_shape_and_number(there: int) -> None:
    """Nested, none, of the CPU, of other shapes than the last time; what is not plain is one attempt."""
    x, values = randn(8, 4)
    settled(x, "several", 5)
    for _ in range(3):
        found = fn.act(x, "several", 5)
        check(found["twice"], values * 2)
        check(found["rest"][1][0], values * 3)
        assert (found["rest"][0], found["rest"][1][1]) == (5, None)
    for rows in (3, 5, 5, 0, 2, 2, 2, 2, 2, 7):
        check(fn.act(x, "rows", rows), values[:rows] * 2)
        assert fn.act.last_report().attempts == 1
    for _ in range(5):
        assert fn.act(x, "nothing") is None
        np.testing.assert_array_equal(fn.act(x, "here"), values)
    settled(x)
    check(fn.act(x), values * 2)


def test_a_plan_refuses_to_record_one(there: int) -> None:
    """Its result would be taken for a constant, also where it would be on its ring."""
    x, values = randn(6, 8)
    settled(x)
    with pytest.raises(lz.InvalidArgument, match="call it outside of the plan"):
        lz.plan(lambda given: (fn.act(x), given))(x)
    check(fn.act(x), values * 2)


def test_what_a_call_comes_to_besides_is_as_ever(there: int, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception, output, and output that the room of an answer does not hold, with results on the GPU."""
    x, values = randn(8)
    for what, value in (("print", 1), ("raise", "bread"), ("print", 5_000)):
        settled(x)
        capfd.readouterr()
        for _ in range(5):
            if what == "raise":
                with pytest.raises(lz.RemoteError, match="LookupError: bread"):
                    fn.act(x, what, value)
            else:
                check(fn.act(x, what, value), values * 2)
        assert capfd.readouterr().out == f"[there] {'hello ' * int(value)}\n" * 5 if what == "print" else True


def test_arguments_by_name_are_those_by_place(there: int) -> None:
    x, values = randn(8)
    settled(x, "", 3.0)

    def is_past() -> bool:
        check(fn.act(x, value=3.0, what=""), values * 3)
        return isinstance(fn.act._last.call, GpuExpressCall)

    wait_until(is_past)
    for _ in range(3):
        check(fn.act(x, value=5.0), values * 5)  # what is left out has its default there
        check(fn.act(x=x, what="", value=7.0), values * 7)
    with pytest.raises(lz.InvalidArgument, match="multiple values"):
        fn.act(x, "", what="")
    with pytest.raises(lz.InvalidArgument, match="unexpected"):
        fn.act(x, other=1)


def test_methods_take_the_way_of_functions(there: int) -> None:
    total = fn.Total(soft_cupy.asarray(np.zeros(4, np.float32)))
    one = soft_cupy.asarray(np.ones(4, np.float32))
    for number in range(1, 41):
        total.add(one)
        if number % 10 == 0:
            assert total.found() == [float(number)] * 4
            check(total.on_gpu(one), np.full(4, float(number)))

    def is_past() -> bool:
        total.add(one)
        return isinstance(fn.Total._last.call, GpuExpressCall) and path_of(fn.Total.last_report()) == "express"

    wait_until(is_past)
    total.close()
    with pytest.raises(lz.InvalidArgument, match="closed"):
        total.add(one)


def test_a_shape_function_saves_the_copy(there: int) -> None:
    """It is asked at each call; what is returned besides is copied."""
    x, values = randn(5, 3)
    settled(x, function=fn.into)
    for number in range(10):
        check(fn.into(x), values * 2)
        report = fn.into.last_report()
        assert (path_of(report), report.copies, report.uncopied_bytes) == ("express", (), 2 * x.size * 4), number
        check(fn.into(x, False), values * 3)
        assert {copy.where for copy in fn.into.last_report().copies} == {"worker"}
    with pytest.raises(lz.InvalidArgument, match="missing a required argument"):
        fn.into()


def test_calls_in_turns_have_memory_for_their_own_results(there: int) -> None:
    x, values = randn(8, 4)
    for rows in (3, 5):
        settled(x, "rows", rows)
    for _ in range(20):
        for rows in (3, 5):
            check(fn.act(x, "rows", rows), values[:rows] * 2)
    assert path_of(fn.act.last_report()) == "express"
    assert len(fn.act.last_report().copies) == 1  # it did not wait there for memory


ANOTHER = """
import numpy
from tests.soft_gpu import soft_cupy
soft_cupy.install()
import layerzero as lz
from tests.process import gpu_functions as fn
lz.connect()
one = soft_cupy.asarray(numpy.ones(4, numpy.float32))
for _ in range({count}):
    fn.summed(one, {name!r})
assert fn.summed.last_report().selection.path == "express", fn.summed.last_report()
lz.synchronize()
lz.disconnect()
"""


def test_programs_share_a_workers_state_in_order(site: Site, there: int) -> None:
    """Each has a ring of its own; what both have added is there."""
    one, name, count = soft_cupy.asarray(np.ones(4, np.float32)), str(time.monotonic_ns()), 60
    settled(one, f"{name} before", function=fn.summed)
    with site.environment():
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "LAYERZERO_RUNTIME_DIR": str(site.folder)}
        program = [sys.executable, "-c", ANOTHER.format(count=count, name=name)]
        other = subprocess.Popen(program, env=environ, cwd=ROOT)
        for _ in range(count):
            fn.summed(one, name)
        assert other.wait(PATIENCE_S) == 0
    check(fn.summed(one, name), np.full(4, 2.0 * count + 1))


def test_nobody_waits_for_the_stream(there: int) -> None:
    x, values = randn(32)
    settled(x, function=fn.slow)
    finish()
    x.scale(3.0)
    result = fn.slow(x)
    assert path_of(fn.slow.last_report()) == "express"
    assert not driver.is_stream_idle(soft_cupy.current().ptr)
    x.fill(0.0)
    check(result + 1.0, values * 3 * 2 + 1)


def test_a_stream_of_its_own_and_one_that_is_captured(there: int) -> None:
    x, values = randn(8)
    settled(x)
    for number in range(12):
        with soft_cupy.stream():
            y = soft_cupy.asarray(values + number)
            check(fn.act(y), (values + number) * 2)
    driver.begin_capture(soft_cupy.current().ptr)
    try:
        with pytest.raises(lz.CudaGraphUnsafe, match="call the function outside of the CUDA graph's capture"):
            fn.act(x)
    finally:
        driver.end_capture(soft_cupy.current().ptr)
    check(fn.act(x), values * 2)


@pytest.mark.parametrize("count", [1, 40, 600])
def test_submitted_calls_pass_the_broker_in_any_number(there: int, count: int) -> None:
    """More than a ring has room for; they are taken in any order."""
    x, values = randn(4)
    settled(x)
    futures = [fn.act.submit(x, "", float(n)) for n in range(count)]
    for n in random.Random(0).sample(range(count), count):
        check(futures[n].result(), values * n)
        assert futures[n].report.attempts == 1
    assert [float(one.get()[0]) for one in fn.act.map([x] * 50)] == [float(values[0] * 2)] * 50


def test_a_result_that_is_asked_for_too_early_can_be_asked_for_again(there: int) -> None:
    x, values = randn(4)
    pid = settled(x)
    settled_pause = fn.act.submit(x, "pause", 1.0)
    second = fn.act.submit(x)
    wait_until(lambda: is_paused(pid))
    assert not second.done()
    for future in (settled_pause, second):
        with pytest.raises(TimeoutError, match="ask again"):
            future.result(timeout=0.01)
    os.kill(pid, signal.SIGCONT)
    check(settled_pause.result(), values)
    check(second.result(), values * 2)


def test_results_that_nobody_takes_give_their_memory_back(there: int) -> None:
    """What the calls lent is theirs until they have ended, whoever asks for them."""
    x, _ = randn(4)
    settled(x)
    gc.collect()
    before = pool.stats()["slots"]
    for _ in range(5):
        [fn.act.submit(x) for _ in range(100)]

    def are_back() -> bool:
        settled(x)
        return pool.stats()["slots"] <= before + 2 * 64 + 2

    wait_until(are_back)


@pytest.mark.parametrize("is_synchronized", [True, False])
def test_a_result_that_nobody_takes_keeps_no_argument(there: int, *, is_synchronized: bool) -> None:
    """From the next look at its ring."""
    x, values = randn(64)
    settled(x)
    y = soft_cupy.asarray(values)
    settled(y)
    kept = weakref.ref(y)
    sent = fn.act.submit(y)
    assert isinstance(sent._call, GpuExpressCall)
    wait_until(sent.done) if not is_synchronized else None
    del sent, y

    def is_free() -> bool:
        lz.synchronize() if is_synchronized else fn.act(x)
        gc.collect()
        return kept() is None

    wait_until(is_free)


def test_threads_get_their_own_results(there: int) -> None:
    x, values = randn(16)
    settled(x)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        with soft_cupy.stream():
            for n in range(30):
                y = soft_cupy.asarray(values * np.float32(seed))
                future = fn.act.submit(y, "", float(n))
                if not np.allclose(fn.act(y).get(), values * seed * 2, rtol=1e-5):
                    wrong.append((seed, n))
                if not np.allclose(future.result().get(), values * seed * n, rtol=1e-5):
                    wrong.append((seed, n, "submitted"))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(PATIENCE_S)
    assert wrong == []


@pytest.mark.parametrize("transport", ["vmm", "staged", "copied"])
def test_memory_crosses_in_other_ways(site: Site, store: Path, transport: str) -> None:
    """What is copied around a call is copied in its order."""
    lz.disconnect()
    one = new_site(store)
    one.environ["LAYERZERO_GPU_TRANSPORT"] = transport
    try:
        with one.environment():
            fn.THERE.build(quiet=True)
            one.start().connect()
            fn.prepare()
            x, values = randn(8, 4)
            paths = set()
            for number in range(30):
                check(fn.act(x, "", float(number)), values * number)
                found = fn.several(x, x)
                check(found["sum"], values * 2)
                check(found["parts"][1][0], values * 3)
                check(fn.into(x), values * 2)
                report = fn.into.last_report().selection
                assert any(f"memory crosses by {transport}" in note for note in report.notes)
                paths.add(report.path)
            assert "express" in paths
            lz.disconnect()
    finally:
        one.stop()
    with site.environment():
        site.connect()
