"""What groups and their libraries are started with: arguments, and whether all ranks can; and their end where nobody
has them any more."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.groups import choices
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError

if TYPE_CHECKING:
    from layerzero.functions.environment import FunctionEnv
    from layerzero.groups.gloo import Gloo
    from layerzero.groups.nccl import Nccl
    from layerzero.groups.peers import Peers
    from layerzero.groups.staging import OwnMemory


def leave(pid: int, peers: Peers, own: OwnMemory, libraries: Mapping[str, Gloo | Nccl]) -> None:
    """What `close` does, of a group that nobody has any more: no child's that was forked from its process."""
    if pid != os.getpid() or sys.is_finalizing():
        return
    peers.leave()
    peers.close()
    own.close()
    for one in libraries.values():
        one.drop()


def of_environment(what: str, variable: str, given: int | None) -> int:
    """Raises InvalidArgument."""
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise InvalidArgument(f"lz.group: pass {what}=, or set {variable}, as torchrun does; it is {text!r:.40}")
    return int(text)


def demand_seconds(timeout_s: float) -> None:
    """Raises InvalidArgument."""
    if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < math.inf:
        raise InvalidArgument(f"timeout_s is {timeout_s!r:.40}; allowed: seconds above 0")


def library(
    name: str, runtime: Path, group: str, generation: int, rank: int, gloo_env: FunctionEnv | None, device: int
) -> Gloo | Nccl:
    """Loaded for those who use it: gloo's environments, torch's NCCL."""
    if name == choices.NCCL:
        from layerzero.groups.nccl import Nccl

        return Nccl(runtime, group, generation, rank, device)
    from layerzero.groups.gloo import Gloo

    return Gloo(runtime, group, generation, rank, gloo_env)


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
