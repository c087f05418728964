"""Calls of functions past the broker: many at once, and what becomes of each when something breaks among them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import express_functions as fn
from tests.process.harness import Site, is_paused, wait_until
from tests.process.test_express import forked

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.functions.express import ExpressCall

MANY = 40
BIG = 1 << 100


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", autouse=True)
def site(store: Path) -> Iterator[Site]:
    one = Site(store)
    with one.environment():
        fn.PLAIN.build(quiet=True)
        fn.ARRAYS.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


@pytest.fixture
def own(site: Site, store: Path) -> Iterator[None]:
    """A broker for one test, whose worker dies: what has died is not given a lane for a while."""
    lz.disconnect()
    one = Site(store, restart_budget=100, backoff_s=0.01)
    with one.environment():
        one.start().connect()
        yield
        lz.disconnect()
    one.stop()
    with site.environment():
        site.connect()


def path_of(report: Any) -> str:
    return str(report.selection.path)


def settled(function: Any = fn.act) -> int:
    """Until its calls pass the broker: the worker's pid."""

    def is_settled() -> bool:
        assert function("", 0) == 0
        return path_of(function.last_report()) == "express"

    wait_until(is_settled)
    assert is_settled()
    return int(function("where", 0)[0])


def submitted(*first: tuple[str, Any], function: Any = fn.act) -> list[Any]:
    """These calls and others, up to MANY."""
    calls = [*first, *(("", n) for n in range(len(first), MANY))]
    return [function.submit(*one) for one in calls]


@pytest.mark.parametrize("count", [1, MANY, 150])
def test_submitted_calls_pass_the_broker_and_those_without_a_place_do_not(count: int) -> None:
    pid = settled()
    stopped = fn.act.submit("pause", -1)
    wait_until(lambda: is_paused(pid))
    futures = [fn.act.submit("", n) for n in range(count)]
    assert not any(future.done() for future in futures)
    assert futures[0].report is None
    os.kill(pid, signal.SIGCONT)
    assert [future.result() for future in futures] == list(range(count))
    assert stopped.result() == -1
    assert all(future.done() for future in futures)
    paths = [path_of(future.report) for future in futures]
    assert paths.count("express") == min(count, 63)
    assert {future.report.served_by for future in futures} == {fn.PLAIN.backend}


def test_a_program_that_only_submits_passes_the_broker_soon() -> None:
    own = fn.act.options(tolerance=1e-3)

    def is_past() -> bool:
        future = own.submit("", 3)
        assert future.result() == 3
        return path_of(future.report) == "express"

    wait_until(is_past)


def test_results_of_all_kinds_come_in_any_order(capfd: pytest.CaptureFixture[str]) -> None:
    """Also those that are large, nested, said or raised on the way; a call that is not plain is one attempt."""
    settled()
    asked: list[tuple[str, Any]] = [
        ("", None), ("print", "hello"), ("", 2.5), ("large", 9_000), ("raise", "bread"), ("", "\ud800"),
        ("list", 1), ("", BIG), ("", -BIG), ("", "y" * 5_000), ("", b"\0"), ("", True), ("", (1, [2])),
    ]  # fmt: skip
    for _ in range(20):
        futures = [fn.act.submit(*one) for one in asked]
        for n in random.Random(0).sample(range(len(asked)), len(asked)):
            what, value = asked[n]
            if what == "raise":
                with pytest.raises(lz.RemoteError, match="LookupError: bread"):
                    futures[n].result()
            else:
                told = {"large": "x" * 9_000, "list": [1, (1, {"of": 1})]}.get(what, value)
                assert futures[n].result() == told
                assert type(futures[n].result()) is type(told)
            assert futures[n].report.attempts == 1
            assert not futures[n].report.failures or what == "raise"
    assert capfd.readouterr().out == "[plain] hello\n" * 20


