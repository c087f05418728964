"""client/connection/express.py: this process's end of a lane."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.connection import retained
from layerzero.client.connection.counters import Counters
from layerzero.client.connection.express import Lane, Lease, Lost, Ran
from layerzero.client.session.repeats import Repeats
from layerzero.ipc import spinning
from layerzero.ipc.errors import BackendError, BrokerLost
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


_fence = threading.Lock()


class Worker:
    """The link of a lane, and the worker at its other end."""

    def __init__(self) -> None:
        self.welcome, self.lost = SimpleNamespace(timeout_s=1.0), None
        self.hang_up, self._ours = os.pipe()

    def add_lane(self, number: int, page: int) -> list[int]:
        self.page, self.doorbell = lane.Page(page), lane.create_doorbell(counts=True)
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

    def end(self, call: int, status: int = lane.OK, said: bytes = b"") -> None:
        self.page.put_end(call, status, 7, 123, said)
        lane.ring_back(self.answer)

    def end_if_awaited(self, call: int) -> None:
        """As a worker does: nobody is rung for who does not sleep."""
        self.page.put_end(call, lane.OK)
        with _fence:
            pass
        if self.page.is_awaited(call):
            lane.ring_back(self.answer)

    def close(self) -> None:
        self.page.close()
        self.answer.close()
        for fd in (self.doorbell, self.hang_up, self._ours):
            os.close(fd)


class Compiled(Repeats):
    """What makes a line in C, and waits for its receipts."""

    def __init__(self, worker: Worker) -> None:
        self.last = threading.local()
        link: Any = SimpleNamespace(hang_up_fd=worker.hang_up, counters=Counters(None))
        super().__init__(None, link, SimpleNamespace(), self.last)  # type: ignore[arg-type]


class Hold:
    """What keeps a call's memory."""


LEASE = Lease(1, 7, 0, None, 1)  # type: ignore[arg-type]


@pytest.fixture(params=["python", "compiled"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Lane, Worker]]:
    worker = Worker()
    made = None if request.param == "python" else Compiled(worker)
    ours = Lane(worker, 1, *(() if made is None else (made.make_line, made.wait)))  # type: ignore[arg-type]
    yield ours, worker
    ours.close()
    worker.close()


def test_a_call_that_its_caller_gave_up_keeps_its_place(ends: tuple[Lane, Worker]) -> None:
    """The worker may still write, to that call's memory and to the page."""
    ours, worker = ends
    worker.hang_up_next()
    with pytest.raises(BrokerLost):
        ours.run(LEASE, b"first", 0.05, None)
    assert worker.page.get_call(1) == (7, b"first")
    os.read(worker.hang_up, 1)
    assert ours.run(LEASE, b"second", 0.0, None) is None
    assert worker.page.get_call(1) == (7, b"first")
    worker.end(1)
    for call in range(2, worker.page.calls + 1):  # the second one, which was withdrawn
        assert lane.take(worker.doorbell)
        worker.end(call, lane.DECLINED)
    worker.hang_up_next()
    with pytest.raises(BrokerLost):
        ours.run(LEASE, b"third", 0.05, None)
    assert worker.page.get_call(worker.page.calls) == (7, b"third")


def test_a_call_that_has_no_room_on_the_page_goes_to_the_broker(ends: tuple[Lane, Worker]) -> None:
    """The rest of its references would lie where the worker writes, or be cut off."""
    ours, worker = ends
    assert ours.run(LEASE, b"x" * (lane.MAX_CALL_BYTES + 1), 0.0, None) is None
    assert worker.page.calls == 0
    assert ours.run(LEASE, b"x" * lane.MAX_CALL_BYTES, 0.0, None) is None  # nobody answers
    assert worker.page.get_call(1) == (lane.NO_PLAN, b"x" * lane.MAX_CALL_BYTES)


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
    assert worker.page.get_call(1) == (lane.NO_PLAN, b"refs12345678")  # withdrawn


def test_a_withdrawn_call_lets_go_of_its_memory_at_once(ends: tuple[Lane, Worker]) -> None:
    """No worker can touch it any more, nor is it kept when the session ends. The call's place is, until the worker has
    declined it."""
    ours, worker = ends
    hold = Hold()
    kept, quarantined = weakref.ref(hold), len(retained._quarantine)
    assert ours.run(LEASE, b"first", 0.0, hold) is None
    del hold
    gc.collect()
    assert kept() is None
    assert ours.line is not None
    while ours.line.put(7, b"next", None, 0) is not None:
        pass
    assert worker.page.get_call(1) == (lane.NO_PLAN, b"first")
    worker.end(1, lane.DECLINED)
    assert ours.line.put(7, b"next", None, 0) is not None
    for call in range(2, worker.page.calls + 1):
        worker.end(call)
    ours.close()
    assert len(retained._quarantine) == quarantined


