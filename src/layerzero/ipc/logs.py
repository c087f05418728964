"""One JSON line per event on stderr: `log(event, **facts)`. Event names are noun.verb. Shapes, never contents.

Equal records in a row are written once and then counted; the count is written before the next other record, after each
REPEATS_S, and by `flush`. `keep_in(path)` bounds the file that stderr is. Any thread may call.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from layerzero.ipc.wording import bounded, shortened

LIMIT_BYTES = 16 << 20  # then the file is moved to `.log.1`, over the one before
REPEATS_S = 60.0
_lock = threading.Lock()  # of all that follows
_last: tuple[str, dict[str, Any]] | None = None
_repeats = 0
_written_s = 0.0  # when the last record or its count was written
_file: Path | None = None


def log(event: str, **facts: Any) -> None:
    """Write one line; never raises on facts that JSON does not know, they are written as text. Long texts are
    shortened: they may come from anybody."""
    global _last, _repeats
    facts = bounded(facts)
    with _lock:
        if _last == (event, facts):
            _repeats += 1
            if time.monotonic() - _written_s >= REPEATS_S:
                _write_repeats()
            return
        _write_repeats()
        _last = (event, facts)
        _write(json.dumps({"event": event, **facts}, default=lambda value: shortened(str(value))))


def flush() -> None:
    """At a process's end: how often its last record was repeated."""
    with _lock:
        _write_repeats()


def _write_repeats() -> None:
    global _repeats
    if _repeats and _last is not None:
        _write(json.dumps({"event": "record.repeated", "times": _repeats, "record": _last[0]}))
    _repeats = 0


def keep_in(path: Path) -> None:
    """Stderr is appended to this file: from now on it stays below LIMIT_BYTES, and so does its predecessor."""
    global _file
    _file = path


def _write(record: str) -> None:
    global _written_s
    _written_s = time.monotonic()
    with contextlib.suppress(OSError):  # a full disk must not end a broker
        if _file is not None and os.fstat(2).st_size > LIMIT_BYTES:
            _file.replace(_file.with_suffix(".log.1"))
            fd = os.open(_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 2)
            os.close(fd)
        os.write(2, f'{{"time": {time.time():.3f}, {record[1:]}\n'.encode())
