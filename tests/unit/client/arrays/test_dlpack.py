"""client/arrays/dlpack.py: capsules of real producers, and who frees what when."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layerzero.client.arrays.dlpack import DLPackView, GpuExport, read_dlpack
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, NARROW_DTYPES

_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
# Byte offsets in DLManagedTensorVersioned and DLManagedTensor
MAJOR = 0
VERSIONED_DEVICE, VERSIONED_CODE, VERSIONED_LANES = 40, 52, 54
STRIDES = 32


class Owned(np.ndarray):
    """An array that can be watched dying."""


class Producer:
    """Exports `data`; `edit` may spoil the capsule first."""

    def __init__(
        self, data: Any, *, version: tuple[int, int] | None, edit: Callable[[int], None] | None = None
    ) -> None:
        self.data, self.version, self.edit = data, version, edit

    def __dlpack__(self, *, max_version: tuple[int, int]) -> object:
        capsule = self.data.__dlpack__(max_version=self.version)
        if self.edit:
            self.edit(_pointer_of(capsule, b"dltensor_versioned" if self.version else b"dltensor"))
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldProducer(Producer):
    """From before version 1 of the protocol: takes no arguments."""

    def __dlpack__(self) -> object:  # type: ignore[override]
        return super().__dlpack__(max_version=(0, 0))


def fields(view: DLPackView) -> tuple[int, str, tuple[int, ...], tuple[int, ...], bool]:
    return view.address, view.dtype, view.shape, view.strides, view.is_read_only


def poke(offset: int, ctype: Any, value: int) -> Callable[[int], None]:
    def edit(pointer: int) -> None:
        ctype.from_address(pointer + offset).value = value

    return edit


@pytest.mark.parametrize("dtype", [name for name in ITEMSIZE if name not in ("bfloat16", *NARROW_DTYPES)])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_numpy_capsules_of_both_versions_are_read(dtype: str, version: tuple[int, int] | None) -> None:
    """The two structs differ in layout; reading one as the other gives wild pointers."""
    data = np.zeros((2, 3, 4), dtype)[1:, ::-1, ::2]
    address = data.__array_interface__["data"][0]
    assert fields(read_dlpack(Producer(data, version=version))) == (address, dtype, (1, 3, 2), (12, -4, 2), False)


def test_producers_without_version_negotiation_are_read() -> None:
    """Libraries from before 2024 raise TypeError for max_version."""
    assert read_dlpack(OldProducer(np.zeros(3, np.int8), version=None)).shape == (3,)


def test_read_only_memory_is_reported() -> None:
    """Only the versioned struct can say so."""
    data = np.zeros(3)
    data.flags.writeable = False
    assert read_dlpack(data).is_read_only


def test_missing_strides_mean_row_major() -> None:
    """Version 0 producers may leave strides NULL."""
    producer = Producer(np.zeros((2, 3)), version=None, edit=poke(STRIDES, ctypes.c_void_p, 0))
    assert read_dlpack(producer).strides == (3, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "bool", "int64", "uint16"])
def test_torch_tensors_are_read(dtype: str) -> None:
    """bfloat16 has a DLPack code of its own."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6, dtype=getattr(torch, dtype))[:, 1::2]
    assert fields(read_dlpack(tensor)) == (tensor.data_ptr(), dtype, (4, 3), (6, 2), False)


