"""Functions of arrays on the GPU of threads that end their worker, for tests/process/test_gpu_function_capsules.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import layerzero as lz

THERE = lz.env("there", from_interpreter=sys.executable)

if "layerzero.workers.loop" in sys.modules:  # a worker, which has CuPy from here on
    from tests.soft_gpu import soft_cupy

    soft_cupy.install()


@lz.isolated(THERE)
def prepare() -> None:
    """To be called before the first array on the GPU comes."""


def _strike(x: Any) -> None:
    if float(_host(x)[0, 0]) == 13:
        os._exit(3)


def _host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x


@lz.isolated(THERE)
def struck(x: Any, y: Any = None, by: float = 2.0) -> Any:
    """Strikes where the first number is 13."""
    _strike(x)
    return x * by if y is None else [x * by, float(y[0])]


@lz.isolated(THERE)
def made(value: float) -> Any:
    """Of no array; strikes where its number is 13."""
    found = sys.modules["cupy"].empty((4, 2))
    found.fill(value)
    _strike(found)
    return found


@lz.isolated(THERE)
def left(x: Any, code: int = 0) -> Any:
    """Ends its worker before its stream has come to it."""
    if code:
        os._exit(code)
    return x * 2.0


@lz.isolated(THERE, on_death="rebuild")
class Total:
    def __init__(self, first: Any) -> None:
        self.sum = first

    def add(self, x: Any) -> None:
        _strike(x)
        self.sum = self.sum + x
