"""The two ZeroMQ sockets that calls go through: one to all clients, one to all workers. Mechanism only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import zmq

from layerzero.broker.io import fd_reserve
from layerzero.broker.io.doorkeeper import Door
from layerzero.broker.io.poller import Poller
from layerzero.ipc.transport import sockets

BATCH = 16  # messages taken from one socket before the other one gets its turn
MAX_PASSES = 16  # over both sockets before deaths and deadlines get their turn
# pyzmq's enums cost a microsecond a use, and these are used on every message.
_NOBLOCK, _SNDMORE, _RCVMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE)

Take = Callable[[bytes, bytes], None]  # the sender's identity, a frame


class Unreachable(Exception):
    """A frame cannot be sent: `is_full` when the peer does not read its queue, else the peer is gone."""

    def __init__(self, error: zmq.ZMQError) -> None:
        super().__init__(str(error))
        self.is_full = error.errno == zmq.EAGAIN


class _Side:
    """One of the sockets. `may_have_input`: it must be asked before sleeping: its descriptor woke us, or we sent on it,
    which may eat the edge that announces input."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: Path,
        queue: int,
        poller: Poller,
        take: Take,
        uids: Collection[int],
        keeps: Callable[[], int],
    ) -> None:
        self._sock = sockets.bind_router(context, path, queue, uids)
        bind = partial(sockets.bind_path, self._sock, path, is_shared=bool(uids))
        self.door = Door(self._sock, f"ipc://{path}", bind, keeps)
        self._take = take
        self.may_have_input = True
        poller.watch(sockets.poll_fd(self._sock), self._wake)

    def _wake(self) -> None:
        self.may_have_input = True

    def drain(self) -> bool:
        """Take what is there, up to a batch. True when there may be more."""
        sock, take = self._sock, self._take
        if not sockets.has_input(sock):
            return False
        try:
            for _ in range(BATCH):
                identity = sock.recv(_NOBLOCK)
                frame = sock.recv()
                if not sock.get(_RCVMORE):
                    take(identity, frame)
                else:  # nobody of ours sends several frames
                    sock.recv_multipart()
        except zmq.Again:
            return False
        return True

    def send(self, identity: bytes, frame: bytes) -> None:
        """Raises Unreachable."""
        try:
            self.may_have_input = True
            self._sock.send(identity, _SNDMORE | _NOBLOCK)
            self._sock.send(frame, _NOBLOCK)
        except zmq.ZMQError as exc:
            raise Unreachable(exc) from exc

    def close(self) -> None:
        self._sock.close()


class Routers:
    """`from_client` and `from_worker` take the frames. `queue`: how many wait for one peer. `uids`: as of
    `sockets.bind_router`."""

    def __init__(
        self,
        client_path: Path,
        worker_path: Path,
        poller: Poller,
        *,
        queue: int,
        from_client: Take,
        from_worker: Take,
        uids: Collection[int] = (),
    ) -> None:
        self._context = zmq.Context()
        self._front = _Side(self._context, client_path, queue, poller, from_client, uids, fd_reserve.reserve)
        self._back = _Side(self._context, worker_path, queue, poller, from_worker, uids, fd_reserve.for_workers)
        self.doors = [self._front.door, self._back.door]
        self.send_client, self.send_worker = self._front.send, self._back.send

    @property
    def may_have_input(self) -> bool:
        return self._front.may_have_input or self._back.may_have_input

    def take(self) -> None:
        """Until both sockets are empty, but not for ever: under full load there is always more, and a worker's death
        or a deadline must be seen all the same."""
        for _ in range(MAX_PASSES):
            if not self.may_have_input:
                return
            for side in (self._front, self._back):
                if side.may_have_input:
                    side.may_have_input = False
                    side.may_have_input |= side.drain()

    def take_workers(self) -> None:
        """All that workers have said so far."""
        while self._back.drain():
            pass

    def close(self) -> None:
        """Returns when the last frames have left."""
        self._front.close()
        self._back.close()
        self._context.term()
