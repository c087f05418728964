"""The core keeps its promises in every schedule, and the simulator notices when it does not.

LZ_SIM_SCHEDULES sets how many schedules run (default 3000); a failure names its seed, which `simulator.run(seed)`
shows again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests import simulator

from layerzero.broker import events as ev
from layerzero.broker.leases import Lost
from layerzero.broker.records import Call, Client, Worker
from layerzero.broker.selection import Verdict
from layerzero.broker.state import BrokerState
from layerzero.broker.turns import OpenTurn
from layerzero.broker.worker_fsm import TRANSITIONS, WorkerState
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.lane import EXECUTING

SCHEDULES = int(os.environ.get("LZ_SIM_SCHEDULES", "3000"))
CHUNK = 250
FOUND_WITHIN = 1000  # schedules in which a planted bug must show

# All that the core itself can answer with; the other codes belong to clients, environments and workers' own words.
CODES = {
    "BACKEND_ERROR",
    "BAD_MESSAGE",
    "BROKER_LOST",
    "BUSY",
    "CUDA_GRAPH_UNSAFE",
    "DEADLINE",
    "DIGEST_REQUIRED",
    "INVALID_ARGUMENT",
    "NO_BACKEND",
    "NO_TRANSPORT",
    "OUTPUT_TOO_SMALL",
    "POISON",
}
# Reasons that the core and selection.py add; match.py has its own tests for the rest.
REASONS = {
    Reason.BACKEND_DISABLED,
    Reason.BACKEND_IMPORT_FAILED,
    Reason.BACKEND_RESTARTING,
    Reason.COMPILE_FAILED,
    Reason.DTYPE_UNSUPPORTED,
    Reason.NOT_COMPILED,
    Reason.NOT_INSTALLED,
    Reason.NOT_PINNED,
    Reason.OP_UNSUPPORTED,
}


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_schedule_keeps_the_promises(first: int) -> None:
    """Faults meet in orders that nobody thinks of."""
    for seed in range(first, min(first + CHUNK, SCHEDULES)):
        simulator.run(seed)


def test_same_seed_gives_the_same_schedule() -> None:
    """A failure that cannot be shown again cannot be repaired."""
    assert simulator.run(11) == simulator.run(11)


@pytest.fixture(scope="module")
def coverage() -> simulator.Coverage:
    seen = simulator.Coverage()
    for seed in range(600):
        seen.update(simulator.run(seed))
    return seen


def test_schedules_take_every_transition(coverage: simulator.Coverage) -> None:
    """A row of the table that no schedule takes is dead, or untested."""
    assert set(coverage.transitions) == set(TRANSITIONS)


def test_schedules_lead_to_every_code_and_reason(coverage: simulator.Coverage) -> None:
    """An error that never occurs here may be wrong when it does elsewhere."""
    assert set(coverage.codes) == CODES
    assert set(coverage.reasons) == {reason.value for reason in REASONS}


def test_schedules_contain_every_event_action_and_fate(coverage: simulator.Coverage) -> None:
    """What the world never does proves nothing."""
    assert set(coverage.events) == {cls.__name__ for cls in ev.Event.__args__}
    assert set(coverage.actions) == {cls.__name__ for cls in ev.Action.__args__}
    seen = {fate for fate, count in coverage.fates.items() if count}
    lanes = {f"lane_{fate}" for fate in simulator.LANE_FATES}
    lanes |= {f"ring_{fate}" for fate in simulator.RING_FATES} | {f"bell_{fate}" for fate in simulator.BELL_FATES}
    others = {*simulator.GPU_FATES, *simulator.TURN_FATES, *simulator.COMPILE_FATES, "late_answer"}
    assert seen == {*simulator.FATES, *lanes, *others}


# --- planted bugs ----------------------------------------------------------------------------------------


class RequeuesBeforeExit(BrokerState):
    """Moves a call on when it asks for the kill, not when the exit is confirmed."""

    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        super().fault(worker, error, call)
        running = list(worker.running)
        worker.running.clear()
        for call in running:
            self.attempt_failed(call, worker, error, exit_code=-9)


class TakesLateAnswers(BrokerState):
    """Uses what a killed worker still says."""

    def _answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        worker = self._by_identity.get(identity)
        if worker is not None and worker.fault is not None and worker.running:
            return worker
        return super()._answers_head(identity, dispatch, attempt)


class TakesAnyAnswer(BrokerState):
    """Does not look which dispatch is answered."""

    def _answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        worker = self._by_identity.get(identity)
        return worker if worker is not None and worker.fault is None and worker.running else None


class AnswersTwice(BrokerState):
    def _call_ran(self, event: ev.CallRan) -> None:
        super()._call_ran(event)
        self._actions += [action for action in self._actions if isinstance(action, ev.Answer)]


class CountsCallsForEver(BrokerState):
    def _call_ran(self, event: ev.CallRan) -> None:
        super()._call_ran(event)
        for action in self._actions:
            if isinstance(action, ev.Answer):
                self.clients[action.identity].open_calls += 1


class LosesCallsOfDisabled(BrokerState):
    def _disable(self, worker: Worker, cause: LayerZeroError, reason: Reason) -> None:
        worker.waiting.clear()
        super()._disable(worker, cause, reason)


class LosesQueueOfDead(BrokerState):
    def _requeue(self, call: Call, worker: Worker, exit_code: int, pid: int) -> None:
        pass


class ForgetsWaitersAtShutdown(BrokerState):
    def _shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        for worker in self.workers.values():
            worker.waiting.clear()
        super()._shutdown_asked(event)


class FallsBackWhileStopping(BrokerState):
    """Gives a call to a worker that will not come any more."""

    def attempt_failed(self, call: Call, worker: Worker, error: LayerZeroError, **more: Any) -> None:
        was_stopping, self.stopping = self.stopping, False
        super().attempt_failed(call, worker, error, **more)
        self.stopping = was_stopping


class KeepsOldLoans(BrokerState):
    """Thinks that a new worker has the arenas and plans of the one before."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        worker = self.workers[event.backend]
        arenas, plans = set(worker.arenas), set(worker.plans)
        super()._worker_exited(event)
        worker.arenas, worker.plans = arenas, plans


