"""What a long build tells its user while it runs. All of it goes to stderr."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO


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


def done_text(seconds: float, nbytes: int) -> str:
    return f"built in {seconds:.1f} s, {nbytes / 1e6:.0f} MB"
