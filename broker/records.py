"""What the broker's core remembers: clients, calls, workers. Plain records; state.py alone changes them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerzero.broker.selection import Signature
from layerzero.broker.worker_fsm import WorkerState
from layerzero.ipc import wire
from layerzero.ipc.errors import LayerZeroError, ProtocolError

if TYPE_CHECKING:
    from layerzero.broker.leases import Lost

MAX_CHECKED_BODIES = 256


@dataclass
class Route:
    """A client's use of a signature. `decision` numbers change when what serves it changes."""

    number: int
    signature: Signature
    checked: OrderedDict[bytes, tuple[int, ...]] = field(default_factory=OrderedDict)  # valid bodies -> arenas
    decision: int = 0
    decided_for: tuple[str, int, int] | None = None  # kernel id, worker generation, epoch
    is_leased: bool = False
    settled: int = 0  # calls in a row that `settled_on` answered
    settled_on: tuple[str, int] | None = None  # kernel id, worker generation

    def check(self, body: bytes, arenas: Mapping[int, int]) -> tuple[int, ...]:
        """The arenas that the references in `body` use; `arenas` has the client's, with their sizes.

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
            size = arenas.get(ref.arena)
            if size is None:
                raise ProtocolError(f"unknown arena {ref.arena}")
            if ref.nbytes < tensor.span_bytes or ref.offset + ref.nbytes > size:
                raise ProtocolError(
                    f"{tensor} does not lie in bytes {ref.offset}+{ref.nbytes} of arena {ref.arena} ({size})"
                )
            used.add(ref.arena)
        if len(self.checked) >= MAX_CHECKED_BODIES:
            self.checked.popitem(last=False)
        self.checked[body] = result = tuple(sorted(used))
        return result


@dataclass
class Client:
    identity: bytes
    number: int
    arenas: dict[int, int] = field(default_factory=dict)  # id -> bytes
    routes: dict[int, Route] = field(default_factory=dict)
    open_calls: int = 0
    has_left: bool = False
    next_decision: int = 1
    lost: dict[int, Lost] = field(default_factory=dict)  # express lanes whose worker is gone


@dataclass(slots=True, eq=False)
class Call:
    """One call from arrival to its single answer. It is in exactly one worker's `running` or `waiting`."""

    client: Client
    route: Route
    seq: int
    timeout_s: float
    body: bytes
    arenas: tuple[int, ...]
    dispatch: int = 0  # id of the present attempt
    attempt: int = 0
    deaths: int = 0  # workers that died while executing it
    kernel_id: str = ""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    last_error: LayerZeroError | None = None
    may_run_here: bool = False  # the client can run a kernel itself, if policy wants that


@dataclass(eq=False)
class Worker:
    """The one worker of a backend. `running` was sent to it, oldest first; `waiting` was not."""

    backend: str
    state: WorkerState = WorkerState.ABSENT
    generation: int = 0
    identity: bytes = b""
    pid: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    running: deque[Call] = field(default_factory=deque)
    waiting: deque[Call] = field(default_factory=deque)
    head_since_s: float = 0.0  # when the oldest running call became the oldest
    lane_call: int = 0  # the call of an express lane that a due head was found to wait for, as its control page says
    lane_call_since_s: float = 0.0
    started_s: float = 0.0
    retry_at_s: float = 0.0
    was_ready: bool = False  # in this generation
    has_served: bool = False  # in any generation
    fault: LayerZeroError | None = None  # why the broker kills it
    fault_call: int = 0  # the call of an express lane that it is killed for, as lane.mark says; 0: for its head
    cause: LayerZeroError | None = None  # why it is not serving
    deaths_s: deque[float] = field(default_factory=deque)
    restarts: int = 0
    answered: int = 0
    failed: int = 0
    arenas: set[tuple[int, int]] = field(default_factory=set)
    plans: set[int] = field(default_factory=set)

    @property
    def head_deadline_s(self) -> float:
        return self.head_since_s + self.running[0].timeout_s
