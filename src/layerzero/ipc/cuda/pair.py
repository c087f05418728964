"""Whether one client's GPU memory reaches one worker in some way: tried with real bytes in both directions.

What the driver says of either end proves nothing about the pair: handles can be made that the other side cannot open,
or that open onto other memory. The client makes a `Trial`, which each worker signs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, ArenaHandle
from layerzero.ipc.cuda.mappings import Mappings
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.errors import CudaError, NoTransport, OutOfMemory, ProtocolError

PATTERN_BYTES = 256
_PLACES = (0, ARENA_STEP_BYTES - PATTERN_BYTES)  # both ends: a mapping that is too short must not pass
SIGN_BYTES = 64
_FIRST_SIGN = 4096  # offset of the sign of slot 0
SLOTS = (_PLACES[1] - _FIRST_SIGN) // SIGN_BYTES


@dataclass(frozen=True)
class Offer:
    """Client -> worker, with the arena's file descriptor if it has one."""

    handle: ArenaHandle
    pattern: bytes  # what the client has written at both ends of the arena
    pid: int  # of the client, as it sees itself

    def to_wire(self) -> dict[str, Any]:
        return {"handle": self.handle.to_wire(), "pattern": self.pattern, "pid": self.pid}

    @classmethod
    def from_wire(cls, value: object) -> Offer:
        """Raises ProtocolError."""
        match value:
            case {"handle": dict(handle), "pattern": bytes(pattern), "pid": int(pid)} if len(pattern) == PATTERN_BYTES:
                return cls(ArenaHandle.from_wire(handle), pattern, pid)
        raise ProtocolError(f"not an offer of GPU memory: {value!r:.200}")


class Trial:
    """A client's offer to all its workers. Each that could read it leaves a sign that proves it, which the client reads
    when it first hears of that worker: with that, bytes have crossed in both directions."""

    def __init__(self, context: Context, client: str, number: int, rung: str) -> None:
        """`number`: of the arena. Raises CudaError, OutOfMemory where this machine does not have the rung."""
        self.rung = rung
        self._arena = Arena(context, client, number, ARENA_STEP_BYTES, kind="vmm" if rung == "vmm" else "plain")
        try:
            handle, self.fd = self._arena.offer(rung)
            pattern = secrets.token_bytes(PATTERN_BYTES)
            with context:
                _write(context, self._arena.address, pattern, self._publish)
        except BaseException:
            self._arena.close()
            raise
        self.offer = Offer(handle, pattern, os.getpid())

    def is_signed(self, slot: int) -> bool:
        """Whether the worker of this slot could read the offer, and this process what the worker wrote."""
        context, offset = self._arena.context, _sign_offset(slot)
        with context:
            stream = context.driver.create_stream()
            try:
                self._arena.collect(self.rung, offset, SIGN_BYTES, stream)
                read = _take(context, self._arena.address + offset, SIGN_BYTES, stream)
            finally:
                context.driver.destroy_stream(stream)
        return read == _sign_of(self.offer.pattern, slot)

    def _publish(self, offset: int, nbytes: int, stream: int) -> int:
        return self._arena.publish(self.rung, offset, nbytes, stream)

    def close(self) -> None:
        """Once every worker has unmapped it or has ended."""
        self._arena.close()


def sign(mappings: Mappings, offer: Offer, fd: int | None, slot: int) -> None:
    """The worker's answer to a Trial. The offer stays mapped. Takes `fd` over.

    Raises NoTransport with the reason when the offer cannot be read here, CudaError when that is sticky.
    """
    reason = _objection(offer)
    if reason:
        if fd is not None:
            os.close(fd)
        raise _no_transport(offer, reason)
    try:
        mapping = mappings.open(offer.handle, fd)
        context = mapping.context
        with context:
            if _read(context, mapping.address, mapping.collect) != offer.pattern * len(_PLACES):
                raise ProtocolError("the worker saw other bytes than the client wrote")
            source = (ctypes.c_char * SIGN_BYTES).from_buffer_copy(_sign_of(offer.pattern, slot))
            offset = _sign_offset(slot)
            stream = context.driver.create_stream()
            try:
                context.driver.copy_to_device(
                    mapping.at(offset, SIGN_BYTES), ctypes.addressof(source), SIGN_BYTES, stream
                )
                mapping.publish(offset, SIGN_BYTES, stream)
                context.driver.synchronize_stream(stream)
            finally:
                context.driver.destroy_stream(stream)
    except (CudaError, OutOfMemory, ProtocolError) as exc:
        raise _no_transport(offer, _excuse(exc)) from exc


def _objection(offer: Offer) -> str:
    if offer.handle.rung == "ipc" and offer.pid == os.getpid():
        # Two containers, each with its own pid 1: the driver takes the handle for one of our own, error 201.
        return f"client and worker have the same pid, {offer.pid}, in their namespaces"
    if offer.handle.nbytes < ARENA_STEP_BYTES:
        return f"an arena to try has {ARENA_STEP_BYTES} bytes, not {offer.handle.nbytes}"
    return ""


def _no_transport(offer: Offer, reason: str) -> NoTransport:
    rung = offer.handle.rung
    return NoTransport(f"GPU memory does not reach the worker by {rung!r}: {reason}", rung=rung, reason=reason)


def _sign_offset(slot: int) -> int:
    if not 0 <= slot < SLOTS:
        raise ProtocolError(f"slot {slot}; allowed: 0 to {SLOTS - 1}")
    return _FIRST_SIGN + slot * SIGN_BYTES


def _sign_of(pattern: bytes, slot: int) -> bytes:
    return hashlib.blake2b(pattern, digest_size=SIGN_BYTES, salt=slot.to_bytes(8, "little")).digest()


Mover = Callable[[int, int, int], int]  # offset, bytes, stream -> bytes copied


def _write(context: Context, base: int, pattern: bytes, publish: Mover) -> None:
    driver = context.driver
    source = (ctypes.c_char * PATTERN_BYTES).from_buffer_copy(pattern)
    stream = driver.create_stream()
    try:
        for offset in _PLACES:
            driver.copy_to_device(base + offset, ctypes.addressof(source), PATTERN_BYTES, stream)
            publish(offset, PATTERN_BYTES, stream)
        driver.synchronize_stream(stream)
    finally:
        driver.destroy_stream(stream)


def _read(context: Context, base: int, collect: Mover) -> bytes:
    driver = context.driver
    read = b""
    stream = driver.create_stream()
    try:
        for offset in _PLACES:
            collect(offset, PATTERN_BYTES, stream)
            read += _take(context, base + offset, PATTERN_BYTES, stream)
    finally:
        driver.destroy_stream(stream)
    return read


def _take(context: Context, address: int, nbytes: int, stream: int) -> bytes:
    target = (ctypes.c_char * nbytes)()
    context.driver.copy_to_host(ctypes.addressof(target), address, nbytes, stream)
    context.driver.synchronize_stream(stream)
    return bytes(target)


def _excuse(error: CudaError | OutOfMemory | ProtocolError) -> str:
    if isinstance(error, CudaError) and error.is_sticky:
        raise error
    return error.message
