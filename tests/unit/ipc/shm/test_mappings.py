"""Memory is mapped as it was asked for, guards and all, and the mapping goes when nobody has a view of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from layerzero.ipc.shm import memory
from layerzero.ipc.shm.memory import create_memfd, map_fd

NBYTES = 8192


class Mapping(NamedTuple):
    first: int
    end: int
    rights: str
    name: str
    resident_kib: int
    flags: list[str]


def mappings() -> list[Mapping]:
    """Of this process, as the kernel tells them."""
    found = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line):
            first, end, rights, name = match.groups()
            head = (int(first, 16), int(end, 16), rights, name)
        elif line.startswith("Rss:"):
            resident = int(line.split()[1])
        elif line.startswith("VmFlags:"):
            found.append(Mapping(*head, resident, line.split()[1:]))
    return found


def guards() -> int:
    """Bytes of address space that nobody can use."""
    return sum(one.end - one.first for one in mappings() if one.rights == "---p")


@pytest.mark.parametrize("is_populated", [True, False])
def test_pages_are_mapped_when_that_is_asked_for(is_populated: bool) -> None:
    """The first kernel that touches them does not pay for it; others leave them as they are."""
    fd = create_memfd("populated", 16 * mmap.PAGESIZE)
    mapped = map_fd(fd, 16 * mmap.PAGESIZE, writable=True, **{"populate": True} if is_populated else {})
    (mine,) = (one for one in mappings() if "memfd:populated" in one.name)
    assert mine.resident_kib == (64 if is_populated else 0)
    assert (mine.rights, "dc" in mine.flags) == ("rw-s", False)
    mapped.close()
    os.close(fd)


@pytest.mark.parametrize("is_inherited", [True, False])
def test_a_forked_child_has_no_map_that_is_not_inherited(is_inherited: bool) -> None:
    """What a library starts outlives its worker, and would keep and could write the memory of clients."""
    fd = create_memfd("forked", NBYTES)
    mapped = map_fd(fd, NBYTES, writable=True, is_inherited=is_inherited)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, b"1" if "memfd:forked" in Path("/proc/self/maps").read_text() else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == (b"1" if is_inherited else b"0")
    mapped.close()
    os.close(fd)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_guarded_mapping_is_what_it_was_asked_to_be(is_writable: bool) -> None:
    """No more can be written than was allowed, and as much lies around it as is said."""
    nbytes = mmap.PAGESIZE + 1
    fd = create_memfd("exactly", nbytes)
    others = guards()
    view = memory.map_guarded(fd, nbytes, writable=is_writable)
    (mine,) = (one for one in mappings() if "memfd:exactly" in one.name)
    around = [one for one in mappings() if mine.first in (one.first, one.end) or mine.end in (one.first, one.end)]
    before, after = (one for one in around if one is not mine and one.first != mine.first)
    assert mine.rights == ("rw-s" if is_writable else "r--s")
    assert mine.end - mine.first == 2 * mmap.PAGESIZE
    assert "dc" in mine.flags  # not for children
    assert (before.rights, after.rights) == ("---p", "---p")
    assert view.readonly != is_writable
    first, end = mine.first - memory.GUARD_BYTES, mine.end + memory.GUARD_BYTES
    assert before.first <= first
    assert end <= after.end
    assert guards() - others == 2 * memory.GUARD_BYTES
    view.release()
    del view
    assert not [one for one in mappings() if one.first < end and one.end > first]
    os.close(fd)


def test_what_cannot_be_mapped_leaves_no_guards() -> None:
    """The error is the kernel's."""
    before = len(mappings())
    with pytest.raises(OSError, match=r"^.Errno 9. Bad file descriptor$") as failure:
        memory.map_guarded(-1, NBYTES, writable=True)
    assert failure.value.errno == errno.EBADF
    assert len(mappings()) == before


