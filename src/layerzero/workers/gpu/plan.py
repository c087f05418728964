"""What a worker keeps of a call signature on a GPU: the kernel bound to sets of blocks, and how long it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerzero.ipc.cuda.driver import Context, Driver
from layerzero.ipc.cuda.mappings import Mapping
from layerzero.ipc.transport.wire import REF, REF_BYTES
from layerzero.workers.gpu.graph_cache import GraphCache
from layerzero.workers.provider import Bind, Bound, Call

MAX_TASKS = 64  # of a plan
_FIRST_RUNS, _EACH = 8, 32  # the runs that are measured
_PATIENCE = 24  # runs; by then a kernel that is captured has been

Span = tuple[Mapping, int, int]  # offset and bytes within


class Clock:
    """The GPU's time of a plan's runs: the first ones and then each 32nd, one at a time. Needs the plan's context to be
    current."""

    def __init__(self) -> None:
        self._runs = self._measured = 0
        self._events: tuple[int, int] | None = None
        self.is_open = False  # a run was measured that has not been read

    def start(self, driver: Driver, stream: int, *, is_warming_up: bool) -> bool:
        """Before a run. Returns whether it is measured; `stop` follows then, unless the run fails.

        `is_warming_up`: it will be launched in another way when it repeats, with fewer gaps for the CPU's sake. Such
        runs are measured only if no others come.
        """
        self._runs += 1
        if self.is_open or (self._measured >= _FIRST_RUNS and self._runs % _EACH):
            return False
        if is_warming_up and self._runs <= _PATIENCE:
            return False
        if self._events is None:
            self._events = (driver.create_event(is_timed=True), driver.create_event(is_timed=True))
        driver.record_event(self._events[0], stream)
        return True

    def stop(self, driver: Driver, stream: int) -> None:
        if self._events is not None:
            driver.record_event(self._events[1], stream)
            self.is_open = True

    def read_ns(self, driver: Driver) -> int:
        """Of the measured run, once it is over; 0 when there is nothing new."""
        if not self.is_open or self._events is None or not driver.is_event_done(self._events[1]):
            return 0
        self.is_open = False
        self._measured += 1
        return max(1, driver.elapsed_ns(*self._events))

    def close(self, driver: Driver) -> None:
        for event in self._events or ():
            driver.destroy_event(event)
        self._events, self.is_open = None, False


class Enqueued(NamedTuple):
    """How a call went that the GPU has not come to yet."""

    elapsed_ns: int  # of an earlier run, on the GPU; 0 if none is new
    result: Any  # what the kernel returned
    is_replayed: bool  # from a CUDA graph


@dataclass(eq=False)
class Task:
    """A kernel bound to blocks, and what is copied around each run because it lies in arenas that are not mapped."""

    bound: Bound
    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    steady: GraphCache = field(default_factory=GraphCache)


class Dropped(NamedTuple):
    """A task that is kept until the GPU is through with what was enqueued before it was dropped."""

    context: Context
    events: list[int]
    task: Task

    def is_over(self) -> bool:
        with self.context:
            driver = self.context.driver
            if not all(driver.is_event_done(event) for event in self.events):
                return False
            for event in self.events:
                driver.destroy_event(event)
        return True


@dataclass(eq=False)
class Plan:
    """A call signature on a GPU. `tasks` are by client and references."""

    call: Call
    bind: Bind
    gpu: str
    is_graph_safe: bool  # as the descriptor says, until a capture shows otherwise
    why_eager: str = ""  # what the capture showed
    has_run: bool = False
    tasks: dict[tuple[int, bytes], Task] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


def names(refs: bytes, arena: int) -> bool:
    """Whether one of these references is into the arena."""
    return any(REF.unpack_from(refs, at)[0] == arena for at in range(0, len(refs), REF_BYTES))
