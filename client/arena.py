"""This process's arenas: shared memory that tensors live in, handed out in slots and freed when the last view dies.

A slot is lent as a memoryview. Arrays built on it keep it alive; a weak reference frees the slot after the last one.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from layerzero.client import retained
from layerzero.ipc import memory
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.tensors import MAX_NBYTES

FIRST_ARENA_BYTES = 4 << 20
MAX_SHARED_ARENA_BYTES = 64 << 20  # arenas for many slots grow up to this
OWN_ARENA_BYTES = 8 << 20  # slots from this size on get an arena of their own
MAX_IDLE_BYTES = 256 << 20  # empty arenas kept for reuse
_PAGE = 4096


class Arena:
    """One sealed memfd mapped here. `registrations` are told when it goes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = memory.create_memfd("layerzero", nbytes)
        try:
            mapped = memory.map_fd(self.fd, nbytes, writable=True, populate=True)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.live = 0
        self.top = 0  # bytes handed out so far; slots below it are live or in `free`
        self.free: dict[int, list[int]] = {}  # slot size -> offsets
        self.registrations: list[Callable[[Arena], None]] = []

    def take(self, size: int) -> int | None:
        """Offset of a slot of `size` bytes, or None when full."""
        offsets = self.free.get(size)
        if offsets:
            offset = offsets.pop()
        elif self.top + size <= self.nbytes:
            offset = self.top
            self.top += size
        else:
            return None
        self.live += 1
        return offset

    def give(self, offset: int, size: int) -> None:
        self.live -= 1
        if self.live:
            self.free.setdefault(size, []).append(offset)
        else:  # empty: any slot size fits again
            self.top = 0
            self.free.clear()


class _Lease(weakref.ref[memoryview]):
    __slots__ = ("arena", "offset", "size")
    arena: Arena
    offset: int
    size: int


def slot_bytes(nbytes: int) -> int:
    """Size class of a slot: the next multiple of an eighth of a power of two, at least the alignment. At most an
    eighth is wasted, and slots of near sizes are interchangeable."""
    step = max(memory.ALIGNMENT, 1 << max((nbytes - 1).bit_length() - 3, 0))
    return max(-(-nbytes // step) * step, memory.ALIGNMENT)


class Pool:
    """All arenas of this process. Thread-safe; slots may be freed from any thread at any time, also by the garbage
    collector in the middle of `allocate`, so freeing only notes the slot and the next call collects it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []  # sorted by address
        self._index: tuple[list[int], list[Arena]] = ([], [])  # addresses and arenas, for `find`, which takes no lock
        self._shared: list[Arena] = []  # with many slots, newest first
        self._leases: dict[int, _Lease] = {}
        self._freed: deque[_Lease] = deque()

    def allocate(self, nbytes: int) -> tuple[memoryview, Arena, int]:
        """A fresh block, aligned to memory.ALIGNMENT, contents undefined; with its arena and the offset there.

        Raises OutOfMemory.
        """
        if nbytes > MAX_NBYTES:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes; the limit is {MAX_NBYTES}")
        size = slot_bytes(nbytes)
        with self._lock:
            self._collect()
            arena, offset = self._take(size)
            view = arena.view[offset : offset + nbytes]
            lease = _Lease(view, self._note_freed)
            lease.arena, lease.offset, lease.size = arena, offset, size
            self._leases[id(lease)] = lease
            return view, arena, offset

    def find(self, address: int, nbytes: int) -> tuple[Arena, int] | None:
        """The arena that holds these bytes, and the offset in it; None for memory that is not ours."""
        addresses, arenas = self._index
        index = bisect.bisect_right(addresses, address) - 1
        if index < 0:
            return None
        arena = arenas[index]
        offset = address - arena.address
        return (arena, offset) if offset + nbytes <= arena.nbytes else None

    def stats(self) -> dict[str, int]:
        """Bytes of all arenas, live slots, arenas."""
        with self._lock:
            self._collect()
            return {
                "arenas": len(self._arenas),
                "bytes": sum(a.nbytes for a in self._arenas),
                "slots": sum(a.live for a in self._arenas),
            }

    def _note_freed(self, lease: _Lease) -> None:
        self._freed.append(lease)

    def _collect(self) -> None:
        while self._freed:
            lease = self._freed.popleft()
            del self._leases[id(lease)]
            lease.arena.give(lease.offset, lease.size)
            if lease.arena.live == 0:
                self._trim()

    def _trim(self) -> None:
        """Close empty arenas beyond what is worth keeping."""
        idle = 0
        for arena in list(self._arenas):
            if arena.live == 0:
                idle += arena.nbytes
                if idle > MAX_IDLE_BYTES:
                    self._close(arena)

    def _close(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        self._index = ([a.address for a in self._arenas], list(self._arenas))
        if arena in self._shared:
            self._shared.remove(arena)
        for tell in arena.registrations:
            tell(arena)
        arena.registrations.clear()
        os.close(arena.fd)  # the mapping goes with the last view

    def _take(self, size: int) -> tuple[Arena, int]:
        if size >= OWN_ARENA_BYTES:
            fits = [a for a in self._arenas if a.live == 0 and size <= a.nbytes <= 2 * size and a not in self._shared]
            arena = min(fits, key=lambda a: a.nbytes) if fits else self._open(-(-size // _PAGE) * _PAGE)
            offset = arena.take(size)
            assert offset is not None
            return arena, offset
        for arena in self._shared:
            offset = arena.take(size)
            if offset is not None:
                return arena, offset
        nbytes = max(FIRST_ARENA_BYTES, *(2 * a.nbytes for a in self._shared)) if self._shared else FIRST_ARENA_BYTES
        arena = self._open(min(nbytes, MAX_SHARED_ARENA_BYTES))
        self._shared.insert(0, arena)
        offset = arena.take(size)
        assert offset is not None
        return arena, offset

    def _open(self, nbytes: int) -> Arena:
        arena = Arena(nbytes)
        bisect.insort(self._arenas, arena, key=lambda a: a.address)
        self._index = ([a.address for a in self._arenas], list(self._arenas))
        return arena


pool = Pool()
forks = 0  # how many forks lie between the first process and this one


def _after_fork() -> None:
    """The parent goes on using its arenas; the child must not hand out their slots, nor free them."""
    global pool, forks
    forks += 1
    retained.keep(pool)
    pool = Pool()


os.register_at_fork(after_in_child=_after_fork)
