"""The broker's ends of control sockets, without processes and without a loop: for the targets that speak to them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.fuzz import scratch
from tests.simulation import GPU
from tests.unit.broker.driver import Driver

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.connections import Connections
from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io.authentication import Authentication
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.io.offers import Offers
from layerzero.broker.io.page_poller import PagePoller
from layerzero.broker.io.peers import Peer
from layerzero.broker.io.poller import Poller
from layerzero.broker.io.timeline_pages import TimelinePages
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.lifting.store import LiftStore
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.registry import Processes
from layerzero.broker.processes.self_registered import Joined
from layerzero.broker.processes.supervisor import Process
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.transport import control, messages, unwanted

_FOLDER = scratch.folder()
TICKET = b"ticket of alpha.."
JOINED = "gamma"  # the backend of agents
_MANIFEST = SimpleNamespace(descriptor_path=Path(__file__), env={}, provider_target="some.provider")


def _absence(backend: str) -> Rejection:
    return Rejection(Reason.NOT_JOINED, "no worker has joined", f"start one for {backend}")


_LAUNCHER = SimpleNamespace(joined=frozenset({JOINED}), manifests={JOINED: _MANIFEST}, env_ids=dict, absence=_absence)


class BrokerEnds:
    """`alpha` may say hello with TICKET. Actions are carried out as server.py does, as far as they concern offers."""

    def __init__(self) -> None:
        self.driver = Driver("alpha", "beta", JOINED, express=True)
        self._poller = Poller()
        self._lanes, self._pages = LanePages(), TimelinePages()
        state, handle = self.driver.state, self.handle
        state.engine.devices.setdefault(GPU, state.engine.devices[""])
        links = WorkerLinks(self._poller, handle)
        page_poller = PagePoller(state, handle, links, self._lanes, self._pages, lambda _: None)
        self._offers = Offers(state, handle, links, self._lanes, self._pages, page_poller)
        settings = SimpleNamespace(start_timeout_s=1.0, joined_silence_s=5.0, store=_FOLDER)
        self._joined = Joined(
            cast(Settings, settings),
            cast(Launcher, _LAUNCHER),
            handle=handle,
            on_end=lambda remote: remote.reap() and None,
            on_start=lambda *_: None,
            is_linked=lambda *_: False,
            note_change=lambda: None,
        )
        self._lifts = Lifts(state, {}, links, self._pages, LiftStore(_FOLDER / "lifted"), lambda: None, handle)
        self.connections = Connections(
            _FOLDER / "broker.sock",
            state,
            self._poller,
            links,
            self._offers,
            self._lifts,
            cast(Processes, _Started()),
            self._joined,
            Authentication(None, ()),
            None,
            welcome=self._welcome,
            handle=handle,
            forget=lambda _: None,
            note_change=lambda: None,
            is_observer=lambda pid: False,
        )

    def handle(self, event: ev.Event) -> None:
        for action in self.driver(event):
            match action:
                case act.CloseArena():
                    self._offers.close_arena(action)
                case act.CloseGpu():
                    self._pages.close(action.client, action.gpu)
                case act.RevokeLane():
                    self._lanes.revoke(action.lane, action.epoch)
                case act.EndLane():
                    self._lanes.end(action.lane)
                case act.DropClient():
                    self.connections.drop_client(action)

    def _welcome(self, peer: Peer) -> messages.Welcome:
        return messages.Welcome(
            protocol=1, package="0", broker="b", broker_pid=1, endpoint="ipc://x", identity=peer.identity,
            number=peer.number, max_in_flight=8, timeout_s=1.0,
        )  # fmt: skip

    def dial(self) -> socket.socket:
        """Not accepted yet."""
        return control.connect(_FOLDER / "broker.sock", timeout_s=5)

    def connect(self) -> socket.socket:
        sock = self.dial()
        self.point()
        return sock

    def point(self) -> None:
        """Everything that is there is taken."""
        self._poller.wait(0)

    def close(self) -> None:
        self.connections.stop_listening()
        self.connections.close_all()
        self._lanes.close()
        self._pages.close_all()
        self._offers.close()
        self._lifts.close()
        self._joined.close()
        self._poller.close()


class _Started:
    """One worker process that has not said hello yet."""

    page_fd, backend, generation, ticket = 2, "alpha", 1, TICKET

    def of_ticket(self, ticket: bytes) -> Process | None:
        return cast(Process, self) if ticket == TICKET else None

    def get(self, key: tuple[str, int]) -> Process | None:
        return cast(Process, self) if key == (self.backend, self.generation) else None

    def hung_up(self, backend: str, generation: int) -> None:
        assert backend == "alpha"


def open_descriptors() -> list[str]:
    """When those that are closed in a thread are."""
    read, write = os.pipe()
    unwanted.close_all((write,))
    os.read(read, 1)
    os.close(read)
    return sorted(os.listdir("/proc/self/fd"))
