"""A worker's half of an offer of GPU memory (ipc/cuda/offer.py): it reads the client's pattern and leaves its sign."""

from __future__ import annotations

import ctypes
import os

from layerzero.ipc.cuda.driver import read_back
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES
from layerzero.ipc.cuda.mappings import Mapping, Mappings
from layerzero.ipc.cuda.offer import PATTERN_BYTES, PLACES, SIGN_BYTES, Offer, sign_of, sign_offset
from layerzero.ipc.errors import CudaError, NoTransport, OutOfMemory, ProtocolError


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
            if _read(mapping) != offer.pattern * len(PLACES):
                raise ProtocolError("the worker saw other bytes than the client wrote")
            source = (ctypes.c_char * SIGN_BYTES).from_buffer_copy(sign_of(offer.pattern, slot))
            offset = sign_offset(slot)
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
    if offer.handle.transport == "ipc" and offer.pid == os.getpid():
        # Two containers, each with its own pid 1: the driver takes the handle for one of our own, error 201.
        return f"client and worker have the same pid, {offer.pid}, in their namespaces"
    if offer.handle.nbytes < ARENA_STEP_BYTES:
        return f"an arena to try has {ARENA_STEP_BYTES} bytes, not {offer.handle.nbytes}"
    return ""


def _no_transport(offer: Offer, reason: str) -> NoTransport:
    transport = offer.handle.transport
    return NoTransport(
        f"GPU memory does not reach the worker by {transport!r}: {reason}", transport=transport, reason=reason
    )


def _read(mapping: Mapping) -> bytes:
    driver = mapping.context.driver
    read = b""
    stream = driver.create_stream()
    try:
        for offset in PLACES:
            mapping.collect(offset, PATTERN_BYTES, stream)
            read += read_back(driver, mapping.address + offset, PATTERN_BYTES, stream)
    finally:
        driver.destroy_stream(stream)
    return read


def _excuse(error: CudaError | OutOfMemory | ProtocolError) -> str:
    if isinstance(error, CudaError) and error.is_sticky:
        raise error
    return error.message
