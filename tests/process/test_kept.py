"""Inputs outside of arenas that come again as the same memory are copied once, and never stale."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import PAUSE, fault
from tests.process.harness import Site, is_paused, wait_until

import layerzero as lz
from layerzero.client.connection.arena import pool
from layerzero.client.connection.report import SelectionReport
from layerzero.client.connection.written import PAGE, Watcher
from layerzero.client.session import kept, repeats

IS_TOLD = not Watcher().problem
needs_kernel = pytest.mark.skipif(not IS_TOLD, reason="this system does not tell what was written")
ROWS, COLUMNS = 96, 256  # of a weight: 96 KiB
X = np.linspace(-1, 1, 4 * ROWS, dtype=np.float32).reshape(4, ROWS)


@pytest.fixture(params=["in C", "in Python"])
def connected(request: pytest.FixtureRequest, connected: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Both ways of a call ask for the copies."""
    if request.param == "in Python":
        lz.session().repeats.run = lambda *_: repeats.MISS  # type: ignore[method-assign]
    elif repeats.library is None:
        pytest.skip("not compiled")
    connected.wait_ready("alpha", "beta")
    return connected


def weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), dtype=np.float32)


def run(w: np.ndarray) -> SelectionReport:
    """A call that takes the weight, whose result must be of the weight as it is."""
    np.testing.assert_allclose(lz.matmul(X, w), X @ w, rtol=1e-4, atol=1e-4)
    report = lz.last_report()
    assert report is not None
    return report


def settle(w: np.ndarray) -> SelectionReport:
    """Call until the weight's copy is kept, and calls go by the lane."""

    def report() -> SelectionReport | None:
        found = run(w)
        return found if found.kept and found.path == "express" else None

    return wait_until(report)


def of_file(w: np.ndarray, access: int) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.write(w.tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=access)
    return np.frombuffer(mapped, np.float32).reshape(w.shape)


@needs_kernel
def test_weights_that_come_again_are_copied_once(connected: Site) -> None:
    w = weight()
    report = settle(w)
    assert [(one.arg, one.nbytes, one.reason) for one in report.kept] == [("b", w.nbytes, kept.UNWRITTEN)]
    assert [one.arg for one in report.copies] == ["a"]
    assert report.copied_bytes == X.nbytes
    assert f"b: {w.nbytes:,} bytes {kept.UNWRITTEN}" in str(report)
    assert report.to_dict()["kept"][0]["nbytes"] == w.nbytes


def _by_torch_like_exchange(w: np.ndarray) -> None:
    np.from_dlpack(w)[5, 5] = 77.0


def _by_file(w: np.ndarray) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(np.full(100, 3.0, np.float32).tobytes())
        file.seek(0)
        assert file.readinto(memoryview(w).cast("B")[9000:9400]) == 400  # type: ignore[attr-defined]


def _by_direct_system_call(w: np.ndarray) -> None:
    read, write = os.pipe()
    try:
        os.write(write, np.full(50, -8.0, np.float32).tobytes())
        assert os.readv(read, [memoryview(w).cast("B")[40_000:40_200]]) == 200
    finally:
        os.close(read)
        os.close(write)


def _by_another_thread(w: np.ndarray) -> None:
    thread = threading.Thread(target=lambda: w.__setitem__((50, 50), 5.5))
    thread.start()
    thread.join()


def _by_memory_of_the_process(w: np.ndarray) -> None:
    fd = os.open("/proc/self/mem", os.O_RDWR)
    try:
        os.pwrite(fd, np.full(8, 4.5, np.float32).tobytes(), w.ctypes.data + 50_000)
    finally:
        os.close(fd)


