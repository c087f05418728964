"""The database of measured times: a file of any bytes, or a sound one with rows of any values. It is used, set aside or
refused for now; no row that its broker did not write is believed."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

from tests.fuzz import scratch, values

from layerzero.broker.storage.perf_rows import Identity, Measurement
from layerzero.broker.storage.perf_store import Damaged, Store, Unavailable
from layerzero.broker.storage.perfdb import perf_rows

TYPED = (Damaged, Unavailable)
_FOLDER = scratch.folder()
_IDENTITY = Identity(backend_version="1")
_ROW = Measurement("alpha.silu", "silu|float32|0", _IDENTITY.hash, "alpha", 5, 10.0, 12.0, 0.5, 1.0, 1e9)
_ROWS, _PATCHES = b"R", b"P"
_PLAIN = (type(None), int, float, str)


def run(data: bytes) -> None:
    path = _FOLDER / "perf.db"
    for old in _FOLDER.glob("perf.db*"):
        old.unlink()
    kind, data = data[:1], data[1:]
    if kind == _ROWS:
        _with_rows(path, data)
    elif kind == _PATCHES:
        path.write_bytes(_patched(data))
    else:
        path.write_bytes(data)
    store, _ = Store.open(path)
    try:
        rows = store.load("alpha", _IDENTITY)
        assert [row for row in rows if row != _ROW] == []
        perf_rows(rows, 1.0, 2e9)
        store.prune()
        store.save([_IDENTITY], [_ROW])
        assert store.load("alpha", _IDENTITY)[0] == _ROW
    finally:
        store.close()


def _sound(path: Path) -> None:
    store, problem = Store.open(path)
    assert not problem
    store.save([_IDENTITY], [_ROW])
    store.close()


def _patched(data: bytes) -> bytes:
    """A sound file with a few bytes written over: three bytes of place, one of length, then the bytes."""
    image = bytearray(_image())
    while len(data) > 4:
        at, count = int.from_bytes(data[:3], "little") % len(image), min(data[3], 32)
        image[at : at + count] = data[4 : 4 + count]
        data = data[4 + count :]
    return bytes(image)


def _image(made: list[bytes] = []) -> bytes:  # noqa: B006  # made once
    if not made:
        path = _FOLDER / "sound.db"
        _sound(path)
        made.append(path.read_bytes())
    return made[0]


def _with_rows(path: Path, data: bytes) -> None:
    """A sound file into which somebody has put rows: JSON, a list of rows."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        return
    path.write_bytes(_image())
    db = sqlite3.connect(path)
    with db:
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, list) and len(row) == 11 and all(isinstance(value, _PLAIN) for value in row):
                try:
                    db.execute("INSERT OR REPLACE INTO measurements VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
                except (sqlite3.Error, OverflowError, UnicodeEncodeError):
                    continue
    db.close()


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    if data[:1] != _ROWS:
        return None
    try:
        return _ROWS + values.mutated_text(json.loads(data[1:]), rng)
    except (ValueError, TypeError, RecursionError):
        return None


def seeds() -> dict[str, bytes]:
    row = ["alpha.silu", "other", _IDENTITY.hash, "alpha", 5, 10.0, 12.0, 0.5, 1.0, 1e9, "check"]
    return {
        "rows": _ROWS + json.dumps([row]).encode(),
        "schema_cookie": _PATCHES + (40).to_bytes(3, "little") + b"\x04\0\0\0\x09",
        "page_size": _PATCHES + (16).to_bytes(3, "little") + b"\x02\x02\x00",
        "table_page": _PATCHES + (8192).to_bytes(3, "little") + b"\x04\x0d\xff\xff\xff",
        "version": _PATCHES + (60).to_bytes(3, "little") + b"\x04\0\0\0\x01",
        "no_database": b"not a database at all, but some text",
    }
