"""The core keeps its promises in every schedule, and the simulator notices when it does not.

LZ_SIM_SCHEDULES sets how many schedules run (default 2000); a failure names its seed, which `simulation.run(seed)`
shows again.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import simulation
from tests.simulation import joined

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.admission import Admission
from layerzero.broker.core.blame import Blame, Evidence
from layerzero.broker.core.call_fsm import take
from layerzero.broker.core.clients import ClientLifecycle
from layerzero.broker.core.completion import Completion
from layerzero.broker.core.decisions import Decisions
from layerzero.broker.core.dispatch import Dispatch
from layerzero.broker.core.gpu_in_flight import GpuInFlight
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.leases import Leases, Lost
from layerzero.broker.core.model import Call, Client, Worker
from layerzero.broker.core.release import Release
from layerzero.broker.core.replacements import Replacements
from layerzero.broker.core.ring_calls import RingCalls
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.stream_order import OpenPoint
from layerzero.broker.core.worker_exit import WorkerExits
from layerzero.broker.core.worker_fsm import TRANSITIONS, WorkerState
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.core.worker_unreachable import UnreachableWorkers
from layerzero.broker.selection.signature import Verdict
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.vocabulary.worker_codes import LANE_CALL, RENEWAL_EXIT

SCHEDULES = int(os.environ.get("LZ_SIM_SCHEDULES", "2000"))
CHUNK = 125
FOUND_WITHIN = 6000  # schedules in which a planted bug must show

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
    "UNREACHABLE",
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
    Reason.VERSION_NOT_NAMED,
    Reason.ENV_CHANGED,
    Reason.NOT_JOINED,
    Reason.NOT_PINNED,
    Reason.OP_UNSUPPORTED,
}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def run_chunk(shared: Path, run: Callable[[int], simulation.Coverage], seeds: range) -> simulation.Coverage:
    """What these schedules lead to. The first process of a test run that asks runs them for all."""
    kept = shared / f"{run.__module__}-{seeds.start}-{seeds.stop}"
    with open(f"{kept}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            coverage: simulation.Coverage = pickle.loads(kept.read_bytes())  # noqa: S301 (our own)
            return coverage
        seen = simulation.Coverage()
        for seed in seeds:
            seen.update(run(seed))
        kept.write_bytes(pickle.dumps(seen))
        return seen


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_schedule_keeps_the_promises(shared: Path, first: int) -> None:
    """Faults meet in orders that nobody thinks of."""
    run_chunk(shared, simulation.run, range(first, min(first + CHUNK, SCHEDULES)))


@pytest.mark.parametrize("first", range(0, SCHEDULES // 4, CHUNK))
def test_every_schedule_with_joined_workers_keeps_the_promises(shared: Path, first: int) -> None:
    """They leave with their containers, and stand still with calls that they go on with later."""
    run_chunk(shared, joined.run, range(first, min(first + CHUNK, SCHEDULES // 4)))


def test_same_seed_gives_the_same_schedule() -> None:
    """A failure that cannot be shown again cannot be repaired."""
    assert simulation.run(11) == simulation.run(11)


@pytest.fixture(scope="module")
def coverage(shared: Path) -> simulation.Coverage:
    """What a thousand schedules lead to, and some with joined workers."""
    seen = simulation.Coverage()
    chunks = range(0, 1000, CHUNK)
    for first in random.sample(chunks, len(chunks)):  # who runs the same at this moment begins with others
        seen.update(run_chunk(shared, simulation.run, range(first, first + CHUNK)))
    seen.update(run_chunk(shared, joined.run, range(CHUNK)))
    return seen


def test_schedules_take_every_transition(coverage: simulation.Coverage) -> None:
    """A row of the table that no schedule takes is dead, or untested."""
    assert set(coverage.transitions) == set(TRANSITIONS)


def test_schedules_lead_to_every_code_and_reason(coverage: simulation.Coverage) -> None:
    """An error that never occurs here may be wrong when it does elsewhere."""
    assert set(coverage.codes) == CODES
    assert set(coverage.reasons) == {reason.value for reason in REASONS}


def test_schedules_contain_every_event_action_and_fate(coverage: simulation.Coverage) -> None:
    """What the world never does proves nothing."""
    assert set(coverage.events) == {cls.__name__ for cls in ev.Event.__args__}
    assert set(coverage.actions) == {cls.__name__ for cls in act.Action.__args__}
    seen = {fate for fate, count in coverage.fates.items() if count}
    lanes = {f"lane_{fate}" for fate in simulation.LANE_FATES}
    lanes |= {f"ring_{fate}" for fate in simulation.RING_FATES} | {
        f"graph_slot_{fate}" for fate in simulation.GRAPH_SLOT_FATES
    }
    others = {*simulation.GPU_FATES, *simulation.POINT_FATES, *simulation.COMPILE_FATES, *simulation.RETRY_FATES}
    others |= {"late_answer", "rested", "retired", "successor", "replaced_keeper"}
    of_joined = {f"joined_{fate}" for fate in joined.JOINED_FATES}
    assert seen == {*simulation.FATES, *lanes, *others, *of_joined}


# --- planted bugs ----------------------------------------------------------------------------------------

# Each is a part of the core that is wrong in one place; the core is built with it instead of the right one.


def drop(part: Any, kind: type) -> None:
    """Have none of these actions done that the present event has led to."""
    effects = part.effects
    effects.actions = [action for action in effects.actions if not isinstance(action, kind)]


class RequeuesBeforeExit(BrokerState):
    """Moves a call on when it asks for the kill, not when the exit is confirmed."""

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        for action in list(super().handle(event, now_s)):
            if isinstance(action, act.Kill):
                worker = self.workers[action.backend]
                for call in take(worker.running):
                    assert worker.fault is not None
                    self.calls.attempt_failed(call, worker, worker.fault, exit_code=-9)
        return self.effects.actions


class TakesLateAnswers(Completion):
    """Uses what a killed worker still says."""

    def answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        worker = self.lifecycle.by_identity.get(identity)
        if worker is not None and worker.fault is not None and worker.running:
            return worker
        return super().answers_head(identity, dispatch, attempt)


class TakesAnyAnswer(Completion):
    """Does not look which dispatch is answered."""

    def answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        worker = self.lifecycle.by_identity.get(identity)
        return worker if worker is not None and worker.fault is None and worker.running else None


class AnswersTwice(Completion):
    def on_call_ran(self, event: ev.CallRan) -> None:
        super().on_call_ran(event)
        self.effects.emit(*[action for action in self.effects.actions if isinstance(action, act.Answer)])


class CountsCallsForEver(BrokerState):
    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        actions = super().handle(event, now_s)
        for action in actions:
            if isinstance(action, act.Answer) and isinstance(event, ev.CallRan):
                self.clients[action.identity].open_calls += 1
        return actions


class LosesCallsOfDisabled(Dispatch):
    def leave_disabled(self, worker: Worker) -> None:
        if worker.state is WorkerState.DISABLED:
            take(worker.waiting)


class LosesQueueOfDead(Dispatch):
    def requeue(self, call: Call, worker: Worker, exit_code: int, pid: int) -> None:
        pass


class ForgetsWaitersAtShutdown(BrokerState):
    def on_shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        for worker in self.workers.values():
            take(worker.waiting)
        super().on_shutdown_asked(event)


class FallsBackWhileStopping(Dispatch):
    """Gives a call to a worker that will not come any more."""

    def attempt_failed(self, call: Call, worker: Worker, error: LayerZeroError, **more: Any) -> None:
        was_stopping, self.effects.stopping = self.effects.stopping, False
        super().attempt_failed(call, worker, error, **more)
        self.effects.stopping = was_stopping


class KeepsOldLoans(WorkerLifecycle):
    """Thinks that a new worker has the arenas and plans of the one before."""

    def take_exit(self, event: ev.WorkerExited) -> Worker | None:
        worker = self.workers[event.backend]
        arenas, plans = set(worker.arenas), set(worker.plans)
        found = super().take_exit(event)
        worker.arenas, worker.plans = arenas, plans
        return found


class ClosesMemoryInUse(Release):
    def release_if_done(self, client: Client) -> None:
        if client.has_left:
            for arena in list(client.arenas):
                self.grants.close_arena(client, arena)


class NeverClosesMemory(Release):
    def release_if_done(self, client: Client) -> None:
        pass


class TrustsRetirement(Release):
    """Gives memory back without a look at the open calls."""

    def users(self, client: Client, arena: int) -> list[Call]:
        return []


class MissesDeadlines(Dispatch):
    def start_clock(self, worker: Worker) -> None:
        worker.head_since_s = self.effects.now_s


class MissesBackoff(WorkerLifecycle):
    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        wakeup_s = self._effects.wakeup_s
        super().plan_restart(worker, error, stderr_tail, is_renewal=is_renewal)
        self._effects.wakeup_s = wakeup_s


class RestartsForEver(WorkerLifecycle):
    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        worker.deaths_s.clear()
        super().plan_restart(worker, error, stderr_tail, is_renewal=is_renewal)


class StaysDisabled(WorkerLifecycle):
    """Leaves what crashes have disabled to whoever repairs it."""

    def _disable_for_a_while(self, worker: Worker, text: str, repair: str) -> None:
        super()._disable_for_a_while(worker, text, repair)
        worker.retry_at_s = math.inf


class TriesAgainAtOnce(WorkerLifecycle):
    def _disable_for_a_while(self, worker: Worker, text: str, repair: str) -> None:
        super()._disable_for_a_while(worker, text, repair)
        worker.retry_at_s = self._effects.now_s
        self._effects.wake_by(self._effects.now_s)


class TriesAgainAsOftenAsEver(WorkerLifecycle):
    """Does not see that the try before has failed."""

    def _disable_for_a_while(self, worker: Worker, text: str, repair: str) -> None:
        worker.times_disabled = 0
        super()._disable_for_a_while(worker, text, repair)


class TriesTheUnrepairedAgain(WorkerLifecycle):
    """Takes a wrong configuration for a crash."""

    def _disable(self, worker: Worker, cause: LayerZeroError, reason: Reason, *, retry_s: float | None = None) -> None:
        super()._disable(worker, cause, reason, retry_s=retry_s or self._limits.retry_disabled_s)


class NeverGoesBack(Dispatch):
    """A worker that was killed is its caller's error, where it was the only one."""

    def _goes_back(self, call: Call) -> bool:
        return False


