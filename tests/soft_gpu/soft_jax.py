"""As much of JAX as the client looks at, over the GPU of soft_gpu.py: arrays that show no stream; DLPack reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.soft_gpu import soft_gpu
from tests.soft_gpu.soft_gpu import driver

from layerzero.client.arrays.dlpack import CUDA, GpuExport, read_dlpack
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Array:
    """Memory of the GPU that somebody else keeps."""

    def __init__(self, address: int, spec: TensorSpec, owner: Any) -> None:
        self._address, self._spec, self._owner = address, spec, owner

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=from_dlpack)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        export = GpuExport(self._address, self._spec.dtype, self._spec.shape, 0, lambda _: None, self)
        return export.__dlpack__()

    def block_until_ready(self) -> Array:
        driver.synchronize()
        return self

    def numpy(self) -> np.ndarray:
        self.block_until_ready()
        found: np.ndarray = soft_gpu.array_at(self._address, self._spec).copy()
        return found


Array.__module__ = "jaxlib.soft"


def array(values: np.ndarray) -> Array:
    """A copy on the GPU, once it is there."""
    spec = TensorSpec.contiguous(values.dtype.name, values.shape)
    address = driver.allocate(max(values.nbytes, 1))
    soft_gpu.array_at(address, spec)[...] = values
    return Array(address, spec, None)


def from_dlpack(export: Any) -> Array:
    view = read_dlpack(export)
    return Array(view.address, TensorSpec.contiguous(view.dtype, view.shape), view)
