"""Files that are kept for later processes: whole or not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from layerzero.ipc import kept_files


def test_what_is_sealed_is_whole_or_refused() -> None:
    sealed = kept_files.seal(b"data")
    assert kept_files.unseal(sealed) == b"data"
    for wrong in (b"", sealed[:-1], sealed + b"x", b"D" + sealed[1:]):
        with pytest.raises(kept_files.NotWhole):
            kept_files.unseal(wrong)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        kept_files.write(tmp_path / "taken", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    kept_files.write(tmp_path / "new" / "file", b"data")
    assert [path.name for path in kept_files.by_age(tmp_path / "new")] == ["file"]
    assert kept_files.remove(tmp_path / "new" / "file") == 4
    assert kept_files.remove_all(tmp_path / "new") == 0
    assert kept_files.age(tmp_path / "new" / "file") == 0.0


def test_drafts_that_nobody_writes_any_more_are_removed(tmp_path: Path) -> None:
    """A process that was killed while it wrote has left one; another may write now."""
    old, new = tmp_path / ".a.1", tmp_path / ".b.2"
    for path, age_s in ((old, 2 * kept_files.DRAFT_S), (new, 1.0)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    kept_files.remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".b.2"]
    kept_files.remove_drafts(tmp_path / "nowhere")


def test_nobody_has_a_draft_written_elsewhere(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / f".file.{os.getpid()}").symlink_to(target)
    kept_files.write(tmp_path / "file", b"data")
    assert ((tmp_path / "file").read_bytes(), target.exists()) == (b"data", False)
