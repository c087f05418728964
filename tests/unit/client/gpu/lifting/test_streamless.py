"""Calls with arrays of libraries that show no stream, as JAX: lifted on a stream of ours, and lent until then."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import weakref
from typing import Any
from unittest import mock

import numpy as np
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.unit.client.gpu.lifting.rig import ORDINARY, PATIENCE_S, Rig, randn, silu, synchronize

from layerzero.client.arrays.dlpack import GpuExport, read_dlpack
from layerzero.client.arrays.recognition import describe
from layerzero.client.gpu.arrays import current_stream


class Streamless:
    """An array as JAX's: by DLPack alone, with a namespace to make others. `owner` is what it keeps alive."""

    def __init__(self, values: Any) -> None:
        self.owner = soft_cupy.asarray(values)

    def __array_namespace__(self) -> Any:
        return Streamless

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        x = self.owner
        return GpuExport(x.data.ptr, "float32", x.shape, 0, lambda stream: synchronize(), (self, x)).__dlpack__()

    @staticmethod
    def from_dlpack(export: Any) -> Any:
        view = read_dlpack(export)
        synchronize()
        data = (ctypes.c_float * math.prod(view.shape)).from_address(view.address)
        return np.array(data, np.float32).reshape(view.shape)


def same(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_arrays_that_show_no_stream_are_lifted_and_kept_until_their_kernels_are_through(rig: Rig) -> None:
    """Their library may give their memory to another array as soon as nobody has them."""
    rig.offer_silu()
    (_, values), (_, other) = randn(5, 3), randn(5, 3, seed=1)
    same(rig.settle(lambda: rig.silu(Streamless(values))), silu(values))
    assert rig.report().path == "lifted"
    asked = rig.broker.count()
    x = Streamless(other)
    owner = weakref.ref(x.owner)
    stream = current_stream(describe(x))
    gate = threading.Event()
    driver.put(stream, lambda: gate.wait(PATIENCE_S))
    with mock.patch.object(Streamless, "from_dlpack", lambda export: export):
        export = rig.silu(x)
    del x
    gc.collect()
    assert owner() is not None, "the kernel has not run yet"
    gate.set()
    same(Streamless.from_dlpack(export), silu(other))
    rig.silu(Streamless(values))  # which looks at what is through
    gc.collect()
    assert owner() is None
    assert rig.broker.count() == asked


def test_what_is_lent_goes_with_the_session(rig: Rig) -> None:
    rig.offer_silu()
    _, values = randn(6, 3)
    rig.settle(lambda: rig.silu(Streamless(values)))
    x = Streamless(values)
    owner = weakref.ref(x.owner)
    rig.silu(x)
    del x
    rig.lifts.finish()
    rig.lifts.close()
    gc.collect()
    assert owner() is None


def test_a_call_that_had_too_little_evidence_is_asked_for_again(rig: Rig) -> None:
    """Nobody else counts such calls: they are known only once they are described."""
    answers = [{"state": "later"}] * 3
    rig.offer_silu()
    ready = rig.broker.answers["silu"]
    rig.broker.answers["silu"] = lambda *asked: answers.pop() if answers else ready(*asked)
    _, values = randn(7, 3)
    same(rig.settle(lambda: rig.silu(Streamless(values))), silu(values))
    assert rig.broker.count() == 4


def test_leave_that_ended_is_asked_for_anew(rig: Rig) -> None:
    rig.offer_silu()
    _, values = randn(8, 3)
    rig.settle(lambda: rig.silu(Streamless(values)))
    rig.bump()
    assert rig.silu(Streamless(values)) is ORDINARY
    same(rig.settle(lambda: rig.silu(Streamless(values))), silu(values))
