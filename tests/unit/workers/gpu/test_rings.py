"""Which ring's calls a worker takes next, and what it does when a client is gone, above a driver that is a fake."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.ipc.fake_cuda import UUID
from tests.unit.workers.gpu.test_executor import NBYTES, Rig

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, recent_calls
from layerzero.ipc.shm.memory import PAGE_BYTES, ControlPage, create_memfd
from layerzero.ipc.shm.ring import Ring, create_page
from layerzero.ipc.shm.ring_words import LEFT, REPLAYED
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport.wire import Ref, pack_refs
from layerzero.workers.gpu.rings import BURST, Rings

REFS = pack_refs([Ref(1, 0, 0, NBYTES), Ref(1, 0, 4096, NBYTES)])


class Table:
    """A worker's rings, and the ends of them that are the clients'."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.rig.map_gpu()
        self.rig.map_arena()
        self.left: list[tuple[int, int, Exception | None]] = []
        page = create_memfd("page", PAGE_BYTES)
        self.control = ControlPage(page, writable=True)
        self.ends: dict[int, Ring] = {}
        os.close(page)
        plans = {1: self.rig.plan}
        self.rings = Rings(select.poll(), self.rig.gpus, plans, self.control, lambda *what: self.left.append(what))

    def lend(self, number: int, *, is_allowed: bool = True) -> Ring:
        page = create_page()
        ring = self.ends[number] = Ring(page)
        self.rings.open(number, 1, UUID, [page, lane.create_doorbell()])
        if is_allowed:
            self.rings.allow(number, 1)
        return ring

    def close(self) -> None:
        for number, ring in self.ends.items():
            self.rings.close(number)
            ring.close()
        self.rig.close()
        self.control.close()

    def put(self, ring: Ring, points: range, lane: int = 0) -> None:
        for number in points:
            self.rig.page.store_ready(TimelinePoint(lane, number))
            ring.put(ring.taken + number - points.start + 1, 1, 1, number, TimelinePoint(lane, number), REFS)


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.close()


def test_ring_that_is_full_lets_the_others_have_their_point(table: Table) -> None:
    """One client's burst is not another's latency."""
    first, second = table.lend(1), table.lend(2)
    table.put(first, range(1, 101))
    table.put(second, range(1, 4), lane=1)
    assert table.rings.serve()
    assert (first.taken, second.taken) == (BURST, 3)
    while table.rings.serve():
        pass
    assert (first.taken, table.left) == (100, [])
    assert table.rig.page.is_done(TimelinePoint(0, 100))


def test_what_the_client_put_first_is_enqueued_before_a_call_of_the_broker(table: Table) -> None:
    """In a stream of ours a lane's calls come in their order. Later ones of its lane wait: such a call may be a dead
    worker's. Those of other lanes that lie between do not matter."""
    ring, other = table.lend(1), table.lend(2)
    table.put(ring, range(1, 4))
    for call, point in (
        (4, TimelinePoint(1, 1)),
        (5, TimelinePoint(0, 4)),
        (6, TimelinePoint(0, 6)),
        (7, TimelinePoint(1, 2)),
    ):
        table.rig.page.store_ready(point)
        ring.put(call, 1, 1, call, point, REFS)
    table.put(other, range(9, 11))
    table.rings.catch_up(1, UUID, TimelinePoint(0, 5))
    assert (ring.taken, other.taken) == (5, 0)
    table.rig.run(5)
    table.rings.serve()
    assert (ring.taken, other.taken, len(table.rig.streams())) == (7, 2, 2)  # lanes 0 and 1


def test_client_that_puts_nonsense_does_not_hold_up_its_calls_of_the_broker(table: Table) -> None:
    """Its ring is not looked at any more."""
    ring = table.lend(1)
    ring.put(7, 1, 1, 7, TimelinePoint(0, 1), REFS)
    table.rings.catch_up(1, UUID, TimelinePoint(0, 5))
    table.rig.run(5)
    assert ring.taken == 0


