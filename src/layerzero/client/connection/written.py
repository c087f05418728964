"""Whether memory of this process was written, told by the kernel: its pages are write-protected by a userfaultfd that
nobody needs to answer, and who writes to one, by whatever way, takes its mark away (Linux 6.7; docs/dispatch.md).

What is not seen is written past the page tables, by a device. Where this process has one open that may do so, nothing
is watched. Layouts and numbers are those of linux/userfaultfd.h and linux/fs.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
from array import array
from contextlib import suppress

PAGE = os.sysconf("SC_PAGE_SIZE")
_SYSCALLS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # no privilege is needed for one that does not see the faults of the kernel's own writes
_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_VERSION, _WP_ASYNC, _MODE_WP = 0xAA, 1 << 15, 2
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_PROTECT, _CHECKED = 1, 2  # what matches; refuse memory that is not watched
_WRITTEN = 2  # the category
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")


class Watcher:
    """Of this process; not of its forked children."""

    def __init__(self) -> None:
        self.pagemap = self._fd = -1
        self.problem = ""  # why nothing can be watched
        try:
            self._open()
        except OSError as exc:
            self.problem = f"this system does not say when (userfaultfd: {exc.strerror})"
            self.close()
        self._found = array("Q", (0, 0, 0))

    def _open(self) -> None:
        number = _SYSCALLS.get(platform.machine())
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1 if number is None else libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fd < 0:
            code = ctypes.get_errno() or errno.ENOSYS
            raise OSError(code, os.strerror(code))
        fcntl.ioctl(self._fd, _API, array("Q", (_VERSION, _WP_ASYNC, 0)))
        self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        for fd in (self._fd, self.pagemap):
            if fd >= 0:
                os.close(fd)
        self._fd = self.pagemap = -1

    def watch(self, start: int, end: int) -> str:
        """Begin anew with these pages; what is written from now on is seen, and what was before is forgotten, for all
        who watch one of them. Returns why that cannot be, or an empty text."""
        if self.problem:
            return self.problem
        device = _device()
        if device:
            return f"a device that this process has open may write to it ({device})"
        try:
            fcntl.ioctl(self._fd, _REGISTER, array("Q", (start, end - start, _MODE_WP, 0)))
            fcntl.ioctl(self.pagemap, _SCAN, self._scan(start, end, _PROTECT, has_vector=False))
        except OSError as exc:
            return f"this system does not say when ({exc.strerror})"
        if not _is_private(start, end):
            self.leave(start, end)
            return "it is of a file, or shared with other processes, which may write to it"
        return ""

    def is_unwritten(self, start: int, end: int) -> bool:
        """Whether these pages are as they were when they were watched last: written by nobody, nor mapped anew."""
        try:
            return bool(fcntl.ioctl(self.pagemap, _SCAN, self._scan(start, end, 0, has_vector=True)) == 0)
        except OSError:
            return False

    def leave(self, start: int, end: int) -> None:
        """These pages may be gone."""
        with suppress(OSError):
            fcntl.ioctl(self._fd, _UNREGISTER, array("Q", (start, end - start)))

    def _scan(self, start: int, end: int, flags: int, *, has_vector: bool) -> array[int]:
        """A struct pm_scan_arg."""
        vector = (self._found.buffer_info()[0], 1, 1) if has_vector else (0, 0, 0)
        return array("Q", (96, flags | _CHECKED, start, end, 0, *vector, 0, _WRITTEN, 0, _WRITTEN))


def _device() -> str:
    """What this process has open that may write to its memory without its processor."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            is_ring = target.startswith("anon_inode:") and "io_uring" in target
            if is_ring or (target.startswith("/dev/") and not target.startswith(_HARMLESS)):
                return target
    return ""


def _is_private(start: int, end: int) -> bool:
    """Whether all of it is memory of this process alone, which is of no file."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, flags, _, _, inode = line.split(None, 5)[:5]
            low, _, high = span.partition("-")
            if int(high, 16) <= start:
                continue
            if int(low, 16) > start or flags[3] != "p" or inode != "0":
                return False
            start = int(high, 16)
            if start >= end:
                return True
    return False
