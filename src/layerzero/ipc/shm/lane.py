"""The express lane of one client and one worker: a page of words with places for calls, and two bells. docs/protocol.md
has the layout.

Calls are numbered, and up to DEPTH of them are on a lane. The client writes a call into its place and rings the
doorbell, which counts; the worker takes one ring, runs the next call, writes its end into the same place and rings the
answer bell if the client sleeps until then. Taking a ring is what claims a call: as many calls are unclaimed, the last
ones, as there are rings to take. So a client that takes rings has taken its latest calls back, one for each, and one
that finds no ring knows that the worker has the call. The broker writes only its own line: the epoch, with which it
takes all leases of the lane back at once, and the end.

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

DEPTH = 64  # calls on a lane

# Words of eight bytes. Each line of 128 bytes has one writer.
_EPOCH, _IS_ENDED = 0, 1  # broker
# Client: the last call that was put; the one whose end it sleeps for until it is rung for; likewise, where it sleeps on
# the word _DONE, by a futex: quicker, and as it hears of nothing else then, not for long.
_CALL, _WAITS, _NAPS = 16, 17, 18
_DONE, _STEP, _WAKES = 32, 33, 34  # worker: the last call that ended; of a chain; whether it wakes who sleeps on _DONE
_HEAD_BYTES, _PLACE_BYTES = 4096, 3200  # before the places, and of each
_NUMBER, _PLAN, _CALL_BYTES = range(3)  # of a place, client; the references follow
_END_AT, _REFS_AT, _SAID_AT = 1152, 128, 1280  # worker: number, status, kernel ns, bytes it says, plan; what it says
PAGE_BYTES = 53 * 4096  # the head and DEPTH places
_LOW, _NOT_RUNNING = 0xFFFF_FFFF, 1 << 31  # in the word of the step, whose upper half is the call's number
NO_PLAN = (1 << 64) - 1  # of a call that was withdrawn: it is declined
LAYOUT = (
    *[8 * word for word in (_EPOCH, _IS_ENDED, _CALL, _WAITS, _NAPS, _DONE, _WAKES)],
    *(_HEAD_BYTES, _PLACE_BYTES, 8 * _NUMBER, 8 * _PLAN, 8 * _CALL_BYTES, _REFS_AT, _END_AT),
    *(MAX_CALL_BYTES, MAX_WORD_BYTES, OK, DEPTH),
)
"""For ipc/shm/_lane.h."""
_HEAD, _END = struct.Struct("@3Q"), struct.Struct("@4Q")  # native, so that each word is read whole
assert _HEAD_BYTES + DEPTH * _PLACE_BYTES <= PAGE_BYTES


_LOOKS = range(32)  # before the clock is asked
_COUNT = [bytearray(8)]  # nobody reads it
_RING_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # enums are slow
_HEAR_FLAGS = int(socket.MSG_DONTWAIT)


def create_doorbell(*, counts: bool = False) -> int:
    """`counts`: each ring is taken by itself, as those of a lane; else all at once. Raises OSError: EOPNOTSUPP before
    Linux 5.8, where taking a ring might wait."""
    doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | (os.EFD_SEMAPHORE if counts else 0))
    try:
        take(doorbell)
    except BaseException:
        os.close(doorbell)
        raise
    return doorbell


def ring(doorbell: int, times: int = 1) -> None:
    """For its client alone: this waits for whoever has filled the doorbell and made it blocking."""
    with suppress(BlockingIOError):  # it has been rung 2**64 times and nobody listened
        os.eventfd_write(doorbell, times)


def take(doorbell: int) -> bool:
    """Whether it had been rung; one ring less is there afterwards, or none where they are not counted. Never waits."""
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
        self._map = memory.map_fd(fd, PAGE_BYTES, writable=True)
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

    def put_call(self, call: int, plan: int, refs: bytes, *, waits: bool = True) -> None:
        """`call` counts from 1; its place must be free. `waits`: the client will sleep until it has ended."""
        words, at = self._words, _place(call)
        self._bytes[at + _REFS_AT : at + _REFS_AT + len(refs)] = refs
        place = at // 8
        words[place + _PLAN], words[place + _CALL_BYTES], words[place + _NUMBER] = plan, len(refs), call
        if waits:
            words[_WAITS] = call
        words[_CALL] = call

    def withdraw(self, call: int) -> None:
        """The worker has not claimed it, nor can it now: it will be declined."""
        self._words[_place(call) // 8 + _PLAN] = NO_PLAN

    def get_end(self, call: int) -> tuple[int, int, bytes] | None:
        """(status, kernel_ns, what the worker says) of this call; None while it has not ended. Raises ProtocolError."""
        at = _place(call)
        done, status, kernel_ns, nbytes = _END.unpack_from(self._map, at + _END_AT)
        if done < call and self._words[_DONE] < call:
            return None
        if done != call:  # it may have been written just now
            done, status, kernel_ns, nbytes = _END.unpack_from(self._map, at + _END_AT)
        if done != call or nbytes > MAX_WORD_BYTES or status > DECLINED:
            raise ProtocolError(f"call {call} of the lane ends as {done}, with status {status} and {nbytes} bytes")
        return status, kernel_ns, self._map[at + _SAID_AT : at + _SAID_AT + nbytes]

    # --- worker

    def get_call(self, call: int) -> tuple[int, bytes] | None:
        """(plan, references), as far as the client wrote them; the caller checks them. None when the client has not put
        this call, although it rang for it."""
        at = _place(call)
        number, plan, nbytes = _HEAD.unpack_from(self._map, at)
        if number != call:
            return None
        nbytes = min(nbytes, MAX_CALL_BYTES)
        return plan, self._map[at + _REFS_AT : at + _REFS_AT + nbytes]

    def has_call(self, call: int) -> bool:
        """Whether the client has put it, whose ring is there then, or comes at once."""
        return self._words[_CALL] >= call

    def await_call(self, call: int, within_ns: int) -> int | None:
        """Look until the client has put this call, not for longer than that. How long that took; None: there is no
        such call."""
        words, start_ns = self._words, time.perf_counter_ns()
        while True:
            for _ in _LOOKS:
                if words[_CALL] >= call:
                    return time.perf_counter_ns() - start_ns
            if time.perf_counter_ns() - start_ns >= within_ns:
                return None

    def put_end(self, call: int, status: int, plan: int = 0, kernel_ns: int = 0, said: bytes = b"") -> None:
        self._put_end(call, call, status, plan, kernel_ns, said)

    def _put_end(self, call: int, number: int, status: int, plan: int, kernel_ns: int, said: bytes) -> None:
        words, at = self._words, _place(call)
        if said:
            self._bytes[at + _SAID_AT : at + _SAID_AT + len(said)] = said
        end = (at + _END_AT) // 8
        words[end + 1], words[end + 2], words[end + 3], words[end + 4] = status, kernel_ns, len(said), plan
        words[end] = number
        words[_DONE] = call

    def is_awaited(self, call: int) -> bool:
        """Whether the client sleeps until this call has ended, or slept for an earlier one. To be asked after the end
        was put, with a barrier between."""
        return 0 < self._words[_WAITS] <= call

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
    def calls(self) -> int:
        """The last call that was put."""
        return self._words[_CALL]

    @property
    def done(self) -> int:
        """The last call that ended."""
        return self._words[_DONE]

    def last_time(self) -> tuple[int, int, int]:
        """(call, plan, kernel_ns) of the last call; plan is 0 unless it ran to its end."""
        words = self._words
        done = words[_DONE]
        number, status, kernel_ns, _, plan = words[(at := (_place(done) + _END_AT) // 8) : at + 5]
        return done, plan if number == done and status == OK else 0, kernel_ns

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._map.close()


def _place(call: int) -> int:
    """Where its place begins."""
    return _HEAD_BYTES + (call - 1) % DEPTH * _PLACE_BYTES
