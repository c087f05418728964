"""Answers that are made in steps, so that calls need not wait for them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest
from tests.fuzz.requests import _server

from layerzero.broker.io import frame_codec
from layerzero.broker.queries import incremental, methods
from layerzero.broker.queries.incremental import IncrementalAnswers
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.transport import messages


def steps(count: int, error: LayerZeroError | None = None) -> Generator[None, None, dict[str, Any]]:
    for _ in range(count):
        yield
    if error is not None:
        raise error
    return {"steps": count}


def begin(method: str, params: Mapping[str, Any], _: bytes) -> Any:
    if method == "ping":
        return {"pid": 1}
    if method == "status":
        return steps(params.get("count", 3), InvalidArgument("gone wrong") if params.get("is_wrong") else None)
    raise InvalidArgument(f"unknown method {method}")


class Sent(list[tuple[bytes, bytes]]):
    def take(self, client: bytes, frame: bytes) -> None:
        self.append((client, frame))

    def fail(self, client: bytes, exc: Exception) -> None:
        raise AssertionError(f"{client!r} failed") from exc


def asked(seq: int, method: str, **params: Any) -> frame_codec.Asked:
    return frame_codec.Asked(seq, messages.Request(method=method, params=params))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def open_questions(sent: Sent) -> IncrementalAnswers:
    return IncrementalAnswers(begin, sent.take, sent.fail)


def test_short_answers_are_sent_at_once(open_questions: IncrementalAnswers, sent: Sent) -> None:
    open_questions.take(b"C1", asked(7, "ping"))
    assert sent == [(b"C1", frame_codec.response(7, {"pid": 1}))]
    assert not open_questions


def test_refusals_are_sent_at_once(open_questions: IncrementalAnswers, sent: Sent) -> None:
    open_questions.take(b"C1", asked(7, "nosuch"))
    assert sent == [(b"C1", frame_codec.refused_request(7, InvalidArgument("unknown method nosuch")))]


def test_long_answers_come_a_step_at_a_time_and_in_order(open_questions: IncrementalAnswers, sent: Sent) -> None:
    open_questions.take(b"C1", asked(7, "status", count=2))
    open_questions.take(b"C2", asked(8, "status", count=0))
    taken = 0
    while open_questions:
        assert len(sent) == max(taken - 2, 0)
        open_questions.go_on()
        taken += 1
    assert taken == 4
    assert sent == [(b"C1", frame_codec.response(7, {"steps": 2})), (b"C2", frame_codec.response(8, {"steps": 0}))]
    open_questions.go_on()  # nothing is left to do


def test_an_error_on_the_way_is_the_answer(open_questions: IncrementalAnswers, sent: Sent) -> None:
    open_questions.take(b"C1", asked(7, "status", count=1, is_wrong=True))
    open_questions.go_on()
    open_questions.go_on()
    assert sent == [(b"C1", frame_codec.refused_request(7, InvalidArgument("gone wrong")))]
    assert not open_questions


def test_who_asks_without_waiting_takes_no_memory_without_bound(
    open_questions: IncrementalAnswers, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest answers are finished first."""
    monkeypatch.setattr(incremental, "MAX_OPEN", 4)
    for seq in range(10):
        open_questions.take(b"C1", asked(seq, "status", count=50))
    assert sent == [(b"C1", frame_codec.response(seq, {"steps": 50})) for seq in range(6)]


def test_status_is_answered_in_steps_of_a_few_backends() -> None:
    """Calls of others would wait for all of it."""
    server = _server()
    begun = methods.begin(server, "status", {})
    assert isinstance(begun, Generator)
    assert sum(1 for _ in begun) > len(server.state.workers) / methods.BACKENDS_A_STEP
    answer = methods.answer(server, "status", {})
    assert [backend["name"] for backend in answer["backends"]] == list(server.state.workers)
