"""Policy: files (YAML), variables and overlays of callers. What is accepted judges calls; what is not is named."""

from __future__ import annotations

import random

import msgpack
import yaml
from tests.fuzz import values
from tests.simulation import CAPABILITIES

from layerzero.broker.configuration import policy_source
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.policy_values import Known
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.errors import ConfigError, InvalidArgument, ProtocolError
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

TYPED = (ConfigError, InvalidArgument, ProtocolError)
_FILE, _OVERLAY, _VARIABLE = b"F", b"O", b"V"
_KNOWN = Known.of(CAPABILITIES, OPS)
_SPEC = TensorSpec.contiguous("float32", (4,))
_CONTEXT = SelectionContext("silu", (_SPEC,), (_SPEC,), {}, DeviceSpec())


def run(data: bytes) -> None:
    kind, data = data[:1], data[1:]
    if kind == _OVERLAY:
        overlay = unpack_body(data)
        if not isinstance(overlay, dict):
            return
        made = Policy.of(known=_KNOWN).with_overlay(overlay)
    elif kind == _VARIABLE:
        name, _, value = data.decode("utf-8", "replace").partition("=")
        made = Policy.of(Layer("a variable", {name: value}), known=_KNOWN)
    else:
        made = Policy.of(policy_source.parse_layer(data.decode("utf-8", "replace"), "policy.yaml"), known=_KNOWN)
    for name, capability in CAPABILITIES.items():
        for kernel_id in capability.kernel_ids:
            made.judge(_CONTEXT, kernel_id, name)
    msgpack.packb(made.describe())
    made.isolation("alpha")


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    kind, data = data[:1], data[1:]
    try:
        if kind == _OVERLAY:
            changed = values.mutated(data, rng)
            return None if changed is None else kind + changed
        if kind == _FILE:
            return kind + values.mutated_text(yaml.safe_load(data), rng)  # JSON is YAML
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        pass
    return None


def seeds() -> dict[str, bytes]:
    file = b"""\
locks: {silu: alpha.silu}
allow_sources: [alpha, "b*"]
avoid_kernels: [gamma.*]
rules:
  - match: {op: silu, dtype: float32, numel: "> 3"}
    prefer: [beta]
    bonus: 20
    avoid: [delta]
strict_mode: false
backend_isolation: {"*": subprocess, alpha: auto}
memory_headroom_bytes: 1 GiB
shadow_rate: 0.01
tune_budget: 1%
weights: {priority: 2.0}
dispatch_table: /tmp/table.json
"""
    layer = {"origin": "prefer()", "values": {"rules": [{"match": {"op": "silu"}, "prefer": ["beta"]}]}}
    return {
        "file": _FILE + file,
        "overlay": _OVERLAY + msgpack.packb({"layers": [layer, {"origin": "x", "values": {"strict_mode": True}}]}),
        "locks": _VARIABLE + b"locks=silu=alpha.silu;gelu=beta.*",
        "headroom": _VARIABLE + b"memory_headroom_bytes=512 MiB",
    }
