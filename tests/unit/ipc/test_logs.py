"""The log: nothing twice, and no more than fits."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from pathlib import Path
from layerzero.ipc import logs
logs.LIMIT_BYTES = 1000
logs.keep_in(Path(sys.argv[1]))
"""


def run(path: Path, code: str) -> None:
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", CODE + code, str(path)], stderr=log, check=True)


def lines(path: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


def test_equal_records_in_a_row_are_written_once_and_counted(tmp_path: Path) -> None:
    """A fault that comes a thousand times a second must not push everything else out."""
    run(tmp_path / "a.log", "for n in (1, 1, 1, 2): logs.log('a.happened', n=n)")
    assert lines(tmp_path / "a.log") == [
        {"event": "a.happened", "n": 1},
        {"event": "record.repeated", "times": 2, "record": "a.happened"},
        {"event": "a.happened", "n": 2},
    ]


def test_a_record_that_repeats_until_the_end_is_counted(tmp_path: Path) -> None:
    """The last thing that a process saw is what one looks for."""
    run(tmp_path / "a.log", "for n in (1, 1, 1): logs.log('a.happened', n=n)\nlogs.flush(); logs.flush()")
    assert lines(tmp_path / "a.log") == [
        {"event": "a.happened", "n": 1},
        {"event": "record.repeated", "times": 2, "record": "a.happened"},
    ]


def test_a_record_that_repeats_for_long_is_counted_meanwhile(tmp_path: Path) -> None:
    """It may be all that happens for a month, and a process that is killed says nothing at its end."""
    run(tmp_path / "a.log", "logs.REPEATS_S = 0\nfor n in (1, 1, 1): logs.log('a.happened', n=n)")
    repeated = {"event": "record.repeated", "times": 1, "record": "a.happened"}
    assert lines(tmp_path / "a.log") == [{"event": "a.happened", "n": 1}, repeated, repeated]


def test_long_texts_are_shortened(tmp_path: Path) -> None:
    """Of what a peer says of itself 257 MiB got into one line. The end of a traceback is what one looks for."""
    code = "logs.log('a.happened', detail='b' * 9_000_000 + 'e', all=['x' * 5000] * 5000, who=type('W' * 9999, (), {}))"
    run(tmp_path / "a.log", code)
    (record,) = lines(tmp_path / "a.log")
    assert len(str(record["detail"])) == 4096
    assert str(record["detail"]).startswith("bbb")
    assert str(record["detail"]).endswith("be")
    assert "of 9,000,001 characters" in str(record["detail"])
    assert (tmp_path / "a.log").stat().st_size < 300_000


THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
def write(name):
    for _ in range(2000): logs.log(name)
threads = [threading.Thread(target=write, args=(f"a.{n}",)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
logs.flush()
"""


def test_records_of_several_threads_are_all_counted(tmp_path: Path) -> None:
    """Probes and the database of times have threads of their own."""
    run(tmp_path / "a.log", "logs.LIMIT_BYTES = 1 << 30" + THREADS)
    written = lines(tmp_path / "a.log")
    counts = dict.fromkeys((f"a.{n}" for n in range(4)), 0)
    for before, line in itertools.pairwise([{}, *written]):
        if line["event"] == "record.repeated":
            assert line["record"] == before["event"]
            counts[str(line["record"])] += int(str(line["times"]))
        else:
            counts[str(line["event"])] += 1
    assert set(counts.values()) == {2000}


def test_a_log_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    """A broker that stays for months must not fill the disk."""
    run(tmp_path / "a.log", "for n in range(500): logs.log('a.happened', n=n)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())
    kept = [line["n"] for name in ("a.log.1", "a.log") for line in lines(tmp_path / name)]
    assert kept == list(range(500))[-len(kept) :]
