"""A client's graph slots: when they may be used again, and how those end that nobody answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu

from layerzero.client.gpu import torch_graphs
from layerzero.client.gpu.graph_slots import GraphSlots
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
        self.graph_slots = GraphSlots(self.order, context)

    @property
    def page(self) -> TimelinePage:
        return self.order.page

    def bind(self, *, has_failed: bool = False) -> Any:
        graph_slot, _ = self.graph_slots.take()
        call = SimpleNamespace(graph_slot=graph_slot, has_failed=has_failed)
        self.graph_slots.bind(graph_slot, call)  # type: ignore[arg-type]
        return call


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.order.close()


def test_graph_slot_of_a_graph_that_was_dropped_stays_until_its_last_replay_is_over(rig: Rig) -> None:
    """Who dropped the graph may have launched it a moment before."""
    call, other = rig.bind(), rig.bind()
    rig.driver.held.add(STREAM)
    rig.graph_slots.let_go(call)
    assert (rig.graph_slots.gone(), rig.graph_slots.gone()) == ([], [])
    rig.graph_slots.let_go(other)  # later: what it waits for may have come behind the first one's
    rig.driver.held.clear()
    assert rig.graph_slots.gone() == [call]
    assert rig.graph_slots.gone() == [other]
    assert not rig.graph_slots


class Captures:
    """torch.cuda, whose captures are the driver's."""

    def __init__(self, driver: FakeDriver) -> None:
        class CUDAGraph:
            def capture_begin(self) -> None:
                driver.begin_capture(STREAM)

            def capture_end(self) -> None:
                driver.captures.clear()

            def reset(self) -> None: ...

        self.CUDAGraph = CUDAGraph
        self.current_stream = lambda: SimpleNamespace(cuda_stream=STREAM)
        torch_graphs.follow(self, SimpleNamespace(capture_id=lambda stream: None))  # type: ignore[arg-type]


def test_graph_slot_of_a_dropped_graph_waits_while_something_is_captured(rig: Rig) -> None:
    """To ask the driver what is under way would break the capture."""
    call = rig.bind()
    graph = Captures(rig.driver).CUDAGraph()
    graph.capture_begin()
    rig.graph_slots.let_go(call)
    assert rig.graph_slots.gone() == []
    graph.capture_end()
    assert rig.graph_slots.gone() == []
    assert rig.graph_slots.gone() == [call]


def test_graph_slots_of_dropped_graphs_are_free_for_one_capture_after_the_other(rig: Rig) -> None:
    """A program that captures all the time leaves no other time to ask the driver in than before each of them."""
    graph, call = Captures(rig.driver).CUDAGraph(), rig.bind()
    rig.graph_slots.let_go(call)
    graph.capture_begin()
    assert rig.graph_slots.gone(is_capturing=True) == [call]
    graph.capture_end()


def test_graph_slot_waits_while_this_thread_captures_for_another_framework(rig: Rig) -> None:
    """Whose captures nobody follows."""
    call = rig.bind()
    rig.graph_slots.let_go(call)
    rig.driver.begin_capture(STREAM)
    assert rig.graph_slots.gone(is_capturing=True) == []
    rig.driver.captures.clear()
    assert rig.graph_slots.gone() == []
    assert rig.graph_slots.gone() == [call]


def test_row_of_graph_slots_that_nobody_answers_ends_in_its_order(rig: Rig) -> None:
    """The graph's waits all end, the first one first."""
    calls = [rig.bind(has_failed=True) for _ in range(3)]
    graph_slots = [call.graph_slot for call in calls]
    rig.page.link_graph_slots(graph_slots[0], graph_slots[1])
    rig.page.link_graph_slots(graph_slots[1], graph_slots[2])
    assert rig.graph_slots.end_failed() == []
    rig.page.set_graph_slot(graph_slots[0], RUNG)
    assert rig.graph_slots.end_failed() == calls
    assert all(rig.page.is_graph_slot_done(graph_slot) for graph_slot in graph_slots)
    assert rig.graph_slots.end_failed() == []


def test_graph_slot_whose_point_has_not_come_is_not_ended(rig: Rig) -> None:
    """A worker that died had taken it, and another one serves the one before it again."""
    served, failed = rig.bind(), rig.bind(has_failed=True)
    rig.page.link_graph_slots(served.graph_slot, failed.graph_slot)
    for call in (served, failed):
        rig.page.set_graph_slot(call.graph_slot, TAKEN)
    assert rig.graph_slots.end_failed() == []
    rig.page.store_graph_slot_done(served.graph_slot)
    assert rig.graph_slots.end_failed() == [failed]


def test_graph_slot_after_one_that_failed_is_rung_for_its_worker(rig: Rig) -> None:
    """Nobody else would ring it, and the graph waits for it."""
    failed, served = rig.bind(has_failed=True), rig.bind()
    rig.page.link_graph_slots(failed.graph_slot, served.graph_slot)
    rig.page.set_graph_slot(failed.graph_slot, RUNG)
    assert rig.graph_slots.end_failed() == [failed]
    assert (rig.page.graph_slot(served.graph_slot), rig.page.is_graph_slot_done(served.graph_slot)) == (RUNG, False)


def test_graph_slot_that_is_taken_again_follows_none(rig: Rig) -> None:
    """Its last graph is gone."""
    first, second = rig.bind(), rig.bind()
    rig.page.link_graph_slots(first.graph_slot, second.graph_slot)
    rig.graph_slots.give_back(second.graph_slot)
    assert rig.bind().graph_slot == second.graph_slot
    assert rig.page.previous_graph_slot(second.graph_slot) is None
    assert rig.page.graph_slot(second.graph_slot) == SILENT
