"""A worker's express lanes: descriptors and plans that are gone are not kept."""

from __future__ import annotations

import gc
import os
import select
import socket
import weakref
from collections.abc import Iterator

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import create_memfd
from layerzero.ipc.spinning import Cores
from layerzero.workers.lanes import Lane, Lanes


def lent(page: int) -> list[int]:
    """What comes with map_lane."""
    ringing, hearing = lane.create_answer_bell()
    hearing.close()
    return [page, lane.create_doorbell(counts=True), ringing.detach()]


def test_a_lane_that_cannot_be_opened_leaves_no_descriptor() -> None:
    """The broker goes on with other clients; this worker would run out of descriptors."""
    lanes, before = Lanes(select.poll()), os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):  # cannot be mapped to be written
        lanes.open(1, 1, lent(os.open(os.devnull, os.O_RDONLY)))
    with pytest.raises(ProtocolError, match="needed: 3"):
        lanes.open(1, 1, [create_memfd("page", lane.PAGE_BYTES)])
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(OSError, match="non-socket"):
        lanes.open(
            1,
            1,
            [
                create_memfd("page", lane.PAGE_BYTES),
                lane.create_doorbell(counts=True),
                lane.create_doorbell(counts=True),
            ],
        )
    assert os.listdir("/proc/self/fd") == before
    lanes.open(1, 1, lent(create_memfd("page", lane.PAGE_BYTES)))
    held = os.listdir("/proc/self/fd")
    with pytest.raises(ProtocolError, match="once"):
        lanes.open(1, 1, lent(create_memfd("page", lane.PAGE_BYTES)))
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
    lanes, page = Lanes(select.poll(), spin_ns=spin_ns), create_memfd("page", lane.PAGE_BYTES)
    ringing, hearing = lane.create_answer_bell()
    doorbell = lane.create_doorbell(counts=True)
    lanes.open(1, 1, [os.dup(page), os.dup(doorbell), ringing.detach()])
    client = lane.Page(page)
    os.close(page)
    return lanes, lanes._lanes[1], client, doorbell, hearing


Table = tuple[Lanes, Lane, lane.Page, int, socket.socket]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.setattr(Cores, "are_free", lambda _: True)
    made = opened(spin_ns=10_000_000)
    yield made
    made[0].close(1)
    made[4].close()
    os.close(made[3])


def test_a_client_is_rung_for_the_call_that_it_waits_for(table: Table) -> None:
    """And for those behind it until it says something else; one that looks at the page says 0."""
    _, one, client, _, hearing = table
    for call, (waits, is_rung) in enumerate([(0, False), (3, False), (3, True), (3, True), (0, False)], start=1):
        client.put_call(call, 7, b"", waits=False)
        client._words[lane.LAYOUT[3] // 8] = waits
        one.end(call, lane.OK)
        assert bool(select.select([hearing], [], [], 0)[0]) is is_rung
        lane.hear(hearing)


def test_a_worker_that_watches_claims_the_next_call(table: Table) -> None:
    """By its ring, as ever: one that the client takes back is not the worker's."""
    lanes, one, client, doorbell, _ = table
    assert lanes.watch() is None  # no call came before
    client.put_call(1, 7, b"")
    lane.ring(doorbell)
    assert list(lanes.claimed([(one.doorbell, select.POLLIN)])) == [(one, (1, 7, b""))]
    one.end(1, lane.OK)
    client.put_call(2, 8, b"refs")
    lane.ring(doorbell)
    assert lanes.watch() == (one, (2, 8, b"refs"))
    one.end(2, lane.OK)
    client.put_call(3, 7, b"")  # its ring is not there
    assert lanes.watch() is None
    assert lanes.watch() is None


def test_calls_on_a_lane_are_claimed_one_by_one(table: Table) -> None:
    """So the last ones can be taken back while the first one runs."""
    lanes, one, client, doorbell, _ = table
    for call in (1, 2, 3):
        client.put_call(call, 6 + call, b"")
    lane.ring(doorbell, 3)
    event = (one.doorbell, select.POLLIN)
    assert [call for _, call in lanes.claimed([event])] == [(1, 7, b"")]
    assert lane.take(doorbell)  # the third
    client.withdraw(3)
    lane.ring(doorbell)
    assert [call for _, call in lanes.claimed([event])] == [(2, 8, b"")]
    assert lanes.watch() == (one, (3, lane.NO_PLAN, b""))
    assert not lanes.allows(1, lane.NO_PLAN)
    assert list(lanes.claimed([event])) == []


@pytest.mark.parametrize("number", [0, 1, 3, (1 << 64) - 1])
def test_who_rings_for_what_it_has_not_put_is_not_listened_to(table: Table, number: int) -> None:
    """A full doorbell would keep the worker awake, and let it run what is not there."""
    lanes, one, client, doorbell, _ = table
    client.put_call(1, 7, b"")
    lane.ring(doorbell, 1 << 60)
    assert len(list(lanes.claimed([(one.doorbell, select.POLLIN)]))) == 1
    client._words[(4096 + 3200) // 8], client._words[lane.LAYOUT[2] // 8] = number, 2  # in place of call 2
    assert lanes.watch() is None
    assert not lanes.are_doorbells([(one.doorbell, select.POLLIN)])
    assert list(lanes.claimed([(one.doorbell, select.POLLIN)])) == []


def test_full_lanes_take_turns() -> None:
    """One call of each, however many one of them has."""
    lanes, ends = Lanes(select.poll()), []
    for number in (1, 2):
        page, doorbell = create_memfd("page", lane.PAGE_BYTES), lane.create_doorbell(counts=True)
        ringing, hearing = lane.create_answer_bell()
        client = lane.Page(page)
        lanes.open(number, number, [page, doorbell, ringing.detach()])
        for call in range(1, 4 * number):
            client.put_call(call, 7, b"")
        lane.ring(doorbell, 4 * number - 1)
        ends.append((client, hearing))
    events = [(one.doorbell, select.POLLIN) for one in lanes._lanes.values()]
    rounds = [[(one.number, claimed[0]) for one, claimed in lanes.claimed(events)] for _ in range(5)]
    assert rounds == [[(1, 1), (2, 1)], [(1, 2), (2, 2)], [(1, 3), (2, 3)], [(2, 4)], [(2, 5)]]
    for number in (1, 2):
        lanes.close(number)
    for client, hearing in ends:
        client.close()
        hearing.close()


def test_a_lane_that_is_closed_holds_no_memory_of_its_client() -> None:
    """Not even until the next collection: what its calls were bound to lies in arenas, which stay mapped else."""
    lanes, one, _, doorbell, hearing = opened()

    class Bound:
        def __call__(self) -> None:
            return None

    bound = Bound()
    held = weakref.ref(bound)
    one.remember(7, b"", bound)
    gc.disable()
    try:
        del bound
        lanes.close(1)
        del one
        assert held() is None
    finally:
        gc.enable()
    hearing.close()
    os.close(doorbell)
