"""A client's bells: when they may be used again, and how those end that nobody answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu

from layerzero.client.gpu.graph_slots import Bells
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.streams import ClientOrder
from layerzero.ipc.shm.timeline_page import TimelinePage, create_page
from layerzero.ipc.shm.timeline_words import RUNG, SILENT, TAKEN

STREAM = 5


class Rig:
    def __init__(self) -> None:
        self.driver = FakeDriver(FakeGpu())
        context = Context(self.driver, UUID)  # type: ignore[arg-type]
        fd = create_page()
        self.order = ClientOrder(context, fd, has_memops=True)
        os.close(fd)
        self.bells = Bells(self.order, context)

    @property
    def page(self) -> TimelinePage:
        return self.order.page

    def bind(self, *, has_failed: bool = False) -> Any:
        bell, _ = self.bells.take()
        call = SimpleNamespace(bell=bell, has_failed=has_failed)
        self.bells.bind(bell, call)  # type: ignore[arg-type]
        return call


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.order.close()


def test_bell_of_a_graph_that_was_dropped_stays_until_its_last_replay_is_over(rig: Rig) -> None:
    """Who dropped the graph may have launched it a moment before."""
    call, other = rig.bind(), rig.bind()
    rig.driver.held.add(STREAM)
    rig.bells.let_go(call)
    assert (rig.bells.gone(), rig.bells.gone()) == ([], [])
    rig.bells.let_go(other)  # later: what it waits for may have come behind the first one's
    rig.driver.held.clear()
    assert rig.bells.gone() == [call]
    assert rig.bells.gone() == [other]
    assert not rig.bells


def test_bell_of_a_dropped_graph_waits_while_something_is_captured(rig: Rig) -> None:
    """What is under way cannot be told then."""
    call = rig.bind()
    rig.driver.begin_capture(STREAM)
    rig.bells.let_go(call)
    assert rig.bells.gone() == []
    rig.driver.captures.clear()
    assert rig.bells.gone() == []
    assert rig.bells.gone() == [call]


def test_row_of_bells_that_nobody_answers_ends_in_its_order(rig: Rig) -> None:
    """The graph's waits all end, the first one first."""
    calls = [rig.bind(has_failed=True) for _ in range(3)]
    bells = [call.bell for call in calls]
    rig.page.link_bells(bells[0], bells[1])
    rig.page.link_bells(bells[1], bells[2])
    assert rig.bells.end_failed() == []
    rig.page.set_bell(bells[0], RUNG)
    assert rig.bells.end_failed() == calls
    assert all(rig.page.is_bell_done(bell) for bell in bells)
    assert rig.bells.end_failed() == []


def test_bell_whose_point_has_not_come_is_not_ended(rig: Rig) -> None:
    """A worker that died had taken it, and another one serves the one before it again."""
    served, failed = rig.bind(), rig.bind(has_failed=True)
    rig.page.link_bells(served.bell, failed.bell)
    for call in (served, failed):
        rig.page.set_bell(call.bell, TAKEN)
    assert rig.bells.end_failed() == []
    rig.page.store_bell_done(served.bell)
    assert rig.bells.end_failed() == [failed]


def test_bell_after_one_that_failed_is_rung_for_its_worker(rig: Rig) -> None:
    """Nobody else would ring it, and the graph waits for it."""
    failed, served = rig.bind(has_failed=True), rig.bind()
    rig.page.link_bells(failed.bell, served.bell)
    rig.page.set_bell(failed.bell, RUNG)
    assert rig.bells.end_failed() == [failed]
    assert (rig.page.bell(served.bell), rig.page.is_bell_done(served.bell)) == (RUNG, False)


def test_bell_that_is_taken_again_follows_none(rig: Rig) -> None:
    """Its last graph is gone."""
    first, second = rig.bind(), rig.bind()
    rig.page.link_bells(first.bell, second.bell)
    rig.bells.give_back(second.bell)
    assert rig.bind().bell == second.bell
    assert rig.page.previous_bell(second.bell) is None
    assert rig.page.bell(second.bell) == SILENT
