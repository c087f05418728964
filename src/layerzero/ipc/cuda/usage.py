"""How much of the GPUs' memory processes hold, as the NVIDIA driver tells it: contexts, caches of libraries and all. No
context is made for that.

Source: NVML (nvml.h), whose library comes with the driver.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

NVML = "libnvidia-ml.so.1"
MAX_PROCESSES = 1024  # of one GPU; a driver that has more of them tells none
_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t as of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class GpuUsage:
    """The driver's library stays open. Where there is no driver, or one that does not tell, nothing is known."""

    def __init__(self, library: str = NVML) -> None:
        self._nvml: ctypes.CDLL | None = None
        self._gpus: list[tuple[str, ctypes.c_void_p]] = []
        with suppress(OSError, AttributeError):
            nvml = ctypes.CDLL(library)
            if not nvml.nvmlInit_v2():
                self._nvml = nvml
                self._gpus = _gpus(nvml)

    def by_process(self) -> dict[int, dict[str, int]]:
        """Bytes by pid and the GPU's UUID, of processes that this one's pid namespace has."""
        found: dict[int, dict[str, int]] = {}
        for uuid, gpu in self._gpus:
            for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
                for one in self._processes(name, gpu):
                    if one.used != _UNKNOWN:
                        its = found.setdefault(one.pid, {})
                        its[uuid] = max(its.get(uuid, 0), one.used)
        return found

    def of(self, pids: dict[str, int]) -> dict[str, dict[str, int]]:
        """Of these processes, by their names; those that hold none are left out."""
        if not self._gpus:
            return {}
        held = self.by_process()
        return {name: held[pid] for name, pid in pids.items() if pid in held}

    def _processes(self, name: str, gpu: ctypes.c_void_p) -> list[_ProcessInfo]:
        function = getattr(self._nvml, name, None)
        count, infos = ctypes.c_uint(MAX_PROCESSES), (_ProcessInfo * MAX_PROCESSES)()
        if function is None or function(gpu, ctypes.byref(count), infos):
            return []
        return list(infos[: min(count.value, MAX_PROCESSES)])


def _gpus(nvml: ctypes.CDLL) -> list[tuple[str, ctypes.c_void_p]]:
    count, found = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for number in range(count.value):
        gpu, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)):
            continue
        if not nvml.nvmlDeviceGetUUID(gpu, uuid, _UUID_BYTES):
            found.append((uuid.value.decode("ascii", "replace"), gpu))
    return found
