"""docker-compose.yml with a real engine: what the containers may do, the demo in them, and what happens when one is
killed, paused, doubled or restarted. `make test-containers`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.containers.engine import Engine
from tests.containers.stack import HEALTHY_S, WORKERS, Stack
from tests.process.harness import wait_until

pytestmark = pytest.mark.timeout(1200)  # the first test waits for the images

CONFLICTING = {"onnxruntime", "tokenizers-0.23", "torch"}  # NumPy 1 and 2; no resolver accepts them together
TOLERANCE = 1e-4  # float32 of other kernels
LOOK = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
def may_write(folder):
    try:
        os.close(os.open(f"{folder}/try", os.O_CREAT | os.O_WRONLY, 0o600)); os.unlink(f"{folder}/try"); return True
    except OSError:
        return False
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "uid": os.getuid(), "capabilities": sum(int(status[f"Cap{kind}"], 16) for kind in ("Eff", "Prm", "Bnd")),
    "no_new_privileges": int(status["NoNewPrivs"]), "interfaces": sorted(os.listdir("/sys/class/net")),
    "writable": [f for f in ("/", "/opt/layerzero", "/etc", "/var", "/usr", "/tmp", "/run/layerzero") if may_write(f)],
    "shm_mib": shm.f_blocks * shm.f_frsize >> 20, "pid1": open("/proc/1/cmdline").read().split("\\0")[:-1],
}))
"""


@pytest.fixture(scope="module")
def serving(up: Stack) -> Stack:
    up.wait_healthy()
    return up


def until(
    read: Callable[[], dict[str, Any]], is_wanted: Callable[[dict[str, Any]], bool], *, may_fail: bool = False
) -> dict[str, Any]:
    """The first pass of the load that is as wanted. All up to it ended, unless they `may_fail`, and gave the same."""
    deadline_s = time.monotonic() + HEALTHY_S
    while True:
        line = read()
        assert may_fail if "failed" in line else line["error"] < TOLERANCE, line
        if is_wanted(line):
            return line
        assert time.monotonic() < deadline_s, line


def linear_by(backend: str, wanted: bool = True) -> Callable[[dict[str, Any]], bool]:
    return lambda line: (backend in line.get("linear", ())) is wanted


def test_main_job_runs_in_the_application_container(serving: Stack) -> None:
    """What `make demo` runs, over containers whose libraries cannot be installed together."""
    application = serving.container("application")
    code = serving.engine("wait", application).strip()
    shown = serving.logs(application)
    assert code == "0", shown
    assert all(f" {name} " in shown for name in CONFLICTING), shown
    assert "in containers of their own" in shown


@pytest.mark.parametrize("service", ["broker", *WORKERS])
def test_container_has_no_privilege_and_no_network(serving: Stack, service: str) -> None:
    """What the compose file promises, seen from within."""
    container = serving.container(service)
    seen = json.loads(serving.engine("exec", container, "python", "-c", LOOK))
    assert seen.pop("pid1")
    assert seen.pop("shm_mib") in (62, 64)  # the default of podman is 64,000 KB
    assert seen == {
        "uid": 1000,
        "capabilities": 0,
        "no_new_privileges": 1,
        "interfaces": ["lo"],
        "writable": ["/tmp", "/run/layerzero"],
    }
    host = serving.inspect(container)["HostConfig"]
    assert {host["PidMode"], host["UTSMode"], host["UsernsMode"]} <= {"", "private"}  # its own, with two names
    assert host["IpcMode"] in ("private", "shareable")  # its own; the second name is that of engines before 20
    assert host["Privileged"] is False


def test_containers_share_nothing_but_the_sockets(serving: Stack) -> None:
    """A worker has one mount of the stack's, besides its key."""
    for service in WORKERS:
        mounts = serving.inspect(serving.container(service))["Mounts"]
        assert {(m["Type"], m["Destination"], m["RW"]) for m in mounts} == {
            ("volume", "/run/layerzero", True),
            ("bind", "/run/secrets/layerzero", False),
        }


def test_arrays_larger_than_shm_cross_between_containers(serving: Stack) -> None:
    """/dev/shm has 64 MB: memory crosses as descriptors."""
    code = (
        "import numpy as np, layerzero as lz; lz.connect(); x = lz.share(np.ones((32, 2**20), np.float32));"
        "y = lz.silu(x, backend='torch');"
        "print(x.nbytes, lz.last_report().copied_bytes, float(abs(y - y[0, 0]).max()))"
    )
    shown = serving.compose("run", "--rm", "-T", "--no-deps", "application", "python", "-c", code)
    assert shown.split() == [str(32 * 2**22), "0", "0.0"]