class GoesBackToWhoRaised(Dispatch):
    def _goes_back(self, call: Call) -> bool:
        call.lost_at |= call.tried
        return super()._goes_back(call)


class GoesBackFirst(Dispatch):
    """Prefers a backend whose worker died to those that have not tried."""

    def place(self, call: Call) -> None:
        self._goes_back(call)
        super().place(call)


class CountsRenewals(WorkerLifecycle):
    """Gives up a worker that only began anew for the order of its calls."""

    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        super().plan_restart(worker, error, stderr_tail, is_renewal=False)


class RestartsAtOnce(WorkerLifecycle):
    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        super().plan_restart(worker, error, stderr_tail, is_renewal=is_renewal)
        worker.retry_at_s = self._effects.now_s
        self._effects.wake_by(self._effects.now_s)


class FeedsPoisonToAll(Dispatch):
    def attempt_failed(self, call: Call, worker: Worker, error: LayerZeroError, **more: Any) -> None:
        call.deaths = 0
        super().attempt_failed(call, worker, error, **more)


class BlamesNobody(WorkerExits):
    """Does not see which call a worker died in."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        return super().on_worker_exited(replace(event, executing=0))


class BlamesTheNext(WorkerExits):
    """Blames the call that a worker would have come to, instead of the one it was killed for or died in."""

    def blame_for(self, end: Evidence) -> Blame:
        blame, running = super().blame_for(end), list(end.running)
        return Blame(dispatch=running[-1]) if blame.dispatch in running else blame


class TriesAgainWhereItFailed(Dispatch):
    def place(self, call: Call) -> None:
        call.tried.clear()
        super().place(call)


class GivesUpDuringRestarts(Dispatch):
    """Refuses a call although its backend will be back in a moment."""

    def awaited(self, call: Call) -> Verdict | None:
        return None


class WaitsForLateRestarts(WorkerLifecycle):
    """Keeps a call waiting for longer than its timeout."""

    def is_back_by(self, backend: str, at_s: float) -> bool:
        return True


class ForgetsQuarantine(Admission):
    def on_call_poisoned(self, event: ev.CallPoisoned) -> None:
        pass


class HidesRestarts(WorkerLifecycle):
    """Reports a backend that is down as available."""

    def set_unavailable(self, backend: str, reason: Rejection | None) -> None:
        if reason is None or reason.code is not Reason.BACKEND_RESTARTING:
            super().set_unavailable(backend, reason)


class SkipsDecisions(Decisions):
    def number(self, call: Call, worker: Worker) -> int:
        number = super().number(call, worker)
        if not number % 2:
            drop(self, act.SendDecision)
        return number


class KeepsSignatures(Release):
    """Loses count of who uses a signature."""

    def close(self, call: Call) -> None:
        call.route.signature.users += 1
        super().close(call)


class OverfillsWorkers(Dispatch):
    def place(self, call: Call) -> None:
        super().place(call)
        for worker in self.lifecycle.workers.values():
            if worker.state is WorkerState.READY and worker.waiting:
                self.send(worker, next(iter(worker.waiting)))


class KeepsLeases(LeasePolicy):
    """Does not take leases back when what they stand for may have changed."""

    def revoke(self) -> None:
        self.leased_epoch = self.engine.epoch


class WatchesNoLeases(LeasePolicy):
    """Does not see that another kernel has become the better one."""

    def watch(self) -> None:
        if self.effects.now_s >= self.watch_at_s:
            self.watch_at_s = math.inf


class OpensLanesInOldEpoch(ClientLifecycle):
    """Does not tell a page that opens late what was taken back before."""

    def on_lane_opened(self, event: ev.LaneOpened) -> None:
        super().on_lane_opened(event)
        drop(self, act.RevokeLane)


class LeasesForgottenRoutes(LeasePolicy):
    def settle(self, call: Call, worker: Worker) -> None:
        routes, number = call.client.routes, call.route.number
        is_known = number in routes
        routes[number] = call.route
        super().settle(call, worker)
        if not is_known:
            del routes[number]


class LeasesUnknownPlans(Leases):
    """Does not wait until the worker has been told."""

    def grant(self, call: Call, worker: Worker, plan: int) -> Iterator[act.Action]:
        told = next(lane.told for lane in self.of(call.client) if lane.worker is worker and lane.gpu == call.gpu)
        told[plan] = 0
        return super().grant(call, worker, plan)


class LeavesLanesOpen(WorkerExits):
    """Does not tell clients that the worker of their lane is gone."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        found = super().on_worker_exited(event)
        drop(self, act.EndLane)
        return found


