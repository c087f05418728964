"""One-shot all_reduce of two GPUs, within CUDA graphs: each reads the other's summand where it lies.

A kernel of torch's reads it over NVLink and adds its own, where NCCL copies both by way of buffers. Of two summands
there is one order: the result is NCCL's to the bit.

Two places for this rank's summand take turns, in memory that the other rank has mapped. A GPU says that its summand is
there by a word of the host's memory that both GPUs see; the other one waits for it, puts it back, and reads. So who is
past a sum knows that the other has read all sums before it: the place of the one before may be written again. That
holds from graph to graph as well, since each has an even number of sums, or an empty one at its end. That the last one
was read, too, another word says, which is looked at before the memory serves anything else. What a rank that is gone
would have said, the CPU says (`release`), for as long as this GPU works.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from layerzero.client.arrays.addresses import address_of_any
from layerzero.client.arrays.dlpack import GpuExport
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, IPC_HANDLE_BYTES
from layerzero.ipc.errors import CudaError, ProtocolError
from layerzero.ipc.shm.memory import PAGE_BYTES, check_arena, create_memfd, map_guarded
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

_DTYPES = ("float16", "bfloat16", "float32", "float64", "int16", "int32", "int64")
_LINE = 128  # bytes between two words
_START = 512  # a multiple of which torch's tensors begin at, and so summands: kernels are lifted for that
_idle: list[_Memory] = []  # kept for the next one: what frees memory of a GPU waits for all that runs there
_retired: list[tuple[OneShot, Callable[[], bool]]] = []
_lock = threading.Lock()


class _Memory:
    """Of this rank's summands, for another process to map."""

    def __init__(self, context: Context, nbytes: int) -> None:
        """Raises CudaError."""
        self.context, self.nbytes = context, -(-nbytes // ARENA_STEP_BYTES) * ARENA_STEP_BYTES
        with context as within:
            self.address = within.driver.allocate(self.nbytes)
            try:
                self.handle = within.driver.ipc_export(self.address)
            except CudaError:
                within.driver.free(self.address)
                raise


def _memory(context: Context, nbytes: int) -> _Memory:
    with _lock:
        fit = [one for one in _idle if one.context is context and one.nbytes >= nbytes]
        if fit:
            found = min(fit, key=lambda one: one.nbytes)
            _idle.remove(found)
            return found
    return _Memory(context, nbytes)


class OneShot:
    """This rank's half, 0 or 1, for one plan at a time. Its calls that enqueue need torch's GPU to be the context's."""

    def __init__(self, context: Context, rank: int, nbytes: int) -> None:
        """For sums of up to so many bytes. Raises CudaError."""
        self.nbytes = -(-nbytes // _START) * _START
        self._context, self._rank, self._pid = context, rank, os.getpid()
        self._lock = threading.Lock()
        self._memory = _memory(context, 2 * self.nbytes)
        self._theirs = 0  # the address of the other's memory here
        self._page: memoryview | None = None
        self._words = 0  # the page's address for the GPU
        self._count = 0
        self._is_closed = self._was_void = False

    @property
    def ordinal(self) -> int:
        """Of its GPU."""
        return self._context.ordinal

    # --- the other rank

    def offer(self) -> list[Any]:
        """What the other one needs."""
        return [self._memory.context.gpu, self._memory.nbytes, self._memory.handle]

    @staticmethod
    def new_page() -> int:
        """A descriptor of memory for the words. Raises OutOfMemory."""
        return create_memfd("layerzero-one-shot", PAGE_BYTES)

    def join(self, offer: Any, page: int) -> None:
        """`offer`: the other rank's; `page`: that both have, whose descriptor stays the caller's. Raises ProtocolError,
        CudaError where this GPU does not reach the other's memory, OSError, and what torch raises that takes no such
        memory as a tensor."""
        match offer:
            case [str(), int(nbytes), bytes(handle)] if len(handle) == IPC_HANDLE_BYTES and nbytes >= 2 * self.nbytes:
                pass
            case _:
                raise ProtocolError("the other rank offers no memory for sums of this size")
        check_arena(page, PAGE_BYTES)
        driver = self._context.driver
        self._page = map_guarded(page, PAGE_BYTES, writable=True)
        with self._context:
            self._theirs = driver.ipc_open(handle)
            if driver.address_range(self._theirs)[1] < 2 * self.nbytes:
                raise ProtocolError("the other rank's memory is smaller than it says")
            self._words = driver.host_register(address_of_any(self._page), PAGE_BYTES, self._page)
        self._tensor(self._theirs, "uint8", (1,))

    # --- sums

    @staticmethod
    def takes(dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in _DTYPES and math.prod(shape) > 0

    def begin(self) -> None:
        """What is enqueued next is the first sum of a graph."""
        self._count = 0

    def place(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor for this rank's summand of the next sum; None for one that is not taken. The sum before is enqueued
        already."""
        if not self.takes(dtype, shape) or math.prod(shape) * ITEMSIZE[dtype] > self.nbytes:
            return None
        return self._tensor(self._memory.address, dtype, shape)

    def add_up(self, x: Any, out: Any = None) -> Any:
        """Both ranks' sum, contiguous, onto the current stream; None where it is not taken. `x`: that of `place`, or
        another one, which is copied. `out`: where to put it, which may be `x` if that is another one; else new."""
        dtype, shape = str(x.dtype).removeprefix("torch."), tuple(x.shape)
        place = self.place(dtype, shape)
        if place is None:
            return None
        if x.data_ptr() != place.data_ptr():
            place.copy_(x)
        theirs = self._tensor(self._theirs, dtype, shape)
        self._meet()
        return sys.modules["torch"].add(place, theirs, out=out)

    def end(self) -> None:
        """That was the last sum of a graph."""
        if self._count % 2:
            self._meet()
        if self._count:
            with self._context as context:
                context.driver.write_value(self._stream(), self._words + self._read(self._rank), 1)

    def _meet(self) -> None:
        """The stream waits until both summands are in their places."""
        told, taken = (self._words + self._there(rank, self._count % 2) for rank in (self._rank, 1 - self._rank))
        with self._context as context:
            if not self._count:
                context.driver.write_value(self._stream(), self._words + self._read(self._rank), 0)
            context.driver.tell_and_take(self._stream(), told, taken)
        self._count += 1

    def _stream(self) -> int:
        return int(sys.modules["torch"].cuda.current_stream(self._context.ordinal).cuda_stream)

    # Words of the page, by their bytes from its start.

    @staticmethod
    def _there(rank: int, place: int) -> int:
        """A rank's summand is in its place."""
        return (2 * rank + place) * _LINE

    @staticmethod
    def _read(rank: int) -> int:
        """A rank has read all of its last graph."""
        return (4 + rank) * _LINE

    _VOID = 6 * _LINE  # a rank was let go on: sums since are void, on both

    def _tensor(self, base: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """The next sum's place in one of both ranks' memory."""
        address = base + self._count % 2 * self.nbytes
        export = GpuExport(address, dtype, shape, self._context.ordinal, lambda _: None, self)
        return sys.modules["torch"].from_dlpack(export)

    # --- its end

    def release(self) -> None:
        """Let this GPU go on past what it waits for now, with sums that are void. By any thread, again and again, once
        the other is gone."""
        other = 1 - self._rank
        with self._lock:
            if self._page is not None:
                words = self._page.cast("I")
                for at in (self._VOID, self._there(other, 0), self._there(other, 1), self._read(other)):
                    words[at // 4] = 1

    def is_void(self) -> bool:
        """Whether either GPU was: what both have given since is void. Also once it is closed."""
        with self._lock:
            if self._page is not None:
                self._was_void = bool(self._page.cast("I")[self._VOID // 4])
            return self._was_void

    def is_read(self) -> bool:
        """Whether the other rank has read all that this one, whose GPU is through, has launched; true without any."""
        with self._lock:
            page = self._page
            own, theirs = (0, 0) if page is None else (page.cast("I")[self._read(rank) // 4] for rank in self._ranks())
        return own == theirs

    def _ranks(self) -> tuple[int, int]:
        return self._rank, 1 - self._rank

    def close(self) -> None:
        """Once this GPU works with it no more, and the other one `is_read`."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        self.is_void()
        with self._lock:
            page, self._page = self._page, None
        if page is not None:
            with self._context as context:
                if self._words:
                    with contextlib.suppress(CudaError):
                        context.driver.host_unregister(address_of_any(page))
                if self._theirs:
                    with contextlib.suppress(CudaError):
                        context.driver.ipc_close(self._theirs)
        with _lock:
            _idle.append(self._memory)


def retire(one_shot: OneShot, is_done: Callable[[], bool]) -> None:
    """Nobody enqueues with it any more: it is closed by a later `sweep`, once the GPU `is_done`. At any time, also by
    the garbage collector while a graph is captured."""
    _retired.append((one_shot, is_done))


def sweep() -> None:
    """Not while a graph is captured."""
    for one in list(_retired):
        one_shot, is_done = one
        if is_done() and one_shot.is_read():
            with contextlib.suppress(ValueError):  # another thread has
                _retired.remove(one)
                one_shot.close()
