"""Ray clusters of a few nodes on this machine, on its loopback alone. Runs in the environment that has Ray, started by
tests/envs/test_clusters.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import BACKENDS, PATIENCE_S, ROOT, processes, wait_until

from layerzero.client.connection import node as nodes

if "LZ_TEST_CLUSTERS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

OBJECT_STORE_BYTES = 80 << 20
# Of Ray's own: nothing is reported to anybody; a node that has ended is noticed soon, one that is slow never.
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as Ray is by default there: on the loopback
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine are no reason to end workers
}


SLOWLY = """
import time

_at_once = _silu

def _silu(call, inputs, outputs):
    bound = _at_once(call, inputs, outputs)
    if call.inputs[0].numel < 1024:
        return bound

    def run():
        time.sleep(0.5)
        return bound()

    return run
"""


@dataclass
class Cluster:
    """`folder`: the runtime folder below which each node's is. `nodes`: ids, the head first."""

    folder: Path
    cluster: Any
    ray: Any
    raylets: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    @property
    def nodes(self) -> list[str]:
        return list(self.raylets)

    def add_node(self, backends: Path) -> None:
        """A node with these backends, and a store of its own; the first one is the head."""
        number = len(self.raylets)
        environ = {
            "LAYERZERO_MANIFEST_DIRS": f"{backends}:{self.manifests}",
            "LAYERZERO_STORE": str(self.store_of(number)),
            "LAYERZERO_PERF_DB": str(self.folder / f"perf-{number}.db"),
        }
        made = self._started(
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            env_vars=environ,
        )
        self.raylets[made.node_id] = made

    def _started(self, **options: Any) -> Any:
        """A node of Ray's, which gives a raylet 30 s to start. A busy machine may take longer: what has started then is
        ended, and begun anew."""
        for attempts_left in (2, 1, 0):
            before = processes(self.folder)
            try:
                return self.cluster.add_node(**options)
            except Exception:  # Ray has no class for it
                for pid in processes(self.folder).keys() - before.keys():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not attempts_left:
                    raise

    @property
    def manifests(self) -> Path:
        """Of environments that all nodes know."""
        return self.folder / "manifests"

    def store_of(self, number: int) -> Path:
        return self.folder / f"store-{number}"

    def remove(self, node: str) -> None:
        """Its raylet is killed."""
        self.cluster.remove_node(self.raylets[node], allow_graceful=False)

    def on(self, node: str, function: Any, *args: Any) -> Any:
        """The result of a function that runs as a Ray task there."""
        return self.result(self.start_on(node, function, *args))

    def result(self, task: Any) -> Any:
        return self.ray.get(task, timeout=PATIENCE_S)

    def start_on(self, node: str, function: Any, *args: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self.ray.remote(num_cpus=0, max_retries=0)(function)
        return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args)

    def broker_folder(self, node: str) -> Path:
        return nodes.folder_of(node, self.folder)

    def lz(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "layerzero", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@contextlib.contextmanager
def cluster_of() -> Iterator[Cluster]:
    """A cluster without nodes, and what all of them have; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="lzr-"))
    (folder / "layerzero").mkdir()
    (folder / "layerzero" / "policy.yaml").write_text("weights: {perfdb: 0, reliability: 0}\n")
    ours = {
        **RAY,
        "LAYERZERO_RUNTIME_DIR": str(folder),
        "LAYERZERO_STORE": str(folder / "store"),
        "LAYERZERO_RESTART_BUDGET": "100",
        "LAYERZERO_BACKOFF_S": "0.01",
        "XDG_CONFIG_HOME": str(folder),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HOME": str(folder),  # Ray writes its token there
        "RAY_TMPDIR": str(folder),  # and logs, sockets, and which cluster runs on this machine, here
    }
    before = dict(os.environ)
    os.environ.update(ours)  # before Ray is imported, which reads some of them then
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster as RayCluster

    found = Cluster(folder, RayCluster(), ray)
    try:
        yield found
    finally:
        ray.shutdown()
        found.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        wait_until(lambda: not processes(folder))
        shutil.rmtree(folder)


def tiny_manifest(folder: Path) -> None:
    """Of an environment that nobody has yet, with a wheel that the test makes."""
    folder.mkdir()
    for name in ("tiny.toml", "tiny.json", "tiny.py"):
        shutil.copy(ROOT / "tests" / "samples" / "manifests" / name, folder)
    path = folder / "tiny.toml"
    path.write_text(path.read_text().replace("requirements = []", 'requirements = ["twig"]'))


def few_backends(folder: Path) -> Path:
    """All toys but gamma."""
    made = folder / "few"
    made.mkdir()
    for name in ("alpha.toml", "alpha.json", "beta.toml", "beta.json", "toy.py"):
        shutil.copy(BACKENDS / name, made)
    return made


def slow_backends(folder: Path) -> Path:
    """The toys without matmul, and with silu of float32 alone, slow for a thousand numbers."""
    made = folder / "slow"
    made.mkdir()
    (made / "toy.py").write_text((BACKENDS / "toy.py").read_text() + SLOWLY)
    for name in ("alpha", "beta", "gamma"):
        (made / f"{name}.toml").write_text((BACKENDS / f"{name}.toml").read_text())
        descriptor = json.loads((BACKENDS / f"{name}.json").read_text())
        descriptor["ops"].pop("matmul", None)
        descriptor["ops"]["silu"][0]["dtypes"] = ["float32"]
        (made / f"{name}.json").write_text(json.dumps(descriptor))
    return made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes with an agent each: the first has slow kernels, the second all toy backends, the third has few. What
    is asked of agents waits for them as long as a busy machine takes."""
    from layerzero.cluster import ray_link
    from layerzero.cluster.agent import fleet
    from layerzero.cluster.calls import others

    with cluster_of() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_link, "ANSWER_S", PATIENCE_S)
        patch.setattr(others, "EXPLAIN_S", PATIENCE_S)
        tiny_manifest(made.manifests)
        for backends in (slow_backends(made.folder), BACKENDS, few_backends(made.folder)):
            made.add_node(backends)
        assert [one.state for one in fleet.up(made.address)] == ["ok"] * 3
        yield made


def states_of(cluster: Cluster) -> dict[str, Any]:
    """What agents say, by node."""
    from layerzero.cluster.agent import fleet

    return {one.node: one for one in fleet.states(cluster.address)}


def facts_of(cluster: Cluster, node: str) -> dict[str, Any]:
    """What a node's agent says, once it says it, of a broker that answers."""

    def found() -> Any:
        facts = states_of(cluster)[node].facts
        return facts if facts.get("broker") else None

    return dict(wait_until(found))


def as_json(ran: subprocess.CompletedProcess[str]) -> Any:
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)
