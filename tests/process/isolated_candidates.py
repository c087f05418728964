"""Functions for tests/process/test_function_candidates.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz

LEFT, RIGHT = lz.env("left"), lz.env("right")
ARRAYS = [lz.env(f"arrays-{name}", from_interpreter=sys.executable) for name in ("left", "right")]  # with NumPy
ABSENT = lz.env("absent", requires=["packaging==24.0"])


def here() -> str:
    return Path(sys.prefix).name.partition(".")[0]


@lz.isolated([LEFT, RIGHT])
def where() -> str:
    return here()


@lz.isolated([ABSENT, RIGHT])
def wherever_built() -> str:
    return here()


@lz.isolated([LEFT, RIGHT])
def dies_at(names: list[str], notes: str) -> str:
    with Path(notes).open("a") as file:
        file.write(f"{here()}\n")
    if here() in names:
        os.kill(os.getpid(), signal.SIGKILL)
    return here()


@lz.isolated(ARRAYS)
def dies_of(first: Any, last: Any, notes: str) -> float:
    with Path(notes).open("a") as file:
        file.write("run\n")
    if first[0] == last[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(first[0])


@lz.isolated([LEFT, RIGHT], timeout_s=1)
def hangs_at(name: str) -> str:
    while here() == name:
        signal.pause()
    return here()


@lz.isolated([LEFT, RIGHT])
def fails_at(name: str) -> str:
    if here() == name:
        raise LookupError(name)
    return "well"


@lz.isolated(LEFT)
def slow(value: float) -> float:
    """The first one is slow: its times say so."""
    time.sleep(0.02)
    return value


@slow.implementation(RIGHT)
def fast(value: float) -> float:
    return value


@lz.isolated(LEFT, shadow=1.0, tolerance=1e-3)
def shadowed(values: dict[str, Any]) -> dict[str, Any]:
    return values


@shadowed.implementation(RIGHT)
def shadowed_other(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value + 1e-6 if key != "far" else value + 1 for key, value in values.items()}


@lz.isolated([LEFT, RIGHT], keep=True)
def kept() -> list[str]:
    return [here()]


@lz.isolated([LEFT, RIGHT])
def first(items: Any) -> tuple[str, str]:
    return items[0], here()


@lz.isolated([LEFT, RIGHT])
def numbers(end: int) -> Iterator[int]:
    yield from range(end)


@lz.isolated([LEFT, RIGHT], shadow=1.0)
def checked(items: Any) -> Any:
    return items[0]


@lz.isolated([LEFT, RIGHT], timeout_s=1)
async def soon(value: float) -> float:
    return value


def at_once(value: float) -> float:
    return value


@lz.isolated([LEFT, RIGHT], shapes=lambda: ((1,), "float32"))
def filled(*, out: Any) -> Any:
    return out


def made() -> Any:
    return None


@lz.isolated(LEFT)
class Counter:
    @staticmethod
    def of(value: int) -> int:
        return value
