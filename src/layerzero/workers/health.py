"""`python -m layerzero.workers.health --backend NAME --directory DIR [--secret-file FILE]`: can this backend serve?

Asks the broker about that very backend. Exit code 0: it serves, or would start with the next call. 1: it cannot, or no
broker answers; a line on stdout says why. For a container's health check: it needs what a worker needs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from layerzero.ipc.errors import LayerZeroError, ProtocolError, from_wire
from layerzero.ipc.transport import control, messages, secret, sockets, wire
from layerzero.ipc.transport.endpoints import Endpoints, default_runtime_dir
from layerzero.ipc.transport.hello import greet
from layerzero.ipc.transport.plain import unpack_body

TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="layerzero.workers.health", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--directory", type=Path, help="folder of the broker's sockets; default LAYERZERO_RUNTIME_DIR")
    parser.add_argument("--secret-file", type=Path, help="the stack's secret; default LAYERZERO_SECRET_FILE")
    args = parser.parse_args(argv)
    environ = os.environ
    folder = args.directory or environ.get("LAYERZERO_RUNTIME_DIR") or default_runtime_dir(environ)
    secret_file = args.secret_file or environ.get("LAYERZERO_SECRET_FILE")
    try:
        key = secret.read(Path(secret_file)) if secret_file else None
        health = ask(Endpoints(Path(folder)).control, args.backend, key)
    except LayerZeroError as exc:
        health = {"ok": False, "detail": exc.message}
    except (control.Closed, OSError) as exc:
        health = {"ok": False, "detail": f"no broker answers in {folder}: {exc}"}
    print(f"{args.backend}: {'ok' if health['ok'] else 'not ok'}: {health['detail']}")
    return 0 if health["ok"] else 1


def ask(path: Path, backend: str, key: bytes | None) -> dict[str, Any]:
    """The broker's answer to `health`: `ok`, `state`, `detail`. Raises LayerZeroError, OSError, control.Closed."""
    sock = control.connect(path, timeout_s=TIMEOUT_S)
    context = zmq.Context()
    try:
        hello = messages.Hello(protocols=[wire.PROTOCOL], role="client", package="", pid=os.getpid())
        welcome, _ = greet(sock, hello, key)
        dealer = sockets.connect_dealer(context, welcome.endpoint, welcome.identity, 16)
        try:
            request = messages.Request(method="health", params={"backend": backend})
            dealer.send(wire.pack(wire.Kind.REQUEST, seq=1, body=messages.encode(request)))
            if not dealer.poll(int(TIMEOUT_S * 1000)):
                raise TimeoutError(f"it has said nothing for {TIMEOUT_S:g} s")
            frame = dealer.recv()
        finally:
            dealer.close()
    finally:
        context.term()
        sock.close()
    body = frame[wire.HEADER_BYTES :]
    if wire.unpack(frame).kind != wire.Kind.RESPONSE:
        raise from_wire(messages.decode(body, messages.Outcome).error)
    health = unpack_body(body)
    if not isinstance(health, dict) or not {"ok", "detail"} <= set(health):
        raise ProtocolError(f"an answer that is none: {health!r:.100}")
    return health


if __name__ == "__main__":
    sys.exit(main())
