"""`python -m layerzero.client.metrics`: show a broker's metrics on a socket that it has made, and end with it."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from layerzero.client.connection import companion, start
from layerzero.client.connection.question import ask_once
from layerzero.client.metrics.serving import Broker, Server
from layerzero.ipc.transport import secret
from layerzero.ipc.transport.endpoints import Endpoints


def main() -> int:
    parser = argparse.ArgumentParser(prog="layerzero.client.metrics", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket that listens")
    parser.add_argument("--parent-pid", type=int, required=True, help="the broker: end with it")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="the broker's folder")
    parser.add_argument("--token-file", type=Path, help="file of the token that must be shown")
    args = parser.parse_args()
    if not companion.begin(args.parent_pid):
        return 1
    token = None if args.token_file is None else secret.read(args.token_file)
    key, control = start.secret_key(), Endpoints(args.runtime_dir).control

    broker = Broker(lambda question: ask_once(control, key, question))  # a connection that stays would keep an idle one
    Server(socket.socket(fileno=args.fd), broker, token).serve_forever(poll_interval=3600)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
