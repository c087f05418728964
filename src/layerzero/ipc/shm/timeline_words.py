"""The words of a timeline page as values: where each lies, what it says, and how numbers of calls compare. No memory
is mapped here (ipc/shm/timeline_page.py does that), so that whoever only decides about points can import it.

Words are 32 bits wide, count calls and wrap around: the GPU compares them cyclically, and so does this file.
docs/protocol.md, section 13, has the layout.
"""

from __future__ import annotations

from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError

LANES = 64  # of one page: so many streams of a client can have open calls to one worker
LANE_BYTES = 512
BELLS = 4096  # of one page: so many calls can be in a client's captured graphs
BELLS_AT, BELLS_DONE_AT = LANES * LANE_BYTES, LANES * LANE_BYTES + 4 * BELLS  # bytes, as the next two
LINKS_AT = BELLS_DONE_AT + 4 * BELLS
BINDINGS_AT = LINKS_AT + 4 * BELLS
PAGE_BYTES = BINDINGS_AT + 4 * BELLS
READY, DONE, ERROR = 0, 128, 256  # bytes within a lane; 128 apart, so that writers share no cache line
MASK = (1 << 32) - 1
MAX_ERROR = MASK
# Values of a bell. A graph of the client clears the bell's DONE, writes RUNG and waits for DONE; the worker's CPU
# writes TAKEN or more, enqueues the kernel, and its stream writes DONE = 1 behind that. Taken and not done: somebody's.
# A bell whose link names one before it is rung by who answers that one. Calls are bound to a bell one after the other:
# by the number of the binding a worker that has not heard yet that its call is over leaves the bell to others.
SILENT, RUNG, TAKEN = range(3)
LAYOUT = (LANES, LANE_BYTES, DONE, ERROR)  # what client/gpu/_fastpath.c writes to


class TimelinePoint(NamedTuple):
    """One call's place in the order: a timeline, which is one stream of the client, and its value there."""

    timeline: int
    value: int


def index(point: TimelinePoint, word: int) -> int:
    """Of a 32-bit word in the page. Raises ProtocolError for a point that another process made up."""
    if not (0 <= point.timeline < LANES and 0 <= point.value <= MASK):
        raise ProtocolError(
            f"point {point.value} of lane {point.timeline}; allowed: lanes below {LANES}, 32-bit numbers"
        )
    return (point.timeline * LANE_BYTES + word) // 4


def is_before(one: int, other: int) -> bool:
    """Whether one number of a lane comes before another. They wrap around."""
    return 0 < other - one & MASK < 1 << 31


def has_reached(word: int, number: int) -> bool:
    """Whether a word that counts has come to a number, as CU_STREAM_WAIT_VALUE_GEQ compares."""
    return (word - number) & MASK < 1 << 31


def bell_words(bell: int) -> tuple[int, int]:
    """Byte offsets of a bell and of its DONE in the page. Raises ProtocolError for a bell that is none."""
    at = BELLS_AT + 4 * bell_index(bell)
    return at, at + 4 * BELLS


def bell_index(bell: int) -> int:
    """The bell itself, checked. Raises ProtocolError for one that another process made up."""
    if not 0 <= bell < BELLS:
        raise ProtocolError(f"bell {bell}; allowed: below {BELLS}")
    return bell
