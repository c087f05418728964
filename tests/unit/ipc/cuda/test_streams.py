"""Which words a client's and a worker's streams write and wait for, and what takes their place without memops."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda import streams
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.streams import ClientOrder, WorkerOrder
from layerzero.ipc.errors import Busy, CudaError, ProtocolError
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, TAKEN, TIMELINES, TimelinePoint


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(FakeGpu())


@pytest.fixture
def context(driver: FakeDriver) -> Context:
    return Context(driver, UUID)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_page()
    yield fd
    os.close(fd)


def test_calls_of_a_stream_are_numbered_in_one_lane(context: Context, driver: FakeDriver, fd: int) -> None:
    """The stream's own order keeps the words monotonic."""
    client = ClientOrder(context, fd, has_memops=True)
    points = [client.begin(5), client.begin(5), client.begin(6), client.begin(5)]
    assert points == [TimelinePoint(0, 1), TimelinePoint(0, 2), TimelinePoint(1, 1), TimelinePoint(0, 3)]
    assert client.page.is_ready(TimelinePoint(0, 3))
    client.await_done(5, points[0])
    assert driver.waits == [(5, 0, 1)]


def test_worker_waits_for_ready_and_writes_done(context: Context, driver: FakeDriver, fd: int) -> None:
    """And nobody's CPU waits for anything."""
    client, worker = ClientOrder(context, fd, has_memops=True), WorkerOrder(context, fd, has_memops=True)
    point = client.begin(5)
    worker.await_ready(9, point)
    assert driver.waits == [(9, 1, 1)]
    worker.done(9, point)
    assert client.page.is_done(point)
    assert driver.calls["synchronize_stream"] == 0
    client.close()
    worker.close()
    assert driver.pinned == {}


def test_another_worker_finishes_what_a_dead_one_left(context: Context, fd: int) -> None:
    """It maps the dead one's page; the client's stream waits there."""
    client = ClientOrder(context, fd, has_memops=True)
    first, second = client.begin(5), client.begin(5)
    WorkerOrder(context, fd, has_memops=True).done(1, first)
    other = WorkerOrder(context, fd, has_memops=True)
    assert not client.page.is_done(second)
    other.done(1, second)
    assert client.page.is_done(second)


def test_numbers_wrap_around(context: Context, driver: FakeDriver, fd: int) -> None:
    """The words have 32 bits, and a client runs for months."""
    client = ClientOrder(context, fd, has_memops=True, first=2**32 - 1)
    worker = WorkerOrder(context, fd, has_memops=True)
    points = [client.begin(5) for _ in range(3)]
    assert [point.value for point in points] == [2**32 - 1, 0, 1]
    assert not client.page.is_done(points[0])
    for point, expected in zip(points, ([1, 0, 0], [1, 1, 0], [1, 1, 1]), strict=True):
        worker.done(9, point)
        assert [client.page.is_done(each) for each in points] == expected


def test_lane_of_a_stream_whose_calls_are_done_is_given_on(context: Context, fd: int) -> None:
    """Applications make more streams in their life than a page has lanes."""
    client, broker = ClientOrder(context, fd, has_memops=True), TimelinePage(fd)
    points = [client.begin(stream) for stream in range(1, TIMELINES + 1)]
    with pytest.raises(Busy, match="64 streams"):
        client.begin(1000)
    broker.store_done(points[10])
    assert client.begin(1000) == TimelinePoint(10, 2)
    with pytest.raises(Busy):
        client.begin(11)
    broker.fail(points[20], 1)
    assert client.begin(11) == TimelinePoint(20, 2)


def test_call_that_could_not_begin_has_no_number(context: Context, driver: FakeDriver, fd: int) -> None:
    """A number that nobody finishes would hold the lane for ever."""
    client = ClientOrder(context, fd, has_memops=True)
    driver.fails["write_value"], driver.times["write_value"] = error("cuStreamWriteValue32_v2", 201), 1
    with pytest.raises(CudaError):
        client.begin(5)
    assert client.begin(5) == TimelinePoint(0, 1)
    client.close()


