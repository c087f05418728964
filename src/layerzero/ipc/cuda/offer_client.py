"""The client's half of an offer of GPU memory (ipc/cuda/offer.py): an arena with a pattern, which workers sign."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable

from layerzero.ipc.cuda.driver import Context, read_back
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES
from layerzero.ipc.cuda.memory import Arena
from layerzero.ipc.cuda.offer import PATTERN_BYTES, PLACES, SIGN_BYTES, Offer, sign_of, sign_offset


class Trial:
    """A client's offer to all its workers. Each that could read it leaves a sign that proves it, which the client reads
    when it first hears of that worker: with that, bytes have crossed in both directions."""

    def __init__(self, context: Context, client: str, number: int, transport: str) -> None:
        """`number`: of the arena. Raises CudaError, OutOfMemory where this machine does not have the transport."""
        self.transport = transport
        self._arena = Arena(context, client, number, ARENA_STEP_BYTES, kind="vmm" if transport == "vmm" else "plain")
        try:
            handle, self.fd = self._arena.offer(transport)
            pattern = secrets.token_bytes(PATTERN_BYTES)
            with context:
                _write(context, self._arena.address, pattern, self._publish)
        except BaseException:
            self._arena.close()
            raise
        self.offer = Offer(handle, pattern, os.getpid())

    def is_signed(self, slot: int) -> bool:
        """Whether the worker of this slot could read the offer, and this process what the worker wrote."""
        context, offset = self._arena.context, sign_offset(slot)
        with context:
            stream = context.driver.create_stream()
            try:
                self._arena.collect(self.transport, offset, SIGN_BYTES, stream)
                read = read_back(context.driver, self._arena.address + offset, SIGN_BYTES, stream)
            finally:
                context.driver.destroy_stream(stream)
        return read == sign_of(self.offer.pattern, slot)

    def _publish(self, offset: int, nbytes: int, stream: int) -> int:
        return self._arena.publish(self.transport, offset, nbytes, stream)

    def close(self) -> None:
        """Once every worker has unmapped it or has ended."""
        self._arena.close()


def _write(context: Context, base: int, pattern: bytes, publish: Callable[[int, int, int], int]) -> None:
    driver = context.driver
    source = (ctypes.c_char * PATTERN_BYTES).from_buffer_copy(pattern)
    stream = driver.create_stream()
    try:
        for offset in PLACES:
            driver.copy_to_device(base + offset, ctypes.addressof(source), PATTERN_BYTES, stream)
            publish(offset, PATTERN_BYTES, stream)
        driver.synchronize_stream(stream)
    finally:
        driver.destroy_stream(stream)
