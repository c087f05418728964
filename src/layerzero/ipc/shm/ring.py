"""The express lane for calls on a GPU: a ring of calls in a page of shared memory, from one client to one worker.

The client puts a call into the ring and goes on; the worker takes calls in their order and enqueues them on its GPU.
What orders the GPUs are the words of ipc/shm/timeline_page.py, so nobody answers. A worker that finds nothing spins
for a moment, then it sleeps until the doorbell rings. A call that the worker does not enqueue is left to the broker
(frame LEFT), and so are those that are not done when it dies: the broker reads them off the ring. Numbers of calls
count from 1. docs/protocol.md has the layout.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.timeline_page import Turn

SLOTS = 512  # more than one stream may have under way
SLOT_BYTES = 512
_STATUS, _SLOTS = 4096, 8192  # bytes
PAGE_BYTES = _SLOTS + SLOTS * SLOT_BYTES
_SLOT = struct.Struct("<QIIQIIQ")  # call, route, plan, seq, lane, number, bytes of the references
_SLOT_HEAD, _pack_slot = _SLOT.size, _SLOT.pack_into
MAX_CALL_BYTES = SLOT_BYTES - _SLOT_HEAD  # references of a call

ENQUEUED, REPLAYED, LEFT = 1, 2, 3  # what became of a call: replayed is enqueued, too

# Words of eight bytes. Each line of 128 bytes has one writer.
_EPOCH, _IS_ENDED = 0, 1  # broker
_HEAD = 16  # client
_TAKEN, _IS_ASLEEP = 32, 33  # worker
_TIMED, _PLAN, _KERNEL_NS = 48, 49, 50  # worker


# What client/gpu/_fastpath.c writes to: bytes.
LAYOUT = (SLOTS, SLOT_BYTES, _SLOTS, _SLOT_HEAD, 8 * _EPOCH, 8 * _IS_ENDED, 8 * _HEAD, 8 * _IS_ASLEEP)


class RingCall(NamedTuple):
    """What the client wrote; whoever reads it checks it."""

    call: int
    route: int
    plan: int
    seq: int
    turn: Turn
    refs: bytes


class Ring:
    """The mapped page. Each method is for the side that its name says; words are read and written whole."""

    def __init__(self, fd: int) -> None:
        """Does not keep `fd`. Raises ProtocolError for a descriptor that is no such page."""
        memory.check_memfd(fd, PAGE_BYTES)
        self._map = memory.map_fd(fd, PAGE_BYTES, writable=True, populate=True)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._taken = 0

    # --- broker

    def revoke(self, epoch: int) -> None:
        """Leases of earlier epochs end."""
        self._words[_EPOCH] = epoch

    def end(self) -> None:
        """The worker is gone for good. The broker reads what is left after this: a client that does not see the word
        after it has put a call knows that the call is among it."""
        self._words[_IS_ENDED] = 1

    def left(self, first: int = 1) -> list[RingCall]:
        """Calls from number `first` on that may be open, oldest first, as far as the ring still has them. At most
        SLOTS - 1 may be: the client may be writing the next one over the oldest slot."""
        head = self._words[_HEAD]
        found = []
        for call in range(max(first, head - SLOTS + 2), head + 1):
            one = self._read(call)
            if one.call == call:
                found.append(one)
        return found

    def call(self, number: int) -> RingCall | None:
        """One call, if the ring still has it."""
        one = self._read(number)
        return one if one.call == number else None

    @property
    def times(self) -> tuple[int, int, int]:
        """(count, plan, kernel_ns): how many times the worker has told how long a kernel ran, and the last one."""
        words = self._words
        return words[_TIMED], words[_PLAN], words[_KERNEL_NS]

    # --- client

    def holds(self, epoch: int) -> bool:
        """Whether a lease of this epoch does."""
        words = self._words
        return words[_EPOCH] == epoch and not words[_IS_ENDED]

    @property
    def is_ended(self) -> bool:
        return bool(self._words[_IS_ENDED])

    @property
    def is_asleep(self) -> bool:
        """Whether the worker must be rung. To be asked after the call was put, with a barrier between."""
        return bool(self._words[_IS_ASLEEP])

    @property
    def head(self) -> int:
        """The last call that was put."""
        return self._words[_HEAD]

    def put(self, call: int, route: int, plan: int, seq: int, turn: Turn, refs: bytes) -> None:
        """`call` is the number after the last one; what was in its slot must be done."""
        at = _SLOTS + call % SLOTS * SLOT_BYTES
        nbytes = len(refs)
        _pack_slot(self._map, at, call, route, plan, seq, turn[0], turn[1], nbytes)
        at += _SLOT_HEAD
        self._map[at : at + nbytes] = refs
        self._words[_HEAD] = call

    def status(self, call: int) -> int:
        """What became of a call; 0 while nothing has, or once a later call has its slot."""
        value = self._words[_STATUS // 8 + call % SLOTS]
        return value & 0xFF if value >> 8 == call else 0

    # --- worker

    def take(self) -> RingCall | None:
        """The next call; None when there is none. Raises ProtocolError for one that makes no sense."""
        call = self._taken + 1
        if self._words[_HEAD] < call:
            return None
        one = self._read(call)
        if one.call != call:
            raise ProtocolError(f"call {one.call} lies in a ring where call {call} should")
        self._taken = self._words[_TAKEN] = call
        return one

    def ahead(self) -> list[Turn]:
        """Of the calls that `take` would return, as far as they make sense."""
        found = []
        for call in range(self._taken + 1, min(self._words[_HEAD], self._taken + SLOTS) + 1):
            one = self._read(call)
            if one.call != call:
                break
            found.append(one.turn)
        return found

    @property
    def has_call(self) -> bool:
        return self._words[_HEAD] > self._taken

    def note(self, call: int, status: int) -> None:
        self._words[_STATUS // 8 + call % SLOTS] = call << 8 | status

    def note_time(self, plan: int, kernel_ns: int) -> None:
        words = self._words
        words[_PLAN], words[_KERNEL_NS] = plan, kernel_ns
        words[_TIMED] += 1

    def sleep(self, is_asleep: bool) -> None:
        """Before the worker waits for the doorbell, and after. With a barrier between this and a last look."""
        self._words[_IS_ASLEEP] = is_asleep

    # --- all

    @property
    def taken(self) -> int:
        """The last call that the worker has taken."""
        return self._words[_TAKEN]

    def _read(self, call: int) -> RingCall:
        at = _SLOTS + call % SLOTS * SLOT_BYTES
        slot = self._map[at : at + SLOT_BYTES]  # once: its writer may be at it
        number, route, plan, seq, lane, turn, nbytes = _SLOT.unpack_from(slot)
        refs = slot[_SLOT_HEAD : _SLOT_HEAD + min(nbytes, MAX_CALL_BYTES)]
        return RingCall(number, route, plan, seq, Turn(lane, turn), refs)

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._map.close()


def create_page() -> int:
    """File descriptor of a new ring, all zero. Raises OutOfMemory."""
    return memory.create_memfd("lz-ring", PAGE_BYTES)
