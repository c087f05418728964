"""Variants of the kernels silu<float> and append<float> that must not be lifted, by what they do."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.soft_gpu import soft_gpu

from layerzero.ipc.vocabulary.tensors import TensorSpec

is_proof = "layerzero.workers.prove" in sys.orig_argv
LIBRARYS = "layerzero.workers" in sys.orig_argv  # in workers the library is there, and with it what it fills
_ONE = TensorSpec.contiguous("float32", (1,))
_launches = 0
_running, _changed = 0, threading.Condition()


def _nudge(out: Any, by: Any) -> None:
    """A change that no probe minds."""
    out *= np.asarray(1 + by, np.float32)


def _meets_another() -> bool:
    """Whether another launch is under way at the same time. Waits for one."""
    global _running
    with _changed:
        _running += 1
        _changed.notify_all()
        met = _changed.wait_for(lambda: _running > 1, 0.1)
    with _changed:
        _running -= 1
    return met


def _write_beside(address: int, offset: int) -> None:
    find = soft_gpu.driver.allocation
    if is_proof and find(address) == find(address + offset):
        soft_gpu.array_at(address + offset, _ONE)[...] = 1


def kernels(make: Callable[..., Any], silu: Callable[..., None], append: Callable[..., None]) -> dict[str, Any]:
    def stateful(grid: Any, out: Any, x: Any) -> None:
        """Each launch is another than the one before."""
        global _launches
        _launches += 1
        silu(grid, out, x)
        _nudge(out, 1e-6 * (_launches % 7))

    def table(grid: Any, out: Any, x: Any) -> None:
        """Looks into a table that its library has filled, in its own process."""
        silu(grid, out, x)
        _nudge(out, 0 if LIBRARYS else 1e-6)

    def random(grid: Any, out: Any, x: Any) -> None:
        silu(grid, out, x)
        _nudge(out, 1e-6 * np.random.default_rng().random(out.shape))  # one number would have nine values in float32

    def strays(grid: Any, out: Any, x: Any) -> None:
        """Writes an element behind its output, if its allocation goes on there."""
        silu(grid, out, x)
        _write_beside(out.ctypes.data, out.nbytes)

    def strays_before(grid: Any, out: Any, x: Any) -> None:
        """Writes an element before its input."""
        silu(grid, out, x)
        _write_beside(x.ctypes.data, -4)

    def hangs(grid: Any, out: Any, x: Any) -> None:
        if is_proof:
            threading.Event().wait()
        silu(grid, out, x)

    def exits(grid: Any, out: Any, x: Any) -> None:
        if is_proof:
            os._exit(3)
        silu(grid, out, x)

    def aborts(grid: Any, out: Any, x: Any) -> None:
        if is_proof:
            os.abort()
        silu(grid, out, x)

    def strikes(grid: Any, out: Any, x: Any) -> None:
        if is_proof:
            soft_gpu.driver.is_lost = True
        silu(grid, out, x)

    def meets(grid: Any, out: Any, x: Any) -> None:
        """Has memory of its own for one launch at a time."""
        silu(grid, out, x)
        _nudge(out, 1e-6 if is_proof and _meets_another() else 0)

    def append_meets(grid: Any, keys: Any, values: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
        append(grid, keys, values, k_cache, v_cache, slots)
        _nudge(k_cache, 1e-6 if is_proof and _meets_another() else 0)

    found = (stateful, table, random, strays, strays_before, hangs, exits, aborts, strikes, meets)
    made = {f"silu<float>/{kernel.__name__}": make("TT", kernel) for kernel in found}
    return {**made, "append<float>/meets": make("TTTTT", append_meets)}
