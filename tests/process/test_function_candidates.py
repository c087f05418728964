"""One function in two environments, through a real broker: who serves, and why; deaths, deadlines, poison, checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process import forks
from tests.process import isolated_candidates as fn
from tests.process.harness import Site, wait_until

import layerzero as lz

LEFT, RIGHT = fn.LEFT.backend, fn.RIGHT.backend


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with one.environment():
        fn.LEFT.build(quiet=True)
        fn.RIGHT.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


def is_well(backend: str) -> bool:
    return any(row["name"] == backend and not row["unavailable"] for row in lz.status()["backends"])


pytestmark = pytest.mark.usefixtures("site")


def test_the_first_environment_serves_unless_policy_says_otherwise() -> None:
    assert fn.where() == "left"
    report = fn.where.last_report()
    assert (report.served_by, report.failures) == (LEFT, ())
    with lz.prefer("right.*"):
        assert fn.where() == "right"
    assert fn.where.last_report().served_by == RIGHT
    with lz.avoid(LEFT):
        assert fn.where() == "right"
    lz.lock("function", f"{RIGHT}.call")
    try:
        assert [fn.where() for _ in range(5)] == ["right"] * 5
        explained = fn.where.explain()
    finally:
        lz.unlock("function")
    assert [(one.backend, one.accepted) for one in explained.candidates] == [(RIGHT, True), (LEFT, False)]
    assert "POLICY_LOCKED" in str(explained)
    assert [fn.where() for _ in range(5)] == ["left"] * 5


def test_one_that_is_not_built_is_passed_over() -> None:
    assert fn.wherever_built() == "right"
    assert fn.wherever_built.last_report().served_by == RIGHT


def test_the_next_one_serves_after_a_death_and_a_deadline(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert fn.dies_at(["left"], str(notes)) == "right"
    report = fn.dies_at.last_report()
    assert report.served_by == RIGHT
    assert any(text.startswith(f"{LEFT}: BACKEND_ERROR") for text in report.failures)
    assert notes.read_text().split() == ["left", "right"]
    wait_until(lambda: is_well(LEFT))
    with lz.prefer("left.*"):  # which has failed of late
        assert fn.hangs_at("left") == "right"
    assert any("DEADLINE" in text for text in fn.hangs_at.last_report().failures)
    wait_until(lambda: is_well(LEFT))
    with pytest.raises(lz.RemoteError, match="left"), lz.prefer("left.*"):  # what it raises is its result
        fn.fails_at("left")


def test_inputs_that_killed_two_workers_are_refused(tmp_path: Path) -> None:
    """By their contents: others of the same function are served."""
    notes = tmp_path / "notes"
    with pytest.raises(lz.LayerZeroError) as poisoned:
        fn.dies_at(["left", "right"], str(notes))
    assert poisoned.value.code == "POISON"
    told = [text.split(": ")[:2] for text in fn.dies_at.last_report().failures]
    assert told == [[LEFT, "BACKEND_ERROR"], [RIGHT, "BACKEND_ERROR"], ["left", "POISON"]]
    assert sorted(notes.read_text().split()) == ["left", "right"]
    with pytest.raises(lz.LayerZeroError) as refused:
        fn.dies_at(["left", "right"], str(notes))
    assert refused.value.code == "POISON"
    assert len(notes.read_text().split()) == 2  # nobody ran it
    assert fn.dies_at([], str(notes)) in ("left", "right")
    assert fn.dies_at.options(fallback=lambda *_: "here")(["left", "right"], str(notes)) == "here"


def test_what_lies_between_shared_arrays_is_no_part_of_what_kills(tmp_path: Path) -> None:
    """They are lent as one range; what others write there in the meantime makes it no other call."""
    for where in fn.ARRAYS:
        where.build(quiet=True)
    notes, shared = tmp_path / "notes", lz.share(np.zeros((3, 16)))
    first, others, last = shared
    with pytest.raises(lz.Poison):
        fn.dies_of(first, last, str(notes))
    others[:] = 1
    with pytest.raises(lz.Poison):
        fn.dies_of(first, last, str(notes))
    assert len(notes.read_text().split()) == 2  # nobody ran it again
    first[0] = 1
    assert fn.dies_of(first, last, str(notes)) == 1


def test_measured_times_choose() -> None:
    times = fn.slow.tune(1.5)
    assert set(times) == {LEFT, RIGHT}
    assert times[RIGHT] < times[LEFT]
    lz.configure(weights={"perfdb": 1000})  # tests have 0
    try:
        assert fn.slow(1.5) == 1.5
        best, other = fn.slow.explain(1.5).candidates
    finally:
        lz.configure(weights=None)
    assert fn.slow.last_report().served_by == RIGHT
    assert (best.backend, other.backend) == (RIGHT, LEFT)
    assert best.measured_us is not None
    assert other.measured_us is not None
    assert best.measured_us < other.measured_us
    assert fn.fast(2.0) == 2.0  # alone, in its own environment
    assert fn.fast.last_report().served_by == RIGHT


def test_shadow_checks_compare_within_a_tolerance(caplog: pytest.LogCaptureFixture) -> None:
    assert fn.shadowed({"near": 1.0}) == {"near": pytest.approx(1.0, abs=1e-5)}
    assert fn.shadowed.last_report().shadow.startswith("agrees with ")
    with caplog.at_level(logging.WARNING):
        fn.shadowed({"far": 1.0})
    assert "differs from" in fn.shadowed.last_report().shadow
    assert "result['far'] is" in fn.shadowed.last_report().shadow
    assert "shadow check" in caplog.text


def test_what_stays_is_used_where_it_is() -> None:
    with lz.prefer("right.*"):
        handle = fn.kept()
    made, used = fn.first(handle)
    assert (made, used) == ("right", "right")
    assert list(fn.numbers(3)) == [0, 1, 2]


def test_what_cannot_be_a_candidate_is_refused() -> None:
    with pytest.raises(lz.InvalidArgument, match="named twice"):
        lz.isolated([fn.LEFT, fn.LEFT])(fn.here)
    with pytest.raises(lz.InvalidArgument, match="not both"):
        lz.isolated([fn.LEFT, "numpy"])(fn.here)  # type: ignore[list-item]
    with pytest.raises(lz.InvalidArgument, match="allowed: a share of calls"):
        fn.where.options(shadow=2)
    with pytest.raises(lz.InvalidArgument, match="no generator"):
        fn.where.implementation(lz.env("third"))(fn.numbers.__wrapped__)


def test_an_implementation_is_called_in_the_same_way() -> None:
    """One that is awaited, or that is given the memory of its result, does not stand for one that is not."""
    third = lz.env("third")
    for function, other, allowed in (
        (fn.soon, fn.at_once, "a coroutine function"),
        (fn.where, fn.soon.__wrapped__, "a function that is no coroutine"),
        (fn.numbers, fn.at_once, "a generator function"),
        (fn.where, fn.numbers.__wrapped__, "a function that is no generator"),
        (fn.filled, fn.made, "a function with a parameter out"),
        (fn.filled.options(shapes=lambda: ((1,), "float32")), fn.made, "a function with a parameter out"),
    ):
        with pytest.raises(lz.InvalidArgument, match=f"allowed as an implementation of .*: {allowed}"):
            function.implementation(third)(other)
    without = lz.isolated(fn.LEFT, shapes=lambda: ((1,), "float32"))(fn.made)
    with pytest.raises(lz.InvalidArgument, match="a function without a parameter out"):
        without.implementation(third)(fn.filled.__wrapped__)
    with pytest.raises(lz.InvalidArgument, match="objects live in one environment"):
        fn.Counter.of.implementation(third)(fn.at_once)


def test_an_error_and_a_report_name_the_environment_that_it_is_of() -> None:
    with lz.prefer("right.*"):
        assert fn.where() == "right"
        assert fn.where.last_report().env == "right"
    with lz.prefer("right.*", only=True), pytest.raises(lz.DeadlineExceeded, match="hangs_at in right: "):
        fn.hangs_at("right")
    assert [text.split(": ")[:2] for text in fn.hangs_at.last_report().failures] == [["right", "DEADLINE"]]
    wait_until(lambda: is_well(RIGHT))


def test_a_shadow_check_runs_what_was_called_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in place of an import nor with an object that is somewhere else."""
    with caplog.at_level(logging.WARNING):
        fn.checked.warmup()
        with fn.kept() as handle:
            assert fn.checked(handle) in ("left", "right")
    assert "not made" in fn.checked.last_report().shadow
    assert caplog.text == ""
    for changes, function in (({"keep": True}, fn.checked), ({"shadow": 0.5}, fn.kept), ({"shadow": 0.5}, fn.numbers)):
        with pytest.raises(lz.InvalidArgument, match="shadow compares results that come here"):
            function.options(**changes)
    with pytest.raises(lz.InvalidArgument, match="shadow is for functions"):
        fn.Counter.options(shadow=0.5)


def test_what_cannot_be_tuned_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        times = fn.fails_at.tune("left")
    assert times[LEFT] == float("inf")
    assert 0 < times[RIGHT] < float("inf")
    assert f"tune: {LEFT}: " in caplog.text
    assert "LookupError" in caplog.text
    assert all(time_us < float("inf") for time_us in fn.kept.tune().values())
    with pytest.raises(lz.InvalidArgument, match="set cannot go to another environment"):
        fn.checked.tune({1})
    with pytest.raises(lz.InvalidArgument, match="a generator"):
        fn.numbers.tune(3)
