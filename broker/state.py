"""The broker's core: `BrokerState.handle(event, now_s) -> [action]`. No I/O, no clock, no randomness of its own.

Invariants, checked by tests/unit/broker/test_simulation.py over thousands of seeded schedules:
every call ends in exactly one Answer or Refuse; a call runs on at most one worker at a time, and is given to another
only when the one before has answered or its exit is confirmed; the step that picks a worker reserves it. A call on a
GPU is answered when it is enqueued there, and once more when it had to run again; turns of a lane end in their order.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from layerzero.broker import events as ev
from layerzero.broker.bells import Bells
from layerzero.broker.compiling import Compiling, to_compile
from layerzero.broker.engine import Cell, Engine
from layerzero.broker.explain import explain
from layerzero.broker.leases import SETTLED_CALLS, Leases, Lost
from layerzero.broker.poison import MAX_DEATHS_PER_CALL, Quarantine
from layerzero.broker.records import Arena, Call, Client, Route, Worker
from layerzero.broker.rings import Rings
from layerzero.broker.selection import CallSpec, Signature, Verdict, no_backend
from layerzero.broker.shadow import ShadowLedger
from layerzero.broker.turns import STICKY_EXIT, OpenTurn, Turns
from layerzero.broker.worker_fsm import Signal, WorkerState, step
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.cuda_pair import SLOTS
from layerzero.ipc.errors import (
    NEVER,
    SAME,
    AdaptationRequired,
    BackendError,
    BrokerLost,
    Busy,
    CudaGraphUnsafe,
    DeadlineExceeded,
    EnvError,
    LayerZeroError,
    NoTransport,
    ProtocolError,
    RunInProcess,
)
from layerzero.ipc.lane import EXECUTING, mark
from layerzero.ipc.messages import Decision, encode

MAX_ARENAS = 4096  # of one client; ours keeps far fewer
MAX_ROUTES = 8192  # likewise
WATCH_S = 1.0  # after new times leases are looked at by then: another kernel may have become the better one
IN_PROCESS_LEASE_S = 1.0  # a client that runs a backend itself asks again after so long: policy may have changed
S = WorkerState


@dataclass(frozen=True)
class Limits:
    """The knobs of the core; settings.py declares their defaults, units and variables."""

    timeout_s: float
    start_timeout_s: float
    max_in_flight: int
    depth: int
    standby: int
    restart_budget: int
    restart_window_s: float
    backoff_s: float
    backoff_max_s: float
    poison_quarantine_s: float
    express: bool


class BrokerState:
    """`engine` knows what each usable backend claims. `unusable`: why the others cannot start."""

    def __init__(
        self,
        engine: Engine,
        unusable: Mapping[str, Rejection],
        limits: Limits,
        rng: random.Random,
    ) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self.limits = limits
        self.clients: dict[bytes, Client] = {}
        self.workers: dict[str, Worker] = {name: Worker(name) for name in engine.capabilities}
        self.unavailable: dict[str, Rejection] = dict(unusable)
        self.wakeup_s = math.inf  # the server sends a Tick at this time
        self.stale = 0  # answers that came too late to count
        self.stopping = False
        self._rng = rng
        self._signatures: dict[bytes, Signature] = {}
        self._plans: dict[tuple[bytes, str], int] = {}  # (signature, kernel) -> number used with workers
        self._quarantine = Quarantine(limits.poison_quarantine_s)
        self._by_identity: dict[bytes, Worker] = {}
        self._shadow = ShadowLedger()
        self.leases = Leases()
        self.turns = Turns()
        self._rings, self.bells = Rings(self), Bells(self)
        self.compiling = Compiling(self)
        self._slots = itertools.count(1)  # of starts of GPU workers
        self._leased_epoch = 0  # of the engine: what it decided then
        self._watch_at_s = math.inf
        self._health_at_s = math.inf  # when a kernel that failed may be tried again
        self._dispatch = itertools.count(1)
        self._plan_numbers = itertools.count(1)
        self._actions: list[ev.Action] = []
        self.now_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.ClientJoined: self._client_joined,
            ev.ClientLeft: self._client_left,
            ev.ArenaOffered: self._arena_offered,
            ev.GpuOffered: self._gpu_offered,
            ev.ArenaGivenUp: self._arena_given_up,
            ev.RouteDefined: self._route_defined,
            ev.RouteForgotten: self._route_forgotten,
            ev.CallArrived: self._call_arrived,
            ev.CallPoisoned: self._call_poisoned,
            ev.LaneOpened: self._lane_opened,
            ev.LaneOverdue: self._lane_overdue,
            ev.LaneSeen: self._lane_seen,
            ev.CallUnbound: self.bells.unbind,
            ev.BellsSeen: self.bells.see,
            ev.CallLeft: self._rings.take,
            ev.RingsSeen: self._rings.see,
            ev.TurnsReached: self._turns_reached,
            ev.TurnsSeen: self._turns_seen,
            ev.ProbeEnded: self._probe_ended,
            ev.CompileAsked: self.compiling.start_asked,
            ev.CompileEnded: self.compiling.end,
            ev.WorkerSpawned: self._worker_spawned,
            ev.SpawnFailed: self._spawn_failed,
            ev.WorkerReady: self._worker_ready,
            ev.CallRan: self._call_ran,
            ev.CallRaised: self._call_raised,
            ev.WorkerMisbehaved: self._worker_misbehaved,
            ev.WorkerExited: self._worker_exited,
            ev.BackendReset: self._backend_reset,
            ev.PolicyChanged: self._policy_changed,
            ev.RanInClient: self._ran_in_client,
            ev.ShadowCompared: self._shadow_compared,
            ev.TimesLoaded: self._times_loaded,
            ev.Tick: self._tick,
            ev.ShutdownAsked: self._shutdown_asked,
        }

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take one event; returns what must be done, in order."""
        self.now_s = now_s
        self._actions = []
        self._handlers[type(event)](event)
        if self.engine.epoch != self._leased_epoch:
            self._revoke_leases()
        return self._actions

    # --- clients -------------------------------------------------------------------------------------

    def _client_joined(self, event: ev.ClientJoined) -> None:
        self.clients[event.identity] = Client(event.identity, event.number)

    def _client_left(self, event: ev.ClientLeft) -> None:
        client = self.clients.pop(event.identity, None)
        if client is None:
            return
        client.has_left = True
        self._actions += self.leases.end_client(client)
        self._tell(self.turns.drop_held(client))  # nobody waits for what failed
        for worker in self.workers.values():
            gone = [call for call in worker.waiting if call.client is client]
            for call in gone:
                worker.waiting.remove(call)
                self.close(call)
        for call in self.compiling.take(client):
            self.close(call)
        self.bells.end_client(client)
        self._release_turns(client)
        self.finish_leaving(client)

    def finish_leaving(self, client: Client) -> None:
        """What is on its rings needs the plans of its routes."""
        if client.has_left and not self._has_rings(client):
            for route in list(client.routes.values()):
                self._drop_route(client, route)
            self._release_if_done(client)

    def _has_rings(self, client: Client) -> bool:
        """Whether something may be on rings of a client that has left."""
        return bool(self.leases.of(client))

    def _release_if_done(self, client: Client) -> None:
        """A client's memory is given back when it has left and no worker may write into it any more."""
        if client.has_left and client.open_calls == client.enqueued == 0 and not self._has_rings(client):
            for arena in list(client.arenas):
                self._release_arena(client, arena)
            for gpu in list(client.gpus):
                self._release_gpu(client, gpu)

    def _arena_offered(self, event: ev.ArenaOffered) -> None:
        client = self.clients[event.identity]
        if event.arena in client.arenas:
            self._drop_client(client, f"arena {event.arena} offered twice")
            return
        if len(client.arenas) >= MAX_ARENAS:
            self._drop_client(client, f"more than {MAX_ARENAS} arenas")
            return
        if event.gpu and event.gpu not in client.gpus:
            self._drop_client(client, f"arena {event.arena} is on {event.gpu}, which the client has not added")
            return
        client.arenas[event.arena] = Arena(event.nbytes, event.gpu)

    def _arena_given_up(self, event: ev.ArenaGivenUp) -> None:
        client = self.clients.get(event.identity)
        if client is None or event.arena not in client.arenas:
            return
        users = self._users(client, event.arena)
        if any(call.bell is None for call in users):  # the bell of a graph that is gone may be unbound a moment later
            self._drop_client(client, f"arena {event.arena} was retired with open calls that use it")
        elif users:
            client.retiring.add(event.arena)
        else:
            self._release_arena(client, event.arena)

    def _users(self, client: Client, arena: int) -> list[Call]:
        """Open calls that refer to it."""
        calls = self.compiling.calls()
        for w in self.workers.values():
            calls += [*w.running, *w.waiting, *w.enqueued.values(), *w.bells.values()]
        return [call for call in calls if call.client is client and arena in call.arenas]

    def _release_arena(self, client: Client, arena: int) -> None:
        key = (client.number, arena)
        del client.arenas[arena]
        client.retiring.discard(arena)
        for route in client.routes.values():
            route.checked.clear()
        for worker in self.workers.values():
            if key in worker.arenas:
                worker.arenas.discard(key)
                self.do(ev.TakeBackArena(worker.backend, worker.generation, *key))
        self.do(ev.CloseArena(*key))

    def _gpu_offered(self, event: ev.GpuOffered) -> None:
        """For the first time, or on another rung: then workers let go of what they had, and may reach the new one."""
        client = self.clients[event.identity]
        if event.gpu in client.gpus and event.has_new_page:
            if self.turns.of(client, event.gpu):
                self._drop_client(client, f"another order page for {event.gpu} while calls on the first are not done")
                return
            self.turns.forget(client, event.gpu)
        client.gpus.add(event.gpu)
        self._actions += self.leases.revoke([lane for lane in self.leases.of(client) if lane.gpu == event.gpu])
        self._take_back_gpu(client, event.gpu)

    def _take_back_gpu(self, client: Client, gpu: str) -> None:
        key = (client.number, gpu)
        for worker in self.workers.values():
            worker.deaf.pop(key, None)
            if key in worker.gpus:
                worker.gpus.discard(key)
                self.do(ev.TakeBackGpu(worker.backend, worker.generation, *key))

    def _release_gpu(self, client: Client, gpu: str) -> None:
        client.gpus.discard(gpu)
        self.turns.forget(client, gpu)
        self._take_back_gpu(client, gpu)
        self.do(ev.CloseGpu(client.number, gpu))

    def _drop_client(self, client: Client, detail: str) -> None:
        self.do(ev.DropClient(client.identity, detail))
        self.do(ev.Note("client.dropped", {"client": client.number, "detail": detail}))
        self._client_left(ev.ClientLeft(client.identity))

    # --- routes --------------------------------------------------------------------------------------

    def _route_defined(self, event: ev.RouteDefined) -> None:
        client = self.clients[event.identity]
        if event.route in client.routes or event.route in client.refused_routes:
            self._drop_client(client, f"route {event.route} defined twice")
            return
        if len(client.routes) + len(client.refused_routes) >= MAX_ROUTES:
            self._drop_client(client, f"more than {MAX_ROUTES} routes; forget some")
            return
        signature = self._signatures.get(event.body)
        if signature is None:
            try:
                spec = CallSpec.parse(event.body)
                missing = self.engine.missing(spec.device)
                if missing is not None:  # its calls shall hear of it, the client's others go on
                    client.refused_routes[event.route] = missing
                    return
                signature = self._sign(event.body, spec)
            except LayerZeroError as exc:
                self._drop_client(client, f"route {event.route}: {exc}")
                return
            self._signatures[event.body] = signature
        signature.users += 1
        client.routes[event.route] = Route(event.route, signature)

    def _route_forgotten(self, event: ev.RouteForgotten) -> None:
        client = self.clients[event.identity]
        client.refused_routes.pop(event.route, None)
        route = client.routes.get(event.route)
        if route is not None:
            self._drop_route(client, route)

    def _drop_route(self, client: Client, route: Route) -> None:
        del client.routes[route.number]
        self.leases.drop_route(client, route)
        self._release_signature(route.signature)

    def _release_signature(self, signature: Signature) -> None:
        """One route or open call less uses it; with the last one its plans go."""
        signature.users -= 1
        if signature.users:
            return
        del self._signatures[signature.key]
        for kernel_id, backend in signature.kernels:
            plan = self._plans.pop((signature.key, kernel_id), None)
            worker = self.workers.get(backend)
            if plan is not None and worker is not None and plan in worker.plans:
                worker.plans.discard(plan)
                self.do(ev.SendDrop(worker.identity, plan))

    def _sign(self, body: bytes, spec: CallSpec) -> Signature:
        context = self.engine.context(spec)
        return Signature(body, spec, context, self.engine.cell(context), self.engine.kernels(spec.op))

    def explain(self, body: bytes, now_s: float) -> tuple[CallSpec, tuple[Verdict, ...], list[dict[str, Any]]]:
        """What would be decided for a signature now; changes nothing. Raises LayerZeroError for a bad one."""
        spec = CallSpec.parse(body)
        return spec, *explain(self.engine, spec, self.unavailable, now_s)

    def order(self, signature: Signature) -> tuple[Verdict, ...]:
        """Accepted candidates, best first; kept until something that could change them does."""
        engine, cell = self.engine, signature.cell
        if signature.seen != (engine.epoch, cell.generation):
            if signature.seen[0] != engine.epoch:  # the policy may be another
                signature.context = engine.context(signature.spec)
            signature.ranked = engine.rank(signature.spec, signature.context, self.unavailable, self.now_s)
            signature.order = tuple(v for v in signature.ranked if v.is_accepted)
            signature.to_compile = to_compile(signature.ranked)
            signature.seen = (engine.epoch, cell.generation)
        return signature.order

    # --- calls ---------------------------------------------------------------------------------------

    def _call_arrived(self, event: ev.CallArrived) -> None:
        client = self.clients[event.identity]
        lost = client.lost.get(event.after_lane)
        if lost is not None and lost.has_taken(event.after_call):
            return
        call = self.admit(event)
        if call is None:
            return
        if lost is None:
            self.place(call)
        elif lost.is_ring:  # it was put when nobody would take it any more
            self.resume(call, lost, is_blamed=False)
        else:
            del client.lost[event.after_lane]
            self.resume(call, lost, is_blamed=lost.blames(event.after_lane, event.after_call))

    def admit(self, event: ev.CallArrived, *, is_bounded: bool = True) -> Call | None:
        """A call comes to the broker. None when it has ended in an error, or its client is dropped for it."""
        client = self.clients[event.identity]
        route = client.routes.get(event.route)
        if route is None:
            missing = client.refused_routes.get(event.route)
            if missing is not None:
                self.do(ev.Refuse(client.identity, event.seq, missing))
            else:
                self._drop_client(client, f"call on unknown route {event.route}")
            return None
        try:
            turn = self._begin_turn(client, route, event)
            if self.stopping:
                self._refuse_arrival(client, event.seq, turn, BrokerLost("the broker is shutting down"))
                return None
            if is_bounded and client.open_calls >= self.limits.max_in_flight:
                error = Busy(
                    f"{client.open_calls} calls are open; allowed: {self.limits.max_in_flight}", limit=client.open_calls
                )
                self._refuse_arrival(client, event.seq, turn, error)
                return None
            arenas = route.checked.get(event.body)
            if arenas is None:
                arenas = route.check(event.body, client.arenas)
        except ProtocolError as exc:
            self._drop_client(client, str(exc))
            return None
        refusal = self._quarantine.refusal(route.signature.key, event.digest, self.now_s)
        if refusal is not None:
            self._refuse_arrival(client, event.seq, turn, refusal)
            return None
        client.open_calls += 1
        route.signature.users += 1
        timeout_s = event.timeout_s or self.limits.timeout_s
        call = Call(client, route, event.seq, timeout_s, event.body, arenas, may_run_here=event.may_run_here)
        if turn is not None:
            call.turn, turn.call = turn, call
        if event.bell is not None:
            self.bells.begin(call, event.bell)
        if call.gpu:
            self._pass_by_the_deaf(call)
        return call

    def _refuse_arrival(self, client: Client, seq: int, turn: OpenTurn | None, error: LayerZeroError) -> None:
        """It never becomes a call."""
        refusal = ev.Refuse(client.identity, seq, error)
        if turn is None:
            self.do(refusal)
        else:
            self.turns.fail(turn, refusal)

    def resume(self, call: Call, lost: Lost, *, is_blamed: bool) -> None:
        """A call comes back from an express lane whose worker ended: its attempt there counts like any other."""
        worker = self.workers[lost.backend]
        if call.route.number not in lost.kernels:
            self.place(call)
            return
        call.kernel_id = lost.kernels[call.route.number]
        call.attempt = 1
        if is_blamed:
            call.deaths += lost.is_crash
            error, code = lost.error, lost.exit_code
            self.attempt_failed(call, worker, error, exit_code=code, phase=lost.phase, pid=lost.worker_pid)
        elif worker.state in (S.BACKOFF, S.DISABLED):
            self._requeue(call, worker, lost.exit_code, lost.worker_pid)
        else:  # the worker is back already
            self.place(call)

    def _call_poisoned(self, event: ev.CallPoisoned) -> None:
        route = self.clients[event.identity].routes.get(event.route)
        if route is not None:
            self._quarantine.add(route.signature.key, event.digest, self.now_s)
            self._revoke_leases()  # calls of this signature must show what they bring

    # --- turns on a GPU --------------------------------------------------------------------------------

    def _begin_turn(self, client: Client, route: Route, event: ev.CallArrived) -> OpenTurn | None:
        """None for a call on the CPU, or with a bell. Raises ProtocolError for a call without the turn or bell that its
        device asks for, or with a senseless one."""
        gpu = route.signature.spec.device
        places = (event.turn is not None) + (event.bell is not None)
        if places != bool(gpu):
            has = {0: "without a turn", 1: "with a turn or a bell", 2: "with a turn and a bell"}[places]
            raise ProtocolError(f"a call on {gpu or 'the CPU'} comes {has}")
        if not gpu:
            return None
        if gpu not in client.gpus:
            raise ProtocolError(f"a call on {gpu}, which the client has not added")
        if event.turn is None:
            assert event.bell is not None
            self.bells.check(client, gpu, event.bell)
            return None
        return self.turns.begin(client, gpu, event.turn)

    def _pass_by_the_deaf(self, call: Call) -> None:
        """The call goes past workers that its client's memory is known not to reach, and is not run by the client."""
        call.may_run_here = False
        if any(worker.deaf for worker in self.workers.values()):
            for verdict in self.order(call.route.signature):
                error = self.workers[verdict.backend].deaf.get((call.client.number, call.gpu))
                if error is not None:
                    call.tried.add(verdict.backend)
                    call.last_error = error

    def _tell(self, failed: list[OpenTurn]) -> None:
        """These turns have ended in errors, and their streams have come to them: their clients may know."""
        for turn in failed:
            refusal = turn.refusal
            assert refusal is not None
            if not turn.client.has_left:
                self.do(ev.FailTurn(turn.client.number, turn.gpu, turn.turn, refusal.error.code))
                self.do(refusal)
            if turn.call is not None:
                self.close(turn.call)

    def _turns_reached(self, event: ev.TurnsReached) -> None:
        self._tell(self.turns.reach(event.keys))

    def _release_turns(self, client: Client) -> None:
        """A client has left: nobody but the broker says that inputs are ready. One after the other: in a lane DONE of
        one says that all before are done."""
        if self._has_rings(client):
            return  # those come between; _rings sees them all
        for turn in list(self.turns.first()):
            if turn.client is client and turn.call is not None:
                self.do(ev.ReleaseTurn(client.number, turn.gpu, turn.turn))

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for the broker to look at order pages and rings."""
        return self.turns.is_awaited or self._rings.is_awaited or self.bells.is_awaited

    def _turns_seen(self, event: ev.TurnsSeen) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is None:
            return
        for dispatch in event.done:
            call = worker.enqueued.pop(dispatch, None) or self._take_unanswered(worker, dispatch)
            self._note_success(worker, call)
            self.close(call)
        for dispatch in event.ready:
            begun = worker.enqueued.get(dispatch)
            if begun is not None and begun.turn is not None and not begun.turn.has_begun:
                begun.turn.began_s = self.now_s
                self.wakeup_s = min(self.wakeup_s, begun.turn.due_s)
        for turn in list(self.turns.first()):
            client = turn.client
            is_ready = turn.call is None or turn.call.dispatch in event.ready
            if turn.worker is worker and client.has_left and not is_ready and not self._has_rings(client):
                # It is this one's turn; or a stream of the client's has overwritten the word.
                self.do(ev.ReleaseTurn(client.number, turn.gpu, turn.turn))

    def _take_unanswered(self, worker: Worker, dispatch: int) -> Call:
        """The worker has ended before it could answer, and the GPU was done: the client's stream has gone on."""
        call = next(call for call in worker.running if call.dispatch == dispatch)
        if worker.fault is not None and not worker.fault_call and worker.late is None and call is worker.running[0]:
            worker.late = call  # it was killed for this one, and is not for the next
        worker.running.remove(call)
        client = call.client
        if not client.has_left:
            decision = self._decision(call, worker)
            self.do(ev.Answer(client.identity, call.seq, decision, call.attempt, 0, b"", call.attempts))
        return call

    def _enqueue(self, call: Call, worker: Worker, turn: OpenTurn) -> None:
        """The worker has answered: the call's client goes on, the call stays until the GPU is done with it."""
        worker.enqueued[call.dispatch] = call
        turn.worker, turn.began_s = worker, math.inf
        call.client.open_calls -= 1
        call.client.enqueued += 1
        call.is_enqueued = call.was_answered = True

    def _take_enqueued(self, worker: Worker) -> list[Call]:
        """The worker is dead: these are to run again, or to end."""
        calls = list(worker.enqueued.values())
        worker.enqueued.clear()
        for call in calls:
            assert call.turn is not None
            call.turn.worker = None
            call.client.open_calls += 1
            call.client.enqueued -= 1
            call.is_enqueued = False
        return calls + self.bells.take_all(worker)

    def _end_late_turns(self) -> None:
        for worker in self.workers.values():
            for call in worker.enqueued.values():
                if worker.fault is not None:
                    break
                if call.turn is None or not call.turn.has_begun:
                    continue
                if self.now_s >= call.turn.due_s:
                    worker.late = call
                    self.fault(worker, self.too_long(call.kernel_id, worker, call.timeout_s))
                else:
                    self.wakeup_s = min(self.wakeup_s, call.turn.due_s)

    # --- express lanes ---------------------------------------------------------------------------------

    def _settle(self, call: Call, worker: Worker) -> None:
        """Lend a lane to a route that one worker serves well, and would serve again."""
        route, signature = call.route, call.route.signature
        is_known = call.client.routes.get(route.number) is route  # it may have been forgotten meanwhile
        if route.is_leased or not is_known or not self.limits.express:
            return
        server = (call.kernel_id, worker.generation)
        if route.settled_on != server:
            route.settled_on, route.settled = server, 0
        route.settled += 1
        if route.settled >= SETTLED_CALLS and worker.state is S.READY and not self.stopping:
            if self.engine.epoch != self._leased_epoch:
                self._revoke_leases()
            if self._is_settled(signature, call.kernel_id):
                plan = self._plans[signature.key, call.kernel_id]
                self._actions += self.leases.grant(call.client, route, worker, plan, call.kernel_id)

    def _is_settled(self, signature: Signature, kernel_id: str) -> bool:
        """The next call of this signature would go to the same kernel, without a look at it."""
        best = next(iter(self.order(signature)), None)
        return (
            best is not None
            and best.kernel_id == kernel_id
            and not (best.transforms or best.is_on_trial or best.is_last_resort or best.may_run_here)
            and not self._quarantine.asks_for_digests(signature.key)
            and self.engine.policy.tune_budget == 0
            and self.engine.policy_for(signature.spec).shadow_rate == 0
        )

    def _revoke_leases(self) -> None:
        self._leased_epoch = self.engine.epoch
        self._actions += self.leases.revoke()

    def _watch_leases(self) -> None:
        """Those whose calls would be decided in another way by now, for the times of others, end."""
        stale = [
            lane
            for lane in self.leases.lanes.values()
            if any(not self._is_settled(r.signature, lane.kernels[r.number]) for r in lane.routes.values())
        ]
        self._actions += self.leases.revoke(stale)
        self._watch_at_s = math.inf

    def _note_time(self, kernel_id: str, cell: Cell, kernel_ns: int, *, is_clean: bool) -> None:
        self.engine.note_time(kernel_id, cell, kernel_ns, self.now_s, is_clean=is_clean)
        if self.leases and self._watch_at_s == math.inf:  # an idle broker has nothing to watch
            self._watch_at_s = self.now_s + WATCH_S
            self.wakeup_s = min(self.wakeup_s, self._watch_at_s)

    def _lane_opened(self, event: ev.LaneOpened) -> None:
        client = self.clients[event.identity]
        try:
            self._actions += self.leases.open(client, event.lane, event.gpu)
        except ProtocolError as exc:
            self.do(ev.EndLane(event.lane))  # what came with the message is not the lane's page
            self._drop_client(client, str(exc))

    def _lane_overdue(self, event: ev.LaneOverdue) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is not None and lane.client.identity == event.identity:
            name = lane.kernels.get(event.route, f"a call of {lane.worker.backend}")
            error = self.too_long(name, lane.worker, event.timeout_s)
            self.fault(
                lane.worker,
                ProtocolError(event.nonsense) if event.nonsense else error,
                mark(lane.number, event.call),
            )

    def _lane_seen(self, event: ev.LaneSeen) -> None:
        lane = self.leases.lanes.get(event.lane)
        if lane is None:
            return
        lane.worker.answered += event.calls
        route = lane.route_of(event.plan)
        if route is not None:
            kernel_id, cell = lane.kernels[route.number], route.signature.cell
            self._note_time(kernel_id, cell, event.kernel_ns, is_clean=True)

    def place(self, call: Call) -> None:
        """Give the call to the best candidate it has not tried, or to one that is restarting, or end it."""
        order = self.order(call.route.signature)
        if call.route.signature.to_compile:
            self.compiling.start(call.route.signature.spec, call.route.signature.to_compile)
        if call.attempts:  # a fallback is in a hurry: those that are warm first
            order = tuple(sorted(order, key=lambda v: self.workers[v.backend].state is not S.READY))
        verdict = self._pick(call, order)
        if verdict is not None:
            if self._sends_back(verdict, call):
                return
            call.kernel_id = verdict.kernel_id
            worker = self.workers[verdict.backend]
            if worker.state is S.READY and len(worker.running) < self.limits.depth:
                self._send(worker, call)
            else:
                worker.waiting.append(call)
                self.need(worker)
            if call.attempt <= 1 and not call.route.signature.spec.pinned:
                after = order.index(verdict) + 1
                for spare in order[after : after + self.limits.standby]:
                    self.need(self.workers[spare.backend])
            return
        awaited = self._awaited(call)
        if awaited is None:
            if not self.compiling.hold(call):
                self._end_unserved(call)
        elif not self._sends_back(awaited, call):
            call.kernel_id = awaited.kernel_id
            self.workers[awaited.backend].waiting.append(call)

    def _pick(self, call: Call, order: tuple[Verdict, ...]) -> Verdict | None:
        """The best one not tried yet. One whose breaker is half open takes a single call; for others it comes last."""
        last: Verdict | None = None
        for verdict in order:
            if verdict.backend in call.tried or (verdict.transforms and call.was_answered):
                continue  # the latter: its client has gone on, and makes no copies any more
            if verdict.transforms or not verdict.is_on_trial:  # a call that is sent back for copies tries nothing
                return verdict
            spec = call.route.signature.spec
            if self.engine.reserve_trial(verdict.backend, spec.op, self.now_s, spec.device):
                return verdict
            last = last or verdict
        return last

    def _sends_back(self, verdict: Verdict, call: Call) -> bool:
        """Ends the call when its client must do the next step: change the inputs, or run the kernel itself."""
        kernel = verdict.kernel
        in_doubt = verdict.is_on_trial or verdict.is_last_resort  # it has failed of late: not near the caller
        if verdict.transforms:
            error: LayerZeroError = AdaptationRequired(
                f"{verdict.kernel_id} needs {', '.join(verdict.transforms)}", transforms=list(verdict.transforms)
            )
        elif verdict.may_run_here and call.may_run_here and not call.attempts and kernel is not None and not in_doubt:
            error = RunInProcess(
                f"policy wants {verdict.backend} in the caller's process",
                backend=verdict.backend,
                kernel_id=verdict.kernel_id,
                copies_inputs=kernel.copies_inputs,
                copies_outputs=kernel.copies_outputs,
                lease_s=IN_PROCESS_LEASE_S,
            )
        else:
            return False
        self._end_in_error(call, error)
        return True

    def _awaited(self, call: Call) -> Verdict | None:
        """The best candidate that nothing but a restart keeps from the call, and that will be back in time for it."""
        for verdict in call.route.signature.ranked:
            is_down = [reason.code for reason in verdict.reasons] == [Reason.BACKEND_RESTARTING]
            if verdict.transforms and call.was_answered:
                continue
            if is_down and verdict.backend not in call.tried and self._is_back_in_time(verdict.backend, call):
                return verdict
        return None

    def can_place(self, call: Call) -> bool:
        """Somebody serves it, now or after a restart."""
        return self._has_other(call) or self._awaited(call) is not None

    def _has_other(self, call: Call) -> bool:
        return any(verdict.backend not in call.tried for verdict in self.order(call.route.signature))

    def _is_back_in_time(self, backend: str, call: Call) -> bool:
        """Its back-off, if it is in one, ends within the call's timeout; loading has a timeout of its own."""
        worker = self.workers[backend]
        return worker.state is not S.BACKOFF or worker.retry_at_s <= self.now_s + call.timeout_s

    def need(self, worker: Worker) -> None:
        if worker.state is S.ABSENT:
            self._signal(worker, Signal.NEEDED)
            self.do(ev.Probe(worker.backend))

    def _send(self, worker: Worker, call: Call) -> None:
        signature = call.route.signature
        plan_key = (signature.key, call.kernel_id)
        plan = self._plans.get(plan_key)
        if plan is None:
            plan = self._plans[plan_key] = next(self._plan_numbers)
        if plan not in worker.plans:
            worker.plans.add(plan)
            is_graph_safe = self.engine.kernel(call.kernel_id).is_cuda_graph_safe
            body = signature.spec.prepare(call.kernel_id, is_graph_safe=is_graph_safe)
            self.do(ev.SendPrepare(worker.identity, plan, body))
        number = call.client.number
        gpu = signature.spec.device
        if gpu and (number, gpu) not in worker.gpus:
            worker.gpus.add((number, gpu))
            self.do(ev.LendGpu(worker.backend, worker.generation, number, gpu, worker.slot))
        for arena in call.arenas:
            key = (number, arena)
            if key not in worker.arenas:
                worker.arenas.add(key)
                self.do(ev.LendArena(worker.backend, worker.generation, number, arena))
        call.attempt += 1
        call.dispatch = next(self._dispatch)
        worker.running.append(call)
        if len(worker.running) == 1:
            self._start_clock(worker)
        turn = call.turn.turn if call.turn is not None else None
        self.do(ev.Run(worker.identity, plan, call.dispatch, call.attempt, number, call.body, turn, call.bell))

    def plan_of(self, call: Call) -> int:
        """Of a call that a worker has."""
        return self._plans[call.route.signature.key, call.kernel_id]

    def _start_clock(self, worker: Worker) -> None:
        worker.head_since_s = self.now_s
        self.wakeup_s = min(self.wakeup_s, worker.head_deadline_s)

    def _take_head(self, worker: Worker) -> Call:
        """The oldest running call is over; the next one starts, and a waiting one is sent."""
        call = worker.running.popleft()
        if worker.waiting and worker.state is S.READY:
            self._send(worker, worker.waiting.popleft())
        if worker.running:
            self._start_clock(worker)
        return call

    def close(self, call: Call) -> None:
        """The call is over for the broker: its client has its answer or has left, and no worker has it."""
        if call.is_enqueued:
            call.client.enqueued -= 1
        else:
            call.client.open_calls -= 1
        self._release_signature(call.route.signature)
        if call.turn is not None:
            self.turns.end(call.turn)
        self.bells.end(call)
        for arena in call.client.retiring.intersection(call.arenas):
            if not self._users(call.client, arena):
                self._release_arena(call.client, arena)
        self._release_if_done(call.client)

    def answering(self, identity: bytes) -> Worker | None:
        """The worker that a message is from, unless it has ended or is being killed."""
        worker = self._by_identity.get(identity)
        return None if worker is None or worker.fault is not None else worker

    def _answers_head(self, identity: bytes, dispatch: int, attempt: int) -> Worker | None:
        """The worker whose oldest running call this answers. Late answers of a killed one are counted, not used."""
        worker = self.answering(identity)
        if worker is None:
            self.stale += 1
            return None
        head = worker.running[0] if worker.running else None
        if head is None or head.dispatch != dispatch or head.attempt != attempt:
            self.fault(worker, ProtocolError(f"answered dispatch {dispatch}.{attempt}, which is not the one it runs"))
            return None
        return worker

    def _call_ran(self, event: ev.CallRan) -> None:
        worker = self._answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call = self._take_head(worker)
        worker.answered += 1
        signature, turn = call.route.signature, call.turn
        if event.kernel_ns or not call.gpu:  # of a GPU, 0 is no new sample
            self._note_time(call.kernel_id, signature.cell, event.kernel_ns, is_clean=not call.attempts)
        if turn is None:
            self._note_success(worker, call)
        client = call.client
        if not call.is_unwanted:
            decision = self._decision(call, worker)
            if call.bell is None:
                self._settle(call, worker)
            answer = ev.Answer(client.identity, call.seq, decision, call.attempt, event.kernel_ns, event.body)
            answer.attempts, answer.is_replayed = call.attempts, event.is_replayed
            self.do(answer)
        if turn is not None:
            self._enqueue(call, worker, turn)
        elif call.bell is not None and not call.is_unbound:
            self.bells.bind(call, worker)
            if client.has_left:
                self.bells.end_client(client)
        else:
            self.close(call)

    def _note_success(self, worker: Worker, call: Call) -> None:
        spec = call.route.signature.spec
        self.engine.note_success(worker.backend, spec.op, self.now_s, spec.device)

    def _decision(self, call: Call, worker: Worker) -> int:
        """Number of the decision that this answer follows; sent to the client when it is a new one."""
        route, signature = call.route, call.route.signature
        decided_for = (call.kernel_id, worker.generation, signature.seen[0])
        if route.decided_for != decided_for:
            route.decided_for = decided_for
            route.decision = call.client.next_decision
            call.client.next_decision += 1
            kernel = self.engine.kernel(call.kernel_id)
            body = encode(
                Decision(
                    kernel_id=call.kernel_id,
                    backend=worker.backend,
                    worker_pid=worker.pid,
                    copies_inputs=kernel.copies_inputs,
                    copies_outputs=kernel.copies_outputs,
                    candidates=[v.to_wire() for v in signature.ranked],
                    shadow_rate=self.engine.policy_for(signature.spec).shadow_rate,
                    offers_samples=self.engine.policy.tune_budget > 0,
                    slot=worker.slot if signature.spec.device else 0,
                )
            )
            self.do(ev.SendDecision(call.client.identity, route.number, route.decision, body))
        return route.decision

    def _call_raised(self, event: ev.CallRaised) -> None:
        worker = self._answers_head(event.identity, event.dispatch, event.attempt)
        if worker is None:
            return
        call, error = self._take_head(worker), event.error
        if error.code == CudaGraphUnsafe.code and call.bell is None:  # nobody asked
            error = BackendError(f"{error.code}: {error.message}")
        self.attempt_failed(call, worker, error)

    def attempt_failed(
        self,
        call: Call,
        worker: Worker,
        error: LayerZeroError,
        *,
        exit_code: int | None = None,
        phase: str = "",
        pid: int | None = None,
    ) -> None:
        """An attempt is over for good (the worker has answered, or is dead): try the next kernel, or end the call."""
        if call.is_unwanted:
            self.close(call)
            return
        cannot_bind = error.code == CudaGraphUnsafe.code  # by this kernel; it is well, and another may
        if error.retry in (NEVER, SAME) and exit_code is None and not cannot_bind:
            self.refuse(call, error)
            return
        call.attempts.append(
            {
                "backend": worker.backend,
                "kernel_id": call.kernel_id,
                "worker_pid": worker.pid if pid is None else pid,
                "code": error.code,
                "detail": error.message,
                "exit_signal": -exit_code if exit_code is not None and exit_code < 0 else None,
                "exit_code": exit_code if exit_code is not None and exit_code >= 0 else None,
                "phase": phase,
            }
        )
        worker.failed += 1
        spec = call.route.signature.spec
        if spec.device and error.code == NoTransport.code:  # its kernels are well
            worker.deaf[call.client.number, spec.device] = error
        elif (
            phase != "queued" and not cannot_bind and error.code != DeadlineExceeded.code
        ):  # a short timeout_s is the caller's doing
            self.engine.note_failure(worker.backend, spec.op, error, self.now_s, spec.device)
            self._wake_for_health()
        call.last_error = error
        call.tried.add(worker.backend)
        if call.deaths >= MAX_DEATHS_PER_CALL:
            self.refuse(call, self._quarantine.verdict(call.deaths))
        elif spec.pinned:
            self.refuse(call, error)
        elif self.stopping:
            self._end_for_shutdown(call)
        else:
            self.place(call)

    def _wake_for_health(self) -> None:
        self._health_at_s = self.engine.health.next_change_s(self.now_s)
        self.wakeup_s = min(self.wakeup_s, self._health_at_s)

    def _end_unserved(self, call: Call) -> None:
        spec = call.route.signature.spec
        if call.last_error is not None:
            tried = ", ".join(f"{a['kernel_id']} ({a['code']})" for a in call.attempts)
            codes = {a["code"] for a in call.attempts} | {call.last_error.code}
            cls: type[LayerZeroError] = BackendError
            if NoTransport.code in codes:  # its client can offer its memory in another way
                cls = NoTransport
            elif CudaGraphUnsafe.code in codes:
                cls = CudaGraphUnsafe
            elif call.last_error.code == DeadlineExceeded.code:
                cls = DeadlineExceeded
            what = f"no kernel is left; tried {tried}" if tried else "no kernel is within reach"
            error: LayerZeroError = cls(f"{spec.op}: {what}: {call.last_error.message}")
            error.facts = dict(call.last_error.facts)
        else:
            error = no_backend(spec, call.route.signature.ranked, self.capabilities)
        self.refuse(call, error)

    def refuse(self, call: Call, error: LayerZeroError) -> None:
        facts = {"op": call.route.signature.spec.op, "code": error.code, "detail": error.message}
        self.do(ev.Note("call.failed", {**facts, "attempts": call.attempts, "client": call.client.number}))
        self._end_in_error(call, error)

    def _end_in_error(self, call: Call, error: LayerZeroError) -> None:
        """One on a GPU ends when its client's stream has come to it."""
        candidates = [v.to_wire() for v in call.route.signature.ranked]
        refusal = ev.Refuse(call.client.identity, call.seq, error, call.attempts, candidates)
        if call.turn is None:
            self.do(refusal)
            self.close(call)
        else:
            self.turns.fail(call.turn, refusal)

    # --- workers -------------------------------------------------------------------------------------

    def _signal(self, worker: Worker, signal: Signal) -> None:
        worker.state = step(worker.state, signal)

    def _set_unavailable(self, backend: str, reason: Rejection | None) -> None:
        if reason is None:
            self.unavailable.pop(backend, None)
        else:
            self.unavailable[backend] = reason
        self.engine.epoch += 1

    def _probe_ended(self, event: ev.ProbeEnded) -> None:
        worker = self.workers[event.backend]
        if event.record is not None:
            self.engine.set_certification(self.engine.certification.with_record(event.record))
        if worker.state is not S.PROBING:
            return
        if event.error is None:
            self._signal(worker, Signal.PROBE_PASSED)
            self._spawn(worker)
            self._place_uncertified(worker)
        else:
            self._signal(worker, Signal.PROBE_FAILED)
            self._disable(worker, event.error, Reason.BACKEND_IMPORT_FAILED)

    def _shadow_compared(self, event: ev.ShadowCompared) -> None:
        subject = event.comparison.subject
        evidence = self._shadow.note(event.comparison)
        if evidence is not None:
            self.engine.set_certification(self.engine.certification.with_quarantine(subject, evidence))
            self.do(ev.Note("kernel.quarantined", {**subject._asdict(), "evidence": evidence}))

    def _times_loaded(self, event: ev.TimesLoaded) -> None:
        self.engine.load_times(event.rows)

    def _place_uncertified(self, worker: Worker) -> None:
        """Calls that wait for a kernel which the probe did not certify for them go to another."""
        waiting = list(worker.waiting)
        worker.waiting.clear()
        for call in waiting:
            if any(verdict.kernel_id == call.kernel_id for verdict in self.order(call.route.signature)):
                worker.waiting.append(call)
            else:
                self.place(call)

    def _spawn(self, worker: Worker) -> None:
        worker.generation += 1
        worker.started_s = self.now_s
        worker.was_ready = False
        worker.fault = worker.late = None
        worker.pid = 0
        if self.capabilities[worker.backend].platform == "cuda":
            worker.slot = next(self._slots)
            if worker.slot >= SLOTS:
                self._signal(worker, Signal.SPAWN_FAILED)
                text = f"this broker has started {SLOTS} workers for GPUs; offers of memory have no room for more signs"
                self._disable(worker, BackendError(text, repair="lz down"), Reason.BACKEND_DISABLED)
                return
        self.wakeup_s = min(self.wakeup_s, self.now_s + self.limits.start_timeout_s)
        self.do(ev.Spawn(worker.backend, worker.generation))

    def _worker_spawned(self, event: ev.WorkerSpawned) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is not None:
            worker.pid = event.pid

    def _spawn_failed(self, event: ev.SpawnFailed) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is None:
            return
        if worker.state is S.STOPPING:
            self._signal(worker, Signal.EXITED)
            self._stop_if_idle()
            return
        self._signal(worker, Signal.SPAWN_FAILED)
        self._disable(worker, event.error, Reason.BACKEND_IMPORT_FAILED)

    def _worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is None or worker.state is not S.STARTING:
            return
        self._signal(worker, Signal.LOADED)
        worker.identity = event.identity
        worker.versions = dict(event.versions)
        self.engine.note_versions(worker.backend, worker.versions)
        worker.was_ready = worker.has_served = True
        self._by_identity[event.identity] = worker
        self._set_unavailable(worker.backend, None)
        self.do(
            ev.Note(
                "worker.ready",
                {"backend": worker.backend, "pid": worker.pid, "start_s": round(self.now_s - worker.started_s, 3)},
            )
        )
        while worker.waiting and len(worker.running) < self.limits.depth:
            self._send(worker, worker.waiting.popleft())

    def _worker_misbehaved(self, event: ev.WorkerMisbehaved) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is not None:
            self.fault(worker, ProtocolError(event.detail))

    def fault(self, worker: Worker, error: LayerZeroError, call: int = 0) -> None:
        """Kill a worker that is alive but wrong. Its calls move on when its exit is confirmed, not before. `call`: as
        Worker.fault_call."""
        if worker.state in (S.STARTING, S.READY, S.STOPPING) and worker.fault is None:
            self._signal(worker, Signal.FAULT)
            worker.fault, worker.fault_call = error, call
            self._set_unavailable(
                worker.backend, Rejection(Reason.BACKEND_RESTARTING, f"being killed: {error.message}")
            )
            self.do(ev.Kill(worker.backend, worker.generation))

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        worker = self._current(event.backend, event.generation)
        if worker is None or worker.state in (S.STOPPED, S.BACKOFF, S.DISABLED, S.ABSENT):
            return
        was_stopping = worker.state is S.STOPPING
        self._signal(worker, Signal.EXITED)
        self._by_identity.pop(worker.identity, None)
        worker.identity = b""
        worker.arenas.clear()
        worker.plans.clear()
        worker.gpus.clear()
        worker.deaf.clear()
        worker.lane_call = 0
        how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"exit code {event.exit_code}"
        died = BackendError(
            f"the {worker.backend} worker died ({how})",
            backend=worker.backend,
            exit_code=event.exit_code,
            phase=event.phase,
            stderr_tail=event.stderr_tail,
        )
        error = worker.fault or died
        facts = {
            "backend": worker.backend,
            "pid": worker.pid,
            "exit": how,
            "cause": "it was told to stop" if was_stopping and event.exit_code == 0 else error.message,
            "phase": event.phase,
        }
        self.do(ev.Note("worker.exited", {**facts, "stderr_tail": event.stderr_tail}))
        lanes, stranded = self.leases.lanes_to(worker), self._rings.stranded(worker, event)
        self._actions += self.leases.end_worker(
            worker,
            error,
            event,
            event.executing if worker.fault is None else worker.fault_call,
            is_crash=worker.fault is None,
        )
        on_ring = self._rings.named(worker, stranded, event)
        in_gpu = self._in_gpu(worker, event) if on_ring is None else None
        if on_ring is None and in_gpu is None and worker.fault is None and not _died_in_running(worker, event):
            on_ring = next((one for one in stranded if one.is_ready), None)
            in_gpu = self.bells.in_gpu(worker) if on_ring is None else None
        enqueued, running, waiting = self._take_enqueued(worker), list(worker.running), list(worker.waiting)
        worker.running.clear()
        worker.waiting.clear()
        if was_stopping:
            for call in (*enqueued, *running, *waiting):
                self._end_for_shutdown(call)
        else:
            self._plan_restart(worker, error, event.stderr_tail)
            self._move_enqueued(worker, enqueued, in_gpu, error, event)
            if in_gpu is not None or on_ring is not None:  # nobody else is to blame
                event = replace(event, executing=0)
            self._move_calls(worker, running, waiting, error, event)
        self._rings.come_back(stranded, on_ring)
        for lane in lanes:
            self.finish_leaving(lane.client)
        if was_stopping:
            self._stop_if_idle()

    def _move_calls(
        self, worker: Worker, running: list[Call], waiting: list[Call], error: LayerZeroError, event: ev.WorkerExited
    ) -> None:
        """The one it was killed for or died in is blamed; those behind it only lost their place."""
        is_open = worker.fault is not None and not worker.fault_call and worker.late is None  # whom it is killed for
        for position, call in enumerate(running):
            is_first = position == 0 and is_open
            is_blamed = is_first if worker.fault is not None else call.dispatch == event.executing
            if is_blamed:
                call.deaths += worker.fault is None
                self.attempt_failed(call, worker, error, exit_code=event.exit_code, phase=event.phase)
            else:
                self._requeue(call, worker, event.exit_code, worker.pid)
        for call in waiting:
            self._requeue(call, worker, event.exit_code, worker.pid)

    def _in_gpu(self, worker: Worker, event: ev.WorkerExited) -> Call | None:
        """The enqueued call to blame for the worker's end: what it was killed for, or what the GPU was in, unless its
        CPU died in another one. Which of several lanes it was in nobody can tell; then it is the oldest."""
        if worker.fault is not None:
            return worker.late
        if _died_in_running(worker, event):
            return None
        begun = (c for c in worker.enqueued.values() if c.turn is not None and c.turn.has_begun)
        return next(begun, None)

    def _move_enqueued(
        self, worker: Worker, calls: list[Call], blamed: Call | None, error: LayerZeroError, event: ev.WorkerExited
    ) -> None:
        for call in calls:
            if call is blamed:
                call.deaths += worker.fault is None
                self.attempt_failed(call, worker, error, exit_code=event.exit_code, phase="executing")
            else:
                self._requeue(call, worker, event.exit_code, worker.pid)

    def _requeue(self, call: Call, worker: Worker, exit_code: int, pid: int) -> None:
        """On to another candidate, or, if there is none, the call stays for the restart, should it be soon enough."""
        may_wait = worker.state is S.BACKOFF and not call.is_unwanted
        if may_wait and self._is_back_in_time(worker.backend, call) and not self._has_other(call):
            worker.waiting.append(call)
            return
        if worker.state is S.DISABLED:
            lost = _disabled(worker)
        else:
            lost = BackendError(f"the {worker.backend} worker died while the call was queued", backend=worker.backend)
        self.attempt_failed(call, worker, lost, exit_code=exit_code, phase="queued", pid=pid)

    def _plan_restart(self, worker: Worker, error: LayerZeroError, stderr_tail: str) -> None:
        limits = self.limits
        worker.cause = error
        is_crash = worker.fault is None or worker.fault.code != DeadlineExceeded.code
        if is_crash:
            worker.deaths_s.append(self.now_s)
        while worker.deaths_s and worker.deaths_s[0] < self.now_s - limits.restart_window_s:
            worker.deaths_s.popleft()
        if not worker.has_served:
            self._signal(worker, Signal.GIVEN_UP)
            cause = EnvError(
                f"the {worker.backend} worker never became ready: {error.message}"
                + (f"; its last words: {stderr_tail.strip().splitlines()[-1][:300]}" if stderr_tail.strip() else ""),
                env=worker.backend,
                cause=error.message,
                repair=f"lz env probe {worker.backend}",
            )
            self._disable(worker, cause, Reason.BACKEND_IMPORT_FAILED)
        elif len(worker.deaths_s) > limits.restart_budget:
            self._signal(worker, Signal.GIVEN_UP)
            text = f"died {len(worker.deaths_s)} times in {limits.restart_window_s:g} s; the last time: {error.message}"
            self._disable(worker, BackendError(text, repair=f"lz restart {worker.backend}"), Reason.BACKEND_DISABLED)
        else:
            exponent = max(len(worker.deaths_s) - 1, 0)
            delay_s = min(limits.backoff_s * 2**exponent, limits.backoff_max_s) * self._rng.uniform(0.75, 1.25)
            worker.retry_at_s = self.now_s + delay_s
            worker.restarts += 1
            self.wakeup_s = min(self.wakeup_s, worker.retry_at_s)
            detail = f"{error.message}; restarts in {delay_s:.1f} s"
            self._set_unavailable(worker.backend, Rejection(Reason.BACKEND_RESTARTING, detail))

    def _disable(self, worker: Worker, cause: LayerZeroError, reason: Reason) -> None:
        worker.cause = cause
        repair = _repair(worker.backend, cause)
        self._set_unavailable(worker.backend, Rejection(reason, f"{cause.message}; repair: {repair}"))
        self.do(ev.Note("backend.disabled", {"backend": worker.backend, "cause": cause.message, "repair": repair}))
        waiting = list(worker.waiting)
        worker.waiting.clear()
        for call in waiting:
            self.attempt_failed(call, worker, _disabled(worker))

    def _backend_reset(self, event: ev.BackendReset) -> None:
        worker = self.workers.get(event.backend)
        if worker is None:
            return
        self.engine.forgive(worker.backend)
        self._shadow.forget(self.capabilities[worker.backend].kernel_ids)
        if worker.state in (S.DISABLED, S.BACKOFF, S.ABSENT):
            self._signal(worker, Signal.RESET)
            worker.cause = None
            worker.deaths_s.clear()
            missing = Rejection(Reason.NOT_INSTALLED, event.missing) if event.missing else None
            self._set_unavailable(worker.backend, missing)
            if worker.waiting:
                self.need(worker)

    def _policy_changed(self, event: ev.PolicyChanged) -> None:
        """Calls that are placed stay where they are; those that come next are ranked anew."""
        self.engine.set_policy(event.policy)
        self.do(ev.Note("policy.changed", {"hash": event.policy.hash}))

    def _ran_in_client(self, event: ev.RanInClient) -> None:
        """A kernel ran in the client's own process, or failed there."""
        client = self.clients[event.identity]
        route = client.routes.get(event.route)
        if route is None:
            self._drop_client(client, f"a run on unknown route {event.route}")
            return
        signature = route.signature
        backend = dict(signature.kernels).get(event.kernel_id)
        if backend is None:
            self._drop_client(client, f"a run of {event.kernel_id!r:.80}, which does not serve route {event.route}")
            return
        if event.error is not None:
            facts = {"backend": backend, "kernel_id": event.kernel_id, "cause": event.error.message}
            self.do(ev.Note("client.kernel_failed", {**facts, "client": client.number}))
            return  # its libraries are the client's own; other clients and the workers are not concerned
        self._note_time(event.kernel_id, signature.cell, event.kernel_ns, is_clean=True)

    def _current(self, backend: str, generation: int) -> Worker | None:
        worker = self.workers[backend]
        return worker if worker.generation == generation else None

    # --- time and the end ------------------------------------------------------------------------------

    def _tick(self, event: ev.Tick) -> None:
        now_s, limits = self.now_s, self.limits
        if now_s >= self._health_at_s:
            self.engine.epoch += 1
            self._health_at_s = self.engine.health.next_change_s(now_s)
        if now_s >= self._watch_at_s:
            self._watch_leases()
        self.wakeup_s = min(self._health_at_s, self._watch_at_s)
        self._end_late_turns()
        self.compiling.end_overdue()
        for worker in self.workers.values():
            if worker.state in (S.READY, S.STOPPING) and worker.running and worker.fault is None:
                if now_s >= worker.head_deadline_s:
                    self._end_what_takes_too_long(worker, event.executing.get((worker.backend, worker.generation), 0))
                if worker.fault is None:
                    self.wakeup_s = min(self.wakeup_s, worker.head_deadline_s)
            elif worker.state is S.STARTING:
                due_s = worker.started_s + limits.start_timeout_s
                if now_s >= due_s:
                    text = f"the provider did not load within {limits.start_timeout_s:g} s"
                    self.fault(worker, EnvError(text, env=worker.backend, repair=f"lz env probe {worker.backend}"))
                else:
                    self.wakeup_s = min(self.wakeup_s, due_s)
            elif worker.state is S.BACKOFF:
                if now_s >= worker.retry_at_s:
                    self._signal(worker, Signal.RETRY_DUE)
                    self._spawn(worker)
                else:
                    self.wakeup_s = min(self.wakeup_s, worker.retry_at_s)

    def _end_what_takes_too_long(self, worker: Worker, executing: int) -> None:
        """The head is due. One that waits for a call of an express lane gets more time, but not for ever: that call's
        client watches its deadline, unless it has left."""
        head = worker.running[0]
        if not executing & EXECUTING:
            self.fault(worker, self.too_long(head.kernel_id, worker, head.timeout_s))
        elif worker.lane_call != executing:
            worker.lane_call, worker.lane_call_since_s = executing, self.now_s
            worker.head_since_s = self.now_s
        elif self.now_s < worker.lane_call_since_s + self.limits.timeout_s:
            worker.head_since_s = self.now_s
        else:
            self.fault(worker, self.too_long("a call on an express lane", worker, self.limits.timeout_s), executing)

    def _shutdown_asked(self, _: ev.ShutdownAsked) -> None:
        if self.stopping:
            return
        self.stopping = True
        self._revoke_leases()
        for call in self.compiling.take():
            self._end_for_shutdown(call)
        for worker in self.workers.values():
            waiting = list(worker.waiting)
            worker.waiting.clear()
            for call in waiting:
                self._end_for_shutdown(call)
            if worker.state is not S.STOPPED:
                self._signal(worker, Signal.STOP)
            if worker.state is S.STOPPING:
                self.do(ev.StopWorker(worker.backend, worker.generation, worker.identity))
        self._stop_if_idle()

    def _end_for_shutdown(self, call: Call) -> None:
        if call.is_unwanted:
            self.close(call)
        else:
            self.refuse(call, BrokerLost("the broker was shut down before the call ended"))

    def _stop_if_idle(self) -> None:
        if self.stopping and all(w.state is S.STOPPED for w in self.workers.values()):
            self._tell(self.turns.drop_held())  # nobody runs anything any more, and nobody will look at pages
            self.do(ev.Exit())

    def do(self, *actions: ev.Action) -> None:
        self._actions += actions

    @staticmethod
    def too_long(what: str, worker: Worker, timeout_s: float) -> DeadlineExceeded:
        text = (
            f"{what} ran longer than {timeout_s:g} s, and its worker was killed; pass a larger timeout_s if it needs "
            "longer"
        )
        return DeadlineExceeded(text, timeout_s=timeout_s, backend=worker.backend)


def _died_in_running(worker: Worker, event: ev.WorkerExited) -> bool:
    """Its CPU was in a call that it had not answered, and its GPU was well."""
    return event.exit_code != STICKY_EXIT and any(call.dispatch == event.executing for call in worker.running)


def _repair(backend: str, cause: LayerZeroError) -> str:
    return cause.facts.get("repair") or f"lz env probe {backend}"


def _disabled(worker: Worker) -> BackendError:
    """For calls that waited for a worker that will not come."""
    assert worker.cause is not None
    error = BackendError(f"the {worker.backend} backend is disabled: {worker.cause.message}")
    error.facts = {**worker.cause.facts, "repair": _repair(worker.backend, worker.cause)}
    return error
