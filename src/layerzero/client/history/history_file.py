"""The file of a broker's history: three tiers of Samples in SQLite, each with a place for every slot of its time. A new
slot takes the place of the oldest one, so the file grows to its size and no further."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.client.history.sample import Sample
from layerzero.ipc import kept_files
from layerzero.ipc.errors import InvalidArgument

SCHEMA = 1
APPLICATION_ID = 0x4C5A4853  # "LZHS"
MAX_ROW_BYTES = 2048  # of a slot; calls of kinds that do not fit are counted together
MAX_ROWS_OF_A_KIND = 64
MAX_TEXT_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 16  # of the last answer, compressed: a larger one is not kept
ANSWER = ("up_s", "durations", "queued", "errors", "fallbacks", "restarts")  # what is kept of it: all that is counted
BUSY_S = 1.0


class Tier(NamedTuple):
    """`slots` of `width_s` seconds each."""

    width_s: int
    slots: int

    @property
    def span_s(self) -> int:
        return self.width_s * self.slots


TIERS = (Tier(1, 3600), Tier(10, 8640), Tier(300, 8640))  # an hour, a day, thirty days
MAX_BYTES = 64 << 20  # of the file: what SQLite refuses to pass


class Kept(NamedTuple):
    """A Sample, and when its time began, in seconds since 1970; `width_s` is that of its tier."""

    at: int
    width_s: int
    sample: Sample


def path_of(store: Path, runtime_dir: Path) -> Path:
    """The file of the brokers of a runtime folder."""
    name = hashlib.sha256(str(runtime_dir.absolute()).encode()).hexdigest()[:12]
    return store / "history" / f"{name}.sqlite"


def default_path(environ: Mapping[str, str], runtime_dir: Path) -> Path:
    """Likewise, in the store that the environment names."""
    return path_of(kept_files.store(environ), runtime_dir)


class HistoryFile:
    """An open file; to be used by one thread at a time. Made by `read` or `write`."""

    def __init__(self, db: sqlite3.Connection, path: Path, lock_fd: int | None = None) -> None:
        self._db = db
        self.path = path
        self._lock_fd = lock_fd
        self._newest: dict[int, tuple[int, Sample]] = {}  # by width of the tier: (its beginning, what is in it)

    @classmethod
    def read(cls, path: Path) -> HistoryFile:
        """Raises InvalidArgument where there is none, or it is none."""
        if not path.is_file():
            raise InvalidArgument(
                f"start a broker that keeps its history: lz up --history, or leave lz dashboard open; there is none in "
                f"{path}"
            )
        try:
            db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, check_same_thread=False
            )
            try:
                _check(db)
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, ValueError) as exc:
            raise InvalidArgument(f"name a file of lz up --history: {path} is none: {exc}") from exc
        return cls(db, path)

    @classmethod
    def write(cls, path: Path) -> HistoryFile | None:
        """None while another process writes it. A file that is damaged, or of another version, is begun anew. Raises
        OSError, sqlite3.Error."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock_fd)
            return None
        try:
            try:
                db = _create(path)
            except (sqlite3.DatabaseError, ValueError):
                for tail in ("", "-wal", "-shm"):
                    path.with_name(path.name + tail).unlink(missing_ok=True)
                db = _create(path)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(db, path, lock_fd)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def add(self, sample: Sample, at: float, answer: Mapping[str, Any] | None = None) -> None:
        """To the slots that the time `at` is in; `answer` of the broker, which the sample ends with, is for who keeps
        the next one. Raises sqlite3.Error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for tier in TIERS:
                slot = int(at // tier.width_s)
                begin, place = slot * tier.width_s, slot % tier.slots
                whole = self._slot(tier.width_s, place, begin)
                whole.add(sample)
                row = (tier.width_s, place, begin, _encoded(whole))
                self._db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?)", row)
            if answer is not None:
                text = json.dumps({name: answer[name] for name in ANSWER}, separators=(",", ":"))
                data = zlib.compress(text.encode(), 1)
                self._db.execute("DELETE FROM answers")
                if len(data) <= MAX_ANSWER_BYTES and len(text) <= MAX_TEXT_BYTES:
                    self._db.execute("INSERT INTO answers VALUES (?, ?)", (at, data))
            self._db.execute("COMMIT")
        except BaseException:
            self._newest.clear()
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise

    def _slot(self, width_s: int, place: int, begin: int) -> Sample:
        """What a slot has so far. The newest ones are here, as no other process writes."""
        at, whole = self._newest.get(width_s, (-1, Sample()))
        if at != begin:
            row = self._db.execute(
                "SELECT data FROM slots WHERE width_s = ? AND place = ? AND at = ?", (width_s, place, begin)
            ).fetchone()
            whole = (None if row is None else _decoded(row[0])) or Sample()
            self._newest[width_s] = begin, whole
        return whole

    def last_answer(self) -> tuple[float, dict[str, Any]] | tuple[None, dict[str, Any]]:
        """(when it came, what `add` was given last); (None, {}) of a file without one. Raises sqlite3.Error."""
        row = self._db.execute("SELECT at, data FROM answers").fetchone()
        answer = None if row is None else _text(row[1])
        if not isinstance(answer, dict) or not all(name in answer for name in ANSWER):
            return None, {}
        return float(row[0]), answer

    def between(self, start: float, end: float, *, most: int = 720) -> list[Kept]:
        """Slots of the finest tier that still has the time from `start` on, at most `most` of them, in order of time: a
        coarser tier where there would be more. Damaged rows are left out."""
        oldest = max(time.time(), end)
        tier = next(
            (one for one in TIERS if start >= oldest - one.span_s and (end - start) / one.width_s <= most), TIERS[-1]
        )
        return list(self._rows(tier, start, end))

    def at(self, moment: float) -> Kept | None:
        """The slot of the finest tier that has this moment in it; None where nothing was kept then."""
        for tier in TIERS:
            begin = moment // tier.width_s * tier.width_s
            if found := list(self._rows(tier, begin, begin)):
                return found[0]
        return None

    @property
    def newest(self) -> float | None:
        """When the newest slot of the finest tier began; None of a file without any."""
        query = "SELECT max(at) FROM slots WHERE width_s = ?"
        [newest] = self._db.execute(query, (TIERS[0].width_s,)).fetchone()
        return None if newest is None else float(newest)

    def span(self) -> tuple[float, float] | None:
        """The oldest and the newest slot's beginning; None of a file without any."""
        oldest, newest = self._db.execute("SELECT min(at), max(at) FROM slots").fetchone()
        return None if oldest is None else (float(oldest), float(newest))

    def _rows(self, tier: Tier, start: float, end: float) -> Iterator[Kept]:
        rows = self._db.execute(
            "SELECT at, data FROM slots WHERE width_s = ? AND at > ? AND at <= ? ORDER BY at",
            (tier.width_s, start - tier.width_s, end),
        )
        for at, data in rows.fetchall():
            sample = _decoded(data)
            if sample is not None and type(at) is int:
                yield Kept(at, tier.width_s, sample)


