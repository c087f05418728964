"""NVIDIA GPUs as their driver describes them, by ctypes: no CUDA toolkit, no context, no memory on a GPU.

Sources: CUDA driver API (cuda.h) and NVML (nvml.h); both libraries come with the driver.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from pathlib import Path

from layerzero.capabilities.device import DeviceSpec

_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute
_MODULE_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, slots=True)
class Gpus:
    """`reason`: why there are none, with the driver's own words; empty where there are some."""

    devices: tuple[DeviceSpec, ...]
    reason: str = ""


class _DriverError(Exception):
    """A call of the driver failed."""


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def detect_gpus(library: str = "libcuda.so.1") -> Gpus:
    """All GPUs that this process may use (CUDA_VISIBLE_DEVICES counts), in the driver's order."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as exc:
        return Gpus((), f"no NVIDIA driver: {exc}")
    try:
        _call(driver, "cuInit", ctypes.c_uint(0))
        version, count = ctypes.c_int(), ctypes.c_int()
        _call(driver, "cuDriverGetVersion", ctypes.byref(version))
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        devices = tuple(_describe(driver, ordinal, version.value) for ordinal in range(count.value))
    except _DriverError as exc:
        return Gpus((), f"the NVIDIA driver failed: {exc}")
    return Gpus(devices, "" if devices else "the NVIDIA driver sees no GPU")


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
    except (OSError, _DriverError):
        return None
    return int(info.free)


def _describe(driver: ctypes.CDLL, ordinal: int, version: int) -> DeviceSpec:
    device, name, raw = ctypes.c_int(), ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    memory = ctypes.c_size_t()
    _call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call(driver, "cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    _call(driver, "cuDeviceGetUuid", ctypes.byref(raw), device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor, cores = (_attribute(driver, device, a) for a in (_MAJOR, _MINOR, _MULTIPROCESSORS))
    sm = 10 * major + minor
    return DeviceSpec(
        device_type="cuda",
        device_name=name.value.decode(errors="replace"),
        device_vendor="nvidia",
        device_uuid=f"GPU-{uuid.UUID(bytes=bytes(raw))}",
        sm_version=sm,
        cuda_version=f"{version // 1000}.{version % 1000 // 10}",
        driver_version=_driver_version(),
        supports_fp16=sm >= 53,
        supports_bf16=sm >= 80,
        supports_fp8=sm >= 89,
        supports_tensor_cores=sm >= 70,
        supports_graphs=version >= 10000,
        cores=cores,
        memory_bytes=memory.value,
    )


def _attribute(driver: ctypes.CDLL, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
    return value.value


def _driver_version() -> str:
    try:
        return _MODULE_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function that returns 0 for success. Raises _DriverError with the name and the code."""
    try:
        function = getattr(library, name)
    except AttributeError as exc:
        raise _DriverError(f"it lacks {name}; it is too old") from exc
    code = function(*arguments)
    if code:
        raise _DriverError(f"{name} returned {code}")
