"""accelerate(model, if_faster=True) of a model on a GPU: whole calls are timed, with each op taken over and with none.
Here by a clock of the test; tests/gpu/test_models.py has the GPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import random

import layerzero.torch as lzt
from layerzero.torch.acceleration import whole_calls
from layerzero.torch.acceleration.whole_calls import HOLDS, LONGER, ROUNDS, WARM, WholeCalls

OPS = ("attention", "linear", "silu")
X = torch.zeros(4, 64)


class Clock:
    """`now` is in milliseconds; marks are passed `late` marks after they were made, as a GPU comes to them."""

    def __init__(self, late: int = 0) -> None:
        self.now, self.late = 0.0, late
        self.made: list[Mark] = []
        self.stopped = False

    def is_stopped(self) -> bool:
        return self.stopped

    def mark(self) -> Mark:
        self.made.append(Mark(self, self.now, len(self.made)))
        return self.made[-1]


@dataclass(eq=False)
class Mark:
    clock: Clock
    at: float
    number: int

    def query(self) -> bool:
        return self.number + self.clock.late < len(self.clock.made)

    def elapsed_time(self, later: Mark) -> float:
        return later.at - self.at


@pytest.fixture(autouse=True)
def _warm_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(whole_calls, "WARM_S", 0.0)
    with torch.no_grad():
        yield


class Program:
    """Makes calls of a model in which `cost` says how long it takes with these ops, and `after` what comes next."""

    def __init__(self, cost: Callable[[frozenset[str]], float], after: float = 0.0, late: int = 0) -> None:
        self.clock = Clock(late)
        self.cost, self.after = cost, after
        self.whole = WholeCalls(OPS, self.clock)
        self.seen: list[tuple[str, ...]] = []

    def call(self, times: int = 1, *args: Any, busy: tuple[str, ...] = OPS, **kwargs: Any) -> tuple[str, ...]:
        """Ops of the last one."""
        for _ in range(times):
            turn = self.whole.begin(args or (X,), kwargs)
            self.whole.run(turn, lambda ops=turn.ops: self._run(ops, busy))
            self.clock.now += self.after
            self.seen.append(tuple(sorted(turn.ops)))
        return self.seen[-1]

    def _run(self, ops: frozenset[str], busy: tuple[str, ...]) -> None:
        self.clock.now += self.cost(ops)
        for op in busy:
            if op in ops:
                self.whole.note(op)


def by_op(saved: Mapping[str, float]) -> Callable[[frozenset[str]], float]:
    return lambda ops: 10.0 - sum(saved[op] for op in ops)


def test_an_op_that_makes_calls_faster_is_taken_over_and_no_other() -> None:
    one = Program(by_op({"attention": 2.0, "linear": -3.0, "silu": 0.1}))
    one.call(WARM)
    assert set(one.seen) == {OPS}
    assert one.call(4 * ROUNDS + 2 * ROUNDS + 1) == ("attention",)
    assert one.seen[WARM : WARM + 4] == [(), ("attention",), ("linear",), ("silu",)]
    assert one.seen[WARM + 4 * ROUNDS :][:2] == [(), ("attention",)]
    assert one.whole.ops == ("linear", "silu")
    (found,) = one.whole.comparisons()
    assert (found.kind, found.chosen, found.is_step) == (" of 4x64", ("attention",), False)
    assert found.alone_us == pytest.approx(10_000)
    assert found.with_us == pytest.approx({"attention": 8_000, "linear": 13_000, "silu": 9_900})
    assert str(found) == (
        "calls of the model of 4x64: torch alone 10,000 us, with attention 8,000 us, with linear 13,000 us, with silu "
        "9,900 us: attention taken over"
    )


@pytest.mark.parametrize(
    ("together", "chosen"), [(5.0, ("attention", "silu")), (9.5, ("silu",))], ids=["faster", "slower"]
)
def test_several_are_taken_over_if_together_they_are_faster_still(together: float, chosen: tuple[str, ...]) -> None:
    cost = by_op({"attention": 1.0, "linear": -3.0, "silu": 2.0})
    one = Program(lambda ops: together if ops == {"attention", "silu"} else cost(ops))
    assert one.call(WARM + 4 * ROUNDS + 3 * ROUNDS + 1) == chosen
    assert one.whole.comparisons()[0].with_us["attention and silu"] == pytest.approx(1e3 * together)


def test_where_nothing_helps_all_is_torchs_until_it_is_tried_again() -> None:
    one = Program(by_op({"attention": 0.0, "linear": -3.0, "silu": 0.1}))
    one.call(WARM + 4 * ROUNDS)
    assert set(one.seen[WARM + 4 * ROUNDS - 4 :]) == {(), ("attention",), ("linear",), ("silu",)}
    start = len(one.seen)
    one.call(HOLDS)
    assert set(one.seen[start + 1 :]) <= {(), OPS}
    one.cost = by_op({"attention": 5.0, "linear": 0.0, "silu": 0.0})
    assert one.call(WARM + 7 * ROUNDS) == ("attention",)
    assert LONGER > HOLDS
    start = len(one.seen)
    one.call(2 * HOLDS)
    assert set(one.seen[start:]) == {("attention",)}


def test_a_later_trial_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait once more for kernels to be lifted: five seconds with all ops were half of the next ten of a
    model that takes 10 ms by torch alone."""
    one = Program(by_op({"attention": 0.0, "linear": -3.0, "silu": 0.1}))
    one.call(WARM + 4 * ROUNDS)
    monkeypatch.setattr(whole_calls, "WARM_S", 1e6)
    start = len(one.seen)
    one.call(HOLDS + WARM + 5 * ROUNDS)
    assert Counter(one.seen[start:])[OPS] == WARM
    assert one.call() == ()


