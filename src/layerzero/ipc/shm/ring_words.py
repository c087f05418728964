"""The words and slots of a ring as values: where each lies and what it says. No memory is mapped here
(ipc/shm/ring.py does that), so that whoever only decides about a ring's calls can import it. docs/protocol.md,
section 14, has the layout."""

from __future__ import annotations

from typing import NamedTuple

from layerzero.ipc.shm.timeline_words import TimelinePoint

SLOTS = 512  # more than one stream may have under way
SLOT_BYTES = 512
SLOT_HEAD_BYTES = 40  # of a slot, before the references
STATUS_AT, SLOTS_AT = 4096, 8192  # bytes
PAGE_BYTES = SLOTS_AT + SLOTS * SLOT_BYTES
MAX_CALL_BYTES = SLOT_BYTES - SLOT_HEAD_BYTES  # references of a call

ENQUEUED, REPLAYED, LEFT = 1, 2, 3  # what became of a call: replayed is enqueued, too

# Words of eight bytes. Each line of 128 bytes has one writer.
EPOCH, IS_ENDED = 0, 1  # broker
HEAD = 16  # client
TAKEN, IS_ASLEEP = 32, 33  # worker
TIMED, PLAN, KERNEL_NS = 48, 49, 50  # worker

# What client/gpu/_fastpath.c writes to: bytes.
LAYOUT = (SLOTS, SLOT_BYTES, SLOTS_AT, SLOT_HEAD_BYTES, 8 * EPOCH, 8 * IS_ENDED, 8 * HEAD, 8 * IS_ASLEEP)


class RingCall(NamedTuple):
    """What the client wrote; whoever reads it checks it."""

    call: int
    route: int
    plan: int
    seq: int
    point: TimelinePoint
    refs: bytes
    timeout_s: float = 0.0  # of the call's own; 0 for the broker's
