"""What the broker's core remembers: clients, calls, workers. Plain records; the core's parts change them."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from layerzero.broker.core.blame import NOBODY, Blame
from layerzero.broker.core.call_fsm import CallState
from layerzero.broker.core.fair_queue import FairQueue
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.signature import Signature, Verdict
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.attempts import FailedAttempt
from layerzero.ipc.vocabulary.ops import FUNCTION

if TYPE_CHECKING:
    from layerzero.broker.core.compile_waits import Held
    from layerzero.broker.core.events import ShadowCompared
    from layerzero.broker.core.leases import Lost
    from layerzero.broker.core.stream_order import OpenPoint

MAX_CHECKED_BODIES = 256
MAX_FORCED = 5  # workers killed for a client's short timeouts
FORCED_WINDOW_S = 30.0  # within so long
LATE_S = 1.0  # so long a client's word on a run may be on its way


class Arena(NamedTuple):
    nbytes: int
    gpu: str = ""  # UUID of the GPU that it is on; empty for shared memory


@dataclass
class RunGrant:
    """Leave for a client to run a kernel itself on a route. `told_ns`: the times that it has told of since then."""

    kernel_id: str
    since_s: float
    until_s: float
    told_ns: int = 0

    def covers(self, kernel_ns: int, now_s: float) -> bool:
        """Whether a run of that time, told of now, can have begun under it and after those told of before."""
        ran_s, told_s = kernel_ns / 1e9, self.told_ns / 1e9
        return told_s + ran_s <= now_s - self.since_s and now_s - ran_s <= self.until_s + LATE_S


@dataclass
class Route:
    """A client's use of a signature. `decision` numbers change when what serves it changes."""

    number: int
    signature: Signature
    checked: OrderedDict[bytes, tuple[int, ...]] = field(default_factory=OrderedDict)  # valid bodies -> arenas
    decision: int = 0
    decided_for: tuple[str, int, int] | None = None  # kernel id, worker generation, epoch
    served_by: set[str] = field(default_factory=set)  # kernels that have answered its calls
    failed_by: set[str] = field(default_factory=set)  # kernels that have failed one
    backends: set[str] = field(default_factory=set)  # theirs
    is_leased: bool = False
    settled: int = 0  # calls in a row that `settled_on` answered
    settled_on: tuple[str, int] | None = None  # kernel id, worker generation
    grant: RunGrant | None = None  # to run its calls in the client's process
    near: int = 0  # the route whose lease its calls had before the broker knew it
    # Signatures that it has had, by the versions that stood in for their backends: it uses them still.
    variants: dict[tuple[str, ...], Signature] = field(default_factory=dict)

    def check(self, body: bytes, arenas: Mapping[int, Arena]) -> tuple[int, ...]:
        """The arenas that the references in `body` use; `arenas` has the client's.

        Raises ProtocolError for a reference that does not hold its tensor. Bodies that passed are remembered.
        """
        spec = self.signature.spec
        specs = (*spec.inputs, *spec.outputs)
        if len(body) != len(specs) * wire.REF_BYTES:
            raise ProtocolError(f"a call of {spec.op} has {len(specs)} references, got {len(body)} bytes")
        used = set()
        for tensor, ref in zip(specs, wire.unpack_refs(body, len(specs)), strict=True):
            if tensor is None:
                continue
            arena = arenas.get(ref.arena)
            if arena is None:
                raise ProtocolError(f"unknown arena {ref.arena}")
            size, gpu = arena
            if gpu != spec.device and (gpu or spec.op != FUNCTION):  # its frame and answer are in shared memory
                raise ProtocolError(
                    f"arena {ref.arena} is in memory of {gpu or 'the CPU'}; the call is on {spec.device or 'the CPU'}"
                )
            if ref.nbytes < tensor.span_bytes or ref.offset + ref.nbytes > size:
                raise ProtocolError(
                    f"{tensor} does not lie in bytes {ref.offset}+{ref.nbytes} of arena {ref.arena} ({size})"
                )
            used.add(ref.arena)
        if len(self.checked) >= MAX_CHECKED_BODIES:
            self.checked.popitem(last=False)
        self.checked[body] = result = tuple(sorted(used))
        return result


@dataclass(eq=False)
class Kind:
    """Calls of a client that are neighbours, or nearly so: `count` of them in a row were answered by one `server`
    (kernel id, worker generation). Leases are of `route`, the first whose client knows what holds now."""

    server: tuple[str, int]
    route: Route
    count: int = 0


