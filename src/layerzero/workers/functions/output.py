"""What functions print, log and warn of: to the worker's log, as ever, and to the caller with the next answer."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions.frames import Frame, Payload
from layerzero.workers.functions.code import MAIN

MAX_CHARS = 64 << 10  # for one answer; the log has all
MAX_NAME, MAX_BASES = 200, 16  # of a warning's category
MAX_LOGGED = 1024  # warnings that are known to be in the log
OUT, ERR, LOG, WARNING = range(4)
_WORKERS = f"{Path(__file__).parents[1]}/"  # whose code calls functions
_root = logging.getLogger()


class Output:
    """Takes stdout, stderr, the records of `logging` and what is warned of from now on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[list[Any]] = []
        self._taken: list[list[Any]] = []
        self._chars = 0
        self._warnings = _Warnings(self, sys.stderr)  # the log: whether a warning is shown the caller's filters say
        sys.stdout = _Tee(sys.stdout, OUT, self)
        sys.stderr = _Tee(sys.stderr, ERR, self)
        self._handler = _Records(self)
        logging.getLogger().addHandler(self._handler)

    def level(self, level: int) -> None:
        """What the caller wants to hear of."""
        if _root.level != level:
            _root.setLevel(level)

    @property
    def has_items(self) -> bool:
        """Whether anything was said since the last time."""
        return bool(self._items)

    def add(self, item: list[Any], chars: int) -> None:
        with self._lock:
            if self._chars < MAX_CHARS:
                self._items.append(item)
            self._chars += chars

    def take(self) -> list[list[Any]]:
        """What was said since the last time: [OUT or ERR, text], [LOG, logger, level, text] and
        [WARNING, names of its category, text, file, line, module]; about the function's caller without a file, and
        with how many callers stand between in the place of the line."""
        if not self._items:
            self._taken = []
            return []
        with self._lock:
            items, chars = self._items, self._chars
            self._items, self._chars = [], 0
        self._warnings.forget()
        if chars > MAX_CHARS:
            items.append([ERR, f"... {chars - MAX_CHARS} more characters are in the worker's log\n"])
        self._taken = items
        return items

    @contextmanager
    def nobodys(self) -> Iterator[None]:
        """What is said inside is in the log alone."""
        count, chars = len(self._items), self._chars
        try:
            yield
        finally:
            with self._lock:
                del self._items[count:]
                self._chars = chars
            self._warnings.forget()

    def put_back(self) -> None:
        """What was taken last, for an answer that was not made: the next one has it."""
        with self._lock:
            self._items[:0] = self._taken

    def answer(
        self,
        before: list[Any],
        *after: Any,
        payload: Payload,
        what: str,
        results: str = "result",
        is_placed: bool = False,
    ) -> Frame:
        """A frame with what was said between these. Raises InvalidArgument, as Frame, and has taken nothing then."""
        head = [*before, self.take(), *after]
        try:
            return Frame(head, payload, is_placed=is_placed, of=f"{what}, and {results}")
        except InvalidArgument:
            self.put_back()
            raise


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

    def __getattr__(self, name: str) -> Any:
        """What files have besides."""
        if name.startswith("_"):  # of a copy that has nothing yet, for one
            raise AttributeError(name)
        return getattr(self._below, name)

    @property
    def buffer(self) -> BinaryIO:
        """The worker's log alone, as what C code prints. What is made of it may close it, and the log stays open."""
        return open(self.fileno(), "wb", buffering=0, closefd=False)

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


class _Warnings:
    """What is warned of: once for each answer, whatever was before, since callers have filters of their own."""

    def __init__(self, output: Output, below: TextIO) -> None:
        self._output, self._below = output, below
        self._told: set[tuple[str, ...]] = set()  # to the caller, with the next answer
        self._logged: set[tuple[str, ...]] = set()
        self._modules: dict[str, str] = {}  # by file
        self._show = warnings.showwarning
        warnings.showwarning = self.show
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of what is collected, which is of no call

    def forget(self) -> None:
        """An answer has taken what was told."""
        self._told.clear()

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """As warnings.showwarning."""
        if file is not None:
            self._show(message, category, filename, lineno, file, line)
            return
        text = str(message)[:MAX_CHARS]
        names = [f"{_named_there(one.__module__)}.{one.__qualname__}"[:MAX_NAME] for one in category.__mro__]
        key = (names[0], text, filename, str(lineno))
        about = [filename, lineno, self._module_of(filename)]
        if filename.startswith(_WORKERS):
            about = ["", _callers_between(filename, lineno), ""]
        if key not in self._logged:
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged.add(key)
            self._below.write(warnings.formatwarning(text, category, filename, lineno, line))
        if key not in self._told:
            self._told.add(key)
            item = [WARNING, names[: names.index("builtins.Warning") + 1][:MAX_BASES], text]
            self._output.add([*item, *about], len(text))

    def _module_of(self, file: str) -> str:
        """The module that code is of, for filters by module; empty for none."""
        if file not in self._modules:
            named = ((name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items()))
            self._modules[file] = next((_named_there(name) for name, its in named if its.get("__file__") == file), "")
        return self._modules[file]


def _callers_between(file: str, line: int) -> int:
    """How many frames lie between the function and the one of the worker's that is at this line."""
    count, frame = -1, sys._getframe(2)  # of what told Output.show
    while frame.f_back is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
        count += count >= 0 or frame.f_code.co_filename.startswith(_WORKERS)
    return max(count, 0)


def _named_there(module: str) -> str:
    """A module's name in the caller."""
    return "__main__" if module == MAIN else module
