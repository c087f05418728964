"""Calls of functions with arrays on a GPU: sent as calls of ops are, answered when the function has returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.client.connection.call import Submitted
from layerzero.client.gpu.arrays import current_stream
from layerzero.client.gpu.calls import GpuCalls
from layerzero.client.gpu.lent import GpuArguments, GpuLoan, Lent, demand_uncaptured
from layerzero.client.gpu.lent_ring import Asked
from layerzero.client.gpu.memory import uuid_of
from layerzero.client.gpu.outcomes import Sent
from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.streams import stream_key
from layerzero.ipc.errors import BackendError, LayerZeroError, NotConnected, NoTransport
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.tensors import TensorSpec


def lend(
    gpus: GpuCalls,
    given: GpuArguments,
    positions: range,
    results: Sequence[TensorSpec] = (),
    stream: int | None = None,
) -> GpuLoan:
    """What an attempt of a call lends, as GpuLoan. Raises what that does, NoTransport, CudaError, and the error of an
    earlier call on the GPU that failed after it had returned."""
    like = given.like
    stream = current_stream(like) if stream is None else stream
    if not gpus.has(like.device):  # to make it would break a capture
        with Context(driver.load(), uuid_of(like.device)) as context:
            demand_uncaptured(context, stream)
    gpu = gpus.gpu(like.device)
    gpus.look(gpu)
    return GpuLoan(gpu, given, positions, results, stream)


def homes(given: GpuArguments, backends: Sequence[str]) -> tuple[str, ...]:
    """Of each environment's workers the one that has this stream's calls: in another, one might come behind later ones
    that wait for it."""
    like = given.like
    key = (like.device, stream_key(current_stream(like)))
    if len(_streams) >= MAX_STREAMS:
        _streams.clear()
    at = _streams.setdefault(key, len(_streams))
    of: dict[str, list[str]] = {}
    for backend in backends:
        of.setdefault(pools.environment_of(backend), []).append(backend)
    return tuple(several[at % len(several)] for several in of.values())


MAX_STREAMS = 4096
_streams: dict[tuple[int, Any], int] = {}  # by GPU and stream: in their order


def steps_down(session: Any, loan: Lent, error: LayerZeroError) -> bool:
    """Whether there is another way for memory to reach the worker that could not use this one."""
    try:
        loan.gpu.step_down(loan.transport, str(error.facts.get("reason") or error.message))
    except NoTransport:
        return False
    session.routes.clear()
    return True


def pending(gpus: GpuCalls, submitted: Submitted) -> Sent:
    """What such a call is waited for by."""
    loan, request = submitted.request.on_gpu, submitted.request
    made = Sent(
        gpus.outcomes, loan.gpu, loan.transport, request.op, submitted.route, submitted.copies, submitted.start_ns
    )
    loan.pending = made
    made.is_awaited, made.hold, made.patience_s = True, (request, submitted.outputs), request.timeout_s
    made.arenas = wire.arenas_of(submitted.refs)
    return made


def send(gpus: GpuCalls, submitted: Submitted) -> None:
    """Behind what its stream does so far, which then waits for it."""
    loan, sent = submitted.request.on_gpu, submitted.pending
    assert isinstance(sent, Sent)
    try:
        with loan.gpu.memory.context, loan.gpu.lock:
            if gpus.is_closing:
                raise NotConnected("the session is being closed; lz.connect() opens another")
            digest = submitted.digest() if submitted.route.needs_digest else b""
            gpus.send(submitted.request, sent, loan.stream, submitted.refs, sent.hold, digest)
            loan.sent()
    finally:
        loan.close()


def take(submitted: Submitted, decision: messages.Decision) -> str:
    """It was answered; what its worker has enqueued may yet fail, which a later call raises. A note for its report.
    Raises BackendError where it saw other memory than it was lent."""
    sent = submitted.pending
    assert isinstance(sent, Sent | Asked)
    sent.is_awaited = False
    if not sent.gpu.is_signed(decision.slot):
        text = f"memory on the GPU does not reach {decision.backend} by {sent.gpu.transport}: pass arrays of the CPU"
        raise BackendError(f"{text}; the function has run", backend=decision.backend)
    submitted.route.is_armed = True
    return sent.gpu.transport_note
