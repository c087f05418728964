"""The newest calls of a worker on its control page: what is written is read, and what is nonsense harms nobody."""

from __future__ import annotations

import mmap
import os

import pytest

from layerzero.ipc.shm import recent_calls
from layerzero.ipc.shm.recent_calls import (
    DECLINED,
    ENQUEUED,
    MOST,
    OK,
    RAISED,
    RUNNING,
    ChainRecord,
    RecentCalls,
)


@pytest.fixture
def page() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


def ways(page: mmap.mmap) -> list[tuple[int, int]]:
    return [(call.plan, call.how) for call in recent_calls.read(page[:])]


def test_a_call_is_there_while_it_runs_and_says_how_it_ended(page: mmap.mmap) -> None:
    calls = RecentCalls(page)
    assert recent_calls.read(page[:]) == []
    calls.begin(3, b"r" * 40 + b"extents!")
    (one,) = recent_calls.read(page[:])
    assert (one.plan, one.how, one.body_bytes, one.tail) == (3, RUNNING, 48, b"rrrrrrrrextents!")
    assert one.begun_ns > 0
    calls.end(OK, 700)
    calls.begin(4, b"ab")
    calls.end(RAISED)
    first, second = recent_calls.read(page[:])
    assert (first.how, first.took_ns, first.tail) == (OK, 700, one.tail)
    assert (second.how, second.tail, second.body_bytes) == (RAISED, b"ab", 2)


def test_the_newest_are_there_the_oldest_first(page: mmap.mmap) -> None:
    calls = RecentCalls(page)
    for plan in range(1, 3 * MOST):
        calls.begin(plan)
        calls.end(OK)
    assert [plan for plan, _ in ways(page)] == list(range(2 * MOST, 3 * MOST))


@pytest.mark.parametrize("before", [0, 5, MOST - 2, MOST])
@pytest.mark.parametrize("steps", [1, 4, MOST, MOST + 7])
def test_calls_of_a_chain_are_told_together(page: mmap.mmap, before: int, steps: int) -> None:
    calls = RecentCalls(page)
    for _ in range(before):
        calls.begin(900)
        calls.end(OK)
    record = ChainRecord([(n + 1, b"") for n in range(steps)])
    newest = list(range(max(steps - MOST, 0) + 1, steps + 1))
    calls.begin_chain(record)
    found = recent_calls.read(page[:])[-len(newest) :]
    assert [(call.plan, call.how, call.is_in_chain) for call in found] == [(n, RUNNING, True) for n in newest]
    assert found[0].begun_ns > 0
    calls.end_chain(record, 5000)
    found = recent_calls.read(page[:])[-len(newest) :]
    assert [(call.plan, call.how) for call in found] == [(n, OK) for n in newest]
    assert found[0].took_ns == 5000
    assert ways(page)[: -len(newest)] == [(900, OK)] * min(before, MOST - len(newest))
    calls.begin(901)
    assert ways(page)[-1] == (901, RUNNING)


def test_a_chain_that_raises_says_in_which_call(page: mmap.mmap) -> None:
    calls, record = RecentCalls(page), ChainRecord([(1, b""), (2, b""), (3, b"")])
    calls.begin_chain(record)
    calls.end_chain(record, 10, failed_at=1)
    assert ways(page) == [(1, OK), (2, RAISED), (3, DECLINED)]


def test_a_page_of_nonsense_is_read_all_the_same() -> None:
    for page in (b"\xff" * 4096, os.urandom(4096)):
        assert len(recent_calls.read(page)) == MOST


def test_a_call_in_which_others_began_ends_for_itself(page: mmap.mmap) -> None:
    """One of the broker lets those on rings go first; behind many of them it is not there any more."""
    calls = RecentCalls(page)
    outer = calls.begin(7)
    for _ in range(2):
        inner = calls.begin(9)
        calls.end(ENQUEUED, 100, inner)
    calls.end(OK, 5000, outer)
    assert [(call.plan, call.how, call.took_ns) for call in recent_calls.read(page[:])] == [
        (7, OK, 5000),
        (9, ENQUEUED, 100),
        (9, ENQUEUED, 100),
    ]
    outer = calls.begin(7)
    for _ in range(MOST):
        calls.end(ENQUEUED, 100, calls.begin(9))
    calls.end(RAISED, 5000, outer)
    assert set(ways(page)) == {(9, ENQUEUED)}