def test_what_children_would_inherit_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the kernel's, and nothing stays mapped."""

    def refuse(*arguments: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(memory._libc, "madvise", refuse)
    fd, others = create_memfd("refused", NBYTES), guards()
    with pytest.raises(OSError, match=r"^.Errno 12. Cannot allocate memory$") as failure:
        memory.map_guarded(fd, NBYTES, writable=True)
    assert failure.value.errno == errno.ENOMEM
    assert not [one for one in mappings() if "memfd:refused" in one.name]
    assert guards() == others
    os.close(fd)


_OVERRUN = """
import ctypes, os, sys
from layerzero.ipc.shm import memory

nbytes = 2 * 4096
fds = [memory.create_memfd(str(n), nbytes) for n in range(3)]
views = [memory.map_guarded(fd, nbytes, writable=n == 1) for n, fd in enumerate(fds)]
address = int(next(line for line in open("/proc/self/maps") if "memfd:1" in line).split("-")[0], 16)
if sys.argv[1] == "fork":
    if os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)
    at = address
else:
    far = address + nbytes + memory.GUARD_BYTES - 1
    at = {"after": address + nbytes, "before": address - 1, "far": far}[sys.argv[1]]
ctypes.string_at(address, nbytes) if sys.argv[1] != "fork" else None
ctypes.string_at(at, 1)
"""


@pytest.mark.parametrize(("where", "code"), [("after", -11), ("before", -11), ("far", -11), ("fork", 100 - 11)])
def test_what_runs_past_a_guarded_mapping_finds_no_other(where: str, code: int) -> None:
    """Nor does a child, which would keep a client's memory when its parent is gone."""
    done = subprocess.run([sys.executable, "-c", _OVERRUN, where], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr


def test_guarded_mapping_goes_with_its_last_view() -> None:
    fd = memory.create_memfd("guarded", 5000)
    view = memory.map_guarded(fd, 5000, writable=True)
    view[4999] = 7
    kept = memory.map_guarded(fd, 5000, writable=False)[4990:]
    os.close(fd)
    assert (kept[9], kept.readonly, kept.format) == (7, True, "B")
    del view
    assert Path("/proc/self/maps").read_text().count("memfd:guarded") == 1
    del kept
    assert "memfd:guarded" not in Path("/proc/self/maps").read_text()


def test_a_child_that_drops_its_view_unmaps_nothing_of_its_own() -> None:
    """It has no such mapping, and the kernel may have put something of the child's in its place."""
    fd = create_memfd("dropped", NBYTES)
    view = memory.map_guarded(fd, NBYTES, writable=True)
    (address,) = (one.first for one in mappings() if "memfd:dropped" in one.name)
    pid = os.fork()
    if not pid:
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if memory._libc.mmap(address, NBYTES, prot, flags, -1, 0) != address:
            os._exit(2)
        ctypes.memset(address, 7, NBYTES)
        del view
        os._exit(0 if ctypes.string_at(address, NBYTES) == bytes([7]) * NBYTES else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del view
    assert not [one for one in mappings() if "memfd:dropped" in one.name]
    os.close(fd)


_AT_EXIT = """
import atexit, sys

views = []
atexit.register(lambda: views[0].__setitem__(0, 7))  # the first to be registered is the last to be called
from layerzero.ipc.shm import memory

views.append(memory.map_guarded(int(sys.argv[1]), 8192, writable=True))
"""


def test_guarded_mapping_is_there_until_the_process_has_ended() -> None:
    """What a library does as a worker exits may still write there; it would crash, and be blamed on a kernel."""
    fd = create_memfd("exits", NBYTES)
    view = memory.map_guarded(fd, NBYTES, writable=False)
    environ = {**os.environ, "PYTHONPATH": str(Path(memory.__file__).parents[3])}  # the code that is tested here
    done = subprocess.run(
        [sys.executable, "-c", _AT_EXIT, str(fd)],
        env=environ,
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, view[0]) == (0, 7), done.stderr
    os.close(fd)
