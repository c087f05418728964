"""Calls of functions with arrays on a GPU that pass the broker, over the GPU of threads: onto the ring of their worker,
which says when the function has returned. tests/process/test_gpu_functions.py has what they are before."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import forks
from tests.process import gpu_functions as fn
from tests.process.gpu_site import SOFT, finish, randn, soft
from tests.process.harness import PATIENCE_S, ROOT, Site, is_paused, wait_until
from tests.process.test_express import forked
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.functions.gpu_express import GpuExpressCall

__all__ = ["soft"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def site(soft: None, store: Path) -> Iterator[Site]:
    """A broker with the GPU, whose workers may open others' memory as a driver does."""
    forks.start_server()
    one = new_site(store)
    with one.environment():
        fn.THERE.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


def new_site(store: Path, **settings: Any) -> Site:
    one = Site(store, restart_budget=100, backoff_s=0.01, backoff_max_s=0.01, **settings)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    return one


@pytest.fixture(autouse=True)
def there(site: Site) -> int:
    """The worker's pid; it has the GPU."""
    return fn.prepare()


@pytest.fixture
def own(site: Site, store: Path) -> Iterator[Site]:
    """A broker for one test, whose worker dies: what has died is not given a ring for a while."""
    lz.disconnect()
    one = new_site(store, timeout_s=30)
    with one.environment():
        fn.THERE.build(quiet=True)
        one.start().connect()
        fn.prepare()
        yield one
        lz.disconnect()
    one.stop()
    with site.environment():
        site.connect()


def path_of(report: Any) -> str:
    return str(report.selection.path)


def settled(x: Any, *args: Any, function: Any = fn.act) -> int:
    """Until such calls take neither side's long way: the worker's pid."""

    def is_settled() -> bool:
        function(x, *args)
        return isinstance(function._last.call, GpuExpressCall) and path_of(function.last_report()) == "express"

    wait_until(is_settled)
    assert is_settled()
    return int(function.last_report().selection.worker_pid)


def check(result: Any, expected: Any) -> None:
    np.testing.assert_allclose(result.get(), expected, rtol=1e-6)


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


def test_who_asks_whether_a_call_is_done_hears_of_a_death(own: Site) -> None:
    """Nobody waits for it."""
    x, _ = randn(4)
    pid = settled(x)
    sent = fn.act.submit(x, "pause", 1.0)
    assert isinstance(sent._call, GpuExpressCall)
    wait_until(lambda: is_paused(pid))
    assert not sent.done()
    os.kill(pid, signal.SIGKILL)
    wait_until(sent.done)
    with pytest.raises(lz.BackendError):
        sent.result()


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


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_death_is_of_one_call(own: Site, tmp_path: Path, *, is_sent: bool) -> None:
    """One that is idempotent is made once more, a fallback has the arguments, and the caller's stream goes on."""
    x, values = randn(4)
    again = fn.act.options(idempotent=True)
    safe = fn.act.options(fallback=lambda x, *_: x * 5.0)
    for function in (again, safe, fn.act):
        pid = settled(x, function=function)
    call = (lambda f, *a: f.submit(*a).result()) if is_sent else (lambda f, *a: f(*a))
    finish()
    with pytest.raises(lz.BackendError, match="it may have run in part: idempotent=True"):
        call(fn.act, x, "die")
    finish()
    fn.prepare()
    check(call(fn.act, x), values * 2)
    assert fn.act.last_report().selection.worker_pid != pid
    settled(x, function=safe)
    finish()
    check(call(safe, x, "die", 7), values * 5)
    fn.prepare()
    settled(x, function=again)
    finish()
    with pytest.raises(lz.NoTransport):  # a new worker of the tests has no GPU before it was prepared
        call(again, x, "die once", str(tmp_path / "died"))
    assert "BACKEND_ERROR" in again.last_report().failures[0]


def test_a_worker_that_dies_after_its_answer_is_told_of_by_the_next_call(own: Site, tmp_path: Path) -> None:
    """What the function had enqueued is not run again: its client has read the answer."""
    gate = tmp_path / "gate"
    x, values = randn(4)
    pid = settled(x, str(gate), function=fn.leave_later)
    finish()
    gate.touch()
    result = fn.leave_later(x, str(gate))
    assert path_of(fn.leave_later.last_report()) == "express"
    os.kill(pid, signal.SIGKILL)
    del result
    finish()
    wait_until(lambda: fn.prepare() != pid)
    with pytest.raises(lz.LayerZeroError, match="an earlier call on the GPU, function, failed"):
        wait_until(lambda: fn.act(x) is None)
    check(fn.act(x), values * 2)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_deadline_is_of_the_call_that_took_too_long(own: Site, *, is_sent: bool) -> None:
    """Kept by who waits for it; its worker is killed."""
    x, values = randn(4)
    quick = fn.act.options(timeout_s=0.5)
    settled(x, "hang" * 0, 2.0, function=quick)
    pid = settled(x, function=quick)
    start_s = time.monotonic()
    with pytest.raises(lz.DeadlineExceeded, match=r"longer than|took|0\.5"):
        quick.submit(x, "hang").result() if is_sent else quick(x, "hang")
    assert time.monotonic() - start_s < 0.9 * PATIENCE_S
    finish()
    wait_until(lambda: fn.prepare() != pid)
    check(quick(x), values * 2)


