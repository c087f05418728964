"""On the path of a broker under test: the GPU of soft_gpu.py is the one that it finds, and that it tries lifted calls
on; likewise of `lz`, where LZ_SOFT_CLIENT is set. LZ_SOFT_GPU and LZ_SOFT_DRIVER: its name and the driver's version.
LZ_SOFT_PROOF_S: how long one proof may take; LZ_SOFT_TRIAL_S: the trial of a function. LZ_SOFT_HELD: a file that says
what processes hold of the GPU, as lines of a pid and bytes."""

import os
import sys
from typing import Any


def _put(name: str, value: Any) -> None:
    """In the place of a function of cuda_driver, wherever it was imported (tests/process/forks.py)."""
    old = getattr(cuda_driver, name)
    for module in [one for one in sys.modules.values() if getattr(one, name, None) is old]:
        setattr(module, name, value)


if "layerzero.broker" in sys.orig_argv:
    from layerzero.broker.processes import cuda_driver
    from layerzero.capabilities.device import DeviceSpec

    _SOFT = DeviceSpec(
        device_type="cuda",
        device_name=os.environ.get("LZ_SOFT_GPU", "GPU of threads"),
        device_vendor="nvidia",
        device_uuid="GPU-50f70000-0000-0000-0000-000000000000",
        sm_version=90,
        driver_version=os.environ.get("LZ_SOFT_DRIVER", "0"),
        cuda_version="13.0",
        supports_bf16=True,
        supports_fp16=True,
        memory_bytes=1 << 30,
    )
    _put("detect_gpus", lambda *_: cuda_driver.Gpus((_SOFT,), has_mps="LZ_SOFT_MPS" in os.environ))
    _put("free_memory_bytes", lambda *_: 1 << 30)
    if "LZ_SOFT_HELD" in os.environ:
        from layerzero.ipc.cuda.usage import GpuUsage

        def _by_process(_: object) -> dict[int, dict[str, int]]:
            with open(os.environ["LZ_SOFT_HELD"], encoding="ascii") as file:
                return {int(pid): {_SOFT.device_uuid: int(nbytes)} for pid, nbytes in map(str.split, file)}

        GpuUsage.by_process = _by_process  # type: ignore[method-assign]
    if "LZ_SOFT_PROOF_S" in os.environ:
        from layerzero.broker.lifting import proofs

        proofs.TIMEOUT_S = float(os.environ["LZ_SOFT_PROOF_S"])
    if "LZ_SOFT_TRIAL_S" in os.environ:
        from layerzero.broker.lifting import functions

        functions.TRIAL_S = float(os.environ["LZ_SOFT_TRIAL_S"])
elif "layerzero.workers.prove" in sys.orig_argv:
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))
    from tests.soft_gpu import soft_gpu, soft_kernels

    soft_kernels.install(soft_gpu.install())
elif "LZ_SOFT_CLIENT" in os.environ and "layerzero.client.cli.app" in sys.orig_argv:
    from tests.soft_gpu import soft_gpu

    soft_gpu.install()
