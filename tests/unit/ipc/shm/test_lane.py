"""The page and the bells of an express lane."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.vocabulary.worker_codes import lane_of, mark


@pytest.fixture
def ends() -> Iterator[tuple[lane.Page, lane.Page]]:
    """The same page, mapped twice."""
    fd = memory.create_memfd("lane", memory.PAGE_BYTES)
    ends = lane.Page(fd), lane.Page(fd)
    os.close(fd)
    yield ends
    for end in ends:
        end.close()


def test_a_call_and_its_end_cross_the_page(ends: tuple[lane.Page, lane.Page]) -> None:
    """At the largest sizes, neither touches the other's half."""
    client, worker = ends
    refs, said = bytes(range(256)) * 4, b"\xff" * lane.MAX_WORD_BYTES
    assert len(refs) == lane.MAX_CALL_BYTES
    client.put_call(1, 7, refs)
    assert client.get_end(1) is None
    assert worker.get_call() == (1, 7, refs)
    worker.put_end(1, lane.OK, 7, 1234, said)
    assert client.get_end(1) == (lane.OK, 1234, said)
    assert worker.get_call() == (1, 7, refs)
    assert (client.done, client.last_time()) == (1, (1, 7, 1234))
    assert (client.epoch, client.is_ended) == (0, False)


def test_an_end_before_this_call_is_none(ends: tuple[lane.Page, lane.Page]) -> None:
    """The page keeps the last end until the next one."""
    client, worker = ends
    worker.put_end(1, lane.OK)
    client.put_call(2, 7, b"")
    assert client.get_end(2) is None


@pytest.mark.parametrize(("call", "status", "nbytes"), [(3, lane.OK, 0), (2, 99, 0), (2, lane.OK, 1 << 63)])
def test_ends_that_make_no_sense_are_refused(
    ends: tuple[lane.Page, lane.Page], call: int, status: int, nbytes: int
) -> None:
    """A worker may write anything; sizes are checked before bytes are read."""
    client, worker = ends
    client.put_call(2, 7, b"")
    worker.put_end(call, status)
    worker._words[259] = nbytes
    with pytest.raises(ProtocolError, match=r"call 2 of the lane ends as"):
        client.get_end(2)


def test_a_call_that_claims_too_many_bytes_reads_none_of_the_workers(ends: tuple[lane.Page, lane.Page]) -> None:
    """A client may write anything, too; its references are checked after they were cut."""
    client, worker = ends
    client.put_call(1, 7, b"")
    client._words[18] = 1 << 62
    assert len(worker.get_call()[2]) == lane.MAX_CALL_BYTES


def test_a_time_counts_only_for_a_call_that_ran(ends: tuple[lane.Page, lane.Page]) -> None:
    """The broker learns from it."""
    client, worker = ends
    worker.put_end(1, lane.RAISED, 7, 1234, b"error")
    assert client.last_time() == (1, 0, 1234)


def test_a_ring_is_taken_once() -> None:
    """That is what claims a call."""
    bell = lane.create_doorbell()
    assert not lane.take(bell)
    lane.ring(bell)
    assert lane.take(bell)
    assert not lane.take(bell)
    os.close(bell)


def test_only_a_nonblocking_eventfd_is_a_doorbell() -> None:
    """A worker that reads anything else might wait for ever."""
    blocking, (read, write) = os.eventfd(0), os.pipe()
    for fd in (blocking, read):
        with pytest.raises(ProtocolError, match="a doorbell is a non-blocking eventfd"):
            lane.check_doorbell(fd)
    good = lane.create_doorbell()
    lane.check_doorbell(good)
    for fd in (blocking, read, write, good):
        os.close(fd)


def test_a_control_page_names_the_lane() -> None:
    """Ordinary dispatches name none."""
    assert lane_of(mark(5, 1 << 40)) == 5
    assert lane_of(0) == lane_of(7 << 32) == 0
    assert mark(5, 1) != mark(5, 2)
