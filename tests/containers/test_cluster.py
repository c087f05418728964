"""docker-compose.cluster.yml with a real engine: two nodes of Ray with a broker and a backend each, and the end of one
in the middle of a call. `make test-containers`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.containers.stack import HEALTHY_S, Stack
from tests.process.harness import wait_until

pytestmark = pytest.mark.timeout(1200)  # the first test waits for the images

CALLS = Path(__file__).with_name("calls.py")
WORKERS = {"one": "mlx", "two": "onnxruntime"}  # by node
TOLERANCE = {"silu": 1e-5, "linear": 1e-2}  # of sums of 1,024 products of float32
LOOK = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
def may_write(folder):
    try:
        os.close(os.open(f"{folder}/try", os.O_CREAT | os.O_WRONLY, 0o600)); os.unlink(f"{folder}/try"); return True
    except OSError:
        return False
def told(pid):
    try:
        return open(f"/proc/{pid}/environ").read() + open(f"/proc/{pid}/cmdline").read()
    except OSError:
        return ""
keys = [open(f"/run/secrets/{name}").read().strip() for name in os.listdir("/run/secrets")]
everybody = "".join(told(pid) for pid in os.listdir("/proc") if pid.isdigit())
print(json.dumps({
    "uid": os.getuid(), "capabilities": sum(int(status[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Bnd")),
    "no_new_privileges": int(status["NoNewPrivs"]), "told": [key in everybody for key in keys],
    "writable": [f for f in ("/", "/opt/layerzero", "/etc", "/usr", "/tmp", "/run/layerzero") if may_write(f)],
}))
"""


def states(cluster: Stack, asked: str = "one") -> dict[str, dict[str, Any]]:
    """What `lz cluster status` on a node says of each, those that are lost, too."""
    shown = cluster.engine("exec", cluster.container(asked), "sh", "-c", "lz cluster status --json || :")
    return {one["node"][:12]: one for one in json.loads(shown[shown.index("{") :])["nodes"]}


def id_of(cluster: Stack, service: str) -> str:
    """Ray's id of the node that a container is now."""
    code = "import os; print(os.readlink('/run/layerzero/node').removeprefix('node-'))"
    return cluster.engine("exec", cluster.container(service), "python", "-c", code).strip()


def until(
    read: Callable[[], dict[str, Any]], is_wanted: Callable[[dict[str, Any]], bool], op: str, *, may_fail: bool = False
) -> dict[str, Any]:
    """The first call that is as wanted. All up to it gave the right result, unless they `may_fail`."""
    deadline_s = time.monotonic() + HEALTHY_S
    while True:
        line = read()
        assert may_fail if "failed" in line else line["error"] < TOLERANCE[op], line
        if is_wanted(line):
            return line
        assert time.monotonic() < deadline_s, line


def serves(cluster: Stack, backend: str) -> bool:
    """Whether the container of a worker says so."""
    check = f"python -m layerzero.workers.health --backend {backend} >/dev/null && echo serves || :"
    return "serves" in cluster.engine("exec", cluster.container(backend), "sh", "-c", check)


def test_each_node_has_a_broker_and_backends_of_its_own(cluster: Stack) -> None:
    """And both see the same cluster."""
    found = states(cluster)
    assert {one["state"] for one in found.values()} == {"ok"}
    assert len(found) == 2
    for service, backend in WORKERS.items():
        rows = found[id_of(cluster, service)]["facts"]["broker"]["backends"]
        assert [row["name"] for row in rows if row["agents"]] == [backend]
    assert states(cluster, "two").keys() == found.keys()


@pytest.mark.parametrize("service", ["one", "two"])
def test_node_has_no_privilege_and_tells_no_key(cluster: Stack, service: str) -> None:
    """What it has and other containers lack is a network that only nodes are in."""
    container = cluster.container(service)
    seen = json.loads(cluster.engine("exec", container, "python", "-c", LOOK))
    assert seen == {
        "uid": 1000,
        "capabilities": 0,
        "no_new_privileges": 1,
        "told": [False, False],
        "writable": ["/tmp", "/run/layerzero"],
    }
    facts = cluster.inspect(container)
    assert not facts["HostConfig"]["Privileged"]
    assert not facts["HostConfig"]["PortBindings"]
    for network in facts["NetworkSettings"]["Networks"].keys() - {"none"}:
        assert cluster.engine("network", "inspect", "-f", "{{.Internal}}", network).strip() == "true"
    worker = cluster.inspect(cluster.container(WORKERS[service]))
    assert worker["HostConfig"]["NetworkMode"] == "none"


def test_who_lacks_the_token_is_not_let_in(cluster: Stack) -> None:
    """To be in the network is not enough."""

    def asked(mode: str) -> str:
        argv = ("exec", "-e", f"RAY_AUTH_MODE={mode}", cluster.container("two"))
        return cluster.engine(*argv, "sh", "-c", "ray status 2>&1 || :")

    assert "InvalidAuthToken" in asked("disabled")
    assert "Node status" in asked("token")


def test_what_this_node_lacks_another_serves_also_when_it_comes_back(cluster: Stack) -> None:
    """linear is ONNX Runtime's alone. Without its node a call says what became of that; with it, all is as before."""
    with cluster.running(cluster.container("one"), CALLS, "linear") as read:
        line = read()
        assert line["error"] < TOLERANCE["linear"]
        assert (line["path"], line["kernel"]) == ("node", f"{id_of(cluster, 'two')}/onnxruntime.linear")
        cluster.engine("kill", cluster.container("two"))
        seen = until(read, lambda line: "failed" in line, "linear", may_fail=True)
        assert "NODE_LOST" in seen["outcomes"]
        cluster.engine("start", cluster.container("two"))
        line = until(read, lambda line: "failed" not in line, "linear", may_fail=True)
    cluster.wait_healthy("two", "onnxruntime")
    assert line["kernel"] == f"{id_of(cluster, 'two')}/onnxruntime.linear"


def test_node_that_is_killed_in_a_call_costs_no_call(cluster: Stack) -> None:
    """The report says NODE_LOST, and who served the call then: this node, whose worker had come meanwhile."""
    lost = id_of(cluster, "two")
    for _ in range(5):
        cluster.engine("stop", "-t", "1", cluster.container("mlx"))
        with cluster.running(cluster.container("one"), CALLS, "silu") as read:
            line = until(read, lambda line: True, "silu")
            assert line["kernel"] == f"{lost}/onnxruntime.silu"
            cluster.engine("start", cluster.container("mlx"))
            wait_until(lambda: serves(cluster, "mlx"), HEALTHY_S)
            if read()["path"] != "node":
                continue  # a slow machine: it was decided anew where such calls go
            cluster.engine("kill", cluster.container("two"))
            line = until(read, lambda line: line["path"] != "node", "silu")
            break
    assert line["outcomes"] == ["NODE_LOST", None], line
    assert line["kernel"] == "mlx.silu"
    assert f"{lost}/onnxruntime.silu failed: NODE_LOST" in " ".join(line["shown"].split())
    wait_until(lambda: states(cluster)[lost]["state"] == "NODE_LOST", HEALTHY_S)


def test_nothing_is_left_of_a_cluster(cluster: Stack) -> None:
    """The last of the module."""
    cluster.end()
    left = cluster.left()
    assert (left["containers"], left["volumes"], left["networks"]) == ("", "", "")
