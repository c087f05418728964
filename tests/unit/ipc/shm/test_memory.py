"""Shared memory that nobody can pull away, and that is there when it was promised."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.mark.parametrize(
    ("nbytes", "asked"), [(memory.CHECKED_FROM_BYTES, [memory.CHECKED_FROM_BYTES]), (memory.CHECKED_FROM_BYTES - 1, [])]
)
def test_free_memory_is_asked_for_from_a_size_on(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, asked: list[int]
) -> None:
    """An answer takes a millisecond, which a page of a lane is not worth."""
    seen: list[int] = []
    monkeypatch.setattr(free_memory, "check", seen.append)
    os.close(create_memfd("test", nbytes))
    assert seen == asked


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_pages_of_a_range_are_reserved_and_no_others(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """What an arena takes back are the pages of one slot: more would be memory that nobody counts, and past its end an
    error. What was written is still there."""
    page = mmap.PAGESIZE
    monkeypatch.setattr(memory, "_STEP_BYTES", step * page)
    monkeypatch.setattr(free_memory, "check", lambda nbytes: None)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 16 * page)
    os.pwrite(fd, b"kept", 2 * page)
    memory.reserve(fd, page, 3 * page)
    assert os.fstat(fd).st_blocks * 512 == 3 * page
    os.posix_fallocate(fd, page, 3 * page)  # would add what is missing
    assert os.fstat(fd).st_blocks * 512 == 3 * page
    assert (os.fstat(fd).st_size, os.pread(fd, 4, 2 * page)) == (16 * page, b"kept")
    os.close(fd)


def test_other_failures_are_not_disguised_and_leak_nothing() -> None:
    """A size of zero is a bug, not a lack of memory."""
    before = open_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        create_memfd("test", 0)
    assert open_fds() == before


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
        (unreserved, r"^an arena's pages must be reserved; of 8192 bytes 0 are$"),
        (lambda: unreserved(fcntl.F_SEAL_WRITE), r"^an arena's memfd must not be sealed against writing$"),
        (lambda: unreserved(0x10), r"^an arena's memfd must not be sealed against writing$"),
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
        with pytest.raises(ProtocolError, match=r"^an arena's memfd must be open for reading and writing$"):
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
