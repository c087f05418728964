"""Order between a client's streams and a worker's, by words in a page of host memory that their GPUs wait on. No CUDA.

Client, worker and broker map one page for each pair of client and worker. The client's stream writes READY when a
call's inputs are there; the worker's stream waits for that, works, and writes DONE; the client's stream waits for
that. Nobody's CPU waits. When a worker dies, the broker, which has no CUDA, stores ERROR and DONE by an ordinary store,
and no stream hangs. Words are 32 bits wide, count calls and wrap around: the GPU compares them cyclically, and so does
this file.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory

LANES = 64  # of one page: so many streams of a client can have open calls to one worker
LANE_BYTES = 512
BELLS = 4096  # of one page: so many calls can be in a client's captured graphs
_BELLS, _BELLS_DONE = LANES * LANE_BYTES, LANES * LANE_BYTES + 4 * BELLS  # bytes
_LINKS = _BELLS_DONE + 4 * BELLS
_BINDINGS = _LINKS + 4 * BELLS
PAGE_BYTES = _BINDINGS + 4 * BELLS
READY, DONE, _ERROR = 0, 128, 256  # bytes within a lane; 128 apart, so that writers share no cache line
MASK = (1 << 32) - 1
MAX_ERROR = MASK
# Values of a bell. A graph of the client clears the bell's DONE, writes RUNG and waits for DONE; the worker's CPU
# writes TAKEN or more, enqueues the kernel, and its stream writes DONE = 1 behind that. Taken and not done: somebody's.
# A bell whose link names one before it is rung by who answers that one. Calls are bound to a bell one after the other:
# by the number of the binding a worker that has not heard yet that its call is over leaves the bell to others.
SILENT, RUNG, TAKEN = range(3)
_RUNG = RUNG.to_bytes(4, "little")
LAYOUT = (LANES, LANE_BYTES, DONE, _ERROR)  # what client/gpu/_fastpath.c writes to
_NEXT = 0xFFFF  # of a link: the next bell + 1, and the previous one + 1 in the upper half; 0 for none


class Turn(NamedTuple):
    """One call's place in the order: a lane, which is one stream of the client, and its number there."""

    lane: int
    number: int


def create_page() -> int:
    """File descriptor of a new page, all zero. Raises OutOfMemory."""
    return memory.create_memfd("layerzero-order", PAGE_BYTES)


