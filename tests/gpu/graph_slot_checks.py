"""What holds for calls in a client's CUDA graphs, on a GPU (tests/gpu) and on the soft one (tests/process)."""

from __future__ import annotations

import itertools
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
from tests.gpu.bare_worker import NBYTES, Client, Connect, Spawn, Worker
from tests.gpu.conftest import finish, until
from tests.gpu.peer import PATIENCE_S
from tests.gpu.ring_checks import run

from layerzero.ipc.errors import from_wire
from layerzero.ipc.shm.timeline_words import RUNG, TAKEN
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.wire import Kind


def bind(worker: Worker, client: Client, graph_slot: int, source: int, target: int) -> None:
    header, body = worker.bind(client, graph_slot, client.refs(source, target))
    assert (header.kind, header.seq, body) == (Kind.RAN, graph_slot + 1, b"")


@contextmanager
def graph_of(client: Client, *graph_slots: int) -> Iterator[int]:
    """A graph of the client that rings these graph slots one after the other."""
    driver, stream = client.driver, client.streams[0]
    driver.begin_capture(stream)
    for graph_slot in graph_slots:
        client.order.ring(stream, graph_slot)
    graph = driver.end_capture(stream)
    yield graph
    for graph_slot in graph_slots:  # whatever a failed test left waiting
        client.order.page.store_graph_slot_done(graph_slot)
    finish(driver, stream)
    driver.destroy_graph(graph)


