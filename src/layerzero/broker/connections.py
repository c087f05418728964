"""Control sockets of clients, workers and agents: accept and greet them, take what comes through them, close them."""

from __future__ import annotations

import errno
import itertools
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import fd_reserve
from layerzero.broker.io.authentication import Authentication
from layerzero.broker.io.offers import KINDS, Offers
from layerzero.broker.io.peers import HELLO_TIMEOUT_S, Peer, new_identity, note_failure, refuse
from layerzero.broker.io.poller import Poller
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.processes.programs import program_of
from layerzero.broker.processes.registry import Processes
from layerzero.broker.processes.self_registered import Joined, RemoteWorker
from layerzero.broker.processes.user_brokers import UserBrokers
from layerzero.ipc.errors import BrokerLost, Busy, LayerZeroError, OutOfMemory, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control, messages, unwanted

FIRST_CLIENT_S = 10.0  # the client that started us gets so long to say hello, whatever the linger
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_STRANGERS = 64  # connections that have not said hello


class Connections:
    """`welcome` says what a peer that may stay is told. `handle` takes what the core must hear; `forget` a client's
    identity, to which nothing is sent any more; `note_change` is told when `idle_since_s` or `due_s` may be others.
    `is_observer` takes a pid: of a client that alone keeps no idle broker."""

    def __init__(
        self,
        path: Path,
        state: BrokerState,
        poller: Poller,
        links: WorkerLinks,
        offers: Offers,
        lifts: Lifts,
        processes: Processes,
        joined: Joined,
        gate: Authentication,
        users: UserBrokers | None,
        *,
        welcome: Callable[[Peer], messages.Welcome],
        handle: Callable[[ev.Event], None],
        forget: Callable[[bytes], None],
        note_change: Callable[[], None],
        is_observer: Callable[[int], bool],
    ) -> None:
        self._state = state
        self._poller = poller
        self._links = links
        self._offers = offers
        self._lifts = lifts
        self._processes = processes
        self._joined = joined
        self._gate = gate
        self._users = users
        self._welcome = welcome
        self._handle = handle
        self._forget = forget
        self._note_change = note_change
        self._is_observer = is_observer
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._numbers = itertools.count(1)
        self.clients: dict[bytes, Peer] = {}
        self._idle_since_s: float | None = time.monotonic() + FIRST_CLIENT_S  # None while there are clients
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._listener = control.listen(path, is_shared=gate.is_shared)
        poller.watch(self._listener.fileno(), self._accept)

    @property
    def idle_since_s(self) -> float | None:
        """Since when there are no clients, here or at brokers of other users; None while there are."""
        return self._idle_since_s if self._users is None or self._users.is_empty else None

    @property
    def due_s(self) -> float:
        """When the next hello is overdue."""
        return min((peer.since_s + HELLO_TIMEOUT_S for peer in self._strangers()), default=math.inf)

    def _strangers(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if not peer.role]

    def end_silent(self, now_s: float) -> None:
        """Close those whose hello is overdue, and brokers of users that do not start."""
        if self._users is not None:
            self._users.look(now_s)
        for peer in self._strangers():
            if now_s >= peer.since_s + HELLO_TIMEOUT_S:
                self.close(peer)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in PASSING:
                    self._turn_away_with_spare()
                return  # of other errors: the caller has gone meanwhile
            sock.setblocking(False)
            peer = Peer(sock, since_s=time.monotonic())
            if shortage := fd_reserve.shortage(fd_reserve.for_workers()):
                self._turn_away(peer, shortage)
                return
            self._peers[sock.fileno()] = peer
            self._poller.watch(sock.fileno(), lambda: self._receive(peer))
            strangers = self._strangers()
            if len(strangers) > MAX_STRANGERS:  # the oldest, of users who may not connect as long as there are any
                self.close(min(strangers, key=self._gate.knows))
            self._note_change()

    @staticmethod
    def _turn_away(peer: Peer, shortage: str) -> None:
        refuse(peer, Busy(shortage))
        log("peer.refused", error=shortage)
        peer.close()

    def _turn_away_with_spare(self) -> None:
        """There is no descriptor left: the caller gets the spare one for as long as it takes to say so, or its call
        would wake us for ever."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1
        with suppress(OSError):  # a thread was faster, and has the spare one
            self._turn_away(Peer(self._listener.accept()[0]), fd_reserve.shortage(fd_reserve.reserve()))
        with suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _receive(self, peer: Peer) -> None:
        try:
            if not peer.role:
                self._hear_hello(peer)
            elif peer.role == "client":
                try:
                    message, fds = control.receive(peer.sock, *KINDS, messages.GetLifted)
                    if isinstance(message, messages.GetLifted):
                        unwanted.close_all(fds)
                        self._lifts.give(peer, message)
                    else:
                        self._offers.take(peer, message, fds)
                except OutOfMemory as exc:  # nothing is wrong with the client: it goes on without this
                    control.send(peer.sock, messages.Refused(error=exc.to_wire()))
            elif peer.role == "agent":
                self._joined.take(peer)
            else:
                if peer.backlog:
                    self._links.flush(peer)
                self._lifts.take(peer, *control.receive(peer.sock, messages.Lifted))
        except BlockingIOError:
            return
        except (control.Closed, OSError):
            self.close(peer)
        except LayerZeroError as exc:
            if isinstance(self._processes.get((peer.backend, peer.generation)), RemoteWorker):
                # Not closed: the end of this connection is what will tell that the worker has ended.
                self._handle(ev.WorkerMisbehaved(peer.backend, peer.generation, exc.message))
                return
            refuse(peer, exc)
            log("peer.refused", role=peer.role, pid=peer.pid, error=exc.message)
            self.close(peer)
        except Exception as exc:
            self.end_failed(peer, exc)

    def end_failed(self, peer: Peer, exc: Exception) -> None:
        """Handling a message raised this: it costs the peer that sent it, and clients whose calls were in hand, but
        nobody else. What a second failure raises, while the peer is parted from, is the caller's."""
        error = note_failure(exc, peer.role or "stranger", peer.number)
        for client in self._state.bereft():  # better told than left waiting
            self.drop_client(act.DropClient(client.identity, f"a call of yours was lost: {error.message}"))
        if peer.role == "worker":
            self._handle(ev.WorkerMisbehaved(peer.backend, peer.generation, error.message))
        else:
            refuse(peer, error)
            self.close(peer)

    def _hear_hello(self, peer: Peer) -> None:
        if peer.hello is None:
            hello, fds = control.receive(peer.sock, messages.Hello)
            unwanted.close_all(fds)
            challenge = self._gate.examine(peer, hello)
            if challenge is None:
                self._greet(peer, hello)
            else:
                control.send(peer.sock, challenge)
        else:
            proof, fds = control.receive(peer.sock, messages.Proof)
            unwanted.close_all(fds)
            self._gate.verify(peer, proof)
            self._greet(peer, peer.hello)

    def _greet(self, peer: Peer, hello: messages.Hello) -> None:
        fds: tuple[int, ...] = ()
        if hello.role == "worker":
            process = self._processes.of_ticket(hello.ticket)
            if process is None or self._links.get(process.backend, process.generation) is not None:
                raise ProtocolError("unknown worker ticket")
            peer.backend, peer.generation = process.backend, process.generation
            fds = (process.page_fd,)
        elif hello.role not in ("client", "agent"):
            raise ProtocolError(f"unknown role {hello.role!r:.40}; allowed: client, agent, worker")
        elif self._state.stopping:
            raise BrokerLost("the broker is shutting down")
        elif shortage := fd_reserve.shortage(fd_reserve.reserve()):
            raise Busy(shortage)
        elif hello.role == "agent":
            self._joined.check(hello)
        elif self._users is not None and peer.uid != os.getuid():
            peer.role = "redirected"
            self._users.find(peer.uid, partial(self._redirect, peer))
            return
        peer.role, peer.identity, peer.number = hello.role, new_identity(), next(self._numbers)
        self._note_change()
        if peer.role == "client":
            self.clients[peer.identity] = peer
            if not self._is_observer(peer.pid):
                self._idle_since_s = None
            self._handle(ev.ClientJoined(peer.identity, peer.number, peer.pid, program_of(peer.pid)))
        elif peer.role == "worker":
            self._links.add(peer)
        control.send(peer.sock, self._welcome(peer), fds)
        if peer.role == "agent":
            self._joined.add(peer, hello)

    def _redirect(self, peer: Peer, found: Path | LayerZeroError) -> None:
        """Send it on to its user's broker, or say why there is none."""
        if isinstance(found, LayerZeroError):
            refuse(peer, found)
        elif not peer.is_closed:
            mac = b"" if peer.proofs is None else peer.proofs.broker_mac
            with suppress(control.Closed, OSError):
                control.send(peer.sock, messages.Redirect(path=str(found), mac=mac))
        self.close(peer)

    def drop_client(self, action: act.DropClient) -> None:
        peer = self.clients.get(action.identity)
        if peer is not None:
            refuse(peer, ProtocolError(action.detail))
            log("client.dropped", client=peer.number, pid=peer.pid, detail=action.detail)
            self.close(peer)

    def close(self, peer: Peer) -> None:
        """More than once does no harm."""
        fd = peer.sock.fileno()
        if self._peers.pop(fd, None) is None:
            return
        self._poller.unwatch(fd)
        peer.close()
        if peer.role == "client":
            del self.clients[peer.identity]
            self._forget(peer.identity)
            if self._idle_since_s is None and all(self._is_observer(one.pid) for one in self.clients.values()):
                self._idle_since_s = time.monotonic()
                self._note_change()
            self._offers.on_client_left(peer.number)
            self._lifts.on_client_left(peer.number)
            self._handle(ev.ClientLeft(peer.identity))
        elif peer.role == "worker":
            self._links.remove(peer)
            worker = self._state.lifecycle.current(peer.backend, peer.generation)
            is_told = self._state.stopping or (worker is not None and worker.retired_s < math.inf)  # to exit
            if not is_told or peer.backend in self._joined.names:
                self._processes.hung_up(peer.backend, peer.generation)
        elif peer.role == "agent":
            self._joined.part(peer)

    def stop_listening(self) -> None:
        with suppress(OSError):
            for _ in range(control.BACKLOG):  # what these have sent goes with the listener
                control.hang_up(self._listener.accept()[0])
        self._listener.close()

    def close_all(self) -> None:
        """The core hears nothing of it."""
        if self._users is not None:
            self._users.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
