"""The page of READY, DONE and ERROR words as a process without CUDA uses it: the broker."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, LIFT_EPOCH, PAGE_BYTES, RUNG, TAKEN, TIMELINES, TimelinePoint


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_page()
    yield fd
    os.close(fd)


@pytest.fixture
def page(fd: int) -> Iterator[TimelinePage]:
    page = TimelinePage(fd)
    yield page
    page.close()


def test_every_mapping_sees_the_same_words(fd: int, page: TimelinePage) -> None:
    """Client, worker and broker each have their own."""
    other = TimelinePage(fd)
    page.store_ready(TimelinePoint(3, 7))
    other.store_done(TimelinePoint(3, 6))
    assert [other.is_ready(TimelinePoint(3, n)) for n in (6, 7, 8)] == [True, True, False]
    assert [page.is_done(TimelinePoint(3, n)) for n in (5, 6, 7)] == [True, True, False]
    assert not page.is_ready(TimelinePoint(2, 1))
    other.close()


def test_last_lifted_calls_of_all_timelines_are_named(fd: int, page: TimelinePage) -> None:
    """By the broker, once the client is dead."""
    for number in range(1, 12):
        page.note_lifted(3, number)
    page.note_lifted(TIMELINES - 1, 2**32 - 1)
    other = TimelinePage(fd)
    assert other.last_lifted() == {*range(4, 12), 2**32 - 1}
    other.close()


def test_lifted_words_are_nobody_elses(page: TimelinePage) -> None:
    for timeline in range(TIMELINES):
        for number in range(1, 10):
            page.note_lifted(timeline, number)
        assert (page.is_done(TimelinePoint(timeline, 1)), page.last_error(timeline)) == (False, 0)
        assert not page.is_ready(TimelinePoint(timeline, 1))
    assert page.lift_epoch == 0
    assert (page.rung(), page.bump_lift_epoch(), page.bump_lift_epoch(), page.lift_epoch) == (None, 1, 2, 2)


def test_lift_epochs_are_never_0(page: TimelinePage) -> None:
    ctypes.c_uint32.from_address(page.address + LIFT_EPOCH).value = 2**32 - 2
    assert [page.bump_lift_epoch() for _ in range(2)] == [2**32 - 1, 1]


def test_words_count_on_after_the_largest(page: TimelinePage) -> None:
    """A server makes 2**32 calls in half a day."""
    page.store_done(TimelinePoint(0, 1))
    assert page.is_done(TimelinePoint(0, 2**32 - 1))
    assert not page.is_done(TimelinePoint(0, 2))
    page.store_done(TimelinePoint(0, 2**32 - 1))
    assert not page.is_done(TimelinePoint(0, 0))


def test_failed_call_lets_the_stream_go_and_has_its_code(page: TimelinePage) -> None:
    """The client raises it where it next comes by."""
    page.store_done(TimelinePoint(1, 4))
    page.fail(TimelinePoint(1, 5), 17)
    assert page.is_done(TimelinePoint(1, 5))
    assert [page.error(TimelinePoint(1, n)) for n in (4, 5, 6)] == [0, 17, 0]
    assert page.error(TimelinePoint(0, 5)) == 0


def test_call_that_is_done_does_not_fail(page: TimelinePage) -> None:
    """The worker finished it and died then; and words never go back."""
    page.store_done(TimelinePoint(1, 9))
    page.fail(TimelinePoint(1, 8), 17)
    page.fail(TimelinePoint(1, 9), 17)
    assert (page.error(TimelinePoint(1, 8)), page.error(TimelinePoint(1, 9)), page.is_done(TimelinePoint(1, 9))) == (
        0,
        0,
        True,
    )


@pytest.mark.parametrize("code", [0, -1, 1 << 32])
def test_code_that_would_not_be_seen_is_refused(page: TimelinePage, code: int) -> None:
    """Zero means "no error"."""
    with pytest.raises(ValueError, match="allowed: 1 to"):
        page.fail(TimelinePoint(0, 1), code)


@pytest.mark.parametrize(
    "point", [TimelinePoint(-1, 0), TimelinePoint(TIMELINES, 0), TimelinePoint(0, -1), TimelinePoint(0, 1 << 32)]
)
def test_point_outside_the_page_is_refused(page: TimelinePage, point: TimelinePoint) -> None:
    """It comes from another process, and other calls' words lie beside."""
    for use in (page.is_ready, page.is_done, page.store_done, page.error):
        with pytest.raises(ProtocolError, match="allowed: timelines below 64"):
            use(point)


def test_page_can_not_be_pulled_away(fd: int) -> None:
    """A store into a page that was cut off is a SIGBUS, in the broker of all."""
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    for nbytes in (4096, 2 * PAGE_BYTES):
        other = memory.create_memfd("other", nbytes)
        with pytest.raises(ProtocolError, match="memfd has"):
            TimelinePage(other)
        os.close(other)


def test_words_can_be_read_after_the_page_was_closed(fd: int) -> None:
    """By a thread that waits for a call while another closes the session; what it writes reaches nobody."""
    page, other = TimelinePage(fd), TimelinePage(fd)
    page.fail(TimelinePoint(3, 7), 5)
    page.close()
    assert (page.is_done(TimelinePoint(3, 7)), page.error(TimelinePoint(3, 7))) == (True, 5)
    page.store_done(TimelinePoint(3, 9))
    assert not other.is_done(TimelinePoint(3, 8))
    page.close()
    other.close()


def test_words_of_different_writers_share_no_cache_line(page: TimelinePage) -> None:
    """A GPU and a CPU would take it from each other at every call."""
    start = page.address
    page.store_ready(TimelinePoint(2, 0xAAAAAAAA))
    page.store_done(TimelinePoint(2, 0xBBBBBBBB))
    words = (ctypes.c_uint32 * (PAGE_BYTES // 4)).from_address(start)
    places = [index * 4 for index, word in enumerate(words) if word]
    assert places == [1024, 1024 + 128]


def test_broker_needs_no_cuda() -> None:
    """Importing the page must not even look for the driver: the broker runs on machines without one."""
    code = "import sys; import layerzero.ipc.shm.timeline_page; print([m for m in sys.modules if 'cuda' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.stdout == "[]\n"


def test_rung_graph_slot_is_found_among_others(fd: int, page: TimelinePage) -> None:
    """From any graph slot on, up to any other; words that no client should write are none."""
    for graph_slot in (0, 5, 4095):
        page.set_graph_slot(graph_slot, RUNG)
    page.set_graph_slot(2, TAKEN)
    for graph_slot, value in ((3, 0x0101), (4, 0x01000000), (6, 0x00010001)):
        page.set_graph_slot(graph_slot, value)
    assert [page.rung(start) for start in (0, 1, 5, 6, 4095)] == [0, 5, 5, 4095, 4095]
    assert [page.rung(1, stop) for stop in (5, 6, 4096)] == [None, 5, 5]
    page.set_graph_slot(4095, TAKEN)
    assert (page.rung(6), page.rung(GRAPH_SLOTS)) == (None, None)
