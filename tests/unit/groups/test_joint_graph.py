"""Runs of split plans as one graph on each rank: how far all ranks must be, and what is given; without a GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from layerzero.client.facade import default_session
from layerzero.client.plans.graph_steps import NotCapturable
from layerzero.groups import joint_graph
from layerzero.groups.joint import Captured
from layerzero.groups.joint_graph import CAPTURED, DIRECT, PROVED, READY, SAME, SAME_RUNS, STEPS, JointGraph
from layerzero.groups.one_shot_trial import Trial
from layerzero.groups.split_run import Part
from layerzero.groups.splitting import Collective

X, H, SUM, OUT = range(4)  # values
OTHER = 1000.0  # what the other rank adds


class Graph:
    """Does its work at each replay."""

    nodes, nbytes = 3, 10

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.is_destroyed = work, False

    def replay(self) -> None:
        assert not self.is_destroyed
        self._work()

    def destroy(self) -> None:
        self.is_destroyed = True


class Library:
    """Graphs of NumPy's arrays. `fails`: captures that do."""

    def __init__(self) -> None:
        self.made: list[Graph] = []
        self.fails = 0
        self.fenced: list[str] = []

    def capture(self, work: Callable[[], Any], *_: Any, **__: Any) -> tuple[Graph, Any]:
        if self.fails:
            self.fails -= 1
            raise NotCapturable("a step waits")
        kept = {number: array.copy() for number, array in work().items()}
        self.made.append(Graph(lambda: [kept[number].__setitem__(..., one) for number, one in work().items()]))
        return self.made[-1], kept

    def on(self, device: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def static(self, array: Any) -> Any:
        return np.empty_like(array)

    def filler(self, targets: Any) -> Callable[[Any], None]:
        return lambda sources: [one.__setitem__(..., other) for one, other in zip(targets, sources, strict=True)]

    def copier(self, arrays: Any) -> Callable[[], list[Any]]:
        return lambda: [array.copy() for array in arrays]

    def are_apart(self, arrays: Any, others: Any) -> bool:
        return not any(np.shares_memory(one, other) for one in arrays for other in others)

    def fence(self, device: int) -> Any:
        note = self.fenced.append
        return SimpleNamespace(enter=lambda arrays: note("enter"), leave=lambda: note("leave"))


class Nccl:
    """Whose sums are those with the other rank."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def hold(self, let_go: Any) -> None:
        self.held.append(let_go)

    def add_up(self, x: Any) -> None:
        x += OTHER


class Group:
    """Of two ranks: this one, and one that has always added OTHER. `other`: how far that is."""

    def __init__(self) -> None:
        self.other, self.launches = DIRECT, 0
        self.nccl = Nccl()
        self.lock = threading.RLock()

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        return x + OTHER

    def synchronize(self) -> None:
        pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """And the group's functions, of one rank."""

    def meet(group: Group, what: Any, state: int) -> int:
        assert list(what) == ["split_plan", "block", "float64", [4], "nccl"]
        return min(state, group.other)

    def launch(group: Group, work: Callable[[], None]) -> None:
        group.launches += 1
        work()

    made, page = Library(), SimpleNamespace(lift_epoch=1)
    gpu = SimpleNamespace(
        order=SimpleNamespace(page=page), memory=SimpleNamespace(context=SimpleNamespace(driver=None))
    )
    its: dict[str, Any] = {"sampler": SimpleNamespace(is_on=False), "link": SimpleNamespace(lost=None)}
    session = SimpleNamespace(gpus=SimpleNamespace(gpu=lambda device: gpu), **its)
    monkeypatch.setattr(joint_graph, "meet", meet)
    monkeypatch.setattr(joint_graph, "launch", launch)
    monkeypatch.setattr(joint_graph, "tried", lambda *_: Trial(None, ""))
    monkeypatch.setattr(joint_graph, "turn", lambda group: group.lock)
    monkeypatch.setattr(joint_graph, "nccl_of", lambda group: group.nccl)
    monkeypatch.setattr(joint_graph, "counter_rows", lambda *_: [])
    monkeypatch.setattr(joint_graph, "count_steps", lambda *_: None)
    monkeypatch.setitem(joint_graph.LIBRARIES, "torch", made)
    with mock.patch.object(default_session, "session", return_value=session):
        yield made


def joint(group: Group) -> JointGraph:
    """(x * 2, summed) + 1, of which the last is behind the graph."""
    parts: list[Any] = [lambda x: (x * 2,), lambda x: (x,), lambda x: (x + 1,)]
    first, middle, last = (Part(run, (n,), (n + 1,)) for run, n in zip(parts, (X, H, SUM), strict=True))
    items = [first, Collective((H,)), middle, last]
    return JointGraph(group, items, ([X], [OUT]), ("block", "float64", (4,)), 0)  # type: ignore[arg-type]


def ran(made: JointGraph, x: Any) -> Any:
    known = {X: x}
    made.run(known)
    np.testing.assert_array_equal(known[OUT], x * 2 + OTHER + 1)
    return known[OUT]


def test_a_graph_is_captured_compared_and_replayed(library: Library) -> None:
    group = Group()
    made = joint(group)
    x = np.arange(4.0)
    ran(made, x)
    assert (len(library.made), group.launches) == (1, 0)
    ran(made, x + 1)  # beside its steps
    assert (made.difference, group.launches, made.replays) == (0.0, 1, 1)
    found = [ran(made, x + n) for n in range(4)]
    assert (group.launches, made.replays, made.runs) == (5, 5, 6)
    for n, one in enumerate(found):  # nobody overwrites it
        np.testing.assert_array_equal(one, (x + n) * 2 + OTHER + 1)
    assert str(made) == "one CUDA graph of 3 nodes, with the calls of all ranks: 5 of 6 runs"


def test_it_goes_as_the_rank_does_that_is_least_far(library: Library) -> None:
    """Nothing is launched before all can, and nothing compared."""
    group = Group()
    made = joint(group)
    x = np.arange(4.0)
    for other, graphs, launches in (
        (STEPS, 0, 0),
        (READY, 1, 0),
        (READY, 2, 0),  # NCCL wants all ranks to capture, or none
        (STEPS, 2, 0),
        (CAPTURED, 2, 1),
        (CAPTURED, 2, 2),
        (STEPS, 2, 2),
        (PROVED, 2, 3),
        (READY, 3, 3),
        (CAPTURED, 3, 4),
        (PROVED, 3, 5),
    ):
        group.other = other
        ran(made, x)
        assert (len(library.made), group.launches) == (graphs, launches), other
        if other == STEPS and graphs:
            assert str(made).endswith("the last was none: another rank cannot launch it yet")
    assert [one.is_destroyed for one in library.made] == [True, True, False]


def test_arguments_in_the_same_memory_are_not_copied(library: Library) -> None:
    group = Group()
    made = joint(group)
    x = np.arange(4.0)
    for n in range(2 * SAME_RUNS):
        x[:] = n
        ran(made, x)
    assert len(library.made) == 2
    ran(made, np.arange(4.0))
    ran(made, x)
    assert len(library.made) == 2


def test_a_graph_of_the_callers_memory_is_captured_and_launched_by_all_or_none(library: Library) -> None:
    """NCCL wants all ranks to launch graphs of one capture that all have made."""
    group = Group()
    made = joint(group)
    x, replayed = np.arange(4.0), list[int]()
    group.other = PROVED
    for _ in range(3 * SAME_RUNS):
        ran(made, x)
    assert len(library.made) == 1
    group.other = SAME
    ran(made, x)
    assert len(library.made) == 2
    for number, one in enumerate(library.made):
        work = one._work
        one._work = lambda number=number, work=work: (replayed.append(number), work())
    for other in (PROVED, DIRECT, PROVED, DIRECT):
        group.other = other
        ran(made, x)
    assert replayed == [0, 1, 0, 1]
    group.other = SAME  # the other has let go of its own
    ran(made, x)
    assert [one.is_destroyed for one in library.made] == [False, True, False]


def test_what_the_callers_code_gives_of_the_graphs_memory_is_not_written_again(library: Library) -> None:
    """Such as a view of the sum."""
    group = Group()
    parts: list[Any] = [lambda x: (x * 2,), lambda x: (x[:2],)]
    first, last = (Part(run, (n,), (n + 1,)) for run, n in zip(parts, (X, H), strict=True))
    items = [first, Collective((H,)), last]
    made = JointGraph(group, items, ([X], [SUM]), ("block", "float64", (4,)), 0)  # type: ignore[arg-type]
    x, found = np.arange(4.0), list[Any]()
    for n in range(5):
        known: dict[int, Any] = {X: x + n}
        made.run(known)
        found.append(known[SUM])
    assert made.replays == 4
    for n, one in enumerate(found):
        np.testing.assert_array_equal(one, ((x + n) * 2 + OTHER)[:2])


def test_no_other_thread_of_the_rank_calls_between_what_is_agreed_and_the_launch(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call would be behind the launch on another rank, and NCCL's kernels wait for each other."""
    group, found = Group(), list[bool]()

    def is_free() -> None:
        found.append(group.lock.acquire(blocking=False))

    def meet(group: Group, what: Any, state: int) -> int:
        thread = threading.Thread(target=is_free)
        thread.start()
        thread.join()
        return state

    monkeypatch.setattr(joint_graph, "meet", meet)
    ran(joint(group), np.arange(4.0))
    assert found == [False]


def test_steps_do_not_overtake_a_graph_on_another_stream(library: Library) -> None:
    """Graphs of stretches share memory with the one of all."""
    made = joint(Group())
    for n in range(1, 4):
        ran(made, np.arange(4.0))
        assert library.fenced[-2:] == ["enter", "leave"]
        assert library.fenced.count("enter") == library.fenced.count("leave") >= n


def test_what_asks_a_worker_goes_step_by_step_until_it_does_not(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, is_here = Group(), True
    monkeypatch.setattr(joint_graph, "runs_here", lambda items: is_here)
    made = joint(group)
    x = np.arange(4.0)
    for is_here, launches in ((False, 0), (True, 0), (True, 1), (True, 2), (False, 2), (True, 3)):  # noqa: B007
        ran(made, x)
        assert group.launches == launches
    assert len(library.made) == 1


def test_calls_that_are_sampled_go_step_by_step_as_do_those_of_a_lost_connection(library: Library) -> None:
    """Also where all between the sums is the caller's own code, of which no plan asks that."""
    group = Group()
    made = joint(group)
    x, session = np.arange(4.0), default_session.session()
    for _ in range(3):
        ran(made, x)
    for name, field, value, text in (("sampler", "is_on", True, "are sampled"), ("link", "lost", "gone", "is lost")):
        with mock.patch.object(getattr(session, name), field, value):
            ran(made, x)
        assert group.launches == 2
        assert made.waits_for.endswith(text)
    ran(made, x)
    assert group.launches == 3


def test_another_leave_to_launch_kernels_wants_another_graph(library: Library) -> None:
    group = Group()
    made = joint(group)
    x = np.arange(4.0)
    for _ in range(3):
        ran(made, x)
    default_session.session().gpus.gpu(0).order.page.lift_epoch = 2
    ran(made, x)
    assert [one.is_destroyed for one in library.made] == [True, False]
    assert group.launches == 2
    ran(made, x)
    ran(made, x)
    assert group.launches == 4


def test_a_group_that_ends_destroys_the_graph(library: Library) -> None:
    group = Group()
    made = joint(group)
    for _ in range(3):
        ran(made, np.arange(4.0))
    (let_go,) = group.nccl.held
    let_go()()
    assert library.made[0].is_destroyed
    library.made.clear()
    del made
    assert let_go() is None, "the group keeps what nobody else has"


class OneShot:
    """Whose sums are those with the other rank; noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def add_up(self, x: Any, out: Any) -> Any:
        self.calls.append("add up")
        return x + OTHER

    def end(self) -> None:
        self.calls.append("end")


def test_sums_are_one_shot_where_that_was_found_to_be_faster(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once, on the largest sum, and retired with the group or the plan, never closed by the garbage
    collector, which may come in a capture."""
    group, its, tries, retired = Group(), OneShot(), list[Any](), list[Any]()
    group.nccl.is_done = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setattr(joint_graph, "tried", lambda *args: tries.append(args[2]) or Trial(its, "4 KiB took 6 us"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(joint_graph, "retire", lambda one, is_done: retired.append((one, is_done())))
    monkeypatch.setattr(Nccl, "add_up", None)
    made, x = joint(group), np.arange(4.0)
    for _ in range(2 * SAME_RUNS):
        ran(made, x)
    assert tries == [[("float64", (4,), False)]]
    assert its.calls[:3] == ["begin", "add up", "end"]
    assert its.calls.count("begin") == its.calls.count("end") > 1
    assert str(made).endswith("runs\n    4 KiB took 6 us")
    (let_go,) = group.nccl.held
    let_go()()
    assert (library.made[0].is_destroyed, retired) == (True, [(its, True)])
    ran(made := joint(group), x)
    del made
    library.made.clear()
    gc.collect()
    assert retired == [(its, True)] * 2


def test_what_cannot_be_captured_goes_step_by_step(library: Library) -> None:
    library.fails = 3
    group = Group()
    made = joint(group)
    for _ in range(6):
        ran(made, np.arange(4.0))
    assert (len(library.made), group.launches) == (0, 0)
    assert str(made) == "no graph of all of it: a step waits"


def test_a_graph_that_gives_something_else_is_none(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    made = joint(group)
    ran(made, np.arange(4.0))
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    for n in range(3):
        ran(made, np.arange(4.0) + n + 1)
    assert (group.launches, library.made[0].is_destroyed) == (1, True)
    assert str(made).startswith("no graph of all of it: the graph gave something else than its steps")


def test_sums_of_a_graph_do_not_touch_what_others_have() -> None:
    class Given(np.ndarray):  # type: ignore[type-arg]
        """With torch's methods."""

        def new_empty(self, shape: Any) -> Any:
            return np.empty(shape).view(Given)

        def copy_(self, other: Any) -> None:
            self[...] = other

    x = np.arange(3.0)
    given, ranks = x.view(Given), Captured(Nccl())  # type: ignore[arg-type]
    np.testing.assert_array_equal(ranks.all_reduce(given), np.arange(3.0) + OTHER)
    np.testing.assert_array_equal(x, np.arange(3.0))
    assert ranks.all_reduce(given, out=given) is given
    np.testing.assert_array_equal(x, np.arange(3.0) + OTHER)
