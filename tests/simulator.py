"""A seeded world around the broker's core, on one thread and a simulated clock.

`run(seed)` drives the real BrokerState with modelled clients, workers and channels. Messages are late and overtake each
other between channels (never within one); workers raise, hang, lie and die at every step; clients leave, retire memory
and break the protocol; ticks are late. The world performs the core's actions as server.py does, keeps the truth about
who writes which memory until when, and raises Violation, with the seed, where the core breaks one of its promises:

- a call of a client that is there ends in exactly one Answer or Refuse, one of a client that left in none;
- no two live workers have the same call or the same memory; a call moves on, and memory is closed, only after the
  worker that had it answered or its exit was confirmed;
- an Answer stands for an attempt that ran to its end, and the memory still holds its result;
- a Run finds its plan and its arenas at the worker;
- attempts end by their deadline, restarts keep to their budget, a call kills two workers at most and is never given
  back to a backend that failed it;
- a call is refused only when no backend is left for it, not even one that restarts within its timeout;
- what is due has a wakeup, counters add up, reasons are true, nothing is left behind;
- a lease is granted for what the core would choose again, and ends with the epoch in which it was; a call of an express
  lane ends once for its client, comes to the broker only when its worker is done with it, and brings its death along; a
  call behind it is neither killed for its time nor blamed for it;
- a call on a ring is enqueued by one worker, or comes to the broker once: when that worker leaves it, or is dead; one
  of those that come back from a dead worker is blamed at most, and the right one; a ring is taken back when nothing is
  on it;
- kernels that compile run no call that they are not compiled for, backends compile one thing at a time and none twice;
  a call waits for a compilation only when nobody else is left, and for no longer than its timeout;
- turns of a lane end once and in their order, those of a client that is there all do, and none fails that a worker may
  still finish; what is done never runs again; a call on a GPU that must run again gets another answer, no other does;
- of a worker that begins anew, since it got a call of a new kernel behind later ones, no call is blamed and no kernel.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.broker import actions as act
from layerzero.broker import events as ev
from layerzero.broker.certification import Subject
from layerzero.broker.engine import Engine
from layerzero.broker.leases import MAX_LOST
from layerzero.broker.limits import Limits
from layerzero.broker.looks import AWAITED_LOOK_S, LOOK_S
from layerzero.broker.perf import PerfRow, Stat
from layerzero.broker.poison import MAX_DEATHS_PER_CALL
from layerzero.broker.policy import Policy, Weights
from layerzero.broker.records import Worker
from layerzero.broker.selection import CallSpec
from layerzero.broker.settling import WATCH_S
from layerzero.broker.shadow import Comparison
from layerzero.broker.state import BrokerState
from layerzero.broker.turns import RENEWAL_EXIT, STICKY_EXIT, Key
from layerzero.broker.worker_fsm import Signal, WorkerState
from layerzero.capabilities import descriptor
from layerzero.capabilities.compile_unit import Unit, unit_of
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs.probe import ProbeRecord
from layerzero.ipc import wire
from layerzero.ipc.errors import (
    BackendError,
    CudaGraphUnsafe,
    EnvChanged,
    EnvError,
    InvalidArgument,
    LayerZeroError,
    NoTransport,
    OutputTooSmall,
    from_wire,
)
from layerzero.ipc.lane import EXECUTING, mark
from layerzero.ipc.messages import Decision, Lease, Route, decode, encode
from layerzero.ipc.order import RUNG, SILENT, TAKEN, Turn
from layerzero.ipc.ring import RingCall
from layerzero.ipc.tensors import TensorSpec

LATE_S = 0.2  # a tick may be that late
STOP_GRACE_S = 5.0
OVERDUE_AGAIN_S = 2.0  # a client reports an overdue call of a lane again after so long
BUSY_S = 12.0  # clients act until then; faults end then
MAX_EVENTS = 20_000
SLOT = 64  # bytes; an input and an output of four float64 fit in two of them
SLOTS = 6
ARENA_BYTES = 2 * SLOT * SLOTS
DEADLY = 3  # number of the input that kills the workers it deserves
GPU = "GPU-1"
STREAMS = 3  # of a client on a GPU, at most

PRIORITY = {"alpha": 60, "beta": 50, "gamma": 40, "delta": 30}
SERVES = {"silu": PRIORITY.keys(), "gelu": ("alpha", "beta")}
COMPILES = frozenset({"alpha", "gamma"})  # in some worlds


def _capability(backend: str, priority: int, platform: str = "cpu", *, compiles: bool = False) -> descriptor.Capability:
    jit = {"needs_jit": True, "compiled_for": ["dtypes"]} if compiles and backend in COMPILES else {}
    ops: dict[str, tuple[dict[str, Any], ...]] = {
        op: (
            {
                "kernel_id": f"{backend}.{op}",
                "priority": priority,
                "source": "simulator",
                "dtypes": ["float32", "float64"],
                "deterministic": True,
                **jit,
            },
        )
        for op, backends in SERVES.items()
        if backend in backends
    }
    return descriptor.Capability.model_validate(
        {"schema_version": "1.0", "backend": backend, "backend_version": "1", "platform": platform, "ops": ops}
    )


CAPABILITIES = {backend: _capability(backend, priority) for backend, priority in PRIORITY.items()}


GPU_CAPABILITIES = {backend: _capability(backend, priority, "cuda") for backend, priority in PRIORITY.items()}


def _record(backend: str) -> ProbeRecord:
    """Of a probe that found everything right."""
    kernels = CAPABILITIES[backend].kernel_ids
    classes = {f"{variant}/small/dense": 0.0 for variant in ("plain", "none")}
    certified = {kernel_id: dict.fromkeys(("float32", "float64"), classes) for kernel_id in kernels}
    return ProbeRecord(backend, "key", ok=True, seconds=0.1, kernels=dict.fromkeys(kernels), certified=certified)


DEVICES = {"": DeviceSpec(), GPU: DeviceSpec("cuda", "a GPU", device_uuid=GPU, supports_fp16=True)}


def route_body(op: str = "silu", dtype: str = "float32", backend: str = "", device: str = "") -> bytes:
    """A signature of a unary op on four elements."""
    spec = TensorSpec.contiguous(dtype, (4,)).to_wire()
    attrs = {"approximate": "none"} if op == "gelu" else {}
    return encode(Route(op=op, inputs=[spec], outputs=[spec], attrs=attrs, backend=backend, device=device))


@dataclass(frozen=True)
class Signature:
    body: bytes
    backends: frozenset[str]  # whose descriptors accept it
    pinned: str = ""


def _signatures(device: str) -> tuple[Signature, ...]:
    def body(op: str = "silu", **more: str) -> bytes:
        return route_body(op, device=device, **more)

    return (
        *[Signature(body(), frozenset(PRIORITY))] * 8,
        *[Signature(body(dtype="float64"), frozenset(PRIORITY))] * 4,
        *[Signature(body("gelu"), frozenset(SERVES["gelu"]))] * 4,
        Signature(body(dtype="float16"), frozenset()),
        Signature(body("gelu", backend="gamma"), frozenset(), "gamma"),
        *(Signature(body(backend=name), frozenset({name}), name) for name in ("alpha", "beta", "delta")),
    )


SIGNATURES = {device: _signatures(device) for device in ("", GPU)}


class Violation(AssertionError):
    """The core broke a promise. The message begins with the seed that shows it again."""


@dataclass
class Coverage:
    """What schedules have led to."""

    transitions: Counter[tuple[WorkerState, Signal]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)  # of errors that clients got
    reasons: Counter[str] = field(default_factory=Counter)  # of rejected candidates
    events: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)

    def update(self, other: Coverage) -> None:
        for name, counter in vars(self).items():
            counter.update(getattr(other, name))


# --- what is true ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Call:
    client: Client
    route: int
    signature: Signature
    slot: tuple[int, int]  # arena, index
    body: bytes
    number: int  # of the input
    timeout_s: float
    digest: bytes = b""
    seq: int = 0
    deaths: int = 0
    faults: set[str] = field(default_factory=set)  # what workers were killed for while they had it first
    failed_on: set[str] = field(default_factory=set)  # backends that raised, died or were killed for it
    is_quarantined: bool = False
    deaf: set[str] = field(default_factory=set)  # backends that were known not to reach its memory when it came
    is_crowded: bool = False  # many others were open when it came
    has_ended: bool = False  # for its client
    after: tuple[int, int] = (0, 0)  # the express lane that ended with it, and its number there
    turn: Turn | None = None
    on_ring: Dispatch | None = None  # what it is there
    bell: int | None = None
    is_unbound: bool = False
    is_lent: bool = False  # a lost worker may still write to its memory (simulator_joined.py)
    is_innocent_of: int = 0  # pid of the worker whose ring it came back from
    has_word: bool = False  # its client was told of it
    has_passed: bool = False  # its client's stream has gone on
    is_done: bool = False  # the GPU wrote its result
    has_failed: bool = False  # its turn was ended by the broker
    since_s: float = 0.0  # when it came
    has_arrived: bool = False  # at the broker; what is on a ring need not
    dispatches: list[Dispatch] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.client.number, *self.slot)

    def forgive(self) -> None:
        """A replay came through: those before it do not count."""
        self.deaths = 0
        self.failed_on.clear()


@dataclass(eq=False)
class Dispatch:
    number: int
    attempt: int
    call: Call
    plan: int
    arenas: frozenset[tuple[int, int]]
    lane: Lane | None = None  # that it is on
    is_over: bool = False  # the broker, or the client of a lane, has its answer, or its worker is known to be dead
    result: bytes | None = None  # what the kernel returned, once it ran to its end
    gpu_fate: str = ""
    taken_s: float = 0.0  # off a ring
    has_begun: bool = False  # on the GPU
    answered_s: float = 0.0  # as the broker knows


@dataclass(eq=False)
class Stream:
    """A client's stream and its lane of the order page: numbers of turns."""

    issued: int = 0
    ready: int = 0
    done: int = 0
    passed: int = 0  # what the stream has waited for
    since_s: float = 0.0  # when `ready` or `done` changed
    calls: dict[int, Call] = field(default_factory=dict)


@dataclass
class Bell:
    """Of a client's order page, and the replay that the client waits for."""

    word: int = SILENT
    binding: int = 0  # number of the call that it rings for
    is_done: bool = True
    takings: int = 0
    since_s: float = 0.0  # when one of them changed

    @property
    def is_busy(self) -> bool:
        return self.word == RUNG or (self.word >= TAKEN and not self.is_done)


@dataclass(eq=False)
class Lane:
    """An express lane as it really is: the page that its client made, and what the core has said about it."""

    number: int
    process: Process
    client: Client | None = None  # known with the first lease
    core_epoch: int = 0  # of the last RevokeLane
    granted: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # route -> epochs of lane and core, kernel
    stale_since_s: dict[int, float] = field(default_factory=dict)  # routes whose calls the core would give to another
    is_open: bool = False  # the server holds the page
    is_usable: bool = False  # the client knows that it does
    is_broken: bool = False  # the worker wrote nonsense
    is_ended: bool = False  # the page says that the worker is gone
    is_taken_back: bool = False  # the client left
    epoch: int = 0  # of the page
    calls: int = 0
    dispatch: Dispatch | None = None  # the call on it
    is_rung: bool = False  # no worker has claimed it
    done: int = 0
    status: str = ""
    seen: int = 0
    ring: dict[int, Dispatch] = field(default_factory=dict)  # on a GPU, by number
    slots: dict[int, RingCall] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # that the broker has heard of
    blamed: int = 0  # the mark of the call that the worker died in or was killed for


