"""Who asks the broker each second, and what a successor finds."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerzero.client.history import history_file
from layerzero.client.history.history_file import HistoryFile
from layerzero.client.history.recorder import Recorder

BEGAN = 1_800_000_000.0


def answer(up_s: float, calls: int) -> dict[str, Any]:
    """Of a broker that has had so many calls by then."""
    return {
        "up_s": up_s,
        "durations": [["silu", "alpha", "express", [0, calls, 0], 1000 * calls]],
        "queued": [],
        "errors": [],
        "fallbacks": [["silu", "beta", "DEADLINE", calls // 2]],
        "restarts": [],
        "workers": [],
        "pids": {},
        "arena_bytes": {"host": 0, "gpu": 0},
    }


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], HistoryFile]]:
    """The file, as each process opens it."""
    files: list[HistoryFile] = []

    def open_again() -> HistoryFile:
        while files:
            files.pop().close()
        found = HistoryFile.write(tmp_path / "one.sqlite")
        assert found is not None
        files.append(found)
        return found

    yield open_again
    files.pop().close()


def count(recorder: Recorder, up_s: float, calls: int, began: float = BEGAN) -> int | None:
    sample = recorder.take(answer(up_s, calls), began + up_s)
    return None if sample is None else sample.total().count


def test_calls_between_a_recorder_that_died_and_the_next_are_kept(opened: Callable[[], HistoryFile]) -> None:
    first = Recorder(opened())
    assert [count(first, 100, 5), count(first, 101, 7)] == [None, 2]
    second = Recorder(opened())
    assert [count(second, 109, 12), count(second, 110, 12)] == [5, 0]
    [gap] = opened().between(BEGAN + 109, BEGAN + 109)
    assert (gap.sample.seconds, gap.sample.fallbacks) == (8.0, {("silu", "beta", "DEADLINE"): 3})


def test_the_answer_of_another_broker_says_nothing(opened: Callable[[], HistoryFile]) -> None:
    first = Recorder(opened())
    count(first, 100, 5)
    count(first, 101, 7)
    assert count(Recorder(opened()), 300, 9, BEGAN + 60) is None


def test_an_answer_that_is_large_or_damaged_is_none(
    opened: Callable[[], HistoryFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Recorder(opened())
    count(first, 100, 5)
    count(first, 101, 7)
    with sqlite3.connect(tmp_path / "one.sqlite") as db:
        db.execute("UPDATE answers SET data = x'00ff'")
    second = Recorder(opened())
    assert count(second, 103, 8) is None
    monkeypatch.setattr(history_file, "MAX_ANSWER_BYTES", 8)
    assert count(second, 104, 9) == 1
    assert count(Recorder(opened()), 106, 11) is None
