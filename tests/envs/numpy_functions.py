"""Functions for tests/envs/test_functions.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import layerzero as lz

OLD = lz.env("numpy-old", requires=["numpy==1.26.4"], python="3.11")
NEW = lz.env("numpy-new", requires=["numpy>=2.2,<3"], python="3.11")


def echo(value: Any) -> tuple[Any, list[Any]]:
    return value, [str(value.dtype), list(value.shape), value.flags.writeable]


old_echo, new_echo = lz.isolated(OLD)(echo), lz.isolated(NEW)(echo)


@lz.isolated(NEW)
def total(values: Any) -> float:
    if isinstance(values, dict):
        values = list(values.values())
    return sum(map(total, values)) if isinstance(values, list) else float(values.sum())


@lz.isolated(NEW)
def overwrite(array: Any) -> None:
    array[0] = 1


@lz.isolated(NEW)
class Scaled:
    """It keeps the array that it was constructed from."""

    def __init__(self, factors: Any) -> None:
        self.factors = factors

    def of(self, values: Any) -> Any:
        return values * self.factors

    def sees(self, values: Any) -> tuple[bool, bool]:
        return bool(values.flags.writeable), bool(self.factors.flags.writeable)


def like(x: Any, scale: float = 2.0) -> tuple[Any, Any]:
    return x.shape, x.dtype


@lz.isolated(NEW, shapes=like)
def scaled(x: Any, scale: float = 2.0, *, out: Any) -> Any:
    import numpy

    return numpy.multiply(x, scale, out=out)


@lz.isolated(OLD, shapes=lambda x: [(x.shape, "float64"), ((x.shape[0],), "float32")])
def sums(x: Any, out: Any) -> Any:
    import numpy

    for target, axis in zip(out, (None, 1), strict=True):
        numpy.copyto(target, x if axis is None else x.sum(axis=axis), casting="unsafe")
    return out


@lz.isolated(NEW, shapes=like)
def shifted(x: Any) -> Any:
    return x + 1


@lz.isolated(NEW, shapes=lambda x, text: like(x))
def talkative(x: Any, *, text: str, out: Any) -> Any:
    out[...] = x
    print(text)
    return [out, out[1:], out + 1]


@lz.isolated(NEW, shapes=lambda: ("three", "float32"))
def shapeless(out: Any) -> Any:
    return out


@lz.isolated([NEW, OLD], shapes=lambda x, _="": like(x))
def doubled(x: Any, ends_numpy: str = "", *, out: Any) -> Any:
    """Its process ends where NumPy is of this version."""
    import numpy

    if ends_numpy and numpy.__version__.startswith(ends_numpy):
        os._exit(1)
    return numpy.multiply(x, 2, out=out)


@lz.isolated(NEW, shapes=lambda x, off: like(x), shadow=1.0, tolerance=1e-6)
def halved(x: Any, off: float, *, out: Any) -> Any:
    import numpy

    return numpy.divide(x, 2, out=out)


@halved.implementation(OLD)
def halved_elsewhere(x: Any, off: float, *, out: Any) -> Any:
    import numpy

    return numpy.add(numpy.divide(x, 2, out=out), off, out=out)


@lz.isolated(NEW, shapes=lambda x, folder: like(x), workers=2, timeout_s=60)
def met(x: Any, folder: str, *, out: Any) -> Any:
    """It waits for a call in another process: alone it runs into its deadline."""
    (Path(folder) / str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.002)
    out[...] = x
    return out


@lz.isolated(OLD)
def told(x: Any, y: Any = None, factor: float = 1.0) -> str:
    """What an array is, and its sum; the array that it was given is another one afterwards."""
    said = f"{x.dtype} {x.shape} {x.strides} {x.flags.writeable} {x.sum() * factor + (0 if y is None else y.sum())}"
    x.shape = (x.size,) if x.flags.c_contiguous else x.shape
    return said
