"""Runs inside a foreign environment: calls a provider's kernels on memory laid out as in a worker.

Reads frames of (uint32 length, JSON) and raw input bytes on stdin, answers the same way on fd 1. Inputs are mapped
read-only, so a kernel that writes to them dies here. Started by test_conformance.py.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from typing import Any, BinaryIO

from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.shm import memory
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.boot import import_provider
from layerzero.workers.provider import Block, Call, Loaded

LENGTH = struct.Struct("<I")
ARENA_BYTES = 64 << 20
GUARD = 64  # bytes around an output that no kernel may write to


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout
    requests = sys.stdin.buffer
    loaded = import_provider(sys.argv[1]).load()
    fd = memory.create_memfd("conformance", ARENA_BYTES)
    read = memory.map_fd(fd, ARENA_BYTES, writable=False)
    write = memory.map_fd(fd, ARENA_BYTES, writable=True)
    reply(replies, {"versions": dict(loaded.versions), "kernels": sorted(loaded.kernels)}, [])
    while head := requests.read(LENGTH.size):
        request = json.loads(requests.read(LENGTH.unpack(head)[0]))
        serve(loaded, request, requests, replies, memoryview(read), write)


def serve(
    loaded: Loaded, request: dict[str, Any], requests: BinaryIO, replies: BinaryIO, read: memoryview, write: mmap.mmap
) -> None:
    """Bind once, then run on each set of inputs the request brings; answer with every output's bytes after each run."""
    inputs = [None if spec is None else TensorSpec.from_wire(spec) for spec in request["inputs"]]
    outputs = [TensorSpec.from_wire(spec) for spec in request["outputs"]]
    offsets = iter(request.get("offsets") or [0] * (len(inputs) + len(outputs)))
    alias = {int(i): j for i, j in (request.get("alias") or {}).items()}
    end = 0

    def place(nbytes: int) -> slice:
        nonlocal end
        start = -(-(end + GUARD) // memory.ALIGNMENT) * memory.ALIGNMENT + next(offsets)
        end = start + nbytes
        return slice(start, end)

    places_in = [None if spec is None else place(spec.span_bytes) for spec in inputs]
    for i, j in alias.items():
        places_in[i] = places_in[j]
    op = OPS[request["op"]]
    shared = {i: places_in[op.inputs.index(name)] for i, name in enumerate(op.outputs) if name in op.in_place}
    places_out = [shared.get(i) or place(spec.span_bytes) for i, spec in enumerate(outputs)]
    assert end + GUARD <= ARENA_BYTES, end
    blocks_in = [
        None if spec is None or at is None else Block(read[at], spec)
        for spec, at in zip(inputs, places_in, strict=True)
    ]
    blocks_out = [Block(memoryview(write)[at], spec) for spec, at in zip(outputs, places_out, strict=True)]
    call = Call(request["op"], request["kernel"], tuple(inputs), tuple(outputs), request["attrs"])
    sets = [
        [None if at is None else requests.read(at.stop - at.start) for at in places_in] for _ in range(request["sets"])
    ]
    results: list[Any] = []
    written: list[bytes] = []
    try:
        bound = loaded.kernels[call.kernel_id](call, blocks_in, blocks_out)
        for contents in sets:
            for at, content in zip(places_in, contents, strict=True):
                if at is not None and content is not None:
                    write[at] = content
            for i, at in enumerate(places_out):
                if i not in shared:
                    around = slice(at.start - GUARD, at.stop + GUARD)
                    write[around] = bytes([request["fill"]]) * (around.stop - around.start)
            results.append(bound())
            written += [write[at] for at in places_out]
            for i, at in enumerate(places_out):
                around = write[at.start - GUARD : at.start] + write[at.stop : at.stop + GUARD]
                if i not in shared and around != bytes([request["fill"]]) * (2 * GUARD):
                    raise RuntimeError(f"{op.outputs[i]}: wrote before or behind it")
        reply(replies, {"results": results}, written)
    except LayerZeroError as exc:
        reply(replies, {"error": exc.to_wire()}, [])
    except Exception as exc:
        reply(replies, {"error": {"code": type(exc).__name__, "message": str(exc), "facts": {}}}, [])


def reply(stream: BinaryIO, message: dict[str, Any], blobs: list[bytes]) -> None:
    text = json.dumps({**message, "lengths": [len(blob) for blob in blobs]}).encode()
    stream.write(b"".join([LENGTH.pack(len(text)), text, *blobs]))
    stream.flush()


if __name__ == "__main__":
    main()
