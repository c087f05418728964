"""Clients that know the document alone on express lanes: those that keep to it, and those that mean harm."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from tests.process.harness import Site, bare_client, wait_until

import layerzero as lz
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.transport import control, messages, wire

X = np.linspace(-3, 3, 8, dtype=np.float32)
FULL = (1 << 64) - 2  # what an eventfd can count
UNHEARD = 400  # more rings than an answer bell can hold

SILU = messages.Route(
    op="silu", inputs=[["float32", [4], [1]]], outputs=[["float32", [4], [1]]], attrs={}, backend="alpha"
)
REFS = wire.pack_refs([wire.Ref(1, 0, 0, 16), wire.Ref(1, 0, 64, 16)])


class Bare:
    """A client of bytes: one arena with zeros, one settled route, and the lease that came with it."""

    def __init__(self, site: Site, context: zmq.Context) -> None:  # type: ignore[type-arg]
        self.sock, self.dealer = bare_client(site, context)
        arena = memory.create_memfd("small", 4096)
        control.send(self.sock, messages.AddArena(arena=1, nbytes=4096), (arena,))
        control.receive(self.sock, messages.ArenaAdded)
        os.close(arena)
        self.dealer.send(wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(SILU)))
        self.lease: messages.Lease | None = None
        for _ in range(3):
            assert self.execute() == wire.Kind.DONE
        self.fd = memory.create_memfd("page", lane.PAGE_BYTES)
        self.page, self.bells = lane.Page(self.fd), [-1, -1]

    def execute(self, flags: int = 0, aux: int = 0) -> int:
        self.dealer.send(wire.pack(wire.Kind.EXECUTE, flags, 1, 1, 0, aux, body=REFS))
        while True:
            frame = self.dealer.recv()
            header = wire.unpack(frame)
            if header.kind == wire.Kind.LEASE:
                self.lease = messages.decode(frame[wire.HEADER_BYTES :], messages.Lease)
            elif header.kind != wire.Kind.DECISION:
                return header.kind

    def open(self, number: int, fds: tuple[int, ...] | None = None) -> messages.LaneAdded | messages.Refused:
        control.send(self.sock, messages.AddLane(lane=number), (self.fd,) if fds is None else fds)
        answer, bells = control.receive(self.sock, messages.LaneAdded, messages.Refused)
        self.bells = bells or self.bells
        return answer

    def ride(self, call: int, plan: int, refs: bytes = REFS) -> int:
        """The status that the call ends with."""
        self.page.put_call(call, plan, refs)
        lane.ring(self.bells[0])
        end = wait_until(lambda: self.page.get_end(call))
        assert end is not None
        return end[0]

    def close(self) -> None:
        self.page.close()
        self.dealer.close(0)
        self.sock.close()
        for fd in (self.fd, *self.bells):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def bare(connected: Site) -> Iterator[Bare]:
    connected.wait_ready("alpha")
    context = zmq.Context()
    client = Bare(connected, context)
    yield client
    client.close()
    context.term()


def test_the_document_is_enough_to_ride_a_lane(bare: Bare) -> None:
    """Another language's client has nothing else."""
    assert bare.lease is not None
    assert bare.open(bare.lease.lane) == messages.LaneAdded(lane=bare.lease.lane, is_open=True)
    assert bare.page.epoch == bare.lease.epoch
    assert [bare.ride(call, bare.lease.plan) for call in (1, 2, 3)] == [lane.OK] * 3


def test_a_worker_declines_what_the_broker_has_not_allowed(bare: Bare) -> None:
    """Other plans, arenas that were never lent, references of another op."""
    lease = bare.lease
    assert lease is not None
    bare.open(lease.lane)
    foreign = wire.pack_refs([wire.Ref(1, 0, 0, 16), wire.Ref(2, 0, 64, 16)])
    far = wire.pack_refs([wire.Ref(1, 0, 0, 16), wire.Ref(1, 0, 4090, 16)])
    assert bare.ride(1, lease.plan + 1000) == lane.DECLINED
    assert bare.ride(2, lease.plan, foreign) == lane.DECLINED
    assert bare.ride(3, lease.plan, REFS[:24]) == lane.DECLINED
    assert bare.ride(4, lease.plan, far) == lane.RAISED
    assert bare.ride(5, lease.plan) == lane.OK


def test_a_worker_runs_neighbours_that_the_broker_allowed_and_no_others(bare: Bare) -> None:
    """Three or four numbers are one bucket; what follows the references says how many."""
    lease = bare.lease
    assert lease is not None
    assert lease.neighbours == [[[3, 4]], [[0], [0]]]
    bare.open(lease.lane)
    statuses = {
        name: bare.ride(call, lease.plan, REFS + tail)
        for call, (name, tail) in enumerate(
            {
                "three": struct.pack("<Q", 3),
                "four": struct.pack("<Q", 4),
                "two": struct.pack("<Q", 2),
                "five": struct.pack("<Q", 5),
                "none": struct.pack("<Q", 0),
                "far": struct.pack("<Q", (1 << 64) - 1),
                "two symbols": struct.pack("<2Q", 3, 3),
                "half a word": struct.pack("<I", 3),
                "no number": b"\xff" * 512,
            }.items(),
            start=1,
        )
    }
    assert {name for name, status in statuses.items() if status == lane.OK} == {"three", "four"}
    assert set(statuses.values()) == {lane.OK, lane.DECLINED}


