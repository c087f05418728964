"""Frames on the ZeroMQ sockets, as the broker reads them off clients and workers, and the messages in their bodies."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz import values
from tests.simulation import route_body

from layerzero.broker.io import frame_codec
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import BackendError, InvalidArgument, ProtocolError
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import RanHere, Ready, Request, encode
from layerzero.ipc.transport.plain import pack_body
from layerzero.ipc.transport.wire import Kind

TYPED = (ProtocolError, InvalidArgument)
FROM_CLIENT, FROM_WORKER = b"C", b"W"


def run(data: bytes) -> None:
    side, frame = data[:1], data[1:]
    said = frame_codec.of_worker(b"W1", frame) if side == FROM_WORKER else frame_codec.of_client(b"C1", frame)
    body = getattr(said, "body", b"")
    if type(said).__name__ == "RouteDefined":
        spec = CallSpec.parse(body)
        assert repr(CallSpec.parse(body)) == repr(spec)  # not by ==: a policy may hold NaN, for its reader to refuse
        spec.prepare("a.kernel", is_graph_safe=False)


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    """The message in the body, as a value."""
    head = 1 + wire.HEADER_BYTES
    body = values.mutated(data[head:], rng)
    return None if body is None else data[:head] + body


def _call(refs: bytes, point: TimelinePoint | None = None, **rest: Any) -> bytes:
    flags, body = wire.pack_call(refs, point, **rest)
    return wire.pack_execute(flags, 1, 2, body)


def seeds() -> dict[str, bytes]:
    refs = wire.pack_refs([wire.Ref(1, 0, 0, 64), wire.Ref(wire.NO_ARENA, 0, 0, 0), wire.Ref(1, 0, 64, 64)])
    digest = bytes(range(wire.DIGEST_BYTES))
    ran = RanHere(kernel_id="alpha.silu", kernel_ns=5, error=BackendError("no", exit_code=1).to_wire())
    error = pack_body(BackendError("no", backend="alpha").to_wire())
    of_client = {
        "execute": wire.pack_execute(0, 1, 2, refs, 5_000_000),
        "execute_digest": _call(refs, digest=digest),
        "execute_point": _call(refs, TimelinePoint(1, 7)),
        "execute_graph_slot": _call(refs, graph_slot=3, binding=1),
        "route": wire.pack(Kind.ROUTE, route=1, body=route_body("gelu", backend="alpha")),
        "route_gpu": wire.pack(Kind.ROUTE, route=2, body=route_body(device="GPU-1")),
        "forget": wire.pack(Kind.FORGET, route=1),
        "unbind": wire.pack(Kind.UNBIND, seq=3),
        "poisoned": wire.pack(Kind.POISONED, route=1, body=digest),
        "overdue": wire.pack(Kind.OVERDUE, aux=1, route=1, time=1_000_000, seq=4),
        "ran_here": wire.pack(Kind.RAN_HERE, route=1, body=encode(ran)),
        "request": wire.pack(Kind.REQUEST, seq=9, body=encode(Request(method="explain", params={"route": b"x"}))),
    }
    of_worker = {
        "ran": wire.pack(Kind.RAN, seq=1, attempt=1, time=500, body=pack_body([[1, 2], 3.5])),
        "left": wire.pack(Kind.LEFT, seq=1, aux=1, body=error),
        "raised": wire.pack(Kind.RAISED, seq=1, attempt=1, body=error),
        "ready": wire.pack(Kind.READY, body=encode(Ready(versions={"lib": "1"}, kernels=["alpha.silu"]))),
    }
    return {
        **{name: FROM_CLIENT + frame for name, frame in of_client.items()},
        **{name: FROM_WORKER + frame for name, frame in of_worker.items()},
    }
