"""What compiled code is for, as the name of a folder: hardware, driver, toolkit, and what compilers are told. What is
installed is the name of the folder above."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from layerzero.envs.build import stage
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.ipc.compile_caches.manifest import sha256_of

CACHE_VARIABLE = "LAYERZERO_CACHE_FOLDER"  # read by workers/boot.py
NVML = "libnvidia-ml.so.1"  # comes with the driver
_VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_MAX_VERSION_FILE = 1 << 20


def place_of(manifest: EnvManifest, variant: VariantName) -> str:
    """As in "sm_90-driver580-cu13-1a2b3c4d", or "x86_64.5e6f7a8b-cpu-1a2b3c4d"; the last part is of the variables and
    of the provider's source. Empty for an environment whose compilers keep nothing."""
    if not any("{cache}" in value for value in manifest.env.values()):
        return ""
    is_for_gpus = variant != "cpu" or (manifest.interpreter == "existing" and Path("/dev/nvidiactl").exists())
    hardware = f"{gpus()}-{toolkit(variant, os.environ.get('PATH', ''))}" if is_for_gpus else f"{processor()}-cpu"
    told = [dict(manifest.env), _provider(manifest)]
    return f"{hardware}-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]}"


def _provider(manifest: EnvManifest) -> str:
    """The SHA-256 of the provider's source."""
    target = manifest.provider_target
    source = manifest.source.sha256 if manifest.source is not None else ""
    with suppress(OSError):
        if target.endswith(".py"):
            return source + hashlib.sha256(Path(target).read_bytes()).hexdigest()
    own = target.removeprefix("layerzero.").replace(".", "/")
    for name in (f"{own}.py", f"{own}/__init__.py"):
        if name in stage.sources():
            return hashlib.sha256(stage.sources()[name]).hexdigest()
    return source


@cache
def processor() -> str:
    """The machine's kind, and a hash of what its processor can: compilers may use all of that."""
    flags = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        flags = " ".join(sorted(found.group(1).split())) if found else ""
    return f"{platform.machine()}.{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


@cache
def gpus(library: str = NVML) -> str:
    """The architectures of this machine's GPUs, and the driver's major version: "sm_90-driver580"."""
    try:
        nvml = ctypes.CDLL(library)
        _call(nvml, "nvmlInit_v2")
        try:
            return _described(nvml)
        finally:
            _call(nvml, "nvmlShutdown")
    except (OSError, AttributeError):
        return "no_gpu-no_driver"


def _described(nvml: ctypes.CDLL) -> str:
    version, count = ctypes.create_string_buffer(_VERSION_BYTES), ctypes.c_uint()
    _call(nvml, "nvmlSystemGetDriverVersion", version, ctypes.c_uint(_VERSION_BYTES))
    _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    found = set()
    for index in range(count.value):
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        found.add(10 * major.value + minor.value)
    driver = re.sub(r"[^0-9]", "", version.value.decode(errors="replace").partition(".")[0]) or "unknown"
    return f"{'.'.join(f'sm_{one}' for one in sorted(found)) or 'no_gpu'}-driver{driver}"


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Raises OSError for a call that fails, AttributeError for one that the library lacks."""
    code = getattr(library, name)(*arguments)
    if code:
        raise OSError(code, f"{name} returned {code}")


@cache
def toolkit(variant: str, path: str) -> str:
    """The variant, whose libraries the lock has, and the version of the nvcc that PATH has, if it has one: "cu13",
    "cu13.nvcc13.0". Of a toolkit that does not say its version it is a hash of nvcc."""
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        return variant
    version = "unknown"
    with suppress(OSError):
        version = f".{sha256_of(Path(nvcc).resolve())[:8]}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        file = Path(nvcc).resolve().parents[1] / "version.json"
        said = str(json.loads(file.read_bytes()[:_MAX_VERSION_FILE])["cuda_nvcc"]["version"])
        version = ".".join(re.findall(r"[0-9]+", said)[:2]) or version
    return f"{variant}.nvcc{version}"
