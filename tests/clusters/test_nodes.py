"""Each node has a broker of its own, which tasks and actors find; what ends is started again, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from tests.clusters.conftest import Cluster, as_json, facts_of
from tests.process.harness import wait_until

from layerzero.cluster.agent import fleet


def call_there() -> dict[str, Any]:
    """In a Ray task: by which broker a call was served, and whether it is right."""
    import numpy as np

    import layerzero as lz

    session = lz.connect()
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    out = lz.silu(x)
    return {
        "broker": session.broker_pid,
        "folder": str(session.path.parent),
        "right": bool(np.allclose(out, x / (1 + np.exp(-x)), atol=1e-6)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def calls_until(path: str) -> dict[str, int]:
    """In a Ray task: calls until a file is there. How many were right, wrong and lost, and how often the broker was
    connected to anew."""
    from pathlib import Path

    import numpy as np

    import layerzero as lz
    from layerzero.ipc.errors import BrokerLost, LayerZeroError

    lz.connect()
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    wanted = x / (1 + np.exp(-x))
    found = {"right": 0, "wrong": 0, "lost": 0, "again": 0}
    Path(f"{path}.begun").touch()
    while not Path(path).exists() or not found["right"]:
        try:
            out = lz.silu(x)
        except BrokerLost:  # whether a kernel ran is unknown: the program says so, and calls again
            found["again"] += 1
            lz.connect()
        except LayerZeroError:
            found["lost"] += 1
        else:
            found["right" if np.allclose(out, wanted, atol=1e-6) else "wrong"] += 1
    return found


def test_tasks_find_the_broker_of_their_node(cluster: Cluster) -> None:
    """By the node that Ray says they are on: nodes of one machine have a broker each."""
    tasks = {node: cluster.start_on(node, call_there) for node in cluster.nodes}
    found = {node: cluster.result(task) for node, task in tasks.items()}
    for node, told in found.items():
        assert told["right"]
        assert told["broker"] == facts_of(cluster, node)["broker"]["broker"]["pid"]
        assert told["folder"] == str(cluster.broker_folder(node))
    assert len({told["broker"] for told in found.values()}) == 3


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    """It is how agents come to nodes that joined later."""
    before = {node: facts_of(cluster, node)["pid"] for node in cluster.nodes}
    assert {one.node: one.facts["pid"] for one in fleet.up(cluster.address)} == before


def test_status_of_all_nodes_fits_a_terminal(cluster: Cluster) -> None:
    """`lz status --cluster` is the same command."""
    os.environ["RAY_ADDRESS"] = cluster.address
    told = cluster.lz("status", "--cluster")
    assert told.returncode == 0, told.stderr
    nodes, backends, differences = told.stdout.split("\n\n")
    assert max(map(len, [*nodes.splitlines(), *backends.splitlines()])) <= 80
    assert all(re.search(rf"^{node[:12]} .* ok ", nodes, re.MULTILINE) for node in cluster.nodes)
    assert re.search(r"^alpha .* 3 of 3 ", backends, re.MULTILINE)
    assert re.search(r"^gamma .* 2 of 3 ", backends, re.MULTILINE)
    assert differences.startswith("where nodes differ")
    answer = as_json(cluster.lz("cluster", "up", "--json"))
    assert [one["state"] for one in answer["nodes"]] == ["ok"] * 3
    [differs] = answer["differences"]
    assert differs.startswith("gamma: ")
    assert f"unknown on {cluster.nodes[2][:12]}" in differs


def test_brokers_workers_are_not_bound_to_what_ray_gives_an_actor(cluster: Cluster) -> None:
    """Ray sets OMP_NUM_THREADS=1 in an actor that asks for nothing, and every kernel would run on one core."""
    pid = facts_of(cluster, cluster.nodes[0])["broker"]["broker"]["pid"]
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"OMP_NUM_THREADS" not in file.read()


def test_a_killed_agent_costs_no_call(cluster: Cluster) -> None:
    """Programs hold the broker meanwhile; Ray starts the agent again, which finds it."""
    node = cluster.nodes[1]
    before = facts_of(cluster, node)
    done = cluster.folder / "agent-killed"
    calls = cluster.start_on(node, calls_until, str(done))
    wait_until(lambda: done.with_name("agent-killed.begun").exists())
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: facts_of(cluster, node)["pid"] != before["pid"])
    done.touch()
    found = cluster.result(calls)
    assert (found["wrong"], found["lost"], found["again"]) == (0, 0, 0)
    assert facts_of(cluster, node)["broker"]["broker"]["pid"] == before["broker"]["broker"]["pid"]


def test_a_killed_broker_is_started_again(cluster: Cluster) -> None:
    """By the agent; programs connect to the next one and go on."""
    node = cluster.nodes[1]
    before = facts_of(cluster, node)
    done = cluster.folder / "broker-killed"
    calls = cluster.start_on(node, calls_until, str(done))
    wait_until(lambda: done.with_name("broker-killed.begun").exists())
    os.kill(before["broker"]["broker"]["pid"], signal.SIGKILL)
    wait_until(lambda: facts_of(cluster, node)["restarts"] > before["restarts"])
    done.touch()
    found = cluster.result(calls)
    assert (found["wrong"], found["lost"]) == (0, 0)
    assert found["again"] <= 1  # a lane outlives the broker