def test_worker_with_another_key_is_refused(serving: Stack) -> None:
    """The sockets' folder alone lets nobody in."""
    other = "import os; open('/tmp/key', 'x').write(os.urandom(32).hex()); os.chmod('/tmp/key', 0o600)"
    join = f'python -c "{other}" && exec python -m layerzero.workers.join --backend torch --secret-file /tmp/key'
    name = f"{serving.project}-other"
    try:
        sockets = f"{serving.project}_sockets:/run/layerzero"
        image = f"{serving.project}/torch"
        serving.engine("run", "-d", "--network", "none", "-v", sockets, "--name", name, image, "sh", "-c", join)
        wait_until(lambda: "agent.refused" in serving.logs(name), HEALTHY_S)
        assert serving.engine("wait", name).strip() == "2"
    finally:
        serving.engine("rm", "-f", name)
    assert [agent["serves"] for agent in serving.status()["torch"]["agents"]] == [True]


def test_killed_container_falls_back_and_returns(serving: Stack) -> None:
    """Under load no call fails or gives another result, and with the container the backend comes back."""
    container = serving.container("onnxruntime")
    with serving.load() as read:
        until(read, linear_by("onnxruntime"))
        serving.engine("kill", container)
        until(read, linear_by("onnxruntime", False))
        serving.engine("start", container)
        until(read, linear_by("onnxruntime"))
    serving.wait_healthy("onnxruntime")


def test_paused_container_falls_back_and_returns(serving: Stack) -> None:
    """A paused worker keeps its connections and says nothing: that is seen by its silence."""
    container = serving.container("onnxruntime")
    with serving.load() as read:
        until(read, linear_by("onnxruntime"))
        serving.engine("pause", container)
        try:
            until(read, linear_by("onnxruntime", False))
        finally:
            serving.engine("unpause", container)
        until(read, linear_by("onnxruntime"))
    serving.wait_healthy("onnxruntime")


def test_container_that_ends_is_started_again_by_the_engine(serving: Stack) -> None:
    """`restart: unless-stopped`; the next one registers as the first did."""
    container = serving.container("tokenizers")
    serving.engine("exec", container, "python", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    wait_until(lambda: serving.inspect(container)["RestartCount"] == 1)
    serving.wait_healthy("tokenizers")


def test_second_container_of_a_backend_takes_over(serving: Stack) -> None:
    """`--scale`: of several one serves; when it goes another does."""
    serving.compose("up", "-d", "--no-recreate", "--scale", "onnxruntime=2", "onnxruntime")
    try:
        serving.wait_healthy("onnxruntime")
        wait_until(lambda: [k["state"] for k in serving.status()["onnxruntime"]["agents"]] == ["ok", "ok"], HEALTHY_S)
        with serving.load() as read:
            until(read, linear_by("onnxruntime"))
            (first,) = [agent["number"] for agent in serving.status()["onnxruntime"]["agents"] if agent["serves"]]
            (one,) = [found for found in serving.containers("onnxruntime") if number(serving, found) == first]
            serving.engine("kill", one)
            wait_until(lambda: [k["serves"] for k in serving.status()["onnxruntime"]["agents"]] == [True])
            until(read, linear_by("onnxruntime"))
    finally:
        serving.compose("up", "-d", "--no-recreate", "--scale", "onnxruntime=1", "onnxruntime")
        serving.wait_healthy("onnxruntime")


def number(stack: Stack, container: str) -> int:
    """By which the broker knows what joined last from a container."""
    lines = [line for line in stack.logs(container).splitlines() if "joined" in line]
    return int(json.loads(lines[-1])["number"])


def test_workers_and_clients_outlive_the_broker(serving: Stack) -> None:
    """All come back to the next one; the application is told, and goes on when it has connected again."""
    with serving.load() as read:
        until(read, linear_by("onnxruntime"))
        serving.engine("restart", serving.container("broker"))
        until(read, lambda line: "BROKER_LOST" in line.get("failed", ""), may_fail=True)
        until(read, linear_by("onnxruntime"), may_fail=True)
    serving.wait_healthy()


def test_nothing_is_left_of_a_stack(running_engine: Engine, serving: Stack) -> None:
    """The last of the module: `down` ends all, the images that were built included."""
    serving.tear_down()
    assert serving.left() == {"containers": "", "volumes": "", "networks": "", "images": ""}
