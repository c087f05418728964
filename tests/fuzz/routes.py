"""Call signatures of clients, of every op, judged against all the built-in descriptors: shapes, attributes and policies
that no client of ours would send must not end the broker that ranks them."""

from __future__ import annotations

import random
from functools import cache

from tests.fuzz import values
from tests.signatures import planned

from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.envs.manifest import package_folder
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.transport.plain import pack_body
from layerzero.ipc.vocabulary.ops import OPS, Op

TYPED = (LayerZeroError,)
GPU = "GPU-1"


@cache
def _engine() -> Engine:
    folder = package_folder("capabilities") / "descriptors"
    found = [descriptor.load(path) for path in sorted(folder.glob("*.json"))]
    gpu = DeviceSpec("cuda", "a GPU", device_uuid=GPU, supports_fp16=True)
    return Engine({one.backend: one for one in found}, DeviceSpec(isa=("avx2", "fma")), gpus=[gpu])


def run(data: bytes) -> None:
    spec, engine = CallSpec.parse(data), _engine()
    _, candidates = explain(engine, spec, {}, 1.0)
    pack_body(candidates)
    spec.prepare("some.kernel", is_graph_safe=False)


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    return values.mutated(data, rng)


def seeds() -> dict[str, bytes]:
    return {op.name: encode(_route(op, GPU if op.name in ("rope", "swiglu") else "")) for op in OPS.values()}


def _route(op: Op, device: str) -> Route:
    call = planned(op.name, random.Random(1))
    inputs = [None if spec is None else spec.to_wire() for spec in call.inputs]
    layer = {"origin": "x", "values": {"rules": [{"prefer": ["torch"]}]}}
    policy = {"layers": [layer]} if op.name == "silu" else {}
    outputs = [spec.to_wire() for spec in call.outputs]
    return Route(op=op.name, inputs=inputs, outputs=outputs, attrs=call.attrs, policy=policy, device=device)
