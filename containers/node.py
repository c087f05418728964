"""A node of a Ray cluster, as pid 1 of its container: Ray, and the agent that runs this node's broker.

`python node.py NAME HEAD`: host names or addresses of this node and of the one that keeps the cluster's tables, equal
for that one itself. Ends when Ray does, or by SIGTERM.
`python node.py health`: exit code 0 when this node's broker answers.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from layerzero.client.connection import node, start
from layerzero.ipc.errors import NotConnected

PORT = 6379  # of the cluster's tables
OBJECT_STORE_BYTES = 100 << 20  # in /dev/shm, for arguments and results of calls that are on their way
START_S = 120.0
RAY = (
    *("--min-worker-port=0", "--max-worker-port=0"),  # any that are free: nodes may share an address
    *("--include-log-monitor=false", "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}", "--block"),
)


def link() -> Path:
    """Leads to the broker's folder, whose name is of Ray's id of this node: workers join here, whatever that is."""
    return start.runtime_dir() / "node"


def main(name: str, head: str) -> int:
    """Returns the exit code: 0 when it was told to end, else Ray's."""
    try:
        own, tables = socket.gethostbyname(name), socket.gethostbyname(head)
    except socket.gaierror as exc:
        print(f"error: start {head}, or name hosts of this network: {name}, {head}: {exc}", file=sys.stderr)
        return 1
    clear(start.runtime_dir())
    is_head = own == tables
    place = ("--head", f"--port={PORT}", "--include-dashboard=false") if is_head else (f"--address={tables}:{PORT}",)
    started = subprocess.Popen(["ray", "start", *place, f"--node-ip-address={own}", *RAY])
    told: list[int] = []

    def end(number: int, _: object) -> None:
        told.append(number)
        started.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # In a process of its own: the one that waits here is no part of the cluster.
    joining = subprocess.Popen([sys.executable, __file__, "agent"])
    while True:  # daemons whose parents have ended are ours to reap
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if pid == joining.pid and code != 0:
            started.terminate()
        if pid == started.pid:
            return 0 if told else abs(code)


def clear(folder: Path) -> None:
    """What a node before has left: nobody of it lives."""
    link().unlink(missing_ok=True)
    for left in folder.glob("node-*"):
        shutil.rmtree(left)


def agent() -> int:
    """Give this node its agent, once Ray runs. Returns the exit code."""
    import ray  # not in pid 1, nor for each health check

    from layerzero.cluster import ray_link
    from layerzero.cluster.agent import fleet

    until_s = time.monotonic() + START_S
    while not ray.is_initialized():
        try:
            ray_link.attach()
        except NotConnected as exc:
            if time.monotonic() > until_s:
                print(f"error: {exc.message}", file=sys.stderr)
                return 1
            time.sleep(0.2)
    own = ray.get_runtime_context().get_node_id()
    folder = node.folder_of(own, start.runtime_dir())
    link().symlink_to(folder.name)
    problems = [
        one.problem or one.state for one in fleet.up(ray_link.AUTO) if one.node == own and one.state != fleet.OK
    ]
    for problem in problems:
        print(f"error: this node has no agent: {problem}", file=sys.stderr)
    return 1 if problems else 0


def health() -> int:
    """Asks the broker of this node. Returns only where there is none."""
    try:
        folder = link().resolve(strict=True)
    except OSError:
        print(f"{link()} leads nowhere: Ray has not started, or this node has no agent")
        return 1
    os.execvpe("lz", ["lz", "status", "--json"], {**os.environ, "LAYERZERO_RUNTIME_DIR": str(folder)})


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(agent() if words == ["agent"] else health() if words == ["health"] else main(*words))
