"""ipc/spinning.py: for how long a process looks before it sleeps."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

import pytest

from layerzero.ipc import spinning
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.shm import lane
from layerzero.ipc.shm.memory import create_memfd


def test_the_limit_is_a_number_of_microseconds() -> None:
    assert spinning.limit_ns({}) == 1000 * spinning.DEFAULT_US
    assert [spinning.limit_ns({spinning.VARIABLE: text}) for text in ("0", " 7 ", "10000")] == [0, 7000, 10_000_000]
    for text in ("-1", "many", "1.5", "10001"):
        with pytest.raises(ConfigError, match=spinning.VARIABLE):
            spinning.limit_ns({spinning.VARIABLE: text})


def test_looks_in_vain_become_rare_until_one_is_not() -> None:
    spin = spinning.Spin(1000)
    spin._cores.are_free = lambda: True  # type: ignore[method-assign, union-attr]
    waits = 0
    looks = []
    while len(looks) < 5:
        waits += 1
        if spin.next_ns():
            spin.note(None)
            looks.append(waits)
    assert [later - one for one, later in itertools.pairwise(looks)] == [2, 4, 8, 16]
    while not spin.next_ns():
        pass
    for _ in range(20):
        while not spin.next_ns():
            pass
        spin.note(10)
    assert all(spin.next_ns() == 1000 for _ in range(3))


def test_nobody_looks_where_others_want_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who looks takes a core from them: so many may run as there are."""
    cores, told = spinning.Cores(), tmp_path / "loadavg"
    monkeypatch.setattr(spinning, "_LOADAVG", told)
    cores.count = 2
    assert cores.are_free() is False, "nobody tells"
    for text, are_free in (
        ("0.1 0.1 0.1 2/300 17\n", True),
        ("0.1 0.1 0.1 3/300 17\n", False),
        ("nonsense", False),
    ):
        told.write_text(text)
        assert cores.are_free() is are_free
    cores.count = 1
    told.write_text("0.1 0.1 0.1 1/300 17\n")
    assert cores.are_free() is False


def test_with_a_limit_of_nothing_nobody_looks() -> None:
    assert [spinning.Spin(0).next_ns() for _ in range(3)] == [0, 0, 0]


def test_a_call_that_comes_is_seen_without_a_ring() -> None:
    fd = create_memfd("page", lane.PAGE_BYTES)
    ours, theirs = lane.Page(fd), lane.Page(fd)
    assert ours.await_call(1, 1000) is None
    thread = threading.Thread(target=theirs.put_call, args=(1, 7, b"refs"))
    thread.start()
    assert ours.await_call(1, 60_000_000_000) is not None
    thread.join()
    assert ours.get_call(1) == (7, b"refs")
    assert ours.is_awaited(1)
    os.close(fd)
