"""A worker process and its GPU, with the test in the place of its client and its broker."""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gpu.bare_worker import NBYTES, Connect, Spawn, call, clients, numbers
from tests.gpu.conftest import finish, until
from tests.gpu.peer import PATIENCE_S

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.handles import TRANSPORTS
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import Kind


@pytest.fixture
def spawn(context: driver.Context, tmp_path: Path) -> Iterator[Spawn]:
    spawn = Spawn(tmp_path, context.gpu)
    yield spawn
    spawn.close()


@pytest.fixture
def connect(current: driver.Context, spawn: Spawn) -> Iterator[Connect]:
    with clients(current, spawn) as make:
        yield make


def test_client_of_each_way_is_served_by_one_worker(spawn: Spawn, connect: Connect) -> None:
    """Numbers of arenas are each client's own, and so are their names."""
    worker = spawn()
    for transport in TRANSPORTS:
        client, data = connect(transport), secrets.token_bytes(NBYTES)
        client.join(worker)
        client.write(0, data)
        call(worker, client, 0, 1)
        assert client.read(1) == data, transport
        assert client.trial.is_signed(7), transport
        assert not client.trial.is_signed(8), transport


def test_calls_of_a_lane_are_in_order_and_answered_before_they_run(spawn: Spawn, connect: Connect) -> None:
    """The client enqueues a pipeline without waiting for any of it; another lane does not wait for that."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker)
    release = client.hold()
    client.write(0, data)
    for step in range(100):
        call(worker, client, step, step + 1)
    assert not client.driver.is_stream_idle(client.streams[0])
    client.write(200, data[::-1], lane=1)
    call(worker, client, 200, 201, lane=1)
    assert client.read(201, lane=1) == data[::-1]
    assert not client.driver.is_stream_idle(client.streams[0])
    release()
    assert client.read(100) == data


def test_client_that_comes_while_a_stream_waits_is_served(spawn: Spawn, connect: Connect) -> None:
    """One client's slow work must not be another's."""
    worker, first, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    first.join(worker)
    release = first.hold()
    call(worker, first, 0, 1)
    second = connect()
    second.join(worker)
    second.write(0, data)
    call(worker, second, 0, 1)
    assert second.read(1) == data
    release()
    finish(first.driver, first.streams[0])


def test_unmapping_holds_up_no_call(spawn: Spawn, connect: Connect) -> None:
    """The driver blocks who unmaps while a stream waits; the worker puts it off."""
    worker, first, second = spawn(), connect(), connect()
    first.join(worker)
    second.join(worker)
    call(worker, second, 0, 1)
    finish(second.driver, second.streams[0])
    release = first.hold()
    call(worker, first, 0, 1)
    worker.tell(messages.UnmapArena(client=2, arena=1))
    worker.tell(messages.UnmapGpu(client=2, gpu=second.context.gpu))
    call(worker, first, 1, 2)
    release()
    finish(first.driver, first.streams[0])

    def is_unmapped() -> bool:
        worker.run(next(numbers), second, TimelinePoint(0, 1), second.refs(0, 1))
        return worker.answer()[0].kind == Kind.RAISED

    until(is_unmapped)


def test_offer_that_reads_otherwise_is_refused_with_its_transport(spawn: Spawn, connect: Connect) -> None:
    """Handles can open onto other memory; the next offer is a new chance."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker, replace(client.trial.offer, pattern=bytes(256)))
    client.write(0, data)
    point = client.begin()
    worker.run(1, client, point, client.refs(0, 1))
    error = worker.error()
    assert (error.code, error.facts["transport"]) == ("NO_TRANSPORT", "ipc")
    assert not client.trial.is_signed(7)
    again = Trial(client.context, "c", 3, "ipc")
    gpu = messages.MapGpu(
        client=client.number, gpu=client.context.gpu, slot=7, has_memops=True, offer=again.offer.to_wire()
    )
    worker.tell(gpu, client.fd)
    worker.run(2, client, point, client.refs(0, 1))
    assert worker.answer()[0].kind == Kind.RAN
    assert client.read(1) == data
    worker.close()
    again.close()


