"""Ray clusters of a few nodes on this machine, on its loopback alone. Runs in the environment that has Ray, started by
tests/envs/test_clusters.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import BACKENDS, ROOT, processes, wait_until

from layerzero.client.connection import node as nodes

if "LZ_TEST_CLUSTERS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

OBJECT_STORE_BYTES = 80 << 20
# Of Ray's own: nothing is reported to anybody, dead nodes are noticed soon.
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as Ray is by default there: on the loopback
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


SLOWLY = """
import time

_at_once = _silu

def _silu(call, inputs, outputs):
    bound = _at_once(call, inputs, outputs)
    if call.inputs[0].numel < 1024:
        return bound

    def run():
        time.sleep(0.03)
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

    def add_node(self, **environ: str) -> str:
        """A node, with variables of its own. Its id."""
        name = str(len(self.raylets))
        made = self.cluster.add_node(
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            env_vars={"LAYERZERO_PERF_DB": str(self.folder / f"perf-{name}.db"), **environ},
        )
        self.raylets[made.node_id] = made
        return str(made.node_id)

    def on(self, node: str, function: Any, *args: Any) -> Any:
        """The result of a function that runs as a Ray task there."""
        return self.ray.get(self.start_on(node, function, *args), timeout=60)

    def start_on(self, node: str, function: Any, *args: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self.ray.remote(num_cpus=0, max_retries=0)(function)
        return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*args)

    def broker_folder(self, node: str) -> Path:
        return nodes.folder_of(node, self.folder)

    def lz(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "layerzero", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@contextlib.contextmanager
def cluster_of(**environ: str) -> Iterator[Cluster]:
    """A cluster without nodes, and what all of them have; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="lzr-"))
    (folder / "layerzero").mkdir()
    (folder / "layerzero" / "policy.yaml").write_text("weights: {perfdb: 0, reliability: 0}\n")
    ours = {
        **RAY,
        "LAYERZERO_RUNTIME_DIR": str(folder),
        "LAYERZERO_STORE": str(folder / "store"),
        "LAYERZERO_MANIFEST_DIRS": str(BACKENDS),
        "LAYERZERO_RESTART_BUDGET": "100",
        "LAYERZERO_BACKOFF_S": "0.01",
        "XDG_CONFIG_HOME": str(folder),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "HOME": str(folder),  # Ray writes its token there
        "RAY_TMPDIR": str(folder),  # and logs, sockets, and which cluster runs on this machine, here
        **environ,
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
        wait_until(lambda: not processes(folder), 30.0)
        shutil.rmtree(folder)


def slow_backends(folder: Path) -> Path:
    """Of the first node: the toys without matmul, and with silu of float32 alone, slow for a thousand numbers."""
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
    """Three nodes with an agent each, the first with slow kernels, the others with all toy backends."""
    from layerzero.cluster.agent import fleet

    with cluster_of() as made:
        made.add_node(LAYERZERO_MANIFEST_DIRS=str(slow_backends(made.folder)))
        for _ in range(2):
            made.add_node()
        assert [one.state for one in fleet.up(made.address)] == ["ok"] * 3
        del os.environ["LAYERZERO_MANIFEST_DIRS"]
        yield made


def states_of(cluster: Cluster) -> dict[str, Any]:
    """What agents say, by node."""
    from layerzero.cluster.agent import fleet

    return {one.node: one for one in fleet.states(cluster.address)}


def as_json(ran: subprocess.CompletedProcess[str]) -> Any:
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout)