class OrderPage:
    """The words as a CPU sees them. x86 keeps stores in order; where a CPU does not, ERROR may be seen after DONE."""

    def __init__(self, fd: int) -> None:
        """Does not keep `fd`. Raises ProtocolError for a descriptor that is no such page."""
        memory.check_memfd(fd, PAGE_BYTES)
        self._map = memory.map_fd(fd, PAGE_BYTES, writable=True, populate=True)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # One store each, never byte by byte: a GPU reads them at any time.
        self._words = memoryview(self._map).cast("I")
        self._errors = memoryview(self._map).cast("Q")

    def is_ready(self, turn: Turn) -> bool:
        return _reached(self._words[index(turn, READY)], turn.number)

    def is_done(self, turn: Turn) -> bool:
        """Done, or failed."""
        return _reached(self._words[index(turn, DONE)], turn.number)

    def error(self, turn: Turn) -> int:
        """The code with which this call failed; 0 when it did not, or when a later one of its lane failed."""
        value = self._errors[index(turn, _ERROR) // 2]
        return value >> 32 if value & MASK == turn.number else 0

    def last_error(self, lane: int) -> int:
        """Changes when a call of the lane fails."""
        return self._errors[(lane * LANE_BYTES + _ERROR) // 8]

    def fail(self, turn: Turn, code: int) -> None:
        """Let the client's stream go on without a result. Only once no worker will finish this call: the word is its.

        `code`: 1 to 2**32 - 1. A call that is done stays done. In a lane, turns end in their order, failed or not.
        """
        if not 0 < code <= MAX_ERROR:
            raise ValueError(f"error code {code}; allowed: 1 to {MAX_ERROR}")
        if self.is_done(turn):
            return
        # The error first: who sees DONE looks for it.
        self._errors[index(turn, _ERROR) // 2] = code << 32 | turn.number
        self.store_done(turn)

    def store_ready(self, turn: Turn) -> None:
        self._words[index(turn, READY)] = turn.number

    def store_done(self, turn: Turn) -> None:
        self._words[index(turn, DONE)] = turn.number

    # --- bells

    def rung(self, start: int = 0, stop: int = BELLS) -> int | None:
        """The first bell from `start` on, and before `stop`, that is rung and not taken."""
        words = self._map[_BELLS + 4 * start : _BELLS + 4 * stop]  # of bytes, one byte is found 50 times faster
        at = words.find(RUNG)
        while at >= 0 and words[at & ~3 : (at | 3) + 1] != _RUNG:
            at = words.find(RUNG, at + 1)
        return None if at < 0 else start + at // 4

    def bell(self, bell: int) -> int:
        return self._words[_bell_at(bell) // 4]

    def set_bell(self, bell: int, value: int) -> None:
        self._words[_bell_at(bell) // 4] = value

    def is_bell_done(self, bell: int) -> bool:
        """Whether the last call of a taken bell is through."""
        return bool(self._words[_bell_done_at(bell) // 4])

    def store_bell_done(self, bell: int) -> None:
        self._words[_bell_done_at(bell) // 4] = 1

    def clear_bell_done(self, bell: int) -> None:
        self._words[_bell_done_at(bell) // 4] = 0

    def link_bells(self, bell: int, following: int) -> None:
        """Whoever answers `bell` rings `following`. Both must be of one graph."""
        words, at, next_at = self._words, _link_at(bell), _link_at(following)
        words[next_at] = words[next_at] & _NEXT | (bell + 1) << 16
        words[at] = words[at] & ~_NEXT & MASK | following + 1

    def unlink_bell(self, bell: int) -> None:
        """Nothing is before or after it."""
        self._words[_link_at(bell)] = 0

    def binding(self, bell: int) -> int:
        """Which of the bell's calls, one after the other, it rings for now."""
        return self._words[_binding_at(bell)]

    def set_binding(self, bell: int, number: int) -> None:
        self._words[_binding_at(bell)] = number

    def next_bell(self, bell: int) -> int | None:
        return _named(self._words[_link_at(bell)] & _NEXT)

    def previous_bell(self, bell: int) -> int | None:
        return _named(self._words[_link_at(bell)] >> 16)

    def close(self) -> None:
        self._words.release()
        self._errors.release()
        self._map.close()


def bell_words(bell: int) -> tuple[int, int]:
    """Byte offsets of a bell and of its DONE in the page."""
    return _bell_at(bell), _bell_done_at(bell)


def _bell_at(bell: int) -> int:
    if not 0 <= bell < BELLS:
        raise ProtocolError(f"bell {bell}; allowed: below {BELLS}")
    return _BELLS + 4 * bell


def _bell_done_at(bell: int) -> int:
    return _bell_at(bell) + 4 * BELLS


def _link_at(bell: int) -> int:
    """Of a word."""
    return (_bell_at(bell) - _BELLS + _LINKS) // 4


def _binding_at(bell: int) -> int:
    """Of a word."""
    return (_bell_at(bell) - _BELLS + _BINDINGS) // 4


def _named(number: int) -> int | None:
    """The bell of half a link."""
    return number - 1 if 0 < number <= BELLS else None


def index(turn: Turn, word: int) -> int:
    """Of a 32-bit word in the page. Raises ProtocolError for a turn that another process made up."""
    if not (0 <= turn.lane < LANES and 0 <= turn.number <= MASK):
        raise ProtocolError(f"turn {turn.number} of lane {turn.lane}; allowed: lanes below {LANES}, 32-bit numbers")
    return (turn.lane * LANE_BYTES + word) // 4


def is_before(one: int, other: int) -> bool:
    """Whether one number of a lane comes before another. They wrap around."""
    return 0 < other - one & MASK < 1 << 31


def _reached(word: int, number: int) -> bool:
    """As CU_STREAM_WAIT_VALUE_GEQ compares."""
    return (word - number) & MASK < 1 << 31
