"""client/connection/express.py: this process's end of a lane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.connection.express import Lane, Lease, Ran
from layerzero.ipc.errors import BrokerLost
from layerzero.ipc.shm import lane


def test_a_lane_that_cannot_be_opened_leaves_no_descriptor() -> None:
    """It is tried again with the next lease, and an application has its own use for descriptors."""

    def is_gone(*_: Any) -> None:
        raise BrokerLost("the broker is gone")

    link: Any = SimpleNamespace(welcome=SimpleNamespace(timeout_s=1.0), add_lane=is_gone)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BrokerLost):
        Lane(link, 1)
    assert os.listdir("/proc/self/fd") == before


class Worker:
    """The link of a lane, and the worker at its other end."""

    def __init__(self) -> None:
        self.welcome, self.lost = SimpleNamespace(timeout_s=1.0), None
        self.hang_up, self._ours = os.pipe()

    def add_lane(self, number: int, page: int) -> list[int]:
        self.page, self.doorbell = lane.Page(page), lane.create_doorbell()
        self.answer, hearing = lane.create_answer_bell()
        return [os.dup(self.doorbell), hearing.detach()]

    def watch_hang_up(self, poll: Any) -> None:
        poll.register(self.hang_up)

    def hang_up_next(self) -> None:
        """The client's next calls are given up when the worker has just claimed them."""
        os.write(self._ours, b"x")

    def gone(self, _: Any) -> BrokerLost:
        assert lane.take(self.doorbell)
        return BrokerLost("the client waits no longer")

    def end(self, call: int) -> None:
        self.page.put_end(call, lane.OK, 7, 123)
        lane.ring_back(self.answer)

    def close(self) -> None:
        self.page.close()
        self.answer.close()
        for fd in (self.doorbell, self.hang_up, self._ours):
            os.close(fd)


LEASE = Lease(1, 7, 0, None, 1)  # type: ignore[arg-type]


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Worker]]:
    worker = Worker()
    ours = Lane(worker, 1)  # type: ignore[arg-type]
    yield ours, worker
    ours.close()
    worker.close()


def test_a_lane_waits_for_the_call_that_its_caller_gave_up(ends: tuple[Lane, Worker]) -> None:
    """The worker may still write, to that call's memory and to the page."""
    ours, worker = ends
    worker.hang_up_next()
    with pytest.raises(BrokerLost):
        ours.run(LEASE, b"first", 60.0, None)
    assert ours.run(LEASE, b"second", 0.0, None) is None
    assert worker.page.get_call() == (1, 7, b"first")
    worker.end(1)
    with pytest.raises(BrokerLost):
        ours.run(LEASE, b"third", 60.0, None)
    assert worker.page.get_call() == (2, 7, b"third")


def test_the_answer_to_a_call_that_was_given_up_is_no_answer_to_the_next(ends: tuple[Lane, Worker]) -> None:
    """Its ring may come when nobody waits."""
    ours, worker = ends
    worker.hang_up_next()
    with pytest.raises(BrokerLost):
        ours.run(LEASE, b"first", 60.0, None)
    worker.end(1)
    os.read(worker.hang_up, 1)
    assert ours.run(LEASE, b"second", 0.01, None) is None  # nobody answers this one
    worker.end(3)
    assert ours.run(LEASE, b"third", 60.0, None) == Ran(3, 123, b"")


def test_a_call_that_has_no_room_on_the_page_goes_to_the_broker(ends: tuple[Lane, Worker]) -> None:
    """The rest of its references would lie where the worker writes, or be cut off."""
    ours, worker = ends
    assert ours.run(LEASE, b"x" * (lane.MAX_CALL_BYTES + 1), 0.0, None) is None
    assert worker.page.get_call() == (0, 0, b"")
    assert ours.run(LEASE, b"x" * lane.MAX_CALL_BYTES, 0.0, None) is None  # nobody answers
    assert len(worker.page.get_call()[2]) == lane.MAX_CALL_BYTES


@pytest.mark.parametrize("bells", [None, []])
def test_a_lane_without_bells_is_not_used(bells: list[int] | None) -> None:
    """Its worker is gone, or no descriptors were left for them."""
    link: Any = SimpleNamespace(welcome=SimpleNamespace(timeout_s=1.0), add_lane=lambda *_: bells)
    before = os.listdir("/proc/self/fd")
    ours = Lane(link, 1)
    assert ours.is_ended
    ours.close()
    del ours  # the page stays mapped while somebody has it
    assert os.listdir("/proc/self/fd") == before


def test_a_neighbours_call_brings_its_extents_along(ends: tuple[Lane, Worker]) -> None:
    """Behind the references; the worker knows what they stand for."""
    ours, worker = ends
    assert ours.run(replace(LEASE, values=b"12345678"), b"refs", 0.0, None) is None  # nobody answers
    assert worker.page.get_call() == (1, 7, b"refs12345678")