def _create(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # a second may be lost when the machine loses its power
        db.execute(f"PRAGMA max_page_count = {MAX_BYTES // 4096}")
        db.execute("PRAGMA journal_size_limit = 1048576")
        if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            db.execute(
                "CREATE TABLE slots (width_s INTEGER, place INTEGER, at INTEGER, data BLOB,"
                " PRIMARY KEY (width_s, place)) WITHOUT ROWID"
            )
            db.execute("CREATE INDEX by_time ON slots (width_s, at)")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute("CREATE TABLE IF NOT EXISTS answers (at REAL, data BLOB)")
        _check(db)
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection) -> None:
    """Raises ValueError, sqlite3.Error."""
    found = tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if found != (APPLICATION_ID, SCHEMA):
        raise ValueError(f"its kind and version are {found}; this version writes {(APPLICATION_ID, SCHEMA)}")
    db.execute("SELECT width_s, place, at, data FROM slots LIMIT 0")


def _encoded(sample: Sample) -> bytes:
    most = MAX_ROWS_OF_A_KIND
    while True:
        data = zlib.compress(json.dumps(sample.shortened(most).to_dict(), separators=(",", ":")).encode(), 1)
        if len(data) <= MAX_ROW_BYTES or most == 1:
            return data
        most //= 2


def _text(data: object) -> Any:
    """None of what is damaged."""
    try:
        assert isinstance(data, bytes)
        return json.loads(zlib.decompressobj().decompress(data, MAX_TEXT_BYTES))
    except (AssertionError, zlib.error, ValueError, RecursionError):
        return None


def _decoded(data: object) -> Sample | None:
    """None of a row that is damaged."""
    try:
        return Sample.from_dict(_text(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
