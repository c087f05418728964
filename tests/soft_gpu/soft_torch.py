"""As much of torch as the client looks at in a process that has it with CUDA, over the GPU of soft_gpu.py. Inside of
`installed()` it is `sys.modules["torch"]`."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tests.soft_gpu import soft_cupy

from layerzero.client.arrays import recognition
from layerzero.client.gpu import lent_keys
from layerzero.functions import devices
from layerzero.ipc.vocabulary.tensors import contiguous_strides


class dtype(NamedTuple):  # torch's own name
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


class device(NamedTuple):  # likewise
    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


DTYPES = {name: dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "bool")}


class Tensor:
    """Strided memory of the GPU, as soft_cupy's array has it."""

    is_cuda, is_cpu, is_nested, requires_grad, layout, _version = True, False, False, False, "torch.strided", 0

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, tuple(array.shape), DTYPES[array.dtype.name]
        self.device = device("cuda", array.device.id)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.dtype.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)

    def get_device(self) -> int:
        return self.device.index

    def dim(self) -> int:
        return len(self.shape)

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def new_empty(self, shape: Any) -> Tensor:
        return empty(shape, dtype=self.dtype)

    def untyped_storage(self) -> Tensor:
        return self

    def set_(self, memory: Tensor, at: int, shape: Any, strides: Any) -> Tensor:
        kind = self.array.dtype
        steps = [step * kind.itemsize for step in strides]
        return Tensor(soft_cupy.ndarray(shape, kind, memory.array.data + at * kind.itemsize, steps))

    def numpy(self) -> np.ndarray:
        """Waits for the current stream."""
        found: np.ndarray = self.array.get()
        return found


def empty(shape: Any, *, dtype: dtype = DTYPES["float32"], device: Any = None) -> Tensor:
    made = soft_cupy.empty(shape, dtype.name)
    made.device = made.device if device is None else soft_cupy._Device(device.index)
    return Tensor(made)


def empty_strided(shape: Any, strides: Any, *, dtype: dtype, device: Any) -> Tensor:
    assert tuple(strides) == contiguous_strides(tuple(shape))
    return empty(tuple(shape), dtype=dtype)


@contextlib.contextmanager
def installed(gpus: int = 1) -> Iterator[None]:
    """`gpus`: so many it sees."""
    module: Any = types.ModuleType("torch")
    vars(module).update(DTYPES, Tensor=Tensor, device=device, empty=empty, empty_strided=empty_strided)
    vars(module).update(__version__="2", is_grad_enabled=lambda: True, _C=object())
    module.version = types.SimpleNamespace(hip=None)
    module.nn = types.SimpleNamespace(Parameter=type("Parameter", (Tensor,), {}))
    module.cuda = types.SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        current_device=lambda: 0,
        current_stream=lambda _: types.SimpleNamespace(cuda_stream=soft_cupy.current().ptr),
    )
    Tensor.__module__ = "torch"
    before = sys.modules.get("torch")
    sys.modules["torch"] = module
    _forget()
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
        _forget()


def _forget() -> None:
    """What is known of another torch."""
    devices._likes.clear()
    recognition._TORCH_NAMES.clear()
    for kind in [one for one in recognition._READERS if one.__module__ == "torch"]:
        del recognition._READERS[kind]
    lent_keys.types.discard(Tensor)
