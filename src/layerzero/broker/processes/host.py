"""What this machine is: CPU, instruction sets, usable cores and memory. Detected, never assumed.

`root` is there for tests: a folder that stands for the file system.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from layerzero.broker.processes import cuda_driver
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc import free_memory
from layerzero.ipc.free_memory import groups, read

ROOT = Path("/")
# What kernel libraries choose their code by; /proc/cpuinfo lists a hundred more.
_ISA = frozenset(
    {"sse2", "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}
    | {"avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
    | {"asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"}
)
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "0x41": "arm", "0x61": "apple"}


def free_memory_bytes(device: DeviceSpec, root: Path = ROOT) -> int | None:
    """What can still be had on a device; None where nobody tells.

    CPU: the system's estimate, or what the control groups of this process leave, whichever is lower.
    """
    if device.device_type == "cuda":
        return cuda_driver.free_memory_bytes(device.device_uuid)
    if device.device_type != "cpu":
        return None
    return free_memory.available_bytes(root)


def detect_cpu(root: Path = ROOT) -> DeviceSpec:
    """The CPU as this process may use it: affinity and control groups count."""
    text = read(root / "proc/cpuinfo")
    total_bytes = min((bound.total_bytes for bound in free_memory.bounds(root)), default=0)
    cores = min(len(os.sched_getaffinity(0)), *_core_quotas(root), os.cpu_count() or 1)
    return parse_cpu(text, cores=cores, memory_bytes=total_bytes)


def parse_cpu(cpuinfo: str, *, cores: int, memory_bytes: int) -> DeviceSpec:
    """From the text of /proc/cpuinfo (x86 and ARM); its first processor stands for all."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    isa = tuple(sorted(flags & _ISA))
    vendor = fields.get("vendor_id") or fields.get("CPU implementer") or ""
    name = fields.get("model name") or fields.get("CPU part") or platform.machine()
    digest = hashlib.blake2b(f"{vendor}\0{name}\0{isa}\0{cores}".encode(), digest_size=8).hexdigest()
    return DeviceSpec(
        device_type="cpu",
        device_name=name,
        device_vendor=_VENDORS.get(vendor, vendor.lower()),
        device_uuid=f"cpu-{digest}",
        supports_bf16=bool({"avx512_bf16", "amx_bf16", "bf16"} & flags),
        supports_fp16=bool({"avx512_fp16", "asimdhp"} & flags),
        isa=isa,
        cores=cores,
        memory_bytes=memory_bytes,
    )


def _core_quotas(root: Path) -> Iterator[int]:
    """Cores that each control group's time quota amounts to, rounded up."""
    for folder in groups(root, "cpu"):
        text = read(folder / "cpu.max") or (f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}")
        with suppress(ValueError, ZeroDivisionError):  # absent, or "max"
            quota, period = (int(word) for word in text.split())
            if quota > 0:
                yield max(math.ceil(quota / period), 1)
