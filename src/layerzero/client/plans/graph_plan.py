"""A frozen plan on a GPU: a CUDA graph of its steps, launched at each run (docs/plans.md).

The graph is captured once the calls have settled: this process launches them itself, or has found that it may not, and
then they are in slots of their workers. While there is no graph that may be launched, the steps go one by one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from layerzero.client.connection.counters import Row
from layerzero.client.connection.overlay import Overlay
from layerzero.client.gpu.calls import READ_OFTEN
from layerzero.client.plans.counting import GRAPH, count_steps, counter_rows
from layerzero.client.plans.graph_library import Fence, Graph, GraphLibrary
from layerzero.client.plans.graph_steps import NO_WISHES, GraphSteps, NotCapturable, Served
from layerzero.client.plans.passes import ARGUMENT, FIXED, Program
from layerzero.client.plans.recording import Use, Value
from layerzero.client.plans.traced import map_leaves
from layerzero.client.plans.verifying import largest_difference
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument

WAIT_RUNS, WAIT_S = 256, 3.0  # for calls to be lifted; then those that are not are captured in slots of their workers
MAX_FAILED = 3  # captures in a row
SAME_RUNS = 8  # with arguments in the same memory; then a graph is captured that works on it
FIRST_LOOK, MAX_LOOK = 256, 65536  # replays until it is seen whether more calls are lifted
LOOK_RUNS = 8  # as calls, one after the other: the broker lifts what it has evidence for
UNSETTLED, SAMPLED, LOOKING = "its calls are not settled", "calls are sampled", "it was seen whether more is lifted"
LOST = "the connection to the broker is lost"
NO_LEAVE = "the leave to launch kernels in this process has ended"


class _Made:
    """A graph and what it works on. `inputs`: memory for the arguments, empty where it works on the caller's own, which
    is at `addresses` then; `outputs`: the arrays of the function's result by value. `fill` copies arguments there,
    `copies` makes what is new of the result."""

    def __init__(
        self,
        graph: Graph,
        inputs: list[Any],
        outputs: dict[int, Any],
        addresses: tuple[int, ...],
        fill: Callable[[Sequence[Any]], None],
        copies: Callable[[], list[Any]],
    ) -> None:
        self.graph, self.inputs, self.outputs, self.addresses = graph, inputs, outputs, addresses
        self.fill, self.copies = fill, copies


class GraphPlan:
    """Of one program and one connection. For one thread at a time."""

    def __init__(
        self,
        session: Session,
        program: Program,
        library: GraphLibrary,
        *,
        is_timed: bool,
        wishes: Mapping[int, Overlay] = NO_WISHES,
    ) -> None:
        """`wishes`: what calls ask of selection besides, by their step."""
        self.session, self.program, self.link = session, program, session.link
        self.device: int = program.recording.device  # type: ignore[assignment]  # it has arrays
        self.problem = ""
        self.served: dict[int, Served] = {}  # calls of the graph, or of the last run without one, by step
        self.difference: float | None = None  # of the first replay from the run before
        self.captures = 0
        self.why = ""  # the last run was no replay
        self.copied_bytes = 0
        self._library, self._is_timed = library, is_timed
        self._steps = GraphSteps(session, program, library, wishes)
        self._fence: Fence | None = None
        self._made: _Made | None = None  # works on memory of its own
        self._direct: _Made | None = None  # works on the caller's
        self._last: Graph | None = None  # that was replayed
        self._epoch: int | None = None
        self._is_rehearsed = False
        self._failed = 0
        self._runs, self._since_s = 0, time.monotonic()  # without a graph that may be launched
        self._has_leave = True
        self._to_look = self._look = FIRST_LOOK
        self._last_at: tuple[int, ...] = ()
        self._same = 0
        self._written = [
            place
            for place, number in enumerate(program.recording.inputs)
            if program.recording.values[number].storage.writers
        ]
        homes = program.homes
        self._new = [value for value in self._of_result() if homes[value.storage.number] not in (ARGUMENT, FIXED)]
        self._numbers = [value.number for value in self._new]
        values = program.recording.values
        numbers = [*program.recording.inputs, *(program.recording.inputs[place] for place in self._written)]
        self._argument_bytes = sum(_nbytes_of(values[number]) for number in numbers)
        self._result_bytes = sum(map(_nbytes_of, self._new))
        self._rows: list[tuple[Row, int]] = []  # of counters, of the graph's calls
        self._is_all_here = False  # all calls of the graph are launched by this process
        self.failure = ""  # of the last capture

    @property
    def graph(self) -> Graph | None:
        """That of the last capture; None before, and while it may not be launched."""
        return None if self._made is None else self._made.graph

    def time_us(self) -> float | None:
        """The GPU's time of the last replay, if times were asked for and it is over."""
        return None if self._last is None else self._last.time_us()

    @property
    def runs_here(self) -> bool:
        """Whether the next run is one graph of kernels that this process launches: no worker is asked."""
        return self._is_all_here and not self._why_not()

    @property
    def is_direct(self) -> bool:
        """Whether there is a graph that works on the caller's memory."""
        return self._direct is not None

    @property
    def nbytes(self) -> int:
        """Memory of the graphs, and of the copies of arguments."""
        made = [one for one in (self._made, self._direct) if one is not None]
        copies = sum(_nbytes_of(self.program.recording.values[n]) for n in self.program.recording.inputs)
        return sum(one.graph.nbytes for one in made) + (copies if self._made is not None else 0)

    def run(self, inputs: Sequence[Any]) -> Any:
        """The function's result, new at each run. `inputs`: the arrays of its arguments, in order. Raises what its
        calls raise. `problem` says afterwards why it is no plan."""
        with self._library.on(self.device):
            self.why = self._why_not()
            if not self.why:
                try:
                    return self._replay(inputs)
                except BaseException:
                    self._drop()
                    raise
            return self._run_steps(inputs)

    def copied(self, address: int, nbytes: int) -> memoryview:
        """These bytes of the GPU, once all that was enqueued is over."""
        with self._library.on(self.device):
            driver, stream = self.session.gpus.gpu(self.device).memory.context.driver, self._library.stream(self.device)
            data = (ctypes.c_char * nbytes)()
            driver.copy_to_host(ctypes.addressof(data), address, nbytes, stream)
            driver.synchronize_stream(stream)
        return memoryview(data).cast("B")

    def run_plainly(self, inputs: Sequence[Any]) -> Any:
        """As `run`, of what is to be no graph."""
        with self._library.on(self.device):
            self._steps.served = self.served = {}
            outputs = self._steps.run(inputs)
            return map_leaves(self.program.recording.output, partial(self._plain, outputs))

    def enqueue(self, inputs: Sequence[Any]) -> tuple[Any, list[tuple[str, str]]]:
        """Its steps, for a CUDA graph of somebody else's, which the current stream is captured for: the function's
        result, in that graph's memory, and op and kernel of each call. Raises NotCapturable."""
        with self._library.on(self.device):
            self._steps.served = {}
            outputs = self._steps.run(inputs, is_captured=True)
            if not all(one.is_here for one in self._steps.served.values()):
                raise NotCapturable("a worker makes a call of it")
            value = map_leaves(self.program.recording.output, partial(self._plain, outputs))
            return value, list(self._kernels(self._steps.served))

    def walk(self, inputs: Sequence[Any]) -> Any:
        """A generator that goes step by step: each step with its results."""
        with self._library.on(self.device):
            yield from self._steps.walk(inputs)

    # --- with a graph

    def _why_not(self) -> str:
        if self.session.sampler.is_on:
            return SAMPLED
        if self.link.lost is not None:
            return LOST
        if self._made is None:
            return UNSETTLED
        if self._epoch != self._page_epoch():
            return NO_LEAVE
        if not self._is_all_here:
            self._to_look -= 1
            if self._to_look < 0:
                if self._to_look <= -LOOK_RUNS:
                    self._to_look = self._look = min(2 * self._look, MAX_LOOK)
                return LOOKING
        return ""

    def _page_epoch(self) -> int:
        return self.session.gpus.gpu(self.device).order.page.lift_epoch

    def _replay(self, inputs: Sequence[Any]) -> Any:
        library, made, start_ns = self._library, self._made, time.perf_counter_ns()
        assert made is not None
        assert self._fence is not None
        if not self._is_all_here:
            self.session.gpus.glance(self.session.gpus.gpu(self.device), library.stream(self.device), READ_OFTEN)
        direct = self._direct_for(inputs)
        self._fence.enter(made.inputs)
        self._last = made.graph if direct is None else direct.graph
        if direct is not None:
            direct.graph.replay()
            value = self._result(direct, inputs, inputs)
            self.copied_bytes = 0
        else:
            made.fill(inputs)
            made.graph.replay()
            value = self._result(made, inputs, made.inputs)
            for place in self._written:
                library.filler([inputs[place]])([made.inputs[place]])
            self.copied_bytes = self._argument_bytes
        self.copied_bytes += self._result_bytes
        self._fence.leave()
        count_steps(self.session, self._rows, time.perf_counter_ns() - start_ns)
        return value

    def _direct_for(self, inputs: Sequence[Any]) -> _Made | None:
        """A graph that works on this very memory. A worker's slot is bound to memory that must not go: there is none
        for calls in slots."""
        addresses = tuple([self._library.address(one) for one in inputs])
        if self._direct is not None and self._direct.addresses == addresses:
            self._same = SAME_RUNS
            return self._direct
        self._same = self._same + 1 if addresses == self._last_at else 0
        self._last_at = addresses
        if self._same < SAME_RUNS or not inputs or not self._is_all_here:
            return None
        self._same = 0
        if self._direct is not None:  # they come and go: copies it is, unless these last longer
            self._direct, self._same = None, -SAME_RUNS
            return None
        assert self._made is not None
        try:
            self._direct = self._capture(list(inputs), addresses, self._made.graph)
        except NotCapturable:
            self._same = -MAX_LOOK
        return self._direct

    def _result(self, made: _Made, inputs: Sequence[Any], used: Sequence[Any]) -> Any:
        """The function's result in memory of its own; arguments that it returns are the caller's."""
        homes, recording = self.program.homes, self.program.recording
        copies = dict(zip(self._numbers, made.copies(), strict=True))

        def give(leaf: Any) -> Any:
            if not isinstance(leaf, Use):
                return leaf
            value = self.program.value(leaf)
            home = homes[value.storage.number]
            if home == FIXED:
                return self._constant(value)
            if home == ARGUMENT:
                place = value.storage.made_by
                if value.number == recording.inputs[place]:
                    return inputs[place]
                return self._library.view(inputs[place], made.outputs[value.number], used[place])
            return copies[value.number]

        return map_leaves(recording.output, give)

    def _of_result(self) -> list[Value]:
        return list({value.number: value for value in self.program.outputs()}.values())

    def _drop(self) -> None:
        self._made = self._direct = self._last = None
        self._wait()

    def _wait(self) -> None:
        """Give calls time to be lifted."""
        self._runs, self._since_s = 0, time.monotonic()

    # --- without one

    def _run_steps(self, inputs: Sequence[Any]) -> Any:
        epoch, is_first = self._page_epoch(), not self._is_rehearsed
        self._is_rehearsed = True
        self._steps.served = {}
        outputs = self._steps.run(inputs, is_strict=is_first)
        value = map_leaves(self.program.recording.output, partial(self._plain, outputs))
        del outputs
        self._runs += 1
        self.problem = self._steps.waiting
        if not self.problem and not self.session.sampler.is_on:
            self._settle(inputs, epoch, value)
        return value

    def _plain(self, outputs: dict[int, Any], leaf: Any) -> Any:
        if not isinstance(leaf, Use):
            return leaf
        value = self.program.value(leaf)
        if value.number in outputs:
            return outputs[value.number]
        return self._constant(value)

    def _constant(self, value: Value) -> Any:
        """The array itself; a new one of what the function makes anew at each run."""
        is_new = value.storage.number in self.program.fresh_constants
        return self._library.copier([value.obj])()[0] if is_new else value.obj

    def _settle(self, inputs: Sequence[Any], epoch: int, value: Any) -> None:
        """Capture the graph, if it is time to, or go on with the one that there is."""
        found = dict(self._steps.served)
        if epoch != self._page_epoch():
            return  # what was launched before it changed says nothing
        if self._made is not None and self._is_kept(found, epoch):
            return
        is_here = all(one.is_here for one in found.values())
        is_late = self._runs >= WAIT_RUNS and time.monotonic() - self._since_s >= WAIT_S
        if self._made is None:
            self.served = found
        if is_here or is_late:
            self._capture_all(inputs, epoch, value)

    def _is_kept(self, found: dict[int, Served], epoch: int) -> bool:
        """Whether the graph stays as it is, for all that was seen in a run without it."""
        if _same_kernels(found, self.served):
            self._epoch, self._has_leave = epoch, True  # for the same kernels in a new epoch
            return True
        if self.why == LOOKING:
            if _count_here(found) <= _count_here(self.served):
                return True
            self._drop()
        elif self._has_leave:
            self._has_leave = False
            self._wait()
        return False

    def _capture_all(self, inputs: Sequence[Any], epoch: int, expected: Any) -> None:
        self._drop()
        library = self._library
        own = [library.static(one) for one in inputs]
        self._steps.served = {}
        try:
            self._made = self._capture(own, (), None)
        except NotCapturable as exc:
            self._failed, self.failure = self._failed + 1, str(exc)
            if self._failed >= MAX_FAILED:
                self.problem = str(exc)
            return
        self._failed, self.failure, self.served = 0, "", dict(self._steps.served)
        self._rows = counter_rows(self.session, self._kernels(self.served), GRAPH)
        self._is_all_here = all(one.is_here for one in self.served.values())
        self._epoch, self._has_leave = epoch, True
        if not self.program.recording.writes_outside:
            self._check(inputs, expected)

    def _kernels(self, by_step: Mapping[int, Served]) -> Iterator[tuple[str, str]]:
        """Of these calls: op and kernel."""
        for step in self.program.steps:
            served = by_step.get(step.number)
            if served is not None and served.kernel_id and step.request is not None:
                yield step.request.op, served.kernel_id

    def _capture(self, inputs: list[Any], addresses: tuple[int, ...], beside: Graph | None) -> _Made:
        """Raises NotCapturable."""
        driver = self.session.gpus.gpu(self.device).memory.context.driver
        if self._fence is None:
            self._fence = self._library.fence(self.device)
        try:
            graph, outputs = self._library.capture(
                lambda: self._steps.run(inputs, is_captured=True), self.device, driver, beside, is_timed=self._is_timed
            )
        except RuntimeError as exc:  # torch's, at the capture's end
            raise NotCapturable(f"no CUDA graph can hold it: {str(exc).splitlines()[0][:300]}") from exc
        self.captures += 1
        wanted = {value.number for value in self._of_result()}
        kept = {n: array for n, array in outputs.items() if n in wanted}
        fill = self._library.filler([] if addresses else inputs)
        copies = self._library.copier([kept[number] for number in self._numbers])
        return _Made(graph, [] if addresses else inputs, kept, addresses, fill, copies)

    def _check(self, inputs: Sequence[Any], expected: Any) -> None:
        """See that the graph gives what its calls gave."""
        try:
            self.difference = largest_difference(expected, self._replay(inputs))
        except InvalidArgument as exc:
            self.problem = f"the graph gave something else than its calls one by one: {exc.message}"
            self._drop()


def _same_kernels(one: dict[int, Served], other: dict[int, Served]) -> bool:
    kinds = ((step.path, step.kernel_id, step.note) for step in one.values())
    others = ((step.path, step.kernel_id, step.note) for step in other.values())
    return one.keys() == other.keys() and list(kinds) == list(others) and all(step.is_here for step in one.values())


def _count_here(served: dict[int, Served]) -> int:
    return sum(one.is_here for one in served.values())


def _nbytes_of(value: Value) -> int:
    return 0 if value.array is None else value.array.nbytes
