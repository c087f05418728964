"""Host memory through which GPU memory is copied where it cannot be mapped: a sealed memfd on both sides."""

from __future__ import annotations

import ctypes
import os

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.ipc.shm import memory


class Staging:
    """A memfd of an arena's size, mapped here. The same offsets mean the same bytes on the GPU and in it.

    Copies need a current context and are ordered by the stream. Pinned memory is copied by the GPU while the CPU goes
    on; with any other, the CPU waits for the stream.
    """

    def __init__(self, context: Context, fd: int, nbytes: int, *, is_pinned: bool) -> None:
        """Raises CudaError when the memory cannot be pinned. Does not keep `fd`."""
        self._context = context
        self._map = memory.map_fd(fd, nbytes, writable=True, populate=True)
        self._pin = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._pin)
        self._is_pinned = is_pinned
        if is_pinned:
            try:
                with context:
                    context.driver.host_register(self._address, nbytes, self._map)
            except CudaError:
                self._is_pinned = False
                self.close()
                raise

    def from_device(self, base: int, offset: int, nbytes: int, stream: int) -> None:
        self._context.driver.copy_to_host(self._address + offset, base + offset, nbytes, stream)

    def to_device(self, base: int, offset: int, nbytes: int, stream: int) -> None:
        if not self._is_pinned:
            # The driver may read pageable memory at once, before what the stream still waits for has written it.
            self._context.driver.synchronize_stream(stream)
        self._context.driver.copy_to_device(base + offset, self._address + offset, nbytes, stream)

    def close(self) -> None:
        """To be called once no copy is under way."""
        if self._is_pinned:
            with self._context:
                self._context.driver.host_unregister(self._address)
        del self._pin
        self._map.close()


def create(context: Context, nbytes: int, *, is_pinned: bool) -> tuple[Staging, int]:
    """New staging memory, and its file descriptor, which the caller owns. Raises OutOfMemory, CudaError."""
    fd = memory.create_memfd("layerzero-staging", nbytes)
    try:
        return Staging(context, fd, nbytes, is_pinned=is_pinned), fd
    except BaseException:
        os.close(fd)
        raise
