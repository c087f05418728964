"""A worker's express lanes: descriptors and plans that are gone are not kept."""

from __future__ import annotations

import os
import select
import socket

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import PAGE_BYTES, create_memfd
from layerzero.ipc.spinning import Cores
from layerzero.workers.lanes import Lane, Lanes


def lent(page: int) -> list[int]:
    """What comes with map_lane."""
    ringing, hearing = lane.create_answer_bell()
    hearing.close()
    return [page, lane.create_doorbell(), ringing.detach()]


def test_a_lane_that_cannot_be_opened_leaves_no_descriptor() -> None:
    """The broker goes on with other clients; this worker would run out of descriptors."""
    lanes, before = Lanes(select.poll()), os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):  # cannot be mapped to be written
        lanes.open(1, 1, lent(os.open(os.devnull, os.O_RDONLY)))
    with pytest.raises(ProtocolError, match="needed: 3"):
        lanes.open(1, 1, [create_memfd("page", PAGE_BYTES)])
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(OSError, match="non-socket"):
        lanes.open(1, 1, [create_memfd("page", PAGE_BYTES), lane.create_doorbell(), lane.create_doorbell()])
    assert os.listdir("/proc/self/fd") == before
    lanes.open(1, 1, lent(create_memfd("page", PAGE_BYTES)))
    held = os.listdir("/proc/self/fd")
    with pytest.raises(ProtocolError, match="once"):
        lanes.open(1, 1, lent(create_memfd("page", PAGE_BYTES)))
    assert os.listdir("/proc/self/fd") == held
    lanes.close(1)
    assert os.listdir("/proc/self/fd") == before


def test_a_plan_is_allowed_until_it_is_gone() -> None:
    """Numbers of plans never come again, and a lease may name a lane that no client opens."""
    lanes = Lanes(select.poll())
    for plan in range(1, 100):
        lanes.allow(1, plan)
        lanes.allow(2, plan)
    assert lanes.allows(1, 7)
    for plan in range(1, 100):
        lanes.forget_plan(plan)
    assert not lanes.allows(1, 7)
    assert lanes._plans == {}


def opened(spin_ns: int = 0) -> tuple[Lanes, Lane, lane.Page, int, socket.socket]:
    """A lane, and the client's ends of it: page, doorbell, answer bell."""
    lanes, page = Lanes(select.poll(), spin_ns=spin_ns), create_memfd("page", PAGE_BYTES)
    ringing, hearing = lane.create_answer_bell()
    doorbell = lane.create_doorbell()
    lanes.open(1, 1, [os.dup(page), os.dup(doorbell), ringing.detach()])
    client = lane.Page(page)
    os.close(page)
    return lanes, lanes._lanes[1], client, doorbell, hearing


def test_a_client_that_watches_is_not_rung() -> None:
    """It sees the end on the page; one that sleeps must be woken."""
    lanes, one, client, doorbell, hearing = opened()
    for call, watches in enumerate((1, 0, 1, 0), start=1):
        client.put_call(call, 7, b"")
        client._words[lane.LAYOUT[5] // 8] = watches
        one.end(call, lane.OK)
        assert bool(select.select([hearing], [], [], 0)[0]) is not bool(watches)
        lane.hear(hearing)
    lanes.close(1)
    hearing.close()
    os.close(doorbell)


def test_a_worker_that_watches_claims_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its ring, as ever: one that the client has withdrawn is not the worker's."""
    monkeypatch.setattr(Cores, "are_free", lambda _: True)
    lanes, one, client, doorbell, hearing = opened(spin_ns=10_000_000)
    assert lanes.watch() is None  # no call came before
    client.put_call(1, 7, b"")
    lane.ring(doorbell)
    assert list(lanes.claimed([(one.doorbell, select.POLLIN)])) == [one]
    one.end(1, lane.OK)
    client.put_call(2, 7, b"")
    lane.ring(doorbell)
    assert lanes.watch() is one
    one.end(2, lane.OK)
    client.put_call(3, 7, b"")  # withdrawn: its ring is not there
    assert lanes.watch() is None
    assert lanes.watch() is None
    lanes.close(1)
    hearing.close()
    os.close(doorbell)
