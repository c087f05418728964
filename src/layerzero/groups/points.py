"""From one rank to another: the sender offers, the receiver takes it or says why not; so neither waits in vain. What is
on a GPU goes by NCCL then, once both know that each is on one of its own."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.connection.report import Copy
from layerzero.groups import choices
from layerzero.groups.arrays import KINDS, Given, demand_out, new
from layerzero.groups.choices import MESSAGE_BYTES, MESSAGES, SHARED, Choice
from layerzero.groups.libraries import Libraries, refused
from layerzero.groups.peers import OFFER, POINT, Peers
from layerzero.groups.shared_memory import SharedMemory
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError, RanksDisagree
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM

if TYPE_CHECKING:
    from layerzero.groups.nccl import Nccl

Passed = tuple[Any, Choice, tuple[Copy, ...]]  # what was received, and how it went
_ACCEPTED, _REFUSED = b"PA", b"PR"


@dataclass(frozen=True)
class Ways:
    """What this rank's array may go by. `forced`: the group's backend; `is_waited`: on a GPU, for the call's end."""

    peers: Peers
    shared: SharedMemory
    libraries: Libraries
    forced: str | None
    until_s: float
    is_waited: bool


@dataclass(frozen=True)
class _Offer:
    """`area_of`: the round that the sender is in. `place`: of a tensor on a GPU, why NCCL cannot run there, and which
    GPU it is; None of one of the CPU."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    area_of: int
    place: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{'' if self.place is None else ' of a GPU'}"


def send(ways: Ways, x: Any, to: int) -> Passed:
    """Raises InvalidArgument for what cannot be sent, of which the other is told; RanksDisagree where that takes
    something else, and GroupBroken."""
    peers, shared, until_s = ways.peers, ways.shared, ways.until_s
    try:
        given = Given(x)
        nccl = None if given.device == CPU else _nccl(ways, given.device, "x")
    except LayerZeroError as exc:
        peers.send(to, _offer(exc.message), until_s)
        raise
    is_small = nccl is None and given.nbytes <= MESSAGE_BYTES
    place = () if nccl is None else nccl.reach()
    offer = _offer([given.dtype, list(given.shape), given.nbytes, shared.round, *place])
    peers.send(to, offer + given.data.tobytes() if is_small else offer, until_s)
    theirs = _accepted(peers, to, until_s, is_on_gpu=nccl is not None)
    if nccl is not None:
        error = refused(choices.NCCL, peers.name, {peers.rank: place, to: theirs})
        if error is not None:
            raise error
        ways.libraries.keep(nccl, peers, until_s)
        return pass_agreed(ways, given.keep, to, sends=True, copied=given.copied)
    shared.copied = given.nbytes if is_small else 0
    if not is_small:
        shared.send(given.data, to, until_s)
    return None, _choice("send", given.nbytes), _copies(shared.copied, given.copied)


def receive(ways: Ways, source: int, out: Any, kind: str) -> Passed:
    """The array; without `out` a new one of that kind. Raises as `send`, and InvalidArgument for such an `out`."""
    peers, shared, until_s = ways.peers, ways.shared, ways.until_s
    offer, data = _offered(peers, source, until_s)
    nccl, error, value = None, None, out
    try:
        where = _demanded(peers, source, offer, out, kind)
        if offer.place is not None:
            nccl = _nccl(ways, where, "out")
            error = refused(choices.NCCL, peers.name, {source: offer.place, peers.rank: nccl.reach()})
            if out is None and error is None:
                value = nccl.empty(offer.dtype, offer.shape)
        elif out is None:
            value = new(kind, offer.dtype, offer.shape)
    except LayerZeroError as exc:
        peers.send(source, _REFUSED + pack_body(exc.message), until_s)
        raise
    peers.send(source, _ACCEPTED if nccl is None else _ACCEPTED + pack_body(list(nccl.reach())), until_s)
    if error is not None:  # which the other finds, too
        raise error
    if nccl is not None:
        ways.libraries.keep(nccl, peers, until_s)
        return pass_agreed(ways, value, source, sends=False)
    target = Given(value, "out").data
    shared.copied = 0
    if offer.nbytes <= MESSAGE_BYTES:
        np.copyto(target, np.frombuffer(data, np.uint8))
        shared.copied = offer.nbytes
    else:
        shared.receive(target, source, offer.area_of, until_s)
    return value, _choice("recv", offer.nbytes), _copies(shared.copied, 0)


def pass_agreed(ways: Ways, x: Any, other: int, *, sends: bool, copied: int = 0) -> Passed:
    """A tensor of a GPU where NCCL runs, once both ranks know that these calls meet, and what they are of. `copied`:
    bytes of a strided one. Raises InvalidArgument, GroupBroken."""
    given = Given(x)
    nccl = _nccl(ways, given.device, "x")
    go = nccl.send if sends else nccl.receive
    go(ways.peers, given.keep, other, ways.until_s, is_waited=ways.is_waited)
    choice = choices.on_gpu("send" if sends else "recv", given.nbytes, given.device)
    return None if sends else x, choice, _copies(0, copied or given.copied)


# --- what they say


def _offer(what: Any) -> bytes:
    """An array; or why there is none."""
    body = pack_body(what)
    return OFFER + len(body).to_bytes(4, "little") + body


def _offered(peers: Peers, source: int, until_s: float) -> tuple[_Offer, bytes]:
    """What `source` sends, and its bytes, where there are few. Raises RanksDisagree where it cannot."""
    told = peers.take(POINT, [source], until_s)[source]
    if not told.startswith(OFFER):
        raise ProtocolError(f"rank {source} told {told[:32]!r} in place of an offer")
    end = 6 + int.from_bytes(told[2:6], "little")
    match unpack_body(told[6:end]):
        case str(why):
            raise _disagree(peers, f"let both ranks name the same array: rank {source} cannot send: {why}")
        case [str(dtype), list(shape), int(nbytes), int(area_of), *place] if _is_array(dtype, shape, nbytes):
            match place:
                case []:
                    return _Offer(dtype, tuple(shape), nbytes, area_of, None), told[end:]
                case [str(why), str(name)]:
                    return _Offer(dtype, tuple(shape), nbytes, area_of, (why, name)), told[end:]
    raise ProtocolError(f"rank {source} offered what is no array")


def _is_array(dtype: str, shape: list[Any], nbytes: int) -> bool:
    if dtype not in ITEMSIZE or not all(type(extent) is int and extent >= 0 for extent in shape):
        return False
    return len(shape) <= MAX_NDIM and nbytes == int(math.prod(shape)) * ITEMSIZE[dtype]


def _accepted(peers: Peers, to: int, until_s: float, *, is_on_gpu: bool) -> tuple[str, str]:
    """Which GPU the other has, or why NCCL cannot run there. Raises RanksDisagree, GroupBroken."""
    told = peers.take(POINT, [to], until_s)[to]
    if told.startswith(OFFER):
        text = f"ranks {peers.rank} and {to} send to each other at once; let one of them receive first"
        raise RanksDisagree(f"{text} (group {peers.name!r})", group=peers.name, given={})
    if told.startswith(_REFUSED):
        raise _disagree(peers, str(unpack_body(told[2:])))
    if told == _ACCEPTED and not is_on_gpu:
        return "", ""
    if told.startswith(_ACCEPTED) and is_on_gpu:
        match unpack_body(told[2:]):
            case [str(why), str(name)]:
                return why, name
    raise ProtocolError(f"rank {to} told {told[:32]!r} of what it was offered")


# --- whether it can


def _nccl(ways: Ways, device: int | None, what: str) -> Nccl:
    """This rank's. Raises InvalidArgument where there is none for that GPU."""
    found = ways.libraries.nccl(device, ways.peers)
    choices.demand_place(ways.forced, found.device, what)
    return found


