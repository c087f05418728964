"""Toy backends, and the calls that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.envs.probe.probe import ProbeRecord
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

SLOT = 64  # bytes; an input and an output of four float64 fit in two of them
SLOTS = 6
ARENA_BYTES = 2 * SLOT * SLOTS
GPU = "GPU-1"

PRIORITY = {"alpha": 60, "beta": 50, "gamma": 40, "delta": 30}
NEWER = "beta@2"  # in some worlds: a version that stands in for beta where a rollout wants it
SERVES = {"silu": PRIORITY.keys(), "gelu": ("alpha", "beta")}
COMPILES = frozenset({"alpha", "gamma"})  # in some worlds


def capability(backend: str, priority: int, platform: str = "cpu", *, compiles: bool = False) -> descriptor.Capability:
    jit = {"needs_jit": True, "compiled_for": ["dtypes"]} if compiles and backend in COMPILES else {}
    ops: dict[str, tuple[dict[str, Any], ...]] = {
        op: (
            {
                "kernel_id": f"{backend}.{op}",
                "priority": priority,
                "source": "simulator",
                "dtypes": ["float32", "float64"],
                "deterministic": True,
                **jit,
            },
        )
        for op, backends in SERVES.items()
        if backend.partition("@")[0] in backends
    }
    return descriptor.Capability.model_validate(
        {"schema_version": "1.0", "backend": backend, "backend_version": "1", "platform": platform, "ops": ops}
    )


CAPABILITIES = {backend: capability(backend, priority) for backend, priority in PRIORITY.items()}


GPU_CAPABILITIES = {backend: capability(backend, priority, "cuda") for backend, priority in PRIORITY.items()}


def passed_probe(backend: str) -> ProbeRecord:
    """Of a probe that found everything right."""
    kernels = capability(backend, 0).kernel_ids
    classes = {f"{variant}/small/dense": 0.0 for variant in ("plain", "none")}
    certified = {kernel_id: dict.fromkeys(("float32", "float64"), classes) for kernel_id in kernels}
    return ProbeRecord(backend, "key", ok=True, seconds=0.1, kernels=dict.fromkeys(kernels), certified=certified)


DEVICES = {"": DeviceSpec(), GPU: DeviceSpec("cuda", "a GPU", device_uuid=GPU, supports_fp16=True)}


def route_body(op: str = "silu", dtype: str = "float32", backend: str = "", device: str = "", extent: int = 4) -> bytes:
    """A signature of a unary op on so many elements."""
    spec = TensorSpec.contiguous(dtype, (extent,)).to_wire()
    attrs = {"approximate": "none"} if op == "gelu" else {}
    return encode(Route(op=op, inputs=[spec], outputs=[spec], attrs=attrs, backend=backend, device=device))


@dataclass(frozen=True)
class Signature:
    body: bytes
    backends: frozenset[str]  # whose descriptors accept it
    pinned: str = ""


def _prepared(device: str) -> tuple[Signature, ...]:
    def body(op: str = "silu", **more: Any) -> bytes:
        return route_body(op, device=device, **more)

    return (
        *[Signature(body(), frozenset(PRIORITY))] * 5,
        *[Signature(body(extent=3), frozenset(PRIORITY))] * 3,  # neighbours of those: leases may cover both
        *[Signature(body(dtype="float64"), frozenset(PRIORITY))] * 4,
        *[Signature(body("gelu"), frozenset(SERVES["gelu"]))] * 4,
        Signature(body(dtype="float16"), frozenset()),
        Signature(body("gelu", backend="gamma"), frozenset(), "gamma"),
        *(Signature(body(backend=name), frozenset({name}), name) for name in ("alpha", "beta", "delta")),
    )


SIGNATURES = {device: _prepared(device) for device in ("", GPU)}
