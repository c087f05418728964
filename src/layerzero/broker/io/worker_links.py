"""The control sockets of workers, through which they are lent descriptors. One that is busy gets its messages later."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from layerzero.broker.core import events as ev
from layerzero.broker.io.peers import Peer
from layerzero.broker.io.poller import Poller
from layerzero.ipc.transport import control, messages, unwanted

MAX_BACKLOG = 8192  # control messages queued for a busy worker


class WorkerLinks:
    """`handle` takes what the core must hear."""

    def __init__(self, poller: Poller, handle: Callable[[ev.Event], None]) -> None:
        self._poller = poller
        self._handle = handle
        self._peers: dict[tuple[str, int], Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> None:
        self._peers[peer.backend, peer.generation] = peer
        self._by_identity[peer.identity] = peer

    def remove(self, peer: Peer) -> None:
        del self._peers[peer.backend, peer.generation]
        del self._by_identity[peer.identity]

    def get(self, backend: str, generation: int) -> Peer | None:
        return self._peers.get((backend, generation))

    def of(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def tell(self, backend: str, generation: int, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        peer = self.get(backend, generation)
        if peer is None:
            return  # it has just died; its exit event is on the way
        if not peer.backlog:  # then it goes as it is: a broker without descriptors left must not need more
            try:
                control.send(peer.sock, message, fds)
                return
            except BlockingIOError:
                pass
            except (control.Closed, OSError):
                return  # it is dying: its exit event is on the way
        try:
            peer.backlog.append((message, _dup_all(fds)))
        except OSError as exc:
            self._handle(
                ev.WorkerMisbehaved(backend, generation, f"what it does not read cannot be kept for it: {exc}")
            )
            return
        self.flush(peer)
        if len(peer.backlog) > MAX_BACKLOG:
            self._handle(ev.WorkerMisbehaved(backend, generation, "it does not read its control socket"))

    def wake(self, backend: str, generation: int) -> None:
        """Let a worker that sleeps look at its rings. One that has not read what it was told is awake."""
        peer = self.get(backend, generation)
        if peer is not None and not peer.backlog:
            with suppress(control.Closed, OSError):
                control.send(peer.sock, messages.Wake())

    def flush(self, peer: Peer) -> None:
        """Send what is queued, as far as it fits; the rest goes when there is room."""
        while peer.backlog:
            message, fds = peer.backlog[0]
            try:
                control.send(peer.sock, message, fds)
            except BlockingIOError:
                self._poller.want_room(peer.sock.fileno(), True)
                return
            except (control.Closed, OSError):
                pass  # it is dying: its exit event is on the way
            peer.backlog.popleft()
            unwanted.close_all(fds)
        self._poller.want_room(peer.sock.fileno(), False)


def _dup_all(fds: Sequence[int]) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # those before are closed when one fails
    except OSError:
        unwanted.close_all(made)
        raise
    return tuple(made)
