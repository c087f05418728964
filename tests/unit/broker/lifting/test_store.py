"""Lifted calls on disk: what is kept, what is not believed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from layerzero.broker.lifting import store as stores
from layerzero.broker.lifting.store import Entry, LiftStore
from layerzero.ipc import kept_files
from layerzero.ipc.lifting.form import Address, Kernel, Lifted, Patch, Span, digest
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.vocabulary.tensors import TensorSpec

CODE = b"machine code"
SPEC = TensorSpec.contiguous("float32", (8,))


def lifted(code: bytes = CODE) -> Lifted:
    patches = (Patch(0, Address("input", 0, 0)), Patch(8, Address("output", 0, 0)))
    kernel = Kernel(
        digest(code), "silu", (1, 1, 1), (8, 1, 1), 0, bytes(16), (Span(0, 8), Span(8, 8)), patches, padding=()
    )
    return Lifted("silu", "one.silu", (SPEC,), (SPEC,), {}, (256, 256), (), (kernel,))


def specimen(code: bytes = CODE) -> Specimen:
    return Specimen(lifted(code), {digest(code): code}, {1: ("aa",)})


def entry(code: bytes = CODE) -> Entry:
    return Entry("one.silu", "one", {"env": "0123"}, form=lifted(code).pack())


@pytest.fixture
def store(tmp_path: Path) -> LiftStore:
    return LiftStore(tmp_path / "lifted")


def test_what_was_added_is_found_by_another_process(store: LiftStore) -> None:
    store.add("k" * 64, entry(), specimen())
    other = LiftStore(store.folder)
    found = other.find("k" * 64)
    assert found is not None
    assert replace(found, made_s=0.0) == entry()
    assert other.code(digest(CODE)) == CODE
    assert other.find("l" * 64) is None


def test_why_there_is_none_is_kept_too(store: LiftStore) -> None:
    refused = Entry("one.silu", "one", {}, reason="NOT_DETERMINISTIC", detail="atomics")
    store.add("k", refused, None)
    found = store.find("k")
    assert found is not None
    assert (found.reason, found.detail, found.form) == ("NOT_DETERMINISTIC", "atomics", b"")


@pytest.mark.parametrize("at", [0, 10, -1])
def test_an_entry_whose_bytes_changed_is_not_believed(store: LiftStore, at: int) -> None:
    store.add("k", entry(), specimen())
    path = store.folder / "calls" / "k"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    assert store.find("k") is None
    assert not path.exists(), "what does not hold is removed"


def test_machine_code_whose_bytes_changed_is_not_given(store: LiftStore) -> None:
    store.add("k", entry(), specimen())
    store.code_path(digest(CODE)).write_bytes(CODE + b"!")
    assert store.code(digest(CODE)) is None
    assert store.find("k") is None, "nor is a call that needs it"


def test_a_truncated_file_is_not_believed(store: LiftStore) -> None:
    store.add("k", entry(), specimen())
    path = store.folder / "calls" / "k"
    for length in (0, 1, 31, 40):
        store.add("k", entry(), specimen())
        os.truncate(path, length)
        assert store.find("k") is None, length


def test_verify_says_what_is_gone(store: LiftStore) -> None:
    store.add("k", entry(), specimen())
    store.add("l", entry(b"other"), specimen(b"other"))
    assert store.verify() == []
    store.code_path(digest(CODE)).write_bytes(b"")
    assert store.verify() == [f"machine code {digest(CODE)[:12]}", "call k"]
    assert [key for key, _ in store.entries()] == ["l"]


def test_clear_removes_all(store: LiftStore) -> None:
    store.add("k", entry(), specimen())
    assert store.clear() == 1
    assert (list(store.entries()), store.nbytes()) == ([], 0)


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    store = LiftStore(tmp_path / "lifted", max_bytes=9000)
    for n in range(4):
        code = bytes([n]) * 2000
        store.add(f"k{n}", entry(code), specimen(code))
        for path in store.folder.rglob("*"):  # an hour passes
            info = path.stat()
            os.utime(path, (info.st_atime - 3600, info.st_mtime - 3600))
        if n:
            assert store.find("k0") is not None, "it is in use"
    assert store.nbytes() <= 9000
    assert [n for n in range(4) if store.find(f"k{n}") is not None] == [0, 2, 3]


def test_a_store_stays_small_without_looking_at_all_files_for_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker adds a call for each new length of a decoder: with thousands of files that took it 50 ms each."""
    monkeypatch.setattr(stores, "MAX_ENTRIES", 64)
    looks: list[Path] = []
    by_age = kept_files.by_age
    monkeypatch.setattr(kept_files, "by_age", lambda folder: looks.append(folder) or by_age(folder))
    store = LiftStore(tmp_path / "lifted")
    for n in range(200):
        store.add(f"k{n:03}", entry(), specimen())
        os.utime(store.folder / "calls" / f"k{n:03}", (n, n))
    assert len(looks) < 60
    kept = [key for key, _ in store.entries()]
    assert len(kept) <= 64
    assert kept == [f"k{n:03}" for n in range(200 - len(kept), 200)]


def test_a_folder_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "lifted").write_text("a file")
    store = LiftStore(tmp_path / "lifted")
    store.add("k", entry(), specimen())
    assert store.find("k") is None
    assert "are not kept" in store.problem


def test_nobody_else_can_read_or_change_it(store: LiftStore) -> None:
    store.add("k", entry(), specimen())
    for path in (store.folder / "calls" / "k", store.code_path(digest(CODE))):
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o022 == 0


def test_a_fault_is_remembered_for_the_kernel_as_it_was_installed(store: LiftStore) -> None:
    what = {"kernel": "one.silu", "env_hash": "0123"}
    store.note_fault(what, "it ended the GPU's context")
    other = LiftStore(store.folder)
    assert other.fault_of(what) == "it ended the GPU's context"
    assert other.fault_of({**what, "env_hash": "4567"}) == "", "another version of its library"
    other.clear()
    assert [fault["kernel"] for fault in store.faults()] == ["one.silu"]
    assert (store.forgive(), store.fault_of(what), store.forgive()) == (1, "", 0)


def test_a_fault_whose_note_is_broken_is_a_fault(store: LiftStore) -> None:
    store.note_fault({"kernel": "one.silu"}, "lost")
    (path,) = (store.folder / "faulted").iterdir()
    path.write_bytes(b"{")
    assert store.fault_of({"kernel": "one.silu"})