class EndsLanesBeforeExit(BrokerState):
    """Sends calls of lanes elsewhere while the worker may still write."""

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        actions = super().handle(event, now_s)
        killed = {action.backend for action in actions if isinstance(action, act.Kill)}
        return actions + [act.EndLane(n) for n, lane in self.leases.lanes.items() if lane.worker.backend in killed]


class KeepsLanesOfThoseWhoLeft(ClientLifecycle):
    def on_client_left(self, event: ev.ClientLeft) -> None:
        lanes = dict(self.leases.lanes)
        super().on_client_left(event)
        self.leases.lanes.update(lanes)


class ForgivesDeathsOnLanes(Admission):
    """Does not count the worker that a call killed on its lane."""

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        super().resume(call, lost, is_blamed=False)


class BlamesWhoCameNext(Admission):
    """Blames the call that is on a lane when its worker dies, although the worker never saw it."""

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        super().resume(call, lost, is_blamed=True)


class BlamesHeadForLanes(WorkerLifecycle):
    """Forgets that a worker is killed for a call of a lane."""

    def fault(self, worker: Worker, error: LayerZeroError, blame: Blame | None = None) -> None:
        super().fault(worker, error, blame if blame is None or blame.dispatch else None)


class KillsForWaitingHeads(BrokerState):
    """Takes the time that a head waits for a call of a lane for its own."""

    def end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        super().end_what_takes_too_long(worker, 0)


