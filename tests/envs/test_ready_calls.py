"""client/tools/ready.py: the small calls by which a backend shows that it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.client.connection.routes import route_message
from layerzero.client.facade import running
from layerzero.client.tools.calls import Call
from layerzero.client.tools.ready import small_calls
from layerzero.ipc.transport.messages import encode

GPU = DeviceSpec(
    "cuda", "NVIDIA H200", "nvidia", "GPU-1", sm_version=90, supports_bf16=True, supports_fp16=True, supports_fp8=True
)
FILES = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
CAPABILITIES = {path.stem: descriptor.load(path) for path in FILES}


def signature(call: Call, device: str) -> CallSpec:
    def encoded(request: Any) -> bytes:
        return encode(route_message(request.planner(*request.args, **request.params), None, None, device))

    token = running.handler.set(encoded)
    try:
        return CallSpec.parse(call.function(**call.arrays, **call.params))
    finally:
        running.handler.reset(token)


@pytest.mark.parametrize("backend", [name for name, one in CAPABILITIES.items() if one.platform == "cuda"])
def test_each_gpu_backend_takes_a_small_call(backend: str) -> None:
    """Else `lz doctor --ready` could never pass where it is wanted."""
    engine = Engine(CAPABILITIES, DeviceSpec(device_uuid="cpu-1"), gpus=[GPU])
    taken = set()
    for op in CAPABILITIES[backend].ops:
        for call in small_calls(op, 0):
            spec = signature(call, GPU.device_uuid)
            verdicts = engine.rank(spec, engine.context(spec), {}, 0.0)
            taken |= {v.kernel_id for v in verdicts if v.backend == backend and v.is_accepted}
    assert taken
