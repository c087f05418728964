"""The database on real files: what comes back is what was stored, or nothing; and nothing waits for it."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.broker.selection.timings import PerfRow, PerfTable, Stat
from layerzero.broker.storage.perf_rows import Identity, Measurement, checksum
from layerzero.broker.storage.perf_store import KEEP_BAD, SCHEMA, Store, set_aside
from layerzero.broker.storage.perfdb import PerfDB

IDENTITY = Identity("cpu-x", "", "", "2.13", "2.13", "0.1.0", "caps", "env")
KERNELS = ("torch.matmul", "torch.silu")
WAIT_S = 20.0  # of a thread that has work of milliseconds
OPEN_S = 1.0


class Broker:
    """What the engine does with the database."""

    def __init__(self, path: Path, identity: Identity = IDENTITY, **options: Any) -> None:
        self.table = PerfTable()
        self.loaded: dict[str, list[PerfRow]] = {}
        began_s = time.monotonic()
        self.db = PerfDB(path, self._take, retry_s=0.0, **options)
        self.db.identify("torch", identity, KERNELS)
        assert self.db.wait(WAIT_S)
        self.open_s = time.monotonic() - began_s

    def _take(self, backend: str, rows: list[PerfRow]) -> None:
        self.loaded[backend] = rows
        self.table.load(rows)

    @property
    def medians(self) -> dict[tuple[str, str], float]:
        return {(row.kernel_id, row.key): row.stat.median_us for row in self.loaded.get("torch", [])}

    def note(self, us: float, *keys: str) -> None:
        for key in keys:
            self.table.note(KERNELS[0], key, us, time.monotonic())
        self.db.save(self.table.take_dirty(limit=1000))
        assert self.db.wait(WAIT_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "perf.db"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., Broker]]:
    with contextlib.ExitStack() as stack:

        def make(at: Path = path, **options: Any) -> Broker:
            broker = Broker(at, **options)
            stack.callback(broker.db.close, WAIT_S)
            return broker

        yield make


def fill(path: Path, us: float = 10.0, keys: int = 3) -> dict[tuple[str, str], float]:
    """A file as a broker leaves it."""
    broker = Broker(path)
    broker.note(us, *(f"key {n}" for n in range(keys)))
    assert broker.db.close(WAIT_S)
    assert broker.db.problems == []
    return {(KERNELS[0], f"key {n}"): us for n in range(keys)}


def bad_files(path: Path) -> list[Path]:
    return [p for p in path.parent.glob("perf.db.bad-*") if not p.name.endswith(("-wal", "-shm"))]


def test_what_was_measured_is_known_to_the_next_broker(path: Path, start: Callable[..., Broker]) -> None:
    """Or every restart would begin with guesses."""
    first = start()
    now_s = time.monotonic()
    first.table.note(KERNELS[0], "a", 2e6, now_s, is_warmup=True)
    for us in (10.0, 20.0, 30.0):
        first.table.note(KERNELS[0], "a", us, now_s)
    first.db.save(first.table.take_dirty())
    assert first.db.close(WAIT_S)
    second = start()
    [row] = second.loaded["torch"]
    assert row.stat == replace(Stat(3, 20.0, 30.0, 100.0, 2000.0, now_s), measured_at_s=row.stat.measured_at_s)
    assert row.stat.measured_at_s == pytest.approx(now_s, abs=0.5)
    assert second.table.stat(KERNELS[0], "a") == row.stat
    assert second.db.facts() == {
        "path": str(path),
        "mode": "file",
        "loaded": 1,
        "stored": 0,
        "waiting": 0,
        "dropped": 0,
    }
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("field", Identity.__dataclass_fields__)
def test_a_change_of_what_it_depends_on_makes_a_measurement_unknown(
    path: Path, start: Callable[..., Broker], field: str
) -> None:
    """A new driver is a new machine. Going back to the old one finds the old rows."""
    kept = fill(path)
    changed = start(identity=replace(IDENTITY, **{field: "new"}))
    assert changed.loaded == {"torch": []}
    changed.note(99.0, "key 0")
    changed.db.identify("torch", IDENTITY, KERNELS)
    assert changed.db.wait(WAIT_S)
    assert changed.medians == kept


def test_a_clock_that_was_set_back_does_not_make_rows_younger_than_now(
    path: Path, start: Callable[..., Broker]
) -> None:
    """They would count as fresh for as long as the clock was wrong."""
    store, _ = Store.open(path)
    row = Measurement(KERNELS[0], "a", IDENTITY.hash, "torch", 1, 5.0, 5.0, 0.0, 0.0, time.time() + 86_400)
    store.save([IDENTITY], [row])
    store.close()
    [loaded] = start().loaded["torch"]
    assert loaded.stat.measured_at_s <= time.monotonic()


def test_rows_of_unknown_kernels_are_dropped_and_counted(start: Callable[..., Broker]) -> None:
    """Without an identity nobody could tell later what they are valid for."""
    broker = start()
    broker.db.save([PerfRow("else.matmul", "a", Stat(1, 1.0, 1.0, 0.0, 0.0, 0.0))])
    assert broker.db.dropped == 1
    assert "1 rows were not stored" in broker.db.problems[0]


# --- files that are not what they should be


def write_garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(20_000))


def zero_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def set_schema(path: Path, version: int) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()


def raise_schema(path: Path) -> None:
    set_schema(path, SCHEMA + 1)


def make_it_schema_1(path: Path) -> None:
    set_schema(path, 1)


def forget_schema(path: Path) -> None:
    set_schema(path, 0)


def of_another_program(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA application_id = 7")
    db.close()


def drop_a_table(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("DROP TABLE identities")
    db.commit()
    db.close()


def make_it_huge(path: Path) -> None:
    os.truncate(path, 1 << 33)


def make_it_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("someone's")


@pytest.mark.parametrize(
    "spoil",
    [
        write_garbage,
        zero_a_page,
        truncate,
        raise_schema,
        make_it_schema_1,
        forget_schema,
        of_another_program,
        drop_a_table,
        make_it_huge,
        make_it_a_folder,
    ],
)
def test_a_file_that_cannot_be_trusted_is_set_aside_and_begun_anew(
    path: Path, start: Callable[..., Broker], spoil: Callable[[Path], None]
) -> None:
    """A broker must start within a second and serve, whatever lies there."""
    fill(path)
    spoil(path)
    broker = start()
    assert broker.open_s < OPEN_S
    assert broker.loaded == {"torch": []}
    [bad] = bad_files(path)
    assert bad.name in broker.db.problems[0]
    broker.note(7.0, "a")
    assert start().medians == {(KERNELS[0], "a"): 7.0}


def test_an_empty_file_is_a_new_one(path: Path, start: Callable[..., Broker]) -> None:
    """A broker that died at the wrong moment leaves one."""
    path.parent.mkdir()
    path.touch()
    broker = start()
    assert (broker.db.problems, broker.db.facts()["mode"]) == ([], "file")


def test_a_file_whose_wal_is_gone_loses_the_last_rows_only(path: Path, start: Callable[..., Broker]) -> None:
    """Someone cleaned up."""
    fill(path, keys=1)
    store, _ = Store.open(path)
    row = Measurement(KERNELS[0], "late", IDENTITY.hash, "torch", 1, 5.0, 5.0, 0.0, 0.0, time.time())
    store.save([IDENTITY], [row])
    copy = path.parent / "copy" / "perf.db"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())  # without the -wal that has the last row
    store.close()
    broker = start(copy)
    assert broker.medians == {(KERNELS[0], "key 0"): 10.0}
    assert broker.db.problems == []


def test_no_flipped_byte_becomes_a_measurement(path: Path, tmp_path: Path) -> None:
    """SQLite's checks pass a flipped bit in a number: 12.3 us becomes 24.6 us. Ours do not."""
    kept = fill(path, us=12.3, keys=40)
    original = path.read_bytes()
    rng = random.Random(7)
    places = [rng.randrange(len(original)) for _ in range(150)]
    outcomes = set()
    for n, place in enumerate(places):
        copy = tmp_path / str(n) / "perf.db"
        copy.parent.mkdir()
        copy.write_bytes(original[:place] + bytes([original[place] ^ (1 << rng.randrange(8))]) + original[place + 1 :])
        broker = Broker(copy)
        assert broker.medians.items() <= kept.items()
        broker.note(7.0, "after")
        assert broker.db.close(WAIT_S)
        assert broker.db.dropped == 0
        again = Broker(copy)
        assert again.medians[KERNELS[0], "after"] == 7.0
        assert again.db.close(WAIT_S)
        outcomes.add("renamed" if bad_files(copy) else "row dropped" if len(broker.medians) < len(kept) else "harmless")
    assert outcomes == {"renamed", "row dropped", "harmless"}