def test_results_that_nobody_takes_give_their_memory_back() -> None:
    settled()
    gc.collect()
    gc.disable()  # nothing waits for it to find a circle
    try:
        before = pool.stats()["slots"]
        for _ in range(5):
            submitted()
        assert [future.result() for future in submitted()] == list(range(MANY))

        def are_back() -> bool:
            """The broker's answers come when they come; those on the lane are seen at later calls."""
            settled()
            return pool.stats()["slots"] <= before + 2 * 64  # of each call that may be on a lane, and of its answer

        wait_until(are_back)
    finally:
        gc.enable()


def test_answers_that_nobody_waits_for_are_read_between_calls_that_pass_the_broker() -> None:
    """They lay in the socket for as long as no other call went through the broker, and kept their memory."""
    settled()
    before = pool.stats()["slots"]
    others = fn.act.options(tolerance=1e-3)
    for _ in range(50):
        others.submit("", "y" * 9_000)  # too long for a lane
    wait_until(lambda: settled() and pool.stats()["slots"] <= before)


def test_arrays_of_many_results_have_each_its_memory() -> None:
    """All are kept: of calls on the lane as of others, which come in turns where results are arrays."""
    paths, kept = set(), []
    for number in range(70):
        kept.append(fn.full(number))
        paths.add(path_of(fn.full.last_report()))
    assert "express" in paths
    for found in (kept, list(fn.fulls(70)), [one.result() for one in [fn.full.submit(n) for n in range(70)]]):
        assert [(float(one.min()), float(one.max())) for one in found] == [(n, n) for n in range(70)]


def test_threads_get_their_own_results_and_reports() -> None:
    settled()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for n in range(50):
            future = fn.act.submit("", (seed, n)[n % 2])
            found = fn.act("", seed)
            report = fn.act.last_report()
            if found != seed or future.result() != (seed, n)[n % 2] or report.served_by != fn.PLAIN.backend:
                wrong.append((seed, n, found))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


@pytest.mark.usefixtures("own")
def test_a_death_is_of_one_call_and_those_behind_it_are_served(tmp_path: Path) -> None:
    """One that is idempotent is made once more, and a fallback has the arguments."""
    again, safe = fn.act.options(idempotent=True), fn.act.options(fallback=lambda what, value: ("here", what, value))
    path = str(tmp_path / "died")
    for function in (again, safe):
        settled(function)
    pid = settled()
    futures = submitted(("", 0), ("die", 1))
    twice, instead = again.submit("die once", path), safe.submit("die", 7)
    with pytest.raises(lz.BackendError, match="it may have run in part: idempotent=True") as died:
        futures[1].result()
    assert died.value.code == "BACKEND_ERROR"
    assert [future.result() for n, future in enumerate(futures) if n != 1] == [n for n in range(MANY) if n != 1]
    assert futures[1].report.served_by == ""
    assert futures[-1].report.selection.worker_pid != pid
    assert futures[-1].report.attempts == 1
    assert instead.result() == ("here", "die", 7)
    assert "BACKEND_ERROR" in instead.report.failures[-1]
    assert twice.result() == path
    assert "BACKEND_ERROR" in twice.report.failures[-1]


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.usefixtures("own")
def test_a_deadline_is_of_the_call_that_took_too_long(*, is_sent: bool) -> None:
    quick = fn.act.options(timeout_s=0.5)
    pid = settled(quick)
    futures = [quick.submit("", 0), quick.submit("hang", 1), quick.submit("", 2)] if is_sent else []
    with pytest.raises(lz.DeadlineExceeded):
        futures[1].result() if is_sent else quick("hang", 0)
    futures = [futures[0], *submitted(function=quick)[1:]] if is_sent else submitted(function=quick)
    assert [future.result() for future in futures] == list(range(MANY))
    assert futures[-1].report.selection.worker_pid != pid


def test_what_takes_long_is_watched_by_the_broker() -> None:
    """A submitted call that nobody asks for would have no deadline else."""
    own = fn.act.options(timeout_s=30)
    settled(own)
    assert own("take", 0.02) == 0.02
    future = own.submit("", 1)
    assert future.result() == 1
    assert path_of(future.report) == "broker"
    future = own.submit("", 2)
    assert future.result() == 2
    assert path_of(future.report) == "express"


