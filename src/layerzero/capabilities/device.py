"""DeviceSpec: what a kernel runs on, as facts that were detected. broker/processes/host.py does that for CPUs,
broker/processes/cuda_driver.py for NVIDIA's GPUs, envs/accelerators.py for the others. Spec 5.4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeviceType = Literal["cpu", "cuda", "rocm", "xpu", "hpu"]
# For people.
DEVICE_NAMES: Mapping[str, str] = {
    "cpu": "a CPU",
    "cuda": "an NVIDIA GPU",
    "rocm": "an AMD GPU",
    "xpu": "an Intel GPU",
    "hpu": "a Gaudi HPU",
}
# Whose memory clients and workers share. Kernels of other devices take tensors in the CPU's memory, and copy them to
# the device and back.
SHARED_MEMORY: frozenset[DeviceType] = frozenset({"cpu", "cuda"})


def holds_tensors_of(platform: DeviceType) -> DeviceType:
    """The device in whose memory the tensors of a platform's kernels lie."""
    return platform if platform in SHARED_MEMORY else "cpu"


@dataclass(frozen=True)
class DeviceSpec:
    """One device. A text is empty, and `sm_version` None, where the device has no such thing or it is not known.

    `supports_*`: the hardware computes in it; a library may still emulate what is False. `sm_version` is the CUDA
    compute capability as 10 * major + minor. `cores` and `memory_bytes` are what this process may use.
    """

    device_type: DeviceType = "cpu"
    device_name: str = ""  # as the vendor has it: "NVIDIA H200", "AMD EPYC"
    device_vendor: str = ""  # nvidia, amd, intel, arm, habana, ...
    device_uuid: str = ""  # equal after a restart; of a CPU: made of model, instruction sets and cores
    sm_version: int | None = None
    roc_version: str = ""  # of ROCm as it is installed on the machine; wheels bring their own
    architecture: str = ""  # of an AMD GPU, what code is compiled for: "gfx942"
    cuda_version: str = ""  # newest that the driver serves
    driver_version: str = ""
    supports_bf16: bool = False
    supports_fp8: bool = False
    supports_fp16: bool = False
    supports_tensor_cores: bool = False
    supports_graphs: bool = False
    isa: tuple[str, ...] = ()  # instruction sets of a CPU, in Linux's names, sorted
    cores: int = 1  # of a GPU: multiprocessors
    memory_bytes: int = 0
