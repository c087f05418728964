"""What can happen to the broker's core; actions.py has what it can ask for. Plain data, no I/O.

Byte strings named `identity` are the routing ids of ZeroMQ peers: one per start of a process, never reused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.rollout import Rollout
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec
from layerzero.broker.selection.timings import PerfRow
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.descriptor import Capability
from layerzero.capabilities.match import Rejection
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.records import record
from layerzero.ipc.shm.counter_words import Growth
from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_words import TimelinePoint


@record
class ClientJoined:
    """`process`: its number, 0 where that is not known; `program`: what it runs, "" where that is not known."""

    identity: bytes
    number: int
    process: int = 0
    program: str = ""


@record
class ClientLeft:
    identity: bytes


@record
class ArenaOffered:
    identity: bytes
    arena: int
    nbytes: int
    gpu: str = ""  # UUID of the GPU that it is on


@record
class GpuOffered:
    """The client brings a timeline page and a memory offer for its calls on a GPU, for the first time or again."""

    identity: bytes
    gpu: str
    has_new_page: bool = True  # False: the page is the one of its last offer


@record
class ArenaGivenUp:
    identity: bytes
    arena: int


@record
class RouteDefined:
    """`body` is the encoded Route message: equal bodies are equal signatures. `near`: the route whose lease its calls
    had as neighbours, if any."""

    identity: bytes
    route: int
    body: bytes
    near: int = 0


@record
class RouteForgotten:
    identity: bytes
    route: int


@record
class CallArrived:
    identity: bytes
    route: int
    seq: int
    timeout_s: float  # 0: the default
    body: bytes
    digest: bytes = b""
    may_run_here: bool = False
    after_lane: int = 0  # the express lane that ended with this call on it
    after_call: int = 0  # the low half of that call's number on the lane
    point: TimelinePoint | None = None  # its place in a lane of the timeline page; a call on a GPU has one, or
    graph_slot: int | None = None  # of the timeline page: it is in a CUDA graph of the client
    binding: int = 0  # of the graph slot


@record
class CallUnbound:
    """The graph that a bound call is in is gone, or its client does not want it in any more."""

    identity: bytes
    seq: int


@record
class GraphSlotsPolled:
    """Bells of bound calls that are rung, or taken and not done, by dispatches: the words. Comes once a second while
    there are bound calls, and just before WorkerExited."""

    busy: Mapping[int, int]


@record
class LaneOpened:
    """The client made the page of a lane that a lease named, on a GPU its ring."""

    identity: bytes
    lane: int
    gpu: str = ""


@record
class LaneOverdue:
    """A call on a lane has run longer than its client allows, and has not ended. `is_running`: the worker's control
    page names it; else its client may have made it up. `nonsense`: what is wrong with the end on the lane's page, which
    client and worker can write."""

    identity: bytes
    lane: int
    route: int
    timeout_s: float
    call: int = 0  # of the lane
    is_running: bool = True
    nonsense: str = ""


@record
class LanePolled:
    """`calls` more have ended on a lane; the last one took `kernel_ns` on `plan`, 0 when it did not run to its end."""

    lane: int
    calls: int
    plan: int
    kernel_ns: int


@record
class CountersPolled:
    """What a client's page of counters has grown by, each with the backend of its kernel, "" for a row of any."""

    client: int  # its number; it may have left
    grown: list[tuple[str, Growth]]


@record
class CallHandedBack:
    """A worker does not enqueue a call of a ring: it is the broker's from here on. `error`: the kernel raised it."""

    identity: bytes  # of the worker
    lane: int
    call: RingCall
    error: LayerZeroError | None = None


@record
class RingSnapshot:
    """What is on a ring: calls whose points are not done, oldest first, which of them have their inputs, and which the
    worker has enqueued. Some may have been left to the broker. `head`: the last call that was put; `taken`: that the
    worker has taken."""

    head: int
    taken: int
    calls: Sequence[RingCall]
    ready: Collection[int] = ()  # numbers of calls
    enqueued: Collection[int] = ()


@record
class RingsPolled:
    """All rings at one time, by lanes. Comes once a second while there are any, and more often, without `executing` (as
    of Tick), while the broker ends those of a client that has left."""

    page_poller: Mapping[int, RingSnapshot]
    executing: Mapping[tuple[str, int], int] | None = None


@record
class PointsReached:
    """Streams of clients have come to these points, which were refused: client's number, GPU, place."""

    keys: Sequence[tuple[int, str, TimelinePoint]]


@record
class TimelinesPolled:
    """What timeline pages say of the calls that a worker has enqueued on a GPU, by their dispatches: which are done,
    and of which the inputs are there. Comes once a second while there are any, before each Tick, and just before
    WorkerExited, for that worker; then `done` has calls, too, that it could not answer any more."""

    backend: str
    generation: int
    done: Sequence[int]
    ready: Collection[int] = ()


@record
class CallPoisoned:
    identity: bytes
    route: int
    digest: bytes


@record
class ProbeEnded:
    """`error` is None when the environment works; `record` says what of it is certified, and is None when no probe
    could run."""

    backend: str
    error: LayerZeroError | None
    record: ProbeRecord | None = None


@record
class CompileAsked:
    """Somebody wants kernels compiled before calls of this signature come."""

    spec: CallSpec
    backends: Collection[str]


@record
class CompileEnded:
    """`failure` is empty when the kernel is compiled for these calls now; else the compiler's last lines."""

    backend: str
    unit: Unit
    failure: str
    seconds: float