class Channel:
    """Messages on it keep their order, and arrive some time later."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_s = 0.0

    def send(self, arrive: Callable[..., None], *args: Any) -> None:
        self._last_s = max(self._last_s, self._world.now_s + self._world.delay_s())
        self._world.push(self._last_s, arrive, *args)


FATES = (
    "runs",
    "raises",
    "refuses",
    "too_small",
    "dies_before",
    "dies_running",
    "dies_written",
    "dies_sent",
    "hangs",
    "is_slow",
    "lies_dispatch",
    "lies_attempt",
    "answers_twice",
    "sends_garbage",
    "hangs_up",
)
# How calls of express lanes end, and what becomes of the lanes.
LANE_FATES = {
    "blamed",
    "broken",
    "called",
    "declined",
    "ended_unopened",
    "head_waited",
    "left",
    "lost",
    "opened_late",
    "overdue",
    "poison",
    "raised",
    "ran",
    "withdrawn",
}
# What becomes of calls on rings.
RING_FATES = {
    "again",
    "after_end",
    "blamed",
    "called",
    "late",
    "left",
    "raised",
    "ran",
    "stranded",
    "survived_client",
}
# What becomes of calls in graphs.
BELL_FATES = {"bound", "bound_again", "failed", "late", "muted", "replayed", "taken_over", "unbound", "unsafe"}
# What a GPU makes of a call, and what else becomes of turns.
GPU_FATES = ("gpu_runs", "gpu_is_slow", "gpu_hangs", "gpu_dies")
TURN_FATES = {
    "turn_failed",
    "turn_held",
    "turn_released",
    "turn_rerun",
    "turn_late",
    "turn_renewed",
    "deaf",
    "offered_again",
}
COMPILE_FATES = {"compiled", "compile_failed", "compile_awaited"}
LANE_ENDS = {"sends_garbage": "broken", "lies_dispatch": "broken", "lies_attempt": ""}  # the last one never says
LANE_ENDS |= dict.fromkeys(("raises", "refuses", "too_small"), "raised")
WRITES = {"runs", "dies_written", "dies_sent", "is_slow", "lies_dispatch", "lies_attempt", "answers_twice"}


class Process:
    """A worker, as it really is. What the broker believes of it is in `lent`, `prepared`, `sent`."""

    def __init__(self, world: World, backend: str, generation: int, pid: int) -> None:
        self.world, self.backend, self.generation, self.pid = world, backend, generation, pid
        self.identity = b"W%d" % pid
        self.is_alive = True
        self.is_confirmed_dead = False
        self.is_given_up = False  # nobody could confirm that (simulator_joined.py)
        self.kill_reason = ""
        self.killed_during = -1
        self.killed_for = 0  # the mark of a lane's call; 0: for its head
        self.was_ready = False  # the broker got its READY in time
        self.exit_code: int | None = None
        self.lent: set[tuple[int, int]] = set()
        self.gpus: set[int] = set()  # clients whose GPU it was told of
        self.slot = 0
        self.deaf: set[int] = set()  # clients whose memory does not reach it
        self.gpu: list[Dispatch] = []  # enqueued and not done
        self.enqueued: dict[int, Dispatch] = {}  # what the broker believes of that
        self.bells: dict[tuple[int, int], Dispatch] = {}  # by client's number
        self.replaying: dict[tuple[int, int], Dispatch] = {}
        self.last_turns: dict[tuple[int, int], int] = {}  # enqueued, by client and lane
        self.bound: dict[int, Dispatch] = {}  # what the broker believes
        self.late: Dispatch | None = None  # that it is killed for
        self.prepared: set[int] = set()
        self.sent: deque[Dispatch] = deque()
        self.head_since_s = 0.0
        self._inbox: deque[tuple[str, Any]] = deque()
        self._arenas: set[tuple[int, int]] = set()
        self._plans: set[int] = set()
        self._loaded: set[int] = set()  # plans whose kernels have run
        self._current: Dispatch | None = None
        self.page = (0, "idle")
        self.began_s = 0.0  # when it began what the page says
        self.lane_end_s = 0.0  # when it was last done with a lane's call
        self.lanes: dict[int, Lane] = {}  # mapped
        self._allowed: set[tuple[int, int]] = set()
        self._to_broker = Channel(world)
        self._loses_output = False
        self._frames, self._control = Channel(world), Channel(world)

    @property
    def is_over(self) -> bool:
        """For the core."""
        return self.is_confirmed_dead or self.is_given_up

    @property
    def has_renewed(self) -> bool:
        """It ended to begin anew, and was not to be killed."""
        return self.exit_code == RENEWAL_EXIT and not self.kill_reason

    @property
    def has_crashed(self) -> bool:
        """It ended by itself, and something may be to blame."""
        return not self.kill_reason and not self.has_renewed

    @property
    def held(self) -> list[Dispatch]:
        """What it may be in."""
        is_on_ring = self._current is not None and self._current.lane is not None and self.world.device
        return [*self.sent, *self.gpu, *([self._current] if self._current and is_on_ring else [])]

    def send(self, kind: str, value: Any = None) -> None:
        """From the broker, by ZeroMQ."""
        self._frames.send(self._arrived, kind, value)

    def tell(self, kind: str, what: Any) -> None:
        """From the broker, by the control socket."""
        self._control.send(self._told, kind, what)

    def load(self) -> None:
        rng, world = self.world.rng, self.world
        fate = "loads" if world.is_calm else rng.choices(("loads", "dies", "stays"), world.start_weights)[0]
        if fate == "loads":
            self._say(ev.WorkerReady(self.identity, self.backend, self.generation, {"lib": "1"}))
        elif fate == "dies":
            self.die(1)

    def _say(self, event: ev.Event) -> None:
        self._to_broker.send(self._heard, event)

    def _heard(self, event: ev.Event) -> None:
        if self.is_alive or not self._loses_output:
            self.world.from_worker(self, event)

    def _told(self, kind: str, what: Any) -> None:
        match kind:
            case "map":
                self._arenas.add(what)
            case "unmap":
                self._arenas.discard(what)
            case "map_lane":
                self.lanes[what.number] = what
            case _:
                self.lanes.pop(what.number, None)
        self.pump()

    def _arrived(self, kind: str, value: Any) -> None:
        self._inbox.append((kind, value))
        self.pump()

    def pump(self) -> None:
        """Take what is there, in the order of each channel; a rung doorbell may come before or after a frame."""
        while self.is_alive and self._current is None:
            rung = [lane for lane in self.lanes.values() if lane.is_rung or lane.done < len(lane.ring)]
            if rung and (not self._inbox or self.world.rng.random() < 0.5):
                lane = self.world.rng.choice(rung)
                if self.world.device:
                    self._take(lane)
                else:
                    self._claim(lane)
                continue
            if not self._inbox:
                return
            kind, value = self._inbox[0]
            if kind == "run":
                if not value.arenas <= self._arenas:
                    return  # its descriptors are on the way, by the other channel
                self._begin(value)
            elif kind == "prepare":
                self._plans.add(value)
            elif kind == "drop":
                self._plans.discard(value)
                self._loaded.discard(value)
            elif kind == "allow":
                self._allowed.add(value)
            elif kind == "mute":
                self.bells.pop(value, None)
            elif self.gpu:
                return  # it finishes what it has before it stops
            else:
                self.die(0)
            self._inbox.popleft()

    def _claim(self, lane: Lane) -> None:
        lane.is_rung = False
        dispatch = lane.dispatch
        assert dispatch is not None
        if self._knows(lane, dispatch) and dispatch.arenas <= self._arenas:
            self._begin(dispatch)
        else:
            self.world.lane_done(lane, "declined")

    def _knows(self, lane: Lane, dispatch: Dispatch) -> bool:
        """The plan. Else it has been dropped since: a worker hears of it before the client may call."""
        self.world.require((lane.number, dispatch.plan) in self._allowed, "a call of a lane came before its ALLOW")
        return dispatch.plan in self._plans

    def _take(self, lane: Lane) -> None:
        """The next call of a ring."""
        lane.done += 1
        dispatch, world = lane.ring[lane.done], self.world
        dispatch.taken_s = world.now_s
        call = dispatch.call
        world.require(not call.is_done and not call.has_failed, "a call of a ring was ended before its worker took it")
        world.require(call.on_ring is dispatch and not call.dispatches, "a call of a ring is elsewhere, too")
        is_heard = call.client.number in self.gpus and call.client.number not in self.deaf
        if self._knows(lane, dispatch) and is_heard and dispatch.arenas <= self._arenas:
            self._begin(dispatch)
        else:
            world.coverage.fates["ring_left"] += 1
            self._leave_to_broker(dispatch, None)

    def _leave_to_broker(self, dispatch: Dispatch, error: LayerZeroError | None) -> None:
        lane = dispatch.lane
        assert lane is not None
        dispatch.is_over = True
        number = dispatch.number & 0xFFFF_FFFF
        self._say(ev.CallLeft(self.identity, lane.number, lane.slots[number], error))

    def _begin(self, dispatch: Dispatch) -> None:
        world = self.world
        call = dispatch.call
        world.require(dispatch.plan in self._plans, "a worker got a Run without its plan")
        if call.bell is None:
            world.require(call.place not in world.writers, "two live workers write the same memory")
            world.writers[call.place] = self
        self._current = dispatch
        weights = world.weights[self.backend] if dispatch.lane is None else world.lane_weights
        fate = "runs" if world.is_calm else world.rng.choices(FATES, weights)[0]
        if call.number == DEADLY and world.has_deadly_input:
            fate = "dies_running"
        world.coverage.fates[fate] += 1
        if call.client.number in self.deaf and self.world.device:
            error = NoTransport("GPU memory does not reach the worker", rung="ipc", reason="it is deaf")
            self._say(ev.CallRaised(self.identity, dispatch.number, dispatch.attempt, error))
            self._free()
            return
        if fate == "dies_before":
            self.die(-11)
            return
        self.page, self.began_s = (dispatch.number, "executing"), world.now_s
        if self._is_out_of_order(dispatch):
            world.coverage.fates["turn_renewed"] += 1
            self.die(RENEWAL_EXIT)
            return
        if fate == "hangs":
            return
        slow_s = call.timeout_s * world.rng.uniform(0.8, 1.2) if fate == "is_slow" else 0.0
        world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._end, dispatch, fate)

    def _is_out_of_order(self, dispatch: Dispatch) -> bool:
        """To load its kernel might wait for later calls of its lane, which wait for it."""
        turn = dispatch.call.turn
        if turn is None:
            return False
        lane = (dispatch.call.client.number, turn.lane)
        last = self.last_turns.get(lane, 0)
        self.last_turns[lane] = max(last, turn.number)
        return self.world.renews and turn.number < last and dispatch.plan not in self._loaded

    def _end(self, dispatch: Dispatch, fate: str) -> None:
        if not self.is_alive:
            return
        world, rng = self.world, self.world.rng
        number, attempt = dispatch.number, dispatch.attempt
        if fate in WRITES:
            self.page = (number, "written")
            dispatch.result = b"%d" % number
            if dispatch.call.bell is not None:
                self._bind(dispatch)
            elif world.device:
                self._enqueue(dispatch)
            else:
                world.contents[dispatch.call.place] = dispatch.call
        if fate == "dies_running":
            self.die(rng.choice((-9, -11, -6, 0, 1)))
        elif fate == "dies_written":
            self.die(-11)
        elif fate == "hangs_up":
            world.kill(self)  # the broker kills one that closes its control socket, and does not tell its core
            return
        elif dispatch.lane is not None and world.device:
            errors: dict[str, LayerZeroError] = {
                "raises": BackendError("kernel raised"),
                "refuses": InvalidArgument("bad id"),
                "too_small": OutputTooSmall("small", needed=[9]),
            }
            if fate in errors:
                world.coverage.fates["ring_raised"] += 1
                self._leave_to_broker(dispatch, errors[fate])
            elif fate in ("sends_garbage", "lies_dispatch", "lies_attempt"):
                self._say(ev.WorkerMisbehaved(self.backend, self.generation, "garbage"))
            self._leave(fate)
        elif dispatch.lane is not None:
            status = LANE_ENDS.get(fate, "ran")
            if status:
                dispatch.is_over = True
                world.lane_done(dispatch.lane, status)
            self._leave(fate)
        else:
            kernel_ns = rng.choice((0, 5000)) if world.device else rng.randrange(1000, 10**6)
            ran = ev.CallRan(self.identity, number, attempt, kernel_ns, dispatch.result or b"")
            match fate:
                case "raises":
                    error: LayerZeroError = BackendError("kernel raised")
                    if dispatch.call.bell is not None and rng.random() < 0.7:
                        error = CudaGraphUnsafe("it cannot be captured")
                        world.coverage.fates["bell_unsafe"] += 1
                    self._say(ev.CallRaised(self.identity, number, attempt, error))
                case "refuses":
                    self._say(ev.CallRaised(self.identity, number, attempt, InvalidArgument("bad id")))
                case "too_small":
                    self._say(ev.CallRaised(self.identity, number, attempt, OutputTooSmall("small", needed=[9])))
                case "sends_garbage":
                    self._say(ev.WorkerMisbehaved(self.backend, self.generation, "garbage"))
                case "lies_dispatch":
                    self._say(replace(ran, dispatch=number + rng.choice((-1, 1, 1000))))
                case "lies_attempt":
                    self._say(replace(ran, attempt=attempt + 1))
                case _:
                    self._say(ran)
                    if fate == "answers_twice":
                        self._say(ran)
            self._leave(fate)

    def _leave(self, fate: str) -> None:
        """The call is answered."""
        rng = self.world.rng
        if fate == "dies_sent":
            self.page = rng.choice((self.page, (0, "idle")))
            self.die(rng.choice((-9, 0)))
        else:
            self._free()
            self.page = (0, "idle")
            self.pump()

    def _bind(self, dispatch: Dispatch) -> None:
        call = dispatch.call
        assert call.bell is not None
        self._loaded.add(dispatch.plan)
        key = (call.client.number, call.bell)
        self.bells[key] = dispatch
        bell = call.client.bells[call.bell]
        if bell.word >= TAKEN and not bell.is_done and bell.binding == dispatch.call.seq:
            self.world.coverage.fates["bell_taken_over"] += 1
            self._replay(key)
        else:
            self.serve(key)

    def serve(self, key: tuple[int, int]) -> None:
        dispatch = self.bells.get(key)
        if self.is_alive and dispatch is not None:
            bell = dispatch.call.client.bells[key[1]]
            if bell.word == RUNG and bell.binding == dispatch.call.seq:
                bell.word, bell.since_s = TAKEN + bell.takings, self.world.now_s
                bell.takings += 1
                self._replay(key)

    def _replay(self, key: tuple[int, int]) -> None:
        world, dispatch = self.world, self.bells[key]
        if not dispatch.arenas <= self._arenas:
            world.require(dispatch.call.client.has_left, "a bound call has lost its memory")
            return
        world.require(dispatch.call.place not in world.writers, "two live workers write the same memory")
        world.writers[dispatch.call.place] = self
        self.replaying[key] = dispatch
        fate = "gpu_runs" if world.is_calm else world.rng.choices(GPU_FATES, world.gpu_weights)[0]
        slow_s = world.limits.timeout_s * world.rng.uniform(0.8, 1.2) if fate == "gpu_is_slow" else 0.0
        if fate != "gpu_hangs":
            world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._replayed, key, dispatch, fate)

    def _replayed(self, key: tuple[int, int], dispatch: Dispatch, fate: str) -> None:
        if not self.is_alive:
            return
        if fate == "gpu_dies":
            self.die(STICKY_EXIT)
            return
        del self.replaying[key]
        del self.world.writers[dispatch.call.place]
        call, bell = dispatch.call, dispatch.call.client.bells[key[1]]
        self.world.contents[call.place] = call
        bell.is_done, bell.since_s = True, self.world.now_s
        if dispatch.number in self.bound:  # else nobody can know it, should this worker die before its answer is read
            call.forgive()
        self.world.coverage.fates["bell_replayed"] += 1

    def _enqueue(self, dispatch: Dispatch) -> None:
        world = self.world
        dispatch.gpu_fate = "gpu_runs" if world.is_calm else world.rng.choices(GPU_FATES, world.gpu_weights)[0]
        world.coverage.fates[dispatch.gpu_fate] += 1
        self._loaded.add(dispatch.plan)
        self.gpu.append(dispatch)
        self.pump_gpu()

    def pump_gpu(self) -> None:
        """Streams go on where inputs are ready."""
        world = self.world
        for dispatch in self.gpu:
            call = dispatch.call
            assert call.turn is not None
            if dispatch.has_begun or world.stream(call).ready < call.turn.number:
                continue
            dispatch.has_begun = True
            slow_s = call.timeout_s * world.rng.uniform(0.8, 1.2) if dispatch.gpu_fate == "gpu_is_slow" else 0.0
            if dispatch.gpu_fate != "gpu_hangs":
                world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._finish, dispatch)

    def _finish(self, dispatch: Dispatch) -> None:
        if not self.is_alive:
            return
        if dispatch.gpu_fate == "gpu_dies":
            self.die(STICKY_EXIT)
            return
        self.gpu.remove(dispatch)
        del self.world.writers[dispatch.call.place]
        self.world.contents[dispatch.call.place] = dispatch.call
        self.world.turn_done(dispatch)
        self.pump()

    def _free(self) -> None:
        if self._current is not None:
            if self._current not in self.gpu and self._current.call.bell is None:
                del self.world.writers[self._current.call.place]
            if self._current.lane is not None:
                self.lane_end_s = self.world.now_s
            self._current = None

    def die(self, exit_code: int) -> None:
        if not self.is_alive:
            return
        self._free()
        for dispatch in (*self.gpu, *self.replaying.values()):
            del self.world.writers[dispatch.call.place]
        self.gpu.clear()
        self.replaying.clear()
        self.is_alive = False
        world = self.world
        self._loses_output = world.rng.random() < 0.3
        is_damaged = world.rng.random() >= 0.98 and exit_code != RENEWAL_EXIT  # one that ends itself is not that ill
        page = (world.rng.randrange(100), "unknown") if is_damaged else self.page
        world.push(world.now_s + world.delay_s(), world.exited, self, exit_code, page)


@dataclass(eq=False)
class Client:
    """A client process, and what the broker knows of its calls in `open`."""

    world: World
    number: int
    identity: bytes
    frames: Channel
    control: Channel
    inbound: Channel
    offered: int = 0  # arenas so far
    arenas: list[int] = field(default_factory=list)  # lent and not retired
    free: list[tuple[int, int]] = field(default_factory=list)
    routes: dict[int, Signature] = field(default_factory=dict)
    needs_digest: set[int] = field(default_factory=set)
    decisions: dict[int, Decision] = field(default_factory=dict)
    is_asleep: bool = False  # it does not watch the clock of its calls on lanes
    leases: dict[int, Lease] = field(default_factory=dict)
    offered_lanes: set[int] = field(default_factory=set)
    open: dict[int, Call] = field(default_factory=dict)
    seq: int = 0
    next_route: int = 1
    has_hung_up: bool = False  # by its own will
    has_left: bool = False  # the broker knows
    left_during: int = -1
    has_offended: bool = False
    has_gpu: bool = False
    streams: list[Stream] = field(default_factory=lambda: [Stream() for _ in range(STREAMS)])
    pending: dict[Turn, Call] = field(default_factory=dict)  # on a GPU: the broker has them
    bells: list[Bell] = field(default_factory=lambda: [Bell() for _ in range(3)])
    bound: dict[int, Call] = field(default_factory=dict)  # by bell, as the client knows

    def act(self) -> None:
        """Do one thing that a client may do, or rarely one that it may not."""
        if self.has_hung_up:
            return
        rng = self.world.rng
        if self.world.device and (not self.has_gpu or rng.random() < 0.02):
            self.control.send(self.world.gpu_offered, self, not self.has_gpu)
            self.has_gpu = True
        what = rng.random()
        if self.world.device and self.routes and self.free and rng.random() < self.world.graphs:
            self._bind_one()
            return
        if not self.routes or what < 0.08:
            self._define()
        elif not self.free or what < 0.12:
            self.offered += 1
            self.control.send(self.world.arena_offered, self, self.offered)
        elif what < 0.15:
            self._retire()
        elif what < 0.18:
            route = rng.choice(list(self.routes))
            on_rings = [call for stream in self.streams for call in stream.calls.values() if call.on_ring is not None]
            on_lanes = [lane.dispatch.call for lane in self.lanes() if lane.dispatch is not None]
            if not any(call.route == route for call in (*on_rings, *on_lanes)):
                del self.routes[route]
                self.leases.pop(route, None)
                self.frames.send(self.world.from_client, self, ev.RouteForgotten(self.identity, route))
        elif what < 0.19:
            self._offend()
        elif what < 0.20:
            route = rng.choice(list(self.routes))
            op = decode(self.routes[route].body, Route).op
            kernel_id = f"{rng.choice(sorted(SERVES[op]))}.{op}"
            error = BackendError("it failed here") if rng.random() < 0.3 else None
            for _ in range(rng.choice((1, 16))):
                ran = ev.RanInClient(self.identity, route, kernel_id, 1000, error)
                self.frames.send(self.world.from_client, self, ran)
        elif what < 0.225:
            self.world.learn()
        elif what < 0.229:
            self.hang_up()
        else:
            for _ in range(rng.choice((1, 1, 2, 5))):
                self._execute()

    def _define(self) -> None:
        signature = self.world.rng.choice(self.world.signatures)
        number, self.next_route = self.next_route, self.next_route + 1
        self.routes[number] = signature
        self.frames.send(self.world.from_client, self, ev.RouteDefined(self.identity, number, signature.body))

    def _bind_one(self) -> None:
        """Capture a call in a graph that is replayed and then dropped."""
        rng, world = self.world.rng, self.world
        free = [number for number in range(len(self.bells)) if number not in self.bound]
        if not free:
            return
        route = rng.choice(list(self.routes))
        arena, index = self.free.pop(rng.randrange(len(self.free)))
        place = index * 2 * SLOT
        body = wire.pack_refs([wire.Ref(arena, 0, place, SLOT), wire.Ref(arena, 0, place + SLOT, SLOT)])
        call = Call(self, route, self.routes[route], (arena, index), body, 0, world.limits.timeout_s)
        self.seq += 1
        call.seq, call.bell = self.seq, rng.choice(free)
        call.digest = bytes([call.number]) * wire.DIGEST_BYTES if route in self.needs_digest else b""
        self.bells[call.bell] = Bell(binding=call.seq)
        self.bound[call.bell] = call
        event = ev.CallArrived(self.identity, route, call.seq, 0.0, body, call.digest, bell=call.bell)
        self.frames.send(world.from_client, self, event, call)
        for _ in range(rng.randrange(6)):
            world.push(world.now_s + rng.uniform(0.0, 4.0), self._replay, call)
        if rng.random() < 0.8:
            world.push(world.now_s + rng.uniform(0.0, 6.0), self._unbind, call)

    def _is_bound(self, call: Call) -> bool:
        return call.bell is not None and self.bound.get(call.bell) is call and not self.has_hung_up

    def _replay(self, call: Call) -> None:
        if self._is_bound(call) and call.has_word and call.bell is not None and not self.bells[call.bell].is_busy:
            bell = self.bells[call.bell]
            bell.word, bell.is_done, bell.since_s = RUNG, False, self.world.now_s
            for process in self.world.processes.values():
                key = (self.number, call.bell)
                self.world.push(self.world.now_s + self.world.delay_s(), process.serve, key)
            self.world.plan_look()

    def _unbind(self, call: Call) -> None:
        if not self._is_bound(call) or call.bell is None:
            return
        if self.bells[call.bell].is_busy:
            self.world.push(self.world.now_s + 0.5, self._unbind, call)
            return
        self.world.coverage.fates["bell_unbound"] += 1
        del self.bound[call.bell]
        call.is_unbound = True
        self.frames.send(self.world.from_client, self, ev.CallUnbound(self.identity, call.seq))
        if call.has_word:
            self.free.append(call.slot)
        else:  # interrupted: once the broker has answered what came behind it
            self.frames.send(self.inbound.send, self.free.append, call.slot)

    def _bell_failed(self, call: Call) -> None:
        """It ends the waits of its graph itself."""
        if self._is_bound(call) and call.bell is not None:
            self.world.coverage.fates["bell_failed"] += 1
            del self.bound[call.bell]
            self.bells[call.bell] = Bell()
            self.free.append(call.slot)

    def lanes(self) -> list[Lane]:
        return [lane for lane in self.world.lanes.values() if lane.client is self]

    def _execute(self, route: int = 0) -> None:
        if not self.free:
            return
        rng = self.world.rng
        route = route or rng.choice(list(self.routes))
        arena, index = self.free.pop(rng.randrange(len(self.free)))
        place = index * 2 * SLOT
        source = rng.choice(self.arenas)  # an input may lie elsewhere
        body = wire.pack_refs([wire.Ref(source, 0, place, SLOT), wire.Ref(arena, 0, place + SLOT, SLOT)])
        timeout_s = rng.choice((0.0, 0.0, 0.5, 2.0))
        number = rng.choice((0, 1, 2, DEADLY))
        call = Call(self, route, self.routes[route], (arena, index), body, number, timeout_s)
        call.timeout_s = timeout_s or self.world.limits.timeout_s
        if not self._ride(call):
            self.submit(call, timeout_s)

    def _go_on(self, call: Call) -> None:
        """Many call the same op again and again."""
        is_done = self.has_hung_up or self.world.is_calm or call.route not in self.routes
        if not is_done and self.world.rng.random() < self.world.persistence:
            self._execute(call.route)

    def _ride(self, call: Call) -> bool:
        """Put the call on its express lane, if it has a lease and the lane is free."""
        lease, world = self.leases.get(call.route), self.world
        if lease is None or call.route in self.needs_digest:
            return False
        lane = world.lanes[lease.lane]
        if lane.number not in self.offered_lanes:
            if world.rng.random() < world.eagerness:
                self.offered_lanes.add(lane.number)
                self.control.send(world.lane_offered, self, lane)
            return False
        if lane.is_ended and lane.is_usable and world.device and world.rng.random() < 0.3:
            self._put(call, lane, lease)  # it does not see the word before that
            call.after = (lane.number, lane.calls)
            world.coverage.fates["ring_after_end"] += 1
            self.send(call, 0.0)
            return True
        if lane.is_ended or lane.is_broken or (lane.is_usable and lane.epoch != lease.epoch):
            del self.leases[call.route]
            return False
        if world.device:
            if lane.is_usable:
                world.coverage.fates["ring_called"] += 1
                self._put(call, lane, lease)
                call.on_ring = lane.ring[lane.calls]
                world.push(world.now_s, lane.process.pump)
                if world.rng.random() < 0.04:
                    self.hang_up()
            return lane.is_usable
        if not lane.is_usable or lane.dispatch is not None:
            return False
        world.coverage.fates["lane_called"] += 1
        arenas = frozenset((self.number, ref.arena) for ref in wire.unpack_refs(call.body, 2))
        lane.calls += 1
        lane.dispatch = Dispatch(mark(lane.number, lane.calls), 1, call, lease.plan, arenas, lane)
        lane.is_rung = True
        world.push(world.now_s, lane.process.pump)
        world.push(world.now_s + call.timeout_s, self._due_on_lane, lane, lane.calls)
        return True

    def _put(self, call: Call, lane: Lane, lease: Lease) -> None:
        call.timeout_s = self.world.limits.timeout_s
        self._take_turn(call)
        assert call.turn is not None
        arenas = frozenset((self.number, ref.arena) for ref in wire.unpack_refs(call.body, 2))
        lane.calls += 1
        lane.slots[lane.calls] = RingCall(lane.calls, call.route, lease.plan, call.seq, call.turn, call.body)
        if not lane.is_ended:
            lane.ring[lane.calls] = Dispatch(mark(lane.number, lane.calls), 1, call, lease.plan, arenas, lane)

    def ring_ended(self, lane: Lane) -> None:
        """It cannot know which calls the broker has read off the ring."""
        if self.has_hung_up:
            return
        for number, dispatch in lane.ring.items():
            call = dispatch.call
            if not call.has_passed and self.world.rng.random() < 0.5:
                self.world.coverage.fates["ring_again"] += 1
                self.frames.send(self.world.from_client, self, self._event(call, 0.0, (lane.number, number)))

    def leased(self, route: int, lease: Lease) -> None:
        if route in self.routes:
            self.leases[route] = lease

    def lane_added(self, lane: Lane) -> None:
        lane.is_usable = lane.is_open

    def _due_on_lane(self, lane: Lane, number: int) -> None:
        dispatch = lane.dispatch
        if self.has_hung_up or dispatch is None or lane.calls != number or lane.done >= number or lane.is_ended:
            return
        if self.is_asleep and not self.world.is_calm:
            self.world.push(self.world.now_s + BUSY_S, self._due_on_lane, lane, number)
        elif lane.is_rung:
            lane.is_rung, dispatch.is_over = False, True
            self._come_back(lane, "withdrawn")
        else:
            self.frames.send(self.world.lane_overdue, self, lane, number)
            self.world.push(self.world.now_s + OVERDUE_AGAIN_S, self._due_on_lane, lane, number)

    def lane_woken(self, lane: Lane, number: int) -> None:
        """The answer bell rang."""
        dispatch = lane.dispatch
        if self.has_hung_up or dispatch is None or lane.calls != number:
            return
        if lane.done < number:
            if lane.is_ended:
                dispatch.call.after = (lane.number, number)
                self.leases.pop(dispatch.call.route, None)
                self._come_back(lane, "lost")
        elif lane.status == "ran":
            self.world.coverage.fates["lane_ran"] += 1
            lane.dispatch = None
            self.answered(dispatch.call)
        else:
            lane.is_broken |= lane.status == "broken"
            self._come_back(lane, lane.status)

    def _come_back(self, lane: Lane, why: str) -> None:
        """The call did not end well on its lane: the broker shall have it."""
        dispatch = lane.dispatch
        assert dispatch is not None
        self.world.require(dispatch.is_over, "a call comes back from a lane while its worker has it")
        self.world.coverage.fates[f"lane_{why}"] += 1
        lane.dispatch = None
        self.submit(dispatch.call, dispatch.call.timeout_s)

    def submit(self, call: Call, timeout_s: float) -> None:
        call.digest = bytes([call.number]) * wire.DIGEST_BYTES if call.route in self.needs_digest else b""
        self._take_turn(call)
        self.send(call, timeout_s)

    def send(self, call: Call, timeout_s: float) -> None:
        self.frames.send(self.world.from_client, self, self._event(call, timeout_s, call.after), call)

    def _take_turn(self, call: Call) -> None:
        self.seq += 1
        call.seq = self.seq
        if self.world.device:
            lane = self.world.rng.randrange(self.world.streams)
            stream = self.streams[lane]
            stream.issued += 1
            call.turn = Turn(lane, stream.issued)
            stream.calls[stream.issued] = call
            self.world.push(self.world.now_s + self.world.delay_s(), self.advance, stream)

    def _event(self, call: Call, timeout_s: float, after: tuple[int, int]) -> ev.CallArrived:
        what = (self.identity, call.route, call.seq, timeout_s, call.body, call.digest)
        return ev.CallArrived(*what, after_lane=after[0], after_call=after[1], turn=call.turn)

    def advance(self, stream: Stream) -> None:
        """The stream goes on: past calls that are done, and to the next one."""
        if self.has_left or (self.has_hung_up and not self.has_offended):
            return
        while True:
            if stream.ready == stream.passed < stream.issued:
                stream.ready += 1
                stream.since_s = self.world.now_s
            if stream.passed == min(stream.done, stream.ready):
                break
            stream.passed += 1
            call = stream.calls.pop(stream.passed)
            call.has_passed = True
            is_lost = self.world.exits > 0 and not call.has_arrived  # the client hears BROKER_LOST
            is_there = call.has_failed or is_lost or self.world.contents.get(call.place) is call
            self.world.require(is_there, "the memory of a call that is done holds another one's result")
            if call.on_ring is not None and not call.has_failed:
                self._ran_on_ring(call)
            self._end(call)
        self.world.pump_gpus()

    def _retire(self) -> None:
        lent = [arena for arena in self.arenas if sum(slot[0] == arena for slot in self.free) == SLOTS]
        if len(lent) == len(self.arenas) and len(self.free) == SLOTS * len(self.arenas) and lent:
            arena = self.world.rng.choice(lent)  # nothing is open: no input lies in it either
            self.arenas.remove(arena)
            self.free = [slot for slot in self.free if slot[0] != arena]
            self.control.send(self.world.arena_retired, self, arena)

    def _offend(self) -> None:
        """Break the protocol in one of the ways that the core has to notice."""
        self.has_hung_up = self.has_offended = True
        identity, world = self.identity, self.world
        route = next(iter(self.routes))
        turn = Turn(0, self.streams[0].issued + world.rng.choice((0, 1))) if world.device else None
        if world.device:  # some offences look like calls that wait for their stream
            world.push(world.now_s + 2.0, self.hang_up)
        match world.rng.randrange(7):
            case 0:
                self.frames.send(world.from_client, self, ev.CallArrived(identity, 999, 0, 0.0, b""))
            case 1:
                self.frames.send(world.from_client, self, ev.RouteDefined(identity, route, route_body()))
            case 2:
                self.frames.send(world.from_client, self, ev.RouteDefined(identity, 999, b"\xc1"))
            case 3:
                self.frames.send(world.from_client, self, ev.CallArrived(identity, route, 0, 0.0, b"short", turn=turn))
            case 4:
                far = wire.pack_refs([wire.Ref(self.arenas[0], 0, ARENA_BYTES, SLOT)] * 2)
                self.frames.send(world.from_client, self, ev.CallArrived(identity, route, 0, 0.0, far, turn=turn))
            case 5 if world.lanes:  # another's, perhaps
                self.control.send(world.lane_offered, self, world.rng.choice(list(world.lanes.values())))
            case _:  # perhaps while a call uses it
                self.control.send(world.arena_retired, self, self.arenas[0])

    def hang_up(self) -> None:
        self.has_hung_up = True
        self.control.send(self.world.client_gone, self)

    def answered(self, call: Call) -> None:
        if not self.world.device:
            self.world.require(
                self.world.contents.get(call.place) is call, "the memory of an answered call holds another one's result"
            )
        is_first, call.has_word = not call.has_word, True
        if call.bell is not None:
            self.world.coverage.fates["bell_bound" if is_first else "bell_bound_again"] += 1
            return
        self._end(call)
        if is_first:
            self._go_on(call)

    def _ran_on_ring(self, call: Call) -> None:
        """Nobody tells its client."""
        is_first, call.has_word = not call.has_word, True
        self.world.coverage.fates["ring_ran"] += is_first
        if is_first:
            self.world.push(self.world.now_s, self._go_on, call)

    def _end(self, call: Call) -> None:
        """On a GPU its client must have been told of it, and its stream must have gone on."""
        if self.world.device and (call.has_ended or not (call.has_word and call.has_passed)):
            return
        self.world.require(not call.has_ended, "a call ends twice")
        call.has_ended = True
        self.free.append(call.slot)

    def refused(self, call: Call, error: LayerZeroError) -> None:
        has_gone_on, call.has_word = call.has_word, True
        if call.bell is not None:
            self._bell_failed(call)
            return
        match error.code:
            case "DIGEST_REQUIRED" if not call.digest and not self.has_hung_up and call.route in self.routes:
                self.world.require(not has_gone_on, "a call must show a digest after it was answered")
                call.has_ended = True  # its memory goes to the next one
                self.needs_digest.add(call.route)
                again = Call(self, call.route, call.signature, call.slot, call.body, call.number, call.timeout_s)
                again.after = call.after
                self.submit(again, call.timeout_s)
                return
            case "POISON" if not call.digest and not self.has_hung_up and call.route in self.routes:
                self.needs_digest.add(call.route)
                digest = bytes([call.number]) * wire.DIGEST_BYTES
                event = ev.CallPoisoned(self.identity, call.route, digest)
                self.frames.send(self.world.from_client, self, event)
            case "BROKER_LOST" if not self.has_hung_up and self.world.rng.random() < 0.2:
                self.hang_up()
        self._end(call)


class World:
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
        self._p_deaf = own.choice((0.0, 0.0, 0.2))
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
        self._look_at_s = math.inf
        self._event: ev.Event = ev.Tick()
        self._tick_at_s = math.inf
        self._history: deque[tuple[float, Any]] = deque(maxlen=80)

        self._held_since: dict[Key, int] = {}  # turns that were refused and not told -> number of the event of that
        known = GPU_CAPABILITIES if self.device else CAPABILITIES
        if self.compiles:
            platform = "cuda" if self.device else "cpu"
            known = {name: _capability(name, priority, platform, compiles=True) for name, priority in PRIORITY.items()}
        unusable = {"delta": Rejection(Reason.NOT_INSTALLED, "its environment is not built")}
        self.state = state_class(
            Engine(known, DEVICES[""], gpus=[DEVICES[GPU]]),
            unusable,
            self.limits,
            random.Random(seed + 1),
        )
        self._observe()

    def _observe(self) -> None:
        """Note transitions as the core makes them."""

        def signalled(worker: Worker, signal: Signal) -> None:
            self.coverage.transitions[worker.state, signal] += 1

        self.state.fleet.observer = signalled

    # --- the clock and the schedule ------------------------------------------------------------------

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
        for _ in range(rng.choice((0, 0, 2)) + self._kills):
            self.push(rng.uniform(0.0, BUSY_S), self._kill_one)
        if rng.random() < 0.4:
            self.push(rng.uniform(1.0, BUSY_S), self._shut_down_busy)
        if self.is_quiet:
            self.push(0.0, self._deliver, ev.PolicyChanged(Policy(weights=Weights(perfdb=1000.0))))
        self.push(BUSY_S, self._calm)
        self._run_out()
        for client in self.clients.values():
            self.require(not client.open, f"calls {sorted(client.open)} of client {client.number} are lost")
            on_lanes = [] if client.has_hung_up else [lane.number for lane in client.lanes() if lane.dispatch]
            self.require(not on_lanes, f"the calls on lanes {on_lanes} of client {client.number} are lost")
            if not client.has_hung_up:
                silent = [n for n, call in client.bound.items() if call.has_word and client.bells[n].is_busy]
                self.require(not silent, f"replays of client {client.number} hang at bells {silent}")
                stuck = [(s.issued, s.ready, s.done, s.passed) for s in client.streams if s.passed != s.issued]
                self.require(not stuck, f"streams of client {client.number} hang: {stuck}")
                self.require(not client.pending, f"turns {list(client.pending)} are never told of")
        if rng.random() < 0.7:
            for client in self.clients.values():
                client.hang_up()
            self._run_out()
            self._check_nothing_left()
        self._shut_down()
        self._run_out()
        self.require(self.exits == 1, f"{self.exits} Exits after a shutdown")
        self.coverage.fates["late_answer"] = self.state.fleet.stale
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

    # --- events --------------------------------------------------------------------------------------

    def _deliver(self, event: ev.Event) -> None:
        self._events += 1
        self._handle(event)
        self._check()
        self.plan_look()
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
        for key in self.state.turns.held:
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

    def plan_look(self) -> None:
        is_awaited = self.state.is_awaited
        rings = {lane.number: lane for lane in self.lanes.values() if lane.is_open and lane.ring}
        has_calls = any(self._on_ring(lane) for lane in rings.values())
        has_calls |= any(self._busy_bells(process) for process in self.processes.values())
        if is_awaited or has_calls or any(process.enqueued for process in self.processes.values()):
            at_s = self.now_s + (AWAITED_LOOK_S if is_awaited or self._is_stopping else LOOK_S)
            if at_s < self._look_at_s:
                self._look_at_s = at_s
                self.push(at_s, self._look, at_s)

    def _look(self, at_s: float) -> None:
        if at_s == self._look_at_s:
            self._look_at_s = math.inf
            self.look_at_turns()
            self.look_at_rings()
            bound = {n: one for process in self.processes.values() for n, one in process.bound.items()}
            if bound or self.state.bells.is_awaited:
                self._deliver(ev.BellsSeen(self._see_bells()))
            self.plan_look()

    def _see_bells(self) -> dict[int, int]:
        """Those that are busy. The others' calls start anew: what was tried for one replay is over."""
        busy = {n: word for process in self.processes.values() for n, word in self._busy_bells(process).items()}
        for process in self.processes.values():
            for number, dispatch in process.bound.items():
                if number not in busy:
                    dispatch.call.forgive()
        return busy

    @staticmethod
    def _busy_bells(process: Process) -> dict[int, int]:
        bells = {n: d.call.client.bells[d.call.bell or 0] for n, d in process.bound.items()}
        return {number: bell.word for number, bell in bells.items() if bell.is_busy}

    def _on_ring(self, lane: Lane) -> list[int]:
        """Calls on it whose turns are not done."""
        return [n for n, one in lane.slots.items() if (t := one.turn) and self._stream_of(lane, t).done < t.number]

    @staticmethod
    def _stream_of(lane: Lane, turn: Turn) -> Stream:
        assert lane.client is not None
        return lane.client.streams[turn.lane]

    def _look_on(self, lane: Lane) -> ev.RingLook:
        calls = [lane.slots[number] for number in self._on_ring(lane)]
        ready = {one.call for one in calls if self._stream_of(lane, one.turn).ready >= one.turn.number}
        return ev.RingLook(lane.calls, lane.done, calls, ready)

    def look_at_rings(self) -> None:
        if self.device:
            rings = [lane for lane in self.lanes.values() if lane.is_open]
            if rings:
                self._deliver(ev.RingsSeen({lane.number: self._look_on(lane) for lane in rings}))

    def look_at_turns(self, only: Process | None = None) -> None:
        """What order pages say."""
        for process in [p for p in self.processes.values() if (p.enqueued or p is only) and only in (None, p)]:
            done, ready = [], set()
            unanswered = {d.number: d for d in process.sent if process is only and d.call.turn is not None}
            for number, dispatch in {**process.enqueued, **unanswered}.items():
                call, stream = dispatch.call, self.stream(dispatch.call)
                assert call.turn is not None
                if stream.done >= call.turn.number:
                    done.append(number)
                elif stream.ready >= call.turn.number:
                    ready.add(number)
            for number in done:
                if number in unanswered:
                    process.sent.remove(unanswered[number])
                    call = unanswered[number].call
                else:
                    call = process.enqueued.pop(number).call
                assert call.turn is not None
                call.client.pending.pop(call.turn, None)
            seen = ev.TurnsSeen(process.backend, process.generation, done, ready)
            if only is None:
                self._deliver(seen)
            elif self.device:
                self._handle(seen)  # what is said of a worker that has ended is complete with its exit
        clients = {client.number: client for client in self.clients.values()}
        streams = {key: clients[key[0]].streams[key[2].lane] for key in self.state.turns.held if only is None}
        reached = [key for key, stream in streams.items() if stream.ready >= key[2].number]
        if reached:
            self._deliver(ev.TurnsReached(reached))

    def stream(self, call: Call) -> Stream:
        assert call.turn is not None
        return call.client.streams[call.turn.lane]

    def pump_gpus(self) -> None:
        for process in self.processes.values():
            if process.is_alive:
                process.pump_gpu()

    def turn_done(self, dispatch: Dispatch) -> None:
        """The worker's stream writes the word."""
        call, stream = dispatch.call, self.stream(dispatch.call)
        assert call.turn is not None
        is_next = call.turn.number == stream.done + 1 or (call.client.has_left and call.turn.number > stream.done)
        self.require(is_next, "turns of a lane are done out of order")
        call.is_done = dispatch.is_over = True
        stream.done, stream.since_s = call.turn.number, self.now_s
        self.push(self.now_s + self.delay_s(), call.client.advance, stream)

    def gpu_offered(self, client: Client, has_new_page: bool) -> None:
        if not client.has_left and not self.state.bells.holds(client.identity, GPU):  # the server refuses it
            self.coverage.fates["offered_again"] += not has_new_page
            self.look_at_turns()
            self._deliver(ev.GpuOffered(client.identity, GPU, has_new_page))

    def _tick(self) -> None:
        self._tick_at_s = math.inf
        if self.now_s >= self.state.wakeup_s:
            self.look_at_turns()
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

    def from_client(self, client: Client, event: ev.Event, call: Call | None = None) -> None:
        """By ZeroMQ; the server passes nothing on for a client that has gone."""
        if client.has_left:
            return
        if call is not None:
            self._note_arrival(client, call)
            call.since_s, call.has_arrived = self.now_s, True
            call.is_crowded = self.state.clients[client.identity].open_calls >= self.limits.max_in_flight
            if call.after[0]:
                self._count_lost(call, self.lanes[call.after[0]])
        elif isinstance(event, ev.CallUnbound):
            client.open.pop(event.seq, None)
        elif isinstance(event, ev.CallPoisoned):
            route = self.state.clients[client.identity].routes.get(event.route)
            if route is not None:
                key = (route.signature.key, event.digest)
                self._quarantine[key] = self.now_s + self.limits.poison_quarantine_s
        self._deliver(event)

    def _note_arrival(self, client: Client, call: Call) -> None:
        """The broker has it now."""
        client.open[call.seq] = call
        if call.turn is not None:
            client.pending[call.turn] = call
        if self.device:
            key = (client.number, GPU)
            call.deaf = {b for b in call.signature.backends if key in self.state.workers[b].deaf}
        until_s = self._quarantine.get((call.signature.body, call.digest), 0.0)
        call.is_quarantined = until_s > self.now_s

    def _count_lost(self, call: Call, lane: Lane) -> None:
        """It comes from a lane that ended: one attempt more, and perhaps a death."""
        process = lane.process
        call.dispatches.append(Dispatch(lane.blamed, 1, call, 0, frozenset(), lane, is_over=True))
        if lane.blamed == mark(*call.after):
            self.coverage.fates["lane_blamed"] += 1
            call.failed_on.add(process.backend)
            if process.kill_reason:
                call.faults.add(process.kill_reason)
            else:
                call.deaths += 1

    def lane_offered(self, client: Client, lane: Lane) -> None:
        """By the control socket; the server itself refuses a lane that it has."""
        if client.has_left or lane.is_open:
            return
        if lane.client is client:
            lane.is_open = True
            self.coverage.fates["lane_opened_late"] += lane.core_epoch > 0
        self._deliver(ev.LaneOpened(client.identity, lane.number, self.device))
        if lane.is_open and not lane.is_taken_back:
            self.require(lane.epoch == lane.core_epoch, "a lane opens with leases that were taken back")
        client.inbound.send(client.lane_added, lane)

    def lane_overdue(self, client: Client, lane: Lane, number: int) -> None:
        """By ZeroMQ; the server passes on what the page confirms."""
        if not client.has_left and lane.is_open and lane.done < number and lane.dispatch is not None:
            self.coverage.fates["lane_overdue"] += 1
            call = lane.dispatch.call
            self._deliver(ev.LaneOverdue(client.identity, lane.number, call.route, call.timeout_s, number))

    def lane_done(self, lane: Lane, status: str) -> None:
        """The worker writes the end of a call into the page, and rings."""
        assert lane.client is not None
        assert lane.dispatch is not None
        lane.done, lane.status, lane.dispatch.is_over = lane.calls, status, True
        self.push(self.now_s + self.delay_s(), lane.client.lane_woken, lane, lane.calls)
        if self.rng.random() < 0.3:
            self.push(self.now_s + self.rng.uniform(0.0, 1.0), self._look_at, lane)

    def _look_at(self, lane: Lane) -> None:
        calls = lane.done - lane.seen
        if lane.is_open and calls:
            lane.seen = lane.done
            plan = lane.dispatch.plan if lane.dispatch is not None and lane.status == "ran" else 0
            plan = lane.ring[lane.done].plan if lane.ring else plan
            self._deliver(ev.LaneSeen(lane.number, calls, plan, self.rng.randrange(1000, 10**6)))

    def learn(self) -> None:
        """Someone has saved policy.yaml; a shadow check has ended; an earlier broker's times are read."""
        what = self.rng.random()
        if what < 0.4:
            weights = Weights(perfdb=self.rng.choice((0.0, 1000.0, 1000.0)))
            self._deliver(ev.PolicyChanged(Policy(weights=weights)))
        elif what < 0.5 and self.compiles:
            spec = CallSpec.parse(route_body(device=self.device))
            self._deliver(ev.CompileAsked(spec, list(PRIORITY)))
        elif what < 0.7:  # only what serves nobody is taken out, so that the model of who serves whom holds
            kernel_id, error = self.rng.choice((("alpha.silu", 0.0), ("nobody.silu", 1.0)))
            subject = Subject(kernel_id, "float32", "plain/small/dense")
            self._deliver(ev.ShadowCompared(Comparison(subject, "beta.silu", error)))
        else:
            key = self.state.engine.context(CallSpec.parse(route_body())).perf_key()
            stat = Stat(20, self.rng.uniform(1.0, 1000.0), 2000.0, 1.0, 0.0, 0.0)
            self._deliver(ev.TimesLoaded([PerfRow("alpha.silu", key, stat)]))

    def arena_offered(self, client: Client, arena: int) -> None:
        if not client.has_left:
            self._arenas.add((client.number, arena))
            self._deliver(ev.ArenaOffered(client.identity, arena, ARENA_BYTES, self.device))
            client.inbound.send(self._arena_added, client, arena)

    def _arena_added(self, client: Client, arena: int) -> None:
        client.arenas.append(arena)
        client.free += [(arena, index) for index in range(SLOTS)]

    def arena_retired(self, client: Client, arena: int) -> None:
        if not client.has_left:
            self.look_at_turns()
            self._deliver(ev.ArenaGivenUp(client.identity, arena))

    def client_gone(self, client: Client) -> None:
        if client.identity in self.clients and not client.has_left:
            self._leave(client)
            self._deliver(ev.ClientLeft(client.identity))

    def _leave(self, client: Client) -> None:
        self.coverage.fates["lane_left"] += any(lane.dispatch is not None for lane in client.lanes())
        client.has_left = client.has_hung_up = True
        client.left_during = self._events
        client.open.clear()
        client.pending.clear()

    def from_worker(self, process: Process, event: ev.Event) -> None:
        is_heard = not process.is_confirmed_dead and not process.kill_reason
        if isinstance(event, ev.CallRan | ev.CallRaised):
            head = process.sent[0] if process.sent else None
            if is_heard and head is not None and (head.number, head.attempt) == (event.dispatch, event.attempt):
                process.sent.popleft()
                process.head_since_s = self.now_s
                if head.call.bell is not None and isinstance(event, ev.CallRan):
                    if head.call.seq in head.call.client.open or head.call.client.has_left:
                        process.bound[head.number] = head
                    else:  # its client wants it no more
                        head.is_over = True
                elif self.device and isinstance(event, ev.CallRan):
                    process.enqueued[head.number] = head
                    head.answered_s = self.now_s
                else:
                    head.is_over = True
                if isinstance(event, ev.CallRaised):
                    head.call.failed_on.add(process.backend)
        elif isinstance(event, ev.CallLeft):
            lane = self.lanes[event.lane]
            call = lane.ring[event.call.call].call
            if is_heard and lane.number in self.state.leases.lanes:
                lane.left.add(event.call.call)
                if not call.client.has_left:
                    self._note_arrival(call.client, call)
                    if event.error is not None and not self._is_stopping and not call.is_quarantined:
                        call.dispatches.append(lane.ring[event.call.call])
                        call.failed_on.add(process.backend)
        elif isinstance(event, ev.WorkerReady) and is_heard and not self._is_stopping:
            process.was_ready = True
            self._has_served.add(process.backend)
        self._deliver(event)

    def exited(self, process: Process, exit_code: int, page: tuple[int, str]) -> None:
        """Its exit is confirmed, some time after it died."""
        backend = process.backend
        self.look_at_turns()
        process.exit_code = exit_code
        executing = 0 if process.has_renewed else page[0]
        lanes = [lane for lane in self.lanes.values() if lane.process is process]
        for lane in lanes:
            self._look_at(lane)
            lane.blamed = process.killed_for if process.kill_reason else executing
            if lane.dispatch is not None:
                lane.dispatch.is_over = True
        heads = list(process.sent)[:1]
        self.look_at_turns(process)
        if heads != list(process.sent)[:1] and process.late is None and not process.killed_for:
            process.late = heads[0]  # it is done after all, and nobody else is to blame
        process.is_confirmed_dead = True
        looks = {lane.number: self._look_on(lane) for lane in lanes if lane.is_open and self.device}
        stranded = [
            (one, n in looks[lane.number].ready)
            for lane in lanes
            if lane.number in looks
            for n, one in lane.ring.items()
            if n not in lane.left and one.call.turn in {c.turn for c in looks[lane.number].calls}
        ]
        stranded = [(one, is_ready) for one, is_ready in stranded if not one.call.client.has_left]
        wanted = process.killed_for if process.kill_reason else executing if exit_code != STICKY_EXIT else 0
        guilty = next((one for one, _ in stranded if one.number == wanted), None)
        is_sticky = self._lose_enqueued(process, exit_code, executing if process.has_crashed and guilty is None else -1)
        in_running = exit_code != STICKY_EXIT and any(d.number == executing for d in process.sent)
        if guilty is None and not is_sticky and process.has_crashed and not in_running:
            guilty = next((one for one, is_ready in stranded if is_ready), None)
        if self.device:
            self._handle(ev.BellsSeen(self._see_bells()))
        may_be_bell = not is_sticky and guilty is None and process.has_crashed and not in_running
        is_sticky |= self._lose_bound(process, may_be_bell) or guilty is not None
        self._strand(process, [one for one, _ in stranded], guilty)
        for position, dispatch in enumerate(process.sent):
            dispatch.is_over = True
            is_first = position == 0 and not process.killed_for and process.late is None
            is_blamed = is_first if process.kill_reason else dispatch.number == executing and not is_sticky
            if is_blamed:
                dispatch.call.failed_on.add(backend)
                dispatch.call.deaths += not process.kill_reason
        process.sent.clear()
        self._count_exit(process)
        failures = self._failures(backend)
        self._deliver(self._exit_event(process, exit_code, page, looks))
        is_well = not process.has_renewed or self._failures(backend) == failures
        self.require(is_well, f"the kernels of {backend} are blamed although it only began anew")

    def _failures(self, backend: str) -> int:
        """What counts against its kernels."""
        health = self.state.engine.health
        return sum(health.view(*place, self.now_s).failures for place in health.places() if place[0] == backend)

    def _exit_event(
        self, process: Process, exit_code: int, page: tuple[int, str], looks: Mapping[int, ev.RingLook]
    ) -> ev.WorkerExited:
        words = "Traceback\nlast words"
        return ev.WorkerExited(process.backend, process.generation, exit_code, *page, words, looks)

    def _count_exit(self, process: Process) -> None:
        """What the restart budget must be."""
        backend, crashes = process.backend, self._crashes[process.backend]
        if process.kill_reason != "deadline" and not process.has_renewed:
            crashes.append(self.now_s)
        recent = [at_s for at_s in crashes if at_s >= self.now_s - self.limits.restart_window_s]
        if backend not in self._has_served:
            self._is_broken[backend] = "never ready"
        elif len(recent) > self.limits.restart_budget:
            self._is_broken[backend] = "budget"
        self._restart_from_s[backend] = self.now_s + 0.75 * self.limits.backoff_s

    def _lose_bound(self, process: Process, is_open: bool) -> bool:
        """What it had bound is bound elsewhere, or ends. Whether one is to blame for its end."""
        busy = self._busy_bells(process)
        guilty = next((n for n in process.bound if n in busy), None) if is_open else None
        for number, dispatch in process.bound.items():
            call = dispatch.call
            dispatch.is_over = True
            if dispatch is process.late or number == guilty:
                call.failed_on.add(process.backend)
                call.deaths += not process.kill_reason
            if not call.client.has_left:
                call.client.open[call.seq] = call
        process.bound.clear()
        return guilty is not None

    def _strand(self, process: Process, stranded: list[Dispatch], guilty: Dispatch | None) -> None:
        """What was on its rings comes to the broker."""
        for one in stranded:
            call = one.call
            self.coverage.fates["ring_stranded"] += 1
            one.is_over = True
            self._note_arrival(call.client, call)
            if call.is_quarantined or self._is_stopping:
                continue
            call.dispatches.append(one)
            if one is guilty:
                self.coverage.fates["ring_blamed"] += 1
                call.failed_on.add(process.backend)
                call.deaths += not process.kill_reason
                if process.kill_reason:
                    call.faults.add(process.kill_reason)
            else:
                call.is_innocent_of = process.pid

    def _lose_enqueued(self, process: Process, exit_code: int, executing: int) -> bool:
        """What its GPU was not done with runs again. Whether its end is to blame on one of them."""
        is_open = executing >= 0
        if is_open and exit_code != STICKY_EXIT and any(d.number == executing for d in process.sent):
            is_open = False
        has_blamed = False
        for dispatch in process.enqueued.values():
            call = dispatch.call
            dispatch.is_over = True
            stream = self.stream(call)
            is_first = call.turn is not None and stream.done < call.turn.number <= stream.ready
            is_blamed = dispatch is process.late or (is_open and not has_blamed and is_first)
            if is_blamed:
                has_blamed = True
                call.failed_on.add(process.backend)
                call.deaths += not process.kill_reason
            if not call.client.has_left:
                call.client.open[call.seq] = call
        process.enqueued.clear()
        return has_blamed

    def _reset(self, backend: str) -> None:
        missing = Rejection(Reason.NOT_INSTALLED, "its environment is not built") if self.rng.random() < 0.2 else None
        if missing is None:
            self._missing.discard(backend)
        else:
            self._missing.add(backend)
        if self.state.workers[backend].state in (WorkerState.DISABLED, WorkerState.BACKOFF, WorkerState.ABSENT):
            self._is_broken.pop(backend, None)
            self._restart_from_s.pop(backend, None)
            self._crashes[backend].clear()
        for unit in [u for u, is_good in self._compiled.items() if not is_good and u.kernel_id.startswith(backend)]:
            del self._compiled[unit]  # and may be tried again
        self._deliver(ev.BackendReset(backend, missing))

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

    # --- actions: what the server does ---------------------------------------------------------------

    def _probe(self, action: act.Probe) -> None:
        backend = action.backend
        fails = backend in self._missing or (not self.is_calm and self.rng.random() < self._p_probe_fails)
        self.push(self.now_s + self.rng.uniform(0.0, 0.5), self._probed, backend, fails)

    def _probed(self, backend: str, fails: bool) -> None:
        if fails:
            self._is_broken[backend] = "probe"
        self._restart_from_s.pop(backend, None)
        error = EnvError("no module named lib", env=backend) if fails else None
        self._deliver(ev.ProbeEnded(backend, error, None if fails or not self.compiles else _record(backend)))

    def _compile(self, action: act.Compile) -> None:
        backend, unit = action.backend, action.unit
        self.require(backend not in self._compiling, "a backend compiles two things at a time")
        self.require(not self._compiled.get(unit), "something is compiled twice")
        self.require(backend in COMPILES and self.compiles, "something is compiled that need not be")
        self.require(not self._is_stopping, "something is compiled during the shutdown")
        self._compiling[backend] = unit
        fails = not self.is_calm and self.rng.random() < self._p_compile_fails
        self.push(self.now_s + self.rng.uniform(0.0, self._compile_s), self._compile_ended, backend, unit, fails)

    def _compile_ended(self, backend: str, unit: Unit, fails: bool) -> None:
        del self._compiling[backend]
        self._compiled[unit] = not fails
        self.coverage.fates["compile_failed" if fails else "compiled"] += 1
        self._deliver(ev.CompileEnded(backend, unit, "nvcc: error" if fails else "", 1.0))

    def _is_compiled(self, backend: str, call: Call) -> bool | None:
        """False when that has failed, None when it is not over."""
        if not self.compiles or backend not in COMPILES:
            return True
        spec = CallSpec.parse(call.signature.body)
        return self._compiled.get(unit_of(f"{backend}.{spec.op}", ["dtypes"], spec))

    def _spawn(self, action: act.Spawn) -> None:
        backend, generation = action.backend, action.generation
        others = [p for p in self.processes.values() if p.backend == backend and not p.is_over]
        self.require(not others, f"{backend} is spawned while its worker before is not known to be dead")
        self.require(backend not in self._is_broken, f"{backend} is restarted in spite of: {self._is_broken}")
        self.require(self.now_s >= self._restart_from_s.get(backend, 0.0), f"{backend} is restarted without back-off")
        if not self.is_calm and self.rng.random() < self._p_spawn_fails:
            self._is_broken[backend] = "spawn"
            self._handle(ev.SpawnFailed(backend, generation, EnvChanged("a file has changed", env=backend)))
            return
        self._pids += 1
        process = self._new_process(backend, generation, self._pids)
        self.processes[backend, generation] = self._by_identity[process.identity] = process
        self._handle(ev.WorkerSpawned(backend, generation, process.pid))
        self.push(self.now_s + self.rng.uniform(0.0, 1.0), process.load)

    def kill(self, process: Process) -> None:
        self.push(self.now_s + self.delay_s(), process.die, -9)

    def _kill(self, action: act.Kill) -> None:
        process = self.processes[action.backend, action.generation]
        event = self._event
        is_overdue = isinstance(event, ev.LaneOverdue | ev.RingsSeen | ev.BellsSeen)
        is_deadline = is_overdue or (type(event) is ev.Tick and process.was_ready)
        self.require(not process.kill_reason, "a worker is killed twice")
        process.kill_reason = "deadline" if is_deadline else "fault"
        worker = self.state.workers[action.backend]
        late = worker.enqueued.get(worker.blame.dispatch) or worker.bells.get(worker.blame.dispatch)
        process.killed_during = self._events
        if isinstance(event, ev.LaneOverdue):
            process.killed_for = mark(event.lane, event.call)
        elif isinstance(event, ev.RingsSeen):
            process.killed_for = self.state.workers[action.backend].blame.mark
            self.coverage.fates["ring_late"] += 1
            (late_one,) = (
                one
                for lane in self.lanes.values()
                for number, one in lane.ring.items()
                if one.number == process.killed_for and number not in lane.left
            )
            turn, stream = late_one.call.turn, self.stream(late_one.call)
            assert turn is not None
            is_in_gpu = stream.done + 1 == turn.number <= stream.ready or late_one.call.client.has_left
            is_long = self.now_s - stream.since_s >= self.limits.timeout_s - 1e-9
            self.require(is_in_gpu and is_long, "a worker is killed for a call of a ring that is not late")
        elif is_deadline and process.page[0] & EXECUTING and late is None:
            process.killed_for = process.page[0]
            is_long = self.now_s - process.began_s >= self.limits.timeout_s - 1e-9
            self.require(is_long, "a worker is killed for a head that waits for a call of a lane")
        elif late is not None:
            if late.bell is not None:
                self.coverage.fates["bell_late"] += 1
                process.late = process.bound[late.dispatch]
                process.late.call.faults.add("deadline")
                bell = process.late.call.client.bells[late.bell]
                is_long = bell.is_busy and self.now_s - bell.since_s >= self.limits.timeout_s / 2 - 1e-9
                self.require(is_long, "a worker is killed for a bell that is not late")
                self.kill(process)
                return
            self.coverage.fates["turn_late"] += 1
            process.late = process.enqueued[late.dispatch]
            process.late.call.faults.add("deadline")
            stream = self.stream(process.late.call)
            assert process.late.call.turn is not None
            is_next = process.late.call.turn.number == stream.done + 1
            is_in_gpu = is_next or process.late.call.client.has_left
            is_long = self.now_s - max(stream.since_s, process.late.answered_s) >= late.timeout_s - 1e-9
            self.require(is_in_gpu and is_long, "a worker is killed for a call that its GPU has not had for so long")
        elif process.sent:
            process.sent[0].call.faults.add(process.kill_reason)
        self.kill(process)

    def _stop(self, action: act.StopWorker) -> None:
        process = self.processes[action.backend, action.generation]
        if action.identity:
            process.send("stop")
            self.push(self.now_s + STOP_GRACE_S, process.die, -9)
        else:
            self.kill(process)

    def _worker(self, identity: bytes, what: str) -> Process:
        process = self._by_identity.get(identity)
        self.require(process is not None and not process.is_over, f"{what} to a worker that is dead")
        assert process is not None
        return process

    def _prepare(self, action: act.SendPrepare) -> None:
        process = self._worker(action.identity, "Prepare")
        process.prepared.add(action.plan)
        process.send("prepare", action.plan)

    def _drop(self, action: act.SendDrop) -> None:
        process = self._worker(action.identity, "Drop")
        self.require(action.plan in process.prepared, "Drop of a plan that the worker never got")
        process.prepared.discard(action.plan)
        process.send("drop", action.plan)

    def _lend(self, action: act.LendArena) -> None:
        process, arena = self.processes[action.backend, action.generation], (action.client, action.arena)
        self.require(not process.is_confirmed_dead, "an arena is lent to a dead worker")
        self.require(arena in self._arenas, "an arena is lent that the broker closed")
        process.lent.add(arena)
        process.tell("map", arena)

    @staticmethod
    def _is_used(arena: tuple[int, int], process: Process) -> bool:
        """By a call of which the broker must know. From what is on a ring a client that offends may take its own memory
        away; the worker lets go of it once the GPU is through."""
        known = (d for d in process.held if d.lane is None or not d.call.client.has_offended)
        return any(arena in d.arenas for d in known)

    def _take_back(self, action: act.TakeBackArena) -> None:
        process, arena = self.processes[action.backend, action.generation], (action.client, action.arena)
        self.require(not process.is_confirmed_dead, "an arena is taken back from a dead worker")
        self.require(not self._is_used(arena, process), "an arena is taken back while a call uses it")
        process.lent.discard(arena)
        process.tell("unmap", arena)

    def _lend_gpu(self, action: act.LendGpu) -> None:
        process = self.processes[action.backend, action.generation]
        self.require(not process.is_confirmed_dead, "a GPU is lent to a dead worker")
        self.require(action.gpu == GPU and action.client not in process.gpus, "a worker is told twice of a GPU")
        taken = {p.slot for p in self.processes.values() if p is not process}
        self.require(action.slot > 0 and action.slot not in taken, "two starts of workers have one slot")
        process.slot = action.slot
        process.gpus.add(action.client)
        for lane in range(STREAMS):
            process.last_turns.pop((action.client, lane), None)
        process.deaf.discard(action.client)
        if not self.is_calm and self.rng.random() < self._p_deaf:
            self.coverage.fates["deaf"] += 1
            process.deaf.add(action.client)

    def _take_back_gpu(self, action: act.TakeBackGpu) -> None:
        process = self.processes[action.backend, action.generation]
        self.require(not process.is_confirmed_dead, "a GPU is taken back from a dead worker")
        self.require(action.client in process.gpus, "a GPU is taken back that was not lent")
        process.gpus.discard(action.client)

    def _close_gpu(self, action: act.CloseGpu) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        held = [d for p in self.processes.values() for d in p.held if d.call.client is client]
        self.require(client.has_left and not held, "an order page is closed that a worker needs")
        client.has_gpu = False

    def _fail_turn(self, action: act.FailTurn) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        if client.has_left:
            self.require(client.left_during == self._events, "the turn of a client that has left fails")
            return
        stream = client.streams[action.turn.lane]
        call = stream.calls.get(action.turn.number)
        is_stale = call is None or action.turn.number <= stream.done
        if (is_stale and client.has_offended) or (call is None and self.exits):
            return  # its offence was not even looked at; or it came when the broker had ended its stream
        self.require(call is not None, "a turn fails that was not taken")
        assert call is not None
        is_last = isinstance(self._event, ev.WorkerExited | ev.SpawnFailed | ev.ShutdownAsked) and self._is_stopping
        is_next = action.turn.number == stream.done + 1 <= stream.ready
        self.require(is_next or is_last, "a turn fails before its client's stream has come to it")
        self.require(not call.is_done, "a turn fails that is done")
        self.require(all(d.is_over for d in call.dispatches), "a turn fails that a worker may finish")
        self.coverage.fates["turn_failed"] += 1
        self.coverage.fates["turn_held"] += type(self._event) is ev.TurnsReached
        call.has_failed = True
        stream.done, stream.since_s = action.turn.number, self.now_s
        self.push(self.now_s + self.delay_s(), client.advance, stream)

    def _release_turn(self, action: act.ReleaseTurn) -> None:
        client = next(c for c in self.clients.values() if c.number == action.client)
        self.require(client.has_left, "inputs count as ready although their client is there")
        self.coverage.fates["turn_released"] += 1
        stream = client.streams[action.turn.lane]
        held = [d.call.turn for p in self.processes.values() if p.is_alive for d in p.held if d.call.client is client]
        held += [
            one.call.turn
            for lane in self.lanes.values()
            if lane.client is client and lane.process.is_alive
            for number, one in lane.ring.items()
            if number > lane.done and not lane.is_taken_back
        ]
        open_turns = [turn.number for turn in held if turn is not None and turn.lane == action.turn.lane]
        is_first = not any(stream.done < number < action.turn.number for number in open_turns)
        self.require(is_first, "inputs count as ready before what comes before is done")
        if stream.ready < action.turn.number:
            stream.ready, stream.since_s = action.turn.number, self.now_s
        self.pump_gpus()

    def _allow(self, action: act.SendAllow) -> None:
        process = self._worker(action.identity, "Allow")
        self.require(self.limits.express, "a lane is used although lanes are off")
        lane = self.lanes[action.lane]
        self.require(lane.process is process, "a lane leads to two workers")
        is_known = action.plan in process.prepared or lane.is_taken_back
        self.require(is_known, "a plan is allowed that the worker never got")
        process.send("allow", (action.lane, action.plan))

    def _lease(self, action: act.SendLease) -> None:
        lease = decode(action.body, Lease)
        lane, client = self.lanes[lease.lane], self.clients[action.identity]
        route = self.state.clients[client.identity].routes.get(action.route) if not client.has_left else None
        if self._to_client(action.identity) is None:
            return
        decision = client.decisions.get(action.decision)
        self.require(decision is not None, "a lease before its decision")
        assert decision is not None
        self.require(route is not None, "a lease for a route that was forgotten")
        assert route is not None
        if not self._is_nested:
            best = next(iter(self.state.signatures.order(route.signature)), None)
            is_best = best is not None and best.kernel_id == decision.kernel_id
            self.require(is_best and not lane.process.kill_reason, "a lease for what would not be chosen again")
            until_s = [at_s for key, at_s in self._quarantine.items() if key[0] == route.signature.key]
            self.require(max(until_s, default=0.0) <= self.now_s, "a lease for calls that must show a digest")
            self.require(not self._is_stopping, "a lease during the shutdown")
        lane.granted[action.route] = (lease.epoch, self.state.engine.epoch, decision.kernel_id)
        lane.stale_since_s.pop(action.route, None)
        client.inbound.send(client.leased, action.route, lease)

    def _lend_lane(self, action: act.LendLane) -> None:
        lane, process = self.lanes[action.lane], self.processes[action.backend, action.generation]
        self.require(lane.is_open and not lane.is_ended, "a lane is lent that is not open")
        self.require(lane.process is process and not process.is_confirmed_dead, "a lane is lent to a dead worker")
        process.tell("map_lane", lane)

    def _revoke_lane(self, action: act.RevokeLane) -> None:
        lane = self.lanes[action.lane]
        self.require(action.epoch >= lane.core_epoch, "the epoch of a lane goes back")
        lane.core_epoch = action.epoch
        if lane.is_open:
            lane.epoch = action.epoch

    def _take_back_lane(self, action: act.TakeBackLane) -> None:
        lane, process = self.lanes[action.lane], self.processes[action.backend, action.generation]
        self.require(lane.process is process and not process.is_confirmed_dead, "a dead worker is told of a lane")
        assert lane.client is not None
        self.require(lane.client.has_left, "a lane is taken back from a client that is there")
        if lane.ring:
            self.coverage.fates["ring_survived_client"] += 1
            self.require(lane.left >= set(self._on_ring(lane)), "a ring is taken back with calls on it")
        lane.is_taken_back, lane.is_open = True, False
        process.tell("unmap_lane", lane)

    def _end_lane(self, action: act.EndLane) -> None:
        lane, event = self.lanes[action.lane], self._event
        client = lane.client
        assert client is not None
        if isinstance(event, ev.LaneOpened) and event.identity != client.identity:
            return  # an impostor's page
        self.require(lane.process.is_confirmed_dead, "a lane ends while its worker may run")
        self.coverage.fates["lane_ended_unopened"] += not lane.is_open
        lane.is_ended, lane.is_open = True, False
        if self.device:
            self.push(self.now_s + self.delay_s(), client.ring_ended, lane)
        else:
            self.push(self.now_s + self.delay_s(), client.lane_woken, lane, lane.calls)

    def _close_arena(self, action: act.CloseArena) -> None:
        arena = (action.client, action.arena)
        self.require(arena in self._arenas, "an arena is closed twice")
        used = any(self._is_used(arena, process) for process in self.processes.values())
        self.require(not used, "an arena is closed while a worker may write into it")
        self._arenas.discard(arena)

    def _run(self, action: act.Run) -> None:
        process = self._worker(action.identity, "Run")
        client = next(c for c in self.clients.values() if c.number == action.client)
        places = (action.body, action.turn, action.bell)
        call = next((c for c in client.open.values() if (c.body, c.turn, c.bell) == places), None)
        if call is None:
            self.require(client.left_during == self._events, "Run of a call that is not open")
            return  # its client was dropped while this very list of actions was performed
        arenas = frozenset((action.client, ref.arena) for ref in wire.unpack_refs(action.body, 2))
        is_killed = bool(process.kill_reason) and process.killed_during != self._events
        self.require(not is_killed, "Run to a worker that is being killed")
        self.require(action.plan in process.prepared, "Run without Prepare")
        self.require(not self.device or action.client in process.gpus, "Run on a GPU that the worker was not told of")
        self.require(not call.is_done, "a call that is done runs again")
        self.require(arenas <= process.lent, "Run on arenas that were not lent")
        self.require(all(d.is_over for d in call.dispatches), "a call is dispatched again before its worker is done")
        self.require(call.deaths < MAX_DEATHS_PER_CALL, f"a call that killed {call.deaths} workers gets another")
        self.require(process.backend not in call.failed_on, "a call is run again where it failed")
        self.require(self._is_compiled(process.backend, call) is True, "a kernel compiles within a call")
        self.require(not call.is_quarantined, "a quarantined call is run")
        self.require(action.attempt == len(call.dispatches) + 1, "attempts are not counted")
        self.require(len(process.sent) < self.limits.depth, "more is sent ahead than allowed")
        dispatch = Dispatch(action.dispatch, action.attempt, call, action.plan, arenas)
        call.dispatches.append(dispatch)
        if not process.sent:
            process.head_since_s = self.now_s
        process.sent.append(dispatch)
        if self.rng.random() < self._p_full:
            self._handle(ev.WorkerMisbehaved(process.backend, process.generation, "it does not read its queue"))
        else:
            process.send("run", dispatch)

    def _mute(self, action: act.SendMute) -> None:
        process = self._worker(action.identity, "Mute")
        self.coverage.fates["bell_muted"] += 1
        both = (*process.sent, *process.bound.values())
        muted = [d for d in both if d.call.bell == action.bell and d.call.client.number == action.client]
        self.require(bool(muted) and muted[-1].plan == action.plan, "a bell is muted that is not bound")
        for dispatch in muted:
            dispatch.is_over = True
            process.bound.pop(dispatch.number, None)
        process.send("mute", (action.client, action.bell))

    def _to_client(self, identity: bytes) -> Client | None:
        """The client, unless it was dropped while this very list of actions was performed."""
        client = self.clients[identity]
        if client.has_left:
            self.require(client.left_during == self._events, "an answer to a client that has left")
            return None
        if self.rng.random() < self._p_full:
            self._leave(client)
            self._handle(ev.ClientLeft(identity))
            return None
        return client

    def _decide(self, action: act.SendDecision) -> None:
        client = self._to_client(action.identity)
        if client is not None:
            client.decisions[action.decision] = decode(action.body, Decision)

    def _answer(self, action: act.Answer) -> None:
        client = self._to_client(action.identity)
        if client is None:
            return
        call = client.open.pop(action.seq, None)
        self.require(call is not None, f"call {action.seq} is answered twice")
        assert call is not None
        dispatch = call.dispatches[-1]
        self.coverage.fates["turn_rerun"] += call.has_word and call.turn is not None
        ended = action.attempt == dispatch.attempt and dispatch.result is not None
        is_lost = call.is_done and not action.body  # its worker ended after the GPU had, and before it could say so
        is_true = ended and (action.body == dispatch.result or is_lost)
        self.require(is_true, "an answer without an attempt that ran to its end")
        before = call.dispatches[:-1] if self.device else call.dispatches
        self.require(all(d.is_over for d in before), "a call is answered while a worker has it")
        self._check_blame(call, action.attempts)
        decision = client.decisions.get(action.decision)
        self.require(decision is not None, "an answer before its decision")
        assert decision is not None
        process = next(p for p in self.processes.values() if p.pid == decision.worker_pid)
        self.require(decision.backend == process.backend in call.signature.backends, "a decision names another backend")
        self._note_reasons(decision.candidates)
        client.inbound.send(client.answered, call)

    def _refuse(self, action: act.Refuse) -> None:
        client = self._to_client(action.identity)
        if client is None:
            return
        call = client.open.pop(action.seq, None)
        if call is None and client.has_offended:
            return  # its offence was not even looked at
        self.require(call is not None, f"call {action.seq} is refused after its end")
        assert call is not None
        if call.turn is not None:
            is_over = call.has_failed or (call.has_passed and self.exits > 0)
            self.require(is_over, "a call is refused before its turn fails")
            client.pending.pop(call.turn, None)
        self.require(all(d.is_over for d in call.dispatches), "a call is refused while a worker has it")
        self._check_blame(call, action.attempts)
        error = from_wire(action.error.to_wire())
        tried = {attempt["backend"] for attempt in action.attempts}
        left = {b for b in call.signature.backends - tried if self._could_serve(b, call)}
        key = (client.number, GPU)
        deaf = call.deaf | {b for b in call.signature.backends if key in self.state.workers[b].deaf}
        left -= deaf
        if call.turn is not None and self._held_since.get((client.number, GPU, call.turn)) != self._events:
            left = set()  # it was held back: much may have changed since it was refused
        match error.code:
            case "POISON":
                is_true = call.deaths == MAX_DEATHS_PER_CALL or call.is_quarantined
                self.coverage.fates["lane_poison"] += bool(call.after[0]) and not call.is_quarantined
            case "DIGEST_REQUIRED":
                is_true = not call.digest and any(key[0] == call.signature.body for key in self._quarantine)
            case "BUSY":
                is_true = call.is_crowded
            case "BROKER_LOST":
                is_true = self._is_stopping
            case "NO_BACKEND":
                waited = all(attempt["code"] == "NOT_COMPILED" for attempt in action.attempts)
                is_true = waited and not left and not any(c["accepted"] for c in action.candidates)
            case "DEADLINE" if "kernel_id" in error.facts:
                self.coverage.fates["compile_awaited"] += 1
                is_long = self.now_s - call.since_s >= call.timeout_s - 1e-9
                is_true = is_long and not any(self._is_compiled(b, call) for b in left)
            case "CUDA_GRAPH_UNSAFE":
                codes = {attempt["code"] for attempt in action.attempts}
                is_true = call.bell is not None and (not left or bool(call.signature.pinned))
                is_true &= "CUDA_GRAPH_UNSAFE" in codes
            case "BACKEND_ERROR" | "DEADLINE":
                is_true = bool(action.attempts) and (not left or bool(call.signature.pinned))
                is_true &= error.code != "DEADLINE" or "deadline" in call.faults
            case "NO_TRANSPORT":
                failed = {attempt["code"] for attempt in action.attempts}
                is_true = ("NO_TRANSPORT" in failed or bool(deaf)) and (not left or bool(call.signature.pinned))
            case "BAD_MESSAGE":
                is_true = bool(call.signature.pinned) and "fault" in call.faults
            case "UNREACHABLE":
                is_true = bool(left) and call.is_lent and not call.signature.pinned
            case _:
                is_true = error.code in ("INVALID_ARGUMENT", "OUTPUT_TOO_SMALL")
        self.require(is_true, f"a call ends in {error.code}, which is not true: {error}")
        self.coverage.codes[error.code] += 1
        self._note_reasons(action.candidates)
        client.inbound.send(client.refused, call, error)

    def _check_blame(self, call: Call, attempts: list[dict[str, Any]]) -> None:
        """A call that its lane's worker was not killed for, and did not die in, only lost its place. So did all calls
        of a worker that began anew."""
        renewed = {process.pid for process in self.processes.values() if process.has_renewed}
        is_right = all(
            one["exit_code"] is None or one["phase"] == "queued" for one in attempts if one["worker_pid"] in renewed
        )
        self.require(is_right, "a call is blamed for the end of a worker that only began anew")
        if call.is_innocent_of and attempts:
            is_it = attempts[0]["worker_pid"] == call.is_innocent_of
            self.require(not is_it or attempts[0]["phase"] in ("queued", ""), "a call of a ring is blamed for another")
        if call.after[0] and attempts:
            lane = self.lanes[call.after[0]]
            is_innocent = lane.blamed != mark(*call.after) and attempts[0]["worker_pid"] == lane.process.pid
            is_blamed = attempts[0]["phase"] not in ("queued", "")  # the latter: its backend was disabled meanwhile
            self.require(not (is_innocent and is_blamed), "a call is blamed for another one's end")

    def _could_serve(self, backend: str, call: Call) -> bool:
        """It is available, or restarts within the call's timeout."""
        reason, worker = self.state.unavailable.get(backend), self.state.workers[backend]
        is_soon = worker.state is not WorkerState.BACKOFF or worker.retry_at_s <= self.now_s + call.timeout_s
        if self._is_compiled(backend, call) is False:
            return False
        return reason is None or (reason.code is Reason.BACKEND_RESTARTING and is_soon)

    def _note_reasons(self, candidates: list[dict[str, Any]]) -> None:
        for candidate in candidates:
            self.require(candidate["accepted"] == (not candidate["reasons"]), "a rejection without a reason")
            for reason in candidate["reasons"]:
                self.coverage.reasons[reason["code"]] += 1

    def _drop_client(self, action: act.DropClient) -> None:
        client = self.clients[action.identity]
        self.require(client.has_offended, f"an innocent client is dropped: {action.detail}")
        self._leave(client)
        self._handle(ev.ClientLeft(action.identity))

    def _note(self, action: act.Note) -> None:
        pass

    def _release_call(self, action: act.ReleaseCall) -> None:
        self.require(False, f"memory is released that nobody had lost: {action}")

    def _exit(self, _: act.Exit) -> None:
        self.exits += 1
        left = [p.backend for p in self.processes.values() if not p.is_over]
        self.require(self._is_stopping and not left, f"the broker ends with workers {left}")

    # --- promises about the whole --------------------------------------------------------------------

    def _check(self) -> None:
        state, now_s = self.state, self.now_s
        self._check_lanes()
        for client in self.clients.values():
            known = state.clients.get(client.identity)
            self.require((known is None) == client.has_left, "the core and the server disagree on who is there")
            if known is not None:
                busy = sum(turn.call is None for turn in state.turns.of(known))  # refused as they came, and held back
                sent = [d.call for p in self.processes.values() for d in p.sent if d.call.client is client]
                unwanted = sum(call.bell is not None and call.seq not in client.open for call in sent)
                is_right = known.open_calls + busy == len(client.open) + unwanted
                self.require(
                    is_right or client.has_offended, f"open_calls is {known.open_calls}: {sorted(client.open)}"
                )
                held = sum(d.call.client is client for p in self.processes.values() for d in p.enqueued.values())
                held += sum(d.call.client is client for p in self.processes.values() for d in p.bound.values())
                self.require(known.enqueued == held, f"enqueued is {known.enqueued}, not {held}")
        for held in state.compiling.held:
            self.require(state.wakeup_s <= held.due_s, f"a call waits for {held.unit} for ever")
            self.require(
                held.unit in self._compiling.values() or held.unit not in self._compiled, "it waits for nothing"
            )
        for process in self.processes.values():
            if process.sent and not process.kill_reason and not process.is_confirmed_dead:
                self._check_deadline(process)
            if process.enqueued and not process.kill_reason and not process.is_confirmed_dead:
                self._check_gpu_deadlines(process)
        if self.device:
            self._check_rings()
        for name, worker in state.workers.items():
            reason = state.unavailable.get(name)
            due_s = math.inf
            match worker.state:
                case WorkerState.READY:
                    self.require(reason is None, f"{name} is ready and reported as {reason}")
                    due_s = worker.head_deadline_s if worker.running else math.inf
                    sent = Counter(call.client.number for call in worker.running)
                    is_full = len(worker.running) == self.limits.depth
                    have_theirs = all(sent[call.client.number] for call in worker.waiting)
                    self.require(is_full or have_theirs, f"calls wait for {name}, which is free")
                case WorkerState.STARTING:
                    due_s = worker.started_s + self.limits.start_timeout_s
                case WorkerState.BACKOFF:
                    due_s = worker.retry_at_s
                    self.require(reason is not None, f"{name} is in back-off and reported as available")
                    longest_s = min((call.timeout_s for call in worker.waiting), default=math.inf)
                    self.require(due_s <= now_s + longest_s, f"a call waits for {name}, which restarts too late for it")
                case WorkerState.KILLING:
                    self.require(reason is not None, f"{name} is being killed and reported as available")
                case WorkerState.DISABLED:
                    self.require(reason is not None and worker.cause is not None, f"{name} is disabled without a cause")
                    self.require(name in self._is_broken, f"{name} is disabled for nothing")
                    self.require(not worker.waiting, f"calls wait for {name}, which is disabled")
                case WorkerState.STOPPING if worker.running and worker.fault is None:
                    due_s = worker.head_deadline_s
                case WorkerState.STOPPED:
                    self.require(not worker.waiting, f"calls wait for {name}, which is stopped")
            self.require(
                state.wakeup_s <= due_s, f"{name} is due at {due_s:.3f}, the wakeup is at {state.wakeup_s:.3f}"
            )

    def _check_deadline(self, process: Process) -> None:
        """Of the head. While it waits for a call of a lane, that call's end is near, too."""
        timeout_s = process.sent[0].call.timeout_s
        if process.page[0] & EXECUTING:
            since_s = max(process.head_since_s, process.began_s)
            limit_s = 2 * timeout_s + self.limits.timeout_s + 2 * LATE_S
            self.coverage.fates["lane_head_waited"] += self.now_s - process.head_since_s > timeout_s + LATE_S
        else:
            since_s, limit_s = max(process.head_since_s, process.lane_end_s), timeout_s + LATE_S
        self.require(self.now_s - since_s <= limit_s + 1e-9, "an attempt outlives its deadline")

    def _check_gpu_deadlines(self, process: Process) -> None:
        """Of what the GPU is in. It takes two looks to see that: one may come between those of two workers."""
        for dispatch in process.enqueued.values():
            call, stream = dispatch.call, self.stream(dispatch.call)
            if call.turn is not None and stream.done + 1 == call.turn.number <= stream.ready:
                limit_s = call.timeout_s + 2 * LOOK_S + LATE_S
                since_s = max(stream.since_s, dispatch.answered_s)
                self.require(self.now_s - since_s <= limit_s + 1e-9, "a call outlives its deadline on the GPU")

    def _check_rings(self) -> None:
        for lane in self.lanes.values():
            if not lane.is_open or lane.process.kill_reason or lane.process.is_confirmed_dead:
                continue
            for number in set(self._on_ring(lane)) - lane.left:
                dispatch = lane.ring[number]
                stream, turn = self.stream(dispatch.call), dispatch.call.turn
                if turn is not None and number <= lane.done and stream.done + 1 == turn.number <= stream.ready:
                    since_s = max(stream.since_s, dispatch.taken_s)
                    is_in_time = self.now_s - since_s <= self.limits.timeout_s + 2 * LOOK_S + LATE_S + 1e-9
                    self.require(is_in_time or dispatch.is_over, "a call of a ring outlives its deadline")

    def _check_lanes(self) -> None:
        state, now_s = self.state, self.now_s
        for client in state.clients.values():
            self.require(len(client.lost) <= MAX_LOST, "ended lanes are remembered without end")
        in_force = {number for number, lane in self.lanes.items() if not lane.is_ended and not lane.is_taken_back}
        self.require(set(state.leases.lanes) == in_force, "the core and the server disagree on the lanes there are")
        for number in in_force:
            lane = self.lanes[number]
            self.require(not lane.process.is_confirmed_dead, "the lane of a dead worker goes on")
            assert lane.client is not None
            if lane.client.has_left:
                self.require(bool(self.device), "the lane of a client that has left goes on")
                continue
            routes = state.clients[lane.client.identity].routes
            for route, (epoch, core_epoch, kernel_id) in lane.granted.items():
                if route not in routes or epoch != lane.core_epoch:
                    lane.stale_since_s.pop(route, None)
                    continue
                self.require(core_epoch == state.engine.epoch, "a lease outlives its epoch")
                best = next(iter(state.signatures.order(routes[route].signature)), None)
                if best is None or best.kernel_id != kernel_id:
                    since_s = lane.stale_since_s.setdefault(route, now_s)
                    self.require(now_s - since_s <= WATCH_S + LATE_S, "a lease outlives the choice it stands for")
                else:
                    lane.stale_since_s.pop(route, None)

    def _check_nothing_left(self) -> None:
        state = self.state
        self.require(not self._arenas, f"arenas {sorted(self._arenas)} are never closed")
        left = {
            "clients": state.clients,
            "signatures": state.signatures.known,
            "plans": state.signatures.plans,
            "plans in workers": [w.plans for w in state.workers.values() if w.plans],
            "arenas in workers": [w.arenas for w in state.workers.values() if w.arenas],
            "calls that wait for compilers": state.compiling.held,
            "calls": [w.backend for w in state.workers.values() if w.running or w.waiting],
            "lanes": state.leases.lanes,
            "turns": state.turns.pages,
            "calls on GPUs": [w.backend for w in state.workers.values() if w.enqueued or w.bells or w.gpus or w.deaf],
            "pages": [c.number for c in self.clients.values() if c.has_gpu and self.device],
            "lanes in workers": [p.backend for p in self.processes.values() if p.is_alive and p.lanes],
        }
        self.require(not any(left.values()), f"something is left behind: { {k: v for k, v in left.items() if v} }")


PERFORM: dict[type, Callable[[World, Any], None]] = {
    act.Probe: World._probe,
    act.Compile: World._compile,
    act.Spawn: World._spawn,
    act.Kill: World._kill,
    act.StopWorker: World._stop,
    act.SendPrepare: World._prepare,
    act.SendDrop: World._drop,
    act.LendArena: World._lend,
    act.TakeBackArena: World._take_back,
    act.CloseArena: World._close_arena,
    act.LendGpu: World._lend_gpu,
    act.TakeBackGpu: World._take_back_gpu,
    act.CloseGpu: World._close_gpu,
    act.FailTurn: World._fail_turn,
    act.ReleaseTurn: World._release_turn,
    act.SendAllow: World._allow,
    act.SendLease: World._lease,
    act.LendLane: World._lend_lane,
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