def test_a_call_that_is_withdrawn_has_ended(ends: tuple[Lane, Worker]) -> None:
    """As one that the worker declines: whoever asks for it later need not wait for that, and takes no other call off
    the lane."""
    ours, worker = ends
    assert ours.line is not None
    receipt: Any = ours.line.put(7, b"first", None, 0)
    assert ours.line.withdraw(receipt)
    assert receipt.end() == (lane.DECLINED, 0, b"")
    assert not ours.is_under_way(receipt)
    assert lane.take(worker.doorbell)
    worker.end(1, lane.DECLINED)
    again: Any = ours.line.put(7, b"second", None, 0)
    assert ours.line.withdraw(receipt)
    assert ours.resume(receipt, LEASE, 60.0) is None
    assert (again.end(), worker.page.get_call(2)) == (None, (7, b"second"))
    worker.end(2)


def test_nothing_of_a_lane_whose_worker_has_ended_is_kept(ends: tuple[Lane, Worker]) -> None:
    """Nobody is left to write to the memory of its calls, whether they had begun or not."""
    ours, worker = ends
    assert ours.line is not None
    hold = Hold()
    kept, quarantined = weakref.ref(hold), len(retained._quarantine)
    while ours.line.put(7, b"", hold, 0) is not None:
        pass
    worker.page.end()
    ours.close()
    del hold
    gc.collect()
    assert kept() is None
    assert len(retained._quarantine) == quarantined


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may watch a page, whatever else this machine does."""
    monkeypatch.setattr(spinning, "limit_ns", lambda _: 10**6)
    monkeypatch.setattr(spinning, "Cores", lambda: SimpleNamespace(count=1_000_000))


def test_a_deadline_holds_whatever_a_worker_said_of_the_last_call(free_cores: None) -> None:
    """A client sleeps for as long as the call is expected to take, but not past its deadline."""
    worker = Worker()
    made = Compiled(worker)
    ours = Lane(worker, 1, made.make_line, made.wait)  # type: ignore[arg-type]
    start_s = time.monotonic()
    assert ours.run_chain(LEASE, b"", 0.01, None, 60 * 10**9) is None
    assert time.monotonic() - start_s < 30
    ours.close()
    worker.close()


# --- several calls on a lane


@pytest.fixture
def full() -> Iterator[tuple[Lane, Worker, Compiled, list[Any]]]:
    """As many calls as it has places, by their receipts."""
    worker = Worker()
    made = Compiled(worker)
    ours = Lane(worker, 1, made.make_line, made.wait)  # type: ignore[arg-type]
    assert ours.line is not None
    receipts = [ours.line.put(7, b"call %d" % call, None, 10**9) for call in range(1, lane.DEPTH + 1)]
    assert [receipt.call for receipt in receipts if receipt is not None] == list(range(1, lane.DEPTH + 1))
    yield ours, worker, made, receipts
    ours.close()
    worker.close()


Full = tuple[Lane, Worker, Compiled, list[Any]]


def test_a_full_lane_takes_a_call_when_the_oldest_one_has_ended(full: Full) -> None:
    """Its end is kept for whoever asks later; that the others are not read takes no room from it."""
    ours, worker, _, receipts = full
    assert ours.line is not None
    assert ours.line.put(7, b"", None, 1) is None
    worker.end(1, lane.OK, b"first")
    worker.end(2, lane.RAISED, b"second")
    again = [ours.line.put(7, b"", None, 1) for _ in range(3)]
    assert [one and one.call for one in again] == [lane.DEPTH + 1, lane.DEPTH + 2, None]
    assert [receipt.end() for receipt in receipts[:3]] == [
        (lane.OK, 123, b"first"),
        (lane.RAISED, 123, b"second"),
        None,
    ]


def test_memory_is_let_go_when_a_call_has_ended(full: Full) -> None:
    """And not before, although nobody waits for it."""
    ours, worker, *_ = full
    assert ours.line is not None
    worker.end(1)
    hold = Hold()
    kept = weakref.ref(hold)
    receipt = ours.line.put(7, b"", hold, 1)
    assert receipt is not None
    last = receipt.call
    del hold, receipt
    gc.collect()
    assert kept() is not None
    for call in range(2, last + 1):
        worker.end(call)
    assert all(ours.line.put(7, b"", None, 1) is not None for _ in range(lane.DEPTH))
    gc.collect()
    assert kept() is None


def test_only_calls_that_the_worker_has_not_claimed_are_withdrawn(full: Full) -> None:
    """Those behind one that is withdrawn stay."""
    ours, worker, _, receipts = full
    assert ours.line is not None
    assert [lane.take(worker.doorbell) for _ in range(3)] == [True] * 3
    assert [ours.line.withdraw(receipts[call - 1]) for call in (1, 3, 4, lane.DEPTH)] == [False, False, True, True]
    assert sum(lane.take(worker.doorbell) for _ in range(2 * lane.DEPTH)) == lane.DEPTH - 3
    plans = [found[0] for call in range(1, lane.DEPTH + 1) if (found := worker.page.get_call(call)) is not None]
    assert [call for call, plan in enumerate(plans, 1) if plan == lane.NO_PLAN] == [4, lane.DEPTH]


def test_of_a_dead_workers_calls_one_alone_was_claimed(full: Full) -> None:
    """The broker is asked whose fault it was of that one; the others have lost their place."""
    ours, worker, _, receipts = full
    for call in (1, 2):
        assert lane.take(worker.doorbell)
        if call == 1:
            worker.end(1)
    worker.page.end()
    ends = [ours.resume(receipt, LEASE, 60.0) for receipt in receipts]
    assert ends[:2] == [Ran(1, 123, b""), Lost(2)]
    assert {type(end) for end in ends[2:]} == {BackendError}


@pytest.mark.parametrize(
    ("number", "status", "nbytes"),
    [(2, 3, 0), (2, lane.OK, lane.MAX_WORD_BYTES + 1), (66, lane.OK, 0), (1, lane.OK, 0)],
)
def test_ends_that_make_no_sense_are_told_apart(full: Full, number: int, status: int, nbytes: int) -> None:
    """None of them frees a place, whose memory the worker may write to."""
    ours, worker, _, receipts = full
    assert ours.line is not None
    worker.end(1)
    worker.page._put_end(2, number, status, 7, 123, b"")
    worker.page._words[(4096 + 3200 + 1152) // 8 + 3] = nbytes
    end = receipts[1].end()
    assert end is not None
    assert end[0] > lane.DECLINED
    assert [ours.line.put(7, b"", None, 1) is None for _ in range(2)] == [False, True]


def test_threads_wait_for_their_own_calls(full: Full) -> None:
    """One of them hears the bell for all, whichever it is, and whoever is done first."""
    _, worker, made, receipts = full
    order: list[int] = []

    def wait(receipt: Any) -> None:
        while receipt.end() is None:
            made.wait(receipt, 60.0, 0)  # type: ignore[misc]
        order.append(receipt.call)

    threads = [threading.Thread(target=wait, args=(receipt,)) for receipt in (*receipts[8::-1], *receipts[9:16])]
    for thread in threads:
        thread.start()
    for call in range(1, 17):
        worker.end_if_awaited(call)
        until_s = time.monotonic() + 60
        while call not in order:
            assert time.monotonic() < until_s
            time.sleep(0)
    for thread in threads:
        thread.join(60)
    assert sorted(order) == list(range(1, 17))


def test_a_wait_ends_with_the_lane(full: Full) -> None:
    """Nobody sleeps on a lane that is closed, nor for longer than was asked."""
    ours, worker, made, receipts = full
    made.wait(receipts[0], 0.01, 0)  # type: ignore[misc]
    threads = [threading.Thread(target=made.wait, args=(receipt, 60.0, 0)) for receipt in receipts[:4]]
    for thread in threads:
        thread.start()
    assert ours.line is not None
    assert len(ours.line.close()) == lane.DEPTH
    worker.hang_up_next()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert ours.line.put(7, b"", None, 1) is None


@pytest.mark.parametrize("kernel_ns", [0, (1 << 64) - 4000, (1 << 64) - 1])
def test_a_worker_may_name_any_time_for_a_call(full: Full, kernel_ns: int) -> None:
    """From it the client reckons how many ends it can wait for at once."""
    _, worker, made, receipts = full
    worker.page.put_end(1, lane.OK, 7, kernel_ns)
    made.wait(receipts[1], 0.01, 0)  # type: ignore[misc]
    assert receipts[1].end() is None
    assert receipts[0].end() == (lane.OK, kernel_ns, b"")


def test_without_c_threads_take_turns_on_a_lane() -> None:
    """The next one may put its call while the one before is about to hear that its own has ended."""
    worker = Worker()
    ours = Lane(worker, 1)  # type: ignore[arg-type]
    found: list[object] = []

    def ride() -> None:
        for _ in range(200):
            found.append(ours.run(LEASE, b"", 60.0, None))

    threads = [threading.Thread(target=ride) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if lane.take(worker.doorbell):
            worker.end_if_awaited(worker.page.done + 1)
    assert len(found) == 800
    assert {type(one) for one in found} <= {Ran, type(None)}
    assert sum(isinstance(one, Ran) for one in found) == worker.page.done
    ours.close()
    worker.close()
