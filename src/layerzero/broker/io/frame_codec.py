"""What a frame of a client or of a worker says, and the frames that tell them what the core wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.ipc.errors import (
    BackendError,
    CudaGraphUnsafe,
    InvalidArgument,
    LayerZeroError,
    NoTransport,
    OutputTooSmall,
    ProtocolError,
    from_wire,
)
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.transport.wire import HAS_TAIL, HEADER_BYTES, Kind

WORTH_TELLING_S = 0.05  # a client hears of a wait for a worker's start from here on
MAX_ANSWER_BYTES = wire.MAX_MESSAGE_BYTES - HEADER_BYTES  # to a request
MAX_WORD_BYTES = 1 << 18  # of a worker's answer; it travels on to the client with more around it
_EXECUTE, _RAN = int(Kind.EXECUTE), int(Kind.RAN)  # enums cost a microsecond a use, and these are used on every message
# What a worker may say of a call; anything else it says counts as a failed kernel.
WORKER_CODES = frozenset(
    {InvalidArgument.code, OutputTooSmall.code, BackendError.code, NoTransport.code, CudaGraphUnsafe.code}
)


@dataclass(slots=True)
class Asked:
    """A client wants an answer from the broker itself (requests.py)."""

    seq: int
    request: messages.Request


@dataclass(slots=True)
class Left:
    """A worker does not run a call of a ring. `error`: the kernel raised it."""

    lane: int
    call: int
    error: LayerZeroError | None


# --- what clients say ------------------------------------------------------------------------------------


def of_client(identity: bytes, frame: bytes) -> ev.Event | Asked:
    """Raises ProtocolError."""
    _, kind, flags, route, seq, attempt, aux, time_us = wire.unpack(frame)
    body = frame[HEADER_BYTES:]
    if kind == _EXECUTE:
        point, graph_slot, binding, digest = None, None, 0, b""
        if flags & HAS_TAIL:
            body, point, graph_slot, binding, digest = wire.unpack_call(flags, body)
        may_run_here, after_lane = bool(flags & wire.MAY_RUN_HERE), aux if flags & wire.AFTER_LANE else 0
        timeout_s = time_us / 1e6
        return ev.CallArrived(
            identity, route, seq, timeout_s, body, digest, may_run_here, after_lane, attempt, point, graph_slot, binding
        )
    if kind == Kind.ROUTE:
        return ev.RouteDefined(identity, route, body, aux)
    if kind == Kind.FORGET:
        return ev.RouteForgotten(identity, route)
    if kind == Kind.UNBIND:
        return ev.CallUnbound(identity, seq)
    if kind == Kind.POISONED and len(body) == wire.DIGEST_BYTES:
        return ev.CallPoisoned(identity, route, body)
    if kind == Kind.OVERDUE:
        return ev.LaneOverdue(identity, aux, route, time_us / 1e6, seq)
    if kind == Kind.RAN_HERE:
        ran = messages.decode(body, messages.RanHere)
        error = from_wire(ran.error) if ran.error else None
        if ran.kernel_ns < 0:
            raise ProtocolError(f"a run of {ran.kernel_ns} ns")
        return ev.RanInClient(identity, route, ran.kernel_id, ran.kernel_ns, error, ran.stays_out)
    if kind == Kind.REQUEST:
        return Asked(seq, messages.decode(body, messages.Request))
    raise ProtocolError(f"a client does not send kind {kind} with {len(body)} bytes")


# --- what workers say ------------------------------------------------------------------------------------


def of_worker(identity: bytes, frame: bytes) -> ev.CallRan | ev.CallRaised | Left | messages.Ready:
    """Raises ProtocolError."""
    _, kind, _, _, dispatch, attempt, aux, kernel_ns = wire.unpack(frame)
    body = frame[HEADER_BYTES:]
    if len(body) > MAX_WORD_BYTES:
        raise ProtocolError(f"{len(body)} bytes in one answer; allowed: {MAX_WORD_BYTES}")
    if kind == _RAN:
        return ev.CallRan(identity, dispatch, attempt, kernel_ns, body, bool(aux))
    if kind == Kind.LEFT:
        return Left(aux, dispatch, _kernel_error(body) if body else None)
    if kind == Kind.RAISED:
        return ev.CallRaised(identity, dispatch, attempt, _kernel_error(body))
    if kind == Kind.READY:
        return messages.decode(body, messages.Ready)
    raise ProtocolError(f"a worker does not send kind {kind}")


def _kernel_error(body: bytes) -> LayerZeroError:
    """A worker's word on a failed call, held to what a worker may say."""
    error = from_wire(unpack_body(body))
    if error.code in WORKER_CODES:
        return error
    failure = BackendError(f"{error.code}: {error.message}")
    failure.facts = error.facts
    return failure


