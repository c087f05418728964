"""From one rank to another: the sender offers, the receiver takes it or says why not; so neither waits in vain."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerzero.client.connection.report import Copy
from layerzero.groups.arrays import Given, demand_out, new
from layerzero.groups.choices import MESSAGE_BYTES, MESSAGES, SHARED, Choice
from layerzero.groups.peers import OFFER, POINT, Peers
from layerzero.groups.shared_memory import SharedMemory
from layerzero.ipc.errors import LayerZeroError, ProtocolError, RanksDisagree
from layerzero.ipc.transport.plain import pack_body, unpack_body

_ACCEPTED, _REFUSED = b"PA", b"PR"


def send(peers: Peers, shared: SharedMemory, given: Given, to: int, until_s: float) -> tuple[Choice, tuple[Copy, ...]]:
    """Raises RanksDisagree where the other takes something else, and GroupBroken."""
    body = pack_body([given.dtype, list(given.shape), given.nbytes, shared.round])
    is_small = given.nbytes <= MESSAGE_BYTES
    offer = OFFER + len(body).to_bytes(4, "little") + body
    peers.send(to, offer + given.data.tobytes() if is_small else offer, until_s)
    told = peers.take(POINT, [to], until_s)[to]
    if told.startswith(OFFER):
        text = f"ranks {peers.rank} and {to} send to each other at once; let one of them receive first"
        raise RanksDisagree(f"{text} (group {peers.name!r})", group=peers.name, given={})
    if told.startswith(_REFUSED):
        raise _disagree(peers, str(unpack_body(told[2:])))
    if told != _ACCEPTED:
        raise ProtocolError(f"rank {to} told {told[:32]!r} of what it was offered")
    shared.copied = given.nbytes if is_small else 0
    if not is_small:
        shared.send(given.data, to, until_s)
    return _choice("send", given.nbytes), _copies(shared.copied, given.copied)


def receive(
    peers: Peers, shared: SharedMemory, source: int, out: Any, kind: str, until_s: float
) -> tuple[Any, Choice, tuple[Copy, ...]]:
    """The array; without `out` a new one of that kind. Raises as `send`, and InvalidArgument for such an `out`."""
    told = peers.take(POINT, [source], until_s)[source]
    if not told.startswith(OFFER):
        raise ProtocolError(f"rank {source} told {told[:32]!r} in place of an offer")
    end = 6 + int.from_bytes(told[2:6], "little")
    match unpack_body(told[6:end]):
        case [str(dtype), list(extents), int(nbytes), int(of)]:
            shape = tuple(map(int, extents))
        case _:
            raise ProtocolError(f"rank {source} offered what is no array")
    try:
        value = _target(peers, source, dtype, shape, out, kind)
        data = Given(value, "out").data
        if len(data) != nbytes:
            raise ProtocolError(f"rank {source} offered {nbytes} bytes of {dtype}{list(shape)}")
    except LayerZeroError as exc:
        peers.send(source, _REFUSED + pack_body(exc.message), until_s)
        raise
    peers.send(source, _ACCEPTED, until_s)
    shared.copied = 0
    if nbytes <= MESSAGE_BYTES:
        np.copyto(data, np.frombuffer(told, np.uint8, offset=end))
        shared.copied = nbytes
    else:
        shared.receive(data, source, of, until_s)
    return value, _choice("recv", nbytes), _copies(shared.copied, 0)


def _target(peers: Peers, source: int, dtype: str, shape: tuple[int, ...], out: Any, kind: str) -> Any:
    if out is None:
        return new(kind, dtype, shape)
    array = demand_out(out)
    found = f"{array.spec.dtype}{list(array.spec.shape)}"
    if found != f"{dtype}{list(shape)}":
        text = f"rank {source} sends {dtype}{list(shape)}, rank {peers.rank} receives {found}"
        raise _disagree(peers, f"let both ranks name the same array: {text}")
    return out


def _disagree(peers: Peers, text: str) -> RanksDisagree:
    return RanksDisagree(text, group=peers.name, given={})


def _choice(op: str, nbytes: int) -> Choice:
    path = MESSAGES if nbytes <= MESSAGE_BYTES else SHARED
    other = {SHARED if path == MESSAGES else MESSAGES: f"messages take up to {MESSAGE_BYTES:,} bytes"}
    return Choice(op, nbytes, path, f"{nbytes:,} bytes", {**other, "gloo": "it is asked for calls of all ranks alone"})


def _copies(nbytes: int, strided: int) -> tuple[Copy, ...]:
    found = [Copy("x", nbytes, "client", "from one rank to the other")] if nbytes else []
    return (*found, *([Copy("x", strided, "client", "it was strided")] if strided else []))
