"""What the broker tells of a worker's newest calls: by what the worker was told, and no more than is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.broker.core import actions as act
from layerzero.broker.processes import last_calls
from layerzero.broker.processes.last_calls import LastCalls
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.recent_calls import ENQUEUED, OK, RAISED, ChainRecord
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.ipc.vocabulary.tensors import TensorSpec

X = TensorSpec.contiguous("float32", (3, 4))


class Worker:
    def __init__(self, pid: int) -> None:
        fd = memory.create_memfd("page", memory.PAGE_BYTES)
        self.backend, self.pid, self.page = "alpha", pid, memory.ControlPage(fd, writable=True)
        os.close(fd)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(7)
    yield made
    made.page.close()


class Broker:
    def __init__(self) -> None:
        self.calls = LastCalls()
        self._frames = self.calls.noting({act.SendPrepare: lambda _: b"prepare", act.SendAllow: lambda _: b"allow"})

    def prepare(self, plan: int, op: str = "silu", body: bytes = b"") -> None:
        told = messages.Prepare(op=op, kernel_id=f"alpha.{op}", inputs=[X.to_wire()], outputs=[X.to_wire()], attrs={})
        action: Any = act.SendPrepare(b"", plan, body or messages.encode(told))
        assert self._frames[act.SendPrepare](action) == b"prepare"

    def allow(self, plan: int, neighbours: bytes) -> None:
        assert self._frames[act.SendAllow](act.SendAllow(b"", plan, 1, neighbours)) == b"allow"


def bare(lines: list[str] | None) -> list[str]:
    """Without their times."""
    assert lines is not None
    assert all(" s before: " in line for line in lines)
    return [line.partition(": ")[2].partition(" in ")[0] for line in lines]


def test_what_ended_is_told_when_the_worker_and_its_page_are_gone(worker: Worker) -> None:
    broker = Broker()
    broker.prepare(5)
    for how in (OK, RAISED, ENQUEUED):
        worker.page.recent.begin(5)
        worker.page.recent.end(how, 2000)
    worker.page.recent.begin(5)
    broker.calls.note_end(worker)
    worker.page.recent.end(OK)
    what = "silu(3x4:float32) -> 3x4:float32, alpha.silu"
    assert bare(broker.calls.told("alpha", [7], None)) == [
        f"{what}: ok",
        f"{what}: raised",
        f"{what}: enqueued on its GPU",
        f"{what}: had not ended",
    ]
    assert broker.calls.told("alpha", [8], None) is None
    assert broker.calls.told("beta", [7], None) is None


def test_one_that_runs_is_asked_for_without_a_number(worker: Worker) -> None:
    broker = Broker()
    broker.prepare(5)
    worker.page.recent.begin(5)
    assert len(broker.calls.told("alpha", [], worker) or ()) == 1
    assert len(broker.calls.told("alpha", [7], worker) or ()) == 1
    assert broker.calls.told("alpha", [6], worker) is None


def test_neighbours_have_their_own_extents_where_those_are_known(worker: Worker) -> None:
    broker = Broker()
    broker.prepare(5)
    places = ((0, -1), (0, -1))
    worker.page.recent.begin(5, bytes(2 * last_calls.REF_BYTES) + (9).to_bytes(8, "little"))
    assert bare(broker.calls.told("alpha", [], worker)) == [
        "silu(3x4:float32) -> 3x4:float32, of other extents, alpha.silu: had not ended"
    ]
    said = Neighbourhood(((1, 64),), places).to_wire()
    broker.allow(5, messages.encode(messages.Neighbours(neighbours=said)))
    assert bare(broker.calls.told("alpha", [], worker)) == [
        "silu(9x4:float32) -> 9x4:float32, alpha.silu: had not ended"
    ]


def test_extents_that_two_leases_mean_differently_are_not_told(worker: Worker) -> None:
    """Which of them the call came by is not on the page."""
    broker = Broker()
    broker.prepare(5)
    worker.page.recent.begin(5, bytes(2 * last_calls.REF_BYTES) + (9).to_bytes(8, "little"))
    for places, what in (
        (((0, -1), (0, -1)), "silu(9x4:float32) -> 9x4:float32"),
        (((0, -1), (0, -1)), "silu(9x4:float32) -> 9x4:float32"),
        (((-1, 0), (-1, 0)), "silu(3x4:float32) -> 3x4:float32, of other extents"),
    ):
        said = Neighbourhood(((1, 64),), places).to_wire()
        broker.allow(5, messages.encode(messages.Neighbours(neighbours=said)))
        assert bare(broker.calls.told("alpha", [], worker)) == [f"{what}, alpha.silu: had not ended"]


def test_what_is_not_known_is_said(worker: Worker) -> None:
    broker = Broker()
    broker.prepare(2, "function")
    broker.prepare(3, body=b"nonsense")
    for plan in (1, 2, 3):
        worker.page.recent.begin(plan)
    worker.page.recent.end(77)
    found = bare(broker.calls.told("alpha", [], worker))
    assert found[0] == "a call whose signature is not known any more: had not ended"
    assert "whose name and arguments its worker alone has" in found[1]
    assert found[2] == "a call whose signature is not known any more: not known how it ended"


def test_calls_of_a_chain_have_the_time_at_which_it_began(worker: Worker) -> None:
    broker = Broker()
    broker.prepare(1)
    record = ChainRecord([(1, b""), (1, b"")])
    worker.page.recent.begin_chain(record)
    worker.page.recent.end_chain(record, 9, failed_at=0)
    lines = broker.calls.told("alpha", [], worker)
    assert bare(lines)
    assert lines is not None
    assert [line.partition("alpha.silu")[2] for line in lines] == [", in a plan: raised", ", in a plan: not begun"]


def test_plans_and_ends_are_bounded(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_calls, "MOST_PLANS", 2)
    monkeypatch.setattr(last_calls, "MOST_ENDED", 2)
    broker = Broker()
    for plan in (1, 2, 3):
        broker.prepare(plan)
    worker.page.recent.begin(1)
    for worker.pid in (10, 11, 12):
        broker.calls.note_end(worker)
    assert broker.calls.told("alpha", [10], None) is None
    assert bare(broker.calls.told("alpha", [12], None)) == [
        "a call whose signature is not known any more: had not ended"
    ]