@dataclass
class Client:
    identity: bytes
    number: int
    arenas: dict[int, Arena] = field(default_factory=dict)
    retiring: set[int] = field(default_factory=set)  # arenas that go with the calls that they are for
    gpus: set[str] = field(default_factory=set)  # UUIDs of those that it has offered
    routes: dict[int, Route] = field(default_factory=dict)
    refused_routes: dict[int, LayerZeroError] = field(default_factory=dict)  # on GPUs that are not here
    open_calls: int = 0  # not answered; this and the next one are for call_fsm.py to count
    enqueued: int = 0  # answered calls that a GPU is not done with
    has_left: bool = False
    route_bytes: int = 0  # of the descriptions of its routes
    forced_s: deque[float] = field(default_factory=deque)  # when workers were killed at its wish
    next_decision: int = 1
    poisons: Counter[int] = field(default_factory=Counter)  # by route: POISON that it has not answered with a digest
    process: int = 0  # its number; 0 where that is not known
    program: str = ""  # what it runs
    kinds: dict[tuple[object, ...], Kind] = field(default_factory=dict)  # of calls, by what neighbours have in common
    lost: dict[int, Lost] = field(default_factory=dict)  # express lanes whose worker is gone
    graph_slots: set[tuple[str, int]] = field(default_factory=set)  # of timeline pages, by GPU, that calls have
    bound: dict[int, Call] = field(default_factory=dict)  # those calls, by seq
    stays_out: set[str] = field(default_factory=set)  # backends that cannot run in its process, on the CPU

    def may_run(self, verdict: Verdict) -> bool:
        """Whether a kernel is for its own process: policy wants it there, and nothing is known that keeps it out."""
        return verdict.may_run_here and verdict.backend not in self.stays_out

    def has_compared(self, event: ShadowCompared) -> bool:
        """Whether it can have: the broker has seen its call answered by the kernel, and one like it by the
        reference."""
        comparison = event.comparison
        for route in self.routes.values():
            if route.signature.key == event.route and comparison.subject.kernel_id in route.served_by:
                spec = route.signature.spec
                break
        else:
            return False
        has_none = comparison.error == math.inf  # the reference may have had no result
        return any(
            (comparison.reference in route.served_by or (has_none and comparison.reference in route.failed_by))
            and (route.signature.spec.op, route.signature.spec.inputs) == (spec.op, spec.inputs)
            for route in self.routes.values()
        )

    def has_forced_too_many(self, now_s: float) -> bool:
        """Whether its short timeouts have ended as many workers of late as one client may."""
        while self.forced_s and self.forced_s[0] < now_s - FORCED_WINDOW_S:
            self.forced_s.popleft()
        return len(self.forced_s) >= MAX_FORCED


@dataclass(slots=True, eq=False)
class Call:
    """One call from arrival to its single answer, on a GPU to its end there, in a client's CUDA graph until that is
    gone. Where it is says `state`, which call_fsm.py alone changes, with `worker` and `was_answered`."""

    client: Client
    route: Route
    seq: int
    timeout_s: float
    body: bytes
    arenas: tuple[int, ...]
    state: CallState = CallState.IN_HAND
    worker: Worker | None = None  # that has it, or that it waits for
    held: Held | None = None  # while it waits for a compilation
    dispatch: int = 0  # id of the present attempt
    attempt: int = 0
    deaths: int = 0  # workers that died while executing it
    kernel_id: str = ""
    attempts: list[FailedAttempt] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    lost_at: set[str] = field(default_factory=set)  # of those: whose worker ended, and not to end this very call
    once_more: set[str] = field(default_factory=set)  # of those: that it goes back to, as nobody else is left
    last_error: LayerZeroError | None = None
    may_run_here: bool = False  # the client can run a kernel itself, if policy wants that
    point: OpenPoint | None = None  # of a call on a GPU
    graph_slot: int | None = None  # of a call in a client's CUDA graph
    binding: int = 0  # of the graph slot
    graph_slot_word: int = 0  # as it was seen
    busy_since_s: float = math.inf  # when it was first seen so, with something to do
    watched_since_s: float = math.inf  # when it was looked at closely for that
    is_unbound: bool = False  # its client wants it no more
    was_answered: bool = False  # its client has gone on
    was_enqueued: bool = False  # by a ring's worker, whose client has gone on
    has_begun: bool = False  # a worker that has ended was in it
    waits_since_s: float = math.inf  # for a worker that does not run yet
    start_wait_s: float = 0.0  # so long it has waited for workers to start
    arrived_s: float = 0.0
    is_counted: bool = False  # in the tally, or by its client
    excused: frozenset[str] = frozenset()  # backends whose worker began anew in it for the order of its calls

    @property
    def gpu(self) -> str:
        return self.route.signature.spec.device

    @property
    def is_spent(self) -> bool:
        """A function that has run, in part where it `has_begun`: it is not run again, whatever becomes of what it has
        enqueued. One that is idempotent its client makes again."""
        has_run = self.was_answered or self.was_enqueued or self.has_begun
        return has_run and self.route.signature.spec.op == FUNCTION

    def may_try(self, backend: str) -> bool:
        """It has not failed there, or is to be tried there once more."""
        return backend not in self.tried or backend in self.once_more

    def forget_attempts(self) -> None:
        """Of a call that is served again and again: what was tried for one time does not count for the next."""
        self.deaths, self.attempts, self.last_error = 0, [], None
        for backends in (self.tried, self.lost_at, self.once_more):
            backends.clear()

    def take_graph_slot(self, graph_slot: int, binding: int) -> None:
        """It is in a CUDA graph of its client, which rings."""
        self.graph_slot, self.binding = graph_slot, binding
        self.client.graph_slots.add((self.gpu, graph_slot))
        self.client.bound[self.seq] = self

    def free_graph_slot(self) -> None:
        """The graph slot, if it has one, may be bound anew. More than once does no harm."""
        if self.graph_slot is not None and self.client.bound.get(self.seq) is self:
            del self.client.bound[self.seq]
            self.client.graph_slots.discard((self.gpu, self.graph_slot))

    @property
    def is_unwanted(self) -> bool:
        """Nobody waits for its answer."""
        return self.is_unbound or self.client.has_left


