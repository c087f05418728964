"""Descriptors of tensors: no reference that passes the broker's check lies outside its arena, in the broker's
arithmetic and in the worker's, whose views must be inside."""

from __future__ import annotations

from dataclasses import replace

from tests.fuzz.source import Source
from tests.unit.broker.driver import Driver

from layerzero.broker.core.model import Arena, Route
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.cuda.handles import check_span
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport import wire
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

TYPED = (ProtocolError, InvalidArgument)
_ARENAS = (0, 1, 63, 64, 4096, 1 << 21, (1 << 46) + 1, (1 << 63) - 1)
_SIGNATURE = next(iter(Driver("alpha").state.signatures.known.values()))
_EXTENTS = (0, 1, 2, 7, 1 << 16, 1 << 31, 1 << 46, (1 << 64) - 1)


def run(data: bytes) -> None:
    source = Source(data)
    spec = TensorSpec.from_wire([source.pick(tuple(ITEMSIZE)), _dims(source), _dims(source)])
    size, ref = source.pick(_ARENAS), wire.unpack_refs(source.take(wire.REF_BYTES), 1)[0]
    body = wire.pack_refs([ref, ref])
    signature = replace(_SIGNATURE, spec=CallSpec("silu", (spec,), (spec,), {}, ""))
    Route(1, signature).check(body, {ref.arena: Arena(size)})
    assert ref.offset + ref.nbytes <= size
    assert spec.span_bytes <= ref.nbytes
    check_span(ref.offset, ref.nbytes, size)
    if size <= 4096:
        view = memoryview(bytes(size))[ref.offset : ref.offset + ref.nbytes]
        assert len(view) == ref.nbytes
        last = [extent - 1 for extent in spec.shape]
        if spec.numel:
            at = sum(i * stride for i, stride in zip(last, spec.strides, strict=True)) * spec.itemsize
            assert at + spec.itemsize <= len(view)


def _dims(source: Source) -> list[int]:
    count = source.number(1) % 18
    return [source.pick(_EXTENTS) if source.number(1) % 2 else source.number(1) for _ in range(count)]


def seeds() -> dict[str, bytes]:
    def seed(dtype: int, shape: list[int], strides: list[int], arena: int, ref: wire.Ref) -> bytes:
        dims = [bytes([len(dims), *(byte for n in dims for byte in (0, n))]) for dims in (shape, strides)]
        return bytes([dtype]) + dims[0] + dims[1] + bytes([arena]) + wire.pack_refs([ref])

    return {
        "float32": seed(11, [4, 8], [8, 1], 4, wire.Ref(1, 0, 64, 128)),
        "broadcast": seed(9, [200, 4], [0, 1], 3, wire.Ref(1, 0, 0, 8)),
        "empty": seed(0, [0, 4], [4, 1], 1, wire.Ref(1, 0, 1, 0)),
        "beyond": seed(11, [4, 8], [8, 1], 4, wire.Ref(1, 0, (1 << 64) - 64, 128)),
        "huge": bytes([11, 2, 1, 6, 1, 5, 2, 1, 5, 0, 1, 7]) + wire.pack_refs([wire.Ref(1, 0, 0, 1 << 46)]),
    }
