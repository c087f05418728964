"""AMD's and Intel's GPUs and Gaudi cards, as Linux describes them: no library of theirs, and nothing on the device.

`root` is there for tests: a folder that stands for the file system. A card counts where its device file is there, too:
a container may see it in /sys and not be allowed to use it. What /sys does not tell, as dtypes, is left as unknown.
Sources: the kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c, Documentation/ABI/testing/sysfs-driver-habanalabs and
Documentation/accel/introduction.rst; PCI vendors: https://pci-ids.ucw.cz.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from layerzero.capabilities.device import DEVICE_NAMES, DeviceSpec, DeviceType
from layerzero.ipc.free_memory import read

ROOT = Path("/")
_INTEL, _HABANA = "0x8086", "0x1da3"  # PCI vendors
_LOCAL_MEMORY = (1, 2)  # heap_type of a memory bank: the GPU's own, visible to the CPU or not
# Which files are looked at, for messages.
LOOKED_AT: dict[DeviceType, str] = {
    "rocm": "no GPU in /sys/class/kfd that /dev/kfd gives access to",
    "xpu": "no render node of Intel's in /dev/dri",
    "hpu": "no card of Habana's in /dev/accel",
}


def detect(root: Path = ROOT) -> tuple[DeviceSpec, ...]:
    """All that this process may use, AMD's first."""
    return (*amd_gpus(root), *intel_gpus(root), *gaudi_cards(root))


def lacks(platform: DeviceType, devices: tuple[DeviceSpec, ...]) -> str:
    """What a machine with these devices lacks for kernels of a platform, with where it was looked for; "" where it has
    one. Of AMD's and Intel's GPUs and Gaudi cards alone."""
    if platform not in LOOKED_AT or any(device.device_type == platform for device in devices):
        return ""
    return f"needs {DEVICE_NAMES[platform]}, and this machine has none ({LOOKED_AT[platform]})"


def amd_gpus(root: Path = ROOT) -> Iterator[DeviceSpec]:
    """From the topology of AMD's compute driver, which has the CPU as a node without a gfx version."""
    if not (root / "dev/kfd").exists():
        return
    installed = read(root / "opt/rocm/.info/version")
    driver = read(root / "sys/module/amdgpu/version")
    for node in _numbered(root / "sys/class/kfd/kfd/topology/nodes"):
        facts = _properties(node / "properties")
        version = facts.get("gfx_target_version", 0)
        if not version:  # a CPU; of a GPU that this container may not use, nothing can be read
            continue
        gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = [_properties(bank / "properties") for bank in _numbered(node / "mem_banks")]
        yield DeviceSpec(
            device_type="rocm",
            device_name=f"AMD GPU {gfx}",
            device_vendor="amd",
            device_uuid=f"GPU-{facts['unique_id']:016x}" if facts.get("unique_id") else f"kfd-{node.name}",
            architecture=gfx,
            roc_version=installed,
            driver_version=driver,
            cores=facts.get("simd_count", 0) // max(facts.get("simd_per_cu", 1), 1) or 1,
            memory_bytes=sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_MEMORY),
        )


def intel_gpus(root: Path = ROOT) -> Iterator[DeviceSpec]:
    """From the render nodes, which Level Zero opens. Integrated ones count; which of them PyTorch takes, it says."""
    for node in _numbered(root / "sys/class/drm", "renderD"):
        card = node / "device"
        if read(card / "vendor") != _INTEL or not (root / "dev/dri" / node.name).exists():
            continue
        yield DeviceSpec(
            device_type="xpu",
            device_name=f"Intel GPU {read(card / 'device')}",
            device_vendor="intel",
            device_uuid=_address(card),
            driver_version=(card / "driver").resolve().name if (card / "driver").exists() else "",  # i915 or xe
        )


def gaudi_cards(root: Path = ROOT) -> Iterator[DeviceSpec]:
    """From the nodes for accelerators, among which are NPUs of others; Goya is none that PyTorch has."""
    for node in _numbered(root / "sys/class/accel", "accel"):
        card = node / "device"
        kind = read(card / "device_type")
        is_there = (root / "dev/accel" / node.name).exists()
        if read(card / "vendor") != _HABANA or kind.upper().startswith("GOYA") or not is_there:
            continue
        yield DeviceSpec(
            device_type="hpu",
            device_name=f"Habana {kind or 'Gaudi'}",
            device_vendor="habana",
            device_uuid=_address(card),
            driver_version=read(card / "driver_ver"),
        )


def _numbered(folder: Path, prefix: str = "") -> list[Path]:
    """The folders PREFIX0, PREFIX1, ... in their order; none where there is no such folder."""
    found: list[tuple[int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            number = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and number.isdecimal():
                found.append((int(number), path))
    return [path for _, path in sorted(found)]


def _properties(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    found = {}
    for line in read(path).splitlines():
        name, _, value = line.partition(" ")
        with suppress(ValueError):
            found[name] = int(value)
    return found


def _address(card: Path) -> str:
    """Where it is plugged in, which stays after a restart: "pci-0000:03:00.0"."""
    return f"pci-{card.resolve().name}"
