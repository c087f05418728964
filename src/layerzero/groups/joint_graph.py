"""A run of a split plan as one CUDA graph on each rank, its calls of all ranks included (docs/groups.md).

Until all ranks can launch all of it themselves, runs go step by step. In each run the ranks say first how far they are,
and go as the one does that is least far: a graph that is launched on some ranks alone would wait for ever. NCCL wants
them to capture together, too, and to launch graphs of one such capture.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from layerzero.client.connection.counters import Row
from layerzero.client.facade import default_session
from layerzero.client.plans.counting import GRAPH, count_steps, counter_rows
from layerzero.client.plans.execution_plan import ExecutionPlan
from layerzero.client.plans.graph_library import LIBRARIES, Fence, Graph
from layerzero.client.plans.graph_plan import LOST, SAMPLED
from layerzero.client.plans.graph_steps import NotCapturable
from layerzero.client.plans.verifying import largest_difference
from layerzero.client.session.session import Session
from layerzero.groups import choices
from layerzero.groups.group import Group
from layerzero.groups.joint import Captured, launch, meet, nccl_of, turn
from layerzero.groups.one_shot import retire
from layerzero.groups.one_shot_trial import Sum, Trial, tried
from layerzero.groups.products import Product
from layerzero.groups.split_run import Item, Part, go, runs_here
from layerzero.groups.splitting import Collective
from layerzero.ipc.errors import InvalidArgument, LayerZeroError

STEPS, READY, CAPTURED, PROVED, SAME, DIRECT = range(6)
"""How far a rank is: it runs the steps; may capture its graph; has one; whose result was that of the steps; may capture
another one, that works on the arguments where they are; has that."""
SAME_RUNS = 8  # with arguments in the same memory; then a graph is captured that works on it
MAX_FAILED = 3  # captures in a row


class _Made(NamedTuple):
    """A graph and what it works on. `inputs`: memory for the arguments, empty where it works on the caller's own, at
    `addresses`; `kept`: what it makes, by value; `copies` makes new ones of what the caller gets."""

    graph: Graph
    inputs: list[Any]
    addresses: tuple[int, ...]
    kept: dict[int, Any]
    fill: Callable[[Sequence[Any]], None]
    copies: Callable[[], list[Any]]


class JointGraph:
    """Of one split of a function and one generation of the group. For one thread at a time."""

    def __init__(
        self,
        group: Group,
        items: Sequence[Item],
        values: tuple[Sequence[int], Sequence[int]],
        what: tuple[str, str, tuple[int, ...]],
        device: int,
    ) -> None:
        """`values`: of the function's arguments and of its result; `what`: the function's name, and what arrays it
        takes, which all ranks are to agree on."""
        name, dtype, shape = what
        self._group, self._items, self._device = group, items, device
        self._inputs, self._wanted = list(values[0]), list(dict.fromkeys(values[1]))
        self._what = ("split_plan", name, dtype, list(shape), choices.NCCL)
        last = max(n for n, item in enumerate(items) if not isinstance(item, Part))
        is_own_code = all(
            isinstance(item, Part) and not isinstance(item.run, ExecutionPlan) for item in items[last:][1:]
        )
        # Own code behind the last call makes what its caller gets: nothing of the graph is copied then.
        self._head = items[: last + 1] if is_own_code else items
        self._tail = items[len(self._head) :]
        made = {number for item in self._head for number in _made_by(item)}
        self._given = [number for number in self._wanted if number in made]
        taken = {number for item in self._tail if isinstance(item, Part) for number in item.takes}
        self._kept = [number for number in made if number in taken or number in self._given]
        self._library = LIBRARIES["torch"]
        self._session: Session | None = None
        self._epoch = -1
        self._fence: Fence | None = None
        self._made: _Made | None = None
        self._direct: _Made | None = None
        self._is_held = self._is_proved = False
        self._rows: list[tuple[Row, int]] = []
        self._last_at: tuple[int, ...] = ()
        self._same = self._failed = 0
        self._trial: Trial | None = None
        self._retire: Callable[[], object] = lambda: None
        self.problem, self.failure, self.waits_for = "", "", ""
        self.runs = self.replays = 0
        self.difference: float | None = None  # of the first replay from the steps

    def __str__(self) -> str:
        if self._made is None:
            return f"no graph of all of it: {self.problem or self.failure or self.waits_for or 'not run yet'}"
        nodes = self._made.graph.nodes
        told = f"one CUDA graph of {nodes} nodes, with the calls of all ranks: {self.replays} of {self.runs} runs"
        told += f"; the last was none: {self.waits_for}" if self.waits_for else ""
        return told + (f"\n    {self._trial.told}" if self._trial is not None and self._trial.told else "")

    def run(self, known: dict[int, Any]) -> None:
        """`known`: the arguments by value, which gets the results. Raises as the group's calls do, and as steps do."""
        self.runs += 1
        # A call of another thread of this rank would come behind the launch on another rank.
        with turn(self._group), self._library.on(self._device):
            inputs = [known[number] for number in self._inputs]
            state = self._state(inputs)
            least = meet(self._group, self._what, state)
            if least >= PROVED:
                if least == SAME:
                    self._capture_direct(inputs)
                self._replay(self._direct if least == DIRECT else self._made, inputs, known)
                self.waits_for = ""
                return
            if state > least:
                self.waits_for = "another rank cannot launch it yet"
            self._step(known)
            if least == CAPTURED:
                self._prove(inputs, known)
            elif least == READY:
                self._try_sums(known)
                self._capture_first(inputs)

    def end(self) -> None:
        """The group's. By who has its turn."""
        self.let_go()
        self._retire()

    def let_go(self) -> None:
        """Destroy its graphs, whose last replay is over. By who has the group's turn."""
        made, self._made, self._direct, self._is_proved = (self._made, self._direct), None, None, False
        for one in made:
            if one is not None:
                one.graph.destroy()

    def _step(self, known: dict[int, Any]) -> None:
        """Run the steps, behind the last replay: graphs of theirs have memory of the one of all."""
        if self._fence is None:
            self._fence = self._library.fence(self._device)
        self._fence.enter([] if self._made is None else self._made.inputs)
        go(self._items, known, self._group)
        self._fence.leave()

    def _state(self, inputs: Sequence[Any]) -> int:
        session = default_session.session()
        if self.problem:
            return STEPS
        if not runs_here(self._items):
            self.waits_for = "a worker has a part in it, or it was not run yet"
            return STEPS
        if session.sampler.is_on or session.link.lost is not None:
            self.waits_for = SAMPLED if session.sampler.is_on else LOST
            return STEPS
        if self._made is not None and (self._session is not session or self._epoch != self._page_epoch(session)):
            self._group.synchronize()
            self.let_go()
        if self._made is None:
            return READY
        return self._state_of(inputs) if self._is_proved else CAPTURED

    def _state_of(self, inputs: Sequence[Any]) -> int:
        """Whether the arguments are where they were."""
        addresses = tuple([self._library.address(one) for one in inputs])
        if self._direct is not None and self._direct.addresses == addresses:
            self._same = SAME_RUNS
            return DIRECT
        self._same = self._same + 1 if addresses == self._last_at else min(self._same, 0)
        self._last_at = addresses
        if self._same < SAME_RUNS or not inputs:
            return PROVED
        if self._direct is not None:  # they come and go: copies it is, unless these last longer
            self._let_go_direct()
            self._same = -SAME_RUNS
            return PROVED
        return SAME

    def _let_go_direct(self) -> None:
        if self._direct is not None:
            self._group.synchronize()
            self._direct.graph.destroy()
            self._direct = None

    def _page_epoch(self, session: Session) -> int:
        return session.gpus.gpu(self._device).order.page.lift_epoch

    # --- capturing

    def _try_sums(self, known: dict[int, Any]) -> None:
        """Once, which way sums go. `known`: values of a run, by all ranks."""
        found = [_sum_of(known, item) for item in self._items if not isinstance(item, Part)]
        sums = [one for one in found if one is not None]
        if self._trial is not None or not sums:
            return
        self._hold()
        memory = default_session.session().gpus.gpu(self._device).memory
        self._trial = tried(self._group, memory, sums)
        if self._trial.one_shot is not None:
            nccl = nccl_of(self._group)
            assert nccl is not None
            # The garbage collector is no time to close it: a graph may be captured then.
            self._retire = weakref.finalize(self, retire, self._trial.one_shot, nccl.is_done)
            self._retire.atexit = False

    def _hold(self) -> None:
        """Have the group say when it ends."""
        nccl = nccl_of(self._group)
        assert nccl is not None
        if not self._is_held:
            nccl.hold(weakref.WeakMethod(self.end))
            self._is_held = True

    def _capture_first(self, inputs: Sequence[Any]) -> None:
        """By all ranks, also those that have one."""
        if self._made is not None:
            self._group.synchronize()
            self.let_go()
        session = default_session.session()
        self._session, self._epoch = session, self._page_epoch(session)
        try:
            self._made = self._capture([self._library.static(one) for one in inputs], ())
        except NotCapturable as exc:
            self._failed, self.failure = self._failed + 1, str(exc)
            if self._failed >= MAX_FAILED:
                self.problem = self.failure
            return
        self._failed, self.failure = 0, ""

    def _capture_direct(self, inputs: Sequence[Any]) -> None:
        """Of the memory that the arguments are in, by all ranks, for later runs."""
        self._let_go_direct()
        try:
            self._direct = self._capture(list(inputs), tuple([self._library.address(one) for one in inputs]))
        except NotCapturable:
            self._same = -(1 << 16)

    def _capture(self, inputs: list[Any], addresses: tuple[int, ...]) -> _Made:
        """Raises NotCapturable."""
        session, nccl = default_session.session(), nccl_of(self._group)
        assert nccl is not None
        driver = session.gpus.gpu(self._device).memory.context.driver
        self._hold()
        one_shot = None if self._trial is None else self._trial.one_shot
        kernels: list[tuple[str, str]] = []

        def work() -> dict[int, Any]:
            known = dict(zip(self._inputs, inputs, strict=True))
            ranks = Captured(nccl, one_shot)
            kernels.extend(go(self._head, known, ranks))
            ranks.end()
            return {number: known[number] for number in self._kept}

        plans = [item.run for item in self._items if isinstance(item, Part) and isinstance(item.run, ExecutionPlan)]
        graphs = [one.graph for plan in plans if (one := plan.latest().graph) is not None and one.graph is not None]
        beside = self._made.graph if self._made is not None else max(graphs, key=lambda one: one.nbytes, default=None)
        try:
            graph, kept = self._library.capture(work, self._device, driver, beside, is_timed=False)
        except (LayerZeroError, RuntimeError) as exc:  # torch's, at the capture's end
            raise NotCapturable(f"no CUDA graph can hold it: {str(exc).splitlines()[0][:300]}") from exc
        self._rows = counter_rows(session, kernels, GRAPH)
        own = [] if addresses else inputs
        copies = self._library.copier([kept[number] for number in self._given])
        return _Made(graph, own, addresses, kept, self._library.filler(own), copies)

    def _prove(self, inputs: Sequence[Any], known: dict[int, Any]) -> None:
        """That the graph gives what the steps gave. All ranks launch it."""
        found, made = dict(zip(self._inputs, inputs, strict=True)), self._made
        self._replay(made, inputs, found)
        assert made is not None
        behind = [found[number] for number in self._wanted if number in found and number not in self._given]
        if self._tail and not self._library.are_apart(behind, list(made.kept.values())):
            # Own code gives views of what it takes: from now on it takes copies.
            self._given = self._kept
            self._made = made._replace(copies=self._library.copier([made.kept[number] for number in self._given]))
        try:
            its, others = ([one[number] for number in self._wanted if number in one] for one in (known, found))
            self.difference = largest_difference(its, others)
            self._is_proved = True
        except InvalidArgument as exc:
            self.problem = f"the graph gave something else than its steps: {exc.message}"
            self.let_go()

    # --- replaying

    def _replay(self, made: _Made | None, inputs: Sequence[Any], known: dict[int, Any]) -> None:
        start_ns = time.perf_counter_ns()
        assert made is not None
        assert self._fence is not None
        assert self._session is not None
        self._fence.enter(made.inputs)
        if made.inputs:
            made.fill(inputs)
        launch(self._group, made.graph.replay)
        known.update(made.kept)
        known.update(zip(self._given, made.copies(), strict=True))
        go(self._tail, known, self._group)
        self._fence.leave()
        self.replays += 1
        count_steps(self._session, self._rows, time.perf_counter_ns() - start_ns)


def _sum_of(known: dict[int, Any], item: Product | Collective) -> Sum | None:
    """Of torch's tensors; None where nothing is added up."""
    collective = item.collective if isinstance(item, Product) else item
    if collective.dim is not None:
        return None
    arrays = [known[number] for number in collective.values]
    shape = tuple(arrays[0].shape) if len(arrays) == 1 else (sum(math.prod(array.shape) for array in arrays),)
    return Sum(str(arrays[0].dtype).removeprefix("torch."), shape, isinstance(item, Product))


def _made_by(item: Item) -> tuple[int, ...]:
    if isinstance(item, Product):
        return item.collective.values
    return item.makes if isinstance(item, Part) else item.values
