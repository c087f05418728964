"""Which calls get a graph slot, what a graph slot costs, and what happens when it rings, above a driver that is a
fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.unit.ipc.fake_cuda import UUID, error
from tests.unit.workers.gpu.test_executor import NBYTES, Ended, Rig

from layerzero.ipc.errors import CudaGraphUnsafe, ProtocolError
from layerzero.ipc.shm.timeline_words import GRAPH_SLOTS, RUNG, TAKEN, TimelinePoint
from layerzero.ipc.transport.wire import Ref, pack_refs
from layerzero.workers.gpu import graph_cache, graph_calls
from layerzero.workers.gpu.plan import Plan

PLAN = 1


def refs(target: int = 4096) -> bytes:
    return pack_refs([Ref(1, 0, 0, NBYTES), Ref(1, 0, target, NBYTES)])


class Bench:
    """A client that is mapped, with a kernel that may be captured."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.rig.plan.is_graph_safe = True
        self.rig.map_gpu()
        self.rig.map_arena()
        self.rig.put(0, b"x" * NBYTES)
        self.page, self.driver, self.gpus = self.rig.page, self.rig.driver, self.rig.gpus

    def bind(self, graph_slot: int = 0, target: int = 4096, binding: int = 0) -> None:
        self.gpus.bind_graph_slot(self.rig.plan, PLAN, 1, refs(target), graph_slot, binding)

    def serve(self) -> bool:
        return self.gpus.graph_slots.serve()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.rig.close()


def test_graph_slot_runs_its_kernel_when_it_rings_and_not_before(bench: Bench) -> None:
    """And says so by two words, one on either side of the launch."""
    bench.bind(3)
    assert not bench.serve()
    bench.page.set_graph_slot(3, RUNG)
    assert bench.serve()
    assert bench.rig.take(4096) == b"x" * NBYTES
    assert (bench.page.graph_slot(3), bench.page.is_graph_slot_done(3)) == (TAKEN, True)
    assert not bench.serve()


def test_kernel_that_has_not_run_here_runs_once_on_zeros(bench: Bench) -> None:
    """What libraries do in a first run breaks a capture; the client's memory stays as it is."""
    runs: list[int] = []
    bench.rig.kernel = lambda: runs.append(bench.rig.stream)
    bench.rig.put(4096, b"y" * NBYTES)
    mapped = len(bench.driver.mapped)
    bench.bind(0)
    assert len(runs) == 2  # and once captured
    assert bench.rig.take(4096) == b"y" * NBYTES
    assert len(bench.driver.mapped) == mapped
    bench.bind(1, 8192)
    assert len(runs) == 3


def test_kernel_that_has_run_here_is_captured_at_once(bench: Bench) -> None:
    """It costs no memory then."""
    bench.rig.run(1)
    before = bench.driver.calls["allocate"]
    bench.bind()
    assert bench.driver.calls["allocate"] == before


def test_first_run_that_fails_is_over_before_its_memory_is_freed(bench: Bench) -> None:
    """A kernel that raises may have enqueued half of its work."""
    mapped, seen = len(bench.driver.mapped), []

    def refuse() -> None:
        seen.append(bench.driver.calls["synchronize_stream"])
        raise ValueError("odd shape")

    bench.rig.kernel = refuse
    with pytest.raises(CudaGraphUnsafe, match="its first run failed: ValueError: odd shape"):
        bench.bind()
    assert (bench.driver.calls["synchronize_stream"], len(bench.driver.mapped)) == (seen[0] + 1, mapped)


def test_memory_of_a_first_run_is_not_freed_while_a_stream_waits(bench: Bench) -> None:
    """The driver would wait for it, and this thread serves everybody."""
    mapped = len(bench.driver.mapped)
    bench.rig.run(1)
    bench.rig.plan.has_run = False
    bench.driver.held.update(bench.rig.streams())
    bench.bind(0)
    assert len(bench.driver.mapped) == mapped + 2
    bench.driver.held.clear()
    bench.gpus.watch()
    assert len(bench.driver.mapped) == mapped


def test_graph_slot_that_another_worker_took_is_served_when_it_is_bound(bench: Bench) -> None:
    """That worker is gone; the client's graph waits for DONE."""
    bench.page.set_graph_slot(3, TAKEN)
    bench.bind(3)
    assert bench.page.is_graph_slot_done(3)
    assert bench.rig.take(4096) == b"x" * NBYTES
    bench.rig.put(0, b"z" * NBYTES)
    bench.page.set_graph_slot(4, TAKEN)
    bench.page.store_graph_slot_done(4)
    bench.bind(4, 8192)  # that one had been done
    assert bench.rig.take(8192) != b"z" * NBYTES