def test_context_is_current_once_for_a_burst(table: Table) -> None:
    """To make it so costs two calls of the driver."""
    ring, rig = table.lend(1), table.rig
    rig.plan.is_graph_safe = True
    table.put(ring, range(1, 11))
    table.rings.serve()
    before = rig.driver.calls["push_context"]
    table.put(ring, range(11, 21))
    table.rings.serve()
    assert rig.driver.calls["push_context"] == before + 1
    assert ring.status(20) == REPLAYED


def test_client_that_is_not_mapped_has_its_calls_left(table: Table) -> None:
    """It may be on its way to another transport."""
    ring = table.lend(1)
    table.rig.gpus.unmap_gpu(1, UUID)
    table.put(ring, range(1, 3))
    table.rings.serve()
    assert table.left == [(1, 1, None), (1, 2, None)]
    assert [ring.status(call) for call in (1, 2)] == [LEFT, LEFT]


def test_closed_ring_makes_ready_what_was_enqueued(table: Table) -> None:
    """Until those streams are through: the client's GPU may store an older number once more. What is ready stays so."""
    ring, page, driver = table.lend(1), table.rig.page, table.rig.driver
    table.put(ring, range(1, 6))
    table.rings.serve()
    driver.held.update(table.rig.streams())
    page.store_ready(TimelinePoint(0, 2))
    table.rings.close(1)
    assert page.is_ready(TimelinePoint(0, 5))
    table.rig.gpus.unmap_gpu(1, UUID)
    page.store_ready(TimelinePoint(0, 3))
    table.rig.gpus.watch()
    assert page.is_ready(TimelinePoint(0, 5))
    page.store_ready(TimelinePoint(0, 6))
    table.rig.gpus.watch()
    assert page.is_ready(TimelinePoint(0, 6))
    driver.held.clear()
    table.rig.gpus.watch()
    page.store_ready(TimelinePoint(0, 1))
    table.rig.gpus.watch()
    assert not page.is_ready(TimelinePoint(0, 5))


def test_lease_may_come_before_its_ring(table: Table) -> None:
    """They come in two ways."""
    table.rings.allow(1, 1)
    ring = table.lend(1, is_allowed=False)
    table.put(ring, range(1, 2))
    table.rings.serve()
    assert (table.left, table.rig.page.is_done(TimelinePoint(0, 1))) == ([], True)


def test_a_ring_that_cannot_be_opened_leaves_no_descriptor(table: Table) -> None:
    """The broker tries with other workers; this one would run out of descriptors."""
    before = os.listdir("/proc/self/fd")
    for page in (os.open(os.devnull, os.O_RDONLY), create_memfd("page", PAGE_BYTES)):
        with pytest.raises(ProtocolError):
            table.rings.open(7, 1, UUID, [page, lane.create_doorbell()])
    with pytest.raises(ProtocolError, match="needed: 2"):
        table.rings.open(7, 1, UUID, [create_page()])
    assert os.listdir("/proc/self/fd") == before
    table.lend(7)


def test_plans_that_are_gone_are_not_kept(table: Table) -> None:
    """Their numbers never come again, and leases may name lanes that no client opens."""
    table.lend(2)
    for plan in range(100, 200):
        table.rings.allow(2, plan)
        table.rings.allow(3, plan)
        table.rings.forget_plan(plan)
    assert table.rings._lanes[2].plans == {1}
    assert table.rings._allowed == {}


def test_a_call_is_running_until_it_is_enqueued(table: Table) -> None:
    """What its worker dies in has not ended."""
    seen: list[int] = []
    ring, enqueue = table.lend(1), table.rig.gpus.enqueue

    def noted() -> list[int]:
        return [call.how for call in recent_calls.read(table.control.copy())]

    def look(*its: Any) -> Any:
        seen.extend(noted())
        return enqueue(*its)

    table.rig.gpus.enqueue = look  # type: ignore[method-assign]
    table.put(ring, range(1, 2))
    table.rings.serve()
    assert (seen, noted()) == ([recent_calls.RUNNING], [recent_calls.ENQUEUED])
    table.put(table.lend(2, is_allowed=False), range(2, 3))
    table.rings.serve()
    assert noted() == [recent_calls.ENQUEUED, recent_calls.DECLINED]
