"""The express lane of one client and one worker: a page of words and two bells. docs/protocol.md has the layout.

One call is on a lane at a time. The client writes it into its half of the page and rings the doorbell; the worker takes
the ring, runs the call, writes its end into the other half and rings the answer bell. Taking the ring is what claims a
call: an eventfd is emptied by exactly one reader, so that a client that empties its own doorbell has withdrawn its
call, and one that finds it empty knows that the worker has it. The broker writes only its own line: the epoch, with
which it takes all leases of the lane back at once, and the end.

The broker makes the bells, and what it and the worker do with them never waits, whatever a client does to them. That
an eventfd does not block is a property of the open file, which any holder can take away: so the worker reads it with a
flag of that one call, and only the client writes to it, which could wait. The answer bell is a pair of sockets; the
ringing end is the worker's and the broker's alone, and nothing can be sent to it: descriptors that came in there would
be closed by the worker, and closing a socket may take as long as its sender likes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from contextlib import suppress

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import memory

MAX_CALL_BYTES = 1024  # references of a call
MAX_WORD_BYTES = 1792  # of a worker's answer
OK, RAISED, DECLINED = range(3)  # a declined call was not run: it must go through the broker

# Words of eight bytes. Each line of 128 bytes has one writer.
_EPOCH, _IS_ENDED = 0, 1  # broker
_CALL, _PLAN, _CALL_BYTES, _WATCHES = 16, 17, 18, 19  # client; the references follow
_DONE, _STATUS, _KERNEL_NS, _WORD_BYTES, _DONE_PLAN, _STEP = range(256, 262)  # worker; what it says follows
_CALL_BODY, _WORD_BODY = 32 * 8, 272 * 8
_LOW, _NOT_RUNNING = 0xFFFF_FFFF, 1 << 31  # in the word of the step, whose upper half is the call's number
LAYOUT = (
    *[8 * word for word in (_EPOCH, _IS_ENDED, _CALL, _PLAN, _CALL_BYTES, _WATCHES)],
    _CALL_BODY,
    *[8 * word for word in (_DONE, _STATUS, _KERNEL_NS, _WORD_BYTES)],
    *(MAX_CALL_BYTES, MAX_WORD_BYTES, OK),
)
"""For client/session/_repeats.c."""
_HEAD, _END = struct.Struct("@3Q"), struct.Struct("@4Q")  # native, so that each word is read whole


_LOOKS = range(32)  # before the clock is asked
_COUNT = [bytearray(8)]  # nobody reads it
_RING_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # enums are slow
_HEAR_FLAGS = int(socket.MSG_DONTWAIT)


def create_doorbell() -> int:
    """Raises OSError: EOPNOTSUPP before Linux 5.8, where taking a ring might wait."""
    doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        take(doorbell)
    except BaseException:
        os.close(doorbell)
        raise
    return doorbell


def ring(doorbell: int) -> None:
    """For its client alone: this waits for whoever has filled the doorbell and made it blocking."""
    with suppress(BlockingIOError):  # it has been rung 2**64 times and nobody listened
        os.eventfd_write(doorbell, 1)


def take(doorbell: int) -> bool:
    """Whether it had been rung; it is silent again afterwards. Never waits."""
    try:
        os.preadv(doorbell, _COUNT, -1, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def create_answer_bell() -> tuple[socket.socket, socket.socket]:
    """(the end that rings, the end that hears)"""
    ringing, hearing = socket.socketpair(
        socket.AF_UNIX, socket.SOCK_DGRAM
    )  # of this kind no end wakes the other by going
    ringing.shutdown(socket.SHUT_RD)
    return ringing, hearing


def ring_back(ringing: socket.socket) -> None:
    """Never waits."""
    try:  # noqa: SIM105  # each call's way: suppress costs half a microsecond
        ringing.send(b"\1", _RING_FLAGS)
    except OSError:  # it is rung already, or nobody hears it any more
        pass


def hear(hearing: socket.socket) -> None:
    """Take one ring, if there is one."""
    with suppress(OSError):
        hearing.recv(1, _HEAR_FLAGS)


class Page:
    """The mapped page. Each method is for the side that its name says; words are read and written whole."""

    def __init__(self, fd: int) -> None:
        self._map = memory.map_fd(fd, memory.PAGE_BYTES, writable=True)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")

    @property
    def address(self) -> int:
        """Where it is mapped, as long as this object lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    # --- broker

    def revoke(self, epoch: int) -> None:
        """Leases of earlier epochs end."""
        self._words[_EPOCH] = epoch

    def end(self) -> None:
        """The worker is gone for good, and no write of it can come any more."""
        self._words[_IS_ENDED] = 1

    @property
    def epoch(self) -> int:
        return self._words[_EPOCH]

    @property
    def is_ended(self) -> bool:
        return bool(self._words[_IS_ENDED])

    # --- client

    def put_call(self, call: int, plan: int, refs: bytes) -> None:
        """`call` counts from 1."""
        words = self._words
        self._bytes[_CALL_BODY : _CALL_BODY + len(refs)] = refs
        words[_PLAN], words[_CALL_BYTES], words[_WATCHES], words[_CALL] = plan, len(refs), 0, call

    def get_end(self, call: int) -> tuple[int, int, bytes] | None:
        """(status, kernel_ns, what the worker says) of this call; None while it has not ended. Raises ProtocolError."""
        done, status, kernel_ns, nbytes = _END.unpack_from(self._map, 8 * _DONE)
        if done < call:
            return None
        if done > call or nbytes > MAX_WORD_BYTES or status > DECLINED:
            raise ProtocolError(f"call {call} of the lane ends as {done}, with status {status} and {nbytes} bytes")
        return status, kernel_ns, self._map[_WORD_BODY : _WORD_BODY + nbytes]

    # --- worker

    def get_call(self) -> tuple[int, int, bytes]:
        """(call, plan, references), as far as the client wrote them; the caller checks them."""
        call, plan, nbytes = _HEAD.unpack_from(self._map, 8 * _CALL)
        nbytes = min(nbytes, MAX_CALL_BYTES)
        return call, plan, self._map[_CALL_BODY : _CALL_BODY + nbytes]

    def await_call(self, last: int, within_ns: int) -> int | None:
        """Look until the client has put another call than the `last` one, not for longer than that. How long that took:
        its ring is there, or comes at once; None: there is no call."""
        words, start_ns = self._words, time.perf_counter_ns()
        while True:
            for _ in _LOOKS:
                if words[_CALL] != last:
                    return time.perf_counter_ns() - start_ns
            if time.perf_counter_ns() - start_ns >= within_ns:
                return None

    def put_end(self, call: int, status: int, plan: int = 0, kernel_ns: int = 0, said: bytes = b"") -> None:
        words = self._words
        if said:
            self._bytes[_WORD_BODY : _WORD_BODY + len(said)] = said
        words[_STATUS], words[_KERNEL_NS], words[_WORD_BYTES] = status, kernel_ns, len(said)
        words[_DONE_PLAN], words[_DONE] = plan, call

    @property
    def is_watched(self) -> bool:
        """Whether the client sees the end of its call without a ring. To be asked after it was put, with a barrier
        between."""
        return self._words[_WATCHES] == 1

    def put_step(self, call: int, step: int, *, is_running: bool = True) -> None:
        """Which step of this call, a chain (ipc/transport/chains.py), is run now or else made ready, from 0 on."""
        self._words[_STEP] = (call & _LOW) << 32 | (0 if is_running else _NOT_RUNNING) | step

    # --- whoever watches

    def step_of(self, call: int) -> tuple[int, bool]:
        """Of this call, a chain: the step that was begun last, and whether steps were run by then: those before it have
        ended. While they are made ready none has run, and before the worker has taken the call it is (0, False)."""
        word = self._words[_STEP]
        if word >> 32 != call & _LOW:
            return 0, False
        return word & _LOW & ~_NOT_RUNNING, not word & _NOT_RUNNING

    @property
    def done(self) -> int:
        """The last call that ended."""
        return self._words[_DONE]

    def last_time(self) -> tuple[int, int, int]:
        """(call, plan, kernel_ns) of the last call; plan is 0 unless it ran to its end."""
        words = self._words
        return words[_DONE], words[_DONE_PLAN] if words[_STATUS] == OK else 0, words[_KERNEL_NS]

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._map.close()
