"""Order between a client's streams and a worker's, by words in a page of host memory that their GPUs wait on. No CUDA.

Client, worker and broker map one page for each pair of client and worker. The client's stream writes READY when a
call's inputs are there; the worker's stream waits for that, works, and writes DONE; the client's stream waits for
that. Nobody's CPU waits. When a worker dies, the broker, which has no CUDA, stores ERROR and DONE by an ordinary store,
and no stream hangs. ipc/shm/timeline_words.py says where the words lie.
"""

from __future__ import annotations

import ctypes
import mmap

from layerzero.ipc.shm import memory
from layerzero.ipc.shm.timeline_words import (
    BINDINGS_AT,
    DONE,
    ERROR,
    GRAPH_SLOTS,
    GRAPH_SLOTS_AT,
    GRAPH_SLOTS_DONE_AT,
    LIFT_EPOCH,
    LIFTED_COUNT,
    LIFTED_KEPT,
    LIFTED_LAST,
    LINKS_AT,
    MASK,
    MAX_ERROR,
    PAGE_BYTES,
    READY,
    RUNG,
    TIMELINE_BYTES,
    TIMELINES,
    TimelinePoint,
    graph_slot_index,
    has_reached,
    index,
)

_RUNG = RUNG.to_bytes(4, "little")
_NEXT = 0xFFFF  # of a link: the next graph slot + 1, and the previous one + 1 in the upper half; 0 for none
# Of the words of graph slot 0.
_GRAPH_SLOT, _GRAPH_SLOT_DONE, _LINK, _BINDING = (
    GRAPH_SLOTS_AT // 4,
    GRAPH_SLOTS_DONE_AT // 4,
    LINKS_AT // 4,
    BINDINGS_AT // 4,
)


def create_page() -> int:
    """File descriptor of a new page, all zero. Raises OutOfMemory."""
    return memory.create_memfd("layerzero-order", PAGE_BYTES)