def test_a_row_with_a_changed_value_is_left_out_and_told(path: Path, start: Callable[..., Broker]) -> None:
    """Also when SQLite itself wrote it."""
    fill(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE measurements SET median_us = 2 * median_us WHERE key = 'key 1'")
    db.commit()
    db.close()
    broker = start()
    assert set(broker.medians) == {(KERNELS[0], "key 0"), (KERNELS[0], "key 2")}
    assert "1 damaged rows" in broker.db.problems[0]
    assert len(start().medians) == 2


@pytest.mark.parametrize(
    "change", [{"median_us": 0.0}, {"median_us": float("inf")}, {"count": 0}, {"key": b"x"}, {"p95_us": "fast"}]
)
def test_a_row_that_cannot_be_is_left_out_whatever_its_checksum_says(
    path: Path, start: Callable[..., Broker], change: dict[str, Any]
) -> None:
    """The score divides by it."""
    store, _ = Store.open(path)
    store.close()
    row = Measurement(KERNELS[0], "a", IDENTITY.hash, "torch", 1, 5.0, 5.0, 0.0, 0.0, time.time())
    values = astuple(replace(row, **change))
    db = sqlite3.connect(path)
    db.execute(f"INSERT INTO measurements VALUES ({', '.join('?' * 11)})", (*values, checksum(values)))
    db.commit()
    db.close()
    assert start().medians == {}


def test_damage_found_in_use_begins_a_new_file(path: Path, start: Callable[..., Broker]) -> None:
    """A disk goes bad while the broker runs; what it knows is stored again."""
    broker = start()
    broker.note(5.0, "a")
    other = sqlite3.connect(path)
    other.execute("DROP TABLE measurements")
    other.commit()
    other.close()
    broker.note(6.0, "b")
    assert len(bad_files(path)) == 1
    assert broker.db.facts()["waiting"] == 0
    assert start().medians == {(KERNELS[0], "b"): 6.0}


def test_of_the_files_set_aside_the_newest_stay(path: Path) -> None:
    """A disk that damages one a day must not fill up with them."""
    fill(path)
    names = []
    for n in range(KEEP_BAD + 2):
        path.write_text(str(n))
        path.with_name("perf.db-wal").write_text("wal")
        names.append(set_aside(path).name)
    assert sorted(p.name for p in bad_files(path)) == sorted(names[-KEEP_BAD:])
    assert len(list(path.parent.glob("*-wal"))) == KEEP_BAD


# --- schema 2


def test_schema_2_is_migrated_with_its_rows(path: Path, start: Callable[..., Broker]) -> None:
    """An update must not cost what was learned. Schema 2 had a table of failures besides."""
    kept = fill(path)
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE failures (backend TEXT PRIMARY KEY, checksum BLOB) WITHOUT ROWID")
    db.execute("INSERT INTO failures VALUES ('torch', x'00')")
    db.commit()
    db.close()
    set_schema(path, 2)
    broker = start()
    assert (broker.medians, broker.db.problems, bad_files(path)) == (kept, [], [])
    db = sqlite3.connect(path)
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    db.close()
    assert tables == {"identities", "measurements"}


# --- other processes

LOCKER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA locking_mode = EXCLUSIVE")
db.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""
WRITER = LOCKER.replace('db.execute("PRAGMA locking_mode = EXCLUSIVE")', "")
HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1] + ".lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(code: str, path: Path) -> Iterator[None]:
    """Does its thing until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        process.stdin.close()


def test_a_file_that_another_process_has_locked_is_used_when_it_is_free(
    path: Path, start: Callable[..., Broker]
) -> None:
    """The broker starts all the same, nothing measured meanwhile is lost, and the file is not harmed."""
    kept = fill(path)
    with other_process(LOCKER, path):
        broker = start()
        assert broker.open_s < OPEN_S
        assert broker.db.facts()["mode"] == "memory"
        assert "locked" in broker.db.problems[0]
        broker.note(7.0, "a")
        assert broker.db.facts()["waiting"] == 1
    broker.note(8.0, "b")
    assert (broker.medians, broker.db.problems) == (kept, [])
    assert start().medians == {**kept, (KERNELS[0], "a"): 7.0, (KERNELS[0], "b"): 8.0}
    assert bad_files(path) == []


def test_a_file_that_gets_locked_in_use_keeps_its_rows_waiting(path: Path, start: Callable[..., Broker]) -> None:
    """A backup of a minute."""
    broker = start()
    broker.note(1.0, "before")
    with other_process(WRITER, path):
        broker.note(2.0, "a")
        broker.note(3.0, "a")
        assert broker.db.facts()["waiting"] == 1
        assert "locked" in broker.db.problems[0]
    broker.note(4.0, "b")
    assert (broker.db.facts()["waiting"], broker.db.problems) == (0, [])
    assert start().medians[KERNELS[0], "a"] == pytest.approx(2.5)


def test_a_damaged_file_is_not_taken_from_under_another_broker(path: Path, start: Callable[..., Broker]) -> None:
    """SQLite corrupts a database that is renamed while somebody has it open."""
    fill(path)
    write_garbage(path)
    with other_process(HOLDER, path):
        broker = start()
        assert broker.db.facts()["mode"] == "memory"
        assert "another broker still has it open" in broker.db.problems[0]
        assert bad_files(path) == []
    broker.note(7.0, "a")
    assert len(bad_files(path)) == 1
    assert start().medians == {(KERNELS[0], "a"): 7.0}


def test_two_brokers_share_a_file(path: Path, start: Callable[..., Broker]) -> None:
    """One user, two runtime folders."""
    one, two = start(), start()
    threads = [
        threading.Thread(target=lambda b=b, n=n: [b.note(5.0, f"{n} {i}") for i in range(20)])
        for n, b in enumerate((one, two))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.db.close(WAIT_S)
    two.db.close(WAIT_S)
    assert (one.db.dropped, two.db.dropped) == (0, 0)
    assert len(start().medians) == 40


# --- places that cannot be written

READ_ONLY = """
import os, pathlib, sys, threading
from layerzero.broker.selection.timings import PerfRow, Stat
from layerzero.broker.storage.perf_rows import Identity
from layerzero.broker.storage.perfdb import PerfDB
if os.getuid() == 0:
    os.setuid(65534)