def test_kernel_that_raises_leaves_its_call_to_others(spawn: Spawn, connect: Connect) -> None:
    """What it had enqueued is over when the broker hears of it, and DONE is not written."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker)
    client.write(0, data)
    point = client.begin()
    worker.run(1, client, point, client.refs(0, 1), "raise")
    error = worker.error()
    assert (error.code, "the toy refuses" in error.message) == ("BACKEND_ERROR", True)
    assert not client.order.page.is_done(point)
    worker.run(2, client, point, client.refs(0, 1))
    assert worker.answer()[0].kind == Kind.RAN
    assert client.read(1) == data


def test_kernel_that_raises_while_the_client_works_costs_no_worker(spawn: Spawn, connect: Connect) -> None:
    """The time for it to end counts from when its inputs were there."""
    worker, client = spawn(), connect()
    client.join(worker)
    release = client.hold()
    point = client.begin()
    worker.run(1, client, point, client.refs(0, 1), "raise")
    assert worker.is_silent()
    release()
    assert worker.error().code == "BACKEND_ERROR"
    client.order.page.fail(point, 1)


def test_next_worker_finishes_what_a_killed_one_had_enqueued(spawn: Spawn, connect: Connect) -> None:
    """Its inputs are as they were: the client's stream stopped at the first call that is not done."""
    first, second, client, data = spawn(), spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(first)
    client.join(second)
    call(first, client, 200, 201)
    finish(client.driver, client.streams[0])
    release = client.hold()
    client.write(0, data)
    points = []
    for step in range(10):
        points.append(client.begin())
        first.run(step + 1, client, points[-1], client.refs(step, step + 1))
        assert first.answer()[0].kind == Kind.RAN
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(PATIENCE_S)
    release()
    assert not client.order.page.is_done(points[0])
    for step, point in enumerate(points):
        second.run(step + 1, client, point, client.refs(step, step + 1))
        assert second.answer()[0].kind == Kind.RAN
    assert client.read(10) == data


@pytest.mark.parametrize("phase", ["executing", "written"])
def test_death_within_a_call_leaves_it_not_done(spawn: Spawn, connect: Connect, phase: str) -> None:
    """With DONE a client would go on with half a result."""
    first, second, client, data = spawn(f"{phase}=kill@2"), spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(first)
    client.join(second)
    client.write(0, data)
    call(first, client, 0, 1)
    assert client.read(1) == data
    point = client.begin()
    first.run(2, client, point, client.refs(1, 2))
    assert first.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not client.order.page.is_done(point)
    second.run(2, client, point, client.refs(1, 2))
    assert second.answer()[0].kind == Kind.RAN
    assert client.read(2) == data


def test_illegal_address_ends_the_process_though_nobody_calls(spawn: Spawn, connect: Connect) -> None:
    """Its call was answered before: only the end of the process tells the broker. The client's GPU is whole."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker)
    point = client.begin()
    worker.run(1, client, point, client.refs(0, 1), "illegal")
    assert worker.process.wait(PATIENCE_S) == 70
    assert "the worker ends: cu" in worker.log.read_text()
    assert not client.order.page.is_done(point)
    client.order.page.fail(point, 42)
    client.write(3, data)
    assert client.read(3) == data


def test_time_of_a_run_is_the_gpus(spawn: Spawn, connect: Connect) -> None:
    """Of runs as graphs, sampled, and told with a later answer; a copy of 64 KiB takes between a microsecond and a
    millisecond."""
    worker, client = spawn(), connect()
    client.join(worker)
    times = []
    for _ in range(16):
        times.append(call(worker, client, 0, 1).time)
        finish(client.driver, client.streams[0])
    assert times[:5] == [0] * 5  # four runs warm up
    assert all(500 < time < 1_000_000 for time in times[5:13]), times
    assert times[13:] == [0, 0, 0]


def test_repeated_call_is_replayed_with_the_data_of_each_time(spawn: Spawn, connect: Connect) -> None:
    """One launch in place of a kernel's own way through its library; waits and words stay outside of the graph."""
    worker, client = spawn(), connect()
    client.join(worker)
    replayed = []
    for _ in range(8):
        data = secrets.token_bytes(NBYTES)
        client.write(0, data)
        replayed.append(call(worker, client, 0, 1).aux)
        assert client.read(1) == data
    assert replayed == [0] * 4 + [1] * 4
    client.write(0, data, lane=1)
    assert call(worker, client, 0, 1, lane=1).aux == 0  # its lane's stream is another
    assert client.read(1, lane=1) == data
    release = client.hold()
    client.write(0, data[::-1])
    assert [call(worker, client, 0, 1).aux for _ in range(50)] == [1] * 50  # nobody waits for them
    assert not client.driver.is_stream_idle(client.streams[0])
    release()
    assert client.read(1) == data[::-1]