@record
class WorkerSpawned:
    backend: str
    generation: int
    pid: int


@record
class SpawnFailed:
    """`vacancy`: of a joined backend, why nobody was there to start it."""

    backend: str
    generation: int
    error: LayerZeroError
    vacancy: Rejection | None = None


@record
class BackendOffered:
    """Of a joined backend: someone is there who can start its worker, or why nobody is."""

    backend: str
    vacancy: Rejection | None


@record
class WorkerLost:
    """A joined worker that was to be killed cannot be reached: it may yet write, and nobody knows until when. Comes
    after Kill; WorkerGone follows when its end is confirmed, if ever."""

    backend: str
    generation: int


@record
class WorkerGone:
    """The end of a worker that was lost is confirmed."""

    backend: str
    generation: int


@record
class WorkerReady:
    identity: bytes
    backend: str
    generation: int
    versions: Mapping[str, str]


@record
class CallRan:
    identity: bytes
    dispatch: int
    attempt: int
    kernel_ns: int
    body: bytes
    is_replayed: bool = False  # from a CUDA graph


@record
class CallRaised:
    identity: bytes
    dispatch: int
    attempt: int
    error: LayerZeroError


@record
class WorkerMisbehaved:
    """It broke the protocol; `is_silent`: or says nothing; `is_late`: or is in the trial of a function for too long."""

    backend: str
    generation: int
    detail: str
    is_silent: bool = False
    is_late: bool = False


@record
class WorkerExited:
    """Its exit is confirmed: no write of this process can come any more. `executing` is what its control page said at
    the end, 0 when idle. Calls that it had enqueued are not done, or TimelinesPolled has just said so. `rings`: what
    was on its rings after their clients were told of the end, by lanes."""

    backend: str
    generation: int
    exit_code: int  # negative: killed by that signal
    executing: int
    phase: str
    stderr_tail: str
    rings: Mapping[int, RingSnapshot] = field(default_factory=dict)
    is_departure: bool = False  # of a joined worker: who had started it has ended, too
    oom: str = ""  # where the kernel killed it for lack of memory, if it did


@record
class BackendLearned:
    """There is a new backend. `missing` says why it cannot start, or is None. `env`: its environment's lock hash.
    `is_joined`: the broker starts no worker of it."""

    backend: str
    capability: Capability
    missing: Rejection | None
    env: str
    is_joined: bool = False


@record
class BackendReset:
    """Someone repaired it: forget its failures. `missing` says why it still cannot start, or is None."""

    backend: str
    missing: Rejection | None


@record
class RestartAsked:
    """Someone wants another worker in the place of the one that runs. It serves until the other is ready, or, with
    `is_forced`, ends at once. `until_s`: so long the other may take. `missing`: as in BackendReset."""

    backend: str
    missing: Rejection | None
    until_s: float
    is_forced: bool = False


@record
class KeptPolled:
    """Workers that keep something for clients, or are in a call, as their control pages say: by backend, of those that
    others wait to take over from."""

    kept: frozenset[str]
    busy: frozenset[str]


@record
class WorkerSpared:
    """Nobody has needed it for a while, and what was needed of it before runs without it now."""

    backend: str


@record
class ShadowCompared:
    """A client ran a call again on a reference kernel, and compared. `route`: the call's encoded Route message."""

    comparison: Comparison
    identity: bytes = b""
    route: bytes = b""


@record
class TimesLoaded:
    """Measured times of a backend that an earlier broker stored."""

    rows: Sequence[PerfRow]


@record
class Tick:
    """Time has passed `BrokerState.wakeup_s`. `executing`: what the workers' control pages say, by backend and
    generation."""

    executing: Mapping[tuple[str, int], int] = field(default_factory=dict)


@record
class PolicyChanged:
    policy: Policy


@record
class RolloutsKept:
    """What an earlier broker has kept of rollouts; before any client."""

    rollouts: Sequence[Rollout]


@record
class RolloutAsked:
    """A rollout begins, in the place of one that is over."""

    rollout: Rollout


@record
class RollbackAsked:
    """A rollout that runs or was promoted ends: calls that name no version go to the backend's own again."""

    backend: str
    why: str


@record
class RanInClient:
    """A kernel that policy wants in the client's process ran there, or its backend never will: `stays_out`."""

    identity: bytes
    route: int
    kernel_id: str
    kernel_ns: int
    error: LayerZeroError | None = None
    stays_out: bool = False


@record
class ShutdownAsked:
    pass


Event = (
    ClientJoined
    | ClientLeft
    | ArenaOffered
    | GpuOffered
    | ArenaGivenUp
    | RouteDefined
    | RouteForgotten
    | CallArrived
    | CallUnbound
    | GraphSlotsPolled
    | LaneOpened
    | LaneOverdue
    | LanePolled
    | CountersPolled
    | CallHandedBack
    | RingsPolled
    | PointsReached
    | TimelinesPolled
    | CallPoisoned
    | ProbeEnded
    | CompileAsked
    | CompileEnded
    | WorkerSpawned
    | SpawnFailed
    | WorkerReady
    | CallRan
    | CallRaised
    | WorkerMisbehaved
    | WorkerExited
    | WorkerLost
    | WorkerGone
    | BackendOffered
    | BackendLearned
    | BackendReset
    | RestartAsked
    | KeptPolled
    | WorkerSpared
    | ShadowCompared
    | TimesLoaded
    | Tick
    | PolicyChanged
    | RolloutsKept
    | RolloutAsked
    | RollbackAsked
    | RanInClient
    | ShutdownAsked
)
