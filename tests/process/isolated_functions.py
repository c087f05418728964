"""Functions for tests/process/test_functions.py and tests/process/test_function_files.py, in a module of their own:
workers import it by its file."""

from __future__ import annotations

import enum
import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import layerzero as lz

PLAIN = lz.env("plain")
UNBUILT = lz.env("unbuilt", requires=["packaging==24.0"])

LATE, LATER, LATEST, TOGETHER = lz.env("late"), lz.env("later"), lz.env("latest"), lz.env("together")


if not hasattr(lz, "connect"):  # in a worker; as scripts do whose terminal has another encoding
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")


class Colour(enum.Enum):
    RED = 1
    BLUE = (2, "b")


@dataclass(frozen=True)
class Box:
    name: str
    size: tuple[int, int]
    inner: list[Box] = field(default_factory=list)


@lz.isolated(PLAIN)
def echo(value: Any = None) -> Any:
    return value


@lz.isolated(PLAIN)
def place() -> tuple[int, str, str, bool]:
    return os.getpid(), __name__, sys.prefix, hasattr(lz, "connect")


@lz.isolated(PLAIN)
def grow(box: Box, colour: Colour) -> Box:
    return Box(f"{box.name} {colour.name}", (box.size[0] + 1, box.size[1]), [box])


@lz.isolated(PLAIN)
def fail(text: str) -> None:
    raise LookupError(f"no {text}")


@lz.isolated(UNBUILT, timeout_s=5)
def doubled(value: int) -> int:
    return 2 * value


@lz.isolated(PLAIN)
def calls_another(values: list[int], how: str) -> list[int]:
    """Of another environment, in its own place."""
    if how == "submit":
        return [doubled.submit(one).result() for one in values]
    return [doubled(values[0]), *doubled.options(timeout_s=1).map(values[1:]), doubled.local(1)]


@lz.isolated(PLAIN)
def read(path: str) -> str:
    return Path(path).read_text()


@lz.isolated(PLAIN)
def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


@lz.isolated(PLAIN)
def leave(code: int) -> None:
    sys.exit(code)


class SoonGone(DeprecationWarning):
    """A category of the program's own."""


class Pair(UserWarning):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


@lz.isolated(PLAIN)
def warn(kind: str = "", times: int = 1) -> str:
    class OddWarning(RuntimeWarning):
        """That no caller has."""

    for _ in range(times):
        category = {"own": SoonGone, "odd": OddWarning, "deprecated": DeprecationWarning}.get(kind, UserWarning)
        warnings.warn(Pair(1, 2) if kind == "pair" else category("mind the gap"), stacklevel=1)
    return "done"


@lz.isolated(PLAIN)
def warn_of(text: str) -> None:
    warnings.warn(text, stacklevel=1)


@lz.isolated(PLAIN)
def warn_at(level: int) -> int:
    """As libraries do of what is deprecated, about the code that calls."""
    warnings.warn("mind the gap", DeprecationWarning, stacklevel=level)
    return level


@lz.isolated(PLAIN)
def warn_each_at(level: int) -> Iterator[int]:
    warnings.warn("mind the gap", DeprecationWarning, stacklevel=level)
    yield level


@lz.isolated(PLAIN)
def write_bytes(data: bytes) -> int:
    """As libraries do that write bytes to a terminal."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    written = sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return written


@lz.isolated(PLAIN)
def warn_each(count: int) -> Iterator[int]:
    for number in range(count):
        warnings.warn(f"item {number}", stacklevel=1)
        yield number


@lz.isolated(PLAIN)
def warn_and_fail() -> None:
    warnings.warn("before", stacklevel=1)
    raise LookupError("gone")


@lz.isolated(PLAIN)
def talk() -> None:
    print("one", "two")
    print("three", file=sys.stderr)
    logging.getLogger("shop.sales").warning("sold %d", 3)
    logging.getLogger("shop.sales").debug("nobody wants to hear this")


@lz.isolated(PLAIN)
def text_of(size: int) -> str:
    return "x" * size


@lz.isolated(PLAIN)
def keyword(size: int = 0, *, path: str) -> str:
    return path * size


@lz.isolated(PLAIN)
def stray() -> Any:
    print("before it cannot cross")
    return {"of": [object()]}


def note_run(path: str) -> int:
    """A line for each time that it runs, and how many there are by now."""
    with Path(path).open("a+") as file:
        file.write(f"{os.getpid()}\n")
        file.seek(0)
        return len(file.readlines())


@lz.isolated(PLAIN)
def dies_at_first(path: str) -> int:
    runs = note_run(path)
    if runs == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return runs


@lz.isolated(PLAIN)
def dies_always(path: str) -> int:
    note_run(path)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@lz.isolated(PLAIN)
def never_ends(path: str) -> None:
    note_run(path)
    while True:
        signal.pause()


@lz.isolated(UNBUILT)
def unbuilt() -> None: ...


def here(*args: Any) -> tuple[str, tuple[Any, ...]]:
    return "here", args


def fails_here(path: str) -> None:
    raise KeyError(path)


class Unspoken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def fails_unspoken(path: str) -> None:
    try:
        raise LookupError(path)
    except LookupError:
        raise Unspoken  # noqa: B904


@lz.isolated(PLAIN)
def elsewhere(*args: Any) -> tuple[str, list[Any]]:
    return "elsewhere", list(args)


@lz.isolated(LATE)
def late() -> None: ...


@lz.isolated(TOGETHER)
def together(value: int) -> int:
    return value


@lz.isolated(LATER)
def later() -> None: ...


@lz.isolated(LATEST)
class Latest:
    def three(self) -> int:
        return 3


@lz.isolated(PLAIN)
def uses_a_class(name: str) -> list[Any]:
    if name:
        getattr(Latest, name)()
    return [Latest.options(timeout_s=1)().three(), Latest.local().three(), hasattr(Latest(), "options")]


@lz.isolated(PLAIN, timeout_s=60)
def debugged(value: int) -> int:
    other = value + 1
    breakpoint()
    return other


@lz.isolated(PLAIN)
def debugged_in_a_loop(count: int) -> int:
    total = 0
    for number in range(count):
        breakpoint()
        total += number
    return total
