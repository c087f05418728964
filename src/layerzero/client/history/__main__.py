"""`python -m layerzero.client.history`: keep a broker's history, and end with it."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from layerzero.client.connection import companion, start
from layerzero.client.connection.question import asker
from layerzero.client.history.history_file import HistoryFile, path_of
from layerzero.client.history.recorder import record
from layerzero.ipc.transport.endpoints import Endpoints

AGAIN_S = 5.0  # after another process had the file


def main() -> int:
    parser = argparse.ArgumentParser(prog="layerzero.client.history", description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True, help="the broker: end with it")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="the broker's folder")
    parser.add_argument("--store", type=Path, required=True, help="the folder in which history/ is")
    parser.add_argument("--secret-file", type=Path, help="of the broker's stack")
    args = parser.parse_args()
    if not companion.begin(args.parent_pid):
        return 1
    over, path, key = threading.Event(), path_of(args.store, args.runtime_dir), start.secret_key(args.secret_file)
    while (file := HistoryFile.write(path)) is None:
        over.wait(AGAIN_S)

    ask = asker(Endpoints(args.runtime_dir).control, key)  # as an observer it keeps no idle broker
    record(lambda: ask("metrics"), file, over.wait)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
