"""Which way leads from one client's GPU memory to one worker: each is tried with real bytes in both directions.

What the driver says of either end proves nothing about the pair: handles can be made that the other side cannot open,
or that open onto other memory. The client calls `choose`; the worker answers each offer by `answer`.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerzero.ipc.cuda import Context
from layerzero.ipc.cuda_handles import ARENA_STEP_BYTES, RUNGS, ArenaHandle
from layerzero.ipc.cuda_mappings import Mapping, Mappings
from layerzero.ipc.cuda_memory import Arena
from layerzero.ipc.errors import CudaError, InvalidArgument, NoTransport, OutOfMemory, ProtocolError

PATTERN_BYTES = 256
_PLACES = (0, ARENA_STEP_BYTES - PATTERN_BYTES)  # both ends: a mapping that is too short must not pass
SIGN_BYTES = 64
_FIRST_SIGN = 4096  # offset of the sign of slot 0
SLOTS = (_PLACES[1] - _FIRST_SIGN) // SIGN_BYTES


@dataclass(frozen=True)
class Offer:
    """Client -> worker, with the arena's file descriptor if it has one. Answered by Answer."""

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


@dataclass(frozen=True)
class Answer:
    """Worker -> client. What it read, and what it wrote in the same places; or why it could not."""

    arena: int  # of the offer
    seen: bytes = b""
    written: bytes = b""
    error: str = ""

    def to_wire(self) -> dict[str, Any]:
        return {"arena": self.arena, "seen": self.seen, "written": self.written, "error": self.error}

    @classmethod
    def from_wire(cls, value: object) -> Answer:
        """Raises ProtocolError."""
        match value:
            case {"arena": int(arena), "seen": bytes(seen), "written": bytes(written), "error": str(error)}:
                return cls(arena, seen, written, error[:500])
        raise ProtocolError(f"not an answer to an offer of GPU memory: {value!r:.200}")


@dataclass(frozen=True)
class Choice:
    """The best rung that works, and why each better one does not."""

    rung: str
    rejected: dict[str, str]


# Sends an offer and waits for its answer; answers to earlier offers, which came too late, are dropped (`Answer.arena`).
# Raises TimeoutError when none comes in time.
Exchange = Callable[[Offer, "int | None"], Answer]


def choose(
    context: Context,
    client: str,
    numbers: itertools.count[int],
    exchange: Exchange,
    *,
    required: str | None = None,
    offered: tuple[str, ...] = RUNGS,
) -> Choice:
    """Find the best of the `offered` rungs that works between this client and a worker.

    `numbers`: where this client's arena numbers come from. Raises NoTransport when none works, or not the `required`
    one, which is then the only one tried. An arena whose offer got no answer, 2 MiB, is kept for good.
    """
    if required is not None and required not in RUNGS:
        raise InvalidArgument(f"no way to share GPU memory is called {required!r}; known: {', '.join(RUNGS)}")
    rejected: dict[str, str] = {}
    for rung in RUNGS if required is None else (required,):
        reason = "not offered"
        if rung in offered:
            reason = _try(context, client, next(numbers), rung, exchange)
        if not reason:
            return Choice(rung, rejected)
        rejected[rung] = reason
    told = "; ".join(f"{rung}: {reason}" for rung, reason in rejected.items())
    what = "no way to share GPU memory with the worker works" if required is None else f"{required!r} is required"
    raise NoTransport(f"{what}: {told}", required=required or "", reasons=rejected)


def _try(context: Context, client: str, number: int, rung: str, exchange: Exchange) -> str:
    """Why a rung does not work; empty when it does. A sticky CudaError is raised: this process is lost."""
    try:
        arena = Arena(context, client, number, ARENA_STEP_BYTES, kind="vmm" if rung == "vmm" else "plain")
    except CudaError as exc:
        return _excuse(exc)
    try:
        reason = _converse(arena, rung, exchange)
    except TimeoutError as exc:
        # The worker may have it mapped, now or later: memory that somebody maps must not be freed.
        return f"no answer: {exc}"
    except (CudaError, OutOfMemory, ProtocolError) as exc:
        reason = _excuse(exc)
    arena.close()
    return reason


def _converse(arena: Arena, rung: str, exchange: Exchange) -> str:
    handle, fd = arena.offer(rung)
    pattern = secrets.token_bytes(PATTERN_BYTES)
    with arena.context:
        _write(arena.context, arena.address, pattern, lambda o, n, s: arena.publish(rung, o, n, s))
    answer = exchange(Offer(handle, pattern, os.getpid()), fd)
    if answer.arena != handle.arena:
        raise ProtocolError(f"the worker answered to arena {answer.arena}; it was offered {handle.arena}")
    if answer.error:
        return answer.error
    if answer.seen != pattern * len(_PLACES):
        return "the worker saw other bytes than the client wrote"
    with arena.context:
        read = _read(arena.context, arena.address, lambda o, n, s: arena.collect(rung, o, n, s))
    if len(answer.written) != PATTERN_BYTES or read != answer.written * len(_PLACES):
        return "the client saw other bytes than the worker wrote"
    return ""


def answer(mappings: Mappings, offer: Offer, fd: int | None) -> Answer:
    """Try the offered arena and let go of it again. Takes `fd` over. Raises CudaError when it is sticky."""
    arena = offer.handle.arena
    reason = _objection(offer)
    if reason:
        if fd is not None:
            os.close(fd)
        return Answer(arena, error=reason)
    try:
        mapping = mappings.open(offer.handle, fd)
        try:
            return _reply(mapping, offer.pattern)
        finally:
            mappings.retire(offer.handle.key, ())
            mappings.reap()
    except (CudaError, ProtocolError) as exc:
        return Answer(arena, error=_excuse(exc))


def _objection(offer: Offer) -> str:
    if offer.handle.rung == "ipc" and offer.pid == os.getpid():
        # Two containers, each with its own pid 1: the driver takes the handle for one of our own, error 201.
        return f"client and worker have the same pid, {offer.pid}, in their namespaces"
    if offer.handle.nbytes < ARENA_STEP_BYTES:
        return f"an arena to try has {ARENA_STEP_BYTES} bytes, not {offer.handle.nbytes}"
    return ""


def _reply(mapping: Mapping, expected: bytes) -> Answer:
    context = mapping.context
    with context:
        seen = _read(context, mapping.address, mapping.collect)
        if seen != expected * len(_PLACES):
            return Answer(mapping.handle.arena, error="the worker saw other bytes than the client wrote")
        written = secrets.token_bytes(PATTERN_BYTES)
        _write(context, mapping.address, written, mapping.publish)
    return Answer(mapping.handle.arena, seen, written)


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
