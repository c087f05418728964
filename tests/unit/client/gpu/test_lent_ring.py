"""A call on a ring that is waited for, without a worker: what its ring, its point and the broker say of it."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from layerzero.client.gpu.lent_ring import Asked
from layerzero.ipc.errors import BrokerLost, LayerZeroError
from layerzero.ipc.spinning import Spin
from layerzero.ipc.transport.wire import Header, Kind


class Lane:
    """As much of a GpuLane as is asked."""

    number = 3

    def __init__(self) -> None:
        self.spin = Spin(0)
        self.awaited: dict[int, Any] = {}
        self.enqueued: set[int] = set()
        self.is_ended = self.is_begun = False

    def is_enqueued(self, call: int) -> bool:
        return call in self.enqueued

    def is_taken(self, call: int) -> bool:
        return self.is_begun


class Link:
    """The broker: `says` happens when it is read, and what it was sent."""

    def __init__(self) -> None:
        self.lost: LayerZeroError | None = None
        self.says: Any = lambda: None
        self.sent: list[bytes] = []
        self.pings = 0

    def read_nowait(self) -> None:
        self.says()

    def check_alive(self) -> None:
        self.pings += 1
        self.says()

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def gone(self, hold: Any) -> LayerZeroError:
        return BrokerLost(f"{hold}")


@pytest.fixture
def gpu() -> Any:
    found = mock.Mock()
    found.order.page.is_done.return_value = False
    return found


@pytest.fixture
def lane() -> Lane:
    return Lane()


@pytest.fixture
def asked(gpu: Any, lane: Lane) -> Asked:
    route: Any = mock.Mock(stays_out="", number=5)
    made = Asked(mock.Mock(), gpu, lane, mock.Mock(), "function", route, (), 0, "what it lends")  # type: ignore[arg-type]
    made.call = 7
    lane.awaited[7] = made
    return made


def answer(asked: Asked, kind: Kind) -> None:
    asked.answer_again(Header(2, kind, 0, 5, 1, 0, 0, 0), b"")


def test_it_is_over_when_its_worker_says_so(asked: Asked, lane: Lane) -> None:
    link: Any = Link()
    with pytest.raises(TimeoutError):
        asked.await_answer(link, time.monotonic())
    assert lane.awaited
    lane.enqueued.add(7)
    assert asked.await_answer(link)
    assert not lane.awaited
    assert asked.hold is None
    lane.enqueued.clear()  # a later call has its slot
    assert asked.see()


def test_what_the_broker_says_is_its_end(asked: Asked) -> None:
    link: Any = Link()
    link.says = lambda: answer(asked, Kind.FAILED)
    assert not asked.await_answer(link)
    asked.outcomes.note_failure.assert_not_called()  # type: ignore[attr-defined]


def test_what_fails_later_is_for_the_next_call(asked: Asked, lane: Lane) -> None:
    link: Any = Link()
    lane.enqueued.add(7)
    assert asked.await_answer(link)
    answer(asked, Kind.FAILED)
    asked.outcomes.note_failure.assert_called_once_with(asked)  # type: ignore[attr-defined]


def test_a_worker_that_dies_between_its_work_and_its_word_has_done_it(asked: Asked, lane: Lane, gpu: Any) -> None:
    """The broker, which sees that the point was reached, says nothing of the call: it is asked before that counts."""
    link: Any = Link()
    lane.is_ended = True
    with pytest.raises(TimeoutError):
        asked.await_answer(link, time.monotonic() + 0.01)
    gpu.order.page.is_done.return_value = True
    assert asked.await_answer(link)
    assert link.pings == 1


def test_a_worker_that_dies_and_a_broker_that_failed_the_call(asked: Asked, lane: Lane, gpu: Any) -> None:
    link: Any = Link()
    lane.is_ended = gpu.order.page.is_done.return_value = True
    link.says = lambda: link.pings and asked.header is None and answer(asked, Kind.FAILED)
    assert not asked.await_answer(link)


def test_its_time_counts_from_when_the_worker_has_it(asked: Asked, lane: Lane) -> None:
    link: Any = Link()
    asked.timeout_s = 0.01
    with pytest.raises(TimeoutError):
        asked.await_answer(link, time.monotonic() + 0.05)
    assert link.sent == []
    lane.is_begun = True
    link.says = lambda: link.sent and asked.header is None and answer(asked, Kind.FAILED)
    assert not asked.await_answer(link)
    assert len(link.sent) == 1


def test_a_broker_that_is_gone_is_its_error(asked: Asked, lane: Lane) -> None:
    link: Any = Link()
    link.lost = BrokerLost("gone")
    with pytest.raises(BrokerLost, match="what it lends"):
        asked.await_answer(link)
    assert not lane.awaited


def test_who_asks_whether_it_is_over_hears_the_broker(asked: Asked, gpu: Any, lane: Lane) -> None:
    """Nobody waits for it: its worker has died, and the broker says so."""
    link = Link()
    assert not asked.look_around(link)
    link.says = lambda: answer(asked, Kind.FAILED)
    assert asked.look_around(link)
    assert (asked.hold, lane.awaited) == (None, {})


def test_an_answer_that_was_written_before_the_end_is_there_for_who_asks(asked: Asked, gpu: Any, lane: Lane) -> None:
    link = Link()
    lane.is_ended = True
    assert not asked.look_around(link)
    gpu.order.page.is_done.return_value = True
    assert asked.look_around(link)
    assert link.pings == 1
    assert asked.await_answer(link)


def test_who_asks_once_the_broker_is_lost_does_not_ask_for_ever(asked: Asked) -> None:
    link = Link()
    link.lost = BrokerLost("gone")
    assert asked.look_around(link)
