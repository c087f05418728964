"""The calls of all ranks: what each takes and gives, how ranks agree on one, and how it goes by each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from layerzero.client.connection.report import Copy
from layerzero.groups import choices, reducing
from layerzero.groups.arrays import Given, Result
from layerzero.groups.peers import COLLECTIVE, HEAD
from layerzero.groups.shared_memory import SharedMemory
from layerzero.ipc.errors import InvalidArgument, ProtocolError, RanksDisagree
from layerzero.ipc.transport.plain import pack_body, unpack_body

if TYPE_CHECKING:
    from layerzero.groups.gloo import Gloo
    from layerzero.groups.peers import Peers


@dataclass(frozen=True)
class Op:
    """`is_split`: each rank has a part of `x` along the first dimension; `reduces`: elements of all ranks become one;
    `is_in_place`: out may be `x`."""

    name: str
    is_split: bool = False
    reduces: bool = False
    is_in_place: bool = False

    def result_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Raises InvalidArgument."""
        if self.is_split and (not shape or shape[0] % size):
            raise InvalidArgument(f"x has shape {list(shape)}; allowed: a first dimension that {size} ranks divide")
        if self.name == "all_gather":
            return (size * shape[0], *shape[1:]) if shape else (size,)
        return (shape[0] // size, *shape[1:]) if self.name == "reduce_scatter" else shape

    def demand(self, given: Given, detail: Any, size: int) -> None:
        """Raises InvalidArgument for what it does not compute."""
        if self.reduces:
            reducing.demand(detail, given.dtype)
        elif self.name == "broadcast" and (type(detail) is not int or not 0 <= detail < size):
            raise InvalidArgument(f"root is {detail!r:.40}; allowed: 0 to {size - 1}")

    def share(self, nbytes: int, size: int) -> int:
        """Bytes for each other rank."""
        return nbytes // size if self.is_split else nbytes

    def cannot_gloo(self, dtype: str) -> str:
        """Why gloo has no such call; empty where it has."""
        return f"gloo adds up no {dtype}" if self.reduces and dtype not in choices.GLOO_DTYPES else ""

    def cannot_nccl(self, dtype: str) -> str:
        return f"nccl adds up no {dtype}" if self.reduces and dtype not in choices.NCCL_DTYPES else ""


ALL_REDUCE = Op("all_reduce", reduces=True, is_in_place=True)
ALL_GATHER = Op("all_gather")
REDUCE_SCATTER = Op("reduce_scatter", is_split=True, reduces=True)
ALL_TO_ALL = Op("all_to_all", is_split=True)
BROADCAST = Op("broadcast", is_in_place=True)
BARRIER = Op("barrier")
BY_NAME = {op.name: op for op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, BARRIER)}


@dataclass(frozen=True)
class Call:
    """One of this rank's; `given` and `result` are None where it cannot be made. `detail`: the reduction's op, or the
    root. `is_waited`: on a GPU, for its end."""

    op: Op
    rank: int
    size: int
    given: Given
    result: Result
    detail: Any
    until_s: float
    is_waited: bool = True


# --- agreeing


def head(generation: int, number: int, what: Sequence[Any]) -> bytes:
    """What a rank tells all others first: the same bytes where they agree."""
    body = pack_body([generation, number, *what])
    return HEAD + len(body).to_bytes(4, "little") + body


def payload(op: Op, given: Given, rank: int, to: int, size: int, detail: Any) -> bytes:
    """What goes to a rank with the first message of a small call."""
    if op is BROADCAST and rank != detail:
        return b""
    share = op.share(given.nbytes, size)
    data = given.data[to * share : (to + 1) * share] if op.is_split else given.data
    return data.tobytes()  # type: ignore[no-any-return]


def opened(call: Call, own: bytes, peers: Peers, *, is_said: bool) -> dict[int, bytes]:
    """What the others begin the call with; each gets `own`, and if it `is_said` what is for it. Raises GroupBroken."""
    for rank in peers.ranks:
        said = payload(call.op, call.given, call.rank, rank, call.size, call.detail) if is_said else b""
        peers.send(rank, own + said, call.until_s)
    return peers.take(COLLECTIVE, peers.ranks, call.until_s)


def disagreement(group: str, rank: int, own: bytes, told: Mapping[int, bytes]) -> RanksDisagree | None:
    if all(message.startswith(own) for message in told.values()):
        return None
    given = {one: _text(message) for one, message in sorted({**told, rank: own}.items())}
    text = "; ".join(f"rank {one}: {what}" for one, what in given.items())
    return RanksDisagree(
        f"let all ranks of group {group!r} give the same: {text}",
        group=group,
        given={str(one): what for one, what in given.items()},
    )


