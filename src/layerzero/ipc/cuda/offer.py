"""A client's offer of GPU memory to its workers, and the sign with which each answers, as values: no GPU is touched.

What the driver says of either end proves nothing about the pair: handles can be made that the other side cannot open,
or that open onto other memory. So the client writes a pattern into an arena (ipc/cuda/offer_client.py), and each worker
that can read it leaves a sign there that proves it (ipc/cuda/offer_worker.py): bytes have crossed in both directions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, ArenaHandle
from layerzero.ipc.errors import ProtocolError

PATTERN_BYTES = 256
PLACES = (0, ARENA_STEP_BYTES - PATTERN_BYTES)  # both ends: a mapping that is too short must not pass
SIGN_BYTES = 64
_FIRST_SIGN = 4096  # offset of the sign of slot 0
SLOTS = (PLACES[1] - _FIRST_SIGN) // SIGN_BYTES


@dataclass(frozen=True)
class Offer:
    """Client -> worker, with the arena's file descriptor if it has one."""

    handle: ArenaHandle
    pattern: bytes  # what the client has written at both ends of the arena
    pid: int  # of the client, as it sees itself

    def to_wire(self) -> dict[str, Any]:
        return {"handle": self.handle.to_wire(), "pattern": self.pattern, "pid": self.pid}

    @classmethod
    def from_wire(cls, value: object) -> Offer:
        """Raises ProtocolError."""
        match value:
            case {"handle": dict(handle), "pattern": bytes(pattern), "pid": int(pid)} if len(pattern) == PATTERN_BYTES:
                return cls(ArenaHandle.from_wire(handle), pattern, pid)
        raise ProtocolError(f"not an offer of GPU memory: {value!r:.200}")


def sign_offset(slot: int) -> int:
    if not 0 <= slot < SLOTS:
        raise ProtocolError(f"slot {slot}; allowed: 0 to {SLOTS - 1}")
    return _FIRST_SIGN + slot * SIGN_BYTES


def sign_of(pattern: bytes, slot: int) -> bytes:
    return hashlib.blake2b(pattern, digest_size=SIGN_BYTES, salt=slot.to_bytes(8, "little")).digest()
