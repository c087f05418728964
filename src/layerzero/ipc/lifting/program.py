"""A loaded lifted call as one block of bytes, which client/gpu/_lifted.c goes through at each launch.

Steps lie one after the other at multiples of eight bytes, each with its length. Memory is counted through: inputs, then
outputs, then scratch.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

from layerzero.ipc.cuda.kernels import LaunchConfig
from layerzero.ipc.lifting.form import ALIGNMENTS, MAX_PARAMETER_BYTES, Address, Copy, Fill, Lifted
from layerzero.ipc.lifting.launch import LoadedCall

KERNEL, FILL, COPY = 1, 2, 3
MAX_PARAMETERS = 1024  # of a kernel
MAX_TENSORS, MAX_MEMORY = 16, 96  # inputs and outputs; with scratch
SCRATCH_STEP = 512  # bytes: pieces of scratch lie at multiples of that
_HEAD = struct.Struct("@QII")  # bytes, kind, size of an element or 0
_KERNEL = struct.Struct("@Q8I4I")  # function; grid, block, shared bytes, attributes; bytes, parameters, patches, 0
_ATTRIBUTE = struct.Struct("@iI64s")  # CUlaunchAttribute
_OFFSET = struct.Struct("@I")
_PATCH = struct.Struct("@IIq")  # at, memory, offset
_FILL = struct.Struct("@IIqQ")  # memory, value, offset, count
_COPY = struct.Struct("@IIqqQ")  # memory: source, target; offsets: source, target; bytes
LAYOUT = (
    *(KERNEL, FILL, COPY, MAX_PARAMETERS, MAX_PARAMETER_BYTES, MAX_TENSORS, MAX_MEMORY),
    *(_HEAD.size, _KERNEL.size, _ATTRIBUTE.size, _PATCH.size, _FILL.size, _COPY.size),
    *(ctypes.sizeof(LaunchConfig), LaunchConfig.stream.offset, LaunchConfig.attributes.offset),
    *ALIGNMENTS,
)


class Scratch(NamedTuple):
    """Where the pieces of a call's scratch lie in one block, and how large that must be."""

    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, lifted: Lifted) -> Scratch:
        offsets, at = [], 0
        for nbytes in lifted.scratch:
            offsets.append(at)
            at += -(-nbytes // SCRATCH_STEP) * SCRATCH_STEP
        return cls(tuple(offsets), at)


def program_of(call: LoadedCall) -> bytes | None:
    """None for a call that is larger than the C has room for."""
    lifted = call.lifted
    starts = {"input": 0, "output": len(lifted.inputs), "scratch": len(lifted.inputs) + len(lifted.outputs)}
    if starts["scratch"] > MAX_TENSORS or starts["scratch"] + len(lifted.scratch) > MAX_MEMORY:
        return None

    def place(address: Address) -> int:
        return starts[address.kind] + address.number

    parts: list[bytes] = []
    for step in call.steps:
        if isinstance(step, Fill):
            body = _FILL.pack(place(step.target), step.value, step.target.offset, step.count)
            kind, itemsize = FILL, step.itemsize
        elif isinstance(step, Copy):
            source, target = step.source, step.target
            body = _COPY.pack(place(source), place(target), source.offset, target.offset, step.nbytes)
            kind, itemsize = COPY, 0
        else:
            kernel, function, _ = step
            if len(kernel.layout) > MAX_PARAMETERS:
                return None
            params = bytearray(kernel.params)
            for span in kernel.padding:
                params[span.offset : span.offset + span.nbytes] = bytes(span.nbytes)
            counts = (len(params), len(kernel.layout), len(kernel.patches), 0)
            extents = (*kernel.grid, *kernel.block, kernel.shared_bytes, len(kernel.attributes))
            body = b"".join(
                (
                    _KERNEL.pack(function, *extents, *counts),
                    *(_ATTRIBUTE.pack(which, 0, value) for which, value in kernel.attributes),
                    _filled(bytes(params)),
                    _filled(b"".join(_OFFSET.pack(span.offset) for span in kernel.layout)),
                    *(_PATCH.pack(at, place(address), address.offset) for at, address in kernel.patches),
                )
            )
            kind, itemsize = KERNEL, 0
        parts.append(_HEAD.pack(_HEAD.size + len(body), kind, itemsize) + body)
    return b"".join(parts)


def _filled(data: bytes) -> bytes:
    """Up to a multiple of eight bytes."""
    return data.ljust(-(-len(data) // 8) * 8, b"\0")