def test_kernel_is_captured_while_its_stream_waits(spawn: Spawn, connect: Connect) -> None:
    """A client that enqueues ahead is never idle: a capture that waited for that would hold up everybody."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker)
    release = client.hold()
    client.write(0, data)
    assert [call(worker, client, 0, 1).aux for _ in range(8)] == [0] * 4 + [1] * 4
    assert not client.driver.is_stream_idle(client.streams[0])
    release()
    assert client.read(1) == data


@pytest.mark.parametrize("transport", ["staged", "copied"])
def test_replayed_call_takes_part_in_copies(spawn: Spawn, connect: Connect, transport: str) -> None:
    """What is copied around the kernel is not in the graph."""
    worker, client = spawn(), connect(transport)
    client.join(worker)
    for number in range(7):
        data = secrets.token_bytes(NBYTES)
        client.write(0, data)
        assert call(worker, client, 0, 1).aux == (number >= 4)
        assert client.read(1) == data


def test_kernel_that_cannot_be_captured_stays_eager_and_right(spawn: Spawn, connect: Connect) -> None:
    """One that waits for its stream breaks the capture; the stream goes on."""
    worker, client = spawn(), connect()
    client.join(worker)
    for _ in range(8):
        data = secrets.token_bytes(NBYTES)
        client.write(0, data)
        assert call(worker, client, 0, 1, kernel="synchronize").aux == 0
        assert client.read(1) == data
    assert worker.log.read_text().count("kernel toy.synchronize cannot be captured and stays eager") == 1


def test_graph_is_gone_with_its_arena(spawn: Spawn, connect: Connect) -> None:
    """Its addresses are baked in; on other memory the call is bound and captured anew."""
    worker, client = spawn(), connect()
    client.join(worker)
    for _ in range(6):
        call(worker, client, 0, 1)
    finish(client.driver, client.streams[0])
    worker.tell(messages.UnmapArena(client=1, arena=1))
    old, client.arena = client.arena, Arena(client.context, "c", 3, 16 << 20)
    client.map_arena(worker)
    replayed = []
    for _ in range(6):
        data = secrets.token_bytes(NBYTES)
        client.write(0, data)
        replayed.append(call(worker, client, 0, 1).aux)
        assert client.read(1) == data
    assert replayed == [0] * 4 + [1] * 2
    worker.close()
    old.close()


def test_stop_waits_for_what_was_enqueued(spawn: Spawn, connect: Connect) -> None:
    """A worker that is replaced has answered its calls already."""
    worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
    client.join(worker)
    release = client.hold()
    client.write(0, data)
    call(worker, client, 0, 1)
    worker.send(wire.pack(Kind.STOP))
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.2)
    release()
    assert worker.process.wait(PATIENCE_S) == 0
    assert client.read(1) == data
    until(lambda: client.driver.is_stream_idle(client.streams[0]))
