"""Whether this machine has the device that a backend computes on."""

from __future__ import annotations

from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.capabilities.device import DEVICE_NAMES, DeviceSpec, DeviceType
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs import accelerators


def absence(platform: DeviceType, gpus: Gpus | None, others: tuple[DeviceSpec, ...]) -> Rejection | None:
    """The one place that tells whether a backend of this platform is for this machine at all: it has a device of that
    platform. One that is not for this machine is no fault, and NOT_FOR_MACHINE says so to everybody; where NVIDIA's
    driver does not tell whether there is a GPU, that is a fault. `gpus`: NVIDIA's, None where nobody has looked;
    `others`: AMD's, Intel's and Habana's."""
    if gpus is None or platform == "cpu":
        return None
    if platform != "cuda":
        lacks = accelerators.lacks(platform, others)
        return Rejection(Reason.NOT_FOR_MACHINE, lacks) if lacks else None
    if gpus.devices:
        return None
    if gpus.has_failed:
        return Rejection(Reason.BACKEND_DISABLED, gpus.reason, "mend what nvidia-smi shows, then lz down")
    why = gpus.reason.partition(":")[0]
    return Rejection(Reason.NOT_FOR_MACHINE, f"needs {DEVICE_NAMES[platform]}, and this machine has none ({why})")
