"""What a group's split plans ask of it beside its calls: to be at the same place on all ranks, and to launch there what
has calls of all ranks within."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from layerzero.groups import calls, choices, faults
from layerzero.groups.group import Group
from layerzero.groups.nccl import Nccl
from layerzero.groups.peers import COLLECTIVE
from layerzero.ipc.errors import LayerZeroError


class Collectives(Protocol):
    """Who adds up and puts together what ranks have: a group, or a CUDA graph that is captured (`Captured`)."""

    def all_reduce(self, x: Any, *, out: Any = None) -> Any: ...
    def all_gather(self, x: Any) -> Any: ...


class Captured:
    """Calls of all ranks as a part of the graph that the current stream is captured for. All ranks capture the same."""

    def __init__(self, nccl: Nccl) -> None:
        self._nccl = nccl

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        if out is None:
            out = x.new_empty(x.shape)
            out.copy_(x)
        self._nccl.add_up(out)
        return out

    def all_gather(self, x: Any) -> Any:
        return self._nccl.gather(x)


def nccl_of(group: Group) -> Nccl | None:
    """This rank's, where it runs."""
    found = group._libraries.get(choices.NCCL)
    return found if isinstance(found, Nccl) else None


def turn(group: Group) -> AbstractContextManager[Any]:
    """No other thread of this rank calls within: what is enqueued is in one order on all ranks."""
    return group._lock


def meet(group: Group, what: Sequence[Any], state: int) -> int:
    """All ranks are here, each in a state, from 0 to 255: the least of these. `what`: as of calls, which the ranks must
    agree on. Raises GroupBroken, and RanksDisagree on all."""
    with group._lock:
        peers, _ = group._demand_whole()
        until_s = group._until(None)
        group._calls += 1
        peers.doing = f"call {group._calls}, {what[0]}"
        try:
            head = calls.head(group.generation, group._calls, what)
            for rank in peers.ranks:
                peers.send(rank, head + bytes([state]), until_s)
            told = peers.take(COLLECTIVE, peers.ranks, until_s)
            error = calls.disagreement(group.name, group.rank, head, told)
            if error is None and any(len(one) != len(head) + 1 for one in told.values()):
                raise group._broken(faults.FAILED, "a rank says no state", told)
        except BaseException as exc:
            raise group._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)
        if error is not None:
            raise error
        peers.doing = f"after {peers.doing}"
        return min(state, *(one[-1] for one in told.values()))


def launch(group: Group, work: Callable[[], None]) -> None:
    """What has calls of all ranks within, onto the current stream, behind `meet`: as a call that is not waited for.
    Raises GroupBroken."""
    with group._lock:
        peers, _ = group._demand_whole()
        nccl = nccl_of(group)
        assert nccl is not None
        try:
            nccl.launch(peers, work)
        except BaseException as exc:
            raise group._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)