def test_a_lane_that_is_not_the_clients_is_refused(connected: Site, bare: Bare) -> None:
    """Nor may a lane be opened twice; the offender is dropped, and the lane's owner has it still."""
    assert bare.lease is not None
    context = zmq.Context()
    other = Bare(connected, context)
    assert isinstance(other.open(bare.lease.lane), messages.Refused)
    other.close()
    assert isinstance(bare.open(bare.lease.lane), messages.LaneAdded)
    assert bare.ride(1, bare.lease.plan) == lane.OK
    assert isinstance(bare.open(bare.lease.lane), messages.Refused)
    context.term()


@pytest.mark.parametrize("fault", ["none", "two", "no page"])
def test_descriptors_that_are_no_lane_are_refused(bare: Bare, fault: str) -> None:
    """A worker would be killed by a page that is cut short."""
    assert bare.lease is not None
    fds = {"none": (), "two": (bare.fd, bare.fd), "no page": (bare.sock.fileno(),)}[fault]
    assert isinstance(bare.open(bare.lease.lane, fds), messages.Refused)


def test_a_lane_that_nobody_knows_changes_nothing(connected: Site, bare: Bare) -> None:
    """Its worker may just have gone: not open, nothing late, and calls after it are ordinary ones."""
    assert bare.open(4711) == messages.LaneAdded(lane=4711, is_open=False)
    bare.dealer.send(wire.pack(wire.Kind.OVERDUE, route=1, seq=1, aux=4711, time=1))
    assert bare.execute(wire.AFTER_LANE, 4711) == wire.Kind.DONE
    assert connected.backend("alpha")["state"] == "ready"


# --- bells that their client has spoilt


def spoil(bare: Bare) -> None:
    """Make the lane's bells blocking, and fill the doorbell: whoever writes to it would wait from now on."""
    for bell in bare.bells:
        os.set_blocking(bell, True)
    os.eventfd_write(bare.bells[0], FULL)


def ride_unheard(bare: Bare) -> int:
    """Fill the answer bell. The number of the last call."""
    assert bare.lease is not None
    for call in range(1, UNHEARD + 1):
        assert bare.ride(call, bare.lease.plan) == lane.OK
    return UNHEARD


def test_a_worker_is_not_held_up_by_an_answer_bell_that_nobody_hears(bare: Bare) -> None:
    """Others' calls need it."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    for bell in bare.bells:
        os.set_blocking(bell, True)
    ride_unheard(bare)
    lz.silu(X, backend="alpha")


def test_a_worker_is_not_held_up_by_a_doorbell_that_is_silent_again(bare: Bare) -> None:
    """It was rung when the worker woke up, and its client takes the ring back before the worker does, many times."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    assert bare.ride(1, bare.lease.plan) == lane.OK
    for bell in bare.bells:
        os.set_blocking(bell, True)
    call = 2
    for step in range(2000):
        bare.page.put_call(call, bare.lease.plan, REFS)
        lane.ring(bare.bells[0])
        end_ns = time.perf_counter_ns() + step % 100 * 500  # as long as a worker may take to wake up
        while time.perf_counter_ns() < end_ns:
            pass
        call += not lane.take(bare.bells[0])  # the worker has it
        lz.silu(X, backend="alpha")


def test_a_worker_does_not_listen_to_who_rings_for_nothing(bare: Bare) -> None:
    """It would be awake for as long as there are rings to take, and more than 2**63 are there."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    assert bare.ride(1, bare.lease.plan) == lane.OK
    spoil(bare)
    bare.page.put_call(3, bare.lease.plan, REFS)  # not the next one
    for _ in range(100):
        lz.silu(X, backend="alpha")
    assert bare.page.done == 1


def test_many_calls_on_a_lane_end_in_order_and_beside_others(bare: Bare) -> None:
    """As many as the page has places, rung for at once; one of them was withdrawn, others are no calls."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    foreign = wire.pack_refs([wire.Ref(1, 0, 0, 16), wire.Ref(2, 0, 64, 16)])
    for call in range(1, lane.DEPTH + 1):
        bare.page.put_call(call, bare.lease.plan, foreign if call == 7 else REFS)
    bare.page.withdraw(5)
    lane.ring(bare.bells[0], lane.DEPTH)
    lz.silu(X, backend="alpha")
    wait_until(lambda: bare.page.done == lane.DEPTH)
    found = [bare.page.get_end(call) for call in range(1, lane.DEPTH + 1)]
    statuses = [end[0] for end in found if end is not None]
    assert len(statuses) == lane.DEPTH
    assert [call for call, status in enumerate(statuses, 1) if status == lane.DECLINED] == [5, 7]
    assert not lane.take(bare.bells[0])


def test_a_broker_is_not_held_up_by_bells_that_nobody_hears(connected: Site, bare: Bare) -> None:
    """It tells the client of its worker's end, and others need it."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    (alpha,) = connected.wait_ready("alpha")
    call = ride_unheard(bare)
    os.kill(alpha, signal.SIGSTOP)
    spoil(bare)
    os.kill(alpha, signal.SIGKILL)
    wait_until(lambda: bare.page.is_ended)
    assert bare.page.done == call
    assert connected.wait_ready("alpha") != [alpha]
    lz.silu(X, backend="alpha")


def test_an_answer_bell_that_its_client_has_closed_harms_nobody(connected: Site, bare: Bare) -> None:
    """The call has ended all the same."""
    assert bare.lease is not None
    bare.open(bare.lease.lane)
    before = connected.wait_ready("alpha")
    os.close(bare.bells.pop())
    assert bare.ride(1, bare.lease.plan) == lane.OK
    lz.silu(X, backend="alpha")
    assert connected.wait_ready("alpha") == before
