"""gloo and NCCL of a rank: which run, and how they are started by all ranks, or for two of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.groups import choices
from layerzero.groups.peers import Peers
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError

if TYPE_CHECKING:
    from layerzero.functions.environment import FunctionEnv
    from layerzero.groups.gloo import Gloo
    from layerzero.groups.nccl import Nccl

Exchange = Callable[[Any, float], Mapping[int, Any]]  # what each rank says, by rank


class Libraries:
    """Of one generation of a group."""

    def __init__(self, runtime: Path, gloo_env: FunctionEnv | None, token: str = "") -> None:
        """`token`: of the meeting's roster."""
        self._runtime, self._gloo_env, self._token = runtime, gloo_env, token
        self._running: dict[str, Gloo | Nccl] = {}  # by path
        self._by_all: set[str] = set()  # of which all ranks know that all can start them
        self.numbers = itertools.count(1)  # of what all ranks make in one order

    def get(self, name: str) -> Gloo | Nccl | None:
        """None where it does not run."""
        return self._running.get(name)

    def start(self, name: str, device: int, peers: Peers, until_s: float, exchange: Exchange) -> LayerZeroError | None:
        """By all ranks, where they have not yet. Why it cannot be, on whichever rank. Raises GroupBroken."""
        if name in self._by_all:
            return None
        made = self._running.get(name) or self._made(name, device, peers)
        until_s = max(until_s, time.monotonic() + choices.START_S)
        told = exchange([made.why_not(), made.place()], until_s)
        error = refused(name, peers.name, told)
        if error is None:
            if name not in self._running:  # as it does where two ranks began
                self._running[name] = made
                made.start(peers, len(peers.ranks) + 1, until_s)
            exchange("", until_s)
            made.started()
            self._by_all.add(name)
        return error

    def nccl(self, device: int | None, peers: Peers) -> Nccl:
        """The one that runs, or a new one on that GPU, or on torch's current one, for `keep`. Raises InvalidArgument
        where it runs on another GPU."""
        from layerzero.groups.nccl import Nccl, current_device

        found = self._running.get(choices.NCCL)
        if isinstance(found, Nccl):
            if device is not None:
                choices.demand_its_gpu(found, device)
            return found
        return self._made(choices.NCCL, current_device() if device is None else device, peers)  # type: ignore[return-value]

    def keep(self, nccl: Nccl, peers: Peers, until_s: float) -> None:
        """Start it where it does not run, by this rank alone: connections are made with the calls."""
        if choices.NCCL not in self._running:
            self._running[choices.NCCL] = nccl
            nccl.start(peers, len(peers.ranks) + 1, until_s)

    def wait(self, peers: Peers, until_s: float) -> None:
        """Until GPUs have done their calls. Raises GroupBroken."""
        for one in self._running.values():
            one.wait(peers, until_s)

    def void(self) -> int:
        """Of how many calls that nobody has waited for there is no result."""
        return sum(one.void() for one in self._running.values())

    def close(self) -> None:
        """Once GPUs have done what nobody has waited for."""
        for one in self._running.values():
            one.close()

    def drop(self) -> None:
        """End them at once."""
        for one in self._running.values():
            one.drop()
        self._running.clear()

    def _made(self, name: str, device: int, peers: Peers) -> Gloo | Nccl:
        """Loaded for those who use it: gloo's environments, torch's NCCL."""
        if name == choices.NCCL:
            from layerzero.groups.nccl import Nccl

            # Of its name alone a group that was killed, or is being taken down, may have another one's file there.
            name = f"{peers.name}.{self._token}"
            return Nccl(self._runtime, name, peers.generation, peers.rank, device)
        from layerzero.groups.gloo import Gloo

        return Gloo(self._runtime, peers.name, peers.generation, peers.rank, self._gloo_env)


def refused(name: str, group: str, told: Mapping[int, Any]) -> LayerZeroError | None:
    """`told`: of each rank, why it cannot start it, and the GPU that it would be on."""
    why = {rank: str(text) for rank, (text, _) in told.items() if text}
    if why:
        rank, text = min(why.items())
        return EnvError(f"{text}\n(rank {rank} of group {group!r} cannot start {name})", ranks=sorted(why))
    try:
        choices.demand_one_each(group, {rank: str(place) for rank, (_, place) in told.items()})
    except InvalidArgument as exc:
        return exc
    return None
