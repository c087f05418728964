"""What groups are started with: arguments; and their end where nobody has them any more."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING

from layerzero.ipc.errors import InvalidArgument

if TYPE_CHECKING:
    from layerzero.groups.libraries import Libraries
    from layerzero.groups.peers import Peers
    from layerzero.groups.staging import OwnMemory


def leave(pid: int, peers: Peers, own: OwnMemory, libraries: Libraries) -> None:
    """What `close` does, of a group that nobody has any more: no child's that was forked from its process."""
    if pid != os.getpid() or sys.is_finalizing():
        return
    peers.leave()
    peers.close()
    own.close()
    libraries.drop()


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