class GraphSlotChecks:
    def test_each_replay_computes_with_the_data_of_that_time(self, spawn: Spawn, connect: Connect) -> None:
        """Binding runs nothing; from then on no message is sent."""
        worker, client = spawn(), connect()
        client.join(worker)
        before = secrets.token_bytes(NBYTES)
        for block in (1, 2, 3):
            client.write(block, before)
        for graph_slot, step in ((0, 0), (7, 1), (4095, 2)):
            bind(worker, client, graph_slot, step, step + 1)
        assert client.read(3) == before
        with graph_of(client, 0, 7, 4095) as graph:
            for _ in range(5):
                data = secrets.token_bytes(NBYTES)
                client.write(0, data)
                client.driver.launch_graph(graph, client.streams[0])
                assert client.read(3) == data
            for _ in range(3):
                client.driver.launch_graph(graph, client.streams[0])  # none is waited for
            assert client.read(3) == data
        assert worker.is_silent()

    def test_graph_slot_rings_through_sleep(self, spawn: Spawn, connect: Connect) -> None:
        """What a GPU writes wakes nobody: the worker looks by itself, more seldom as time goes by."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        bind(worker, client, 3, 0, 1)
        with graph_of(client, 3) as graph:
            for pause_ms in (0, 5, 20, 1200):
                assert worker.is_silent(pause_ms)
                client.write(0, data := data[::-1])
                client.driver.launch_graph(graph, client.streams[0])
                assert client.read(1) == data

    def test_calls_and_graph_slots_take_points(self, spawn: Spawn, connect: Connect) -> None:
        """A graph that replays does not keep the worker from others, by ring or by the broker."""
        worker, client, other = spawn(), connect(), connect()
        client.join(worker)
        other.join(worker)
        bind(worker, client, 3, 0, 1)
        ring, data = other.lend(worker), secrets.token_bytes(NBYTES)
        other.write(0, data)
        with graph_of(client, *[3] * 50) as graph:
            client.driver.launch_graph(graph, client.streams[0])
            for step in range(20):
                ring.call(step, step + 1)
            run(worker, other, other.begin(), 20, 21)
            assert other.read(21) == data
            finish(client.driver, client.streams[0])

    @pytest.mark.parametrize(
        ("kernel", "why"), [("synchronize", "returned 900"), ("raise", "the toy refuses")], ids=["waits", "raises"]
    )
    def test_kernel_that_cannot_be_captured_is_refused(
        self, spawn: Spawn, connect: Connect, kernel: str, why: str
    ) -> None:
        """Another backend's may be; the worker serves on."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        header, body = worker.bind(client, 0, client.refs(0, 1), kernel)
        error = from_wire(msgpack.unpackb(body))
        assert (header.kind, error.code, error.facts["kernel"]) == (Kind.RAISED, "CUDA_GRAPH_UNSAFE", f"toy.{kernel}")
        assert why in error.message
        client.write(0, data)
        bind(worker, client, 0, 0, 1)
        with graph_of(client, 0) as graph:
            client.driver.launch_graph(graph, client.streams[0])
            assert client.read(1) == data

    @pytest.mark.parametrize("transport", ["staged", "copied"])
    def test_memory_that_is_copied_is_refused(self, spawn: Spawn, connect: Connect, transport: str) -> None:
        """The copies would have to be in the client's graph, too."""
        worker, client = spawn(), connect(transport)
        client.join(worker)
        header, body = worker.bind(client, 0, client.refs(0, 1))
        assert (header.kind, from_wire(msgpack.unpackb(body)).code) == (Kind.RAISED, "CUDA_GRAPH_UNSAFE")

    @pytest.mark.parametrize(("fault", "value"), [("executing=kill@3", TAKEN + 1), ("", RUNG)], ids=["taken", "rung"])
    def test_next_worker_serves_what_a_killed_one_left(
        self, spawn: Spawn, connect: Connect, fault: str, value: int
    ) -> None:
        """The client's graph waits in the middle; it goes on with the results that it would have had."""
        first, second, client, data = spawn(fault), spawn(), connect(), secrets.token_bytes(NBYTES)
        for worker in (first, second):
            client.join(worker)
        bind(first, client, 5, 0, 1)
        bind(first, client, 6, 1, 2)
        page = client.order.page
        with graph_of(client, 5, 6) as graph:
            client.write(0, data)
            client.driver.launch_graph(graph, client.streams[0])
            assert client.read(2) == data
            if not fault:
                first.process.send_signal(signal.SIGKILL)
                first.process.wait(PATIENCE_S)
            client.write(0, data[::-1])
            client.driver.launch_graph(graph, client.streams[0])
            assert first.process.wait(PATIENCE_S) == -signal.SIGKILL
            until(lambda: page.graph_slot(5) == value)
            assert not page.is_graph_slot_done(5)
            for graph_slot in (6, 5):
                bind(second, client, graph_slot, graph_slot - 5, graph_slot - 4)
            assert client.read(2) == data[::-1]

    def test_workers_serve_their_own_graph_slots_of_a_page(self, spawn: Spawn, connect: Connect) -> None:
        """Each kernel of a graph may be another backend's."""
        first, second, client, data = spawn(), spawn(), connect(), secrets.token_bytes(NBYTES)
        for worker in (first, second):
            client.join(worker)
        for graph_slot in range(10):
            bind((first, second)[graph_slot % 2], client, graph_slot, graph_slot, graph_slot + 1)
        with graph_of(client, *range(10)) as graph:
            for _ in range(3):
                client.write(0, data := data[::-1])
                client.driver.launch_graph(graph, client.streams[0])
                assert client.read(10) == data

    def test_muted_graph_slot_is_somebody_elses(self, spawn: Spawn, connect: Connect) -> None:
        """It may be bound anew, here or elsewhere; other graph slots go on."""
        first, second, client, data = spawn(), spawn(), connect(), secrets.token_bytes(NBYTES)
        for worker in (first, second):
            client.join(worker)
        bind(first, client, 5, 0, 1)
        bind(first, client, 6, 3, 4)
        first.mute(client, 5)
        first.settle(client)
        client.write(0, data)
        client.write(3, data[::-1])
        with graph_of(client, 5, 6) as graph:
            client.driver.launch_graph(graph, client.streams[0])
            until(lambda: client.order.page.graph_slot(5) == RUNG)
            assert first.is_silent()
            assert client.order.page.graph_slot(5) == RUNG
            bind(second, client, 5, 0, 1)
            assert (client.read(1), client.read(4)) == (data, data[::-1])
        header, _ = first.bind(client, 6, client.refs(0, 1))
        assert header.kind == Kind.RAISED  # bound already

    def test_graph_slots_go_with_their_memory(self, spawn: Spawn, connect: Connect) -> None:
        """A launch would touch what is unmapped. An arena goes with MUTE, which may be read after the words on it."""
        worker, client, other = spawn(), connect(), connect()
        client.join(worker)
        other.join(worker)
        bind(worker, client, 5, 0, 1)
        bind(worker, other, 5, 0, 1)
        worker.tell(messages.UnmapArena(client=client.number, arena=1))
        worker.mute(client, 5)
        worker.tell(messages.UnmapGpu(client=other.number, gpu=other.context.gpu))
        graph_slots = itertools.count(10)
        until(lambda: worker.bind(other, next(graph_slots), other.refs(0, 1))[0].kind == Kind.RAISED)  # both were taken
        for one in (client, other):
            with graph_of(one, 5) as graph:
                one.driver.launch_graph(graph, one.streams[0])
                until(lambda one=one: one.order.page.graph_slot(5) == RUNG)
                assert worker.is_silent()
                assert one.order.page.graph_slot(5) == RUNG
        assert worker.stop() == 0