class TimelinePage:
    """The words as a CPU sees them. x86 keeps stores in order; where a CPU does not, ERROR may be seen after DONE."""

    def __init__(self, fd: int) -> None:
        """Does not keep `fd`. Raises ProtocolError for a descriptor that is no such page."""
        memory.check_memfd(fd, PAGE_BYTES)
        self._map: mmap.mmap | bytearray = memory.map_fd(fd, PAGE_BYTES, writable=True, populate=True)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # One store each, never byte by byte: a GPU reads them at any time.
        self._words = memoryview(self._map).cast("I")
        self._errors = memoryview(self._map).cast("Q")

    def is_ready(self, point: TimelinePoint) -> bool:
        return has_reached(self._words[index(point, READY)], point.value)

    def is_done(self, point: TimelinePoint) -> bool:
        """Done, or failed."""
        return has_reached(self._words[index(point, DONE)], point.value)

    def error(self, point: TimelinePoint) -> int:
        """The code with which this call failed; 0 when it did not, or when a later one of its timeline failed."""
        value = self._errors[index(point, ERROR) // 2]
        return value >> 32 if value & MASK == point.value else 0

    def last_error(self, timeline: int) -> int:
        """Changes when a call of the timeline fails."""
        return self._errors[(timeline * TIMELINE_BYTES + ERROR) // 8]

    def fail(self, point: TimelinePoint, code: int) -> None:
        """Let the client's stream go on without a result. Only once no worker will finish this call: the word is its.

        `code`: 1 to 2**32 - 1. A call that is done stays done. In a timeline, points end in their order, failed or not.
        """
        if not 0 < code <= MAX_ERROR:
            raise ValueError(f"error code {code}; allowed: 1 to {MAX_ERROR}")
        if self.is_done(point):
            return
        # The error first: who sees DONE looks for it.
        self._errors[index(point, ERROR) // 2] = code << 32 | point.value
        self.store_done(point)

    def store_ready(self, point: TimelinePoint) -> None:
        self._words[index(point, READY)] = point.value

    def store_done(self, point: TimelinePoint) -> None:
        self._words[index(point, DONE)] = point.value

    # --- lifted calls

    @property
    def lift_epoch(self) -> int:
        """A lifted call may be launched while this is what the broker named with it."""
        return self._words[LIFT_EPOCH // 4]

    def bump_lift_epoch(self) -> int:
        """No lifted call of before is launched any more; the broker's. Returns the new epoch, which is never 0."""
        self._words[LIFT_EPOCH // 4] = epoch = self.lift_epoch % MASK + 1
        return epoch

    def note_lifted(self, timeline: int, number: int) -> None:
        """A lifted call of that number, which is not 0, is about to be launched; the client's."""
        words, at = self._words, (timeline * TIMELINE_BYTES + LIFTED_COUNT) // 4
        count = words[at]
        words[at + 1 + count % LIFTED_KEPT] = number
        words[at] = count + 1 & MASK

    def last_lifted(self) -> set[int]:
        """The numbers of those that were launched last, in any timeline."""
        found: set[int] = set()
        for timeline in range(TIMELINES):
            at = (timeline * TIMELINE_BYTES + LIFTED_LAST) // 4
            found.update(self._words[at : at + LIFTED_KEPT])
        return found - {0}

    # --- graph slots

    def rung(self, start: int = 0, stop: int = GRAPH_SLOTS) -> int | None:
        """The first graph slot from `start` on, and before `stop`, that is rung and not taken."""
        words = self._map[
            GRAPH_SLOTS_AT + 4 * start : GRAPH_SLOTS_AT + 4 * stop
        ]  # of bytes, one byte is found 50 times faster
        at = words.find(RUNG)
        while at >= 0 and words[at & ~3 : (at | 3) + 1] != _RUNG:
            at = words.find(RUNG, at + 1)
        return None if at < 0 else start + at // 4

    def graph_slot(self, graph_slot: int) -> int:
        return self._words[_GRAPH_SLOT + graph_slot_index(graph_slot)]

    def set_graph_slot(self, graph_slot: int, value: int) -> None:
        self._words[_GRAPH_SLOT + graph_slot_index(graph_slot)] = value

    def is_graph_slot_done(self, graph_slot: int) -> bool:
        """Whether the last call of a taken graph slot is through."""
        return bool(self._words[_GRAPH_SLOT_DONE + graph_slot_index(graph_slot)])

    def store_graph_slot_done(self, graph_slot: int) -> None:
        self._words[_GRAPH_SLOT_DONE + graph_slot_index(graph_slot)] = 1

    def clear_graph_slot_done(self, graph_slot: int) -> None:
        self._words[_GRAPH_SLOT_DONE + graph_slot_index(graph_slot)] = 0

    def link_graph_slots(self, graph_slot: int, following: int) -> None:
        """Whoever answers `graph_slot` rings `following`. Both must be of one graph."""
        words, at, next_at = self._words, _LINK + graph_slot_index(graph_slot), _LINK + graph_slot_index(following)
        words[next_at] = words[next_at] & _NEXT | (graph_slot + 1) << 16
        words[at] = words[at] & ~_NEXT & MASK | following + 1

    def unlink_graph_slot(self, graph_slot: int) -> None:
        """Nothing is before or after it."""
        self._words[_LINK + graph_slot_index(graph_slot)] = 0

    def binding(self, graph_slot: int) -> int:
        """Which of the graph slot's calls, one after the other, it rings for now."""
        return self._words[_BINDING + graph_slot_index(graph_slot)]

    def set_binding(self, graph_slot: int, number: int) -> None:
        self._words[_BINDING + graph_slot_index(graph_slot)] = number

    def next_graph_slot(self, graph_slot: int) -> int | None:
        return _named(self._words[_LINK + graph_slot_index(graph_slot)] & _NEXT)

    def previous_graph_slot(self, graph_slot: int) -> int | None:
        return _named(self._words[_LINK + graph_slot_index(graph_slot)] >> 16)

    def clear_lifted(self) -> None:
        """The client ends in order, and what it launched has not cost it the GPU; the client's."""
        for timeline in range(TIMELINES):
            for n in range(LIFTED_KEPT):
                self._words[(timeline * TIMELINE_BYTES + LIFTED_LAST) // 4 + n] = 0

    def close(self) -> None:
        """Give the memory back. Another thread that looks all the same, as one that waits for a call while the session
        is closed, finds what was there."""
        last = bytearray(self._map)
        self._words, self._errors = memoryview(last).cast("I"), memoryview(last).cast("Q")
        self._map = last  # the old one goes with the last of its readers


def _named(number: int) -> int | None:
    """The graph slot of half a link."""
    return number - 1 if 0 < number <= GRAPH_SLOTS else None