def test_only_ops_that_a_model_has_are_tried() -> None:
    one = Program(by_op({"attention": 1.0, "linear": 1.0, "silu": 1.0}))
    one.call(WARM, busy=("silu",))
    one.call(3 * ROUNDS)
    assert set(one.seen[WARM:]) == {(), ("silu",)}
    nothing = Program(lambda ops: 1.0)
    nothing.call(WARM, busy=())
    nothing.call(5)
    assert set(nothing.seen[WARM:]) == {()}
    assert nothing.whole.comparisons() == ()


def test_kinds_are_sizes_of_as_many_bits_each_with_a_choice_of_its_own() -> None:
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}))
    assert one.call(WARM + 6 * ROUNDS + 1) == ("attention",)
    assert one.call(1, torch.zeros(7, 127)) == ("attention",)  # as 4 x 64
    assert one.call(1, torch.zeros(8, 64)) == OPS
    assert one.call(1, X, mask=X) == OPS
    assert one.call(1) == ("attention",)


def test_a_step_of_training_lasts_until_the_next_one_begins() -> None:
    """What comes after the call, its backward pass, is that of the ops that were taken over."""
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}))
    run = one._run

    def with_backward(ops: frozenset[str], busy: tuple[str, ...]) -> None:
        run(ops, busy)
        one.after = 30.0 if "attention" in ops else 20.0

    one._run = with_backward  # type: ignore[method-assign]
    with torch.enable_grad():
        assert one.call(WARM + 4 * ROUNDS + 2) == ()
    (found,) = one.whole.comparisons()
    assert found.is_step
    assert found.alone_us == pytest.approx(30_000)
    assert found.with_us["attention"] == pytest.approx(39_000)


def test_nobody_waits_for_a_gpu_that_is_late() -> None:
    """Calls are torch's until it has come to the ends of those that were timed."""
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}), late=50)
    one.call(WARM + 4 * ROUNDS + 1)
    assert one.seen[-1] == ()
    assert one.whole.comparisons() == ()
    for _ in range(50):
        one.clock.mark()
    one.call(2 * ROUNDS)
    assert one.call() == ()
    for _ in range(50):
        one.clock.mark()
    assert one.call() == ("attention",)


def test_calls_in_a_graph_are_not_timed() -> None:
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}))
    one.call(WARM)
    one.clock.stopped = True
    assert one.call(3) == OPS
    assert not one.clock.made
    one.clock.stopped = False
    assert one.call(6 * ROUNDS + 1) == ("attention",)


def test_a_call_that_fails_is_not_timed() -> None:
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}))
    one.call(WARM)
    turn = one.whole.begin((X,), {})
    with pytest.raises(ZeroDivisionError):
        one.whole.run(turn, lambda: 1 // 0)
    assert not one.whole.is_within
    assert one.call(6 * ROUNDS + 4) == ("attention",)


def test_what_was_faster_by_chance_is_not_taken_over() -> None:
    one = Program(by_op({"attention": 1.0, "linear": 0.0, "silu": 0.0}))
    one.call(WARM + 4 * ROUNDS)
    one.cost = by_op({"attention": 0.1, "linear": 0.0, "silu": 0.0})
    assert one.call(2 * ROUNDS + 1) == ()
    assert one.whole.comparisons()[0].with_us["attention"] == pytest.approx(9_900)


def taken_by_op(report: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in report.lines:
        found[line.op] += line.calls if line.is_taken else 0
    return found


class Both(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + F.gelu(x)


def test_a_models_ops_are_taken_over_in_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's results in each. silu is slow by torch here, as seen by the test's clock."""
    clock = Clock()
    monkeypatch.setattr(whole_calls, "gpu_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(whole_calls, "GpuClock", lambda _: clock)
    model, x = Both(), random(2, 8)
    expected = model(x)
    with lzt.accelerate(model, ["silu", "gelu"], if_faster=True) as accelerated:

        def taken(times: int) -> list[str]:
            """Ops that so many calls of the model took over, in order."""
            found = []
            for _ in range(times):
                before = taken_by_op(accelerated.report)
                torch.testing.assert_close(model(x), expected)
                found.append("+".join(sorted(taken_by_op(accelerated.report) - before)))
                clock.now += 1.0  # ends no call: it is torch's time
            return found

        forward = Both.forward

        def timed(self: Both, x: torch.Tensor) -> torch.Tensor:
            found = forward(self, x)
            clock.now += 1.0 if "silu" in accelerated._pace.awake else 2.0  # type: ignore[union-attr]
            return found

        monkeypatch.setattr(Both, "forward", timed)
        assert taken(WARM) == ["gelu+silu"] * WARM
        assert taken(3 * ROUNDS) == ["", "silu", "gelu"] * ROUNDS
        assert taken(2 * ROUNDS) == ["", "silu"] * ROUNDS
        assert taken(3) == ["silu"] * 3
        report = accelerated.report
    assert report.resting == ("gelu",)
    assert report.left == 0
    (found,) = report.to_dict()["comparisons"]
    assert found["chosen"] == ("silu",)
    assert max(map(len, str(report).splitlines())) <= 80


def test_a_model_within_another_has_its_own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the outer one takes over in this call."""
    monkeypatch.setattr(whole_calls, "gpu_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(whole_calls, "GpuClock", lambda _: Clock())
    inner = Both()
    outer, x = torch.nn.Sequential(inner), random(2, 8)
    expected = outer(x)
    with lzt.accelerate(inner, ["silu"]) as own, lzt.accelerate(outer, ["gelu"], if_faster=True):
        for _ in range(WARM + 2 * ROUNDS):
            torch.testing.assert_close(outer(x), expected)
    assert taken_by_op(own.report) == {"silu": WARM + 2 * ROUNDS}
