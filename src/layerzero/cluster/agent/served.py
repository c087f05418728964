"""A call that came from another node, made on this node's broker as a client of it makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.client.arrays.recognition import Array, teach
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.client.planning.plans import Plan
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.ops import FUNCTION, OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Received:
    """An array that came from another node, in memory that workers reach; described as DLPack's are."""

    def __init__(self, spec: TensorSpec, data: bytes) -> None:
        """`spec`: a view of the elements, which lie in `data` from its beginning."""
        if spec.span_bytes > len(data):
            raise InvalidArgument(f"{len(data)} bytes came for an array of {spec}")
        self.spec = spec
        self.memory, arena, offset = arenas.pool.allocate(len(data))
        self.memory[: len(data)] = data
        self.address = arena.address + offset
        self.dtype, self.shape, self.strides = spec.dtype, spec.shape, spec.strides


teach(Received, lambda one: Array("dlpack", one.spec, one.address, one, one, writable=False))


def serve(session: Session, head: bytes, memory: Sequence[bytes]) -> list[bytes]:
    """What was told of the call, or its error, and then each result's bytes. Never raises LayerZeroError."""
    try:
        body, time_us = unpack_body(head)
        route = messages.decode(body, messages.Route)
        asked = overlay.Overlay.of(*route.policy["layers"]) if route.policy else None
        token = overlay.baked.set(lambda *_: asked)  # the caller's wishes, not this process's
        try:
            results = session.run(_request(body, route, time_us, memory))
        finally:
            overlay.baked.reset(token)
        report = session.last_report()
        assert report is not None
        told = report.to_dict()
        return [pack_body({"report": {name: told[name] for name in _TOLD}}), *results]
    except LayerZeroError as exc:
        return failed(head, exc)


def failed(head: bytes, exc: LayerZeroError) -> list[bytes]:
    """As `serve`, of a call that ended badly."""
    report = getattr(exc, "report", None)
    attempts = [] if report is None else list(report.to_dict()["attempts"])
    answer = pack_body({"error": exc.to_wire(), "attempts": attempts})
    body, _ = unpack_body(head)
    return [answer, *[b""] * len(messages.decode(body, messages.Route).outputs)]


_TOLD = ("kernel_id", "backend", "worker_pid", "path", "kernel_us", "attempts")


def _request(body: bytes, route: messages.Route, time_us: int, memory: Sequence[bytes]) -> Request:
    op = OPS.get(route.op)
    if op is None or route.op == FUNCTION or op.in_place or op.sized_output or route.device:
        raise InvalidArgument(f"{route.op!r:.40} is no op whose calls another node serves")
    inputs = [None if spec is None else TensorSpec.from_wire(spec) for spec in route.inputs]
    outputs = tuple(TensorSpec.from_wire(spec) for spec in route.outputs)
    if len(inputs) != len(op.inputs) or len(memory) != sum(spec is not None for spec in inputs):
        raise InvalidArgument(f"{len(memory)} arrays came for a call of {route.op}")
    data = iter(memory)
    arrays = tuple(None if spec is None else Received(spec, next(data)) for spec in inputs)

    def plan(*specs: TensorSpec | None, **_: Any) -> Plan:
        return Plan(route.op, specs, route.attrs, outputs, ())

    return Request(
        route.op,
        arrays,
        {"signature": body},
        plan,
        backend=route.backend or None,
        timeout_s=time_us / 1e6 if time_us else None,
        finish=lambda found, _: [bytes(one) for one in found],
    )