class WaitsForLanesForEver(BrokerState):
    def end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        if executing & LANE_CALL:
            worker.head_since_s = self.effects.now_s
        else:
            super().end_what_takes_too_long(worker, executing)


class IgnoresOverdueLanes(BrokerState):
    def on_lane_overdue(self, event: ev.LaneOverdue) -> None:
        pass


class FailsTurnsAtOnce(Release):
    """Does not wait for the client's stream to come to them."""

    def end_in_error(self, call: Call, error: LayerZeroError) -> None:
        super().end_in_error(call, error)
        if call.point is not None:
            self.tell(self.points.reach([call.point.key]))


class RefusesWithoutTheTurn(Release):
    """Leaves the stream of a refused call waiting."""

    def tell(self, failed: list[OpenPoint]) -> None:
        super().tell(failed)
        drop(self, act.FailTurn)


class ForgetsAnsweredCalls(WorkerExits):
    """Thinks that what is answered is done."""

    def take_calls(self, worker: Worker) -> tuple[list[Call], list[Call], list[Call]]:
        on_gpu, running, waiting = super().take_calls(worker)
        for call in on_gpu:
            self.closing.close(call)
        return [], running, waiting


class RunsDoneCallsAgain(GpuInFlight):
    def on_points_seen(self, event: ev.TimelinesPolled) -> None:
        worker = self.lifecycle.workers[event.backend]
        super().on_points_seen(replace(event, done=[one for one in event.done if one in worker.enqueued]))


