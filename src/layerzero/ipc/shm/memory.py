"""CPU arenas: sealed memfds that a client owns and workers map. Who may write what is in docs/protocol.md.

Also the control page, a word pair in which a worker says which dispatch it is in.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import weakref

from layerzero.ipc import free_memory
from layerzero.ipc.errors import OutOfMemory, ProtocolError
from layerzero.ipc.shm import huge_pages
from layerzero.ipc.shm.recent_calls import RecentCalls

ALIGNMENT = 64  # bytes; JAX and oneDNN want that much to view memory without a copy
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_WRITING = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which Python names from 3.13 on
MAX_ARENA_BYTES = 1 << 46  # as a tensor
_PAGE = struct.Struct("<QQ")
_KEPT = struct.Struct("<Q")
PAGE_BYTES = 4096
# From this size on, free memory is looked at, which costs up to a millisecond. Pages of lanes are below, arenas above.
CHECKED_FROM_BYTES = 1 << 20
GUARD_BYTES = 16 << 20  # before and after a mapping: address space, no memory
_STEP_BYTES = 1 << 30  # reserved between two looks: others take memory meanwhile

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_SHARED = mmap.MAP_SHARED | 0x10 | getattr(mmap, "MAP_POPULATE", 0)  # MAP_FIXED: within what was just reserved
_FAILED = ctypes.c_void_p(-1).value


def create_memfd(name: str, nbytes: int, *, in_huge_pages: bool = False) -> int:
    """A sealed memfd with all its pages reserved, so that a full system is an error here and never a SIGBUS later, nor
    the end of some process by the kernel's OOM killer. `in_huge_pages`: as many of them as the kernel gives at once.

    Raises OutOfMemory, ConfigError.
    """
    if nbytes >= CHECKED_FROM_BYTES:
        free_memory.check(nbytes)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve(fd, 0, nbytes, in_huge_pages=in_huge_pages)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, offset: int, nbytes: int, *, in_huge_pages: bool = False) -> None:
    """Give a memfd its pages in a range; it keeps what they hold. Raises OutOfMemory, ConfigError."""
    end = offset + nbytes
    try:
        if in_huge_pages and os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        while True:
            step = min(end - offset, _STEP_BYTES)
            if in_huge_pages:
                huge_pages.give(fd, offset, step)
            os.posix_fallocate(fd, offset, step)
            offset += step
            if offset >= end:
                return
            free_memory.check(end - offset)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise OutOfMemory(f"cannot reserve {nbytes} bytes of shared memory: {exc.strerror}", nbytes=nbytes) from exc
        raise


def check_memfd(fd: int, nbytes: int) -> None:
    """Refuse a descriptor that is not a memfd of this size, sealed against shrinking. Raises ProtocolError."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as exc:
        raise ProtocolError(f"descriptor is not a memfd: {exc.strerror}") from exc
    if seals & _SEALS != _SEALS:
        raise ProtocolError(f"memfd has seals {seals:#x}; needed: {_SEALS:#x}")
    if nbytes <= 0:
        raise ProtocolError(f"an arena has at least one byte, the message says {nbytes}")
    if size != nbytes:
        raise ProtocolError(f"memfd has {size} bytes, the message says {nbytes}")


def check_arena(fd: int, nbytes: int) -> None:
    """As `check_memfd`, and refuse one that workers could not write, or whose pages are not reserved: those would be
    theirs to pay for. Raises ProtocolError."""
    check_memfd(fd, nbytes)
    if nbytes > MAX_ARENA_BYTES:
        raise ProtocolError(f"an arena has at most {MAX_ARENA_BYTES} bytes, the message says {nbytes}")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ProtocolError("an arena's memfd must be open for reading and writing")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NO_WRITING:
        raise ProtocolError("an arena's memfd must not be sealed against writing")
    reserved = os.fstat(fd).st_blocks * 512
    if reserved < nbytes:
        raise ProtocolError(f"an arena's pages must be reserved; of {nbytes} bytes {reserved} are")


def map_fd(fd: int, nbytes: int, *, writable: bool, populate: bool = False, is_inherited: bool = True) -> mmap.mmap:
    """Map a whole memfd, shared; without `is_inherited` a child that is forked has no such map. Raises OSError: ENOMEM
    where this process has no address space left (RLIMIT_AS)."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    mapped = mmap.mmap(fd, nbytes, flags=flags, prot=prot)
    if not is_inherited:
        mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def map_guarded(
    fd: int, nbytes: int, *, writable: bool, is_inherited: bool = False, guard_bytes: int = GUARD_BYTES
) -> memoryview:
    """Map a whole memfd, shared, as bytes between two stretches of `guard_bytes` that nobody can read or write: what
    runs past either end ends the process, and finds no other mapping. Its huge pages are mapped as such. Children of
    this process do not have it, unless it `is_inherited`. Unmapped when the last view of it goes. Raises OSError."""
    step = huge_pages.EXTENT_BYTES if nbytes >= huge_pages.EXTENT_BYTES else mmap.PAGESIZE
    total = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + 2 * guard_bytes + step - mmap.PAGESIZE
    base = _mmap(None, total, 0, _ANONYMOUS, -1)
    try:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _mmap(-(-(base + guard_bytes) // step) * step, nbytes, prot, _SHARED, fd)
        extent = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        if not is_inherited and _libc.madvise(*extent, mmap.MADV_DONTFORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError:
        _unmap(os.getpid(), base, total)
        raise
    whole = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(whole, _unmap, os.getpid(), base, total).atexit = False
    view = memoryview(whole).cast("B")
    return view if writable else view.toreadonly()


def give_back(address: int, nbytes: int) -> None:
    """The pages of a range of a shared mapping, which are holes of its memfd then. Raises OSError."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_REMOVE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    """The address of a new mapping. Raises OSError."""
    made = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if made is None or made == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(made)


def _unmap(owner: int, address: int, nbytes: int) -> None:
    """Nothing in a child that was forked: it has no such mapping, and something of its own may lie in its place."""
    if os.getpid() == owner:
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


class ControlPage:
    """One page that a worker writes and the broker reads: the dispatch being executed and its phase, how much it keeps
    for clients, and its newest calls (`recent`).

    The broker trusts it for blame, diagnosis, and whether a worker may rest, only.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self._map = map_fd(fd, PAGE_BYTES, writable=writable)
        self.recent = RecentCalls(self._map)

    @property
    def address(self) -> int:
        """Of one that can be written: where it is mapped, as long as this object lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def write(self, dispatch: int, phase: int) -> None:
        _PAGE.pack_into(self._map, 0, dispatch, phase)

    def read(self) -> tuple[int, int]:
        """(dispatch id, or 0 when idle; phase)"""
        dispatch, phase = _PAGE.unpack_from(self._map, 0)
        return dispatch, phase

    def write_kept(self, count: int) -> None:
        _KEPT.pack_into(self._map, _PAGE.size, count)

    def read_kept(self) -> int:
        """How many objects, streams and answers wait for their clients."""
        (count,) = _KEPT.unpack_from(self._map, _PAGE.size)
        return int(count)

    def copy(self) -> bytes:
        """All that is on it."""
        return self._map[:]

    def close(self) -> None:
        self.recent.close()
        self._map.close()