def _by_dropped_pages(w: np.ndarray) -> None:
    """Pages that are given back read as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = -(-w.ctypes.data // PAGE) * PAGE
    assert libc.madvise(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(2 * PAGE), 4) == 0


WRITES: dict[str, Callable[[np.ndarray], object]] = {
    "an element": lambda w: w.__setitem__((40, 40), 9.0),
    "the first element": lambda w: w.__setitem__((0, 0), 9.0),
    "the last element": lambda w: w.__setitem__((-1, -1), 9.0),
    "all": lambda w: np.multiply(w, 2, out=w),
    "through a view": lambda w: w.T.__setitem__((17, 60), -3.0),
    "through a view of bytes": lambda w: np.invert(w.view(np.uint8)[50, ::4], out=w.view(np.uint8)[50, ::4]),
    "through a memoryview": lambda w: memoryview(w).cast("B").__setitem__(slice(5000, 5004), b"\0\0\x80?"),
    "past NumPy": lambda w: ctypes.memset(w.ctypes.data + 60_000, 0x40, 400),
    "one bit": lambda w: ctypes.memset(w.ctypes.data + 70_003, 0x41, 1),
    "by DLPack": _by_torch_like_exchange,
    "from a file": _by_file,
    "by the kernel": _by_direct_system_call,
    "by another thread": _by_another_thread,
    "by the file of its memory": _by_memory_of_the_process,
    "by giving pages back": _by_dropped_pages,
}


@needs_kernel
@pytest.mark.parametrize("how", WRITES)
def test_a_weight_that_was_written_is_copied_anew(connected: Site, how: str) -> None:
    w = weight()
    settle(w)
    WRITES[how](w)
    assert not run(w).kept
    settle(w)
    w[-1, -1] += 1
    assert not run(w).kept


@needs_kernel
def test_calls_that_are_under_way_have_the_numbers_of_their_time(connected: Site) -> None:
    """The copy that they read is not written again when the weight is."""
    w, pause = weight(), np.full((4, 4), fault(PAUSE, "alpha"), np.float32)
    with lz.prefer("alpha"):
        worker = settle(w).worker_pid
        assert worker is not None
        expected = X @ w
        paused = lz.submit(lz.silu, pause)
        wait_until(lambda: is_paused(worker))
        behind = lz.submit(lz.matmul, X, w)
        w *= 3
        after = lz.submit(lz.matmul, X, w)
        os.kill(worker, signal.SIGCONT)
        paused.result()
        np.testing.assert_allclose(behind.result(), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(after.result(), X @ w, rtol=1e-4, atol=1e-4)


@needs_kernel
def test_views_that_overlap_do_not_hide_each_others_writes(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """To watch one anew forgets what was written for the other."""
    monkeypatch.setattr(kept, "MAX_FAILURES", 0)  # each is tried again at once
    rows = np.random.default_rng(3).standard_normal((ROWS + 16, COLUMNS), dtype=np.float32)
    one, other = rows[:ROWS], rows[16:]
    dice = random.Random(0)
    for turn in range(120):
        run(dice.choice((one, other)))
        if dice.random() < 0.2:
            rows[dice.randrange(len(rows)), dice.randrange(COLUMNS)] = turn
    for turn in range(3):
        settle(one)
        rows[40, turn] = 1  # of both
        settle(other)
        rows[41, turn] = 2


@needs_kernel
def test_other_memory_at_the_same_address_is_not_taken_for_it(connected: Site) -> None:
    """Arrays of one size come and go, and often lie where the one before lay."""
    addresses = set()
    for seed in range(60):
        w = weight(seed)
        addresses.add(w.ctypes.data)
        for _ in range(4):
            run(w)
        del w
    assert len(addresses) < 60


@needs_kernel
def test_a_copy_goes_with_its_weight(connected: Site) -> None:
    before = pool.stats()["slots"]
    w = weight()
    settle(w[:])  # of a view that is gone: the memory is another array's
    assert pool.stats()["slots"] > before
    assert w.ctypes.data in kept.copies.entries
    address = w.ctypes.data
    del w
    gc.collect()
    assert address not in kept.copies.entries
    lz.last_report()
    assert pool.stats()["slots"] <= before


def test_what_is_read_only_down_to_bytes_needs_no_watching(connected: Site) -> None:
    w = np.frombuffer(weight().tobytes(), np.float32).reshape(ROWS, COLUMNS)
    report = settle(w)
    assert [one.reason for one in report.kept] == [kept.IMMUTABLE]


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY, mmap.ACCESS_WRITE])
def test_memory_of_a_file_is_copied_at_each_call(connected: Site, access: int) -> None:
    """Others may write the file, and nothing here would tell."""
    w = of_file(weight(), access)
    for _ in range(8):
        report = run(w)
        assert not report.kept
    (told,) = [one.reason for one in report.copies if one.arg == "b"]
    assert "copied at each call: it could change, and" in told
    assert "lz.share() or lz.empty() avoid this" in told
    if IS_TOLD:
        assert "it is of a file, or shared with other processes" in told


@needs_kernel
def test_an_array_that_was_made_read_only_is_watched(connected: Site) -> None:
    """A view that was made before can be written."""
    w = weight()
    view = w[:]
    w.flags.writeable = False
    assert [one.reason for one in settle(w).kept] == [kept.UNWRITTEN]
    view[3, 3] = 99
    assert not run(w).kept


@needs_kernel
def test_where_a_device_may_write_nothing_is_watched(connected: Site, tmp_path: Path) -> None:
    w = weight()
    with open("/dev/fuse" if os.access("/dev/fuse", os.R_OK) else "/dev/ptmx", "rb"):
        for _ in range(6):
            report = run(w)
    assert not report.kept
    assert "a device that this process has open may write to it (/dev/" in str(report.copies)


@needs_kernel
def test_a_weight_that_is_written_often_is_watched_ever_more_seldom(connected: Site) -> None:
    w, watched = weight(), 0
    for turn in range(200):
        w[turn % ROWS, 7] = turn
        run(w)
        watched += kept.copies.entries[w.ctypes.data].row[kept.COPY] != 0
    assert watched < 20
    for _ in range(kept.ENOUGH << kept.MAX_FAILURES):
        if run(w).kept:
            break
    assert run(w).kept


@needs_kernel
def test_copies_are_bounded(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    w, big = weight(), np.random.default_rng(1).standard_normal((ROWS, 4096), dtype=np.float32)
    monkeypatch.setattr(kept.copies, "_limit_bytes", 1 << 20)
    settle(w)
    for _ in range(6):
        report = run(big)
    assert not report.kept
    assert "copies of 0 MiB are kept already, 1 at most (LAYERZERO_KEPT_MIB)" in str(report.copies)
    assert run(w).kept
    many = [weight(seed) for seed in range(12)]
    for one in (many * 4)[:]:
        run(one)
    used = sum(one.row[kept.NBYTES] for one in kept.copies.entries.values() if one.row[kept.COPY])
    assert used <= 1 << 20


def test_limits_are_checked() -> None:
    assert kept.limit_bytes({}) == kept.DEFAULT_MIB << 20
    assert kept.limit_bytes({"LAYERZERO_KEPT_MIB": "0"}) == 0
    with pytest.raises(lz.ConfigError, match=r"LAYERZERO_KEPT_MIB is '1 GB'; allowed: MiB of copies"):
        kept.limit_bytes({"LAYERZERO_KEPT_MIB": "1 GB"})


def test_without_the_kernel_each_call_copies_and_says_why(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerzero.client.connection.written._SYSCALLS", {})
    monkeypatch.setattr(kept.copies, "_watcher", None)
    w = weight()
    for _ in range(6):
        report = run(w)
    assert not report.kept
    assert "it could change, and this system does not say when (userfaultfd:" in str(report.copies)


@needs_kernel
def test_a_forked_child_watches_for_itself(connected: Site) -> None:
    w = weight()
    settle(w)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            w[7, 7] = 21
            for _ in range(4):
                run(w)
            os.write(write, b"ok")
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(read, 8) == b"ok"
    finally:
        os.close(read)
    run(w)
    w[7, 7] = 22
    run(w)


@needs_kernel
def test_threads_that_write_and_call_by_turns_are_never_stale(connected: Site) -> None:
    """Each has weights of its own, side by side in one array, so that their ends share pages."""
    rows = np.random.default_rng(5).standard_normal((4 * 70, COLUMNS), dtype=np.float32)
    problems: list[BaseException] = []

    def work(number: int) -> None:
        w, dice = rows[70 * number : 70 * number + 70], random.Random(number)
        x = X[:, :70].copy()
        try:
            for turn in range(60):
                np.testing.assert_allclose(lz.matmul(x, w), x @ w, rtol=1e-3, atol=1e-3)
                if dice.random() < 0.15:
                    w[dice.choice((0, 35, 69)), dice.randrange(COLUMNS)] = turn
        except BaseException as exc:
            problems.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not problems, problems[0]
