"""Frames on the ZeroMQ sockets: a fixed header, then a body. docs/protocol.md is the authority.

The hot frames (EXECUTE, RUN, DONE) carry packed structs only; everything else is msgpack (messages.py). What EXECUTE
and RUN have after their references is packed and unpacked by `pack_call` and `unpack_call`, and nowhere else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.timeline_words import TimelinePoint

PROTOCOL = 2

HEADER = struct.Struct("<HBBIQIIQ")
HEADER_BYTES = HEADER.size
REF = struct.Struct("<IIQQ")
REF_BYTES = REF.size
_POINT = struct.Struct("<II")  # lane and number in the timeline page (ipc/shm/timeline_words.py)
_POINT_BYTES = _POINT.size
_GRAPH_SLOT = struct.Struct("<II")  # index of a graph slot in the timeline page, and which of its bindings this is
_GRAPH_SLOT_BYTES = _GRAPH_SLOT.size

MAX_MESSAGE_BYTES = 1 << 20
MAX_ROUTE_BYTES = 1 << 16  # of a ROUTE's body
DIGEST_BYTES = 16
NO_ARENA = 0xFFFFFFFF


class Kind(IntEnum):
    """What a frame is. Each line: from -> to, and what answers it."""

    ROUTE = 1  # client -> broker: defines a call signature; answered by DECISION before its first DONE
    EXECUTE = 2  # client -> broker: one call on a route; answered by exactly one DONE or FAILED
    REQUEST = 3  # client -> broker: status, explain, ...; answered by exactly one RESPONSE or FAILED
    POISONED = 4  # client -> broker: digest of the inputs that were refused as POISON; no answer
    FORGET = 5  # client -> broker: a route is no longer used; no answer
    RAN_HERE = 6  # client -> broker: a kernel ran in the client's own process (message RanHere); no answer
    OVERDUE = 7  # client -> broker: a call on an express lane is late, or its end makes no sense; no answer
    UNBIND = 8  # client -> broker: the graph slot of the call `seq` is no longer used; no answer
    DECISION = 16  # broker -> client: which kernel serves a route, and why
    DONE = 17  # broker -> client: a call's end
    FAILED = 18  # broker -> client: a call's or request's end in an error
    RESPONSE = 19  # broker -> client
    LEASE = 20  # broker -> client: a route's calls may go straight to its worker (message Lease)
    RELEASED = 21  # broker -> client: nobody writes any more to the memory of a call that failed with STILL_LENT
    PREPARE = 32  # broker -> worker: a call signature and its kernel; no answer
    RUN = 33  # broker -> worker: run once; answered by exactly one RAN or RAISED
    STOP = 34  # broker -> worker: finish what was sent, then exit
    DROP = 35  # broker -> worker: a signature is no longer used
    ALLOW = 36  # broker -> worker: a plan may be run on a lane; no answer
    MUTE = 37  # broker -> worker: a graph slot is no longer used; no answer
    READY = 48  # worker -> broker: provider loaded
    RAN = 49  # worker -> broker
    RAISED = 50  # worker -> broker: the kernel raised; the worker lives on
    LEFT = 51  # worker -> broker: a call of a ring was not enqueued, and is the broker's from here on


HAS_DIGEST = 1  # flag of EXECUTE: the body ends with a digest of the inputs
MAY_RUN_HERE = 4  # flag of EXECUTE: the client can run a kernel itself, if policy wants that (FAILED: RUN_IN_PROCESS)
AFTER_LANE = 8  # flag of EXECUTE: the call was on the express lane `aux`, which ended before the call did
HAS_POINT = 16  # flag of EXECUTE and RUN: after its references the body has a point; every call on a GPU has one
REPLAYED = 32  # flag of DONE: the worker launched a CUDA graph that it had captured of this call
HAS_GRAPH_SLOT = 64  # flag of EXECUTE and RUN: bind the call to the graph slot that the body ends with; it is not run
STILL_LENT = 128  # flag of FAILED: a worker that cannot be reached may still write into the call's memory
HAS_OUTCOME = 2  # flag of DONE: the body is an Outcome, with what happened on the way
HAS_TAIL = HAS_DIGEST | HAS_POINT | HAS_GRAPH_SLOT  # flags of EXECUTE and RUN: more than references
_EXECUTE, _RUN = int(Kind.EXECUTE), int(Kind.RUN)  # enums are slow


class Header(NamedTuple):
    """`route`, `seq`, `attempt`, `aux` and `time` mean what docs/protocol.md says for each kind."""

    protocol: int
    kind: int
    flags: int
    route: int
    seq: int
    attempt: int
    aux: int
    time: int


_header = Header._make


class Ref(NamedTuple):
    """Where a tensor lies: an arena of the calling client, and a byte range in it. `arena` is NO_ARENA for
    an optional argument that was left out."""

    arena: int
    flags: int
    offset: int
    nbytes: int


def pack(
    kind: int,
    flags: int = 0,
    route: int = 0,
    seq: int = 0,
    attempt: int = 0,
    aux: int = 0,
    time: int = 0,
    body: bytes = b"",
) -> bytes:
    return _pack(PROTOCOL, kind, flags, route, seq, attempt, aux, time) + body


_pack = HEADER.pack


def pack_call(
    refs: bytes,
    point: TimelinePoint | None = None,
    graph_slot: int | None = None,
    binding: int = 0,
    digest: bytes = b"",
) -> tuple[int, bytes]:
    """(flags, body) of an EXECUTE or a RUN: references, then what there is of the rest, in this order."""
    flags = 0
    if point is not None:
        flags, refs = HAS_POINT, refs + _POINT.pack(point[0], point[1])
    if graph_slot is not None:
        flags, refs = flags | HAS_GRAPH_SLOT, refs + _GRAPH_SLOT.pack(graph_slot, binding)
    if digest:
        flags, refs = flags | HAS_DIGEST, refs + digest
    return flags, refs


def unpack_call(flags: int, body: bytes) -> tuple[bytes, TimelinePoint | None, int | None, int, bytes]:
    """What `pack_call` was given. Raises ProtocolError when it is not there; of the references nothing is checked."""
    point, graph_slot, binding, digest = None, None, 0, b""
    if flags & HAS_DIGEST:
        at = len(body) - DIGEST_BYTES
        if at < 0:
            raise ProtocolError(f"a body of {len(body)} bytes is too short for a digest")
        body, digest = body[:at], body[at:]
    if flags & HAS_GRAPH_SLOT:
        at = len(body) - _GRAPH_SLOT_BYTES
        if at < 0:
            raise ProtocolError(f"a body of {len(body)} bytes is too short for a graph slot")
        (graph_slot, binding), body = _GRAPH_SLOT.unpack_from(body, at), body[:at]
    if flags & HAS_POINT:
        at = len(body) - _POINT_BYTES
        if at < 0:
            raise ProtocolError(f"a body of {len(body)} bytes is too short for a point")
        point, body = _point(_POINT.unpack_from(body, at)), body[:at]
    return body, point, graph_slot, binding, digest


_point = TimelinePoint._make


def pack_execute(
    flags: int, route: int, seq: int, body: bytes, timeout_us: int = 0, after_lane: int = 0, after_call: int = 0
) -> bytes:
    """`flags` and `body` as of `pack_call`. `after_lane`, `after_call`: where the call was, on an express lane that
    ended before it did."""
    if after_lane:
        flags |= AFTER_LANE
    return _pack(PROTOCOL, _EXECUTE, flags, route, seq, after_call, after_lane, timeout_us) + body


def pack_run(flags: int, plan: int, dispatch: int, attempt: int, client: int, body: bytes) -> bytes:
    """`flags` and `body` as of `pack_call`."""
    return _pack(PROTOCOL, _RUN, flags, plan, dispatch, attempt, client, 0) + body


def unpack(frame: bytes) -> Header:
    """The header of a frame; its body is `frame[HEADER_BYTES:]`. Raises ProtocolError."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes is shorter than a header ({HEADER_BYTES})")
    fields = HEADER.unpack_from(frame)
    if fields[0] != PROTOCOL:
        raise ProtocolError(f"frame has protocol {fields[0]}; this side speaks {PROTOCOL}")
    return _header(fields)


def pack_refs(refs: Sequence[Ref]) -> bytes:
    return b"".join([REF.pack(*ref) for ref in refs])


def arenas_of(refs: bytes) -> frozenset[int]:
    """The arenas that a body of references names."""
    return frozenset(ref.arena for ref in unpack_refs(refs, len(refs) // REF_BYTES) if ref.arena != NO_ARENA)


def unpack_refs(body: bytes, count: int) -> list[Ref]:
    """The first `count` references of a body. Raises ProtocolError when they are not there."""
    if len(body) < count * REF_BYTES:
        raise ProtocolError(f"body of {len(body)} bytes is too short for {count} references")
    return [Ref._make(REF.unpack_from(body, i * REF_BYTES)) for i in range(count)]
