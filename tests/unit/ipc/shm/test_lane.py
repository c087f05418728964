"""The page and the bells of an express lane."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory
from layerzero.ipc.transport import control
from layerzero.ipc.vocabulary.worker_codes import lane_of, mark


@pytest.fixture
def ends() -> Iterator[tuple[lane.Page, lane.Page]]:
    """The same page, mapped twice."""
    fd = memory.create_memfd("lane", lane.PAGE_BYTES)
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
    assert worker.get_call(1) == (7, refs)
    assert worker.get_call(2) is None
    worker.put_end(1, lane.OK, 7, 1234, said)
    assert client.get_end(1) == (lane.OK, 1234, said)
    assert worker.get_call(1) == (7, refs)
    assert (client.calls, client.done, client.last_time()) == (1, 1, (1, 7, 1234))
    assert (client.epoch, client.is_ended) == (0, False)


def test_an_end_before_this_call_is_none(ends: tuple[lane.Page, lane.Page]) -> None:
    """The page keeps the last end until the next one."""
    client, worker = ends
    worker.put_end(1, lane.OK)
    client.put_call(2, 7, b"")
    assert client.get_end(2) is None


def test_calls_have_places_of_their_own(ends: tuple[lane.Page, lane.Page]) -> None:
    """At the largest sizes, and as many as there are; the next one takes the first one's."""
    client, worker = ends
    said = {call: bytes([call]) * lane.MAX_WORD_BYTES for call in range(1, lane.DEPTH + 1)}
    refs = {call: bytes([255 - call]) * lane.MAX_CALL_BYTES for call in said}
    for call in said:
        client.put_call(call, call, refs[call], waits=False)
    for call in said:
        assert client.get_end(call) is None
        worker.put_end(call, lane.OK, call, call, said[call])
    for call in said:
        assert worker.get_call(call) == (call, refs[call])
        assert client.get_end(call) == (lane.OK, call, said[call])
    client.put_call(lane.DEPTH + 1, 7, b"")
    assert worker.get_call(1) is None
    assert client.get_end(lane.DEPTH + 1) is None
    assert client.get_end(2) is not None


def test_a_withdrawn_call_has_a_plan_that_nobody_allows(ends: tuple[lane.Page, lane.Page]) -> None:
    """Its number is not given again."""
    client, worker = ends
    client.put_call(1, 7, b"refs")
    client.withdraw(1)
    assert worker.get_call(1) == (lane.NO_PLAN, b"refs")


@pytest.mark.parametrize(("call", "status", "nbytes"), [(3, lane.OK, 0), (2, 99, 0), (2, lane.OK, 1 << 63), (1, 0, 0)])
def test_ends_that_make_no_sense_are_refused(
    ends: tuple[lane.Page, lane.Page], call: int, status: int, nbytes: int
) -> None:
    """A worker may write anything; sizes are checked before bytes are read."""
    client, worker = ends
    client.put_call(2, 7, b"")
    worker._put_end(2, call, status, 0, 0, b"")
    worker._words[(4096 + 3200 + 1152) // 8 + 3] = nbytes
    with pytest.raises(ProtocolError, match=r"call 2 of the lane ends as"):
        client.get_end(2)


def test_a_call_that_claims_too_many_bytes_reads_none_of_the_workers(ends: tuple[lane.Page, lane.Page]) -> None:
    """A client may write anything, too; its references are checked after they were cut."""
    client, worker = ends
    client.put_call(1, 7, b"")
    client._words[4096 // 8 + 2] = 1 << 62
    found = worker.get_call(1)
    assert found is not None
    assert len(found[1]) == lane.MAX_CALL_BYTES


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


def test_rings_of_a_lane_are_taken_one_by_one() -> None:
    """Each claims a call, or takes one back."""
    bell = lane.create_doorbell(counts=True)
    lane.ring(bell)
    lane.ring(bell, 2)
    assert [lane.take(bell) for _ in range(4)] == [True, True, True, False]
    os.close(bell)


def test_a_doorbell_that_was_made_blocking_is_taken_without_waiting() -> None:
    """Whoever holds it may do that at any time."""
    bell = lane.create_doorbell()
    os.set_blocking(bell, True)
    assert not lane.take(bell)
    lane.ring(bell)
    assert lane.take(bell)
    os.close(bell)


def test_an_answer_bell_is_heard_once_for_each_ring() -> None:
    """It wakes whoever polls it, and is silent when that has heard it."""
    ringing, hearing = lane.create_answer_bell()
    lane.hear(hearing)
    assert not control.is_readable(hearing.fileno())
    lane.ring_back(ringing)
    assert control.is_readable(hearing.fileno())
    lane.hear(hearing)
    assert not control.is_readable(hearing.fileno())
    ringing.close()
    assert not control.is_readable(hearing.fileno())  # whoever polls it would spin
    hearing.close()


@pytest.mark.parametrize("fault", ["full", "full and blocking", "shut down", "closed", "connected elsewhere"])
def test_ringing_back_never_waits(fault: str) -> None:
    """Whatever its client does with the other end."""
    ringing, hearing = lane.create_answer_bell()
    with suppress(BlockingIOError):
        while fault.startswith("full"):
            ringing.send(b"1", socket.MSG_DONTWAIT)
    match fault:
        case "full and blocking":
            ringing.setblocking(True)
        case "shut down":
            hearing.shutdown(socket.SHUT_RDWR)
        case "closed":
            hearing.close()
        case "connected elsewhere":
            other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            other.bind("")  # to any name
            hearing.connect(other.getsockname())
            other.close()
    for _ in range(1000):
        lane.ring_back(ringing)
    ringing.close()
    hearing.close()


def test_nothing_can_be_sent_to_the_end_that_rings() -> None:
    """A worker would have to close the descriptors that come along, and that may take as long as their sender likes."""
    ringing, hearing = lane.create_answer_bell()
    with pytest.raises(BrokenPipeError):
        socket.send_fds(hearing, [b"1"], [hearing.fileno()])
    ringing.close()
    hearing.close()


def test_a_control_page_names_the_lane() -> None:
    """Ordinary dispatches name none."""
    assert lane_of(mark(5, 1 << 40)) == 5
    assert lane_of(0) == lane_of(7 << 32) == 0
    assert mark(5, 1) != mark(5, 2)
