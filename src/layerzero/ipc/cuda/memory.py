"""The owner's side of GPU memory that crosses: a client's arenas, the slots in them, and its own arrays in place."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass

from layerzero.ipc.cuda import staging as cuda_staging
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import ARENA_STEP_BYTES, STAGED, ArenaHandle, check_span
from layerzero.ipc.cuda.staging import Staging
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES

SLOT_BYTES = 256  # what cudaMalloc aligns to, and more than any kernel asks for
SHARED_ARENA_BYTES = 32 << 20  # arenas for many slots
OWN_ARENA_BYTES = 16 << 20  # slots from this size on get an arena of their own


class Arena:
    """Device memory of this process that workers may map.

    `kind`: "plain" (made by cuMemAlloc; transport "ipc"), "vmm" (transport "vmm") or "foreign" (an allocation of
    somebody else in this process, transport "ipc"). The staged transports work with each.
    """

    def __init__(
        self, context: Context, client: str, number: int, nbytes: int, *, kind: str = "plain", address: int = 0
    ) -> None:
        """`nbytes` is rounded up to a multiple of 2 MiB; "foreign" takes it and `address` as they are."""
        self.context, self.client, self.number, self.kind = context, client, number, kind
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._handles: dict[str, tuple[ArenaHandle, int | None]] = {}
        self._staging: dict[str, Staging] = {}
        self._physical = 0
        driver = context.driver
        with context:
            if kind == "foreign":
                self.nbytes, self.address = nbytes, address
            elif kind == "plain":
                self.nbytes = _round_up(nbytes, ARENA_STEP_BYTES)
                self.address = driver.allocate(self.nbytes)
            else:
                self.nbytes = _round_up(nbytes, max(ARENA_STEP_BYTES, driver.vmm_granularity(context.ordinal)))
                self._physical = driver.vmm_create(self.nbytes, context.ordinal)
                try:
                    self.address = driver.vmm_map(self._physical, self.nbytes, context.ordinal)
                except BaseException:
                    driver.vmm_release(self._physical)
                    raise

    def offer(self, transport: str) -> tuple[ArenaHandle, int | None]:
        """How a worker reaches this arena, and the file descriptor that goes along, which stays the arena's.

        The same each time. Raises CudaError, OutOfMemory when this machine cannot do it.
        """
        with self._lock:
            if transport not in self._handles:
                self._handles[transport] = self._export(transport)
            return self._handles[transport]

    def _export(self, transport: str) -> tuple[ArenaHandle, int | None]:
        handle, fd = b"", None
        driver = self.context.driver
        with self.context:
            if transport == "ipc":
                handle = driver.ipc_export(self.address)
            elif transport == "vmm":
                fd = driver.vmm_export(self._physical)
            else:
                is_pinned = transport == "staged"
                self._staging[transport], fd = cuda_staging.create(self.context, self.nbytes, is_pinned=is_pinned)
        generation = next(self._generations)
        return ArenaHandle(self.context.gpu, self.client, self.number, generation, transport, self.nbytes, handle), fd

    def publish(self, transport: str, offset: int, nbytes: int, stream: int) -> int:
        """Make bytes that the stream has written visible to workers; returns how many were copied for that.

        Needs a current context, as `collect` does.
        """
        if transport not in STAGED:
            return 0
        check_span(offset, nbytes, self.nbytes)
        self._staging[transport].from_device(self.address, offset, nbytes, stream)
        return nbytes

    def collect(self, transport: str, offset: int, nbytes: int, stream: int) -> int:
        """Make bytes that a worker has published visible to the stream; returns how many were copied for it."""
        if transport not in STAGED:
            return 0
        check_span(offset, nbytes, self.nbytes)
        self._staging[transport].to_device(self.address, offset, nbytes, stream)
        return nbytes

    def close(self) -> None:
        """Free it. To be called once every worker that mapped it has unmapped it or has ended."""
        for _, fd in self._handles.values():
            if fd is not None:
                os.close(fd)
        self._handles.clear()
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()
        driver = self.context.driver
        with self.context:
            if self.kind == "plain":
                driver.free(self.address)
            elif self.kind == "vmm":
                driver.vmm_unmap(self.address, self.nbytes)
                driver.vmm_release(self._physical)


@dataclass(frozen=True, eq=False)
class Block:
    """A slot of an arena, lent to one stream."""

    arena: Arena
    offset: int
    nbytes: int  # of the slot, at least what was asked for

    @property
    def address(self) -> int:
        return self.arena.address + self.offset


class _Slots:
    """The free slots of one arena. All its users work on one stream, whose order makes reuse safe."""

    def __init__(self, arena: Arena, stream: int, *, is_shared: bool) -> None:
        self.arena, self.stream, self._is_shared = arena, stream, is_shared
        self.live = 0
        self._top = 0  # bytes handed out so far; slots below it are live or in `_free`
        self._free: dict[int, list[int]] = {}  # slot size -> offsets

    def take(self, size: int) -> Block | None:
        if _is_shared(size) != self._is_shared:
            return None
        if not self._is_shared and self.arena.nbytes > 2 * size:  # would waste more than it uses
            return None
        offsets = self._free.get(size)
        if offsets:
            offset = offsets.pop()
        elif self._top + size <= self.arena.nbytes:
            offset, self._top = self._top, self._top + size
        else:
            return None
        self.live += 1
        return Block(self.arena, offset, size)

    def give(self, block: Block) -> None:
        self.live -= 1
        if self.live:
            self._free.setdefault(block.nbytes, []).append(block.offset)
        else:  # empty: any slot size fits again
            self._top = 0
            self._free.clear()


class Pool:
    """All arenas that this process made on one GPU. Thread-safe.

    Each arena serves one stream: a slot that comes back is lent out again at once, and whatever the stream still does
    with it comes before whatever it will do. Memory used on a second stream follows the caller's own rule for that,
    as with any allocator that knows streams.
    """

    def __init__(self, context: Context, client: str, numbers: itertools.count[int], *, kind: str = "plain") -> None:
        """`numbers`: where this client's arena numbers come from."""
        self._context, self._client, self._numbers, self._kind = context, client, numbers, kind
        self._lock = threading.Lock()
        self._slots: dict[int, _Slots] = {}  # by the arena's number
        self._index: tuple[list[int], list[Arena]] = ([], [])  # addresses and arenas, for `find`, which takes no lock
        self._given: deque[Block] = deque()

    def take(self, nbytes: int, stream: int) -> Block:
        """Memory for work of a stream, aligned to 256 bytes, contents undefined.

        Raises CudaError; when it is out of memory, `trim` may help. Allocates on the device only when no arena fits.
        """
        if not 0 <= nbytes <= MAX_NBYTES:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes on a GPU; allowed: 0 to {MAX_NBYTES}")
        size = slot_bytes(nbytes)
        with self._lock:
            self._collect()
            for slots in self._slots.values():
                if slots.stream == stream and (block := slots.take(size)):
                    return block
            is_shared = _is_shared(size)
            nbytes = SHARED_ARENA_BYTES if is_shared else size
            made = Arena(self._context, self._client, next(self._numbers), nbytes, kind=self._kind)
            slots = self._slots[made.number] = _Slots(made, stream, is_shared=is_shared)
            self._reindex()
            block = slots.take(size)
            assert block is not None  # a new arena fits what it was made for
            return block

    def give(self, block: Block) -> None:
        """The block's user is gone. Callable at any time, also by the garbage collector in the middle of `take`."""
        self._given.append(block)

    def find(self, address: int, nbytes: int) -> tuple[Arena, int] | None:
        """The arena that holds these bytes, and the offset in it; None for memory that is not ours."""
        addresses, arenas = self._index
        index = bisect.bisect_right(addresses, address) - 1
        if index < 0:
            return None
        arena = arenas[index]
        offset = address - arena.address
        return (arena, offset) if offset + nbytes <= arena.nbytes else None

    def trim(self) -> list[Arena]:
        """Take the arenas out that no block is in. The caller has the workers unmap them, then closes them."""
        with self._lock:
            self._collect()
            idle = [slots.arena for slots in self._slots.values() if slots.live == 0]
            for arena in idle:
                del self._slots[arena.number]
            self._reindex()
        return idle

    def _collect(self) -> None:
        while self._given:
            block = self._given.popleft()
            self._slots[block.arena.number].give(block)

    def _reindex(self) -> None:
        arenas = sorted((slots.arena for slots in self._slots.values()), key=lambda arena: arena.address)
        self._index = ([arena.address for arena in arenas], arenas)