class ClosesMemoryInUse(BrokerState):
    def _release_if_done(self, client: Client) -> None:
        if client.has_left:
            for arena in list(client.arenas):
                self._release_arena(client, arena)


class NeverClosesMemory(BrokerState):
    def _release_if_done(self, client: Client) -> None:
        pass


class TrustsRetirement(BrokerState):
    """Gives memory back without a look at the open calls."""

    def _arena_given_up(self, event: ev.ArenaGivenUp) -> None:
        client = self.clients.get(event.identity)
        if client is not None and event.arena in client.arenas:
            self._release_arena(client, event.arena)


class MissesDeadlines(BrokerState):
    def _start_clock(self, worker: Worker) -> None:
        worker.head_since_s = self.now_s


class MissesBackoff(BrokerState):
    def _plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str) -> None:
        wakeup_s = self.wakeup_s
        super()._plan_restart(worker, error, stderr_tail)
        self.wakeup_s = wakeup_s


class RestartsForEver(BrokerState):
    def _plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str) -> None:
        worker.deaths_s.clear()
        super()._plan_restart(worker, error, stderr_tail)


class RestartsAtOnce(BrokerState):
    def _plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str) -> None:
        super()._plan_restart(worker, error, stderr_tail)
        worker.retry_at_s = self.now_s
        self.wakeup_s = min(self.wakeup_s, self.now_s)


class FeedsPoisonToAll(BrokerState):
    def attempt_failed(self, call: Call, worker: Worker, error: LayerZeroError, **more: Any) -> None:
        call.deaths = 0
        super().attempt_failed(call, worker, error, **more)


