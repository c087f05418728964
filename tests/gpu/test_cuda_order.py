"""Order between streams of different processes by words that they wait on: no CPU waits, and no stream for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from tests.gpu.conftest import finish, load, store, until
from tests.gpu.peer import Peer

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda import streams as cuda_order
from layerzero.ipc.cuda.handles import TRANSPORTS
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.streams import ClientOrder, WorkerOrder
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import DONE, MASK, PAGE_BYTES, READY, TAKEN, TIMELINES, TimelinePoint, index

NBYTES = 64 << 10


@dataclass
class Link:
    """A client's arena and page, and a worker that has both."""

    driver: cuda.Driver
    context: cuda.Context
    arena: Arena
    fd: int
    order: ClientOrder
    worker: Peer
    first: int
    transport: str

    def join(self, worker: Peer, *, number: int = 0, has_memops: bool = True) -> None:
        worker.open(*self.arena.offer(self.transport))
        worker.ask("order", self.fd, gpu=self.context.gpu, number=number, has_memops=has_memops)

    def copy(
        self, point: TimelinePoint, source: int, target: int, *, stream: int = 0, worker: Peer | None = None
    ) -> bool:
        """Tell a worker to copy block `source` of the arena to block `target`; True if it is not done on return."""
        return bool((worker or self.worker).ask(
            "copy", order=0, point=list(point), key=self.arena.offer(self.transport)[0].key, stream=stream,
            source=source * NBYTES, target=target * NBYTES, nbytes=NBYTES,
        ))  # fmt: skip

    def block(self, index: int) -> int:
        return self.arena.address + index * NBYTES


Linker = Callable[..., Link]


@pytest.fixture
def connect(current: cuda.Context, start: Callable[..., Peer]) -> Iterator[Linker]:
    made: list[Link] = []

    def make(*, has_memops: bool = True, first: int = 1, transport: str = "ipc") -> Link:
        fd = create_page()
        order = ClientOrder(current, fd, has_memops=has_memops, first=first)
        arena = Arena(current, "c1", len(made), 16 << 20, kind="vmm" if transport == "vmm" else "plain")
        link = Link(current.driver, current, arena, fd, order, start(), first, transport)
        link.join(link.worker, has_memops=has_memops)
        made.append(link)
        return link

    yield make
    for link in made:
        link.worker.kill()
        for lane in range(TIMELINES):  # whatever a failed test left waiting would make the driver wait, too
            link.order.page.store_done(TimelinePoint(lane, link.first + 1000 & MASK))
        link.order.close()
        link.arena.close()
        os.close(link.fd)


@pytest.fixture
def streams(driver: cuda.Driver, current: cuda.Context) -> Iterator[list[int]]:
    made = [driver.create_stream() for _ in range(3)]
    yield made
    for stream in made:
        driver.destroy_stream(stream)


def test_streams_can_wait_for_host_words_here(context: cuda.Context) -> None:
    """Otherwise every test below would be of the fallback."""
    assert cuda_order.probe(context) == ""


def test_client_goes_on_before_the_worker_has_heard_of_the_call(connect: Linker, streams: list[int]) -> None:
    """All the client does is enqueue; its stream stops at DONE, and what follows sees the result."""
    link, stream = connect(), streams[0]
    driver, data = link.driver, os.urandom(NBYTES)
    store(driver, link.block(0), data, stream)
    point = link.order.begin(stream)
    link.order.await_done(stream, point)
    driver.copy_on_device(link.block(2), link.block(1), NBYTES, stream)
    assert not driver.is_stream_idle(stream)
    link.copy(point, 0, 1)
    assert load(driver, link.block(2), NBYTES, stream) == data


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_in_a_row_are_in_order_by_each_way(connect: Linker, streams: list[int], transport: str) -> None:
    """Copies through host memory are part of the order: each side's wait for the other's words, too."""
    link, stream = connect(transport=transport), streams[0]
    driver, arena = link.driver, link.arena
    expected = [os.urandom(NBYTES) for _ in range(10)]
    for step, data in enumerate(expected):
        store(driver, link.block(0), data, stream)
        arena.publish(transport, 0, NBYTES, stream)
        point = link.order.begin(stream)
        link.order.await_done(stream, point)
        if transport != "copied":  # there the CPU waits for the worker, which must know of the call then
            arena.collect(transport, NBYTES, NBYTES, stream)
        link.copy(point, 0, 1)
        if transport == "copied":
            arena.collect(transport, NBYTES, NBYTES, stream)
        driver.copy_on_device(link.block(2 + step), link.block(1), NBYTES, stream)
    for step, data in enumerate(expected):
        assert load(driver, link.block(2 + step), NBYTES, stream) == data, step


