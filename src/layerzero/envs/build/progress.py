"""What a long build tells its user while it runs. All of it goes to stderr."""

from __future__ import annotations

import sys
import threading
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

_WIDTH = 48  # of a spinner's text: with the name and the time it fits 80 columns


class Progress(Protocol):
    """Called from the thread that builds; builds of several environments run side by side."""

    def started(self, env: str) -> None: ...

    def phase(self, env: str, text: str) -> None: ...

    def done(self, env: str, seconds: float, nbytes: int) -> None: ...

    def failed(self, env: str, seconds: float, cause: str) -> None: ...


class Quiet:
    """Says nothing."""

    def started(self, env: str) -> None:
        pass

    def phase(self, env: str, text: str) -> None:
        pass

    def done(self, env: str, seconds: float, nbytes: int) -> None:
        pass

    def failed(self, env: str, seconds: float, cause: str) -> None:
        pass


class Lines:
    """One line per step, for logs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def _say(self, env: str, text: str) -> None:
        self._stream.write(f"{env}: {text}\n")  # at once: other builds write, too
        self._stream.flush()

    def started(self, env: str) -> None:
        self._say(env, "started")

    def phase(self, env: str, text: str) -> None:
        self._say(env, text)

    def done(self, env: str, seconds: float, nbytes: int) -> None:
        self._say(env, done_text(seconds, nbytes))

    def failed(self, env: str, seconds: float, cause: str) -> None:
        first = cause.partition("\n")[0]  # whoever asked for the build gets all of it
        self._say(env, f"failed after {seconds:.1f} s: {first}")


class Spinners:
    """A live line per environment, for terminals. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        columns = (SpinnerColumn(finished_text=" "), name, TimeElapsedColumn())
        self._bars = Bars(*columns, TextColumn("{task.fields[text]}"), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Spinners:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def _show(self, env: str, text: str, *, finished: bool = False) -> None:
        with self._lock:
            if env not in self._tasks:
                self._tasks[env] = self._bars.add_task(env, total=1, text="")
            self._bars.update(self._tasks[env], text=escape(text.partition("\n")[0][:_WIDTH]), completed=int(finished))

    def started(self, env: str) -> None:
        self._show(env, "started")

    def phase(self, env: str, text: str) -> None:
        self._show(env, text)

    def done(self, env: str, seconds: float, nbytes: int) -> None:
        self._show(env, done_text(seconds, nbytes), finished=True)

    def failed(self, env: str, seconds: float, cause: str) -> None:
        self._show(env, f"failed: {cause}", finished=True)


def done_text(seconds: float, nbytes: int) -> str:
    return f"built in {seconds:.1f} s, {nbytes / 1e6:.0f} MB"