def test_a_result_that_is_asked_for_too_early_can_be_asked_for_again() -> None:
    pid = settled()
    first, second = fn.act.submit("pause", 1), fn.act.submit("", 2)
    wait_until(lambda: is_paused(pid))
    for future in (first, second):
        with pytest.raises(TimeoutError, match="ask again"):
            future.result(timeout=0.01)
    os.kill(pid, signal.SIGCONT)
    assert (first.result(), second.result()) == (1, 2)


def test_a_forked_child_does_not_wait_for_its_parents_calls() -> None:
    pid = settled()
    first, second = fn.act.submit("pause", 1), fn.act.submit("", 2)
    wait_until(lambda: is_paused(pid))

    def ask() -> str:
        with pytest.raises(lz.BrokerLost) as refusal:
            second.result()
        return refusal.value.message

    assert forked(ask)().endswith("its answer goes to the parent; call again here")
    os.kill(pid, signal.SIGCONT)
    assert (first.result(), second.result()) == (1, 2)


def test_closing_the_session_cancels_calls_that_have_not_ended(site: Site) -> None:
    pid = settled()
    futures = [fn.act.submit("pause", 1), fn.act.submit("", 2)]
    wait_until(lambda: is_paused(pid))
    lz.disconnect()
    try:
        for future in futures:
            with pytest.raises(lz.Cancelled):
                future.result(timeout=30)
    finally:
        os.kill(pid, signal.SIGCONT)
        site.connect()
    assert settled() > 0


def test_methods_take_the_way_of_functions() -> None:
    """Each object has its own state; what is not plain is as ever."""
    first, second = fn.Actor(0), fn.Actor(100)
    for number in range(1, 40):
        assert (first.act("count", None), second.act("count", None)) == (number, 100 + number)
    report = fn.Actor.last_report()
    assert path_of(report) == "express"
    assert report.function.endswith("Actor.act")
    assert isinstance(fn.Actor._last.call, ExpressCall)
    assert (len(first), len(second)) == (39, 139)
    futures = [first.act.submit("count", None) for _ in range(150)]
    assert sorted(future.result() for future in futures) == list(range(40, 190))  # 64 on the lane, others by the broker
    with pytest.raises(lz.RemoteError, match="no such"):
        first.act("raise", "no such")
    assert first.act("list", 3) == [3, (3, {"of": 3})]
    assert len(first.act("large", 100_000)) == 100_000
    assert first.act("count", value=None) == 190
    with pytest.raises(lz.InvalidArgument, match="act"):
        first.act("count")
    first.close()
    with pytest.raises(lz.InvalidArgument, match="closed"):
        first.act("count", None)
    assert second.act("count", None) == 140
    second.close()


def test_an_object_that_is_lost_on_the_way_is_constructed_again(own: None) -> None:
    """Its method was on the lane of the worker that is gone."""
    actor = fn.Actor(5)
    for _ in range(20):
        actor.act("count", None)
    assert path_of(fn.Actor.last_report()) == "express"
    with pytest.raises(lz.BackendError, match="it may have run in part"):
        actor.act("die", None)
    assert actor.act("count", None) == 6
    assert fn.Actor.last_report().is_rebuilt
    for number in range(7, 30):
        assert actor.act("count", None) == number
    actor.close()


def test_items_of_a_generator_take_the_way_of_functions(tmp_path: Path) -> None:
    """In their order, up to what it raises; it is closed when the loop is left, an item ahead or not."""
    stream = fn.count_up(str(tmp_path), 60)
    assert [next(stream) for _ in range(60)] == list(range(1, 61))
    assert isinstance(fn.count_up._last.call, ExpressCall)
    with pytest.raises(lz.RemoteError, match="the end"):
        next(stream)
    (tmp_path / "closed").unlink()
    for number in fn.count_up(str(tmp_path), -1):
        if number == 30:
            break
    wait_until((tmp_path / "closed").exists)
    with fn.count_up(str(tmp_path), -1) as numbers:
        assert [next(numbers) for _ in range(20)] == list(range(1, 21))
    assert list(numbers) == []