def test_worker_does_not_run_ahead_of_the_inputs(connect: Linker, streams: list[int]) -> None:
    """Its stream stops at READY, though the message came long ago."""
    link, (stream, other, _) = connect(), streams
    driver, data, event = link.driver, os.urandom(NBYTES), link.driver.create_event()
    gate = link.order.begin(other)  # a call that nobody serves yet holds the inputs back
    link.order.await_done(other, gate)
    driver.record_event(event, other)
    store(driver, link.block(0), data, stream)
    driver.wait_event(stream, event)
    point = link.order.begin(stream)
    link.order.await_done(stream, point)
    assert link.copy(point, 0, 1)
    assert not link.order.page.is_ready(point)
    link.order.page.store_done(gate)
    assert load(driver, link.block(1), NBYTES, stream) == data
    driver.destroy_event(event)


def test_calls_in_a_row_each_see_the_one_before(connect: Linker, streams: list[int]) -> None:
    """A pipeline: every call reads what the last one wrote, and the client never waits."""
    link, stream = connect(), streams[0]
    data = os.urandom(NBYTES)
    store(link.driver, link.block(0), data, stream)
    for step in range(200):
        point = link.order.begin(stream)
        link.order.await_done(stream, point)
        link.copy(point, step, step + 1)
    assert load(link.driver, link.block(200), NBYTES, stream) == data


def test_numbers_wrap_around_on_the_gpu(connect: Linker, streams: list[int]) -> None:
    """It compares as we do: 1 comes after 2**32 - 1."""
    link, stream = connect(first=2**32 - 2), streams[0]
    data = os.urandom(NBYTES)
    store(link.driver, link.block(0), data, stream)
    points = []
    for step in range(5):
        points.append(link.order.begin(stream))
        link.order.await_done(stream, points[-1])
        link.copy(points[-1], step, step + 1)
    assert [point.value for point in points] == [2**32 - 2, 2**32 - 1, 0, 1, 2]
    assert load(link.driver, link.block(5), NBYTES, stream) == data


def test_streams_do_not_wait_for_each_other(connect: Linker, streams: list[int]) -> None:
    """Each has words of its own: one that is held up holds up none but itself."""
    link, (slow, fast, _) = connect(), streams
    data = os.urandom(NBYTES)
    held = link.order.begin(slow)
    link.order.await_done(slow, held)
    store(link.driver, link.block(0), data, fast)
    point = link.order.begin(fast)
    link.order.await_done(fast, point)
    link.copy(point, 0, 1)
    assert load(link.driver, link.block(1), NBYTES, fast) == data
    assert not link.driver.is_stream_idle(slow)
    link.copy(held, 0, 2)
    finish(link.driver, slow)


def test_threads_with_streams_of_their_own_do_not_mix(connect: Linker) -> None:
    """A server calls from many threads; each gets its own bytes, whoever begins when."""
    link = connect()
    driver, telling = link.driver, threading.Lock()

    def work(lane: int) -> None:
        with link.context:
            stream, first = driver.create_stream(), lane * 32
            for _ in range(3):
                data = os.urandom(NBYTES)
                store(driver, link.block(first), data, stream)
                for step in range(first, first + 20):
                    point = link.order.begin(stream)
                    link.order.await_done(stream, point)
                    with telling:  # one socket for all
                        link.copy(point, step, step + 1, stream=lane)
                assert load(driver, link.block(first + 20), NBYTES, stream) == data
            driver.destroy_stream(stream)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [None] * 4


def test_chain_hops_between_two_workers_without_the_cpu(connect: Linker, streams: list[int]) -> None:
    """The client's stream carries the order from one to the other."""
    first, second = connect(), connect()
    second.worker.open(first.arena.offer("ipc")[0], None)
    data, stream = os.urandom(NBYTES), streams[0]
    store(first.driver, first.block(0), data, stream)
    points: list[tuple[Link, TimelinePoint]] = []
    for step in range(20):
        link = (first, second)[step % 2]
        point = link.order.begin(stream)
        link.order.await_done(stream, point)
        points.append((link, point))
    assert not first.driver.is_stream_idle(stream)
    # The messages come late, and those of the second worker first.
    for start in (1, 0):
        for step in range(start, 20, 2):
            link, point = points[step]
            first.copy(point, step, step + 1, worker=link.worker)
    assert load(first.driver, first.block(20), NBYTES, stream) == data


def test_process_without_cuda_releases_the_stream_of_a_killed_worker(
    connect: Linker, streams: list[int], start: Callable[..., Peer]
) -> None:
    """The broker's way out when nobody can serve the call: the client's stream goes on, and its context is whole."""
    link, stream = connect(), streams[0]
    point = link.order.begin(stream)
    link.order.await_done(stream, point)
    link.worker.ask("hang", order=0, point=[point.timeline, point.value + 1], stream=0)
    link.worker.kill()
    assert not link.driver.is_stream_idle(stream)
    assert link.order.page.error(point) == 0
    broker = start(CUDA_VISIBLE_DEVICES="")
    has_driver = broker.ask("fail", link.fd, point=list(point), code=42)
    finish(link.driver, stream)
    assert (has_driver, link.order.page.error(point)) == (False, 42)
    store(link.driver, link.block(0), b"still here", stream)
    assert load(link.driver, link.block(0), 10, stream) == b"still here"


