"""A question to a broker over tcp: no session, no calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from layerzero.client.connection.call import error_of
from layerzero.ipc.errors import BrokerLost, ConfigError, NotAllowed
from layerzero.ipc.transport import keys, messages, sockets, wire
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.transport.wire import Kind

TIMEOUT_S = 5.0
BROKER = "broker"  # the name that its public key is accepted under


def ask(endpoint: str, folder: Path, method: str, params: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S) -> Any:
    """The broker's answer. `folder`: this side's keys, which the broker's is among.

    Raises ConfigError without keys, NotAllowed when the broker does not accept ours, BrokerLost when nothing comes
    back, and what the broker answers.
    """
    pair, accepted = keys.own(folder), keys.allowed(folder)
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"{endpoint!r:.80} is no address of a broker; allowed: tcp://ADDRESS:PORT")
    if BROKER not in accepted:
        raise ConfigError(f"the broker's public key is unknown; run: lz keys allow {BROKER} FILE --keys {folder}")
    with zmq.Context() as context:
        sock = sockets.connect_remote(context, endpoint, pair.public, pair.secret, accepted[BROKER])
        monitor = sock.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        try:
            request = messages.Request(method=method, params=dict(params))
            sock.send(wire.pack(Kind.REQUEST, seq=1, body=messages.encode(request)))
            frame = _await(sock, monitor, endpoint, timeout_s)
        finally:
            monitor.close(linger=0)
            sock.close(linger=0)
    header, body = wire.unpack(frame), frame[wire.HEADER_BYTES :]
    if header.kind == Kind.FAILED:
        raise error_of(body)[0]
    return unpack_body(body)


def _await(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes], endpoint: str, timeout_s: float) -> bytes:
    poller = zmq.Poller()
    poller.register(sock, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left_s * 1000) + 1))
        if sock in ready:
            return sock.recv()
        if monitor in ready and sockets.read_event(monitor)[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            text = f"the broker on {endpoint} does not accept this side's key; run there: lz keys allow NAME FILE"
            raise NotAllowed(text)
    raise BrokerLost(
        f"nothing came back from {endpoint} within {timeout_s:g} s: nobody listens there, or its key is not the one "
        f"that is accepted as {BROKER!r}"
    )
