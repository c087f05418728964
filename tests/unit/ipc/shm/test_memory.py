"""Shared memory that nobody can pull away, and that is there when it was promised."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from layerzero.ipc import free_memory
from layerzero.ipc.errors import OutOfMemory, ProtocolError
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.memory import ControlPage, check_memfd, create_memfd, map_fd

NBYTES = 8192


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd("test", NBYTES)
    yield fd
    os.close(fd)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_nobody_can_resize_a_sealed_memfd(fd: int, nbytes: int) -> None:
    """A peer that shrinks it would kill all who map it, by SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(fd, nbytes)


def test_seals_cannot_be_changed(fd: int) -> None:
    """A later seal against writing would break the workers."""
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_pages_are_reserved_at_once(fd: int) -> None:
    """A sparse file is a promise that a full system breaks later."""
    assert os.fstat(fd).st_blocks * 512 >= NBYTES


def test_descriptor_does_not_leak_into_children(fd: int) -> None:
    """A kernel library's subprocess has no business with a caller's tensors."""
    assert not os.get_inheritable(fd)


def test_writes_are_seen_through_other_maps_and_refused_by_read_only_ones(fd: int) -> None:
    """A library that writes into its inputs must fail there, not here."""
    write, read = map_fd(fd, NBYTES, writable=True), map_fd(fd, NBYTES, writable=False, populate=True)
    write[:3] = b"abc"
    assert read[:3] == b"abc"
    with pytest.raises(TypeError):
        read[0] = 1
    assert memoryview(read).readonly


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_full_system_is_an_error_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The caller can free something and try again."""

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_fds()
    with pytest.raises(OutOfMemory, match="cannot reserve 8192 bytes of shared memory") as caught:
        create_memfd("test", NBYTES)
    assert caught.value.facts == {"nbytes": NBYTES}
    assert open_fds() == before


def test_size_limit_of_the_process_is_an_error() -> None:
    """The same by the kernel's own hand: RLIMIT_FSIZE holds for memfds too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, before[1]))
    try:
        with pytest.raises(OutOfMemory):
            create_memfd("test", 2 * NBYTES)
        os.close(create_memfd("test", NBYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_address_space_is_an_error() -> None:
    """The pages are there, but this process may not map them (ulimit -v)."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    fd = create_memfd("test", 32 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            map_fd(fd, 32 << 20, writable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        os.close(fd)


def test_more_than_the_machine_has_is_asked_for_and_never_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memfd has no limit of its own: the kernel would fill all memory and then kill some process. What is reserved in
    this test is an error at once, in case the question is not asked."""

    def reserve(fd: int, offset: int, nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes would have been reserved")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    before = open_fds()
    with pytest.raises(OutOfMemory, match="4 TiB of shared memory are asked for, and the machine has") as caught:
        create_memfd("test", 1 << 42)
    assert caught.value.facts["nbytes"] == 1 << 42
    assert caught.value.facts["available_bytes"] < 1 << 42
    assert open_fds() == before


def test_memory_that_others_take_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes take seconds to reserve; two processes may have asked at the same moment."""
    asked: list[int] = []

    def check(nbytes: int) -> None:
        asked.append(nbytes)
        if len(asked) == 3:
            raise OutOfMemory("somebody else has it", nbytes=nbytes)

    monkeypatch.setattr(free_memory, "check", check)
    monkeypatch.setattr(memory, "_STEP_BYTES", 1 << 20)
    before = open_fds()
    with pytest.raises(OutOfMemory):
        create_memfd("test", 4 << 20)
    assert asked == [4 << 20, 3 << 20, 2 << 20]
    assert open_fds() == before


def test_other_failures_are_not_disguised_and_leak_nothing() -> None:
    """A size of zero is a bug, not a lack of memory."""
    before = open_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        create_memfd("test", 0)
    assert open_fds() == before


@pytest.mark.parametrize("is_inherited", [True, False])
def test_a_forked_child_has_no_map_that_is_not_inherited(fd: int, is_inherited: bool) -> None:
    """What a library starts outlives its worker, and would keep and could write the memory of clients."""
    mapped = map_fd(fd, NBYTES, writable=True, is_inherited=is_inherited)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, b"1" if "memfd:test" in Path("/proc/self/maps").read_text() else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == (b"1" if is_inherited else b"0")
    mapped.close()
    os.close(read)
    os.close(write)


def test_good_memfd_passes_the_check(fd: int) -> None:
    """What create_memfd makes is what check_memfd wants."""
    check_memfd(fd, NBYTES)


def unreserved(seals: int = 0) -> int:
    """A memfd as `create_memfd` makes them, without its pages, and with more seals."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    if seals:
        os.posix_fallocate(fd, 0, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (unreserved, "pages must be reserved; of 8192 bytes 0 are"),
        (lambda: unreserved(fcntl.F_SEAL_WRITE), "sealed against writing"),
        (lambda: unreserved(0x10), "sealed against writing"),
    ],
)
def test_an_arena_that_workers_could_not_write_or_would_pay_for_is_refused(make: Callable[[], int], why: str) -> None:
    """It would fail in the worker, and open a breaker that other clients share."""
    fd = make()
    try:
        with pytest.raises(ProtocolError, match=why):
            memory.check_arena(fd, NBYTES)
    finally:
        os.close(fd)


def test_an_arena_opened_for_reading_is_refused(fd: int) -> None:
    """Whoever is lent it writes results there."""
    memory.check_arena(fd, NBYTES)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(ProtocolError, match="open for reading and writing"):
            memory.check_arena(reader, NBYTES)
    finally:
        os.close(reader)


def test_an_arena_that_lacks_one_page_of_many_is_refused() -> None:
    """Its last page would be the worker's to pay for."""
    nbytes = 8 << 20
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.posix_fallocate(fd, 0, nbytes - mmap.PAGESIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    try:
        with pytest.raises(ProtocolError, match=r"^an arena's pages must be reserved; of 8388608 bytes 8384512 are$"):
            memory.check_arena(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        memory.check_arena(fd, nbytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize("nbytes", [0, 1])
def test_an_arena_has_a_byte_at_least(nbytes: int) -> None:
    """A mapping of none is an error that says nothing."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    try:
        if nbytes:
            check_memfd(fd, nbytes)
            return
        with pytest.raises(ProtocolError, match=r"^an arena has at least one byte, the message says 0$"):
            check_memfd(fd, nbytes)
    finally:
        os.close(fd)


def test_an_arena_larger_than_any_is_refused(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest is not."""
    monkeypatch.setattr(memory, "MAX_ARENA_BYTES", NBYTES)
    memory.check_arena(fd, NBYTES)
    monkeypatch.setattr(memory, "MAX_ARENA_BYTES", NBYTES - 1)
    with pytest.raises(ProtocolError, match=r"^an arena has at most 8191 bytes, the message says 8192$"):
        memory.check_arena(fd, NBYTES)


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


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_guarded_mapping_is_what_it_was_asked_to_be(is_writable: bool) -> None:
    """No more can be written than was allowed, and as much lies around it as is said."""
    nbytes = mmap.PAGESIZE + 1
    fd = create_memfd("exactly", nbytes)
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
    view.release()
    del view
    assert not [one for one in mappings() if one.first < end and one.end > first]
    os.close(fd)


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


def test_what_cannot_be_mapped_leaves_no_guards() -> None:
    """The error is the kernel's."""
    before = len(mappings())
    with pytest.raises(OSError, match=r"^.Errno 9. Bad file descriptor$") as failure:
        memory.map_guarded(-1, NBYTES, writable=True)
    assert failure.value.errno == errno.EBADF
    assert len(mappings()) == before


def test_wrong_size_is_refused(fd: int) -> None:
    """The bounds of every reference rest on it."""
    with pytest.raises(ProtocolError, match="memfd has 8192 bytes, the message says 4096"):
        check_memfd(fd, 4096)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_missing_seal_is_refused(seals: int) -> None:
    """Its owner could still pull it away, or change the seals."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        with pytest.raises(ProtocolError, match="memfd has seals"):
            check_memfd(fd, NBYTES)
    finally:
        os.close(fd)


def test_descriptor_that_is_no_memfd_is_refused() -> None:
    """Anything can be sent through a socket."""
    read, write = os.pipe()
    try:
        with pytest.raises(ProtocolError, match="not a memfd"):
            check_memfd(read, NBYTES)
    finally:
        os.close(read)
        os.close(write)


def test_control_page_tells_dispatch_and_phase() -> None:
    """It outlives the worker that wrote it, so that a crash can be blamed on a call."""
    fd = create_memfd("page", memory.PAGE_BYTES)
    worker, broker = ControlPage(fd, writable=True), ControlPage(fd, writable=False)
    assert broker.read() == (0, 0)
    worker.write(2**64 - 1, 2)
    worker.close()
    assert broker.read() == (2**64 - 1, 2)
    with pytest.raises(TypeError):
        broker.write(1, 1)
    broker.close()
    os.close(fd)


def test_maps_are_shared_not_private(fd: int) -> None:
    """A private copy of an output would lose it."""
    with mmap.mmap(fd, NBYTES) as other:
        view = map_fd(fd, NBYTES, writable=True)
        view[-1] = 7
        assert other[-1] == 7


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