def _text(message: bytes) -> str:
    try:
        body = unpack_body(message[6 : 6 + int.from_bytes(message[2:6], "little")])
    except ProtocolError:
        return "another call"
    match body:
        case [int(), int(), "refused", str(why)]:
            return f"what it cannot call with: {why}"
        case [int(), int(), str(name), detail, str(dtype), list(shape), str(path)]:
            return f"{name}{'' if detail == '' else f'({detail})'} of {dtype}{shape} by {path}"
    return "another call"


# --- going


def run_by_messages(call: Call, told: Mapping[int, Any]) -> tuple[Copy, ...]:
    given, out, ranks = call.given, call.result.data, range(call.size)
    if call.op is BROADCAST:
        source = given.data if call.rank == call.detail else told[call.detail]
        if source is not given.data or call.result.value is not given.keep:
            np.copyto(out, source)
        return _copied(len(out), "in messages")
    share = call.op.share(given.nbytes, call.size)
    own = given.data[call.rank * share : (call.rank + 1) * share] if call.op.is_split else given.data
    parts = [own if rank == call.rank else told[rank] for rank in ranks]
    if call.op.reduces:
        if len(out):
            reducing.reduce_into(out, parts, call.detail, given.dtype)
        return _copied((call.size - 1) * share, "in messages")
    for rank in ranks:
        np.copyto(out[rank * share : (rank + 1) * share], parts[rank])
    return _copied((2 * call.size - 1) * share, "in messages")


def open_in_shared_memory(
    call: Call, own: bytes, shared: SharedMemory, peers: Peers
) -> tuple[tuple[Copy, ...], RanksDisagree | None]:
    """Agree, and go: the first round is written before anybody is told. Raises GroupBroken."""
    found: list[RanksDisagree] = []

    def opening() -> None:
        error = disagreement(peers.name, call.rank, own, opened(call, own, peers, is_said=False))
        if error is not None:
            found.append(error)
            raise error

    shared.opening = opening
    try:
        return (*_copied(call.given.copied, "it was strided"), *run_in_shared_memory(call, shared)), None
    except RanksDisagree:
        if not found:
            raise
        return (), found[0]


def run_in_shared_memory(call: Call, shared: SharedMemory) -> tuple[Copy, ...]:
    given, out, until_s = call.given, call.result.data, call.until_s
    shared.copied = 0
    if call.op is ALL_REDUCE:
        shared.all_reduce(given.data, out, call.detail, given.dtype, until_s)
    elif call.op is REDUCE_SCATTER:
        shared.reduce_scatter(given.data, out, call.detail, given.dtype, until_s)
    elif call.op is ALL_GATHER:
        shared.all_gather(given.data, out, until_s)
    elif call.op is ALL_TO_ALL:
        shared.all_to_all(given.data, out, until_s)
    else:
        shared.broadcast(given.data, out, call.detail, until_s)
    return _copied(shared.copied, "into and out of the group's shared memory")


def run_by_gloo(call: Call, gloo: Gloo, peers: Peers) -> tuple[Copy, ...]:
    given, op = call.given, call.op
    if op is BARRIER:
        gloo.run(peers, op.name, until_s=call.until_s)
        return ()
    if not given.nbytes:
        return ()
    more = (call.detail, given.dtype) if op.reduces else (call.detail,) if op is BROADCAST else ()
    found = gloo.run(peers, op.name, given.data, *more, until_s=call.until_s)
    np.copyto(call.result.data, found)
    inside = given.nbytes if op.reduces or op is BROADCAST else 0
    return (
        *gloo.copies,
        *_copied(inside, "gloo works in place", "worker"),
        *_copied(len(found), "out of the worker's answer"),
    )


def _copied(nbytes: int, reason: str, where: str = "client") -> tuple[Copy, ...]:
    return (Copy("x", nbytes, where, reason),) if nbytes else ()


def run(call: Call, path: str, told: Mapping[int, bytes], begin: int, library: Any, peers: Peers) -> tuple[Copy, ...]:
    """By gloo's or nccl's library, or with what the others' messages have from `begin` on; what was copied. Raises
    GroupBroken."""
    strided = _copied(call.given.copied, "it was strided")
    if path == choices.NCCL:
        return (*strided, *library.run(peers, call))
    if path == choices.GLOO:
        return (*strided, *run_by_gloo(call, library, peers))
    rest = {rank: np.frombuffer(message, np.uint8, offset=begin) for rank, message in told.items()}
    return (*strided, *run_by_messages(call, rest))
