"""What holds for calls by ring, on a GPU (tests/gpu) and on the soft one (tests/process): a client, its ring, and a
worker process."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
import time
from typing import Any

import msgpack
import pytest
from tests.gpu.bare_worker import NBYTES, PLANS, Client, Connect, Spawn, Worker, numbers
from tests.gpu.conftest import finish, until
from tests.gpu.peer import PATIENCE_S

from layerzero.ipc.errors import from_wire
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.ring_words import ENQUEUED, LEFT, REPLAYED
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.wire import Kind, Ref, pack_refs
from layerzero.ipc.vocabulary.worker_codes import mark


def left(worker: Worker) -> tuple[int, int, Any]:
    """(lane, call, error) of a call that the worker leaves to the broker."""
    header, body = worker.answer()
    assert header.kind == Kind.LEFT
    return header.aux, header.seq, from_wire(msgpack.unpackb(body)) if body else None


def run(worker: Worker, client: Client, point: TimelinePoint, source: int, target: int) -> None:
    """As the broker does with a call that was left to it."""
    worker.run(next(numbers), client, point, client.refs(source, target))
    assert worker.answer()[0].kind == Kind.RAN


class RingChecks:
    def test_calls_run_in_order_and_become_replays(self, spawn: Spawn, connect: Connect) -> None:
        """Nobody answers: the words of the timeline page are all that the two sides exchange."""
        worker, client = spawn(), connect()
        client.join(worker)
        ring, statuses = client.lend(worker), []
        for _ in range(8):
            data = secrets.token_bytes(NBYTES)
            client.write(0, data)
            ring.call(0, 1)
            statuses.append(ring.status())
            assert client.read(1) == data
        assert statuses == [ENQUEUED] * 4 + [REPLAYED] * 4
        assert worker.is_silent()
        count, plan, kernel_ns = ring.ring.times
        assert (count > 0, plan, kernel_ns > 0) == (True, PLANS["copy"], True)

    def test_client_enqueues_ahead_of_its_gpu(self, spawn: Spawn, connect: Connect) -> None:
        """A chain is put without waiting for any of it; another lane does not wait for that."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        ring, release = client.lend(worker), client.hold()
        client.write(0, data)
        for step in range(150):
            ring.call(step, step + 1)
        until(lambda: ring.ring.taken == 150)
        client.write(200, data[::-1], lane=1)
        ring.call(200, 201, lane=1)
        assert client.read(201, lane=1) == data[::-1]
        assert not client.driver.is_stream_idle(client.streams[0])
        release()
        assert client.read(150) == data

    def test_no_call_is_overslept(self, spawn: Spawn, connect: Connect) -> None:
        """The client looks whether the worker sleeps after it has put a call, and the worker looks for one after it
        has said so: calls come at every moment between the two."""
        worker, client = spawn(), connect()
        client.join(worker)
        ring, chance = client.lend(worker), random.Random(7)
        for _ in range(400):
            point = ring.call(0, 1)
            until(lambda point=point: client.order.page.is_done(point))
            stop_s = time.perf_counter() + chance.uniform(0.0009, 0.0013)
            while time.perf_counter() < stop_s:
                pass
        assert worker.is_silent()
        until(lambda: ring.ring.is_asleep)
        point = ring.call(0, 1)
        until(lambda: client.order.page.is_done(point))

    def test_worker_that_is_called_serves_its_other_clients(self, spawn: Spawn, connect: Connect) -> None:
        """Calls of the broker, of another ring, and messages come through while a ring is never empty."""
        worker, first, second = spawn(), connect(), connect()
        first.join(worker)
        rings = [first.lend(worker, 1)]
        data = secrets.token_bytes(NBYTES)
        release = first.hold()
        for _ in range(200):
            rings[0].call(0, 1)
        second.join(worker)
        rings.append(second.lend(worker, 2))
        second.write(0, data)
        for _ in range(100):
            rings[0].call(0, 1)
            point = rings[1].call(0, 1)
        run(worker, second, second.begin(1), 1, 2)
        until(lambda: second.order.page.is_done(point))
        assert second.read(1) == data
        assert not first.driver.is_stream_idle(first.streams[0])
        release()
        finish(first.driver, first.streams[0])

    def test_what_it_does_not_run_it_leaves_to_the_broker(self, spawn: Spawn, connect: Connect) -> None:
        """With the reason, when that is the kernel's; the ring goes on, and the call may come back late."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        ring = client.lend(worker, 5, "copy", "raise")
        client.write(0, data)
        unknown = pack_refs([Ref(9, 0, 0, NBYTES), Ref(9, 0, NBYTES, NBYTES)])
        bad: list[dict[str, Any]] = [
            {"kernel": "synchronize"},  # not allowed
            {"refs": unknown},
            {"refs": client.refs(0, 1)[:-1]},
            {"kernel": "raise"},
        ]
        for number, how in enumerate(bad, 1):
            point = ring.call(0, 1, **how)
            if how.get("kernel") == "raise":
                until(lambda point=point: client.order.page.is_ready(point))
            lane_number, call, error = left(worker)
            assert (lane_number, call, ring.status()) == (5, number, LEFT)
            assert ("the toy refuses" in str(error)) == (how.get("kernel") == "raise")
            assert not client.order.page.is_done(point)
            run(worker, client, point, 0, 1)
        ring.call(1, 2)
        assert ring.status() == ENQUEUED
        assert client.read(2) == data

    def test_call_that_was_left_runs_after_later_ones_were_enqueued(self, spawn: Spawn, connect: Connect) -> None:
        """The client's stream stops at the one that is missing; the worker's must not stop behind a later one."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        ring = client.lend(worker)
        client.write(0, data)
        missing = ring.call(0, 1, kernel="synchronize")
        last = ring.call(1, 2)
        assert left(worker)[1] == 1
        until(lambda: ring.ring.taken == 2)
        assert not client.order.page.is_ready(last)
        run(worker, client, missing, 0, 1)
        assert client.read(2) == data

    def test_next_worker_finishes_what_the_ring_of_a_killed_one_has(self, spawn: Spawn, connect: Connect) -> None:
        """The broker reads the calls off the ring; what the killed one had enqueued was not done."""
        first, second, client, data = spawn(), spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(first)
        client.join(second)
        ring, release = client.lend(first), client.hold()
        client.write(0, data)
        for step in range(10):
            ring.call(step, step + 1)
        until(lambda: ring.ring.taken >= 5)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(PATIENCE_S)
        ring.ring.end()
        release()
        calls = ring.ring.left()
        assert [call.call for call in calls] == list(range(1, 11))
        for call in calls:
            assert not client.order.page.is_done(call.point)
            second.run(call.call, client, call.point, call.refs)
            assert second.answer()[0].kind == Kind.RAN
        assert client.read(10) == data

    @pytest.mark.parametrize("phase", ["received=kill@3", "executing=kill@2", "written=kill@2"])
    def test_death_within_a_call_leaves_it_to_be_read(self, spawn: Spawn, connect: Connect, phase: str) -> None:
        """It was taken and is not done; the control page names the ring and the call for blame."""
        worker, client = spawn(phase), connect()
        client.join(worker)
        ring = client.lend(worker, 3)
        ring.call(0, 1)
        point = ring.call(0, 1)
        assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
        assert (ring.ring.taken, client.order.page.is_done(point)) == (2, False)
        assert worker.page.read()[0] == mark(3, 2)
        client.order.page.fail(point, 1)

    def test_worker_goes_on_when_a_client_is_gone(self, spawn: Spawn, connect: Connect) -> None:
        """Its READY never comes; the worker's streams must not wait for it for ever, nor keep its memory mapped."""
        worker, client, other = spawn(), connect(), connect()
        client.join(worker)
        other.join(worker)
        ring = client.lend(worker)
        for step in range(5):  # nothing is entered: as if the client had died between
            point = client.order.reserve(client.streams[0])
            ring.write(point, client.refs(step, step + 1), PLANS["copy"])
        until(lambda: ring.ring.taken == 5)
        assert not client.order.page.is_done(point)
        worker.tell(messages.UnmapLane(lane=1))
        until(lambda: client.order.page.is_done(point))
        client.order.page.store_ready(TimelinePoint(0, 0))  # a late write of its GPU
        worker.tell(messages.UnmapArena(client=client.number, arena=1))
        worker.tell(messages.UnmapGpu(client=client.number, gpu=client.context.gpu))
        run(worker, other, other.begin(), 0, 1)
        finish(other.driver, other.streams[0])
        assert worker.stop() == 0

    def test_client_that_writes_nonsense_loses_its_ring_alone(self, spawn: Spawn, connect: Connect) -> None:
        """The worker serves others too."""
        worker, client, other = spawn(), connect(), connect()
        client.join(worker)
        other.join(worker)
        ring, whole = client.lend(worker, 1), other.lend(worker, 2)
        ring.ring.put(7, 1, 1, 1, TimelinePoint(0, 1), b"")  # where call 1 should be there is none
        lane.ring(ring.doorbell)
        data = secrets.token_bytes(NBYTES)
        other.write(0, data)
        whole.call(0, 1)
        assert other.read(1) == data
        until(lambda: "is not served by ring 1 any more" in worker.log.read_text())
        point = TimelinePoint(70, 1)  # no such lane
        whole.write(point, other.refs(0, 1), PLANS["copy"])
        assert "point 1 of timeline 70" in str(left(worker)[2])

    def test_stop_waits_for_what_was_enqueued(self, spawn: Spawn, connect: Connect) -> None:
        """A worker that is replaced is done with what it has taken; later calls are read off the ring."""
        worker, client, data = spawn(), connect(), secrets.token_bytes(NBYTES)
        client.join(worker)
        ring, release = client.lend(worker), client.hold()
        client.write(0, data)
        ring.call(0, 1)
        until(lambda: ring.ring.taken == 1)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.stop(0.2)
        release()
        assert worker.process.wait(PATIENCE_S) == 0
        assert client.read(1) == data
