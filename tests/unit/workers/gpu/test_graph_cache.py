"""When a kernel is captured as a graph, when that is replayed, and when it is given up."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import ConfigError, CudaError
from layerzero.workers.boot import GRAPH_BYTES, read_graph_bytes
from layerzero.workers.gpu import graph_cache
from layerzero.workers.gpu.graph_cache import FROZEN_AFTER, MAX_GRAPHS, TRANSITIONS, GraphCache, Graphs, Signal, State

STREAM = 5


class Rig:
    """A kernel that copies on the stream it is told."""

    def __init__(self, budget_bytes: int = GRAPH_BYTES) -> None:
        self.driver = FakeDriver(FakeGpu())
        self.context = Context(self.driver, UUID)
        self.graphs = Graphs(self.on_stream, budget_bytes)
        self.stream = 0
        self.runs = 0
        with self.context:
            self.memory = self.driver.allocate(4096)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = 0

    def kernel(self) -> None:
        self.runs += 1
        self.driver.copy_on_device(self.memory, self.memory + 64, 8, self.stream)

    def call(self, one: GraphCache, kernel: Callable[[], object] | None = None, stream: int = STREAM) -> str:
        """As a worker does it; returns why the kernel cannot be captured."""
        kernel = kernel or self.kernel
        with self.context:
            reason = self.graphs.advance(one, kernel, self.context, stream)
            if not self.graphs.launch(one, stream):
                with self.on_stream(stream):
                    kernel()
        return reason

    def repeat(self, one: GraphCache, count: int = FROZEN_AFTER + 1) -> list[State]:
        states = []
        for _ in range(count):
            assert self.call(one) == ""
            states.append(one.state)
        return states


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_kernel_is_captured_once_its_blocks_have_come_back_often_enough(rig: Rig) -> None:
    """The first runs compile, load and tune, which a capture must not see."""
    assert rig.repeat(GraphCache(), 7) == [State.WARMUP] * 4 + [State.REPLAYING] * 3
    assert (rig.runs, rig.driver.calls["launch_graph"]) == (5, 3)


def test_every_state_but_the_last_can_be_left_and_none_that_has_a_graph_is_a_dead_end() -> None:
    """Graphs are bounded: each may have to go at any time."""
    left = {state for state, _ in TRANSITIONS}
    assert left == set(State) - {State.EAGER}
    assert {state for state, signal in TRANSITIONS if signal is Signal.EVICTED} == left - {State.WARMUP}
    with pytest.raises(KeyError):
        GraphCache(state=State.EAGER).step(Signal.REPEATED)


def refuse(rig: Rig) -> None:
    if rig.stream in rig.driver.captures:
        raise RuntimeError("operation not permitted when stream is capturing")
    rig.kernel()


KERNELS: dict[str, tuple[Callable[[Rig], object], str]] = {
    "raises": (refuse, "RuntimeError: operation not permitted"),
    "synchronizes": (lambda rig: rig.driver.synchronize_stream(rig.stream), "cuStreamSynchronize returned 900"),
    "hides its error": (lambda rig: rig.driver.broken.update(rig.driver.captures), "cuStreamEndCapture returned 901"),
    "works elsewhere": (lambda rig: None, "enqueues nothing on its stream"),
    "returns": (lambda rig: rig.kernel() or {"sizes": [1]}, "returns a dict"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_that_cannot_be_captured_is_tried_once(rig: Rig, name: str) -> None:
    """And runs as before: the stream is usable, and no graph is left."""
    kernel, reason = KERNELS[name]
    one = GraphCache()
    said = [rig.call(one, lambda: kernel(rig)) for _ in range(20)]
    assert [text for text in said if text] == [said[FROZEN_AFTER]]
    assert reason in said[FROZEN_AFTER]
    assert (one.state, rig.driver.graphs, rig.driver.captures) == (State.EAGER, {}, {})


def test_capture_that_ran_out_of_memory_is_tried_again_later(rig: Rig) -> None:
    """It says nothing of the kernel."""
    one = GraphCache()
    rig.driver.fails["begin_capture"] = error("cuStreamBeginCapture", 2)
    rig.driver.times["begin_capture"] = 1
    assert rig.repeat(one, 5)[-1] is State.WARMUP
    assert rig.repeat(one, 8 * FROZEN_AFTER)[-1] is State.WARMUP
    assert rig.repeat(one, 1) == [State.REPLAYING]


def test_lost_gpu_is_no_reason_to_stay_eager(rig: Rig) -> None:
    """The process has to end."""
    one = GraphCache()
    rig.repeat(one, FROZEN_AFTER)
    rig.driver.fails["begin_capture"] = error("cuStreamBeginCapture", 700, sticky=True)
    rig.driver.times["begin_capture"] = -1
    with pytest.raises(CudaError) as caught:
        rig.call(one)
    assert caught.value.is_sticky


def test_no_garbage_is_collected_while_a_kernel_is_captured(rig: Rig) -> None:
    """Freeing memory of CUDA's would break the capture, for a reason that is not the kernel's."""
    seen = []

    def kernel() -> None:
        seen.append(gc.isenabled())
        rig.kernel()

    one = GraphCache()
    for _ in range(FROZEN_AFTER + 1):
        rig.call(one, kernel)
    assert seen == [True] * FROZEN_AFTER + [False]
    assert gc.isenabled()


def test_graph_that_was_used_longest_ago_goes_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes back only after many more runs, so that graphs that do not fit together do not take turns."""
    monkeypatch.setattr(graph_cache, "MAX_GRAPHS", 2)
    first, second, third = GraphCache(), GraphCache(), GraphCache()
    rig.repeat(first)
    rig.repeat(second)
    rig.call(first)
    rig.repeat(third)
    assert [one.state for one in (first, second, third)] == [State.REPLAYING, State.WARMUP, State.REPLAYING]
    assert rig.graphs.has_retired
    rig.graphs.reap()
    assert len(rig.driver.graphs) == 2
    assert rig.repeat(second, 8 * FROZEN_AFTER + 1)[-2:] == [State.WARMUP, State.REPLAYING]


