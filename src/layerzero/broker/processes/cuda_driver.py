"""NVIDIA GPUs as their driver describes them: no CUDA toolkit, no context, no memory on a GPU.

Source: NVML (nvml.h), whose library comes with the driver.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.library import LIBRARY
from layerzero.ipc.errors import CudaError

_NO_GPU = (34, 100)  # CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_NO_DEVICE
_MODULE_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpus:
    """`reason`: why there are none, with the driver's own words; empty where there are some. `has_mps`: processes share
    one of them by MPS. `has_failed`: there is a driver, and it does not tell whether there are GPUs."""

    devices: tuple[DeviceSpec, ...]
    reason: str = ""
    has_mps: bool = False
    has_failed: bool = False


class _NvmlError(Exception):
    """A call of NVML failed."""


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def detect_gpus(library: str = LIBRARY) -> Gpus:
    """All GPUs that this process may use (CUDA_VISIBLE_DEVICES counts), in the driver's order."""
    try:
        driver = cuda.Driver(library)
        version = driver.version()
        found = driver.gpus()
        devices = tuple(_describe(driver, gpu, version) for gpu in found)
        has_mps = any(driver.has_mps(gpu.ordinal) for gpu in found)
    except OSError as exc:
        return Gpus((), f"no NVIDIA driver: {exc}")
    except CudaError as exc:
        if exc.number in _NO_GPU:
            return Gpus((), f"the NVIDIA driver sees no GPU: {exc}")
        return Gpus((), f"the NVIDIA driver failed: {exc}", has_failed=True)
    return Gpus(devices, "" if devices else "the NVIDIA driver sees no GPU", has_mps)


def free_memory_bytes(device_uuid: str, library: str = "libnvidia-ml.so.1") -> int | None:
    """Memory of a GPU that nobody has taken; None where the driver does not tell."""
    try:
        nvml = ctypes.CDLL(library)
        handle, info = ctypes.c_void_p(), _MemoryInfo()
        _call(nvml, "nvmlInit_v2")
        try:
            _call(nvml, "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(device_uuid.encode()), ctypes.byref(handle))
            _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(info))
        finally:
            _call(nvml, "nvmlShutdown")
    except (OSError, _NvmlError):
        return None
    return int(info.free)


def _describe(driver: cuda.Driver, gpu: cuda.Gpu, version: int) -> DeviceSpec:
    major, minor = driver.compute_capability(gpu.ordinal)
    sm = 10 * major + minor
    return DeviceSpec(
        device_type="cuda",
        device_name=driver.name(gpu.ordinal),
        device_vendor="nvidia",
        device_uuid=gpu.uuid,
        sm_version=sm,
        cuda_version=f"{version // 1000}.{version % 1000 // 10}",
        driver_version=_driver_version(),
        supports_fp16=sm >= 53,
        supports_bf16=sm >= 80,
        supports_fp8=sm >= 89,
        supports_tensor_cores=sm >= 70,
        supports_graphs=version >= 10000,
        cores=driver.multiprocessors(gpu.ordinal),
        memory_bytes=driver.total_bytes(gpu.ordinal),
    )


def _driver_version() -> str:
    try:
        return _MODULE_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function that returns 0 for success. Raises _NvmlError with the name and the code."""
    try:
        function = getattr(library, name)
    except AttributeError as exc:
        raise _NvmlError(f"it lacks {name}; it is too old") from exc
    code = function(*arguments)
    if code:
        raise _NvmlError(f"{name} returned {code}")
