"""What is handed to nodes that are not alike, and what is left when agents end: by the command line, as a person would.
These tests come last, and leave the cluster without agents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.clusters.conftest import Cluster, as_json, facts_of, states_of
from tests.envs.wheels import make_wheel, pack
from tests.process.harness import PATIENCE_S, wait_ended, wait_until
from tests.process.test_metrics import get

from layerzero.cluster.agent import fleet
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import load
from layerzero.envs.transfer.transfer import export

TOKEN = "0123456789abcdef0123"


@contextlib.contextmanager
def running(cluster: Cluster, *words: str) -> Iterator[str]:
    """A command that goes on until Ctrl-C. Its first line."""
    command = [sys.executable, "-m", "layerzero", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stderr if words[0] == "cluster" else process.stdout
        assert said is not None
        yield said.readline()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors, errors


def test_metrics_and_the_page_have_all_nodes(cluster: Cluster) -> None:
    """One of which is lost."""
    states = {node: one.state for node, one in states_of(cluster).items()}
    assert sorted(states.values()) == [fleet.LOST, fleet.OK, fleet.OK]
    os.environ["RAY_ADDRESS"] = cluster.address
    token, at = cluster.folder / "token", cluster.folder / "metrics.sock"
    token.touch(0o600)
    token.write_text(TOKEN)
    page_words = ("dashboard", "--cluster", "--at", "127.0.0.1:0", "--token-file", str(token))
    with running(cluster, "cluster", "metrics", f"unix:{at}"), running(cluster, *page_words) as address:
        told: dict[str, str] = {}

        def has_all() -> bool:
            status, text = get(at)
            assert status == 200
            rows = re.findall(r'^layerzero_node_state{.*node="(\w+)",state="(.*)"} 1\.0$', text, re.MULTILINE)
            told.update(rows)
            whose = {node[:12] for node, state in states.items() if state == fleet.OK}
            return whose == set(re.findall(r'^layerzero_up_seconds{node="(\w+)"}', text, re.MULTILINE))

        wait_until(has_all)
        assert told == {node[:12]: state for node, state in states.items()}
        assert get(at, "/readyz")[0] == 200
        port = int(address.partition("127.0.0.1:")[2].partition("/")[0])
        answer = json.loads(get(port, "/api/nodes", Authorization=f"Bearer {TOKEN}")[1])
        assert {one["node"]: one["state"] for one in answer["nodes"]} == states


def test_an_environment_that_is_made_here_is_handed_to_all_nodes(cluster: Cluster) -> None:
    """Each of them has a store of its own, and builds it there."""
    house = cluster.folder / "house"
    house.mkdir()
    for name in ("pyzmq", "msgpack"):
        pack(house, name)
    make_wheel(house, "twig", "1.0")
    found = [Wheelhouse(house).wheels(name)[0] for name in ("msgpack", "pyzmq", "twig")]
    lock = "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in found)
    (cluster.manifests / "tiny.cpu.txt").write_text(lock)
    file = cluster.folder / "tiny.tar.gz"
    export(load(cluster.manifests / "tiny.toml"), file, store=cluster.folder / "here", wheelhouse=house)
    told = cluster.lz("cluster", "share", str(file), "--ray", cluster.address, "--json")
    alive = [node for node, one in states_of(cluster).items() if one.state != fleet.LOST]
    assert {one["node"]: one["problem"] for one in as_json(told)["nodes"]} == dict.fromkeys(alive, "")
    for node in alive:
        assert list((cluster.store_of(cluster.nodes.index(node)) / "envs").glob("tiny-*")), told


def test_down_leaves_nothing(cluster: Cluster) -> None:
    """Neither agents nor brokers, nor their locks."""
    alive = [node for node, one in states_of(cluster).items() if one.state != fleet.LOST]
    pids = [facts_of(cluster, node)["broker"]["broker"]["pid"] for node in alive]
    assert cluster.lz("cluster", "down", "--ray", cluster.address).stdout == f"{len(alive)} agents ended\n"
    for node, pid in zip(alive, pids, strict=True):
        wait_ended(pid)
        assert not (cluster.broker_folder(node) / "agent.lock").exists()
        assert states_of(cluster)[node].state == fleet.NO_AGENT
