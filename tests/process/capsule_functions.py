"""Functions that end their worker, for tests/process/test_function_capsules.py: workers import them by their file."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import layerzero as lz

ONE, OTHER = (
    lz.env("one", from_interpreter=sys.prefix),
    lz.env("other"),
)  # of the tests, which has NumPy; and a bare one


def _strike(how: str) -> None:
    if how == "segv":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(3)
    elif how == "hang":
        threading.Event().wait()


@lz.isolated(ONE)
def scaled(x: Any, how: Any = "", by: float = 2.0, **more: Any) -> Any:
    """Strikes where the first number is 13."""
    _strike(how or ("segv" if float(x[0]) == 13 else ""))
    return [float(x[0]) * by, x.nbytes, sorted(more)]


@lz.isolated(ONE)
def at_any_place(x: Any, *others: Any, note: str = "") -> int:
    """Strikes where 13 is among the numbers."""
    _strike("segv" if 13 in x else "")
    return len(others)


@lz.isolated(ONE)
def of_number(number: int) -> int:
    _strike("segv" if number == 13 else "")
    return number + 1


@lz.isolated(ONE, on_death="rebuild")
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, by: int) -> int:
        _strike("exit" if by == 13 else "")
        self.count += by
        return self.count


@lz.isolated(ONE)
class Forgotten:
    def add(self, by: int) -> int:
        _strike("exit")
        return by


@lz.isolated(ONE, shadow=1.0)
def twice(value: float) -> float:
    return 2 * value


@twice.implementation(OTHER)
def thrice(value: float) -> float:
    return 3 * value


@lz.isolated(ONE)
def either(value: int) -> int:
    _strike("exit")
    return value


@either.implementation(OTHER)
def another(value: int) -> int:
    return value + 1
