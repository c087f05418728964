"""Lifted calls whose kernels are those of soft_kernels.py."""

from __future__ import annotations

import struct
from typing import Any

from layerzero.ipc.lifting.form import Address, Fill, Kernel, Lifted, Patch, Span, Step, digest
from layerzero.ipc.vocabulary.tensors import TensorSpec

CODE = b"soft:silu,scale,add,append,strike,refuse"


def kernel(name: str, *params: Address | int | float, code: bytes = CODE) -> Kernel:
    """One of tests/soft_gpu/soft_kernels.py."""
    words = [
        b"\xa5" * 8 if isinstance(p, Address) else struct.pack("=d" if type(p) is float else "=q", p) for p in params
    ]
    patches = [Patch(8 * n, param) for n, param in enumerate(params) if isinstance(param, Address)]
    layout = tuple(Span(8 * n, 8) for n in range(len(params)))
    attribute = ((4, struct.pack("=III", 1, 1, 1).ljust(64, b"\0")),)
    return Kernel(digest(code), name, (3, 2, 1), (32, 1, 1), 0, b"".join(words), layout, tuple(patches), (), attribute)


def at(kind: Any, number: int = 0, offset: int = 0) -> Address:
    return Address(kind, number, offset)


def floats(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("float32", shape)


def lifted_silu(spec: TensorSpec, *steps: Step, **more: Any) -> Lifted:
    """silu of dense float32."""
    plain = kernel("silu", at("output"), at("input"), spec.numel)
    values = {"alignments": (4, 4), "scratch": (), "versions": {"soft": "1.0"}, **more}
    return Lifted("silu", "one.silu", (spec,), (spec,), {}, steps=steps or (plain,), **values)


def lifted_triple(spec: TensorSpec) -> Lifted:
    """In place of silu 3 x, by way of scratch: 2 x in its second piece, and zeros over the first."""
    nbytes = spec.span_bytes
    return lifted_silu(
        spec,
        Fill(at("scratch", 0), 0, 4, 25),
        kernel("scale", at("scratch", 1), at("input"), 2.0, spec.numel),
        kernel("add", at("output"), at("scratch", 1), at("input"), spec.numel),
        scratch=(100, nbytes),
    )