class BlamesNobody(BrokerState):
    """Does not see which call a worker died in."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        event.executing = 0
        super()._worker_exited(event)


class BlamesTheNext(BrokerState):
    """Blames the call that a killed worker had come to, instead of the one it was killed for."""

    def _move_calls(
        self, worker: Worker, running: list[Call], waiting: list[Call], error: LayerZeroError, event: ev.WorkerExited
    ) -> None:
        running.reverse()
        super()._move_calls(worker, running, waiting, error, event)


class TriesAgainWhereItFailed(BrokerState):
    def place(self, call: Call) -> None:
        call.tried.clear()
        super().place(call)


class GivesUpDuringRestarts(BrokerState):
    """Refuses a call although its backend will be back in a moment."""

    def _awaited(self, call: Call) -> Verdict | None:
        return None


class WaitsForLateRestarts(BrokerState):
    """Keeps a call waiting for longer than its timeout."""

    def _is_back_in_time(self, backend: str, call: Call) -> bool:
        return True


class ForgetsQuarantine(BrokerState):
    def _call_poisoned(self, event: ev.CallPoisoned) -> None:
        pass


class HidesRestarts(BrokerState):
    """Reports a backend that is down as available."""

    def _set_unavailable(self, backend: str, reason: Rejection | None) -> None:
        if reason is None or reason.code is not Reason.BACKEND_RESTARTING:
            super()._set_unavailable(backend, reason)


class SkipsDecisions(BrokerState):
    def _decision(self, call: Call, worker: Worker) -> int:
        number = super()._decision(call, worker)
        self._actions = [a for a in self._actions if not isinstance(a, ev.SendDecision) or number % 2]
        return number


class KeepsSignatures(BrokerState):
    """Loses count of who uses a signature."""

    def close(self, call: Call) -> None:
        call.route.signature.users += 1
        super().close(call)


class OverfillsWorkers(BrokerState):
    def place(self, call: Call) -> None:
        super().place(call)
        for worker in self.workers.values():
            if worker.state is WorkerState.READY and worker.waiting:
                self._send(worker, worker.waiting.popleft())


class KeepsLeases(BrokerState):
    """Does not take leases back when what they stand for may have changed."""

    def _revoke_leases(self) -> None:
        self._leased_epoch = self.engine.epoch


class WatchesNoLeases(BrokerState):
    """Does not see that another kernel has become the better one."""

    def _watch_leases(self) -> None:
        self._watch_at_s = math.inf


class OpensLanesInOldEpoch(BrokerState):
    """Does not tell a page that opens late what was taken back before."""

    def _lane_opened(self, event: ev.LaneOpened) -> None:
        super()._lane_opened(event)
        self._actions = [action for action in self._actions if not isinstance(action, ev.RevokeLane)]


class LeasesForgottenRoutes(BrokerState):
    def _settle(self, call: Call, worker: Worker) -> None:
        routes, number = call.client.routes, call.route.number
        is_known = number in routes
        routes[number] = call.route
        super()._settle(call, worker)
        if not is_known:
            del routes[number]


class LeavesLanesOpen(BrokerState):
    """Does not tell clients that the worker of their lane is gone."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        super()._worker_exited(event)
        self._actions = [action for action in self._actions if not isinstance(action, ev.EndLane)]


class EndsLanesBeforeExit(BrokerState):
    """Sends calls of lanes elsewhere while the worker may still write."""

    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        super().fault(worker, error, call)
        self._actions += [ev.EndLane(n) for n, lane in self.leases.lanes.items() if lane.worker is worker]


class KeepsLanesOfThoseWhoLeft(BrokerState):
    def _client_left(self, event: ev.ClientLeft) -> None:
        lanes = dict(self.leases.lanes)
        super()._client_left(event)
        self.leases.lanes.update(lanes)


class ForgivesDeathsOnLanes(BrokerState):
    """Does not count the worker that a call killed on its lane."""

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        super().resume(call, lost, is_blamed=False)


class BlamesWhoCameNext(BrokerState):
    """Blames the call that is on a lane when its worker dies, although the worker never saw it."""

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        super().resume(call, lost, is_blamed=True)


class BlamesHeadForLanes(BrokerState):
    """Forgets that a worker is killed for a call of a lane."""

    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        super().fault(worker, error)


class KillsForWaitingHeads(BrokerState):
    """Takes the time that a head waits for a call of a lane for its own."""

    def _end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        super()._end_what_takes_too_long(worker, 0)


class WaitsForLanesForEver(BrokerState):
    def _end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        if executing & EXECUTING:
            worker.head_since_s = self.now_s
        else:
            super()._end_what_takes_too_long(worker, executing)


class IgnoresOverdueLanes(BrokerState):
    def _lane_overdue(self, event: ev.LaneOverdue) -> None:
        pass