# --- what clients are told -------------------------------------------------------------------------------


def _answer(action: act.Answer) -> bytes:
    body, flags = action.body, wire.REPLAYED if action.is_replayed else 0
    if action.attempts or action.waited_s >= WORTH_TELLING_S:
        flags |= wire.HAS_OUTCOME
        outcome = messages.Outcome(attempts=action.attempts, result=action.body, waited_s=action.waited_s)
        body = messages.encode(outcome)
    return wire.pack(
        Kind.DONE,
        flags=flags,
        seq=action.seq,
        attempt=action.attempt,
        aux=action.decision,
        time=action.kernel_ns,
        body=body,
    )


def _release(action: act.ReleaseCall) -> bytes:
    return wire.pack(Kind.RELEASED, seq=action.seq)


def _refuse(action: act.Refuse) -> bytes:
    outcome = messages.Outcome(error=action.error.to_wire(), attempts=action.attempts, candidates=action.candidates)
    body = messages.encode(outcome)
    if len(body) > wire.MAX_MESSAGE_BYTES // 2:  # the verdict must arrive, if need be without its details
        error = type(action.error)(action.error.message[:2000])
        body = messages.encode(messages.Outcome(error=error.to_wire()))
    return wire.pack(Kind.FAILED, flags=wire.STILL_LENT if action.is_lent else 0, seq=action.seq, body=body)


def _decision(action: act.SendDecision) -> bytes:
    return wire.pack(Kind.DECISION, route=action.route, aux=action.decision, body=action.body)


def _lease(action: act.SendLease) -> bytes:
    return wire.pack(Kind.LEASE, route=action.route, aux=action.decision, body=action.body)


def response(seq: int, answer: object) -> bytes:
    """To a request. Raises InvalidArgument for an answer that is too large for a frame."""
    body = msgpack.packb(answer)
    if len(body) > MAX_ANSWER_BYTES:
        raise InvalidArgument(f"the answer has {len(body):,} bytes; allowed: {MAX_ANSWER_BYTES:,}. Ask for less")
    return wire.pack(Kind.RESPONSE, seq=seq, body=body)


def refused_request(seq: int, error: LayerZeroError) -> bytes:
    return wire.pack(Kind.FAILED, seq=seq, body=messages.encode(messages.Outcome(error=error.to_wire())))


# --- what workers are told -------------------------------------------------------------------------------


def _run(action: act.Run) -> bytes:
    flags, body = wire.pack_call(action.body, action.point, action.graph_slot, action.binding)
    return wire.pack_run(flags, action.plan, action.dispatch, action.attempt, action.client, body)


def _prepare(action: act.SendPrepare) -> bytes:
    return wire.pack(Kind.PREPARE, route=action.plan, body=action.body)


def _drop(action: act.SendDrop) -> bytes:
    return wire.pack(Kind.DROP, route=action.plan)


def _allow(action: act.SendAllow) -> bytes:
    return wire.pack(Kind.ALLOW, route=action.plan, aux=action.lane, body=action.neighbours)


def _mute(action: act.SendMute) -> bytes:
    return wire.pack(Kind.MUTE, route=action.plan, aux=action.client, seq=action.graph_slot)


STOP = wire.pack(Kind.STOP)

# The actions that are one frame to whom their `identity` names.
TO_CLIENT: dict[type, Callable[[Any], bytes]] = {
    act.Answer: _answer,
    act.Refuse: _refuse,
    act.ReleaseCall: _release,
    act.SendDecision: _decision,
    act.SendLease: _lease,
}
TO_WORKER: dict[type, Callable[[Any], bytes]] = {
    act.Run: _run,
    act.SendPrepare: _prepare,
    act.SendDrop: _drop,
    act.SendAllow: _allow,
    act.SendMute: _mute,
    act.RetireWorker: lambda _: STOP,
}
