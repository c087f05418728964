"""Messages with a msgpack body: what a process on either end makes of any bytes, and what it would pass on."""

from __future__ import annotations

import random

from tests.fuzz import values

from layerzero.ipc.cuda.handles import ArenaHandle
from layerzero.ipc.cuda.offer import PATTERN_BYTES, Offer
from layerzero.ipc.errors import BackendError, InvalidArgument, ProtocolError, from_wire
from layerzero.ipc.transport.messages import (
    MESSAGES,
    AddArena,
    AddGpu,
    AddGpuArena,
    AddLane,
    Decision,
    Hello,
    Lease,
    MapGpu,
    Message,
    Outcome,
    Prepare,
    Ready,
    Refused,
    Request,
    Welcome,
    decode,
    encode,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec

TYPED = (ProtocolError, InvalidArgument)
_KINDS = tuple(MESSAGES.values())


def run(data: bytes) -> None:
    message = decode(data, *_KINDS)
    assert encode(decode(encode(message), type(message))) == encode(message)  # not ==: a NaN differs from itself
    for name in ("error", "handle", "offer"):
        if hasattr(message, name):
            _error_handle_or_offer(name, getattr(message, name))
    for spec in (*getattr(message, "inputs", ()), *getattr(message, "outputs", ())):
        made = TensorSpec.from_wire(spec)
        assert 0 <= made.span_bytes <= 1 << 46
        made.is_contiguous  # noqa: B018  # it is computed when asked


def _error_handle_or_offer(name: str, value: object) -> None:
    if name == "error":
        from_wire(from_wire(value).to_wire())
    elif name == "handle":
        handle = ArenaHandle.from_wire(value)
        assert ArenaHandle.from_wire(handle.to_wire()) == handle
    else:
        Offer.from_wire(value)


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    return values.mutated(data, rng)


def seeds() -> dict[str, bytes]:
    handle = ArenaHandle("GPU-1", "client", 1, 1, "vmm", 1 << 21).to_wire()
    ipc = ArenaHandle("GPU-1", "client", 2, 1, "ipc", 1 << 21, bytes(64)).to_wire()
    offer = {"handle": handle, "pattern": bytes(PATTERN_BYTES), "pid": 7}
    spec = TensorSpec.contiguous("float32", (2, 3)).to_wire()
    error = BackendError("no", exit_code=-11, stderr_tail="x").to_wire()
    made: tuple[Message, ...] = (
        Hello(protocols=[1], role="worker", package="0.1.0", pid=1, ticket=b"t" * 16),
        Welcome(
            protocol=1, package="0.1.0", broker="b", broker_pid=2, endpoint="ipc:///x", identity=b"L" + bytes(16),
            number=1, max_in_flight=8, timeout_s=10.0,
        ),
        Refused(error=error),
        AddArena(arena=1, nbytes=4096),
        AddGpu(gpu="GPU-1", has_memops=True, offer=offer),
        AddGpuArena(arena=2, handle=ipc),
        AddLane(lane=1, gpu="GPU-1"),
        MapGpu(client=1, gpu="GPU-1", slot=2, has_memops=False, offer=offer),
        Prepare(op="linear", kernel_id="a.linear", inputs=[spec, spec, None], outputs=[spec], attrs={"x": 1}),
        Decision(
            kernel_id="a.linear", backend="a", worker_pid=1, copies_inputs=False, copies_outputs=False,
            candidates=[["a.linear", "a", 1.0, {"priority": 50.0}, None, [["dtype", "float16"]]]],
        ),
        Lease(lane=1, plan=2, epoch=3),
        Outcome(error=error, attempts=[{"backend": "a", "error": "x"}], result=b"r"),
        Request(method="policy", params={"overlay": {"layers": [{"origin": "o", "values": {"strict_mode": True}}]}}),
        Ready(versions={"torch": "2.13.0"}, kernels=["a.linear"]),
    )  # fmt: skip
    return {message.kind: encode(message) for message in made}
