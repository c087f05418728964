"""Restarts that people ask for, by example; the simulator has them in its schedules."""

from __future__ import annotations

from typing import Any

from tests.unit.broker.driver import CLIENT, Driver, kinds

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import EnvError

S = WorkerState


class Replaced(Driver):
    """One whose only backend is asked to restart. `second` is the worker that is to take over."""

    def __init__(self, **limits: Any) -> None:
        super().__init__("alpha", **limits)
        self.route(2, backend="alpha")
        self.ran(self.serve(1))

    def restart(self, *, until_s: float = 1000.0, **more: Any) -> list[act.Action]:
        return self(ev.RestartAsked("alpha", more.pop("missing", None), until_s, **more))

    def load_second(self) -> list[act.Action]:
        self(ev.ProbeEnded("alpha", None))
        self.pids += 1
        self(ev.WorkerSpawned("alpha", 2, self.pids))
        return self(ev.WorkerReady(b"W2", "alpha", 2, {"lib": "2"}))

    @property
    def main(self) -> tuple[int, WorkerState]:
        worker = self.state.workers["alpha"]
        return worker.generation, worker.state

    @property
    def failure(self) -> str | None:
        return self.state.lifecycle.succession.failures.get("alpha")

    def exits(self, generation: int, code: int = 0, executing: int = 0) -> list[act.Action]:
        return self(ev.WorkerExited("alpha", generation, code, executing, "executing", ""))


def test_another_worker_takes_over_once_it_is_ready() -> None:
    """Until then the first serves; then it ends with the calls that it has, and nothing counts as a failure."""
    driver = Replaced(depth=1)
    assert kinds(driver.restart()) == ["Probe"]
    first = driver.run_of(driver.call(2))
    driver.call(3)
    assert driver.main == (1, S.READY)
    moved = driver.load_second()
    assert driver.run_of(moved).identity == b"W2", "what waited goes to the new one"
    assert driver.main == (2, S.READY)
    assert "RetireWorker" not in kinds(moved)
    answered = driver.ran(first)
    assert {"Answer", "RetireWorker"} <= set(kinds(answered))
    driver.exits(1)
    assert not driver.state.lifecycle.succession
    worker = driver.state.workers["alpha"]
    assert (worker.restarts, worker.answered, worker.cause) == (1, 2, None)
    assert driver.state.effects.tally.restarts == {("alpha", "asked"): 1, ("alpha", "renewal"): 0}
    assert driver.failure is None


def test_one_that_does_not_start_changes_nothing() -> None:
    """Whoever wants a restart must not lose what works."""
    for what in ("probe", "spawn", "exit", "time", "missing"):
        driver = Replaced()
        driver.restart(missing=Rejection(Reason.NOT_INSTALLED, "it is not built") if what == "missing" else None)
        error = EnvError("no module named lib", env="alpha")
        if what == "probe":
            driver(ev.ProbeEnded("alpha", error))
        elif what != "missing":
            driver(ev.ProbeEnded("alpha", None))
        if what == "spawn":
            driver(ev.SpawnFailed("alpha", 2, error))
        elif what == "exit":
            driver.exits(2, 1)
        elif what == "time":
            assert kinds(driver.tick(1000.0)) == ["Kill"]
            driver.exits(2, -9)
        assert driver.failure, what
        assert not driver.state.lifecycle.succession.successors
        assert driver.main == (1, S.READY)
        assert "alpha" not in driver.state.unavailable
        assert driver.run_of(driver.call(2)).identity == b"W1"


def test_next_start_has_another_number_than_the_one_that_failed() -> None:
    """What is said of one start must not be taken for another's."""
    driver = Replaced()
    driver.restart()
    driver(ev.ProbeEnded("alpha", None))
    driver.exits(2, 1)
    driver.restart()
    assert act.Spawn("alpha", 3) in driver(ev.ProbeEnded("alpha", None))


def test_worker_that_dies_meanwhile_is_replaced_by_the_one_that_starts() -> None:
    """Its calls wait for that one, pinned ones too; only the one that it died in has failed."""
    driver = Replaced()
    driver.restart()
    driver(ev.ProbeEnded("alpha", None))
    blamed = driver.run_of(driver.call(2, 2))
    driver.call(3, 2)
    ended = driver.exits(1, -11, blamed.dispatch)
    assert kinds(ended).count("Refuse") == 1
    assert driver.main == (2, S.STARTING)
    assert "alpha" not in driver.state.unavailable
    driver.pids += 1
    assert driver.run_of(driver(ev.WorkerReady(b"W2", "alpha", 2, {}))).identity == b"W2"


def test_death_of_one_that_drains_is_not_the_new_ones() -> None:
    driver = Replaced(restart_budget=0)
    driver.restart()
    late = driver.run_of(driver.call(2, 2))
    driver.load_second()
    assert "Refuse" in kinds(driver.exits(1, -11, late.dispatch))
    assert driver.main == (2, S.READY)
    assert driver.run_of(driver.call(3)).identity == b"W2"


