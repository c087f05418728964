"""The express lane for calls on a GPU: a ring of calls in a page of shared memory, from one client to one worker.

The client puts a call into the ring and goes on; the worker takes calls in their order and enqueues them on its GPU.
What orders the GPUs are the words of ipc/shm/timeline_page.py, so nobody answers. A worker that finds nothing spins
for a moment, then it sleeps until the doorbell rings. A call that the worker does not enqueue is left to the broker
(frame LEFT), and so are those that are not done when it dies: the broker reads them off the ring. Numbers of calls
count from 1. ipc/shm/ring_words.py has the layout."""

from __future__ import annotations

import ctypes
import math
import struct

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.ring_words import (
    EPOCH,
    HEAD,
    IS_ASLEEP,
    IS_ENDED,
    KERNEL_NS,
    PAGE_BYTES,
    PLAN,
    SLOT_BYTES,
    SLOT_HEAD_BYTES,
    SLOTS,
    SLOTS_AT,
    STATUS_AT,
    TAKEN,
    TIMED,
    RingCall,
)
from layerzero.ipc.shm.timeline_words import TimelinePoint

_SLOT = struct.Struct("<QIIQIIII")  # call, route, plan, seq, lane, number, bytes of the references, timeout in ms
_pack_slot = _SLOT.pack_into
MAX_TIMEOUT_MS = (1 << 32) - 1


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
        self._words[EPOCH] = epoch

    def end(self) -> None:
        """The worker is gone for good. The broker reads what is left after this: a client that does not see the word
        after it has put a call knows that the call is among it."""
        self._words[IS_ENDED] = 1

    def left(self, first: int = 1) -> list[RingCall]:
        """Calls from number `first` on that may be open, oldest first, as far as the ring still has them. At most
        SLOTS - 1 may be: the client may be writing the next one over the oldest slot."""
        head = self._words[HEAD]
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
        return words[TIMED], words[PLAN], words[KERNEL_NS]

    # --- client

    def holds(self, epoch: int) -> bool:
        """Whether a lease of this epoch does."""
        words = self._words
        return words[EPOCH] == epoch and not words[IS_ENDED]

    @property
    def is_ended(self) -> bool:
        return bool(self._words[IS_ENDED])

    @property
    def is_asleep(self) -> bool:
        """Whether the worker must be rung. To be asked after the call was put, with a barrier between."""
        return bool(self._words[IS_ASLEEP])

    @property
    def head(self) -> int:
        """The last call that was put."""
        return self._words[HEAD]

    def put(
        self, call: int, route: int, plan: int, seq: int, point: TimelinePoint, refs: bytes, timeout_s: float = 0.0
    ) -> None:
        """`call` is the number after the last one; what was in its slot must be done. `timeout_s`: its own."""
        at = SLOTS_AT + call % SLOTS * SLOT_BYTES
        nbytes = len(refs)
        timeout_ms = min(math.ceil(1e3 * timeout_s), MAX_TIMEOUT_MS) if timeout_s else 0
        _pack_slot(self._map, at, call, route, plan, seq, point[0], point[1], nbytes, timeout_ms)
        at += SLOT_HEAD_BYTES
        self._map[at : at + nbytes] = refs
        self._words[HEAD] = call

    def status(self, call: int) -> int:
        """What became of a call; 0 while nothing has, or once a later call has its slot."""
        value = self._words[STATUS_AT // 8 + call % SLOTS]
        return value & 0xFF if value >> 8 == call else 0

    def is_over(self, call: int) -> bool:
        """Whether the worker has said what became of a call, as far as its slot still shows that."""
        return self._words[STATUS_AT // 8 + call % SLOTS] >> 8 >= call

    # --- worker

    def take(self) -> RingCall | None:
        """The next call; None when there is none. Raises ProtocolError for one that makes no sense."""
        call = self._taken + 1
        if self._words[HEAD] < call:
            return None
        one = self._read(call)
        if one.call != call:
            raise ProtocolError(f"call {one.call} lies in a ring where call {call} should")
        self._taken = self._words[TAKEN] = call
        return one

    def ahead(self) -> list[TimelinePoint]:
        """Of the calls that `take` would return, as far as they make sense."""
        found = []
        for call in range(self._taken + 1, min(self._words[HEAD], self._taken + SLOTS) + 1):
            one = self._read(call)
            if one.call != call:
                break
            found.append(one.point)
        return found

    @property
    def has_call(self) -> bool:
        return self._words[HEAD] > self._taken

    def note(self, call: int, status: int) -> None:
        self._words[STATUS_AT // 8 + call % SLOTS] = call << 8 | status

    def note_time(self, plan: int, kernel_ns: int) -> None:
        words = self._words
        words[PLAN], words[KERNEL_NS] = plan, kernel_ns
        words[TIMED] += 1

    def sleep(self, is_asleep: bool) -> None:
        """Before the worker waits for the doorbell, and after. With a barrier between this and a last look."""
        self._words[IS_ASLEEP] = is_asleep

    # --- all

    @property
    def taken(self) -> int:
        """The last call that the worker has taken."""
        return self._words[TAKEN]

    def _read(self, call: int) -> RingCall:
        at = SLOTS_AT + call % SLOTS * SLOT_BYTES
        slot = self._map[at : at + SLOT_BYTES]  # once: its writer may be at it
        number, route, plan, seq, lane, point, nbytes, timeout_ms = _SLOT.unpack_from(slot)
        refs = slot[SLOT_HEAD_BYTES : SLOT_HEAD_BYTES + nbytes]  # cut where the slot ends
        return RingCall(number, route, plan, seq, TimelinePoint(lane, point), refs, timeout_ms / 1e3)

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._map.close()


def create_page() -> int:
    """File descriptor of a new ring, all zero. Raises OutOfMemory."""
    return memory.create_memfd("lz-ring", PAGE_BYTES)
