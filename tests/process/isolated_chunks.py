"""Functions for tests/process/test_function_chunks.py, in a module of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import layerzero as lz

PLAIN = lz.env("plain")


def note(folder: str, what: object) -> None:
    with (Path(folder) / "runs").open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


def runs(folder: Path) -> list[str]:
    """What was noted, without the processes."""
    file = folder / "runs"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


@lz.isolated(PLAIN)
def add(one: Any, other: Any = 1) -> Any:
    return one + other


@lz.isolated(PLAIN)
def halve(folder: str, number: int) -> int:
    note(folder, number)
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


@lz.isolated(PLAIN)
def strange(number: int) -> Any:
    return object() if number == 3 else number


@lz.isolated(PLAIN)
def dies_once(folder: str, number: int) -> int:
    note(folder, number)
    if number == 2 and len(runs(Path(folder))) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@lz.isolated(PLAIN)
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@lz.isolated(PLAIN)
async def later(number: int) -> int:
    return number
