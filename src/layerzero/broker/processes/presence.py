"""Whether this machine has the device that a backend computes on, and has run it where nobody else has."""

from __future__ import annotations

from layerzero.broker.processes.cuda_driver import Gpus
from layerzero.capabilities.certificate import ProbeRecord
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


def unproved(backend: str, missing: Rejection | None, record: ProbeRecord | None) -> Rejection | None:
    """Of a backend that no machine of this project has run: why it is left alone here, which is no fault. It serves
    where its probe has passed, and that is never tried unasked. `missing`: what keeps it from being used at all;
    `record`: its last probe here."""
    if missing is not None and missing.code is not Reason.NOT_INSTALLED:
        return missing
    if missing is None and record is not None and record.ok:
        return None
    lacks = "its probe has not passed here" if missing is None else "it is not built here"
    command = f"lz env {'probe' if missing is None else 'build'} {backend}"
    first = f"{missing.repair}, " if missing is not None and missing.repair.startswith("lz env lock ") else ""
    steps = f"{first}{command}, lz restart {backend}"
    return Rejection(Reason.NOT_RUN, f"no machine of this project has run it, and {lacks}; to try it: {steps}")
