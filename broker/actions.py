"""What the broker's core can ask for; events.py has what can happen to it. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from layerzero.capabilities.compile_unit import Unit
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.order_words import Turn


@dataclass(slots=True)
class Probe:
    backend: str


@dataclass(slots=True)
class Compile:
    """Run a kernel once in a process of its environment, so that its caches have what the worker will need. `body`:
    the encoded Prepare message."""

    backend: str
    unit: Unit
    body: bytes


@dataclass(slots=True)
class Spawn:
    backend: str
    generation: int


@dataclass(slots=True)
class Kill:
    backend: str
    generation: int


@dataclass(slots=True)
class StopWorker:
    backend: str
    generation: int
    identity: bytes  # empty: it has not said hello yet


@dataclass(slots=True)
class SendPrepare:
    identity: bytes
    plan: int
    body: bytes


@dataclass(slots=True)
class SendDrop:
    identity: bytes
    plan: int


@dataclass(slots=True)
class LendArena:
    backend: str
    generation: int
    client: int
    arena: int


@dataclass(slots=True)
class TakeBackArena:
    backend: str
    generation: int
    client: int
    arena: int


@dataclass(slots=True)
class CloseArena:
    """Nobody uses it any more: the broker closes its descriptor."""

    client: int
    arena: int


@dataclass(slots=True)
class LendGpu:
    """A worker is to open the order page and the offer of a client, and to sign the offer at `slot`."""

    backend: str
    generation: int
    client: int
    gpu: str
    slot: int


@dataclass(slots=True)
class TakeBackGpu:
    backend: str
    generation: int
    client: int
    gpu: str


@dataclass(slots=True)
class CloseGpu:
    """Its client has left, and no worker has calls of it: the broker lets go of the page and the offer."""

    client: int
    gpu: str


@dataclass(slots=True)
class FailTurn:
    """No worker will finish this call: its client's stream may go on. Comes before the Refuse, and when the stream has
    come to it."""

    client: int
    gpu: str
    turn: Turn
    code: str  # of the error


@dataclass(slots=True)
class ReleaseTurn:
    """The client is gone and a worker has this call: its inputs count as ready, lest the worker's stream waits for
    ever."""

    client: int
    gpu: str
    turn: Turn


@dataclass(slots=True)
class SendAllow:
    identity: bytes
    plan: int
    lane: int


@dataclass(slots=True)
class SendLease:
    identity: bytes
    route: int
    decision: int
    body: bytes


@dataclass(slots=True)
class LendLane:
    backend: str
    generation: int
    client: int
    lane: int
    gpu: str = ""


@dataclass(slots=True)
class RevokeLane:
    lane: int
    epoch: int


@dataclass(slots=True)
class TakeBackLane:
    """Its client is gone."""

    backend: str
    generation: int
    lane: int


@dataclass(slots=True)
class EndLane:
    """Its worker is gone: the client must hear of it, if it has opened the lane."""

    lane: int


@dataclass(slots=True)
class Run:
    identity: bytes
    plan: int
    dispatch: int
    attempt: int
    client: int
    body: bytes
    turn: Turn | None = None
    bell: int | None = None
    binding: int = 0  # of the bell


@dataclass(slots=True)
class SendMute:
    """A bell is no longer served."""

    identity: bytes
    plan: int
    client: int
    bell: int


@dataclass(slots=True)
class SendDecision:
    identity: bytes
    route: int
    decision: int
    body: bytes


@dataclass(slots=True)
class Answer:
    """A call ended well; one on a GPU is enqueued there, and may be answered or refused again if its worker dies.
    `attempts` lists failures on the way, usually none; `waited_s`: so long it waited for workers to start."""

    identity: bytes
    seq: int
    decision: int
    attempt: int
    kernel_ns: int
    body: bytes
    attempts: list[dict[str, Any]] = field(default_factory=list)
    is_replayed: bool = False
    waited_s: float = 0.0


@dataclass(slots=True)
class Refuse:
    """A call ended in an error."""

    identity: bytes
    seq: int
    error: LayerZeroError
    attempts: list[dict[str, Any]] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    is_lent: bool = False  # a lost worker may still write to its outputs; ReleaseCall follows, if ever


@dataclass(slots=True)
class ReleaseCall:
    """Nobody writes any more to what a call was refused with `is_lent`."""

    identity: bytes
    seq: int


@dataclass(slots=True)
class DropClient:
    """It broke the protocol."""

    identity: bytes
    detail: str


@dataclass(slots=True)
class Note:
    """A line for the log: `event` is noun.verb."""

    event: str
    facts: dict[str, Any]


@dataclass(slots=True)
class Exit:
    """Everything is stopped; the server may end."""


Action = (
    Probe
    | Compile
    | Spawn
    | Kill
    | StopWorker
    | SendPrepare
    | SendDrop
    | LendArena
    | TakeBackArena
    | CloseArena
    | LendGpu
    | TakeBackGpu
    | CloseGpu
    | FailTurn
    | ReleaseTurn
    | SendAllow
    | SendLease
    | LendLane
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
    | Note
    | Exit
)
