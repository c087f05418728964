"""Functions for tests/process/test_function_express.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz

PLAIN = lz.env("plain")
ARRAYS = lz.env("arrays", from_interpreter=sys.executable)  # which has NumPy


@lz.isolated(PLAIN)
def act(what: str, value: Any) -> Any:
    """Do this, and return the value."""
    match what:
        case "print":
            print(value)
        case "raise":
            raise LookupError(value)
        case "large":
            return "x" * value
        case "list":
            return [value, (value, {"of": value})]
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once":
            path = Path(value)
            if not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                signal.pause()
        case "take":  # so many seconds
            end_s = time.monotonic() + value
            while time.monotonic() < end_s:
                pass
        case "where":
            return os.getpid(), sys.prefix
    return value


@lz.isolated(PLAIN, on_death="rebuild")
class Actor:
    """State, and methods that do as `act` does."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def act(self, what: str, value: Any) -> Any:
        if what == "count":
            self.count += 1
            return self.count
        return act(what, value)

    def __len__(self) -> int:
        return self.count


@lz.isolated(PLAIN)
def count_up(folder: str, last: int) -> Any:
    """Numbers; `closed` lies in the folder once it was closed, `LookupError` ends it at `last`."""
    number = 0
    try:
        while number != last:
            number += 1
            yield number
        raise LookupError("the end")
    finally:
        (Path(folder) / "closed").touch()


@lz.isolated(ARRAYS)
def full(number: int) -> Any:
    import numpy as np

    return np.full(384, number, np.float32)


@lz.isolated(ARRAYS)
def fulls(count: int) -> Iterator[Any]:
    import numpy as np

    for number in range(count):
        yield np.full(384, number, np.float32)
