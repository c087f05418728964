"""The broker's hold on rings: what a worker may say of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from layerzero.broker.io.lane_pages import LanePages
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory, ring
from layerzero.ipc.shm.ring import SLOTS, Ring
from layerzero.ipc.shm.timeline_page import TimelinePage, TimelinePoint, create_page

CPU, GPU = 1, 2


@pytest.fixture
def ends() -> Iterator[LanePages]:
    found = LanePages()
    found.add(CPU, [memory.create_memfd("lane", lane.PAGE_BYTES)])
    found.add(GPU, [ring.create_page()], is_ring=True)
    yield found
    found.close()


def put(ends: LanePages, *calls: int) -> Ring:
    page = Ring(ends.fds(GPU)[0])
    for call in calls:
        page.put(call, 1, 1, call, TimelinePoint(0, call), b"")
    return page


def test_call_that_was_put_is_read(ends: LanePages) -> None:
    """It becomes the broker's."""
    put(ends, 1, 2, 3).close()
    found = ends.call(GPU, 2)
    assert found is not None
    assert (found.call, found.point) == (2, TimelinePoint(0, 2))


@pytest.mark.parametrize(("number", "call"), [(GPU, 0), (GPU, 4), (GPU, 1 << 40), (CPU, 1), (7, 1)])
def test_call_that_was_never_put_is_its_workers_fault(ends: LanePages, number: int, call: int) -> None:
    """The client has done nothing, and must not be dropped for it."""
    put(ends, 1, 2, 3).close()
    with pytest.raises(ProtocolError, match=f"no call {call} on lane {number}"):
        ends.call(number, call)


def test_call_that_was_done_long_ago_is_its_workers_fault(ends: LanePages) -> None:
    """The client may write over what it has seen done, and the broker has seen it, too."""
    page, fd = put(ends, *range(1, SLOTS + 3)), create_page()
    order = TimelinePage(fd)
    os.close(fd)
    order.store_done(TimelinePoint(0, SLOTS))
    ends.look(GPU, order)
    with pytest.raises(ProtocolError, match="no call 2 on lane"):
        ends.call(GPU, 2)
    order.close()
    page.close()


def test_call_that_its_client_has_written_over_is_the_clients_fault(ends: LanePages) -> None:
    """It was not done."""
    put(ends, *range(1, SLOTS + 3)).close()
    assert ends.call(GPU, 2) is None


def test_calls_on_a_ring_whose_worker_sleeps_are_unheard(ends: LanePages) -> None:
    """Their client has rung; or it has left, and somebody else must wake the worker."""
    page = put(ends, 1, 2)
    assert not ends.is_unheard(GPU)
    page.sleep(True)
    assert ends.is_unheard(GPU)
    page.take()
    assert ends.is_unheard(GPU)
    page.take()
    assert not ends.is_unheard(GPU)
    assert not ends.is_unheard(CPU)
    assert not ends.is_unheard(7)
    page.close()
