"""A schedule: its seed, its clock, its events, and who performs what the core asks for."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.arrivals import Arrivals
from tests.simulation.backends import (
    CAPABILITIES,
    DEVICES,
    GPU,
    GPU_CAPABILITIES,
    NEWER,
    PRIORITY,
    SIGNATURES,
    capability,
    route_body,
)
from tests.simulation.checks import LATE_S, Checks
from tests.simulation.client_actions import ClientActions
from tests.simulation.clients import BUSY_S, Client
from tests.simulation.coverage import CRASHES, FATES, GPU_FATES, Coverage, Violation
from tests.simulation.exits import Exits
from tests.simulation.model import STREAMS, Call, Channel, Lane
from tests.simulation.pages import Pages
from tests.simulation.worker_actions import WorkerActions
from tests.simulation.workers import Process

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.limits import Limits
from layerzero.broker.core.model import Worker
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.stream_order import Key
from layerzero.broker.core.worker_fsm import Signal, WorkerState
from layerzero.broker.selection.certification import Subject
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.rollout import Rollout, Rules
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec
from layerzero.broker.selection.timings import PerfRow, Stat
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.transport.messages import Lease, decode

MAX_EVENTS = 20_000


class World(Pages, Arrivals, Exits, WorkerActions, ClientActions, Checks):
    """One schedule. `state_class` lets tests plant bugs."""

    may_have_gpu = True

    def __init__(self, seed: int, state_class: Callable[..., BrokerState] = BrokerState) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.coverage = Coverage()
        self.is_calm = False
        self.limits = Limits(
            timeout_s=rng.choice((1.0, 4.0)),
            start_timeout_s=3.0,
            max_in_flight=rng.choice((2, 6, 16)),
            depth=rng.choice((1, 2, 4)),
            share=rng.choice((1, 2)),
            standby=rng.choice((0, 1, 2)),
            restart_budget=rng.choice((0, 1, 3, 3, 3)),
            restart_window_s=rng.choice((2.0, 10.0)),
            backoff_s=0.5,
            backoff_max_s=3.0,
            retry_disabled_s=2.0,
            retry_disabled_max_s=6.0,
            poison_quarantine_s=rng.choice((1.0, 6.0)),
            express=rng.choice((True, True, False)),
        )
        self.persistence = rng.choice((0.0, 0.9, 0.95))  # how often a client calls the same op again at once
        self.eagerness = rng.choice((1.0, 0.1))  # to open a lane that it has a lease for
        self._clog = rng.choice((0.0, 0.05, 0.3))
        self.weights = {
            name: [rng.choice((10, 50, 500)), rng.choice((0, 2, 20)), *rng.choices((0, 0, 0, 1, 2), k=len(FATES) - 2)]
            for name in PRIORITY
        }
        self.lane_weights = [rng.choice((10, 50)), rng.choice((0, 2)), *rng.choices((0, 0, 1, 2), k=len(FATES) - 2)]
        self.lane_weights[FATES.index("hangs")] = rng.choice((0, 0, 5))
        self.is_quiet = self.limits.express and rng.random() < 0.4
        if self.is_quiet:  # little happens but on lanes
            self.weights = {name: [1, *[0] * (len(FATES) - 1)] for name in PRIORITY}
            self.persistence, self.eagerness = 0.97, 1.0
        # A third of all worlds is on a GPU, where lanes are rings; the others are what they were without.
        own = random.Random(seed + 2)
        self.device = GPU if own.random() < 0.4 and not self.is_quiet and self.may_have_gpu else ""
        self.gpu_weights = [own.choice((20, 100)), *own.choices((0, 0, 1, 3), k=len(GPU_FATES) - 1)]
        if self.device and self.limits.express and own.random() < 0.6:  # much is on rings
            for weights in self.weights.values():
                weights[0] = 500
            self.persistence, self.eagerness = 0.97, own.choice((1.0, 1.0, 0.3))
        self.graphs = own.choice((0.0, 0.3, 0.6)) if self.device else 0.0
        self._p_no_transport = own.choice((0.0, 0.0, 0.2))
        self.compiles = own.random() < 0.3
        self._p_compile_fails, self._compile_s = own.choice((0.0, 0.3)), own.choice((0.1, 1.0, 6.0))
        self.renews = own.random() < 0.8  # whether workers care in which order they load kernels
        self.start_weights = (20, rng.choice((0, 1, 4)), rng.choice((0, 0, 1)))
        self._p_probe_fails, self._p_spawn_fails = rng.choice((0.0, 0.2)), rng.choice((0.0, 0.1))
        self._p_full = rng.choice((0.0, 0.0, 0.005))  # a peer's queue is full
        self.pace = rng.choice((1000, 100, 3))  # kernels per second
        self.has_deadly_input = rng.random() < 0.4
        self.signatures, self.streams, self._kills, self._acts = SIGNATURES[self.device], STREAMS, 0, 0
        if self.device and own.random() < 0.25:  # workers die that share a stream: calls come behind later ones
            self.signatures += tuple(one for one in self.signatures if one.pinned in ("alpha", "beta")) * 6
            self.streams, self._kills, self._acts = 1, own.choice((4, 8, 16)), 100
            self.pace = own.choice((10, 100))
            express = self.limits.express and own.random() < 0.5
            self.limits = replace(self.limits, max_in_flight=64, restart_budget=50, express=express)

        self.clients: dict[bytes, Client] = {}
        self.processes: dict[tuple[str, int], Process] = {}
        self.writers: dict[tuple[int, int, int], Process] = {}
        self.contents: dict[tuple[int, int, int], Call] = {}
        self.lanes: dict[int, Lane] = {}
        self._by_identity: dict[bytes, Process] = {}
        self._arenas: set[tuple[int, int]] = set()  # known to the broker and not closed
        self._missing = {"delta"}
        self._is_broken: dict[str, str] = {}  # backend -> why it must be disabled
        self._times_disabled = dict.fromkeys(PRIORITY, 0)  # by crashes, since it was last well
        self._has_served: set[str] = set()  # backends that were ready once
        self._crashes: dict[str, list[float]] = {name: [] for name in PRIORITY}
        self._restart_from_s: dict[str, float] = {}
        self._quarantine: dict[tuple[bytes, bytes], float] = {}
        self._compiling: dict[str, Unit] = {}  # by backend
        self._compiled: dict[Unit, bool] = {}  # whether it went well
        self._is_stopping = False
        self.exits = 0
        self._pids = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._events = 0
        self._handled = 0
        self._is_nested = False
        self._poll_at_s = math.inf
        self._event: ev.Event = ev.Tick()
        self._tick_at_s = math.inf
        self._history: deque[tuple[float, Any]] = deque(maxlen=80)

        self._restarts = random.Random(seed + 5)
        self.restarts = self._restarts.choice((0, 0, 0, 2, 8))  # that people ask for
        self._kept_at_s = math.inf
        self._held_since: dict[Key, int] = {}  # points that were refused and not told -> number of the event of that
        self._newer(random.Random(seed + 4))
        known = GPU_CAPABILITIES if self.device else CAPABILITIES
        if self.compiles:
            platform = "cuda" if self.device else "cpu"
            known = {name: capability(name, priority, platform, compiles=True) for name, priority in PRIORITY.items()}
        if self.rolls:
            known = {**known, NEWER: capability(NEWER, PRIORITY["beta"], "cuda" if self.device else "cpu")}
        unusable = {"delta": Rejection(Reason.NOT_INSTALLED, "its environment is not built")}
        if random.Random(seed + 3).random() < 0.3:  # it is declared once the broker runs
            learned = ev.BackendLearned("delta", known["delta"], unusable.pop("delta"), "lock")
            known = {name: one for name, one in known.items() if name != "delta"}
            self.push(0.0, self._deliver, learned)
        self.state = state_class(
            Engine(known, DEVICES[""], gpus=[DEVICES[GPU]]),
            unusable,
            self.limits,
            random.Random(seed + 1),
        )
        self.state.closing.grants.keeping = frozenset({"silu"})  # as users' functions
        self.keeps = self._restarts.random() < 0.5
        if self.keeps:
            self.state.replacements.keeping = frozenset({"silu"})
        self._observe()

    def _newer(self, own: random.Random) -> None:
        """In some worlds there is a newer beta, at times worse than it."""
        self.rolls = own.random() < 0.3 and not self.compiles
        if not self.rolls:
            return
        self.weights[NEWER] = [50, *own.choices((0, 0, 1, 2), k=len(FATES) - 1)]
        self._times_disabled[NEWER], self._crashes[NEWER] = 0, []
        if own.random() < 0.5:  # of an earlier broker
            self.push(0.0, self._deliver, ev.RolloutsKept([Rollout("beta", NEWER, (0.5, 1.0))]))
        for _ in range(own.choice((1, 4, 9))):
            self.push(own.uniform(0.0, BUSY_S), self._roll, own)

    def _roll(self, own: random.Random) -> None:
        """Someone types lz rollout, or lz rollback."""
        known = self.state.engine.rollouts.known.get("beta")
        if known is not None and known.is_standing:
            self._deliver(ev.RollbackAsked("beta", "typed"))
            return
        shares = own.choice(((1.0,), (0.5,), (0.3, 0.6, 1.0)))
        rules = Rules(max_errors=own.choice((0, 3, 1000)), after_calls=own.choice((1, 5, 1000)))
        if own.random() < 0.3:
            rules = replace(rules, after_calls=0, after_s=own.choice((0.1, 2.0)))
        self._deliver(ev.RolloutAsked(Rollout("beta", NEWER, shares, rules)))

    def _keep_rollouts(self, action: act.KeepRollouts) -> None:
        backends = {one.backend for one in action.rollouts}
        self.require(len(backends) == len(action.rollouts), "a backend has two rollouts")
        for one in action.rollouts:
            one.check()

    def _observe(self) -> None:
        """Hear of transitions, and of calls that go back to where they were lost, as the core decides them."""

        def signalled(worker: Worker, signal: Signal) -> None:
            self.coverage.transitions[worker.state, signal] += 1
            if signal is Signal.REPLACED:
                self._crashes[worker.backend].clear()
            may_keep = self.keeps and "silu" in self.state.capabilities[worker.backend].ops
            if signal is Signal.REPLACED and may_keep and worker.state is WorkerState.READY:
                self.require(not worker.running, "another takes over from a worker that may be making an object")
                self.coverage.fates["replaced_keeper"] += 1

        def going_back(call: Any) -> None:
            known = self.clients[call.client.identity].open[call.seq]
            others = (
                known.signature.backends
                - {attempt["backend"] for attempt in call.attempts}
                - self._no_transport_to(known)
            )
            left = {b for b in others if self._is_compiled(b, known) and self._could_serve(b, known)}
            self.require(not left, f"a call goes back to where it was lost, although {left} could serve it")

        self.state.lifecycle.observer, self.state.calls.observer = signalled, going_back

    def push(self, at_s: float, do: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at_s, self._pushed, do, args))

    def delay_s(self) -> float:
        return self.rng.uniform(0.0, 1.0) if self.rng.random() < self._clog else self.rng.uniform(0.0, 0.002)

    def require(self, is_true: bool, promise: str) -> None:
        if not is_true:
            history = "\n".join(f"  {at_s:9.4f} {what}"[:400] for at_s, what in self._history)
            raise Violation(f"seed {self.seed} at {self.now_s:.4f} s: {promise}\n{history}")

    def run(self) -> Coverage:
        rng = self.rng
        for number in range(1, rng.choice((2, 3, 4))):
            client = self._new_client(number)
            client.is_asleep = rng.random() < 0.3
            self.push(rng.uniform(0.0, 1.0), self._join, client)
            for _ in range(rng.randrange(4, 30) + self._acts):
                self.push(rng.uniform(1.0, BUSY_S), client.act)
        for _ in range(rng.choice((0, 1, 4, 8))):
            self.push(rng.uniform(0.0, BUSY_S), self._reset, rng.choice(list(PRIORITY)))
        for _ in range(self.restarts):
            self.push(self._restarts.uniform(0.0, BUSY_S), self._restart)
        for _ in range(rng.choice((0, 0, 2)) + self._kills):
            self.push(rng.uniform(0.0, BUSY_S), self._kill_one)
        if rng.random() < 0.4:
            self.push(rng.uniform(1.0, BUSY_S), self._shut_down_busy)
        if self.is_quiet:
            layer = Layer("the world", {"weights": {"perfdb": 1000.0}})
            self.push(0.0, self._deliver, ev.PolicyChanged(Policy.of(layer)))
        self.push(BUSY_S, self._calm)
        self._run_out()
        for client in self.clients.values():
            self.require(not client.open, f"calls {sorted(client.open)} of client {client.number} are lost")
            on_lanes = [] if client.has_hung_up else [lane.number for lane in client.lanes() if lane.dispatch]
            self.require(not on_lanes, f"the calls on lanes {on_lanes} of client {client.number} are lost")
            if not client.has_hung_up:
                silent = [n for n, call in client.bound.items() if call.has_word and client.graph_slots[n].is_busy]
                self.require(not silent, f"replays of client {client.number} hang at graph slots {silent}")
                stuck = [(s.issued, s.ready, s.done, s.passed) for s in client.streams if s.passed != s.issued]
                self.require(not stuck, f"streams of client {client.number} hang: {stuck}")
                self.require(not client.pending, f"points {list(client.pending)} are never told of")
        for name, worker in self.state.workers.items():
            is_disabled = worker.state is WorkerState.DISABLED and not self._is_stopping
            self.require(
                not is_disabled or self._is_broken[name] != CRASHES, f"{name} stays disabled for ever by crashes"
            )
        if rng.random() < 0.7:
            for client in self.clients.values():
                client.hang_up()
            self._run_out()
            self._check_nothing_left()
        self._shut_down()
        self._run_out()
        self.require(self.exits == 1, f"{self.exits} Exits after a shutdown")
        self.coverage.fates["late_answer"] = self.state.lifecycle.stale
        return self.coverage

    def _new_client(self, number: int) -> Client:
        return Client(self, number, b"C%d" % number, Channel(self), Channel(self), Channel(self))

    def _new_process(self, backend: str, generation: int, pid: int) -> Process:
        return Process(self, backend, generation, pid)

    def _run_out(self) -> None:
        while self._queue:
            self.now_s, _, do, args = heapq.heappop(self._queue)
            do(*args)
            self.require(self._pushed < MAX_EVENTS, "the schedule does not end")

    def _calm(self) -> None:
        self.is_calm = True

    def _deliver(self, event: ev.Event) -> None:
        self._events += 1
        self._handle(event)
        self._check()
        self.plan_look()
        self._plan_look_at_kept()
        if self.state.wakeup_s < self._tick_at_s:
            self._tick_at_s = self.state.wakeup_s
            late_s = self.rng.uniform(0.0, LATE_S) if self.rng.random() < 0.2 else 0.0
            self.push(max(self.now_s, self._tick_at_s + late_s), self._tick)

    def _handle(self, event: ev.Event) -> None:
        self._handled += 1
        handled, outer = self._handled, self._event
        self._event = event
        self._history.append((self.now_s, event))
        self.coverage.events[type(event).__name__] += 1
        actions = self.state.handle(event, self.now_s)
        for key in self.state.points.held:
            self._held_since.setdefault(key, self._events)
        self._note_lanes(actions)
        for action in actions:
            if type(action) is not act.Note:
                self._history.append((self.now_s, action))
            self.coverage.actions[type(action).__name__] += 1
            self._is_nested = self._handled != handled  # what is performed was decided before something else happened
            getattr(self, PERFORM[type(action)].__name__)(action)
        self._event = outer

    def _note_lanes(self, actions: list[act.Action]) -> None:
        """New lanes are there once they are decided, also for what happens while the actions are performed."""
        for action in actions:
            if isinstance(action, act.SendAllow) and action.lane not in self.lanes:
                lane = self.lanes[action.lane] = Lane(action.lane, self._worker(action.identity, "Allow"))
                lane.client = self.clients[self.state.leases.lanes[action.lane].client.identity]
            elif isinstance(action, act.SendLease):
                lane, client = self.lanes[decode(action.body, Lease).lane], self.clients[action.identity]
                self.require(lane.client is client, "a lane has two clients")

    def _tick(self) -> None:
        self._tick_at_s = math.inf
        if self.now_s >= self.state.wakeup_s:
            self.poll_timelines()
            alive = [process for process in self.processes.values() if not process.is_confirmed_dead]
            self._deliver(ev.Tick({(process.backend, process.generation): process.page[0] for process in alive}))
        elif self.state.wakeup_s < math.inf:
            self._tick_at_s = self.state.wakeup_s
            self.push(self._tick_at_s, self._tick)

    def _join(self, client: Client) -> None:
        if self._is_stopping:  # the broker refuses it
            client.has_hung_up = True
            return
        self.clients[client.identity] = client
        self._deliver(ev.ClientJoined(client.identity, client.number))

    def learn(self) -> None:
        """Someone has saved policy.yaml; a shadow check has ended; a worker is not needed; times are read that an
        earlier broker took."""
        what = self.rng.random()
        if what < 0.4:
            weights = {"perfdb": self.rng.choice((0.0, 1000.0, 1000.0))}
            self._deliver(ev.PolicyChanged(Policy.of(Layer("the world", {"weights": weights}))))
        elif what < 0.5 and self.compiles:
            spec = CallSpec.parse(route_body(device=self.device))
            self._deliver(ev.CompileAsked(spec, list(PRIORITY)))
        elif what < 0.7:  # only what serves nobody is taken out, so that the model of who serves whom holds
            kernel_id, error = self.rng.choice((("alpha.silu", 0.0), ("nobody.silu", 1.0)))
            subject = Subject(kernel_id, "float32", "plain/small/dense")
            self._deliver(ev.ShadowCompared(Comparison(subject, "beta.silu", error)))
        elif what < 0.8:
            self._deliver(ev.WorkerSpared(self.rng.choice(list(PRIORITY))))
        else:
            key = self.state.engine.context(CallSpec.parse(route_body())).perf_key()
            stat = Stat(20, self.rng.uniform(1.0, 1000.0), 2000.0, 1.0, 0.0, 0.0)
            self._deliver(ev.TimesLoaded([PerfRow("alpha.silu", key, stat)]))

    def _restart(self) -> None:
        """Someone types lz restart."""
        own = self._restarts
        backend = own.choice(list(PRIORITY))
        missing, until_s = self._forget(backend, own), self.now_s + own.choice((0.3, 2.0, 10.0))
        self._deliver(ev.RestartAsked(backend, missing, until_s, own.random() < 0.2))

    def _plan_look_at_kept(self) -> None:
        if self.state.replacements.awaited and self._kept_at_s == math.inf:
            self._kept_at_s = self.now_s + 0.02
            self.push(self._kept_at_s, self._look_at_kept)

    def _look_at_kept(self) -> None:
        self._kept_at_s = math.inf
        own, awaited = self._restarts, self.state.replacements.awaited
        names = [worker.backend for worker in awaited]
        kept = frozenset(name for name in names if not self.is_calm and own.random() < 0.3)
        pages = {one.backend: self.processes[one.backend, one.generation].page[0] for one in awaited}
        self._deliver(ev.KeptPolled(kept, frozenset(name for name in names if pages[name])))

    def _reset(self, backend: str) -> None:
        self._deliver(ev.BackendReset(backend, self._forget(backend, self.rng)))

    def _forget(self, backend: str, rng: random.Random) -> Rejection | None:
        """What a backend has done. Returns why it cannot start all the same."""
        missing = Rejection(Reason.NOT_INSTALLED, "its environment is not built") if rng.random() < 0.2 else None
        if missing is None:
            self._missing.discard(backend)
        else:
            self._missing.add(backend)
        self._times_disabled[backend] = 0
        if self.state.workers[backend].state in (WorkerState.DISABLED, WorkerState.BACKOFF, WorkerState.ABSENT):
            self._is_broken.pop(backend, None)
            self._restart_from_s.pop(backend, None)
            self._crashes[backend].clear()
        for unit in [u for u, is_good in self._compiled.items() if not is_good and u.kernel_id.startswith(backend)]:
            del self._compiled[unit]  # and may be tried again
        return missing

    def _kill_one(self) -> None:
        """Someone kills a worker, whatever it does."""
        alive = [process for process in self.processes.values() if process.is_alive]
        if alive:
            self.rng.choice(alive).die(-9)

    def _shut_down_busy(self) -> None:
        for client in list(self.clients.values()):
            for _ in range(4):
                client.act()
        self.push(self.now_s + self.rng.uniform(0.0, 0.1), self._shut_down)

    def _shut_down(self) -> None:
        self._is_stopping = True
        self._deliver(ev.ShutdownAsked())


PERFORM: dict[type, Callable[[World, Any], None]] = {
    act.Probe: World._probe,
    act.Compile: World._compile,
    act.Spawn: World._spawn,
    act.Kill: World._kill,
    act.StopWorker: World._stop,
    act.RetireWorker: World._retire,
    act.SendPrepare: World._prepare,
    act.SendDrop: World._drop,
    act.GrantArena: World._lend,
    act.TakeBackArena: World._take_back,
    act.TellClientLeft: World._tell_client_left,
    act.CloseArena: World._close_arena,
    act.GrantGpu: World._lend_gpu,
    act.TakeBackGpu: World._take_back_gpu,
    act.CloseGpu: World._close_gpu,
    act.FailTurn: World._fail_point,
    act.ReleaseTurn: World._release_point,
    act.SendAllow: World._allow,
    act.SendLease: World._lease,
    act.GrantLane: World._lend_lane,
    act.RevokeLane: World._revoke_lane,
    act.TakeBackLane: World._take_back_lane,
    act.EndLane: World._end_lane,
    act.Run: World._run,
    act.SendMute: World._mute,
    act.SendDecision: World._decide,
    act.Answer: World._answer,
    act.Refuse: World._refuse,
    act.ReleaseCall: World._release_call,
    act.DropClient: World._drop_client,
    act.KeepRollouts: World._keep_rollouts,
    act.Note: World._note,
    act.Exit: World._exit,
}


def run(seed: int, state_class: Callable[..., BrokerState] = BrokerState) -> Coverage:
    """One schedule from start to end. Raises Violation, or whatever the core raises, with the seed in its notes."""
    world = World(seed, state_class)
    try:
        return world.run()
    except Violation:
        raise
    except Exception as exc:
        exc.add_note(f"seed {seed} at {world.now_s:.4f} s, after {world._event}")
        raise
