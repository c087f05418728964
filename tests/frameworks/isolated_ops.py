"""Functions for test_torch_functions.py, in a module of their own: workers import it by its file, and have no torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

import layerzero as lz

ENV = lz.env("ops-numpy", requires=["numpy==1.26.4"], python="3.11")


@lz.isolated(ENV, idempotent=True)
def scaled(x: np.ndarray, scale: float = 2.0) -> np.ndarray:
    assert np.__version__ == "1.26.4"
    return x * x.dtype.type(scale)


@lz.isolated(ENV, idempotent=True)
def cube(x: np.ndarray) -> np.ndarray:
    return x**3


@lz.isolated(ENV, idempotent=True)
def cube_backward(grad: np.ndarray, x: np.ndarray) -> np.ndarray:
    return grad * 3 * x**2


@lz.isolated(ENV)
def weighted(
    x: np.ndarray, ids: np.ndarray, w: np.ndarray | None = None, *, plus: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of x times w, and where the largest of each is."""
    rows = x[ids] * (1 if w is None else w) + x.dtype.type(plus)
    return rows, rows.argmax(axis=1)


@lz.isolated(ENV)
def weighted_backward(grad, _, x, ids, w=None, *, plus):  # type: ignore[no-untyped-def]
    dx = np.zeros_like(x)
    np.add.at(dx, ids, grad * (1 if w is None else w))
    return dx, None, None if w is None else (grad * x[ids]).sum(axis=0)


@lz.isolated(ENV)
def found(x: np.ndarray) -> np.ndarray:
    """As many as there are."""
    return x[x > 0]


@lz.isolated(ENV)
def wrong(x: np.ndarray, how: str) -> np.ndarray:
    match how:
        case "dtype":
            return x.astype("float64")
        case "shape":
            return x[:1]
        case "count":
            return x, x  # type: ignore[return-value]
    return 3.0  # type: ignore[return-value]


@lz.isolated(ENV, idempotent=True)
def dies_once(x: np.ndarray, mark: str) -> np.ndarray:
    """In its first call."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x + 1


@lz.isolated(ENV)
def dies(x: np.ndarray) -> np.ndarray:
    os.kill(os.getpid(), signal.SIGKILL)
    return x