def test_graphs_together_stay_within_their_memory(rig: Rig) -> None:
    """Measured, since no driver says what a graph takes."""
    rig = Rig(budget_bytes=5 << 20)
    all_of_them = [GraphCache() for _ in range(8)]
    for one in all_of_them:
        rig.repeat(one)
    assert [one.state for one in all_of_them] == [State.WARMUP] * 3 + [State.REPLAYING] * 5
    assert len(all_of_them) < MAX_GRAPHS
    rig.driver.graph_bytes = 6 << 20
    large = GraphCache()
    rig.repeat(large)
    assert large.state is State.WARMUP


class Keeps:
    """A kernel with memory for its graphs."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.released = rig, 0

    def __call__(self) -> None:
        self.rig.kernel()

    def release(self) -> None:
        self.released += 1


def test_memory_of_a_kernels_graphs_goes_with_the_last_of_them(rig: Rig) -> None:
    """A graph that had to go for its size would else go on holding it."""
    kernel, one = Keeps(rig), GraphCache()
    for _ in range(FROZEN_AFTER + 1):
        rig.call(one, kernel)
    with rig.context:
        pinned = rig.graphs.pin(kernel, rig.context, STREAM)
    rig.graphs.clear()
    rig.graphs.reap()
    assert (len(rig.driver.graphs), kernel.released) == (1, 0)
    rig.graphs.unpin(pinned)
    assert kernel.released == 0  # it may be running
    rig.graphs.reap()
    assert (len(rig.driver.graphs), kernel.released) == (0, 1)


def test_memory_of_a_capture_that_failed_goes(rig: Rig) -> None:
    """It was allocated before the kernel was refused."""

    class Refuses(Keeps):
        def __call__(self) -> None:
            if self.rig.driver.captures:
                raise ValueError("odd")
            super().__call__()

    kernel, one = Refuses(rig), GraphCache()
    for _ in range(FROZEN_AFTER):
        rig.call(one, kernel)
    assert rig.call(one, kernel) == "ValueError: odd"
    rig.graphs.reap()
    assert kernel.released == 1


def test_without_memory_for_them_there_are_no_graphs() -> None:
    """The way to point them off."""
    rig, one = Rig(budget_bytes=0), GraphCache()
    assert rig.repeat(one, 20) == [State.WARMUP] * 20


def test_launch_that_fails_is_the_calls_error_and_the_last(rig: Rig) -> None:
    """The broker runs that call elsewhere; the next ones run without a graph."""
    one = GraphCache()
    rig.repeat(one)
    rig.driver.fails["launch_graph"] = error("cuGraphLaunch", 1)
    rig.driver.times["launch_graph"] = 1
    with pytest.raises(CudaError):
        rig.call(one)
    assert rig.repeat(one, 50) == [State.EAGER] * 50


def test_blocks_that_are_gone_leave_no_graph(rig: Rig) -> None:
    """It has their addresses."""
    one = GraphCache()
    rig.repeat(one)
    rig.graphs.drop(one)
    rig.graphs.drop(GraphCache())
    rig.graphs.reap()
    assert (rig.driver.graphs, rig.graphs.has_retired) == ({}, False)


def test_memory_for_graphs_is_a_whole_number_of_mib() -> None:
    """A worker that cannot read it says so and does not start."""
    read = [read_graph_bytes({"LAYERZERO_WORKER_GRAPH_MIB": text}) for text in ("", "0", "64")]
    assert [*read, read_graph_bytes({})] == [GRAPH_BYTES, 0, 64 << 20, GRAPH_BYTES]
    with pytest.raises(ConfigError, match="LAYERZERO_WORKER_GRAPH_MIB='-1'; allowed: a whole number of MiB"):
        read_graph_bytes({"LAYERZERO_WORKER_GRAPH_MIB": "-1"})
