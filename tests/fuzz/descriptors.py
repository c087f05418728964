"""Capability descriptors: JSON that is one, or a ConfigError; one that is accepted can be matched with any call."""

from __future__ import annotations

import json
import random
from functools import cache

from tests.fuzz import values
from tests.simulation import route_body

from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.envs.manifest import package_folder
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

TYPED = (ConfigError,)


def run(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    found = descriptor.parse(text, "some.json")
    assert descriptor.parse(found.model_dump_json(), "again") == found
    engine = Engine({found.backend: found}, DeviceSpec(isa=("avx2",)))
    for spec in _calls():
        ranked, candidates = explain(engine, spec, {}, 1.0)
        assert len(ranked) == len(candidates)


@cache
def _calls() -> tuple[CallSpec, ...]:
    matrix = TensorSpec.contiguous("float32", (4, 4)).to_wire()
    heads = TensorSpec.contiguous("bfloat16", (1, 2, 8, 64)).to_wire()
    attrs = {"is_causal": True, "scale": 0.5, "causal_alignment": "top_left", "layout": "BHSD"}
    attention = Route(op="attention", inputs=[heads, heads, heads, None, None, None], outputs=[heads], attrs=attrs)
    matmul = Route(op="matmul", inputs=[matrix, matrix], outputs=[matrix], attrs={})
    bodies = (route_body(), route_body("gelu", "float16"), encode(attention), encode(matmul))
    return tuple(CallSpec.parse(body) for body in bodies)


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    try:
        return values.mutated_text(json.loads(data), rng)
    except (ValueError, TypeError, RecursionError):
        return None


def seeds() -> dict[str, bytes]:
    folder = package_folder("capabilities") / "descriptors"
    made = {}
    for name, ops in (
        ("torch", ("silu", "gelu", "attention")),
        ("tokenizers", ("tokenize",)),
        ("torch-cuda", ("matmul",)),
    ):
        paths = sorted(folder.glob(f"{name}*.json"))
        document = json.loads(paths[0].read_text())
        document["ops"] = {op: kernels[:1] for op, kernels in document["ops"].items() if op in ops}
        made[name] = json.dumps(document).encode()
    return made