class InPlace:
    """Memory of other allocators in this process, such as torch's, offered as it lies. Thread-safe.

    An allocation is known by the driver's id of it: its address may be somebody else's tomorrow.
    """

    def __init__(self, context: Context, client: str, numbers: itertools.count[int]) -> None:
        self._context, self._client, self._numbers = context, client, numbers
        self._lock = threading.Lock()
        self._arenas: dict[int, Arena] = {}  # by the driver's id of the allocation

    def find(self, address: int, nbytes: int) -> tuple[Arena, int] | str:
        """The arena of these bytes and the offset in it, or why they must be copied. Needs a current context.

        A worker that maps it sees the whole allocation: other tensors of the same allocator, too.
        """
        driver = self._context.driver
        with self._lock:
            known = self._arenas.get(driver.buffer_id(address))
            if known is None:
                found = driver.pointer(address)
                if found is None:
                    return "it is not device memory"
                if found.ordinal != self._context.ordinal:
                    return "it is on another GPU"
                if found.is_managed:
                    return "it is managed memory"
                if found.is_pooled:
                    return "it comes from a cudaMallocAsync pool"
                if not found.is_legacy_ipc:
                    return "its allocation cannot be shared, as with torch's expandable segments"
                base, size = driver.address_range(address)
                known = self._arenas[found.buffer_id] = Arena(
                    self._context, self._client, next(self._numbers), size, kind="foreign", address=base
                )
        offset = address - known.address
        check_span(offset, nbytes, known.nbytes)
        return known, offset

    def take_stale(self) -> list[Arena]:
        """Take the arenas out whose memory its allocator has freed. The caller has the workers unmap them."""
        driver = self._context.driver
        with self._lock:
            stale = [
                number
                for number, arena in self._arenas.items()
                if (found := driver.pointer(arena.address)) is None or found.buffer_id != number
            ]
            return [self._arenas.pop(number) for number in stale]


def slot_bytes(nbytes: int) -> int:
    """Size class of a slot: the next multiple of an eighth of a power of two, at least the alignment. At most an
    eighth is wasted, and slots of near sizes are interchangeable."""
    return max(_round_up(nbytes, max(SLOT_BYTES, 1 << max((nbytes - 1).bit_length() - 3, 0))), SLOT_BYTES)


def _is_shared(size: int) -> bool:
    """Whether a slot shares its arena with others."""
    return size < OWN_ARENA_BYTES


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