def test_graph_slots_of_others_are_passed_over(bench: Bench) -> None:
    """The page is all workers'; a look must end."""
    bench.bind(2)
    bench.bind(9)
    for graph_slot in (1, 2, 3, 9, 10):
        bench.page.set_graph_slot(graph_slot, RUNG)
    assert bench.serve()
    assert [bench.page.graph_slot(graph_slot) for graph_slot in (1, 2, 3, 9, 10)] == [RUNG, TAKEN, RUNG, TAKEN, RUNG]
    assert not bench.serve()


def test_graph_slot_that_is_another_calls_by_now_is_left_alone(bench: Bench) -> None:
    """Found by the simulator: its own call is over, and MUTE not read yet. It would write into memory that is the
    client's again, and answer for a call that it has not run."""
    bench.bind(2)
    bench.bind(9)
    bench.page.set_binding(2, 1)
    bench.page.set_graph_slot(2, RUNG)
    assert not bench.serve()
    assert state(bench, 2) == [(RUNG, False)]
    bench.page.link_graph_slots(9, 2)
    bench.page.set_graph_slot(9, RUNG)
    assert bench.serve()
    assert bench.page.graph_slot(9) == TAKEN
    assert state(bench, 2) == [(RUNG, False)]  # for who serves it


def test_call_whose_graph_slot_is_another_ones_by_now_takes_nothing_over(bench: Bench) -> None:
    """Its RUN comes late, behind the UNBIND that the broker has heard of."""
    bench.page.set_graph_slot(2, TAKEN)
    bench.page.set_binding(2, 5)
    bench.bind(2, binding=4)
    assert state(bench, 2) == [(TAKEN, False)]


def linked(bench: Bench, *graph_slots: int) -> None:
    """Bells of one graph, each rung by who answers the one before. Each copies the one before's result."""
    for graph_slot, following in pairwise(graph_slots):
        bench.page.link_graph_slots(graph_slot, following)


def state(bench: Bench, *graph_slots: int) -> list[tuple[int, bool]]:
    return [
        (bench.page.graph_slot(graph_slot), bench.page.is_graph_slot_done(graph_slot)) for graph_slot in graph_slots
    ]


def test_graph_slots_that_follow_are_served_with_the_first_in_their_order(bench: Bench) -> None:
    """At each replay; the client rings once for all of them."""
    graph_slots, order = (5, 2, 9), []
    launch = bench.driver.launch_graph
    for graph_slot in graph_slots:
        bench.bind(graph_slot, 4096 * (graph_slot + 1))
    graphs = {
        one.graph.graph: graph_slot
        for board in bench.gpus.graph_slots._boards
        for graph_slot, one in board.graph_slots.items()
    }
    bench.driver.launch_graph = lambda graph, stream: (order.append(graphs[graph]), launch(graph, stream))  # type: ignore[method-assign]
    linked(bench, *graph_slots)
    for replay in range(3):
        bench.page.clear_graph_slot_done(5)
        bench.page.set_graph_slot(5, RUNG)
        assert bench.serve()
        assert state(bench, *graph_slots) == [(TAKEN + replay, True)] * 3
        assert not bench.serve()
    assert order == [*graph_slots] * 3


def test_graph_slot_that_follows_at_another_worker_is_taken_back_and_rung(bench: Bench) -> None:
    """Its DONE is the last replay's until then."""
    bench.bind(1)
    linked(bench, 1, 2)
    bench.page.set_graph_slot(2, TAKEN + 4)
    bench.page.store_graph_slot_done(2)
    bench.page.set_graph_slot(1, RUNG)
    assert bench.serve()
    assert state(bench, 1, 2) == [(TAKEN, True), (RUNG, False)]


def test_dead_workers_graph_slots_are_taken_over_in_their_order(bench: Bench) -> None:
    """One whose turn has not come waits for who serves the one before it."""
    linked(bench, 1, 2, 3)
    for graph_slot in (1, 2, 3):
        bench.page.set_graph_slot(graph_slot, TAKEN + 7)
    bench.bind(3, 3 * 4096)
    bench.bind(2, 2 * 4096)
    assert state(bench, 1, 2, 3) == [(TAKEN + 7, False)] * 3
    bench.bind(1)
    assert state(bench, 1, 2, 3) == [(TAKEN + 7, True)] * 3  # in the replay that the dead one took them in
    bench.page.clear_graph_slot_done(1)
    bench.page.set_graph_slot(1, RUNG)
    assert bench.serve()
    assert state(bench, 1, 2, 3) == [(TAKEN + 8, True)] * 3


