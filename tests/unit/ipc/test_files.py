"""Files that others read and write, too."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerzero.ipc import files


def test_threads_and_readers_meet_whole_files_alone(tmp_path: Path) -> None:
    """Two workers of one environment, whose verdicts threads of a broker kept at once, had one draft: the second found
    it gone, and its backend was disabled."""
    path, over = tmp_path / "verdict.json", threading.Event()

    def put(number: int) -> None:
        for count in range(200):
            files.put(path, json.dumps({"from": number, "values": [number] * (50 * count)}))

    def read() -> int:
        count = 0
        while not over.is_set():
            if path.exists():
                said = json.loads(path.read_text())
                assert set(said["values"]) <= {said["from"]}
                count += 1
        return count

    with ThreadPoolExecutor(5) as threads:
        reader = threads.submit(read)
        try:
            list(threads.map(put, range(4)))
        finally:
            over.set()
        assert reader.result() > 0
    assert [one.name for one in tmp_path.iterdir()] == ["verdict.json"]


def test_what_cannot_be_put_leaves_what_was_there(tmp_path: Path) -> None:
    """And no draft."""
    path = tmp_path / "a"
    files.put(path, b"before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.put(tmp_path / "folder", "text")
    with pytest.raises(UnicodeEncodeError):
        files.put(path, "\ud800")
    with pytest.raises(OSError, match="No such file") as caught:
        files.put(tmp_path / "none" / "a", b"")
    assert caught.value.errno == errno.ENOENT
    assert path.read_bytes() == b"before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "folder"]