class FailsTurnsAtOnce(BrokerState):
    """Does not wait for the client's stream to come to them."""

    def _end_in_error(self, call: Call, error: LayerZeroError) -> None:
        super()._end_in_error(call, error)
        if call.turn is not None:
            self._tell(self.turns.reach([call.turn.key]))


class RefusesWithoutTheTurn(BrokerState):
    """Leaves the stream of a refused call waiting."""

    def _tell(self, failed: list[OpenTurn]) -> None:
        super()._tell(failed)
        self._actions = [action for action in self._actions if not isinstance(action, ev.FailTurn)]


class ForgetsAnsweredCalls(BrokerState):
    """Thinks that what is answered is done."""

    def _take_enqueued(self, worker: Worker) -> list[Call]:
        for call in super()._take_enqueued(worker):
            self.close(call)
        return []


class RunsDoneCallsAgain(BrokerState):
    def _turns_seen(self, event: ev.TurnsSeen) -> None:
        worker = self.workers[event.backend]
        event.done = [dispatch for dispatch in event.done if dispatch in worker.enqueued]
        super()._turns_seen(event)


class WaitsForGpusForEver(BrokerState):
    def _end_late_turns(self) -> None:
        pass


class LeavesStreamsOfThoseWhoLeft(BrokerState):
    """Nobody says that their inputs are ready."""

    def _turns_seen(self, event: ev.TurnsSeen) -> None:
        super()._turns_seen(event)
        self._actions = [action for action in self._actions if not isinstance(action, ev.ReleaseTurn)]

    def _release_turns(self, client: Client) -> None:
        pass


class ClosesPagesInUse(BrokerState):
    def _enqueue(self, call: Call, worker: Worker, turn: OpenTurn) -> None:
        super()._enqueue(call, worker, turn)
        call.client.enqueued -= 1
        call.is_enqueued = False
        call.client.open_calls += 1
        self._release_if_done(call.client)
        call.client.open_calls -= 1


class BlamesNobodyInTheGpu(BrokerState):
    def _in_gpu(self, worker: Worker, event: ev.WorkerExited) -> Call | None:
        return None


class KeepsGpusOfTheDead(BrokerState):
    """Thinks that a new worker has the order pages of the one before."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        worker = self.workers[event.backend]
        gpus = set(worker.gpus)
        super()._worker_exited(event)
        worker.gpus = gpus


class TakesLeftCallsTwice(BrokerState):
    """Reads what a worker left off its ring again when it dies."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        for lane in self.leases.rings(self.workers[event.backend]):
            lane.left.clear()
        super()._worker_exited(event)


class LeavesCallsOnRings(BrokerState):
    """Does not look what was on the rings of a dead worker."""

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        event.rings = {number: replace(look, calls=[]) for number, look in event.rings.items()}
        super()._worker_exited(event)


class GivesMemoryOfRingsBack(BrokerState):
    """Thinks that nothing is on the rings of a client that has left."""

    def _has_rings(self, client: Client) -> bool:
        return False


class WaitsForRingsForEver(BrokerState):
    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        if not (call and error.code == "DEADLINE" and self.leases.rings(worker)):
            super().fault(worker, error, call)


class LosesBoundCalls(BrokerState):
    """Forgets what a dead worker had bound."""

    def _take_enqueued(self, worker: Worker) -> list[Call]:
        calls = super()._take_enqueued(worker)
        for call in [call for call in calls if call.bell is not None]:
            self.close(call)
        return [call for call in calls if call.bell is None]


class BindsBeforeExit(BrokerState):
    """Binds a call elsewhere while the worker that serves its bell may live."""

    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        super().fault(worker, error, call)
        for one in self.bells.take_all(worker):
            self.place(one)


def planted(cls: type[BrokerState] = BrokerState) -> Iterator[type[BrokerState]]:
    for mutant in cls.__subclasses__():
        if mutant.__module__ == __name__:
            yield mutant


@pytest.mark.parametrize("mutant", list(planted()), ids=lambda cls: cls.__name__)
def test_planted_bug_is_found(mutant: type[BrokerState]) -> None:
    """A simulator that finds nothing may just not look."""
    for seed in range(FOUND_WITHIN):
        try:
            simulator.run(seed, mutant)
        except Exception:  # a broken promise, or a core that trips over its own state
            return
    pytest.fail(f"{FOUND_WITHIN} schedules did not show it")
