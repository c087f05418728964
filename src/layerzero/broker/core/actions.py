"""What the broker's core can ask for; events.py has what can happen to it. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from layerzero.broker.selection.rollout import Rollout
from layerzero.capabilities.compile_unit import Unit
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.records import record
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport.attempts import FailedAttempt


@record
class Probe:
    backend: str


@record
class Compile:
    """Run a kernel once in a process of its environment, so that its caches have what the worker will need. `body`:
    the encoded Prepare message."""

    backend: str
    unit: Unit
    body: bytes


@record
class Spawn:
    backend: str
    generation: int


@record
class Kill:
    backend: str
    generation: int


@record
class StopWorker:
    backend: str
    generation: int
    identity: bytes  # empty: it has not said hello yet


@record
class RetireWorker:
    """It has finished what it had, and another has taken over: it exits once it has read this."""

    backend: str
    generation: int
    identity: bytes


@record
class SendPrepare:
    identity: bytes
    plan: int
    body: bytes


@record
class SendDrop:
    identity: bytes
    plan: int


@record
class GrantArena:
    backend: str
    generation: int
    client: int
    arena: int


@record
class TakeBackArena:
    backend: str
    generation: int
    client: int
    arena: int


@record
class TellClientLeft:
    """A worker may let go of what it has kept for a client between calls."""

    backend: str
    generation: int
    client: int


@record
class CloseArena:
    """Nobody uses it any more: the broker closes its descriptor."""

    client: int
    arena: int


@record
class GrantGpu:
    """A worker is to open the timeline page and the offer of a client, and to sign the offer at `slot`."""

    backend: str
    generation: int
    client: int
    gpu: str
    slot: int


@record
class TakeBackGpu:
    backend: str
    generation: int
    client: int
    gpu: str


@record
class CloseGpu:
    """Its client has left, and no worker has calls of it: the broker lets go of the page and the offer."""

    client: int
    gpu: str


@record
class FailTurn:
    """No worker will finish this call: its client's stream may go on. Comes before the Refuse, and when the stream has
    come to it."""

    client: int
    gpu: str
    point: TimelinePoint
    code: str  # of the error


@record
class ReleaseTurn:
    """The client is gone and a worker has this call: its inputs count as ready, lest the worker's stream waits for
    ever."""

    client: int
    gpu: str
    point: TimelinePoint


@record
class SendAllow:
    """`neighbours`: calls with other extents that the plan may be run for, as an encoded Neighbours message; empty for
    none."""

    identity: bytes
    plan: int
    lane: int
    neighbours: bytes = b""


@record
class SendLease:
    identity: bytes
    route: int
    decision: int
    body: bytes


@record
class GrantLane:
    backend: str
    generation: int
    client: int
    lane: int
    gpu: str = ""


@record
class RevokeLane:
    lane: int
    epoch: int


@record
class TakeBackLane:
    """Its client is gone."""

    backend: str
    generation: int
    lane: int


@record
class EndLane:
    """Its worker is gone: the client must hear of it, if it has opened the lane."""

    lane: int


@record
class Run:
    identity: bytes
    plan: int
    dispatch: int
    attempt: int
    client: int
    body: bytes
    point: TimelinePoint | None = None
    graph_slot: int | None = None
    binding: int = 0  # of the graph slot


@record
class SendMute:
    """A graph slot is no longer served."""

    identity: bytes
    plan: int
    client: int
    graph_slot: int


@record
class SendDecision:
    identity: bytes
    route: int
    decision: int
    body: bytes


@record
class Answer:
    """A call ended well; one on a GPU is enqueued there, and may be answered or refused again if its worker dies.
    `attempts` lists failures on the way, usually none; `waited_s`: so long it waited for workers to start."""

    identity: bytes
    seq: int
    decision: int
    attempt: int
    kernel_ns: int
    body: bytes
    attempts: list[FailedAttempt] = field(default_factory=list)
    is_replayed: bool = False
    waited_s: float = 0.0


@record
class Refuse:
    """A call ended in an error."""

    identity: bytes
    seq: int
    error: LayerZeroError
    attempts: list[FailedAttempt] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    is_lent: bool = False  # a lost worker may still write to its outputs; ReleaseCall follows, if ever


@record
class ReleaseCall:
    """Nobody writes any more to what a call was refused with `is_lent`."""

    identity: bytes
    seq: int


@record
class DropClient:
    """It broke the protocol."""

    identity: bytes
    detail: str


@record
class KeepRollouts:
    """Have them outlive this broker: all that there are, in the place of what was kept before."""

    rollouts: tuple[Rollout, ...]


@record
class Note:
    """A line for the log: `event` is noun.verb."""

    event: str
    facts: dict[str, Any]


@record
class Exit:
    """Everything is stopped; the server may end."""


Action = (
    Probe
    | Compile
    | Spawn
    | Kill
    | StopWorker
    | RetireWorker
    | SendPrepare
    | SendDrop
    | GrantArena
    | TakeBackArena
    | TellClientLeft
    | CloseArena
    | GrantGpu
    | TakeBackGpu
    | CloseGpu
    | FailTurn
    | ReleaseTurn
    | SendAllow
    | SendLease
    | GrantLane
    | RevokeLane
    | TakeBackLane
    | EndLane
    | Run
    | SendMute
    | SendDecision
    | Answer
    | Refuse
    | ReleaseCall
    | DropClient
    | KeepRollouts
    | Note
    | Exit
)
