"""What two processes tell each other about GPU memory: plain values that are checked when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES

ARENA_STEP_BYTES = 2 << 20  # NVIDIA recommends to share allocations of such multiples only: others have neighbours
IPC_HANDLE_BYTES = 64  # of a legacy handle, as the driver makes it
MAX_TEXT = 64

# Ways to reach the client's GPU memory, best first. "ipc": legacy handle; "vmm": file descriptor of the memory;
# "staged": copies through pinned host memory that both map; "copied": the same, not pinned.
TRANSPORTS = ("ipc", "vmm", "staged", "copied")
STAGED = frozenset({"staged", "copied"})

Key = tuple[str, int, int]


@dataclass(frozen=True)
class ArenaHandle:
    """Client -> worker: how to reach one arena. On all transports but "ipc" a file descriptor travels with it."""

    gpu: str  # UUID; ordinals differ between processes
    client: str  # its incarnation
    arena: int  # of this client, never used twice
    generation: int  # of the arena: each way in which it is offered has its own
    transport: str
    nbytes: int
    handle: bytes = b""  # transport "ipc" only

    @property
    def key(self) -> Key:
        """What a mapping is known by. Handle bytes, addresses and pids come back for other memory; this does not."""
        return (self.client, self.arena, self.generation)

    @property
    def has_fd(self) -> bool:
        return self.transport != "ipc"

    def to_wire(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "client": self.client,
            "arena": self.arena,
            "generation": self.generation,
            "transport": self.transport,
            "nbytes": self.nbytes,
            "handle": self.handle,
        }

    @classmethod
    def from_wire(cls, value: object) -> ArenaHandle:
        """Raises ProtocolError."""
        match value:
            case {
                "gpu": str(gpu),
                "client": str(client),
                "arena": int(arena),
                "generation": int(generation),
                "transport": str(transport),
                "nbytes": int(nbytes),
                "handle": bytes(handle),
            }:
                made = cls(gpu, client, arena, generation, transport, nbytes, handle)
            case _:
                raise ProtocolError(f"not an arena handle: {value!r:.200}")
        if transport not in TRANSPORTS:
            raise ProtocolError(f"arena handle has transport {transport!r:.40}; known: {', '.join(TRANSPORTS)}")
        if not (0 < len(gpu) <= MAX_TEXT and 0 < len(client) <= MAX_TEXT):
            raise ProtocolError(f"arena handle has gpu {gpu!r:.80}, client {client!r:.80}; 1 to {MAX_TEXT} characters")
        for name, number in (("arena", arena), ("generation", generation)):
            if isinstance(number, bool) or not 0 <= number < 1 << 32:
                raise ProtocolError(f"arena handle has {name} {number!r:.40}; allowed: 0 to 2**32 - 1")
        if isinstance(nbytes, bool) or not 0 < nbytes <= MAX_NBYTES:
            raise ProtocolError(f"arena handle says {nbytes!r:.40} bytes; allowed: 1 to {MAX_NBYTES}")
        expected = IPC_HANDLE_BYTES if transport == "ipc" else 0
        if len(handle) != expected:
            raise ProtocolError(f"arena handle of transport {transport} has {len(handle)} handle bytes, not {expected}")
        return made


def check_span(offset: int, nbytes: int, size: int) -> None:
    """Refuse bytes that are not all within `size`. Raises ProtocolError."""
    if offset < 0 or nbytes < 0 or nbytes > size or offset > size - nbytes:
        raise ProtocolError(f"bytes {offset} to {offset + nbytes} are not within an arena of {size} bytes")
