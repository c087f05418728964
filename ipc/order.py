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

from layerzero.ipc import memory
from layerzero.ipc.errors import ProtocolError

LANES = 64  # of one page: so many streams of a client can have open calls to one worker
PAGE_BYTES = LANES * 512
READY, DONE, _ERROR = 0, 128, 256  # bytes within a lane; 128 apart, so that writers share no cache line
MASK = (1 << 32) - 1
MAX_ERROR = MASK


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

    def close(self) -> None:
        self._words.release()
        self._errors.release()
        self._map.close()


def index(turn: Turn, word: int) -> int:
    """Of a 32-bit word in the page. Raises ProtocolError for a turn that another process made up."""
    if not (0 <= turn.lane < LANES and 0 <= turn.number <= MASK):
        raise ProtocolError(f"turn {turn.number} of lane {turn.lane}; allowed: lanes below {LANES}, 32-bit numbers")
    return (turn.lane * 512 + word) // 4


def _reached(word: int, number: int) -> bool:
    """As CU_STREAM_WAIT_VALUE_GEQ compares."""
    return (word - number) & MASK < 1 << 31
