"""Questions over tcp: `health`, `status` and `ping`, from those whose keys are accepted. Nothing else crosses tcp:
memory travels as file descriptors, which only unix sockets carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from layerzero.broker.io import fd_reserve, frame_codec
from layerzero.broker.io.doorkeeper import Door
from layerzero.broker.io.peers import note_failure
from layerzero.broker.io.poller import Poller
from layerzero.ipc.errors import ConfigError, LayerZeroError, NotAllowed, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.transport import keys, sockets

METHODS = ("health", "ping", "status")
MAX_CONNECTIONS = 64  # with those that have not shown a key yet
BATCH = 16  # questions taken before calls get their turn
_ZAP = "inproc://zeromq.zap.01"  # https://rfc.zeromq.org/spec/27
_NOBLOCK = int(zmq.NOBLOCK)

Answer = Callable[[str, Mapping[str, Any]], Any]


class Remote:
    """Binds `endpoint`. Raises ConfigError: no tcp, no key pair, nobody accepted, or the address cannot be had."""

    def __init__(self, endpoint: str, folder: Path, poller: Poller, answer: Answer) -> None:
        if not endpoint.startswith("tcp://"):
            raise ConfigError(f"setting remote (LAYERZERO_REMOTE): {endpoint!r:.80}; allowed: tcp://ADDRESS:PORT")
        pair, self._accepted = keys.own(folder), {key: name for name, key in keys.allowed(folder).items()}
        if not self._accepted:
            raise ConfigError(
                f"nobody may ask over {endpoint}: no public key is in {folder / 'allowed'}; run: lz keys allow NAME "
                f"FILE --keys {folder}"
            )
        self._answer = answer
        self.may_have_input = True
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        try:
            self._sock = sockets.bind_remote(self._context, endpoint, pair.secret)
        except zmq.ZMQError as exc:
            self._zap.close()
            self._context.term()
            raise ConfigError(f"setting remote (LAYERZERO_REMOTE): {endpoint}: {exc}") from exc
        for sock in (self._zap, self._sock):
            poller.watch(sockets.poll_fd(sock), self._wake)
        self.endpoint = self._sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self.door = Door(self._sock, self.endpoint, self._bind, fd_reserve.reserve, MAX_CONNECTIONS)
        log("remote.listens", endpoint=self.endpoint, accepted=list(self._accepted.values()))

    def _bind(self) -> None:
        self._sock.bind(self.endpoint)

    def _wake(self) -> None:
        self.may_have_input = True

    def take(self) -> None:
        """Some of what is there."""
        if not self.may_have_input:
            return
        self.may_have_input = False
        for _ in range(BATCH):
            is_admitting, is_asked = sockets.has_input(self._zap), sockets.has_input(self._sock)
            if is_admitting:
                self._admit()
            if is_asked:
                self._take_question()
            if not (is_admitting or is_asked):
                return
        self.may_have_input = True

    def _admit(self) -> None:
        """Somebody wants to connect: is the key accepted?"""
        version, number, _, address, _, mechanism, *credentials = self._zap.recv_multipart()
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        name = self._accepted.get(key)
        if name is None:
            log("remote.refused", address=address.decode(errors="replace"), key=key.decode())
        status = (b"200", b"OK") if name is not None else (b"400", b"this key is not accepted")
        self._zap.send_multipart([version, number, *status, (name or "").encode(), b""])

    def _take_question(self) -> None:
        identity, *parts = self._sock.recv_multipart(_NOBLOCK)
        try:
            asked = frame_codec.of_client(identity, parts[0]) if len(parts) == 1 else None
            if not isinstance(asked, frame_codec.Asked):
                raise ProtocolError("only requests are answered over tcp; calls need a unix socket")
        except ProtocolError as exc:
            log("remote.misled", error=exc.message)
            return
        method = asked.request.method
        try:
            if method not in METHODS:
                raise NotAllowed(f"{method!r:.60} is not answered over tcp; allowed: {', '.join(METHODS)}")
            frame = frame_codec.response(asked.seq, self._answer(method, asked.request.params))
        except LayerZeroError as exc:
            frame = frame_codec.refused_request(asked.seq, exc)
        except Exception as exc:  # it costs who asked, and nobody else
            frame = frame_codec.refused_request(asked.seq, note_failure(exc, "remote", method))
        try:
            self._sock.send_multipart([identity, frame], _NOBLOCK)
        except zmq.ZMQError as exc:  # it has gone, or does not read
            log("remote.unreachable", error=str(exc))

    def close(self) -> None:
        self._sock.close(linger=0)
        self._zap.close(linger=0)
        self._context.term()
