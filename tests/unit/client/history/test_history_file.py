"""The file of history: what is kept of a time, how coarse it becomes, and that it stays bounded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from layerzero.client.history import history_file as module
from layerzero.client.history.history_file import HistoryFile, Tier
from layerzero.client.history.sample import Durations, Sample, Worker
from layerzero.ipc.errors import InvalidArgument

NOW = 1_800_000_000


def sample(calls: int = 1, state: str = "ready") -> Sample:
    return Sample(
        1.0,
        {("silu", "alpha", "express"): Durations(calls, 3000 * calls, {2: calls})},
        fallbacks={("silu", "beta", "DEADLINE"): 1},
        workers={"alpha": Worker(state, calls, 0, 0, 4096)},
        gauges={"clients": float(calls)},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history" / "one.sqlite"


def opened(path: Path) -> HistoryFile:
    found = HistoryFile.write(path)
    assert found is not None
    return found


def test_seconds_become_slots_of_each_tier(path: Path) -> None:
    """Counts add up, gauges are the highest, states the last."""
    file = opened(path)
    for second in range(25):
        file.add(sample(calls=second + 1, state="ready" if second < 24 else "backoff"), NOW + second)
    fine, coarse = file.between(NOW, NOW + 24), file.between(NOW, NOW + 24, most=5)
    assert [one.at for one in fine] == [NOW + second for second in range(25)]
    assert [(one.at, one.sample.seconds) for one in coarse] == [(NOW, 10), (NOW + 10, 10), (NOW + 20, 5)]
    last = coarse[-1].sample
    assert last.calls["silu", "alpha", "express"].count == 21 + 22 + 23 + 24 + 25
    assert last.fallbacks == {("silu", "beta", "DEADLINE"): 5}
    assert (last.workers["alpha"].state, last.workers["alpha"].running, last.gauges["clients"]) == ("backoff", 25, 25)
    found = file.at(NOW + 7.5)
    assert found is not None
    assert (found.at, found.width_s, found.sample.total().count) == (NOW + 7, 1, 8)
    assert file.at(NOW + 400) is None
    assert file.span() == (NOW - NOW % 300, NOW + 24)


def test_a_slot_takes_the_place_of_the_oldest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has so many rows and no more, and a time that has gone from the fine tier is found in a coarser one."""
    monkeypatch.setattr(module, "TIERS", (Tier(1, 5), Tier(10, 3)))
    file = opened(path)
    for second in range(60):
        file.add(sample(), NOW + second)
    [(rows,)] = sqlite3.connect(path).execute("SELECT count(*) FROM slots").fetchall()
    assert rows == 5 + 3
    assert [one.at for one in file.between(NOW + 55, NOW + 59)] == [NOW + second for second in range(55, 60)]
    found = file.at(NOW + 31)
    assert found is not None
    assert (found.width_s, found.sample.seconds) == (10, 10)
    assert file.at(NOW + 1) is None


def test_rows_are_bounded_whatever_there_is_to_tell(path: Path) -> None:
    """What does not fit is counted together: no call is lost from the sums."""
    calls = {(f"op{n}", f"backend-{n * n}", "express"): Durations(n + 1, n, {n % 26: n + 1}) for n in range(5000)}
    file = opened(path)
    file.add(Sample(1.0, calls), NOW)
    [(size,)] = sqlite3.connect(path).execute("SELECT max(length(data)) FROM slots").fetchall()
    assert size <= module.MAX_ROW_BYTES
    [kept] = file.between(NOW, NOW)
    assert kept.sample.total().count == sum(range(1, 5001))
    assert kept.sample.calls["op4999", "backend-24990001", "express"].count == 5000
    assert ("other", "other", "other") in kept.sample.calls


def test_one_process_writes_and_others_read(path: Path) -> None:
    """A second recorder does not count everything twice; what was written last is seen at once."""
    file = opened(path)
    assert HistoryFile.write(path) is None
    file.add(sample(), NOW)
    assert len(HistoryFile.read(path).between(NOW, NOW)) == 1
    file.close()
    again = opened(path)
    again.add(sample(), NOW)
    assert again.between(NOW, NOW)[0].sample.total().count == 2
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""], ids=["noise", "empty"])
def test_what_is_no_history_is_refused_and_begun_anew(path: Path, content: bytes) -> None:
    """Who reads hears what to do; who writes begins a new file."""
    with pytest.raises(InvalidArgument, match="start a broker that keeps its history"):
        HistoryFile.read(path)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="is none"):
        HistoryFile.read(path)
    file = opened(path)
    file.add(sample(), NOW)
    assert len(file.between(NOW, NOW)) == 1


@pytest.mark.parametrize(
    "data", [b"x", b"x\x9c\x03\x00\x00\x00\x00\x01", 5, "text", None], ids=["noise", "no text", "int", "str", "null"]
)
def test_damaged_rows_are_left_out(path: Path, data: object) -> None:
    """The others are shown; a new sample takes their place."""
    file = opened(path)
    file.add(sample(), NOW)
    file.add(sample(), NOW + 1)
    other = sqlite3.connect(path)
    other.execute("UPDATE slots SET data = ? WHERE at = ?", (data, NOW))
    other.commit()
    assert [one.at for one in file.between(NOW, NOW + 1)] == [NOW + 1]
    file.add(sample(), NOW)
    assert [one.at for one in file.between(NOW, NOW + 1)] == [NOW, NOW + 1]
