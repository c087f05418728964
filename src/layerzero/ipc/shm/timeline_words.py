"""The words of a timeline page as values: where each lies, what it says, and how numbers of calls compare. No memory
is mapped here (ipc/shm/timeline_page.py does that), so that whoever only decides about points can import it.

Words are 32 bits wide, count calls and wrap around: the GPU compares them cyclically, and so does this file.
docs/protocol.md, section 13, has the layout.
"""

from __future__ import annotations

from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError

TIMELINES = 64  # of one page: so many streams of a client can have open calls to one worker
TIMELINE_BYTES = 512
GRAPH_SLOTS = 4096  # of one page: so many calls can be in a client's captured graphs
GRAPH_SLOTS_AT, GRAPH_SLOTS_DONE_AT = (
    TIMELINES * TIMELINE_BYTES,
    TIMELINES * TIMELINE_BYTES + 4 * GRAPH_SLOTS,
)  # bytes, as the next two
LINKS_AT = GRAPH_SLOTS_DONE_AT + 4 * GRAPH_SLOTS
BINDINGS_AT = LINKS_AT + 4 * GRAPH_SLOTS
PAGE_BYTES = BINDINGS_AT + 4 * GRAPH_SLOTS
READY, DONE, ERROR = 0, 128, 256  # bytes within a timeline; 128 apart, so that writers share no cache line
# Of lifted calls (docs/lifting.md), which the client launches itself: how many it has noted for the timeline, and the
# numbers of the last LIFTED_KEPT of them, number n of them in word n mod LIFTED_KEPT. Written before each launch, so
# that they are there when the client dies of one.
LIFTED_COUNT, LIFTED_LAST, LIFTED_KEPT = 384, 388, 8
LIFT_EPOCH = 448  # in timeline 0: the broker's word; what was allowed under another value is allowed no longer
MASK = (1 << 32) - 1
MAX_ERROR = MASK
# Values of a graph slot. A graph of the client clears the slot's DONE, writes RUNG and waits for DONE; the worker's CPU
# writes TAKEN or more, enqueues the kernel, and its stream writes DONE = 1 behind that. Taken and not done: somebody's.
# A slot whose link names one before it is rung by who answers that one. Calls are bound to a slot one after the other:
# by the number of the binding a worker that has not heard yet that its call is over leaves the slot to others.
SILENT, RUNG, TAKEN = range(3)
LAYOUT = (TIMELINES, TIMELINE_BYTES, DONE, ERROR)  # what client/gpu/_fastpath.c writes to
LIFTED_LAYOUT = (TIMELINES, TIMELINE_BYTES, ERROR, LIFTED_COUNT, LIFTED_LAST, LIFTED_KEPT, LIFT_EPOCH)  # and _lifted.c


class TimelinePoint(NamedTuple):
    """One call's place in the order: a timeline, which is one stream of the client, and its value there."""

    timeline: int
    value: int


def index(point: TimelinePoint, word: int) -> int:
    """Of a 32-bit word in the page. Raises ProtocolError for a point that another process made up."""
    if not (0 <= point.timeline < TIMELINES and 0 <= point.value <= MASK):
        raise ProtocolError(
            f"point {point.value} of timeline {point.timeline}; allowed: timelines below {TIMELINES}, 32-bit numbers"
        )
    return (point.timeline * TIMELINE_BYTES + word) // 4


def is_before(one: int, other: int) -> bool:
    """Whether one number of a timeline comes before another. They wrap around."""
    return 0 < other - one & MASK < 1 << 31


def has_reached(word: int, number: int) -> bool:
    """Whether a word that counts has come to a number, as CU_STREAM_WAIT_VALUE_GEQ compares."""
    return (word - number) & MASK < 1 << 31


def graph_slot_words(graph_slot: int) -> tuple[int, int]:
    """Byte offsets of a graph slot and of its DONE in the page. Raises ProtocolError for a graph slot that is none."""
    at = GRAPH_SLOTS_AT + 4 * graph_slot_index(graph_slot)
    return at, at + 4 * GRAPH_SLOTS


def graph_slot_index(graph_slot: int) -> int:
    """The graph slot itself, checked. Raises ProtocolError for one that another process made up."""
    if not 0 <= graph_slot < GRAPH_SLOTS:
        raise ProtocolError(f"graph slot {graph_slot}; allowed: below {GRAPH_SLOTS}")
    return graph_slot
