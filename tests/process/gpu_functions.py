"""Functions for tests/process/test_gpu_functions.py: in a worker that has the GPU of threads, and CuPy for it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import layerzero as lz

THERE = lz.env("there", from_interpreter=sys.executable)
PAIR = lz.env("pair-there", from_interpreter=sys.executable, workers=2)
BARE = lz.env("bare")
SLOW_S = 0.3


def _soft() -> Any:
    """CuPy for the GPU of threads, once this process has it."""
    if "cupy" not in sys.modules:
        from tests.soft_gpu import soft_cupy

        soft_cupy.install()
    return sys.modules["cupy"]


@lz.isolated(THERE)
def prepare() -> int:
    """To be called before the first array on the GPU comes."""
    _soft()
    return os.getpid()


@lz.isolated(THERE)
def scaled(x: Any, factor: float = 2.0) -> Any:
    return x * factor


@lz.isolated(THERE)
def several(x: Any, y: Any) -> dict[str, Any]:
    return {"sum": x + y, "parts": [x * 2.0, (y * 3.0, "text", None)], "size": x.size}


@lz.isolated(THERE)
def slow(x: Any) -> Any:
    """Its stream is busy for a while before the result is there; it returns at once."""
    from tests.soft_gpu import soft_cupy
    from tests.soft_gpu.soft_gpu import driver

    driver.put(soft_cupy.current().ptr, lambda: time.sleep(SLOW_S))
    return x * 2.0


@lz.isolated(THERE)
def same(x: Any) -> Any:
    return x


@lz.isolated(THERE)
def described(*arrays: Any) -> list[Any]:
    return [(type(one).__name__, tuple(one.shape), tuple(one.strides), one.get().tolist()) for one in arrays]


@lz.isolated(THERE)
def made_there() -> Any:
    """Of a call without arrays on a GPU."""
    return _soft().empty((4,))


def like(x: Any, *_: Any) -> Any:
    return x.shape, x.dtype


@lz.isolated(THERE, shapes=like)
def into(x: Any, keeps: bool = True, *, out: Any) -> Any:
    driver_copy = x * 2.0
    out[...] = driver_copy.get()
    return out if keeps else x * 3.0


@lz.isolated(THERE)
def leave(x: Any, code: int) -> None:
    os._exit(code)


@lz.isolated(THERE)
def leave_later(x: Any, gate: str) -> Any:
    """It has answered, and its stream is under way when the test ends its process."""
    from tests.soft_gpu import soft_cupy
    from tests.soft_gpu.soft_gpu import driver

    def wait() -> None:
        while Path(gate).exists():
            time.sleep(0.001)

    driver.put(soft_cupy.current().ptr, wait)
    return x * 2.0


@lz.isolated(THERE)
def act(x: Any, what: str = "", value: Any = 2.0) -> Any:
    """Do this, and give the array so many times."""
    match what:
        case "print":
            print("hello " * value)
            return x * 2.0
        case "raise":
            raise LookupError(value)
        case "rows":
            return x[: int(value)] * 2.0
        case "several":
            return {"twice": x * 2.0, "rest": [value, (x * 3.0, None)]}
        case "text":
            return f"{x.shape} {value!r}"
        case "nothing":
            return None
        case "here":
            return x.get()
        case "die":
            os._exit(3)
        case "end":
            x.get()  # what calls before it have enqueued is done
            os._exit(3)
        case "die once":
            if not Path(value).exists():
                Path(value).touch()
                os._exit(3)
            return x * 2.0
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                signal.pause()
        case "nap":
            time.sleep(value)
        case "note":
            path, nap_s = value.rsplit(" ", 1)
            with Path(path).open("a") as file:
                file.write("run\n")
            time.sleep(float(nap_s))
            return x * 2.0
        case "where":
            return os.getpid()
    return x * float(value)


_sums: dict[str, Any] = {}


@lz.isolated(THERE)
def summed(x: Any, name: str) -> Any:
    """State on the GPU that programs share."""
    _sums[name] = x * 1.0 if name not in _sums else _sums[name] + x
    return _sums[name]


@lz.isolated(THERE)
def fail(x: Any) -> None:
    raise LookupError("no such thing")


@lz.isolated(THERE)
class Total:
    """State on the GPU, which calls of any stream add to."""

    def __init__(self, first: Any) -> None:
        self.sum = first

    def add(self, x: Any) -> None:
        self.sum = self.sum + x

    def found(self) -> list[float]:
        """Of a call without arrays on the GPU."""
        found: list[float] = self.sum.get().tolist()
        return found

    def on_gpu(self, x: Any) -> Any:
        return self.sum + x * 0.0

    def steps(self, x: Any, count: int) -> Any:
        """Items on the GPU, of the state that it has, of two sizes and beside others."""
        for number in range(count):
            self.sum = self.sum + x
            yield self.sum if number % 3 else {"of": number, "sum": self.sum[:2]}

    async def later(self, x: Any, count: int) -> Any:
        for number in range(count):
            yield self.sum + x * float(number)

    def all(self) -> Any:
        """Items on the GPU of a method without arrays."""
        yield 1
        yield self.sum


@lz.isolated(THERE)
def rows(x: Any) -> Any:
    for number in range(3):
        yield (x * float(number)).get()


@lz.isolated(THERE)
def steps(x: Any, count: int) -> Any:
    """Items on the GPU: of the state that it has, and beside others; the last ones are shorter."""
    for number in range(count):
        x = x + 1.0
        yield x if number % 3 else {"of": number, "x": x[: 2 if number > count // 2 else 4]}


@lz.isolated(THERE)
def until(x: Any, count: int, end: str) -> Any:
    """So many items on the GPU, and then this."""
    for number in range(count):
        yield x * float(number)
    match end:
        case "raise":
            raise LookupError("no more")
        case "strange":
            yield [x, object()]
        case "die":
            os._exit(3)


@lz.isolated(THERE)
def made(count: int) -> Any:
    """Items on the GPU of a call without arrays there."""
    yield 0
    for _ in range(count):
        yield [_soft().empty((4,))]


@lz.isolated(THERE)
def blocks() -> int:
    """Allocations on the GPU that somebody has here."""
    return live_blocks()


def live_blocks() -> int:
    """Likewise, of this process."""
    from tests.soft_gpu import soft_cupy

    gc.collect()
    return sum(type(one) is soft_cupy._Block for one in gc.get_objects())


@lz.isolated(THERE)
def awaited(x: Any, gate: str) -> Any:
    """The second item needs what its taker does with the first one."""
    yield x + 1.0
    while not Path(gate).exists():
        time.sleep(0.001)
    yield x + 2.0


@lz.isolated(BARE)
def without_a_gpu(x: Any) -> Any:
    return x


@lz.isolated(THERE)
def both(x: Any, y: Any) -> tuple[Any, Any]:
    return x, y


@lz.isolated(PAIR)
def prepare_pair(folder: str) -> int:
    """To be called by as many at once as there are workers."""
    _soft()
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.002)
    return os.getpid()


@lz.isolated(PAIR)
def spread(x: Any) -> tuple[Any, int]:
    return x + 1.0, os.getpid()
