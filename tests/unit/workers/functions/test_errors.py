"""workers/functions/errors.py: what callers are told of what a function raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.workers.functions.errors import error_of


def test_a_worker_whose_folder_is_gone_tells_of_the_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function may enter a folder and remove it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as missing:
        Path("notes.txt").read_bytes()
    kind, message, _ = error_of(missing.value, __file__)
    assert (kind, message.endswith("'notes.txt'")) == ("FileNotFoundError", True)
