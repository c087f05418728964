"""The broker's view of timeline pages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.simulation import GPU

from layerzero.broker.io.timeline_pages import Gpu, TimelinePages, error_number
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, IPC_HANDLE_BYTES, ArenaHandle
from layerzero.ipc.cuda.offer import PATTERN_BYTES, Offer
from layerzero.ipc.errors import BY_CODE
from layerzero.ipc.shm import timeline_page, timeline_words
from layerzero.ipc.shm.timeline_page import TimelinePage
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport.messages import AddGpu

HANDLE = ArenaHandle(GPU, "c", 1, 1, "ipc", ARENA_STEP_BYTES, bytes(IPC_HANDLE_BYTES))
MESSAGE = AddGpu(gpu=GPU, has_memops=True, offer=Offer(HANDLE, bytes(PATTERN_BYTES), 1).to_wire())


@pytest.fixture
def page_fd() -> Iterator[int]:
    fd = timeline_page.create_page()
    yield fd
    os.close(fd)


@pytest.fixture
def pages(page_fd: int) -> Iterator[TimelinePages]:
    pages = TimelinePages()
    pages.put(1, Gpu.of(MESSAGE, [os.dup(page_fd)]))
    yield pages
    pages.close_all()


def test_failing_a_point_lets_its_stream_go_on_with_the_error(pages: TimelinePages, page_fd: int) -> None:
    """The client's stream waits for the word, and its CPU looks for the error."""
    pages.fail(1, GPU, TimelinePoint(3, 1), "BACKEND_ERROR")
    page = TimelinePage(page_fd)
    assert page.is_done(TimelinePoint(3, 1))
    assert page.error(TimelinePoint(3, 1)) == error_number("BACKEND_ERROR")
    page.close()


def test_released_inputs_never_go_back(pages: TimelinePages, page_fd: int) -> None:
    """A later call's inputs may be known to be there already: its worker would wait again."""
    page = TimelinePage(page_fd)
    page.store_ready(TimelinePoint(0, 5))
    pages.release(1, GPU, TimelinePoint(0, 4))
    assert page.is_ready(TimelinePoint(0, 5))
    pages.release(1, GPU, TimelinePoint(0, 6))
    assert page.is_ready(TimelinePoint(0, 6))
    page.close()


def test_same_page_is_known_by_its_memory(pages: TimelinePages, page_fd: int) -> None:
    """A client that goes on to the next transport may keep its page, and calls on it their points."""
    held = pages.get(1, GPU)
    assert held is not None
    again, other = Gpu.of(MESSAGE, [os.dup(page_fd)]), Gpu.of(MESSAGE, [timeline_page.create_page()])
    assert (again.has_page_of(held), other.has_page_of(held)) == (True, False)
    again.close()
    other.close()


def test_workers_get_what_the_client_sent(pages: TimelinePages) -> None:
    """The offer travels as it is; the slot is the worker's own."""
    message, fds = pages.lend(1, GPU, 7)
    assert (message.client, message.gpu, message.slot, message.has_memops) == (1, GPU, 7, True)
    assert message.offer == MESSAGE.offer
    assert len(fds) == 1


def test_every_error_has_its_own_number() -> None:
    """The word in the page is all that a stream's owner sees at first."""
    assert len({error_number(code) for code in BY_CODE}) == len(BY_CODE)
    assert all(0 < error_number(code) <= timeline_words.MAX_ERROR for code in BY_CODE)