@dataclass(eq=False)
class Worker:
    """A worker of a backend; an environment of functions has a backend for each of its workers. `running` was
    sent to it, oldest first; `waiting` was not. `enqueued`: what it has answered and the GPU is not known to be done
    with, by dispatch, oldest first; `graph_slots`: likewise what it has bound."""

    backend: str
    state: WorkerState = WorkerState.ABSENT
    generation: int = 0
    identity: bytes = b""
    pid: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    running: deque[Call] = field(default_factory=deque)
    waiting: FairQueue = field(default_factory=FairQueue)
    enqueued: dict[int, Call] = field(default_factory=dict)
    graph_slots: dict[int, Call] = field(default_factory=dict)
    head_since_s: float = 0.0  # when the oldest running call became the oldest
    last_client: Client | None = None
    last_use_s: float = 0.0
    shared_until_s: float = 0.0  # so long it counts as serving several clients
    lone_until_s: float = 0.0  # so long it counts as serving one that has one call open at a time
    lane_call: int = 0  # the call of an express lane that a due head was found to wait for, as its control page says
    lane_call_since_s: float = 0.0
    started_s: float = 0.0
    ready_s: float = 0.0  # when it last became ready
    retry_at_s: float = 0.0  # when a worker in back-off, or one that crashes have disabled, is started again
    times_disabled: int = 0  # by crashes, since it was last ready for `restart_window_s`
    is_unprobed: bool = False  # disabled for a while before its probe could run
    is_joined: bool = False  # not started by the broker: it cannot always be killed, and gets no express lanes
    is_vacant: bool = False  # disabled, as nobody could start it; who comes to do so ends that
    was_ready: bool = False  # in this generation
    has_served: bool = False  # in any generation
    is_resting: bool = False  # it is ended for having nothing to do
    is_forced: bool = False  # it is ended for somebody who did not want to wait
    is_held: bool = False  # it gets no more calls until those that it has are over: another is to take over
    retired_s: float = math.inf  # when it was told to exit, since another has taken over
    has_clear_rings: bool = False  # of one that drains: nothing was on its rings when they were looked at
    fault: LayerZeroError | None = None  # why the broker kills it
    blame: Blame = NOBODY  # for which call
    cause: LayerZeroError | None = None  # why it is not serving
    deaths_s: deque[float] = field(default_factory=deque)
    restarts: int = 0
    answered: int = 0
    failed: int = 0
    arenas: set[tuple[int, int]] = field(default_factory=set)
    clients: set[int] = field(default_factory=set)  # numbers of those whose functions it has run
    plans: set[int] = field(default_factory=set)
    slot: int = 0  # of this start, on offers of GPU memory; 0 for a backend of the CPU
    gpus: set[tuple[int, str]] = field(default_factory=set)  # clients' GPUs that it was told of
    # Client's number and GPU of those whose memory does not reach it.
    no_transport: dict[tuple[int, str], LayerZeroError] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """It has no call, nor does any wait for it. There may be some on rings, which its end brings back."""
        return not (self.running or self.waiting or self.enqueued or self.graph_slots)

    @property
    def head_deadline_s(self) -> float:
        return self.head_since_s + self.running[0].timeout_s