def test_jax_arrays_are_read() -> None:
    """Runs where JAX is installed."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(6, dtype="bfloat16").reshape(2, 3)
    view = read_dlpack(x)
    assert (view.address, view.dtype, view.shape) == (x.unsafe_buffer_pointer(), "bfloat16", (2, 3))
    with pytest.raises(InvalidArgument, match="no memory to read"):
        jax.jit(lambda t: read_dlpack(t) and t)(x)


def test_mlx_arrays_are_read() -> None:
    """Runs where MLX is installed. A lazy array is computed first."""
    mx = pytest.importorskip("mlx.core")
    view = read_dlpack(mx.arange(6).reshape(2, 3).astype(mx.bfloat16) + 1)
    bits = (ctypes.c_uint16 * 6).from_address(view.address)
    assert (view.dtype, view.shape, list(bits)[:2]) == ("bfloat16", (2, 3), [0x3F80, 0x4000])


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_the_producer_gets_its_tensor_back_when_the_owner_dies(version: tuple[int, int] | None) -> None:
    """Once, and not while the view is in use: earlier is a use after free, never is a leak."""
    data = np.zeros(3).view(Owned)
    ref = weakref.ref(data)
    view = read_dlpack(Producer(data, version=version))
    del data
    gc.collect()
    assert ref() is not None
    del view
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_is_taken_once(version: tuple[int, int] | None) -> None:
    """Two owners would free the tensor twice."""

    class Fixed(Producer):
        capsule = np.zeros(3).__dlpack__(max_version=version)

        def __dlpack__(self, **_: Any) -> object:
            return self.capsule

    producer = Fixed(None, version=version)
    view = read_dlpack(producer)
    with pytest.raises(InvalidArgument, match="not an unused DLPack capsule"):
        read_dlpack(producer)
    assert view.shape == (3,)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (poke(VERSIONED_DEVICE, ctypes.c_int32, 7), r"DLPack device vulkan \(7\), .*; allowed: cpu \(1\), cuda \(2\)"),
        (poke(VERSIONED_DEVICE, ctypes.c_int32, 99), r"DLPack device unknown \(99\)"),
        (poke(VERSIONED_CODE, ctypes.c_uint8, 5), "code 5, 64 bits, 1 lanes"),
        (poke(VERSIONED_CODE, ctypes.c_uint8, 4), "code 4, 64 bits"),
        (poke(VERSIONED_LANES, ctypes.c_uint16, 4), "4 lanes"),
        (poke(MAJOR, ctypes.c_uint32, 2), r"DLPack 2\.0; readable: up to 1\.x"),
    ],
)
def test_refused_tensors_go_back_to_their_producer(edit: Callable[[int], None], says: str) -> None:
    """A refusal must not leak the tensor it refuses."""
    data = np.zeros(3).view(Owned)
    ref = weakref.ref(data)
    with pytest.raises(InvalidArgument, match=says):
        read_dlpack(Producer(data, version=(1, 0), edit=edit))
    del data
    gc.collect()
    assert ref() is None


def test_pinned_host_memory_is_cpu_memory() -> None:
    """CUDA's pinned buffers are readable by the CPU."""
    producer = Producer(np.zeros(3), version=(1, 0), edit=poke(VERSIONED_DEVICE, ctypes.c_int32, 3))
    assert read_dlpack(producer).shape == (3,)


def test_arrays_on_other_devices_are_refused_before_export() -> None:
    """An export may synchronise the device or copy."""

    class OnVulkan(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (7, 0)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("exported")

    with pytest.raises(InvalidArgument, match=r"device vulkan \(7\), .*move it to the CPU"):
        read_dlpack(OnVulkan(None, version=None))


def test_errors_of_the_producer_are_passed_on() -> None:
    """The library knows best why it cannot export."""
    with pytest.raises(InvalidArgument, match=r"cannot be exported by DLPack \(BufferError"):
        read_dlpack(np.zeros(2, "datetime64[s]"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_exported_memory_is_read_back_and_let_go_of(dtype: str, shape: tuple[int, ...]) -> None:
    """JAX takes a GPU's memory so, and says when it needs it no more."""

    class Hold:
        pass

    hold, streams = Hold(), []
    is_gone = weakref.ref(hold)
    export = GpuExport(0x7F00_0000_0100, dtype, shape, 3, streams.append, hold)
    del hold
    assert export.__dlpack_device__() == (2, 3)
    view = read_dlpack(export, stream=77)
    assert (view.address, view.dtype, view.shape, view.device) == (0x7F00_0000_0100, dtype, shape, 3)
    assert streams == [77]
    del export
    gc.collect()
    assert is_gone() is not None
    del view
    gc.collect()
    assert is_gone() is None
