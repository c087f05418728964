"""This process's arenas: shared memory that tensors live in, handed out in slots and freed when the last view dies.

A slot is lent as a memoryview. Arrays built on it keep it alive; a weak reference frees the slot after the last one.

Freed memory is kept for the next slots, up to MAX_IDLE_BYTES. Beyond that, pages go back to the system at once, those
freed longest ago first, until KEPT_IDLE_BYTES are left: an arena has holes then, which are reserved again before a slot
there is handed out, as a new arena is.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import errno
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from layerzero.client.connection import retained
from layerzero.ipc import free_memory
from layerzero.ipc.errors import InvalidArgument, OutOfMemory
from layerzero.ipc.shm import memory
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES

FIRST_ARENA_BYTES = 4 << 20
MAX_SHARED_ARENA_BYTES = 64 << 20  # arenas for many slots grow up to this
OWN_ARENA_BYTES = 8 << 20  # slots from this size on get an arena of their own
MAX_IDLE_BYTES = 256 << 20  # free memory of all arenas that keeps its pages, for the next slots
KEPT_IDLE_BYTES = 128 << 20  # what is left of it then: a program that goes up and down pays for one half, not each time
MIN_HOLE_BYTES = 64 << 10  # smaller free slots between live ones keep their pages
MAX_NOTED = 1024  # small slots that wait for the next call to collect them, which is cheaper than at once
BAND_BYTES = 256
MAX_GUARDED = 256  # arenas of LAYERZERO_DEBUG with one slot at their end: behind it workers have no memory
BAND = b"\xa5"
_PAGE = 4096


def is_debugging(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether LAYERZERO_DEBUG is on: read when layerzero is first used."""
    return environ.get("LAYERZERO_DEBUG", "").lower() not in ("", "0", "false", "no", "off")