def test_dead_workers_graph_slot_whose_point_had_come_is_served_when_it_is_bound(bench: Bench) -> None:
    """The one before it is through, and nobody serves that again."""
    linked(bench, 1, 2, 3)
    bench.page.set_graph_slot(1, TAKEN)
    bench.page.store_graph_slot_done(1)
    for graph_slot in (2, 3):
        bench.page.set_graph_slot(graph_slot, TAKEN)
    bench.bind(2)
    assert state(bench, 2, 3) == [(TAKEN, True), (RUNG, False)]
    bench.bind(3, 8192)
    assert bench.serve()
    assert state(bench, 3) == [(TAKEN, True)]


def test_graph_slots_that_follow_each_other_in_a_circle_are_served_once(bench: Bench) -> None:
    """A client that is broken keeps nobody else from being served."""
    for graph_slot in (1, 2):
        bench.bind(graph_slot, 4096 * (graph_slot + 1))
    linked(bench, 1, 2, 1)
    bench.page.set_graph_slot(1, RUNG)
    assert bench.serve()
    assert state(bench, 1, 2) == [(TAKEN, True)] * 2


def break_descriptor(bench: Bench) -> None:
    bench.rig.plan.is_graph_safe = False


def break_kernel(bench: Bench) -> None:
    bench.rig.run(1)
    bench.rig.kernel = lambda: bench.driver.synchronize_stream(bench.rig.stream)


def break_first_run(bench: Bench) -> None:
    bench.driver.fails["allocate"], bench.driver.times["allocate"] = error("cuMemAlloc_v2", 2), 1


def break_budget(bench: Bench) -> None:
    bench.gpus._graphs._budget_bytes = bench.driver.graph_bytes - 1


def turn_off(bench: Bench) -> None:
    bench.gpus._graphs._budget_bytes = 0


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (break_descriptor, "its descriptor does not say that it may be captured"),
        (break_kernel, "CudaError: cuStreamSynchronize returned 900"),
        (break_first_run, "its first run failed: CudaError: cuMemAlloc_v2 returned 2"),
        (break_budget, "it takes 1048576 bytes, 0 of 1048575 bytes"),
        (turn_off, "0 calls in graphs take 0 bytes .* allowed: 4096 and 0"),
    ],
)
def test_call_that_cannot_have_a_graph_slot_is_refused_with_the_reason(
    bench: Bench, break_it: Callable[[Bench], None], why: str
) -> None:
    """The caller's capture fails with it; another backend is tried before."""
    break_it(bench)
    with pytest.raises(CudaGraphUnsafe, match=f"kernel test.silu cannot run within a CUDA graph of the caller: {why}"):
        bench.bind()
    bench.rig.kernel = lambda: None
    bench.gpus.watch()
    assert not bench.gpus.graph_slots
    assert bench.driver.graphs == {}


def test_graphs_of_graph_slots_stay_and_those_of_repeated_calls_go(bench: Bench) -> None:
    """One budget for both: a client's graph may replay at any time, a repeated call runs without one."""
    rig = bench.rig
    for number in range(1, 6):
        rig.run(number)
    assert rig.replayed[-1]
    bench.gpus._graphs._budget_bytes = 2 * bench.driver.graph_bytes
    bench.bind(0)
    bench.bind(1)
    rig.run(6)
    assert not rig.replayed[-1]
    with pytest.raises(CudaGraphUnsafe, match="2 calls in graphs take 2097152 bytes"):
        bench.bind(2)
    bench.gpus.mute(1, 0, PLAN)
    bench.bind(2)
    assert rig.page.is_done(TimelinePoint(0, 6))


def test_graph_slots_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds memory of the driver's."""
    monkeypatch.setattr(graph_cache, "MAX_PINNED", 2)
    bench.bind(0)
    bench.bind(1)
    with pytest.raises(CudaGraphUnsafe, match="2 calls in graphs"):
        bench.bind(2)


@pytest.mark.parametrize(
    ("graph_slot", "why"), [(GRAPH_SLOTS, "graph slot 4096; allowed"), (0, "graph slot 0 of client 1 is bound already")]
)
def test_graph_slot_that_is_none_or_taken_is_refused(bench: Bench, graph_slot: int, why: str) -> None:
    """The broker and the client count them."""
    bench.bind(0)
    with pytest.raises(ProtocolError, match=why):
        bench.bind(graph_slot)