found = []
db = PerfDB(pathlib.Path(sys.argv[1]), lambda backend, rows: found.extend(rows))
db.identify("torch", Identity(*sys.argv[2].split(",")), ["torch.matmul"])
db.save([PerfRow("torch.matmul", "new", Stat(1, 1.0, 1.0, 0.0, 0.0, 0.0))])
assert db.wait(20)
print(len(found), db.facts()["mode"], db.facts()["waiting"], len(db.problems))
assert db.close(20)
print(db.dropped)
"""


def test_a_store_that_may_only_be_read_is_read() -> None:
    """A container image comes with what was measured for it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "store" / "perf.db"
        fill(path)
        os.chmod(folder, 0o755)
        for file in path.parent.iterdir():
            file.chmod(0o444)
        path.parent.chmod(0o555)
        command = [sys.executable, "-c", READ_ONLY, str(path), ",".join(astuple(IDENTITY))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        path.parent.chmod(0o755)
    assert run.stdout.split() == ["3", "read_only", "1", "1", "1"], run.stderr


@pytest.mark.parametrize("block", ["perf.db.lock", "perf.db-wal"])
def test_a_store_that_cannot_be_locked_is_read(path: Path, start: Callable[..., Broker], block: str) -> None:
    """Something lies where a file of ours must be; when it is gone, what waited is stored."""
    kept = fill(path)
    path.with_name(block).unlink(missing_ok=True)
    path.with_name(block).mkdir()
    broker = start()
    assert broker.db.facts()["mode"] == "read_only"
    assert broker.medians == kept
    broker.note(1.0, "a")
    assert (broker.db.facts()["waiting"], broker.db.dropped) == (1, 0)
    path.with_name(block).rmdir()
    broker.note(2.0, "b")
    assert (broker.db.facts()["mode"], broker.db.problems) == ("file", [])
    assert start().medians == {**kept, (KERNELS[0], "a"): 1.0, (KERNELS[0], "b"): 2.0}


def test_a_folder_that_cannot_be_made_leaves_the_broker_with_its_memory(
    tmp_path: Path, start: Callable[..., Broker]
) -> None:
    """And `lz status` says so."""
    (tmp_path / "file").touch()
    broker = start(tmp_path / "file" / "perf.db")
    broker.note(1.0, "a")
    assert broker.db.facts()["mode"] == "memory"
    assert str(tmp_path) in broker.db.problems[0]
    stat = broker.table.stat(KERNELS[0], "a")
    assert stat is not None
    assert stat.median_us == 1.0
    assert broker.db.close(WAIT_S)
    assert broker.db.dropped == 1


def test_a_full_file_keeps_what_it_has_and_says_so(path: Path, start: Callable[..., Broker]) -> None:
    """The limit makes SQLite take the path of a full disk; rows wait until there is room."""
    broker = start(max_bytes=64 << 10)
    keys = [f"{n:03} {'x' * 500}" for n in range(200)]
    broker.note(1.0, "first")
    broker.note(1.0, *keys)
    assert "full" in broker.db.problems[0]
    assert broker.db.facts()["waiting"] == 200
    assert broker.db.close(WAIT_S)
    assert broker.db.dropped == 200
    assert start().medians == {(KERNELS[0], "first"): 1.0}


def test_a_full_disk_does_not_keep_the_broker_from_starting(tmp_path: Path, start: Callable[..., Broker]) -> None:
    """No room for the file at all, then room."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        broker = start(folder / "perf.db")
        assert broker.open_s < OPEN_S
        broker.note(1.0, "a")
        assert broker.db.facts()["mode"] == "memory"
        assert "full" in broker.db.problems[0] or "I/O" in broker.db.problems[0]
        subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
        broker.note(2.0, "b")
        assert (broker.db.facts()["mode"], broker.db.problems) == ("file", [])
        assert broker.db.close(WAIT_S)
        assert len(start(folder / "perf.db").medians) == 2
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
