"""The file behind PerfDB: the only SQL of the broker. No byte of the file is trusted: damaged rows are
dropped, a damaged file is set aside.

Brokers of several runtime folders may share one file. Each holds `PATH.lock` shared while it has the file open; only
who gets it exclusively may rename the file: SQLite must not lose it under an open connection (howtocorrupt.html, 2.4).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields
from pathlib import Path
from urllib.parse import quote

from layerzero.broker.selection.timings import MAX_ROWS
from layerzero.broker.storage.perf_rows import Identity, Measurement, checksum

SCHEMA = 3
APPLICATION_ID = 0x4C5A5044  # "LZPD"
BUSY_S = 0.2  # how long a statement waits for another process
MAX_BYTES = 64 << 20
MAX_STORED = 20_000  # measurements; the oldest go
KEEP_BAD = 3
_PAGE = 4096


class Unavailable(Exception):
    """The file cannot be used now; it is left as it is."""


class ReadOnly(Unavailable):
    """The file cannot be written; perhaps it can be read."""


class Damaged(Exception):
    """The file is not what this program writes."""


_IDENTITY = [field.name for field in fields(Identity)]
_MEASUREMENT = [field.name for field in fields(Measurement)]
_CREATE = (
    # The identity in words, once: for people who ask what the hash in a row stands for.
    f"CREATE TABLE identities (identity TEXT PRIMARY KEY, {', '.join(f'{n} TEXT NOT NULL' for n in _IDENTITY)})"
    " WITHOUT ROWID",
    "CREATE TABLE measurements (kernel_id TEXT, key TEXT, identity TEXT, backend TEXT, count INTEGER, median_us REAL,"
    " p95_us REAL, variance_us REAL, warmup_ms REAL, measured_at REAL, checksum BLOB,"
    " PRIMARY KEY (kernel_id, key, identity)) WITHOUT ROWID",
)
# The statement that leads from each older schema to the next one. A file of any other is set aside.
_MIGRATIONS = {2: "DROP TABLE failures"}  # which nobody read


def _put_measurement(db: sqlite3.Connection, row: Measurement) -> None:
    values = astuple(row)
    db.execute(
        f"INSERT INTO measurements VALUES ({', '.join('?' * (len(values) + 1))}) ON CONFLICT DO UPDATE SET"
        f" {', '.join(f'{n} = excluded.{n}' for n in (*_MEASUREMENT[3:], 'checksum'))}",
        (*values, checksum(values)),
    )


class Store:
    """One open file. Made by `Store.open`; to be used by the thread that opened it."""

    def __init__(self, db: sqlite3.Connection, lock_fd: int | None) -> None:
        self._db = db
        self._lock_fd = lock_fd
        self.damaged_rows = 0

    @property
    def is_read_only(self) -> bool:
        return self._lock_fd is None

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_BYTES, damage: str = "") -> tuple[Store, str]:
        """The open file, and a text that says what was wrong with it, or "". A damaged one is set aside and made anew.

        damage: what was found wrong with the file in use, which the check at opening does not see.

        Raises Unavailable when there is no way to store anything now. Takes well below a second: it waits for no lock
        longer than BUSY_S, and the size of what it checks is bounded.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            return cls._open_read_only(path, exc)
        try:
            _flock(lock_fd, fcntl.LOCK_SH, "another broker is replacing it")
            problem = ""
            try:
                if damage:
                    raise Damaged(damage)
                db = _connect(path, max_bytes)
            except Damaged as exc:
                _flock(lock_fd, fcntl.LOCK_EX, f"it is damaged ({exc}) and another broker still has it open")
                problem = f"{exc}; it was renamed to {set_aside(path).name} and begun anew"
                _flock(lock_fd, fcntl.LOCK_SH, "another broker is replacing it")
                db = _connect(path, max_bytes)
        except ReadOnly as exc:
            os.close(lock_fd)
            return cls._open_read_only(path, exc)
        except (Damaged, OSError) as exc:
            os.close(lock_fd)
            raise Unavailable(str(exc)) from exc
        except Unavailable:
            os.close(lock_fd)
            raise
        return cls(db, lock_fd), problem

    @classmethod
    def _open_read_only(cls, path: Path, why: Exception) -> tuple[Store, str]:
        """`immutable`: SQLite needs no lock and no -shm file then. Rows that a writer changes meanwhile fail their
        checksum."""
        try:
            db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True, timeout=BUSY_S)
            try:
                with _translated():
                    _check(db, path, MAX_BYTES)
                    version = db.execute("PRAGMA user_version").fetchone()[0]
                    if version != SCHEMA:
                        raise Unavailable(f"it has schema {version} and cannot be migrated where it is")
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, OSError, Damaged, Unavailable) as exc:
            raise Unavailable(f"it can be neither written ({why}) nor read ({exc})") from exc
        _set_reader(db)
        return cls(db, None), f"it can be read but not written ({why}); what is measured waits in memory"

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # on a full disk the checkpoint fails; the WAL stays and is replayed
            self._db.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def load(self, backend: str, identity: Identity) -> list[Measurement]:
        """Rows of exactly this identity, newest first; damaged ones are dropped and counted. Raises Damaged and
        Unavailable."""
        with _translated():
            found = self._db.execute(
                f"SELECT {', '.join(_MEASUREMENT)}, checksum FROM measurements WHERE identity = ? AND backend = ?"
                " ORDER BY measured_at DESC LIMIT ?",
                (identity.hash, backend, MAX_ROWS),
            ).fetchall()
        rows, damaged = [], []
        for *values, check in found:
            row = Measurement(*values)
            if check != checksum(values) or not row.is_possible:
                damaged.append(row)
            else:
                rows.append(row)
        self.damaged_rows += len(damaged)
        if damaged and not self.is_read_only:
            self._drop(damaged)
        return rows

    def save(self, identities: Iterable[Identity], measurements: Iterable[Measurement]) -> None:
        """All or nothing. Raises Damaged and Unavailable."""
        with _transaction(self._db):
            for identity in identities:
                self._db.execute(
                    f"INSERT OR REPLACE INTO identities VALUES (?, {', '.join('?' * len(_IDENTITY))})",
                    (identity.hash, *astuple(identity)),
                )
            for row in measurements:
                _put_measurement(self._db, row)

    def prune(self) -> None:
        """Delete the oldest measurements beyond MAX_STORED, and identities that none has."""
        with _transaction(self._db):
            oldest = "SELECT measured_at FROM measurements ORDER BY measured_at DESC LIMIT 1 OFFSET ?"
            found = self._db.execute(oldest, (MAX_STORED,)).fetchone()
            self._db.execute("DELETE FROM measurements WHERE measured_at <= ?", (found[0] if found else 0.0,))
            self._db.execute("DELETE FROM identities WHERE identity NOT IN (SELECT identity FROM measurements)")

    def _drop(self, rows: Iterable[Measurement]) -> None:
        """Delete rows that failed their checksum; the next measurement stores them again."""
        with _transaction(self._db):
            for row in rows:
                self._db.execute(
                    "DELETE FROM measurements WHERE kernel_id = ? AND key = ? AND identity = ?",
                    (row.kernel_id, row.key, row.identity),
                )