def _demanded(peers: Peers, source: int, offer: _Offer, out: Any, kind: str) -> int | None:
    """The GPU that `out` is on. Raises InvalidArgument, RanksDisagree."""
    if kind not in KINDS:
        raise InvalidArgument(f"kind is {kind!r:.40}; allowed: {', '.join(KINDS)}")
    if out is None:
        if offer.place is not None and kind != "torch":
            raise _unlike(peers, source, offer, "a NumPy array: pass kind='torch', or out")
        if kind == "torch" and "torch" not in sys.modules:
            raise InvalidArgument("import torch before it is received by kind='torch'")
        return None
    device = describe(out).device
    array = demand_out(out, device)
    found = _Offer(array.spec.dtype, tuple(array.spec.shape), 0, 0, None if device == CPU else ("", ""))
    if str(found) != str(offer):
        raise _unlike(peers, source, offer, str(found))
    return None if device == CPU else device


def _unlike(peers: Peers, source: int, offer: _Offer, found: str) -> RanksDisagree:
    text = f"rank {source} sends {offer}, rank {peers.rank} receives {found}"
    return _disagree(peers, f"let both ranks name the same array: {text}")


def _disagree(peers: Peers, text: str) -> RanksDisagree:
    return RanksDisagree(text, group=peers.name, given={})


def _choice(op: str, nbytes: int) -> Choice:
    path = MESSAGES if nbytes <= MESSAGE_BYTES else SHARED
    other = {SHARED if path == MESSAGES else MESSAGES: f"messages take up to {MESSAGE_BYTES:,} bytes"}
    return Choice(op, nbytes, path, f"{nbytes:,} bytes", {**other, "gloo": "it is asked for calls of all ranks alone"})


def _copies(nbytes: int, strided: int) -> tuple[Copy, ...]:
    found = [Copy("x", nbytes, "client", "from one rank to the other")] if nbytes else []
    return (*found, *([Copy("x", strided, "client", "it was strided")] if strided else []))
