"""Functions for tests/process/test_function_placement.py, which may run in the program's own process."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import layerzero as lz

HERE = lz.env("here", requires=["numpy>=1.26", "msgpack; python_version >= '3'"])
NEVER = lz.env("never", requires=["numpy<1.0", "no-such-thing[x]>=2"])
ELSEWHERE = lz.env("elsewhere")  # is built
OTHER_PYTHON = lz.env("other-python", python="3.10" if sys.version_info[:2] != (3, 10) else "3.11")


@lz.isolated(HERE, placement="auto")
def pid(*_: Any) -> int:
    return os.getpid()


@lz.isolated(ELSEWHERE, placement="auto")
def worker_pid(*_: Any) -> int:
    return os.getpid()


@lz.isolated(NEVER, placement="in_process")
def never() -> int:
    return 1


@lz.isolated(HERE, placement="in_process", timeout_s=0.001)
def fill(array: Any, value: float) -> Any:
    array[:] = value
    return {"same": array, 3: {1, 2}}


def like(x: Any) -> Any:
    return x.shape, x.dtype


@lz.isolated(HERE, placement="in_process", shapes=like)
def double(x: Any, *, out: Any) -> Any:
    import numpy as np

    return np.multiply(x, 2, out=out)


class Unspoken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


UNSPOKEN = f"{__name__}.Unspoken"


@lz.isolated(HERE, placement="in_process")
def fail(kind: str) -> None:
    if kind == "exit":
        sys.exit(3)
    if kind == UNSPOKEN:
        raise Unspoken
    raise LookupError(f"no {kind}")


@lz.isolated(HERE, placement="in_process")
def meet(folder: str, me: str, other: str) -> str:
    """Wait for the other one."""
    (Path(folder) / me).touch()
    while not (Path(folder) / other).exists():
        threading.Event().wait(0.001)
    return threading.current_thread().name


@lz.isolated(HERE, placement="in_process")
def outer(depth: int) -> int:
    """Submits itself, from a thread of its own."""
    return 0 if not depth else 1 + int(outer.submit(depth - 1).result())


@lz.isolated(ELSEWHERE)
def keep(value: int) -> list[int]:
    return [value]


@lz.isolated(ELSEWHERE, placement="auto")
def length(value: Any) -> tuple[int, int]:
    return len(value["x"][0]), os.getpid()


def ten() -> int:
    return 10


async def later() -> None: ...


def items() -> Any:
    yield 1


class Class: ...
