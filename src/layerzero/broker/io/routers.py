"""The two ZeroMQ sockets that calls go through: one to all clients, one to all workers. Mechanism only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from layerzero.broker.io import fd_reserve
from layerzero.broker.io.doorkeeper import Door
from layerzero.broker.io.poller import Poller
from layerzero.ipc.transport import sockets

BATCH = 16  # messages taken from one socket before the other one gets its turn
QUEUE = 64  # frames for one client in ZeroMQ's hands, which counts frames and not bytes
MAX_KEPT_BYTES = 16 << 20  # for one client beside them
LAST_S = 0.5  # so long the last frames may take at the end, as ZeroMQ's own may
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
        self._put(identity, frame)

    def _put(self, identity: bytes, frame: bytes) -> None:
        try:
            self.may_have_input = True
            self._sock.send(identity, _SNDMORE | _NOBLOCK)
            self._sock.send(frame, _NOBLOCK)
        except zmq.ZMQError as exc:
            raise Unreachable(exc) from exc

    def close(self) -> None:
        self._sock.close()


@dataclass
class _Kept:
    frames: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0


class _Clients(_Side):
    """The side of the clients. What ZeroMQ takes no more is kept here, in order and up to a number of bytes: a client
    may ask for much and read nothing. `max_frames`: of one client."""

    def __init__(self, max_frames: int, *args: Any) -> None:
        super().__init__(*args)
        self._max_frames = max_frames
        self._kept: dict[bytes, _Kept] = {}

    @property
    def keeps_frames(self) -> bool:
        return bool(self._kept)

    def send(self, identity: bytes, frame: bytes) -> None:
        kept = self._kept.get(identity)
        if kept is None:
            try:
                self._put(identity, frame)
                return
            except Unreachable as exc:
                if not exc.is_full:
                    raise
                kept = self._kept[identity] = _Kept()
        if len(kept.frames) >= self._max_frames or kept.nbytes + len(frame) > MAX_KEPT_BYTES:
            raise Unreachable(zmq.ZMQError(zmq.EAGAIN))
        kept.frames.append(frame)
        kept.nbytes += len(frame)

    def flush(self) -> None:
        """Pass on what there is room for by now."""
        for identity, kept in list(self._kept.items()):
            try:
                while kept.frames:
                    self._put(identity, kept.frames[0])
                    kept.nbytes -= len(kept.frames.popleft())
            except Unreachable as exc:
                if exc.is_full:
                    continue
            del self._kept[identity]

    def forget(self, identity: bytes) -> None:
        """It has left."""
        self._kept.pop(identity, None)

    def close(self) -> None:
        end_s = time.monotonic() + LAST_S
        while self._kept and time.monotonic() < end_s:
            self.flush()
            self._sock.poll(1)
        super().close()


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
        self._front = _Clients(queue, self._context, client_path, QUEUE, poller, from_client, uids, fd_reserve.reserve)
        self._back = _Side(self._context, worker_path, queue, poller, from_worker, uids, fd_reserve.for_workers)
        self.doors = [self._front.door, self._back.door]
        self.send_client, self.send_worker = self._front.send, self._back.send
        self.forget_client = self._front.forget

    @property
    def may_have_input(self) -> bool:
        return self._front.may_have_input or self._back.may_have_input

    @property
    def keeps_frames(self) -> bool:
        """Some wait for clients. Room for them wakes the loop as input does; another use of the socket may eat that."""
        return self._front.keeps_frames

    def take(self) -> None:
        """Until both sockets are empty, but not for ever: under full load there is always more, and a worker's death
        or a deadline must be seen all the same."""
        if self._front.keeps_frames:
            self._front.flush()
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