def test_next_worker_finishes_the_call_of_a_killed_one(
    connect: Linker, streams: list[int], start: Callable[..., Peer]
) -> None:
    """The inputs are intact, since the client's stream stopped; the next worker maps the dead one's page."""
    link, stream = connect(), streams[0]
    data = os.urandom(NBYTES)
    store(link.driver, link.block(0), data, stream)
    point = link.order.begin(stream)
    link.order.await_done(stream, point)
    link.worker.ask("hang", order=0, point=[point.timeline, point.value + 1], stream=0)
    link.worker.kill()
    second = start()
    link.join(second)
    link.copy(point, 0, 1, worker=second)
    assert load(link.driver, link.block(1), NBYTES, stream) == data
    assert link.order.page.error(point) == 0


def test_without_memops_the_result_is_the_same(connect: Linker, streams: list[int]) -> None:
    """Slower, and right."""
    link, stream = connect(has_memops=False), streams[0]
    data = os.urandom(NBYTES)
    store(link.driver, link.block(0), data, stream)
    for step in range(3):
        point = link.order.begin(stream)
        link.copy(point, step, step + 1)
        link.order.await_done(stream, point)
    assert load(link.driver, link.block(3), NBYTES, stream) == data


def test_captured_words_work_at_each_launch(driver: cuda.Driver, streams: list[int]) -> None:
    """A graph writes its word, waits for the CPU's, and takes that back: a doorbell that can ring again."""
    stream = streams[0]
    fd = create_page()
    page = TimelinePage(fd)
    os.close(fd)
    base = driver.host_register(page.address, PAGE_BYTES, page)
    point = TimelinePoint(0, 1)
    ring, answer = (base + index(point, word) * 4 for word in (READY, DONE))
    driver.begin_capture(stream)
    driver.write_value(stream, ring, 1)
    driver.wait_value(stream, answer, 1, equal=True)
    driver.write_value(stream, answer, 0)
    graph = driver.end_capture(stream)
    for _ in range(3):
        page.store_ready(TimelinePoint(0, 0))
        driver.launch_graph(graph, stream)
        until(lambda: page.is_ready(point))
        assert not driver.is_stream_idle(stream)
        page.store_done(point)
        finish(driver, stream)
        assert not page.is_done(point)
    driver.destroy_graph(graph)
    driver.host_unregister(page.address)
    page.close()


def test_reserved_points_are_entered_in_one_call_each(connect: Linker, streams: list[int]) -> None:
    """The client's whole part of a call: the worker may know of it before or after."""
    link, stream = connect(), streams[0]
    driver, data = link.driver, os.urandom(NBYTES)
    store(driver, link.block(0), data, stream)
    for step in range(20):
        point = link.order.reserve(stream)
        if step % 2:
            link.copy(point, step, step + 1)
        link.order.enter(stream, point)
        if not step % 2:
            assert not driver.is_stream_idle(stream)
            link.copy(point, step, step + 1)
    assert load(driver, link.block(20), NBYTES, stream) == data


def test_graph_slot_in_a_graph_rings_at_each_launch(
    driver: cuda.Driver, current: cuda.Context, streams: list[int]
) -> None:
    """And the graph goes on when the other side has answered that ring, not an earlier one."""
    fd = create_page()
    client, worker = ClientOrder(current, fd, has_memops=True), WorkerOrder(current, fd, has_memops=True)
    os.close(fd)
    stream, other, page = streams[0], streams[1], client.page
    driver.begin_capture(stream)
    client.ring(stream, 4095)
    client.ring(stream, 7)
    graph = driver.end_capture(stream)
    for _ in range(3):
        driver.launch_graph(graph, stream)
        for graph_slot in (4095, 7):
            until(lambda: page.rung() is not None)
            assert (page.rung(), driver.is_stream_idle(stream)) == (graph_slot, False)
            page.set_graph_slot(graph_slot, TAKEN)
            worker.answer_graph_slot(other, graph_slot)
        finish(driver, stream)
    driver.destroy_graph(graph)
    finish(driver, other)
    client.close()
    worker.close()


def test_unmapping_holds_up_nobody(connect: Linker, streams: list[int]) -> None:
    """The driver blocks whoever unmaps while a stream of the process waits for a word: it is done when none does."""
    link, stream = connect(), streams[0]
    other = Arena(link.context, "c2", 1, 4 << 20)
    handle, _ = other.offer("ipc")
    link.worker.open(handle, None)
    point = link.order.begin(stream)
    link.worker.ask("hang", order=0, point=[point.timeline, point.value + 1], stream=1)
    link.worker.ask("retire", key=handle.key, streams=[0])
    assert link.worker.ask("reap") == []
    link.order.begin(stream)  # what the worker's stream waits for
    link.worker.reap(handle.key)
    other.close()
