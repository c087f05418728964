"""Functions with arrays on a GPU, through a real broker, over the GPU of threads (tests/soft_gpu): what crosses, in
which order, and what is refused. tests/gpu/test_functions.py has torch's on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tests.process import forks
from tests.process import gpu_functions as fn
from tests.process.gpu_site import SOFT, finish, randn, soft
from tests.process.harness import Site, wait_until
from tests.soft_gpu import soft_cupy, soft_jax
from tests.soft_gpu.soft_gpu import driver

import layerzero as lz
from layerzero.functions import calls
from layerzero.ipc.functions import frames

__all__ = ["soft"]
NO_STREAM = r": call with an array on that GPU .*, or return it with \.cpu\(\)"


@pytest.fixture(scope="module")
def site(soft: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker with the GPU, whose workers may open others' memory as a driver does."""
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01, backoff_max_s=0.01)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    with one.environment():
        fn.THERE.build(quiet=True)
        fn.PAIR.build(quiet=True)
        fn.BARE.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


@pytest.fixture(autouse=True)
def there(site: Site) -> int:
    """The worker's pid; it has the GPU."""
    return fn.prepare()


def test_values_that_are_too_many_lend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lent for the call is not kept from others."""
    lent: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(frames, "MAX_HEAD_BYTES", 4000)
        patch.setattr(calls, "lend", lambda *_: mock.Mock(close=lambda: lent.append("closed"), outs=[]))
        with pytest.raises(lz.InvalidArgument, match="put bytes, texts and numbers into arrays"):
            fn.act(randn(4, 4)[0], "y" * 4000)
    assert lent == ["closed"]


def test_an_array_crosses_as_it_lies_and_its_result_comes_back(there: int) -> None:
    """The first result needs memory: it waits there, with a second trip; the next one is as the last was."""
    x, values = randn(16, 24)
    for trip in range(3):
        result = fn.scaled(x)
        assert (type(result), result.shape) == (soft_cupy.ndarray, (16, 24))
        np.testing.assert_array_equal(result.get(), values * 2)
        report = fn.scaled.last_report()
        assert report.selection is not None
        assert report.selection.worker_pid == there
        copies = [(copy.arg, copy.nbytes, copy.where) for copy in report.copies]
        one = [("result", x.size * 4, "worker")]
        assert copies == one or (trip == 0 and copies == 2 * one)  # it waited there, as a copy
        assert report.uncopied_bytes == x.size * 4
        assert any("memory crosses by ipc" in note for note in report.selection.notes), trip


def test_results_of_any_shape_and_number(there: int) -> None:
    """Nested, beside other values, of other sizes than the last time, empty, and what was given."""
    for rows in (3, 5, 5, 0, 2):
        (x, xs), (y, ys) = randn(rows, 4), randn(4)
        found = fn.several(x, x)
        np.testing.assert_array_equal(found["sum"].get(), xs + xs)
        np.testing.assert_array_equal(found["parts"][0].get(), xs * 2)
        np.testing.assert_array_equal(found["parts"][1][0].get(), xs * 3)
        assert (found["parts"][1][1:], found["size"]) == (("text", None), 4 * rows)
        np.testing.assert_array_equal(fn.same(x).get(), xs)
        np.testing.assert_array_equal(fn.same(y).get(), ys)


def test_views_are_seen_as_they_lie(there: int) -> None:
    """Transposed, cut, with steps; reversed ones are copied, which the report says."""
    x, values = randn(6, 8)
    found = fn.described(x, x.T, x[2:4, ::2], x[3])
    parts = (values, values.T, values[2:4, ::2], values[3])
    assert [(kind, shape, held) for kind, shape, _, held in found] == [
        ("ndarray", part.shape, part.tolist()) for part in parts
    ]
    assert [strides for _, _, strides, _ in found] == [part.strides for part in parts]
    assert not [copy for copy in fn.described.last_report().copies if copy.arg == "an argument"]
    [(_, shape, _, held)] = fn.described(x[::-1])
    assert (shape, held) == ((6, 8), values[::-1].tolist())
    assert "strides" in fn.described.last_report().copies[0].reason


def test_arrays_of_the_cpu_may_be_beside_them(there: int) -> None:
    """Each as it lies where it is."""
    x, values = randn(8)
    shared = lz.share(np.arange(5))
    found = fn.several.submit(x, x).result()
    np.testing.assert_array_equal(found["sum"].get(), values * 2)
    back = fn.both(x, shared)
    np.testing.assert_array_equal(back[0].get(), values)
    np.testing.assert_array_equal(back[1], shared)


def test_nobody_waits_for_the_stream(there: int) -> None:
    """The caller goes on at once, and what it enqueues sees the result; so does the function what was enqueued
    before."""
    x, values = randn(32)
    fn.slow(x)  # its first time is waited for
    finish()
    x.scale(3.0)
    result = fn.slow(x)
    assert not driver.is_stream_idle(soft_cupy.current().ptr)
    x.fill(0.0)
    more = result + 1.0
    np.testing.assert_allclose(more.get(), values * 3 * 2 + 1, rtol=1e-6)


def test_state_is_ordered_whatever_stream_a_call_is_of(there: int) -> None:
    """An object adds what comes by two streams, and tells by a call without arrays on the GPU."""
    total = fn.Total(randn(4)[0] * 0.0)
    for number in range(6):
        if number % 2:
            with soft_cupy.stream():
                total.add(soft_cupy.asarray(np.full(4, number, np.float32)))
        else:
            total.add(soft_cupy.asarray(np.full(4, number, np.float32)))
    assert total.found() == [15.0] * 4
    np.testing.assert_array_equal(total.on_gpu(soft_cupy.asarray(np.ones(4, np.float32))).get(), np.full(4, 15.0))
    total.close()


def test_workers_of_a_pool_have_streams_of_their_own(there: int, tmp_path: Path) -> None:
    """Calls of one stream go to one worker, in whose stream they are in order; others may be elsewhere."""
    pids = {future.result() for future in [fn.prepare_pair.submit(str(tmp_path)) for _ in range(2)]}
    assert len(pids) == 2
    x, values = randn(8)
    seen = []
    for _ in range(4):
        with soft_cupy.stream():
            found = [future.result() for future in [fn.spread.submit(x) for _ in range(12)]]
            for result, _ in found:
                np.testing.assert_array_equal(result.get(), values + 1)
            seen.append({pid for _, pid in found})
    assert [len(one) for one in seen] == [1] * 4
    assert set.union(*seen) == pids


def test_what_stays_is_a_copy_and_generators_give_items_of_the_cpu(there: int) -> None:
    """The caller may write its memory meanwhile."""
    x, values = randn(4)
    keeping = fn.same.options(keep=True)
    kept = keeping(x)
    assert [(copy.where, copy.nbytes) for copy in keeping.last_report().copies] == [("worker", 16)]
    assert keeping.last_report().uncopied_bytes == 0
    x.fill(7.0)
    found = fn.described(kept)
    assert found[0][3] == values.tolist()
    kept.close()
    y, held = randn(3)
    for number, row in enumerate(fn.rows(y)):
        np.testing.assert_allclose(row, held * number)


def test_items_of_generators_are_on_the_gpu_where_they_were_made_there(there: int) -> None:
    """In the order of the stream that takes them; the caller may write to what it gave and got meanwhile."""
    x, values = randn(4)
    stream = fn.steps(x, 12)
    for number in range(12):
        with soft_cupy.stream() if number % 4 == 1 else contextlib.nullcontext():
            item = next(stream)
            x.fill(7.0)
            found = item if number % 3 else item["x"]
            expected = values + np.float32(number + 1)
            np.testing.assert_allclose(found.get(), expected[: found.size], rtol=1e-5)
            assert number % 3 or item["of"] == number
            found.fill(-1.0)
    assert list(stream) == []
    with fn.steps(x, 5) as left:
        assert next(left)["x"].size == 4


def test_items_of_a_generator_that_has_jaxs_arrays_are_jaxs(there: int) -> None:
    """Which shows no stream: they are there for whatever JAX does with them. Methods likewise, and `async for`."""
    values = np.arange(4, dtype=np.float32)
    x = soft_jax.array(values)
    np.testing.assert_array_equal(fn.scaled(x).numpy(), values * 2)
    kept: list[tuple[soft_jax.Array, np.ndarray]] = []
    for number, item in enumerate(fn.steps(x, 9)):
        found = item if number % 3 else item["x"]
        assert type(found) is soft_jax.Array
        kept.append((found, (values + np.float32(number + 1))[: len(found.numpy())]))
    with fn.Total(x) as total:
        for number, found in enumerate(total.later(x, 3)):
            kept.append((found, values + values * number))

    async def taken() -> list[soft_jax.Array]:
        return [item async for item in fn.until(x, 3, "")]

    kept += [(found, values * number) for number, found in enumerate(asyncio.run(taken()))]
    assert len(kept) == 15
    for found, expected in kept:
        np.testing.assert_array_equal(found.numpy(), expected)


def test_an_item_does_not_wait_for_the_next_one(there: int, tmp_path: Path) -> None:
    """What is done with it may be what the next one needs."""
    x, values = randn(4)
    gate = tmp_path / "gate"
    with soft_cupy.stream(), fn.awaited.options(timeout_s=20)(x, str(gate)) as items:
        np.testing.assert_allclose((next(items) * 2.0).get(), (values + 1) * 2, rtol=1e-6)
        driver.synchronize_stream(soft_cupy.current().ptr)
        gate.touch()
        np.testing.assert_allclose(next(items).get(), values + 2, rtol=1e-6)


def test_items_of_generator_methods_are_on_the_gpu_where_they_were_called_with_such_arrays(there: int) -> None:
    """As those of generator functions; also by the class, and of asynchronous ones."""
    x, values = randn(4)
    total = fn.Total(x * 0.0)
    stream = total.steps.options(timeout_s=20)(x, 12)
    for number in range(12):
        with soft_cupy.stream() if number % 4 == 1 else contextlib.nullcontext():
            item = next(stream)
            x.fill(7.0)  # it has a copy
            found = item if number % 3 else item["sum"]
            np.testing.assert_allclose(found.get(), (values * np.float32(number + 1))[: found.size], rtol=1e-5)
            assert number % 3 or item["of"] == number
            found.fill(-1.0)
    assert list(stream) == []
    one = soft_cupy.asarray(np.ones(4, np.float32))
    by_class = [item if number % 3 else item["sum"] for number, item in enumerate(fn.Total.steps(total, one, 3))]
    for number, found in enumerate(by_class):
        np.testing.assert_allclose(found.get(), (values * 12 + number + 1)[: found.size], rtol=1e-5)
    for number, found in enumerate(total.later(one, count=4)):
        np.testing.assert_allclose(found.get(), values * 12 + 3 + number, rtol=1e-5)
    total.close()


def test_items_on_the_gpu_of_a_call_without_such_arrays_are_refused(there: int) -> None:
    """Nobody knows whose library and stream they are for. What was before is delivered, and the text says what to
    do."""
    with fn.Total(randn(4)[0]) as total:
        for stream, first, item in ((total.all(), 1, "item"), (fn.made(2), 0, r"item\[0\]")):
            assert next(stream) == first
            with pytest.raises(lz.InvalidArgument, match=NO_STREAM + rf".* has run, and {item}: an array on a GPU"):
                next(stream)
            assert list(stream) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_ends_with_what_its_function_comes_to_after_the_items_before(there: int, count: int) -> None:
    x, values = randn(4)
    for end, kind, text in (
        ("raise", lz.RemoteError, "LookupError: no more"),
        ("strange", lz.InvalidArgument, r"until has run, and item\[1\]: object cannot go"),
        ("", StopIteration, None),
        ("die", lz.BackendError, "until in there"),
    ):
        stream = fn.until(x, count, end)
        for number in range(count):
            np.testing.assert_allclose(next(stream).get(), values * number, rtol=1e-6)
        finish()  # else a later call tells of what its worker has died with, too
        with pytest.raises(kind, match=text):
            next(stream)
        assert list(stream) == []
    wait_until(lambda: fn.prepare() != there)
    assert len(list(fn.until(x, 3, ""))) == 3


def test_streams_that_are_left_early_leave_no_memory_behind(there: int) -> None:
    """On neither side: closed, collected, refused, and raised in."""
    x, _ = randn(4)
    total = fn.Total(x)

    def leave(count: int) -> None:
        for number in range(count):
            with fn.steps(x, 5) as stream:
                assert next(stream)["x"].size == 4
            assert next(total.steps(x, 5))["sum"].size == 2  # collected
            with total.steps(x, 5):
                pass
            for end in ("raise", "strange"):
                items = fn.until(x, number % 3, end)
                with pytest.raises(lz.LayerZeroError):
                    list(items)
                items.close()

    leave(3)
    before = fn.live_blocks()
    there_before = fn.blocks()
    leave(10)
    wait_until(lambda: fn.blocks() <= there_before)
    assert fn.live_blocks() <= before
    total.close()


def test_a_map_in_chunks_goes_call_by_call_where_arrays_are_on_the_gpu(there: int) -> None:
    """The hint changes no result: they are those of single calls, in their order, of each kind of arguments."""
    sizes = (1, 2, 7, 100)
    pairs = [randn(number % 5 + 1) for number in range(20)]
    for size in sizes:
        found = list(fn.scaled.map([x for x, _ in pairs], range(20), chunksize=size))
        for number, (result, (_, values)) in enumerate(zip(found, pairs, strict=True)):
            np.testing.assert_allclose(result.get(), values * number, rtol=1e-6)
        assert bool(fn.scaled.last_report().not_chunked) == (size > 1)
        ones = [soft_cupy.asarray(np.ones(2, np.float32)) for _ in range(40)]
        sums = [one.get()[0] for one in fn.summed.map(ones, [f"map {size}"] * 40, chunksize=size)]
        assert sums == list(range(1, 41))
    assert "not chunked: an array on a GPU" in str(fn.scaled.last_report())
    fn.scaled(pairs[0][0])
    assert not fn.scaled.last_report().not_chunked


def test_a_map_has_chunks_with_arrays_on_the_gpu_beside_others(there: int) -> None:
    """Deep in a value, and in one call alone; chunks without cross as one."""
    x, values = randn(3)
    given = [1, 2, 3, {"x": [x]}, 5, 6, 7, x]
    results = fn.same.map(given, chunksize=2)
    seen = []
    for one in given:
        found = next(results)
        seen.append((fn.same.last_report().function.endswith("calls as one)"), bool(fn.same.last_report().not_chunked)))
        if isinstance(one, int):
            assert found == one
        else:
            np.testing.assert_array_equal((found["x"][0] if isinstance(found, dict) else found).get(), values)
    assert seen == [(True, False)] * 2 + [(False, True)] * 2 + [(True, False)] * 2 + [(False, True)] * 2
    assert list(results) == []


def test_what_a_call_of_such_a_map_comes_to_is_at_its_place(there: int) -> None:
    """After the results before it; no more than 32 calls are ahead."""
    x, values = randn(4)
    taken = []

    def each() -> Iterator[object]:
        for number in range(500):
            taken.append(number)
            yield x

    results = fn.act.map(each(), ["raise" if number == 70 else "" for number in range(500)], range(500), chunksize=50)
    for number in range(70):
        np.testing.assert_allclose(next(results).get(), values * number, rtol=1e-5)
    with pytest.raises(lz.RemoteError, match="LookupError: 70"):
        next(results)
    assert fn.act.last_report().not_chunked
    assert list(results) == []
    assert len(taken) <= 71 + 32
    what = ["", "strange", "", "die", ""]
    strange = fn.act.map([x] * 5, what, [1.0, {1}, 1.0, 1.0, 1.0], chunksize=5)
    with pytest.raises(lz.InvalidArgument, match="set cannot go"):
        list(strange)
    fn.act(x)  # whose result the next ones have memory for: what waits there is lost with the worker
    dying = fn.act.map([x] * 5, ["", "", "", "", "end"], range(1, 6), chunksize=5)
    for number in range(1, 5):
        np.testing.assert_allclose(next(dying).get(), values * number, rtol=1e-5)
    with pytest.raises(lz.BackendError, match="it may have run in part"):
        next(dying)
    wait_until(lambda: fn.prepare() != there)


def test_memory_of_the_caller_is_the_argument_out(there: int) -> None:
    """With a shape function nothing is copied; what is returned besides is."""
    x, values = randn(5, 3)
    for _ in range(2):
        np.testing.assert_array_equal(fn.into(x).get(), values * 2)
        assert fn.into.last_report().copies == ()
        assert fn.into.last_report().uncopied_bytes == 2 * x.size * 4
    np.testing.assert_array_equal(fn.into.local(x).get(), values * 2)
    assert fn.into.explain(x).uncopied_bytes == x.size * 4
    np.testing.assert_array_equal(fn.into(x, False).get(), values * 3)
    assert {copy.where for copy in fn.into.last_report().copies} == {"worker"}


def test_what_cannot_go_is_refused_by_name(there: int) -> None:
    """The first line says what to do."""
    x, _ = randn(4)
    with pytest.raises(lz.RemoteError, match="no such thing"):
        fn.fail(x)
    with pytest.raises(lz.InvalidArgument, match=NO_STREAM) as told:
        fn.made_there()
    told.match("made_there has run, and result: an array on a GPU, and the call names no stream for it")
    driver.begin_capture(soft_cupy.current().ptr)
    try:
        with pytest.raises(lz.CudaGraphUnsafe, match="call the function outside of the CUDA graph's capture"):
            fn.scaled(x)
    finally:
        driver.end_capture(soft_cupy.current().ptr)


def test_a_worker_without_the_gpu_says_so(there: int) -> None:
    """Nothing goes to the CPU in silence; ops of the same process are not touched by it."""
    x, values = randn(4)
    with pytest.raises(
        lz.NoTransport, match=r"\Apass arrays of the CPU to .*, or have its worker see the GPU: "
    ) as told:
        fn.without_a_gpu(x)
    assert "does not see" in str(told.value)
    np.testing.assert_array_equal(fn.scaled(x).get(), values * 2)
    assert fn.without_a_gpu(3) == 3


def test_a_worker_that_dies_in_a_call_takes_no_stream_along(there: int) -> None:
    """The caller hears of it, and its stream goes on."""
    x, values = randn(4)
    with pytest.raises(lz.BackendError, match="it may have run in part"):
        fn.leave(x, 3)
    finish()
    assert fn.prepare() != there
    np.testing.assert_array_equal(fn.scaled(x).get(), values * 2)


def test_a_worker_that_dies_after_its_answer_is_told_of_by_the_next_call(there: int, tmp_path: Path) -> None:
    """What it had enqueued is not run again: its client has read the answer."""
    gate = tmp_path / "gate"
    gate.touch()
    x, values = randn(4)
    result = fn.leave_later(x, str(gate))
    assert fn.prepare.last_report().selection is not None
    os.kill(there, signal.SIGKILL)
    del result
    finish()
    wait_until(lambda: fn.prepare() != there)
    with pytest.raises(lz.LayerZeroError, match="an earlier call on the GPU, function, failed"):
        wait_until(lambda: fn.scaled(x) is None)
    np.testing.assert_array_equal(fn.scaled(x).get(), values * 2)
