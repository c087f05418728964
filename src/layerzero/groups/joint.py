"""What a group's split plans ask of it beside its calls: to be at the same place on all ranks, and to launch there what
has calls of all ranks within."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from layerzero.groups import calls, choices, faults
from layerzero.groups.group import Group
from layerzero.groups.nccl import Nccl
from layerzero.groups.peers import COLLECTIVE, Peers
from layerzero.ipc.errors import LayerZeroError

if TYPE_CHECKING:
    from layerzero.groups.one_shot import OneShot


class Collectives(Protocol):
    """Who adds up and puts together what ranks have: a group, or a CUDA graph that is captured (`Captured`)."""

    def all_reduce(self, x: Any, *, out: Any = None) -> Any: ...
    def all_gather(self, x: Any) -> Any: ...


class Captured:
    """Calls of all ranks as a part of the graph that the current stream is captured for. All ranks capture the same."""

    def __init__(self, nccl: Nccl, one_shot: OneShot | None = None) -> None:
        """`one_shot`: for the sums that it takes; else NCCL adds up."""
        self._nccl, self._one_shot = nccl, one_shot
        if one_shot is not None:
            one_shot.begin()

    def place(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor for what is added up next; None where any will do."""
        return None if self._one_shot is None else self._one_shot.place(dtype, shape)

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        """`out`: not `x`, where that is its `place`."""
        summed = None if self._one_shot is None else self._one_shot.add_up(x, out)
        if summed is not None:
            return summed
        if out is None:
            out = x.new_empty(x.shape)
            out.copy_(x)
        self._nccl.add_up(out)
        return out

    def end(self) -> None:
        """That was the last call."""
        if self._one_shot is not None:
            self._one_shot.end()

    def all_gather(self, x: Any) -> Any:
        return self._nccl.gather(x)


def nccl_of(group: Group) -> Nccl | None:
    """This rank's, where it runs."""
    found = group._libraries.get(choices.NCCL)
    return found if isinstance(found, Nccl) else None


def next_number(group: Group) -> int:
    """Of what all ranks make at the same place: the same on all, and no other's of this generation."""
    return next(group._libraries.numbers)


def turn(group: Group) -> AbstractContextManager[Any]:
    """No other thread of this rank calls within: what is enqueued is in one order on all ranks."""
    return group._lock


def meet(group: Group, what: Sequence[Any], state: int) -> int:
    """All ranks are here, each in a state, from 0 to 255: the least of these. `what`: as of calls, which the ranks must
    agree on. Raises GroupBroken, and RanksDisagree on all."""
    with _giving_up(group) as peers:
        until_s = group._until(None)
        group._calls += 1
        peers.doing = f"call {group._calls}, {what[0]}"
        head = calls.head(group.generation, group._calls, what)
        for rank in peers.ranks:
            peers.send(rank, head + bytes([state]), until_s)
        told = peers.take(COLLECTIVE, peers.ranks, until_s)
        error = calls.disagreement(group.name, group.rank, head, told)
        if error is None and any(len(one) != len(head) + 1 for one in told.values()):
            raise group._broken(faults.FAILED, "a rank says no state", told)
    if error is not None:
        raise error
    peers.doing = f"after {peers.doing}"
    return min(state, *(one[-1] for one in told.values()))


def exchange(group: Group, value: Any, *, expects: bool = False) -> dict[int, Any]:
    """What each rank says, by rank, behind `meet`. `expects`: a descriptor comes next. Raises GroupBroken."""
    with _giving_up(group) as peers:
        if expects:
            peers.expect_descriptor()
        return group._exchange_values(value, group._until(None))


def pass_descriptor(group: Group, fd: int, source: int) -> int:
    """Of one rank to all others, which expect one; the caller's own."""
    with _giving_up(group) as peers:
        until_s = group._until(None)
        if group.rank != source:
            return peers.take_descriptor(source, until_s)
        for rank in peers.ranks:
            peers.give_descriptor(rank, fd, until_s)
        return fd


def expect_none(group: Group) -> None:
    """No descriptor comes."""
    with _giving_up(group) as peers:
        peers.forget_descriptors()


def launch(group: Group, work: Callable[[], None], *, is_counted: bool = True) -> None:
    """What has calls of all ranks within, onto the current stream: as the call that `meet` began, which is not waited
    for; or as none. Raises GroupBroken."""
    with _giving_up(group) as peers:
        nccl = nccl_of(group)
        assert nccl is not None
        nccl.launch(peers, work, is_counted=is_counted)


@contextmanager
def _giving_up(group: Group) -> Iterator[Peers]:
    """What is raised within ends the group, as in its calls."""
    with group._lock:
        peers, _ = group._demand_whole()
        try:
            yield peers
        except BaseException as exc:
            raise group._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)
