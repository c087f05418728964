"""What peers are told that may stay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.io.peers import Peer
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.version import __version__


@dataclass(frozen=True)
class Greeting:
    """`paths`: of the ZeroMQ sockets, by role; an agent has none to connect to. `has_joined`: some workers are not the
    broker's children, or may come that are not."""

    settings: Settings
    incarnation: str
    paths: Mapping[str, Path]
    has_joined: bool

    def welcome(self, peer: Peer) -> messages.Welcome:
        path = self.paths.get(peer.role)
        return messages.Welcome(
            protocol=wire.PROTOCOL,
            package=__version__,
            broker=self.incarnation,
            broker_pid=os.getpid(),
            endpoint=f"ipc://{path}" if path else "",
            identity=peer.identity,
            number=peer.number,
            max_in_flight=self.settings.max_in_flight,
            timeout_s=self.settings.timeout_s,
            mac=b"" if peer.proofs is None else peer.proofs.broker_mac,
            has_joined=self.has_joined,
            counts=self.settings.counts,
        )
