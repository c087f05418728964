"""Functions that are called without arrays on a GPU and give some, for tests/process/test_function_device.py: in a
worker that has the GPU of threads, and CuPy for it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import layerzero as lz

THERE = lz.env("there", from_interpreter=sys.executable)
OTHER = lz.env("other-there", from_interpreter=sys.executable)
PAIR = lz.env("pair-there", from_interpreter=sys.executable, workers=2)
BARE = lz.env("bare")

if "layerzero.workers.loop" in sys.modules:  # a worker, which has CuPy from here on; the bare one has no NumPy
    with contextlib.suppress(ModuleNotFoundError):
        from tests.soft_gpu import soft_cupy

        soft_cupy.install()


@lz.isolated(THERE)
def prepare() -> int:
    return os.getpid()


def _filled(count: int, value: float, dtype: str = "float32") -> Any:
    made = sys.modules["cupy"].empty((count,), dtype)
    made.fill(value)
    return made


@lz.isolated(THERE, device="cuda:0")
def load(count: int, value: float = 1.0, dtype: str = "float32") -> Any:
    return _filled(count, value, dtype)


@lz.isolated(THERE)
def made(count: int, value: float = 1.0) -> Any:
    return _filled(count, value)


@lz.isolated(THERE, device="cuda")
def act(what: str, value: Any = None) -> Any:
    match what:
        case "several":
            return {"ones": _filled(3, 1.0), "rest": [value, (_filled(5, 2.0, "int64"), None)]}
        case "number":
            return 7
        case "host":
            import numpy as np

            return np.arange(4.0)
        case "empty":
            return _filled(0, 1.0)
        case "raise":
            raise LookupError(value)
        case "die":
            os._exit(3)
        case "add":
            return value + _filled(4, 1.0)
    return what


@lz.isolated(THERE, device="cuda")
def slow(count: int, gate: str) -> Any:
    """Its stream is busy while there is a file, and then the result is there; it returns at once."""
    from tests.soft_gpu import soft_cupy
    from tests.soft_gpu.soft_gpu import driver

    def wait() -> None:
        while Path(gate).exists():
            time.sleep(0.001)

    driver.put(soft_cupy.current().ptr, wait)
    return _filled(count, 4.0)


@lz.isolated(THERE, device="cuda")
def frames(count: int, size: int) -> Any:
    for number in range(count):
        yield _filled(size + number // 3, number) if number % 3 else {"of": number, "x": _filled(2, number)}


@lz.isolated(THERE)
def arrays(count: int) -> Any:
    return [_filled(2, number) for number in range(count)]


@lz.isolated(THERE, device="cuda")
async def later(value: float) -> Any:
    return _filled(4, value)


@lz.isolated(THERE, device="cuda")
class Model:
    """State on the GPU, of a call without arrays."""

    def __init__(self, value: float) -> None:
        self.weights = _filled(4, value)

    def add(self, value: float) -> Any:
        self.weights = self.weights + value
        return self.weights

    def steps(self, count: int) -> Any:
        for number in range(count):
            yield self.weights * float(number)

    def numbers(self, count: int) -> Any:
        yield from range(count)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        if at >= 3:
            raise IndexError(at)
        return self.weights * float(at)


@lz.isolated(THERE)
class Plain:
    """As Model, of those that name no GPU."""

    def __init__(self, value: float) -> None:
        self.weights = _filled(4, value)

    def found(self) -> Any:
        return self.weights


def like(count: int, value: float = 1.0) -> Any:
    return (count,), "float32"


@lz.isolated(THERE, shapes=like, device="cuda")
def into(count: int, value: float = 1.0, *, out: Any) -> Any:
    if hasattr(out, "fill"):
        out.fill(value)
    return out


@lz.isolated([THERE, OTHER], shadow=1.0, device="cuda")
def anywhere(value: float) -> Any:
    return _filled(3, value)


@lz.isolated(PAIR, device="cuda")
def spread(value: float) -> tuple[Any, int]:
    return _filled(3, value), os.getpid()


@lz.isolated(BARE, device="cuda")
def without_a_gpu(value: float) -> Any:
    return value
