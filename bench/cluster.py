"""What Ray on a node costs its calls, and what a call costs that another node serves. Writes results/cluster.md.

    python bench/cluster.py [--quick]

Calls of `null` by an express lane, p50 and p99: with no Ray on the machine, with a Ray node and its agent, and by a
session that other nodes serve, too (`lz.connect(cluster="ray")`); rounds in turn, each in a process of its own. The
floor is the same without Ray. Then products that this node's policy leaves to another node of the same machine: through
Ray's object store, but over no network. Ray is in an environment of its own (tests/clusters/ray.toml).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import at_most, finish, parser

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

ROOT = Path(__file__).parents[1]
SIZES = (64, 256, 1024)
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
MEASURE = """
import json, os, sys, time
import layerzero as lz
way, count = sys.argv[1], int(sys.argv[2])
if way != "alone":
    import ray
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
lz.connect(cluster="ray") if way == "cluster" else lz.connect()
end = time.monotonic() + 2
while time.monotonic() < end:  # the lane is there, and the machine is quiet again
    lz.null()
times = []
for _ in range(count):
    start = time.perf_counter_ns()
    lz.null()
    times.append(time.perf_counter_ns() - start)
times.sort()
print(json.dumps([times[count // 2] / 1e3, times[count * 99 // 100] / 1e3]))
"""
AFAR = """
import json, os, statistics, sys, time
import numpy as np
import ray
import layerzero as lz
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
session = lz.connect(cluster="ray")
rows = []
for n in map(int, sys.argv[2:]):
    a = np.ones((n, n), np.float32)
    for _ in range(3):
        out = lz.matmul(a, a)
    assert (out == n).all() and lz.last_report().path == "node", lz.last_report()
    times, kernels = [], []
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter_ns()
        lz.matmul(a, a)
        times.append((time.perf_counter_ns() - start) / 1e3)
        kernels.append(lz.last_report().kernel_us)
    best = next(c for c in lz.explain("matmul", a, a).candidates if c.accepted)
    rows.append([n, statistics.median(times), statistics.median(kernels), best.measured_us, str(lz.last_report())])
[way] = [one.way for one in session.others._known.values()]
print(json.dumps({"rows": rows, "hops_us": way.hops_us, "mb_per_s": way.bytes_per_s / 1e6}))
"""
NODES = """
import os, sys
from ray.cluster_utils import Cluster
from layerzero.cluster.agent import fleet
cluster = Cluster()
for policy in sys.argv[1:]:
    cluster.add_node(
        num_cpus=1, object_store_memory=200 << 20, node_ip_address="127.0.0.1", include_dashboard=False,
        env_vars={"LAYERZERO_POLICY": policy, "LAYERZERO_PERF_DB": policy + ".db"},
    )
states = fleet.up(cluster.address)
assert not any(one.problem for one in states), states
print(cluster.address, flush=True)
sys.stdin.read()
fleet.down(cluster.address)
import ray
ray.shutdown()
cluster.shutdown()
"""


def run(python: Path, code: str, *words: object, **environ: str) -> Any:
    """What a program of the environment with Ray has printed last, from JSON."""
    ran = subprocess.run(
        [python, "-c", code, *map(str, words)],
        env={**os.environ, **environ},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


@contextlib.contextmanager
def nodes(python: Path, *policies: Path) -> Iterator[str]:
    """A Ray cluster with a node, and its agent, for each policy. Its address."""
    with subprocess.Popen(
        [python, "-c", NODES, *policies], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            yield address
        finally:
            process.stdin.close()


def main() -> int:
    options = parser(__doc__, "one round, few calls").parse_args()
    rounds, count, calls = (1, 3000, 5) if options.quick else (3, 10_000, 20)
    found = manifest.load(ROOT / "tests" / "clusters" / "ray.toml")
    python = build.ensure(found, store=settings.load().store).python
    times: dict[str, list[list[float]]] = {"alone": [], "node": [], "cluster": []}
    with tempfile.TemporaryDirectory(prefix="lz-") as name:
        folder = Path(name)
        os.environ.update(
            {**RAY, "LAYERZERO_RUNTIME_DIR": name, "HOME": name, "RAY_TMPDIR": name, "PYTHONPATH": str(ROOT / "src")}
        )
        os.environ["LAYERZERO_STORE"] = str(settings.load().store)
        (folder / "any.yaml").touch()
        (folder / "no_matmul.yaml").write_text("rules: [{match: {op: matmul}, avoid: ['*']}]\n")
        for _ in range(rounds):
            times["alone"].append(run(python, MEASURE, "alone", count))
            with nodes(python, folder / "any.yaml") as address:
                for way in ("node", "cluster"):
                    times[way].append(run(python, MEASURE, way, count, RAY_ADDRESS=address))
            times["alone"].append(run(python, MEASURE, "alone", count))
        with nodes(python, folder / "no_matmul.yaml", folder / "any.yaml") as address:
            afar = run(python, AFAR, calls, *SIZES, RAY_ADDRESS=address)
    p50 = {way: statistics.median(one[0] for one in found) for way, found in times.items()}
    p99 = {way: statistics.median(one[1] for one in found) for way, found in times.items()}
    labels = {
        "node": "`null` in a program of a Ray node, `lz.connect()`",
        "cluster": '`null` there, `lz.connect(cluster="ray")`',
    }
    rows = [["`null` without Ray on the machine", f"{p50['alone']:.1f} us", f"{p99['alone']:.1f} us", "1"]]
    for way, label in labels.items():
        beside = f"p99 {at_most(p99[way] / p99['alone'], 1.05)}; p50 {p50[way] / p50['alone']:.2f}"
        rows.append([label, f"{p50[way]:.1f} us", f"{p99[way]:.1f} us", beside])
    for n, us, kernel_us, price_us, _ in afar["rows"]:
        parts = f"kernel {kernel_us / 1e3:.2f} ms, price {price_us / 1e3:.2f} ms"
        rows.append([f"`matmul` of {n} x {n} float32 by another node", f"{us / 1e3:.2f} ms", "", parts])
    spread = ", ".join(f"{one[1]:.1f}" for one in times["alone"])
    notes = f"""{count:,} calls a round, medians of the rounds' figures. p99 of the rounds without Ray:
{spread} us; load average at the end {os.getloadavg()[0]:.1f}. The way to the other node, on the same machine:
{afar["hops_us"]:,.0f} us two hops, {afar["mb_per_s"]:,.0f} MB/s. A report of such a call:"""
    finish(
        "cluster",
        "Calls on a node of a Ray cluster",
        {"Ray": {"ray": "2.60.0"}},
        ["call", "p50", "p99", "beside no Ray; of another node's, its parts"],
        rows,
        [
            notes,
            "",
            "```text",
            afar["rows"][-1][-1],
            "```",
        ],
        is_quick=options.quick,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