def test_without_memops_the_cpus_wait(context: Context, driver: FakeDriver, fd: int) -> None:
    """Same calls, same results; nothing is registered with a driver that cannot use it."""
    client, worker = ClientOrder(context, fd, has_memops=False), WorkerOrder(context, fd, has_memops=False)
    point = client.begin(5)
    assert driver.calls["synchronize_stream"] == 1
    worker.await_ready(9, point)
    with pytest.raises(ProtocolError, match="has not finished call 1 of timeline 0"):
        client.await_done(5, point)
    worker.done(9, point)
    assert driver.calls["synchronize_stream"] == 2
    client.await_done(5, point)
    with pytest.raises(ProtocolError, match="came before its inputs"):
        worker.await_ready(9, TimelinePoint(0, 2))
    assert (driver.waits, driver.pinned, driver.calls["write_value"]) == ([], {}, 0)
    client.close()
    worker.close()


def test_reserved_point_is_entered_later_in_one_call(context: Context, driver: FakeDriver, fd: int) -> None:
    """Its number goes to the worker before the driver is called; what another thread does meanwhile comes after it."""
    client = ClientOrder(context, fd, has_memops=True)
    first, second = client.reserve(5), client.begin(6)
    assert (first, second, client.reserve(5)) == (TimelinePoint(0, 1), TimelinePoint(1, 1), TimelinePoint(0, 2))
    assert (client.page.is_ready(first), driver.calls["write_and_wait"]) == (False, 0)
    client.enter(5, first)
    assert (client.page.is_ready(first), client.page.is_ready(TimelinePoint(0, 2))) == (True, False)
    assert (driver.waits, driver.calls["write_and_wait"]) == ([(5, 0, 1)], 1)
    with pytest.raises(Busy):
        [client.reserve(stream) for stream in range(100, 100 + TIMELINES)]


def test_graph_slot_is_rung_after_its_done_was_taken_back(context: Context, driver: FakeDriver, fd: int) -> None:
    """Otherwise the second replay would go on with the first one's result."""
    client, worker = ClientOrder(context, fd, has_memops=True), WorkerOrder(context, fd, has_memops=True)
    for _ in range(2):
        client.ring(5, 9)
        assert (client.page.rung(), client.page.is_graph_slot_done(9)) == (9, False)
        client.page.set_graph_slot(9, TAKEN)
        worker.answer_graph_slot(3, 9)
        assert (client.page.rung(), client.page.is_graph_slot_done(9)) == (None, True)
    assert driver.waits == [(5, 0, 1)] * 2
    with pytest.raises(ProtocolError, match="graph slot 4096"):
        client.ring(5, GRAPH_SLOTS)


def test_probe_is_empty_where_memops_work(context: Context, driver: FakeDriver) -> None:
    """And leaves nothing behind."""
    before = len(os.listdir("/proc/self/fd"))
    assert streams.probe(context) == ""
    assert (driver.pinned, driver.depth, len(os.listdir("/proc/self/fd"))) == ({}, 0, before)


@pytest.mark.parametrize("call", ["host_register", "write_value", "wait_value"])
def test_probe_says_what_does_not_work(context: Context, driver: FakeDriver, call: str) -> None:
    """The reason goes into every report of the slower way."""
    driver.fails[call], driver.times[call] = error(call, 801), -1
    assert streams.probe(context) == f"{call} returned 801"
    assert driver.pinned == {}


def test_probe_notices_a_write_that_does_not_arrive(
    context: Context, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for it would be for ever."""
    monkeypatch.setattr(FakeDriver, "write_value", lambda *_: None)
    assert streams.probe(context) == "a stream's write to host memory was not seen by the CPU"
    assert driver.calls["wait_value"] == 0
