"""On the path of a broker under test: the GPU of soft_gpu.py is the one that it finds; likewise of `lz`, where
LZ_SOFT_CLIENT is set."""

import os
import sys

if "layerzero.broker" in sys.orig_argv:
    from layerzero.broker.processes import cuda_driver
    from layerzero.capabilities.device import DeviceSpec

    _SOFT = DeviceSpec(
        device_type="cuda",
        device_name="GPU of threads",
        device_vendor="nvidia",
        device_uuid="GPU-50f70000-0000-0000-0000-000000000000",
        sm_version=90,
        driver_version="0",
        cuda_version="13.0",
        supports_bf16=True,
        supports_fp16=True,
        memory_bytes=1 << 30,
    )
    cuda_driver.detect_gpus = lambda *_: cuda_driver.Gpus((_SOFT,), has_mps="LZ_SOFT_MPS" in os.environ)
    cuda_driver.free_memory_bytes = lambda *_: 1 << 30
elif "LZ_SOFT_CLIENT" in os.environ and "layerzero.client.cli.app" in sys.orig_argv:
    from tests.soft_gpu import soft_gpu

    soft_gpu.install()