class Arena:
    """One sealed memfd mapped here. `registrations` are told when it goes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = memory.create_memfd("layerzero", nbytes, in_huge_pages=True)
        try:
            self.view = memory.map_guarded(self.fd, nbytes, writable=True, is_inherited=True, guard_bytes=0)
        except BaseException as exc:
            os.close(self.fd)
            if isinstance(exc, OSError) and exc.errno == errno.ENOMEM:  # the address space, limited by RLIMIT_AS
                raise OutOfMemory(f"cannot map {nbytes} bytes of shared memory: {exc.strerror}", nbytes=nbytes) from exc
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.live = 0
        self.top = 0  # bytes handed out so far; slots below it are live or in `free`
        self.free: dict[int, list[int]] = {}  # slot size -> offsets
        self.holes: list[tuple[int, int]] = []  # ranges of whole pages without memory behind them; only in free ranges
        self.freed_at = 0  # of the pool's frees, the last one here
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

    @property
    def hole_bytes(self) -> int:
        return sum(end - start for start, end in self.holes)

    def punch(self) -> int:
        """Give the pages of all free ranges back. Returns how many bytes that were."""
        before = self.hole_bytes
        ranges = [(o, o + size) for size, found in self.free.items() if size >= MIN_HOLE_BYTES for o in found]
        pages = (
            (-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE) for start, end in (*ranges, (self.top, self.nbytes))
        )
        holes = [(start, end) for start, end in pages if start < end]
        for start, end in set(holes).difference(self.holes):
            memory.give_back(self.address + start, end - start)
        self.holes = _united([*self.holes, *holes])
        return self.hole_bytes - before

    def fill(self, offset: int, size: int) -> int:
        """Reserve the pages of a slot that lies in holes, in part perhaps. Returns how many bytes those were.
        Raises OutOfMemory."""
        start, end = offset // _PAGE * _PAGE, -(-(offset + size) // _PAGE) * _PAGE
        missing = sum(max(min(end, e) - max(start, s), 0) for s, e in self.holes)
        if missing >= memory.CHECKED_FROM_BYTES:
            free_memory.check(missing)
        if missing:
            memory.reserve(self.fd, start, end - start, in_huge_pages=True)
            parts = (part for s, e in self.holes for part in ((s, min(e, start)), (max(s, end), e)))
            self.holes = [(s, e) for s, e in parts if s < e]
        return missing


def _united(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


class _Lease(weakref.ref[memoryview]):
    __slots__ = ("arena", "begin", "offset", "size")
    arena: Arena
    offset: int
    size: int
    begin: int  # of the view


@functools.lru_cache(maxsize=4096)
def slot_bytes(nbytes: int) -> int:
    """Size class of a slot: the next multiple of an eighth of a power of two, at least the alignment. At most an
    eighth is wasted, and slots of near sizes are interchangeable."""
    step = max(memory.ALIGNMENT, 1 << max((nbytes - 1).bit_length() - 3, 0))
    return max(-(-nbytes // step) * step, memory.ALIGNMENT)


class Cache(Protocol):
    """Who keeps slots for use again."""

    def clear(self) -> None:
        """Free those that nobody has."""


class Pool:
    """All arenas of this process. Thread-safe; slots may be freed from any thread at any time, also by the garbage
    collector in the middle of `allocate` or of anything else. So a slot that is freed while a thread is in here is only
    noted, for that thread or the next call to collect; and nobody is told of anything then (arenas close in calls)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []  # sorted by address
        self.index: tuple[list[int], list[Arena]] = (
            [],
            [],
        )  # addresses and arenas, for who takes no lock
        self.caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        self._shared: list[Arena] = []  # with many slots, newest first
        self._guarded: list[Arena] = []  # with one slot at their end
        self._leases: dict[int, _Lease] = {}
        self._freed: deque[_Lease] = deque()
        self._frees = 0
        self.band_bytes = BAND_BYTES if is_debugging() else 0  # on both sides of each slot
        self._idle_bytes = 0  # of all arenas: free, with pages
        self._bound_bytes = MAX_IDLE_BYTES  # of these, before pages go back
        self.forks: list[None] = []  # one for each that is under way; in the child it stays
        self._has_hollow = False  # an empty arena may have no pages left

    def allocate(self, nbytes: int) -> tuple[memoryview, Arena, int]:
        """A fresh block, aligned to memory.ALIGNMENT, contents undefined; with its arena and the offset there.

        Raises OutOfMemory.
        """
        if nbytes > MAX_NBYTES:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes; the limit is {MAX_NBYTES}")
        size = slot_bytes(nbytes + 2 * self.band_bytes)
        with self._lock:
            self._collect()
            guarded = self._take_guarded(nbytes) if self.band_bytes else None
            if guarded is None:
                arena, offset = self._take(size)
                begin = offset + self.band_bytes
            else:
                arena, offset, size = guarded, 0, guarded.nbytes
                begin = size - -(-nbytes // memory.ALIGNMENT) * memory.ALIGNMENT
            if arena.holes:
                self._fill(arena, offset, size)
            self._idle_bytes -= size
            if self.band_bytes:
                arena.view[offset : offset + size] = BAND * size
            view = arena.view[begin : begin + nbytes]
            lease = _Lease(view, self._note_freed)
            lease.arena, lease.offset, lease.size, lease.begin = arena, offset, size, begin
            self._leases[id(lease)] = lease
            if self._has_hollow:
                self._close_hollow()
        return view, arena, begin

    def overruns(self) -> list[str]:
        """Where something was written around slots that are lent, in words; told once. Of a pool with bands."""
        found = []
        with self._lock:
            for lease in list(self._leases.values()):
                view = lease()
                if view is None:
                    continue
                whole = lease.arena.view[lease.offset : lease.offset + lease.size]
                start = lease.begin - lease.offset
                before, after = whole[:start], whole[start + view.nbytes :]
                for band, what in ((before, "before the beginning"), (after, "behind the end")):
                    if bytes(band) != BAND * len(band):
                        found.append(f"{what} of an array of {view.nbytes} bytes")
                        band[:] = BAND * len(band)
        return found

    def refill(self, arena: Arena) -> None:
        """Reserve all of an arena's pages: a broker takes none that lacks some. Raises OutOfMemory."""
        with self._lock:
            if arena.holes:
                self._idle_bytes += arena.fill(0, arena.nbytes)

    def find(self, address: int, nbytes: int) -> tuple[Arena, int] | None:
        """The arena that holds these bytes, and the offset in it; None for memory that is not ours."""
        addresses, arenas = self.index
        index = bisect.bisect_right(addresses, address) - 1
        if index < 0:
            return None
        arena = arenas[index]
        offset = address - arena.address
        return (arena, offset) if offset + nbytes <= arena.nbytes else None

    def stats(self) -> dict[str, int]:
        """Bytes of all arenas, and of those the ones that are free and have pages; live slots, arenas."""
        for cache in list(self.caches):
            cache.clear()
        with self._lock:
            self._collect()
            self._close_hollow()
            return {
                "arenas": len(self._arenas),
                "bytes": sum(a.nbytes for a in self._arenas),
                "idle_bytes": self._idle_bytes,
                "slots": sum(a.live for a in self._arenas),
            }

    def _note_freed(self, lease: _Lease) -> None:
        """Called wherever the last view dies: takes no lock that somebody may have, and sends nothing."""
        self._freed.append(lease)
        if self.forks:  # or the process ends, and names of this module may be gone
            return
        if lease.size >= MIN_HOLE_BYTES or len(self._freed) >= MAX_NOTED:  # else it is the next call's
            self._collect_if_idle()

    def _collect_if_idle(self) -> None:
        """Unless a thread is in here; perhaps it is this one, further up."""
        while self._freed and not self.forks and self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._freed:
            lease = self._freed.popleft()
            del self._leases[id(lease)]
            arena = lease.arena
            arena.give(lease.offset, lease.size)
            self._frees = arena.freed_at = self._frees + 1
            self._idle_bytes += lease.size
            if self._idle_bytes > self._bound_bytes:
                self._punch()

    def _punch(self) -> None:
        """Give pages back, until little enough is kept or no free range is worth it."""
        for arena in sorted(self._arenas, key=lambda a: a.freed_at):
            self._idle_bytes -= arena.punch()
            self._has_hollow = self._has_hollow or arena.live == 0
            if self._idle_bytes <= KEPT_IDLE_BYTES:
                break
        # Where small slots between live ones are all that is free, the next look shall not be at the next free.
        self._bound_bytes = max(MAX_IDLE_BYTES, self._idle_bytes + KEPT_IDLE_BYTES)

    def _close_hollow(self) -> None:
        """Close empty arenas without pages: what is left of them is a descriptor here and in each worker."""
        self._has_hollow = False
        for arena in [a for a in self._arenas if a.live == 0 and a.hole_bytes == a.nbytes]:
            self._close(arena)

    def _close(self, arena: Arena) -> None:
        self._arenas.remove(arena)
        self.index = ([a.address for a in self._arenas], list(self._arenas))
        for kind in (self._shared, self._guarded):
            if arena in kind:
                kind.remove(arena)
        for tell in arena.registrations:
            tell(arena)
        arena.registrations.clear()
        os.close(arena.fd)  # the mapping goes with the last view

    def _fill(self, arena: Arena, offset: int, size: int) -> None:
        try:
            self._idle_bytes += arena.fill(offset, size)
        except BaseException:
            arena.give(offset, size)
            raise

    def _take_guarded(self, nbytes: int) -> Arena | None:
        """An arena for one slot, with room for a band before it, which is taken whole: workers map arenas between pages
        that nobody can read or write. None when there are too many."""
        total = -(-(nbytes + self.band_bytes + memory.ALIGNMENT) // _PAGE) * _PAGE
        empty = [a for a in self._guarded if a.live == 0]
        arena = next((a for a in empty if a.nbytes == total), None)
        if arena is None and len(self._guarded) >= MAX_GUARDED:
            if not empty:
                return None
            self._idle_bytes -= empty[0].nbytes - empty[0].hole_bytes
            self._close(empty[0])
        if arena is None:
            arena = self._open(total)
            self._guarded.append(arena)
        arena.take(total)
        return arena

    def _take(self, size: int) -> tuple[Arena, int]:
        if size >= OWN_ARENA_BYTES:
            fits = [a for a in self._arenas if a.live == 0 and size <= a.nbytes <= 2 * size and a not in self._shared]
            arena = min(fits, key=lambda a: (a.hole_bytes, a.nbytes)) if fits else self._open(-(-size // _PAGE) * _PAGE)
            offset = arena.take(size)
            assert offset is not None
            return arena, offset
        for arena in self._shared:
            offset = arena.take(size)
            if offset is not None:
                return arena, offset
        nbytes = max(FIRST_ARENA_BYTES, -(-size // _PAGE) * _PAGE, *(2 * a.nbytes for a in self._shared))
        arena = self._open(min(nbytes, MAX_SHARED_ARENA_BYTES))
        self._shared.insert(0, arena)
        offset = arena.take(size)
        assert offset is not None
        return arena, offset

    def _open(self, nbytes: int) -> Arena:
        arena = Arena(nbytes)
        self._idle_bytes += nbytes
        bisect.insort(self._arenas, arena, key=lambda a: a.address)
        self.index = ([a.address for a in self._arenas], list(self._arenas))
        return arena


pool = Pool()
forks = 0  # how many forks lie between the first process and this one


def _before_fork() -> None:
    """From here on until the pool is another one, the child must give back no page that its parent uses."""
    pool.forks.append(None)


def _after_fork_in_parent() -> None:
    pool.forks.pop()


def _after_fork() -> None:
    """The parent goes on using its arenas; the child must not hand out their slots, nor free them."""
    global pool, forks
    forks += 1
    retained.keep(pool)
    pool = Pool()


atexit.register(lambda: pool.forks.append(None))  # what is freed from then on goes with the process
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