def test_one_that_drains_is_killed_for_a_call_that_takes_too_long() -> None:
    driver = Replaced(timeout_s=5.0)
    driver.restart()
    driver.call(2, 2)
    driver.load_second()
    assert kinds(driver.tick(6.0)) == ["Kill"]
    (refused,) = [one for one in driver.exits(1, -9) if isinstance(one, act.Refuse)]
    assert refused.error.code == "DEADLINE"
    assert "alpha" not in driver.state.unavailable


def test_one_that_does_not_exit_is_killed() -> None:
    """A library may hang at exit. A call on an express lane is its client's to watch."""
    driver = Replaced()
    driver.restart()
    assert "RetireWorker" in kinds(driver.load_second())
    driver.now_s += 60.0
    assert not kinds(driver(ev.Tick({("alpha", 1): 7})))
    assert kinds(driver.tick(6.0)) == ["Kill"]
    assert not kinds(driver.exits(1, -9))
    assert driver.main == (2, S.READY)


def test_forced_restart_ends_the_worker_at_once() -> None:
    """The call that it is in has failed; others wait, and the next start has no pause and costs no budget."""
    driver = Replaced(restart_budget=0)
    running = driver.run_of(driver.call(2, 2))
    driver.call(3, 2)
    assert kinds(driver.restart(is_forced=True)) == ["Kill"]
    assert kinds(driver.exits(1, -9, running.dispatch)).count("Refuse") == 1
    assert kinds(driver.tick(0.0)) == ["Spawn"]
    driver(ev.WorkerSpawned("alpha", 2, 9))
    assert driver.run_of(driver(ev.WorkerReady(b"W9", "alpha", 2, {})))
    assert driver.state.effects.tally.restarts["alpha", "asked"] == 1


def test_worker_that_keeps_something_is_waited_for() -> None:
    """An object of a client is in one process. While another is to take over, no call may leave one behind."""
    driver = Replaced()
    driver.state.replacements.keeping = frozenset({"silu"})
    driver.restart()
    driver.load_second()
    assert [one.generation for one in driver.state.replacements.awaited] == [1]
    kept, none = frozenset({"alpha"}), frozenset[str]()
    driver(ev.KeptPolled(kept, none))
    run = driver.run_of(driver.call(2))
    assert run.identity == b"W1", "it goes on as long as it keeps something"
    driver(ev.KeptPolled(none, none))
    assert not kinds(driver.call(3)), "it gets no more calls until those that it has are over"
    driver(ev.KeptPolled(none, none))
    assert driver.main[0] == 1
    driver.ran(run)
    driver(ev.KeptPolled(kept, none))  # the call has made one
    assert driver.main[0] == 1
    run = next(one.dispatch for one in driver.state.workers["alpha"].running)
    driver(ev.CallRan(b"W1", run, 1, 5, b""))
    driver(ev.KeptPolled(none, none))
    assert {"RetireWorker"} == set(kinds(driver(ev.KeptPolled(none, none))))
    assert driver.main == (2, S.READY)


def test_worker_that_keeps_something_for_too_long_goes_on() -> None:
    driver = Replaced()
    driver.state.replacements.keeping = frozenset({"silu"})
    driver.restart(until_s=driver.now_s + 5)
    driver.load_second()
    driver(ev.KeptPolled(frozenset(), frozenset({"alpha"})))
    driver.call(2)
    assert kinds(driver.tick(5.0)) == ["Kill"]
    assert driver.run_of(driver.exits(2, -9)).identity == b"W1", "what waited is served"
    assert "kept objects" in str(driver.failure)


def test_restart_of_what_does_not_run_forgets_failures() -> None:
    driver = Driver("alpha")
    assert not kinds(driver(ev.RestartAsked("alpha", None, 1000.0)))
    assert driver.state.workers["alpha"].state is S.ABSENT


def test_client_that_leaves_takes_its_memory_from_both() -> None:
    driver = Replaced()
    driver.restart()
    driver.call(2)
    driver.load_second()
    driver.call(3)
    left = driver(ev.ClientLeft(CLIENT))
    assert "CloseArena" not in kinds(left)
    for identity, generation in ((b"W1", 1), (b"W2", 2)):
        worker = driver.state.lifecycle.current("alpha", generation)
        assert worker is not None
        done = driver(ev.CallRan(identity, worker.running[0].dispatch, 1, 5, b""))
        assert kinds(done).count("TakeBackArena") == (2 if generation == 2 else 0)


def test_shutdown_ends_all_that_there_are() -> None:
    driver = Replaced()
    driver.restart()
    driver.call(2)
    driver.load_second()
    driver.restart()
    driver(ev.ProbeEnded("alpha", None))
    stopped = driver(ev.ShutdownAsked())
    assert kinds(stopped).count("StopWorker") == 3
    for generation in (1, 3):
        assert "Exit" not in kinds(driver.exits(generation))
    assert "Exit" in kinds(driver.exits(2))