class WaitsForGpusForEver(GpuInFlight):
    def end_late(self) -> None:
        pass


class LeavesStreamsOfThoseWhoLeft(GpuInFlight):
    """Nobody says that their inputs are ready."""

    def on_points_seen(self, event: ev.TimelinesPolled) -> None:
        super().on_points_seen(event)
        drop(self, act.ReleaseTurn)

    def release(self, client: Client) -> None:
        pass


class ClosesPagesInUse(Release):
    """Thinks that what is answered needs no memory any more."""

    def release_if_done(self, client: Client) -> None:
        enqueued, client.enqueued = client.enqueued, 0
        super().release_if_done(client)
        client.enqueued = enqueued


class BlamesNobodyInTheGpu(WorkerExits):
    def blame_for(self, end: Evidence) -> Blame:
        return super().blame_for(replace(end, begun=()))


class BlamesWhoBeginsAnew(WorkerExits):
    """Takes the end of a worker that got calls out of order for a crash."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        return super().on_worker_exited(replace(event, exit_code=1) if event.exit_code == RENEWAL_EXIT else event)


class KeepsGpusOfTheDead(WorkerLifecycle):
    """Thinks that a new worker has the timeline pages of the one before."""

    def take_exit(self, event: ev.WorkerExited) -> Worker | None:
        worker = self.workers[event.backend]
        gpus = set(worker.gpus)
        found = super().take_exit(event)
        worker.gpus = gpus
        return found


class TakesLeftCallsTwice(WorkerExits):
    """Reads what a worker left off its ring again when it dies."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        for lane in self.leases.rings(self.lifecycle.workers[event.backend]):
            lane.left.clear()
        return super().on_worker_exited(event)


