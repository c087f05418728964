"""Calls that repeat become one launch: a kernel that runs on the same blocks again and again becomes a CUDA graph.

Words that order streams stay outside of it, and so do copies to and from arenas that are not mapped.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.workers.boot import GRAPH_BYTES
from layerzero.workers.gpu.errors import is_out_of_memory
from layerzero.workers.provider import Bound, CaptureResource
from layerzero.workers.recording import OnStream, record

FROZEN_AFTER = 4  # runs without a graph; a library may compile, load and tune in the first ones
MAX_GRAPHS = 64
MAX_PINNED = 4096  # besides
_PATIENCE = 8  # a graph that had to go comes back after so many times as many runs


class State(Enum):
    WARMUP = "warmup"  # each run is the kernel's own
    SHAPES_FROZEN = "shapes_frozen"  # the same blocks came often enough: it is captured next
    CAPTURED = "captured"
    REPLAYING = "replaying"
    EAGER = "eager"  # for good


class Signal(Enum):
    REPEATED = "repeated"
    CAPTURED = "captured"
    LAUNCHED = "launched"
    REFUSED = "refused"
    EVICTED = "evicted"


TRANSITIONS: dict[tuple[State, Signal], State] = {
    (State.WARMUP, Signal.REPEATED): State.SHAPES_FROZEN,
    (State.SHAPES_FROZEN, Signal.CAPTURED): State.CAPTURED,
    (State.SHAPES_FROZEN, Signal.REFUSED): State.EAGER,
    (State.SHAPES_FROZEN, Signal.EVICTED): State.WARMUP,
    (State.CAPTURED, Signal.LAUNCHED): State.REPLAYING,
    (State.CAPTURED, Signal.REFUSED): State.EAGER,
    (State.CAPTURED, Signal.EVICTED): State.WARMUP,
    (State.REPLAYING, Signal.REFUSED): State.EAGER,
    (State.REPLAYING, Signal.EVICTED): State.WARMUP,
}


@dataclass(eq=False)
class GraphCache:
    """How far a kernel that is bound to some blocks has come."""

    state: State = State.WARMUP
    runs: int = 0  # in WARMUP
    needed: int = FROZEN_AFTER
    graph: int = 0
    stream: int = 0  # of the graph
    nbytes: int = 0  # of GPU memory that the graph took
    bound: Bound | None = None  # what the graph runs

    def step(self, signal: Signal) -> None:
        """Raises KeyError for a signal that this state does not know."""
        self.state = TRANSITIONS[self.state, signal]


@dataclass(eq=False)
class Pinned:
    """A graph that stays until it is let go of."""

    context: Context
    graph: int
    nbytes: int
    bound: Bound


class _Retired(NamedTuple):
    context: Context
    graph: int  # 0: a capture that failed
    bound: Bound


class Graphs:
    """The graphs of a worker, bounded by count and memory. For one thread; needs the context to be current."""

    def __init__(self, on_stream: OnStream | None, budget_bytes: int = GRAPH_BYTES) -> None:
        """With a budget of 0 nothing is captured."""
        self._on_stream = on_stream
        self._budget_bytes = budget_bytes
        self._live: dict[GraphCache, Context] = {}  # least recently launched first
        self._pinned: dict[Pinned, None] = {}
        self._retired: list[_Retired] = []
        self._graphs_of: Counter[Bound] = Counter()  # doomed ones included

    def advance(self, steady: GraphCache, bound: Bound, context: Context, stream: int) -> str:
        """Count a run that comes now, and capture the kernel if it is due. Enqueues nothing.

        Returns why this kernel must never be captured, if that was found now. Raises CudaError when it is sticky.
        """
        if steady.state is not State.WARMUP or not self._budget_bytes:
            return ""
        steady.runs += 1
        if steady.runs <= steady.needed:
            return ""
        steady.step(Signal.REPEATED)
        return self._capture(steady, bound, context, stream)

    def launch(self, steady: GraphCache, stream: int) -> bool:
        """Enqueue the captured kernel; whether there was one for this stream. Raises CudaError."""
        if not steady.graph or steady.stream != stream:
            return False
        context = self._live.pop(steady)
        self._live[steady] = context
        try:
            context.driver.launch_graph(steady.graph, stream)
        except CudaError as exc:
            self._release(steady, Signal.EVICTED if exc.is_out_of_memory else Signal.REFUSED)
            raise
        if steady.state is State.CAPTURED:
            steady.step(Signal.LAUNCHED)
        return True

    def drop(self, steady: GraphCache) -> None:
        """Its blocks are no longer used."""
        if steady in self._live:
            self._release(steady, Signal.EVICTED)

    def clear(self) -> None:
        """Memory is short."""
        for steady in list(self._live):
            self._release(steady, Signal.EVICTED)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def reap(self) -> None:
        """Destroy what was let go of. Only while no stream waits: the driver frees memory then."""
        for context, graph, bound in self._retired:
            with context:
                if graph:
                    context.driver.destroy_graph(graph)
                self._graphs_of[bound] -= 1
                if not self._graphs_of[bound]:
                    del self._graphs_of[bound]
                    if isinstance(bound, CaptureResource):
                        bound.release()
        self._retired.clear()

    def pin(self, bound: Bound, context: Context, stream: int) -> Pinned:
        """Capture a kernel into a graph that stays until `unpin`; enqueues nothing.

        Raises ValueError with the reason where that cannot be, CudaError when it is sticky.
        """
        used = sum(one.nbytes for one in self._pinned)
        if len(self._pinned) >= MAX_PINNED or used >= self._budget_bytes:
            raise ValueError(
                f"{len(self._pinned)} calls in graphs take {used} bytes of this worker's memory already; allowed: "
                f"{MAX_PINNED} and {self._budget_bytes} (LAYERZERO_WORKER_GRAPH_MIB)"
            )
        try:
            graph, nbytes = self._record(bound, context, stream)
        except Exception as exc:  # whatever a library raises
            if isinstance(exc, CudaError) and exc.is_sticky:
                raise
            raise ValueError(f"{type(exc).__name__}: {exc}"[:500]) from exc
        pinned = Pinned(context, graph, nbytes, bound)
        self._pinned[pinned] = None
        self._make_room()
        if used + nbytes > self._budget_bytes:
            self.unpin(pinned)
            raise ValueError(
                f"it takes {nbytes} bytes, {used} of {self._budget_bytes} bytes for graphs of this worker are in use"
            )
        return pinned

    def unpin(self, pinned: Pinned) -> None:
        del self._pinned[pinned]
        self._retired.append(_Retired(pinned.context, pinned.graph, pinned.bound))

    def _capture(self, steady: GraphCache, bound: Bound, context: Context, stream: int) -> str:
        try:
            # On the timeline's own stream: what a library keeps for each stream, such as the workspace of cuBLAS, is
            # then used by calls in a row only, as without a graph.
            graph, nbytes = self._record(bound, context, stream)
        except Exception as exc:  # whatever a library raises
            if isinstance(exc, CudaError) and exc.is_sticky:
                raise
            if is_out_of_memory(exc):
                self._rest(steady, Signal.EVICTED)
                return ""
            steady.step(Signal.REFUSED)
            return f"{type(exc).__name__}: {exc}"[:500]
        steady.graph, steady.stream, steady.nbytes, steady.bound = graph, stream, nbytes, bound
        steady.step(Signal.CAPTURED)
        self._live[steady] = context
        self._make_room()
        return ""

    def _record(self, bound: Bound, context: Context, stream: int) -> tuple[int, int]:
        """A graph and its bytes of GPU memory."""
        assert self._on_stream is not None
        free, _ = context.driver.memory_info()
        self._graphs_of[bound] += 1
        try:
            driver = context.driver
            graph = record(bound, driver, self._on_stream, stream, end=driver.end_capture, discard=driver.destroy_graph)
        except BaseException:
            self._retired.append(_Retired(context, 0, bound))
            raise
        # Other processes' memory counts here, too. The worst that comes of it is a graph less.
        return graph, max(0, free - context.driver.memory_info()[0])

    def _make_room(self) -> None:
        live, pinned = self._live, sum(one.nbytes for one in self._pinned)
        while live and (len(live) > MAX_GRAPHS or pinned + sum(one.nbytes for one in live) > self._budget_bytes):
            self._release(next(iter(live)), Signal.EVICTED)

    def _release(self, steady: GraphCache, signal: Signal) -> None:
        context = self._live.pop(steady)
        assert steady.bound is not None
        self._retired.append(_Retired(context, steady.graph, steady.bound))
        steady.graph = steady.stream = steady.nbytes = 0
        steady.bound = None
        self._rest(steady, signal)

    @staticmethod
    def _rest(steady: GraphCache, signal: Signal) -> None:
        steady.step(signal)
        steady.runs, steady.needed = 0, steady.needed * _PATIENCE


def tell(kernel_id: str, reason: str) -> None:
    """Into the worker's log."""
    print(f"kernel {kernel_id} cannot be captured and stays eager: {reason}", file=sys.stderr)
