"""Huge pages for arenas, so that kernels that read or write megabytes wait less for the translation of addresses.

Shared memory comes in pages of 4 KiB; MADV_COLLAPSE (Linux 6.1) makes a huge one of 512, also where
`transparent_hugepage/shmem_enabled` is "never". The kernel may have to move other memory together for it, for longer
than small pages take to come: where that is so, the rest stays small. Who maps a memfd at a multiple of EXTENT_BYTES
has its huge pages as such.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path

from layerzero.ipc.errors import ConfigError

VARIABLE = "LAYERZERO_HUGE_PAGES"
EXTENT_BYTES = 2 << 20
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_COLLAPSE = 25  # MADV_COLLAPSE, which Python has no name for
_PAGE = 4096
# CPU time of this thread: 2 MiB of small pages take some 2 ms, a huge page that lies ready a tenth of that.
_NS_EACH, _NS_BEFOREHAND = 2_000_000, 20_000_000

_SHARED_THERE = mmap.MAP_SHARED | 0x10  # MAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def are_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Raises ConfigError."""
    text = environ.get(VARIABLE, "").strip() or "1"
    if text not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} is {text!r:.40}; allowed: 1, huge pages where the kernel gives them; 0, none")
    return text == "1"


def give(fd: int, offset: int, nbytes: int) -> str:
    """Give a range of a memfd, which has that size already, huge pages, as many as fit in; what it holds it keeps.
    Empty, or why some of them are small. Raises ConfigError."""
    start, end = -(-offset // EXTENT_BYTES) * EXTENT_BYTES, (offset + nbytes) // EXTENT_BYTES * EXTENT_BYTES
    if start >= end:
        return ""
    if not are_wanted():
        return f"{VARIABLE} is 0"
    try:
        if int(_SIZE.read_text()) != EXTENT_BYTES:
            return f"this machine's have {_SIZE.read_text().strip()} bytes"
    except (OSError, ValueError):
        return "this kernel has none"
    try:
        with mmap.mmap(-1, end - start + EXTENT_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
            return _collapse(fd, room, start, end)
    except OSError as exc:
        return str(exc.strerror)


def why_none() -> str:
    """Why arenas have none; empty where they have. Raises ConfigError."""
    fd = os.memfd_create("layerzero-huge")
    try:
        os.ftruncate(fd, EXTENT_BYTES)
        return give(fd, 0, EXTENT_BYTES)
    finally:
        os.close(fd)


def _collapse(fd: int, room: mmap.mmap, start: int, end: int) -> str:
    """Within `room`, where the file can be mapped at a multiple. Raises OSError."""
    first = -(-ctypes.addressof(ctypes.c_char.from_buffer(room)) // EXTENT_BYTES) * EXTENT_BYTES
    if _libc.mmap(first, end - start, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED_THERE, fd, start) != first:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    began_ns = time.thread_time_ns()
    for at in range(start, end, EXTENT_BYTES):
        os.posix_fallocate(fd, at, _PAGE)  # one that is all hole is refused
        if _libc.madvise(first + at - start, EXTENT_BYTES, _COLLAPSE):
            return os.strerror(ctypes.get_errno())
        spent_ns = time.thread_time_ns() - began_ns
        if spent_ns > _NS_BEFOREHAND + _NS_EACH * ((at - start) // EXTENT_BYTES + 1):
            return f"the kernel took {spent_ns // 1_000_000} ms for {(at - start) // EXTENT_BYTES + 1} of them"
    return ""
