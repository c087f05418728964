"""Functions for tests/process/test_function_pools.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import layerzero as lz

PAIR = lz.env("pair", workers=2)


def note(folder: str) -> list[int]:
    """Leave this process's pid there; all that are there."""
    (Path(folder) / str(os.getpid())).touch()
    return sorted(int(path.name) for path in Path(folder).iterdir())


def meet(folder: str, count: int) -> list[int]:
    """Wait in so many processes at once; their pids. What does not meet runs into its deadline."""
    while len(found := note(folder)) < count:
        time.sleep(0.002)
    return found


@lz.isolated(PAIR, timeout_s=60)
def gather(folder: str, count: int) -> list[int]:
    return meet(folder, count)


@lz.isolated(PAIR)
def pid(_: Any = None) -> int:
    return os.getpid()


@lz.isolated(PAIR)
def dies_once(folder: str) -> int:
    """In the first process alone."""
    if len(note(folder)) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@lz.isolated(PAIR)
def dies(folder: str) -> None:
    note(folder)
    os.kill(os.getpid(), signal.SIGKILL)


@lz.isolated(PAIR, keep=True)
def kept(value: Any) -> Any:
    return [value, os.getpid()]


@lz.isolated(PAIR)
def pid_of(handle: Any) -> tuple[int, int]:
    return handle[1], os.getpid()


@lz.isolated(PAIR)
def count_up(end: int) -> Any:
    for number in range(end):
        yield number, os.getpid()


@lz.isolated(PAIR, on_death="rebuild")
class Member:
    def __init__(self, folder: str, count: int) -> None:
        self.all = meet(folder, count)

    def pid(self) -> int:
        return os.getpid()

    def large(self) -> str:
        return f"{os.getpid()} " * 10_000

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@lz.isolated(PAIR, process="own", on_death="rebuild")
class Alone:
    def __init__(self, fails: bool = False, notes: str = "") -> None:
        if fails:
            raise LookupError("not today")
        if notes:
            with Path(notes).open("a") as file:
                file.write("constructed\n")
        self.calls = 0

    def pid(self) -> int:
        self.calls += 1
        return os.getpid()

    def is_itself(self, other: Any) -> bool:
        return other is self

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
