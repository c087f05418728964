"""What a long build shows on a terminal."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from layerzero.envs.build.progress import done_text

_WIDTH = 48  # of a spinner's text: with the name and the time it fits 80 columns


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
