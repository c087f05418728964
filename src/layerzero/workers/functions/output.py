"""What functions print and log: to the worker's log, as ever, and to the caller with the next answer."""

from __future__ import annotations

import io
import logging
import sys
import threading
from typing import Any, TextIO

MAX_CHARS = 64 << 10  # for one answer; the log has all
OUT, ERR, LOG = range(3)


class Output:
    """Takes stdout, stderr and the records of `logging` from now on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[list[Any]] = []
        self._chars = 0
        sys.stdout = _Tee(sys.stdout, OUT, self)
        sys.stderr = _Tee(sys.stderr, ERR, self)
        self._handler = _Records(self)
        logging.getLogger().addHandler(self._handler)

    def level(self, level: int) -> None:
        """What the caller wants to hear of."""
        root = logging.getLogger()
        if root.level != level:
            root.setLevel(level)

    def add(self, item: list[Any], chars: int) -> None:
        with self._lock:
            if self._chars < MAX_CHARS:
                self._items.append(item)
            self._chars += chars

    def take(self) -> list[list[Any]]:
        """What was said since the last time: [OUT or ERR, text] and [LOG, logger, level, text]."""
        if not self._items:
            return []
        with self._lock:
            items, chars = self._items, self._chars
            self._items, self._chars = [], 0
        if chars > MAX_CHARS:
            items.append([ERR, f"... {chars - MAX_CHARS} more characters are in the worker's log\n"])
        return items


class _Tee(io.TextIOBase):
    def __init__(self, below: TextIO, kind: int, output: Output) -> None:
        self._below, self._kind, self._output = below, kind, output

    def write(self, text: str) -> int:
        self._below.write(text)
        shown = text[:MAX_CHARS]
        if shown:
            self._output.add([self._kind, shown], len(text))
        return len(text)

    def flush(self) -> None:
        self._below.flush()

    def fileno(self) -> int:
        return self._below.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


class _Records(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as exc:  # arguments that do not fit the text, for one
            text = f"{record.msg!s:.1000} (not formatted: {exc!s:.200})"
        self._output.add([LOG, record.name, record.levelno, text[:MAX_CHARS]], len(text))
