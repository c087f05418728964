"""What this machine is: the CPU and its instruction sets, usable cores, memory. Detected, never assumed."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from layerzero.capabilities.device import DeviceSpec

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# What kernel libraries choose their code by; /proc/cpuinfo lists a hundred more.
_ISA = frozenset(
    {"sse2", "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}
    | {"avx512_fp16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}
    | {"asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"}
)
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "0x41": "arm", "0x61": "apple"}


def detect_cpu() -> DeviceSpec:
    """This machine's CPU as this process may use it: affinity and control groups count."""
    text = CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
    return parse_cpu(text, cores=len(os.sched_getaffinity(0)), memory_bytes=memory_limit_bytes())


def parse_cpu(cpuinfo: str, *, cores: int, memory_bytes: int) -> DeviceSpec:
    """From the text of /proc/cpuinfo (x86 and ARM)."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
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


def memory_limit_bytes() -> int:
    """Memory of the machine, or the control group's limit when that is lower."""
    total = _meminfo("MemTotal")
    limit = _cgroup("memory.max")
    return total if limit is None else min(limit, total)


def free_memory_bytes() -> int:
    """What can still be had: the system's estimate, or what the control group leaves, whichever is lower."""
    available = _meminfo("MemAvailable")
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return available if limit is None or used is None else max(min(available, limit - used), 0)


def _meminfo(name: str) -> int:
    for line in MEMINFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def _cgroup(name: str) -> int | None:
    """A number from this process's control group (v2); None where there is none or no limit."""
    try:
        group = next(
            line.split("::", 1)[1]
            for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
            if line.startswith("0::")
        )
        text = (CGROUP / group.lstrip("/") / name).read_text(encoding="utf-8").strip()
    except (OSError, StopIteration):
        return None
    return int(text) if text.isdigit() else None