def test_a_deadline_that_nobody_waits_for_is_kept_by_the_broker(own: Site) -> None:
    """It reads it off the ring."""
    x, values = randn(4)
    quick = fn.act.options(timeout_s=0.5)
    pid = settled(x, function=quick)
    finish()
    hanging = quick.submit(x, "hang")
    wait_until(lambda: own.backend(fn.THERE.backend)["pid"] != pid)
    with pytest.raises(lz.DeadlineExceeded):
        hanging.result()
    fn.prepare()
    check(quick(x), values * 2)


def test_a_forked_child_does_not_wait_for_its_parents_calls(there: int) -> None:
    x, values = randn(4)
    pid = settled(x)
    first, second = fn.act.submit(x, "pause", 1.0), fn.act.submit(x)
    wait_until(lambda: is_paused(pid))

    def ask() -> str:
        with pytest.raises(lz.BrokerLost) as refusal:
            second.result()
        return refusal.value.message

    assert forked(ask)().endswith("its answer goes to the parent; call again here")
    os.kill(pid, signal.SIGCONT)
    check(first.result(), values)
    check(second.result(), values * 2)


def test_an_interrupt_keeps_what_was_lent(there: int) -> None:
    """The worker may write to it until it is done; later calls have theirs."""
    x, values = randn(4)
    pid = settled(x)
    settled(x, "pause" * 0, 3.0)

    def interrupt() -> None:
        wait_until(lambda: is_paused(pid))
        signal.raise_signal(signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        fn.act(x, "pause", 1.0)
    helper.join(PATIENCE_S)
    gc.collect()  # what was lent is not given to anybody else
    os.kill(pid, signal.SIGCONT)
    for number in range(10):
        check(fn.act(x, "", float(number)), values * number)


def test_closing_the_session_cancels_calls_that_have_not_ended(site: Site, there: int) -> None:
    x, values = randn(4)
    pid = settled(x)
    futures = [fn.act.submit(x, "pause", 1.0), fn.act.submit(x)]
    wait_until(lambda: is_paused(pid))
    closing = threading.Thread(target=lz.disconnect)
    closing.start()
    os.kill(pid, signal.SIGCONT)
    closing.join(PATIENCE_S)
    for future in futures:
        with contextlib.suppress(lz.Cancelled, lz.NotConnected):
            future.result(timeout=30)
    site.connect()
    fn.prepare()
    check(fn.act(x), values * 2)


@pytest.mark.parametrize(("long_s", "short_s", "timeout_s"), [(1.5, 0.7, 1.2), (2.5, 0.05, 0.5)])
def test_waiting_for_the_worker_does_not_count(
    own: Site, tmp_path: Path, long_s: float, short_s: float, timeout_s: float
) -> None:
    """A call that another one of its worker is before has its whole time from when it is begun."""
    x, values = randn(4)
    log, other = tmp_path / "log", tmp_path / "other"
    quick = fn.act.options(timeout_s=timeout_s)
    found: list[Any] = []
    is_settled = threading.Event()

    def run_long() -> None:
        with soft_cupy.stream():
            settled(x, "note", f"{other} 0")
            is_settled.set()
            try:
                found.append(fn.act(x, "note", f"{log} {long_s}"))
            except lz.LayerZeroError as exc:
                found.append(exc)
            found.append(path_of(fn.act.last_report()))

    log.touch()
    with soft_cupy.stream():
        settled(x, "note", f"{other} 0", function=quick)
        first = threading.Thread(target=run_long)
        first.start()
        assert is_settled.wait(PATIENCE_S)
        wait_until(lambda: log.read_text() == "run\n")
        check(quick(x, "note", f"{other} {short_s}"), values * 2)
        assert path_of(quick.last_report()) == "express"
    first.join(PATIENCE_S)
    check(found[0], values * 2)
    assert (found[1], log.read_text()) == ("express", "run\n")


def test_who_is_not_to_blame_does_not_run_twice(own: Site, tmp_path: Path) -> None:
    """An earlier call hangs on the GPU beyond its time, while a function runs: that ends in an error, and one that is
    idempotent is made again."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    x, values = randn(4)
    hangs = fn.leave_later.options(timeout_s=0.5)
    settled(x, str(gate), function=hangs)
    settled(x, "note", f"{log} 0")
    before = log.read_text().count("run")
    finish()
    gate.touch()
    result = hangs(x, str(gate))
    assert path_of(hangs.last_report()) == "express"
    with soft_cupy.stream():
        y = soft_cupy.asarray(values)
        with pytest.raises(lz.BackendError, match="it may have run in part: idempotent=True"):
            fn.act(y, "note", f"{log} 20")
    gate.unlink()
    del result
    assert log.read_text().count("run") == before + 1