class LeavesCallsOnRings(WorkerExits):
    """Does not look what was on the rings of a dead worker."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        rings = {number: replace(look, calls=[]) for number, look in event.rings.items()}
        return super().on_worker_exited(replace(event, rings=rings))


class GivesMemoryOfRingsBack(Release):
    """Thinks that nothing is on the rings of a client that has left."""

    def has_rings(self, client: Client) -> bool:
        return False


class WaitsForRingsForEver(RingCalls):
    def on_rings_seen(self, event: ev.RingsPolled) -> None:
        page_poller = {number: replace(look, ready=()) for number, look in event.page_poller.items()}
        super().on_rings_seen(ev.RingsPolled(page_poller))


class LosesBoundCalls(WorkerExits):
    """Forgets what a dead worker had bound."""

    def take_calls(self, worker: Worker) -> tuple[list[Call], list[Call], list[Call]]:
        for call in take(worker.graph_slots.values()):
            self.closing.close(call)
        return super().take_calls(worker)


class BindsBeforeExit(BrokerState):
    """Binds a call elsewhere while the worker that serves its graph slot may live."""

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        for action in list(super().handle(event, now_s)):
            if isinstance(action, act.Kill):
                for one in take(self.workers[action.backend].graph_slots.values()):
                    self.calls.place(one)
        return self.effects.actions


class TakesOverFromWhoKeeps(Replacements):
    """Leaves objects of clients behind in a worker that nobody calls any more."""

    def may_keep(self, worker: Worker) -> bool:
        return False


class NeverRetires(Replacements):
    def has_drained(self, worker: Worker) -> bool:
        return False


class LeavesCallsWithTheOld(Replacements):
    """Does not take along what waits for the worker before."""

    def take_over(self, successor: Worker) -> None:
        self.lifecycle.take_over(successor)


class EndsWhoServes(WorkerLifecycle):
    """Takes the failure of one that was to take over for that of the worker which serves."""

    def plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str, *, is_renewal: bool) -> None:
        super().plan_restart(self.workers[worker.backend], error, stderr_tail, is_renewal=is_renewal)


class ThinksThatTheLostAreDead(UnreachableWorkers):
    """Gives the memory of a call back while a worker may wake up and write to it."""

    def refuse(self, call: Call, worker: Worker, fault: LayerZeroError, *, is_final: bool) -> None:
        super().refuse(call, worker, fault, is_final=is_final)
        self.effects.actions = [
            replace(action, is_lent=False) if isinstance(action, act.Refuse) else action
            for action in self.effects.actions
        ]


class MovesCallsOfTheLost(UnreachableWorkers):
    """Gives a call, and its memory, to another worker, before the end of the first is confirmed."""

    def refuse(self, call: Call, worker: Worker, fault: LayerZeroError, *, is_final: bool) -> None:
        self.calls.attempt_failed(call, worker, BackendError(fault.message), phase="unreachable")


class ReleasesAtOnce(UnreachableWorkers):
    def on_worker_lost(self, event: ev.WorkerLost) -> None:
        super().on_worker_lost(event)
        self.on_worker_gone(ev.WorkerGone(event.backend, event.generation))


class NeverReleases(UnreachableWorkers):
    def on_worker_gone(self, event: ev.WorkerGone) -> None:
        pass


class WaitsForTheLost(UnreachableWorkers):
    """Their calls never end."""

    def on_worker_lost(self, event: ev.WorkerLost) -> None:
        pass


class CountsDepartures(WorkerExits):
    """Takes the end of a container for a fault of the worker in it."""

    def on_worker_exited(self, event: ev.WorkerExited) -> Worker | None:
        return super().on_worker_exited(replace(event, is_departure=False))


class ForgetsOffers(WorkerLifecycle):
    def take_offer(self, event: ev.BackendOffered) -> None:
        if event.vacancy is not None or self.workers[event.backend].state is WorkerState.ABSENT:
            super().take_offer(event)


OF_JOINED = (
    ThinksThatTheLostAreDead,
    MovesCallsOfTheLost,
    ReleasesAtOnce,
    NeverReleases,
    WaitsForTheLost,
    CountsDepartures,
    ForgetsOffers,
)
PLANTED = [
    thing
    for thing in list(globals().values())
    if isinstance(thing, type) and thing.__module__ == __name__ and thing.__base__ is not object
]
# Of bugs that show late: the schedule that showed it last is tried first. One that no longer does costs its time alone.
SHOWN_BY: dict[type, int] = {
    BlamesNobodyInTheGpu: 11,
    LosesBoundCalls: 11,
    TrustsRetirement: 12,
    BindsBeforeExit: 14,
    ReleasesAtOnce: 19,
    NeverReleases: 24,
    NeverRetires: 24,
    ForgetsQuarantine: 28,
    KillsForWaitingHeads: 29,
    BlamesWhoBeginsAnew: 37,
    ClosesPagesInUse: 37,
    RunsDoneCallsAgain: 39,
    BlamesHeadForLanes: 54,
    ForgivesDeathsOnLanes: 54,
    WaitsForLanesForEver: 54,
    GivesMemoryOfRingsBack: 80,
    IgnoresOverdueLanes: 87,
    CountsRenewals: 98,
    FallsBackWhileStopping: 113,
    TakesLeftCallsTwice: 232,
    LeavesStreamsOfThoseWhoLeft: 449,
    WaitsForRingsForEver: 693,
    WatchesNoLeases: 1553,
}


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda cls: cls.__name__)
def test_planted_bug_is_found(mutant: type) -> None:
    """A simulator that finds nothing may just not look."""
    (part,) = mutant.__bases__
    core = mutant if part is BrokerState else functools.partial(BrokerState, parts={part: mutant})
    run = joined.run if mutant in OF_JOINED else simulation.run
    for seed in (SHOWN_BY.get(mutant, 0), *range(FOUND_WITHIN)):
        try:
            run(seed, core)
        except Exception:  # a broken promise, or a core that trips over its own state
            return
    pytest.fail(f"{FOUND_WITHIN} schedules did not show it")