def keys(path: Path) -> list[str]:
    """The buckets of calls that the file has times of, whatever they were measured on. Raises Unavailable, Damaged."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S)) as db:
            with _translated():
                return [str(key) for (key,) in db.execute("SELECT DISTINCT key FROM measurements")]
    except sqlite3.Error as exc:
        raise Unavailable(f"{path}: {exc}") from exc


def set_aside(path: Path) -> Path:
    """Rename the file with its -wal and -shm, which SQLite would take for those of the next file at this path. Of files
    set aside so, the newest KEEP_BAD stay. Returns the new path."""
    now_ns = time.time_ns()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_ns / 1e9))
    bad = path.with_name(f"{path.name}.bad-{stamp}-{now_ns % 10**9:09d}")
    path.rename(bad)
    for tail in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + tail).rename(bad.with_name(bad.name + tail))
    old = sorted({p.name.partition("-wal")[0].partition("-shm")[0] for p in path.parent.glob(f"{path.name}.bad-*")})
    for name in old[:-KEEP_BAD]:
        for tail in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                path.with_name(name + tail).unlink()
    return bad


def _flock(fd: int, kind: int, otherwise: str) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as exc:
        raise Unavailable(otherwise) from exc


def _connect(path: Path, max_bytes: int) -> sqlite3.Connection:
    """Open, check, create or migrate. Raises Damaged, ReadOnly, Unavailable."""
    if path.exists() and not path.is_file():
        raise Damaged("it is not a file")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would make it readable for all
    except OSError as exc:
        raise ReadOnly(str(exc)) from exc
    with _translated():
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            _set_reader(db)
            _check(db, path, max_bytes)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA max_page_count = {max_bytes // _PAGE}")
            _upgrade(db)
        except BaseException:
            db.close()
            raise
    return db


def _set_reader(db: sqlite3.Connection) -> None:
    """Text with a flipped byte is for the checksum to refuse, not for the decoder."""
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")


def _check(db: sqlite3.Connection, path: Path, max_bytes: int) -> None:
    if path.stat().st_size > 2 * max_bytes:
        raise Damaged(f"it has {path.stat().st_size} bytes; this broker writes {max_bytes} at most")
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise Damaged(str(found).replace("\n", " "))


def _upgrade(db: sqlite3.Connection) -> None:
    """Bring the schema to ours, in one transaction."""
    with _transaction(db):
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                raise Damaged("it has tables and no schema version")
            for statement in _CREATE:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        elif db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise Damaged("it belongs to another program")
        elif version > SCHEMA:
            raise Damaged(f"its schema is {version}, newer than this program's {SCHEMA}")
        else:
            for step in range(version, SCHEMA):
                if step not in _MIGRATIONS:
                    raise Damaged(f"nothing leads from its schema {version} to {SCHEMA}")
                db.execute(_MIGRATIONS[step])
        if version != SCHEMA:
            db.execute(f"PRAGMA user_version = {SCHEMA}")
        db.execute(f"SELECT identity, {', '.join(_IDENTITY)} FROM identities LIMIT 0")
        db.execute(f"SELECT {', '.join(_MEASUREMENT)}, checksum FROM measurements LIMIT 0")


_NOT_NOW = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}
_NO_WRITING = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise SQLite's errors as Unavailable, ReadOnly or Damaged, which say what to do about them."""
    try:
        yield
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _NOT_NOW:
            raise Unavailable(str(exc)) from exc
        if code in _NO_WRITING:
            raise ReadOnly(str(exc)) from exc
        raise Damaged(str(exc)) from exc
    except UnicodeDecodeError as exc:  # what SQLite says of a damaged file may quote it
        raise Damaged(f"its text is no UTF-8: {exc}") from exc


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    with _translated():
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # the error that led here is the one to tell
                    db.execute("ROLLBACK")
            raise