def test_muted_graph_slot_is_silent_and_its_graph_gone_when_nothing_works(bench: Bench) -> None:
    """The driver would wait for the streams, and the kernel may be running."""
    bench.bind(3)
    bench.bind(4, 8192)
    bench.gpus.mute(1, 3, PLAN + 1)  # not of that plan
    bench.gpus.mute(2, 3, PLAN)  # not of that client
    bench.page.set_graph_slot(3, RUNG)
    assert bench.serve()
    bench.driver.held.update(bench.rig.streams())
    bench.gpus.mute(1, 3, PLAN)
    assert (len(bench.driver.graphs), bench.gpus.timeout_ms) == (2, 1)
    bench.driver.held.clear()
    bench.gpus.watch()
    assert len(bench.driver.graphs) == 1
    bench.page.set_graph_slot(3, RUNG)
    assert not bench.serve()


def test_graph_slots_go_with_their_clients_gpu(bench: Bench) -> None:
    """Their addresses mean something else by and by."""
    bench.bind(3)
    bench.gpus.unmap_arena(1, 1, [bench.rig.plan])
    bench.gpus.unmap_gpu(1, UUID)
    bench.page.set_graph_slot(3, RUNG)
    assert (bench.serve(), bench.driver.graphs, bool(bench.gpus.graph_slots)) == (False, {}, False)
    assert bench.gpus._arenas == {}


def test_graph_slot_outlives_the_news_that_its_arena_was_taken_back_before_it_was_bound(bench: Bench) -> None:
    """RUN and the words about memory come by two sockets: UNMAP and MAP of before may be read after it."""
    bench.bind(3)
    bench.gpus.unmap_arena(1, 1, [bench.rig.plan])
    bench.page.set_graph_slot(3, RUNG)
    assert bench.serve()
    bench.rig.map_arena()
    bench.gpus.mute(1, 3, PLAN)
    assert bench.gpus._arenas
    bench.bind(4)
    bench.page.set_graph_slot(4, RUNG)
    assert bench.serve()


def test_arena_whose_graph_slot_is_muted_after_it_was_taken_back_goes_then(bench: Bench) -> None:
    """MUTE comes by the other socket, too."""
    bench.bind(3)
    bench.bind(4)
    bench.gpus.unmap_arena(1, 1, [bench.rig.plan])
    bench.gpus.mute(1, 3, PLAN)
    assert bench.gpus._arenas
    bench.gpus.mute(1, 4, PLAN)
    assert bench.gpus._arenas == {}


@pytest.mark.parametrize("number", [2, 700])
def test_launch_that_fails_ends_the_process(bench: Bench, number: int) -> None:
    """The client's graph waits, and only another worker can go on with it."""
    bench.bind(3)
    bench.driver.fails["launch_graph"] = error("cuGraphLaunch", number, sticky=number == 700)
    bench.driver.times["launch_graph"] = 1
    bench.page.set_graph_slot(3, RUNG)
    with pytest.raises(
        Ended, match=f"graph slot 3 of client 1 was taken and cannot be served: cuGraphLaunch .* {number}"
    ):
        bench.serve()
    assert (bench.page.graph_slot(3), bench.page.is_graph_slot_done(3)) == (TAKEN, False)


def test_kernel_that_is_new_comes_after_streams_that_wait_for_a_client(bench: Bench, monkeypatch: Any) -> None:
    """To load one a library may wait for all streams. One of ours that waits for a client may wait for a replay of
    that client's graph, which this thread serves: without the rest it would be served after 30 s, by another worker."""
    bench.bind(0)
    bench.rig.run(1)
    bench.driver.held.update(bench.rig.streams())
    launch = bench.driver.launch_graph

    def replay(graph: int, stream: int) -> None:
        launch(graph, stream)
        bench.driver.held.clear()  # the client's stream has come to the call that it made after the replay

    monkeypatch.setattr(bench.driver, "launch_graph", replay)
    bench.page.set_graph_slot(0, RUNG)
    old, bench.rig.plan = bench.rig.plan, Plan(bench.rig.plan.call, bench.rig.bind, UUID, is_graph_safe=False)
    bench.rig.kernel = bench.driver.synchronize
    bench.rig.run(2, target=8192)
    assert bench.rig.take(8192) == b"x" * NBYTES
    assert bench.page.is_graph_slot_done(0)
    bench.gpus.drop(old)


def test_rest_ends_where_a_client_does_not_come(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(graph_calls, "REST_S", 0.01)
    bench.rig.run(1)
    bench.driver.held.update(bench.rig.streams())
    assert bench.gpus.graph_slots.rest(bench.gpus.watch), "nobody waits for this thread"
    bench.driver.held.clear()
    bench.bind(0)
    bench.driver.held.update(bench.rig.streams())
    assert not bench.gpus.graph_slots.rest(bench.gpus.watch)
    bench.driver.held.clear()
    assert bench.gpus.graph_slots.rest(bench.gpus.watch)
