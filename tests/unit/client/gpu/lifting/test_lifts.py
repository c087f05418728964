"""Calls that the client launches itself: what is asked of the broker, what is launched, and what goes the ordinary way.
All of it both ways: by what is compiled, and by the Python that does the same."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_lifts import CODE, at, floats, kernel, lifted_silu, lifted_triple
from tests.unit.client.gpu.lifting.rig import ORDINARY, Rig, close, randn, silu, synchronize, wait_until

from layerzero.client.connection.call import Request
from layerzero.client.gpu.lifting import faults, lifts
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.planning import plans
from layerzero.ipc.errors import BackendError, Busy
from layerzero.ipc.lifting.form import Copy, Fill, Lifted, digest
from layerzero.ipc.vocabulary.tensors import TensorSpec

# --- launching


def test_values_are_those_of_the_kernel_for_many_shapes(rig: Rig) -> None:
    rig.offer_silu()
    for shape in [(7,), (3, 5), (1,), (2, 3, 4), (1000,)]:
        x, values = randn(*shape)
        close(rig.settle(lambda: rig.silu(x)), silu(values))  # noqa: B023
    ordinary, asked = rig.ordinary, rig.broker.count()
    for shape in [(7,), (3, 5), (1,), (2, 3, 4), (1000,)]:
        for seed in range(3):
            x, values = randn(*shape, seed=seed)
            close(rig.silu(x), silu(values))
    assert (rig.ordinary, rig.broker.count()) == (ordinary, asked)


def test_machine_code_is_fetched_and_loaded_once(rig: Rig, kernels: Any) -> None:
    rig.offer_silu()
    for count in (3, 4, 5):
        x, values = randn(count)
        close(rig.settle(lambda: rig.silu(x)), silu(values))  # noqa: B023
    assert rig.broker.fetched.count(digest(CODE)) == 1
    assert (len(rig.broker.fetched), kernels.loads) == (4, 1)


def test_a_new_route_that_the_broker_has_in_store_is_lifted_at_its_first_call(rig: Rig) -> None:
    rig.offer_silu()
    rig.is_armed = False
    x, values = randn(12)
    close(rig.silu(x), silu(values))
    assert (rig.ordinary, rig.broker.count()) == (0, 1)
    close(rig.silu(x), silu(values))
    assert (rig.ordinary, rig.broker.count()) == (0, 1)


def test_out_is_written_in_place(rig: Rig) -> None:
    rig.offer_silu()
    (x, values), (out, _) = randn(9), randn(9, seed=1)
    assert rig.settle(lambda: rig.silu(x, out=out)) is out
    close(out, silu(values))
    more, other = randn(9, seed=2)
    assert rig.silu(more, out=out) is out
    close(out, silu(other))


def test_out_that_shares_memory_with_an_input_goes_the_ordinary_way(rig: Rig) -> None:
    rig.offer_silu()
    x, values = randn(256)
    out, _ = randn(128)
    rig.settle(lambda: rig.silu(x[:128], out=out))
    assert rig.silu(x[:128], out=x[:128]) is ORDINARY
    assert rig.silu(x[:128], out=x[64:192]) is ORDINARY
    assert rig.silu(x[64:192], out=x[:128]) is ORDINARY
    close(rig.silu(x[:128], out=x[128:]), silu(values[:128]))


def lifted_append(route: Any) -> Lifted:
    key, _, k_cache, v_cache, *_ = route.plan.inputs
    (count, heads, dim), rows = key.shape, k_cache.shape[0] * k_cache.shape[1]
    steps = [
        kernel("append", at("input", n), at("output", n), at("input", 4), count, heads * dim, rows, 0) for n in range(2)
    ]
    return Lifted(
        "append_kv",
        "one.append_kv",
        route.plan.inputs,
        (k_cache, v_cache),
        {},
        (4, 4, 16, 16, 8, 0, 0, 16, 16),
        (),
        tuple(steps),
    )


def test_ops_in_place_write_to_the_callers_tensors(rig: Rig) -> None:
    rig.offer("append_kv", lifted_append)
    (key, keys), (value, values) = randn(3, 2, 4), randn(3, 2, 4, seed=1)
    caches = [soft_cupy.asarray(np.zeros((4, 5, 2, 4), np.float32)) for _ in range(2)]
    slots = soft_cupy.asarray(np.array([1, 7, -1]))
    assert rig.settle(lambda: rig.append_kv(key, value, *caches, slots)) is None
    for cache, rows in zip(caches, (keys, values), strict=True):
        flat = cache.get().reshape(20, 2, 4)
        np.testing.assert_array_equal(flat[[1, 7]], rows[:2])
        assert not np.delete(flat, [1, 7], axis=0).any()
    assert rig.broker.asked[0][1]["alignments"] == [256] * 5 + [0, 0, 256, 256]
    assert rig.append_kv(key, value, caches[0], caches[0], slots) is ORDINARY  # which refuses it


def test_memory_that_is_aligned_otherwise_is_another_call(rig: Rig) -> None:
    """And one that the lifted call cannot work on goes the ordinary way."""
    rig.broker.answers["silu"] = lambda route, alignments: (
        rig.broker.ready(lifted_silu(route.plan.inputs[0], alignments=(16, 16)), rig.page.lift_epoch)
        if alignments[0] >= 16
        else {"state": "refused", "reason": "NOT_YET", "detail": "no"}
    )
    x, values = randn(40)
    close(rig.settle(lambda: rig.silu(x[4:14])), silu(values[4:14]))
    close(rig.settle(lambda: rig.silu(x[:10])), silu(values[:10]))
    assert rig.silu(x[1:11]) is ORDINARY
    wait_until(lambda: rig.broker.count() == 3)
    assert rig.silu(x[1:11]) is ORDINARY
    assert [params["alignments"] for _, params in rig.broker.asked] == [[16, 256], [256, 256], [4, 256]]
    close(rig.silu(x[8:18]), silu(values[8:18]))
    assert rig.silu(x[4:14], out=x[21:31]) is ORDINARY


def test_other_gpus_and_strides_have_other_keys(rig: Rig) -> None:
    rig.offer_silu()
    x, values = randn(6, 6)
    close(rig.settle(lambda: rig.silu(x)), silu(values))
    assert rig.silu(x.T) is ORDINARY
    moved = soft_cupy.ndarray(x.shape, x.dtype, x.data._replace(device_id=1), x.strides)
    assert len({rig.lifts._key(Request("silu", (one,), {}, plans.plan_silu)) for one in (x, moved)}) == 2


def test_copies_and_fills_are_steps(rig: Rig) -> None:
    def steps(spec: Any) -> Lifted:
        half, ones = spec.span_bytes // 2, 0x3F80_0000
        copy = Copy(at("input"), at("output"), spec.span_bytes)
        fill = Fill(at("output", 0, half), ones, 4, half // 4)
        odd = Fill(at("output", 0, half), ones & 0xFFFF, 2, 1), Fill(at("output", 0, half), 0, 1, 2)
        return lifted_silu(spec, copy, fill, *odd)

    rig.offer_silu(steps)
    x, values = randn(8)
    close(rig.settle(lambda: rig.silu(x)), np.concatenate([values[:4], np.ones(4, np.float32)]))
    close(rig.silu(x), np.concatenate([values[:4], np.ones(4, np.float32)]))


# --- scratch


def test_scratch_is_of_the_stream_and_grows(rig: Rig) -> None:
    rig.offer_silu(lifted_triple)
    for count in (10, 5000, 100):
        x, values = randn(count)
        close(rig.settle(lambda: rig.silu(x)), 3 * values)  # noqa: B023
        close(rig.silu(x), 3 * values)
    rooms = next(iter(rig.lifts._rooms.values())).rooms
    ((address, nbytes, *_),) = rooms.values()
    assert not address % 512
    assert nbytes >= 512 + 20_000
    with soft_cupy.stream() as stream:
        x, values = randn(100)
        close(rig.settle(lambda: rig.silu(x)), 3 * values)
        assert rooms[stream][0] != address


def test_threads_on_one_stream_do_not_mix_their_steps(rig: Rig) -> None:
    rig.offer_silu(lifted_triple)
    x, values = randn(64)
    close(rig.settle(lambda: rig.silu(x)), 3 * values)

    def work(seed: int) -> None:
        for step in range(60):
            mine, its = randn(64, seed=100 * seed + step)
            close(rig.silu(mine), 3 * its)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, seed) for seed in range(2)]:
            future.result(60)


def test_two_threads_may_be_the_first(rig: Rig) -> None:
    rig.offer_silu()
    rig.is_armed = False
    x, values = randn(33)
    start = threading.Barrier(2)

    def work() -> None:
        start.wait()
        close(rig.settle(lambda: rig.silu(x)), silu(values))

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result(60)
    assert rig.broker.count() == 1


# --- graphs


@pytest.mark.parametrize("make", [lifted_silu, lifted_triple])
def test_launches_are_nodes_of_a_graph_that_is_captured(rig: Rig, make: Any) -> None:
    rig.offer_silu(make)
    (x, values), expected = randn(50), silu if make is lifted_silu else lambda x: 3 * x
    with soft_cupy.stream():
        close(rig.settle(lambda: rig.silu(x)), expected(values))
        stream = soft_cupy.current()
        stream.begin_capture()
        result = rig.silu(x)
        graph = stream.end_capture()
        assert result is not ORDINARY
        for factor in (2, 3):
            x.scale(factor)
            values = values * np.float32(factor)
            graph.launch()
            close(result, expected(values))
        ordinary = rig.ordinary
        close(rig.silu(x), expected(values))
        assert rig.ordinary == ordinary
    assert rig.page.last_lifted() == {1}


def test_a_graph_has_scratch_of_its_own(rig: Rig) -> None:
    rig.offer_silu(lifted_triple)
    x, _ = randn(50)
    with soft_cupy.stream():
        rig.settle(lambda: rig.silu(x))
        rig.silu(x)
        room = rig.lifts._rooms[rig.gpu.uuid]
        stream = soft_cupy.current()
        stream.begin_capture()
        rig.silu(x)
        rig.silu(x)
        stream.end_capture()
        (block,) = room._captured.values()
        assert block.address + block.nbytes <= room.rooms[stream.ptr][0] or block.address > room.rooms[stream.ptr][0]


# --- the broker's word


def test_in_another_epoch_a_call_goes_the_ordinary_way_and_is_asked_for_again(rig: Rig) -> None:
    rig.offer_silu()
    x, values = randn(10)
    rig.settle(lambda: rig.silu(x))
    gate = threading.Event()
    answer = rig.broker.answers["silu"]
    rig.broker.answers["silu"] = lambda *given: (gate.wait(10), answer(*given))[1]
    rig.bump()
    asked = rig.broker.count()
    for _ in range(3):
        assert rig.silu(x) is ORDINARY
    gate.set()
    close(rig.settle(lambda: rig.silu(x)), silu(values))
    assert rig.broker.count() == asked + 1
    rig.broker.answers["silu"] = lambda *_: {"state": "refused", "reason": "FAULTED", "detail": "it struck"}
    rig.bump()
    assert rig.silu(x) is ORDINARY
    wait_until(lambda: rig.broker.count() == asked + 2)
    assert rig.silu(x) is ORDINARY


def test_an_answer_of_an_epoch_that_is_over_is_asked_for_again(rig: Rig) -> None:
    epochs = iter([rig.page.lift_epoch - 1])
    rig.broker.answers["silu"] = lambda route, _: rig.broker.ready(
        lifted_silu(route.plan.inputs[0]), next(epochs, rig.page.lift_epoch)
    )
    x, values = randn(10)
    close(rig.settle(lambda: rig.silu(x)), silu(values))
    assert rig.broker.count() == 2


def test_what_is_pending_is_asked_for_again_without_a_call(rig: Rig) -> None:
    answers = iter([{"state": "pending"}, {"state": "pending"}, Busy("later")])
    rig.broker.answers["silu"] = lambda route, _: next(
        answers, rig.broker.ready(lifted_silu(route.plan.inputs[0]), rig.page.lift_epoch)
    )
    x, values = randn(10)
    assert rig.silu(x) is ORDINARY
    wait_until(lambda: rig.broker.count() == 4)
    wait_until(lambda: rig.lifts.known)
    close(rig.silu(x), silu(values))


def test_too_little_evidence_is_asked_for_again_after_some_calls(rig: Rig) -> None:
    """After the fourth, and if that is too little, after twice as many."""
    answers = iter([{"state": "later"}] * 2)
    rig.broker.answers["silu"] = lambda route, _: next(
        answers, rig.broker.ready(lifted_silu(route.plan.inputs[0]), rig.page.lift_epoch)
    )
    x, values = randn(10)
    assert rig.silu(x) is ORDINARY
    for count, calls in ((1, 4), (2, 8)):
        wait_until(lambda: rig.lifts.known)
        for _ in range(calls - 1):
            assert rig.silu(x) is ORDINARY
        assert rig.broker.count() == count
        assert rig.silu(x) is ORDINARY
    close(rig.settle(lambda: rig.silu(x)), silu(values))


@pytest.mark.parametrize("ends", ["is counted down", "ends"])
def test_what_is_over_before_its_answer_was_dealt_with_is_asked_for_again(rig: Rig, ends: str) -> None:
    """The thread that asks may lose its core right after it has noted the answer, and calls go on."""
    answers = iter([{"state": "later"}] if ends == "is counted down" else [])
    rig.broker.answers["silu"] = lambda route, _: next(
        answers, rig.broker.ready(lifted_silu(route.plan.inputs[0]), rig.page.lift_epoch)
    )
    x, values = randn(10)
    remember, lost = rig.lifts._remember, iter([True])

    def remember_late(asked: Any, found: Any) -> None:
        remember(asked, found)
        if next(lost, False):
            if ends == "ends":
                rig.bump()
            for _ in range(4):
                rig.silu(x)

    rig.lifts._remember = remember_late  # type: ignore[method-assign]
    close(rig.settle(lambda: rig.silu(x)), silu(values))


def test_a_refusal_is_said_in_the_routes_reports(rig: Rig) -> None:
    rig.broker.answers["silu"] = lambda *_: {"state": "refused", "reason": "NOT_DETERMINISTIC", "detail": "runs differ"}
    x, _ = randn(10)
    for _ in range(3):
        assert rig.silu(x) is ORDINARY
    (route,) = rig.broker.routes.values()
    wait_until(lambda: route.not_lifted)
    assert (route.not_lifted, rig.broker.count()) == ("NOT_DETERMINISTIC: runs differ", 1)
    rig.offer_silu()
    rig.bump()  # it may be another matter now
    rig.settle(lambda: rig.silu(x))
    assert not route.not_lifted


def test_a_broker_that_does_not_know_of_lifting_is_asked_once(rig: Rig) -> None:
    for count in range(1, 6):
        assert rig.silu(randn(count)[0]) is ORDINARY
        wait_until(lambda: rig.lifts._is_unknown)
    assert rig.broker.count() == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rig, lifted: rig.broker.held.update({digest(lifted.pack()): b"other bytes"}),
        lambda rig, lifted: rig.broker.held.update({digest(CODE): CODE + b"?"}),
        lambda rig, lifted: rig.broker.held.pop(digest(lifted.pack())),
    ],
)
def test_bytes_that_are_not_what_was_named_are_not_launched(rig: Rig, spoil: Any) -> None:
    def make(spec: Any) -> Lifted:
        return lifted_silu(spec)

    def answer(route: Any, _: Any) -> Any:
        lifted = make(route.plan.inputs[0])
        given = rig.broker.ready(lifted, rig.page.lift_epoch)
        spoil(rig, lifted)
        return given

    rig.broker.answers["silu"] = answer
    x, _ = randn(10)
    assert rig.silu(x) is ORDINARY
    (route,) = rig.broker.routes.values()
    wait_until(lambda: route.not_lifted)
    assert route.not_lifted.startswith(lifts.LOAD_FAILED)
    assert rig.silu(x) is ORDINARY


@pytest.mark.parametrize(
    "make",
    [
        lambda spec: lifted_silu(floats(11)),
        lambda spec: lifted_silu(spec, kernel("silu", at("output"), at("input"), 10, code=b"elf:silu")),
        lambda spec: lifted_silu(spec, kernel("missing", at("output"), at("input"), 10)),
    ],
)
def test_what_does_not_fit_is_not_launched(rig: Rig, make: Any) -> None:
    rig.broker.hold(b"elf:silu")
    rig.offer_silu(make)
    x, _ = randn(10)
    assert rig.silu(x) is ORDINARY
    (route,) = rig.broker.routes.values()
    wait_until(lambda: route.not_lifted)
    assert route.not_lifted.startswith(lifts.LOAD_FAILED)
    assert rig.silu(x) is ORDINARY


@pytest.mark.parametrize("options", [{"timeout_s": 1.0}, {"is_rigid": True}, {"backend": "one"}])
def test_calls_with_wishes_of_their_own_are_not_those_that_are_lifted(rig: Rig, options: Any) -> None:
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    assert rig.silu(x, **options) is ORDINARY


# --- what others see


def test_the_page_names_what_was_launched_last(rig: Rig) -> None:
    rig.offer_silu()
    arrays = [randn(count)[0] for count in range(1, 13)]
    for x in arrays:
        rig.settle(lambda: rig.silu(x))  # noqa: B023
    assert rig.page.last_lifted() == set(range(5, 13))
    rig.silu(arrays[0])
    assert rig.page.last_lifted() == {1, *range(6, 13)}


def test_reports_say_whose_kernel_ran_where(rig: Rig, is_compiled: bool) -> None:
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    for _ in range(2):
        rig.silu(x)
        report = rig.report()
        assert (report.op, report.path, report.kernel_id, report.backend) == ("silu", "lifted", "one.silu", "one")
        assert (report.worker_pid, report.copied_bytes) == (0, 0)
        (note,) = report.notes
        assert "one.silu of soft 1.0" in note
        assert "in this process, on its own stream" in note
        assert report.elapsed_us is not None
        assert 0 < report.elapsed_us < 1e6


def test_an_error_of_a_launch_is_raised_by_its_call(rig: Rig) -> None:
    """And the next call goes the ordinary way."""
    rig.offer_silu(lambda spec: lifted_silu(spec, kernel("refuse", at("output"), at("input"), spec.numel)))
    x, _ = randn(10)
    raised = []

    def is_refused() -> bool:
        try:
            assert rig.silu(x) is ORDINARY
        except BackendError as exc:
            raised.append(exc)
        return bool(raised)

    wait_until(is_refused)
    (error,) = raised
    assert "one.silu" in error.message
    assert (error.facts["number"], error.facts["kernel_id"], error.facts["sticky"]) == (701, "one.silu", False)
    assert error.report.attempts[0].kernel_id == "one.silu"
    assert rig.silu(x) is ORDINARY
    (route,) = rig.broker.routes.values()
    assert "701" in route.not_lifted
    assert not rig.broker.count("lift_fault")


def test_a_lost_gpu_is_told_once(rig: Rig) -> None:
    bad_kernel = kernel("strike", at("output"), at("input"), 1)
    rig.offer_silu(lambda spec: lifted_silu(spec) if spec.numel < 10 else lifted_silu(spec, bad_kernel))
    good, bad = randn(9)[0], randn(10)[0]
    rig.settle(lambda: rig.silu(good))
    assert rig.silu(bad) is ORDINARY
    wait_until(lambda: len(rig.lifts.known) == 2)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"one\.silu"):
            rig.silu(bad)
    assert [params["numbers"] for method, params in rig.broker.asked if method == "lift_fault"] == [[1, 2]]
    rig.lifts.finish()
    assert rig.broker.count("lift_fault") == 1
    driver.is_lost = False


def test_a_gpu_that_was_lost_later_is_told_of_at_the_end(rig: Rig) -> None:
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    synchronize()
    driver.is_lost = True
    rig.lifts.finish()
    driver.is_lost = False
    assert [params["numbers"] for method, params in rig.broker.asked if method == "lift_fault"] == [[1]]
    assert rig.silu(x) is ORDINARY


def test_a_gpu_that_is_lost_at_exit_is_told_of_by_the_process_that_is_connected(rig: Rig) -> None:
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    synchronize()
    driver.is_lost = True
    rig.link.forks += 1
    faults._look_at_exit()
    assert not rig.broker.count("lift_fault")
    rig.link.forks -= 1
    for _ in range(2):
        faults._look_at_exit()
    assert rig.broker.count("lift_fault") == 1


def test_earlier_failures_are_looked_for(rig: Rig, is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip("GpuCalls.glance does it")
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    rig.silu(x)
    before = rig.looks
    for _ in range(130):
        rig.silu(x)
    assert rig.looks - before == 2
    rig.calls.outcomes.failed.append(object())
    rig.silu(x)
    assert rig.looks - before == 3


def test_nothing_is_launched_once_the_session_is_closed(rig: Rig) -> None:
    rig.offer_silu()
    x, _ = randn(10)
    rig.settle(lambda: rig.silu(x))
    rig.lifts.finish()
    assert rig.silu(x) is ORDINARY


def test_calls_leave_nothing_behind(rig: Rig, is_compiled: bool) -> None:
    """No object, no memory of the GPU."""
    rig.offer_silu(lifted_triple)
    x, values = randn(16)
    result = rig.settle(lambda: rig.silu(x))

    def calls(count: int) -> tuple[int, int]:
        for _ in range(count):
            rig.silu(x)
        synchronize()
        gc.collect()
        return sys.getallocatedblocks(), len(driver._memory)

    calls(500)
    blocks, memory = calls(500)
    blocks_now, memory_now = calls(10_000 if is_compiled else 2_000)
    assert memory_now == memory
    assert blocks_now - blocks < 300
    close(result, 3 * values)


def test_arrays_of_our_own_are_not_lifted_and_the_route_says_so(rig: Rig) -> None:
    rig.offer_silu()
    x = GpuArray(0, TensorSpec.contiguous("float32", (8,)))
    assert rig.silu(x) is ORDINARY
    (route,) = rig.broker.routes.values()
    assert route.not_lifted == "ARRAYS_UNSUPPORTED: own; allowed: torch, cupy, dlpack"
