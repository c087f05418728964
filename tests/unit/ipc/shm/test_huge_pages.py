"""ipc/shm/huge_pages.py: memory of arenas in pages of 2 MiB, where the kernel gives them, and as it was where not."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerzero as lz
from layerzero.client.connection.arena import Arena
from layerzero.ipc.shm import huge_pages, memory

EXTENT = huge_pages.EXTENT_BYTES
NBYTES = 4 * EXTENT + 12_288  # a tail that is no whole extent
needs_them = pytest.mark.skipif(bool(huge_pages.why_none()), reason=f"no huge pages here: {huge_pages.why_none()}")


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    os.ftruncate(made, NBYTES)
    yield made
    os.close(made)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(NBYTES)
    yield made
    os.close(made.fd)


def address_of(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * 1).from_buffer(view))


def huge_bytes(address: int) -> int:
    """Of the mapping there: what page tables have as huge pages."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            is_there = int(first.partition("-")[0], 16) == address
        elif is_there and first == "ShmemPmdMapped:":
            return 1024 * int(rest[0])
    raise AssertionError("nothing is mapped there")


def reserved_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@needs_them
def test_an_arena_has_them_in_its_process_and_in_workers(arena: Arena) -> None:
    seen = memory.map_guarded(arena.fd, NBYTES, writable=True)  # as a worker maps it
    for address in (arena.address, address_of(seen)):
        assert address % EXTENT == 0
        assert huge_bytes(address) == 4 * EXTENT
    arena.view[EXTENT - 1 : EXTENT + 1] = b"ab"
    assert bytes(seen[EXTENT - 1 : EXTENT + 1]) == b"ab"
    assert reserved_bytes(arena.fd) == NBYTES  # a broker takes none that lacks some


@needs_them
def test_what_an_arena_gave_back_comes_again_as_them(arena: Arena) -> None:
    arena.take(EXTENT)
    for nbytes in (NBYTES - EXTENT, 2 * EXTENT):
        assert arena.punch() == nbytes
        assert huge_bytes(arena.address) <= EXTENT
        assert arena.fill(EXTENT, 2 * EXTENT) == 2 * EXTENT
        arena.view[EXTENT : 3 * EXTENT] = b"\1" * (2 * EXTENT)
        assert huge_bytes(arena.address) == 3 * EXTENT
        assert reserved_bytes(arena.fd) == 3 * EXTENT


@needs_them
def test_contents_stay(fd: int) -> None:
    """Of extents that are full, have holes, and of the ends that no huge page fits in."""
    rng = np.random.default_rng(0)
    written = rng.integers(1, 255, NBYTES, np.uint8)
    written[EXTENT : 2 * EXTENT] = 0  # a hole, but for one page
    os.pwrite(fd, written[:EXTENT].tobytes(), 0)
    os.pwrite(fd, written[2 * EXTENT :].tobytes(), 2 * EXTENT)
    written[EXTENT + 8192] = 7
    os.pwrite(fd, b"\7", EXTENT + 8192)
    assert huge_pages.give(fd, 4096, NBYTES - 4096) == ""
    assert os.pread(fd, NBYTES, 0) == written.tobytes()
    view = memory.map_guarded(fd, NBYTES, writable=False)
    assert view.tobytes() == written.tobytes()


def test_none_are_wanted(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    monkeypatch.setenv(huge_pages.VARIABLE, "0")
    assert huge_pages.give(fd, 0, NBYTES) == "LAYERZERO_HUGE_PAGES is 0"
    memory.reserve(fd, 0, NBYTES, in_huge_pages=True)
    view = memory.map_guarded(fd, NBYTES, writable=True)
    assert (huge_bytes(address_of(view)), reserved_bytes(fd)) == (0, NBYTES)
    monkeypatch.setenv(huge_pages.VARIABLE, "yes")
    with pytest.raises(lz.ConfigError, match="LAYERZERO_HUGE_PAGES is 'yes'; allowed: 1"):
        Arena(NBYTES)


@pytest.mark.parametrize("nbytes", [1, EXTENT - 1, 2 * EXTENT - 2])
def test_ranges_without_a_whole_one_are_left_alone(monkeypatch: pytest.MonkeyPatch, fd: int, nbytes: int) -> None:
    monkeypatch.setattr(huge_pages, "_collapse", lambda *args: pytest.fail("asked for"))
    assert huge_pages.give(fd, 1, nbytes) == ""
    assert reserved_bytes(fd) == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EBUSY])
def test_a_kernel_that_gives_none_is_told_and_the_memory_is_there(
    monkeypatch: pytest.MonkeyPatch, fd: int, number: int
) -> None:
    """EINVAL: older than 6.1, or forbidden; ENOMEM: nothing that size is free."""
    asked: list[Any] = []

    class Refusing:
        mmap = huge_pages._libc.mmap

        def madvise(self, *args: Any) -> int:
            asked.append(args)
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(huge_pages, "_libc", Refusing())
    monkeypatch.setattr(huge_pages, "_SIZE", size_file(str(EXTENT)))
    assert huge_pages.give(fd, 0, NBYTES) == os.strerror(number)
    assert len(asked) == 1
    memory.reserve(fd, 0, NBYTES, in_huge_pages=True)
    assert reserved_bytes(fd) == NBYTES


def size_file(text: str) -> Any:
    """In the place of the kernel's."""

    class Size:
        def read_text(self) -> str:
            if not text:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            return text

    return Size()


@pytest.mark.parametrize(
    ("text", "why"), [("", "this kernel has none"), ("536870912\n", "this machine's have 536870912 bytes")]
)
def test_other_sizes_are_not_asked_for(monkeypatch: pytest.MonkeyPatch, fd: int, text: str, why: str) -> None:
    """Such as those of ARM with pages of 64 KiB: an arena would hardly have one."""
    monkeypatch.setattr(huge_pages, "_SIZE", size_file(text))
    assert huge_pages.give(fd, 0, NBYTES) == why


@needs_them
def test_a_kernel_that_takes_long_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    """Where memory is in pieces, it has to be moved together first; the caller waits meanwhile."""
    clock_ns = iter(range(0, 1 << 62, 15_000_000))
    monkeypatch.setattr(huge_pages.time, "thread_time_ns", lambda: next(clock_ns))
    assert huge_pages.give(fd, 0, NBYTES) == "the kernel took 30 ms for 2 of them"
    assert reserved_bytes(fd) == 2 * EXTENT
    memory.reserve(fd, 0, NBYTES)
    assert reserved_bytes(fd) == NBYTES
