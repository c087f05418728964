"""What is true of calls, streams, graph slots and lanes, whatever the core believes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.backends import Signature

from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_words import RUNG, SILENT, TAKEN, TimelinePoint

if TYPE_CHECKING:
    from tests.simulation.clients import Client
    from tests.simulation.workers import Process
    from tests.simulation.world import World

STREAMS = 3  # of a client on a GPU, at most


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
    died_on: set[str] = field(default_factory=set)  # of those: whose worker ended, not to end this call
    is_quarantined: bool = False
    no_transport: set[str] = field(default_factory=set)  # backends that were known not to reach its memory when it came
    is_crowded: bool = False  # many others were open when it came
    has_ended: bool = False  # for its client
    after: tuple[int, int] = (0, 0)  # the express lane that ended with it, and its number there
    point: TimelinePoint | None = None
    on_ring: Dispatch | None = None  # what it is there
    graph_slot: int | None = None
    is_unbound: bool = False
    is_lent: bool = False  # a lost worker may still write to its memory (joined.py)
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
        self.died_on.clear()

    def fail_on(self, backend: str, end: str) -> None:
        """`end`: why its worker was killed in it, "" when it died of itself, "raised" when it lives."""
        self.deaths += not end
        if end in ("", "silent", "forced") and backend not in self.failed_on:
            self.died_on.add(backend)
        else:
            self.died_on.discard(backend)
        self.failed_on.add(backend)


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
    """A client's stream and its lane of the timeline page: numbers of points."""

    issued: int = 0
    ready: int = 0
    done: int = 0
    passed: int = 0  # what the stream has waited for
    since_s: float = 0.0  # when `ready` or `done` changed
    calls: dict[int, Call] = field(default_factory=dict)


@dataclass
class GraphSlot:
    """Of a client's timeline page, and the replay that the client waits for."""

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
