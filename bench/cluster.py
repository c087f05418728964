"""What a cluster costs the calls of a node, and what a call costs that another node serves. Writes results/cluster.md.

    python bench/cluster.py [--quick]

Calls of `null` by an express lane, p50 and p99, in short blocks in turn. Floor: an ordinary broker, which no cluster
has to do with, while the same Ray with its nodes is idle beside it; a second one tells what blocks differ by anyway.
Beside it the node's broker, with an agent, and a session that other nodes serve, too (`lz.connect(cluster="ray")`).
During a block all that is of LayerZero and has no part in it is stopped, so that none pays for the others: the second
node's agent, too, which else is on another machine. Without Ray, blocks come before its start, in no turn. Each sitting
has a Ray, brokers and programs of its own. Then CPU time while nothing is asked, and products that this node's policy
leaves to another node of the same machine: through Ray's object store, but over no network. Ray is in an environment of
its own (tests/clusters/ray.toml).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from common import at_most, finish, parser

from layerzero.broker.configuration import settings
from layerzero.envs import manifest
from layerzero.envs.build import build

ROOT = Path(__file__).parents[1]
SIZES = (64, 256, 1024)
WAYS = {  # in a sitting, in turn
    "floor": "ordinary broker, Ray idle beside it",
    "again": "another such broker and program",
    "joined": "likewise, in a program that has joined Ray",
    "node": "the node's broker, `lz.connect()` in such a program",
    "cluster": '`lz.connect(cluster="ray")` in such a program',
}
WITH_AGENTS = ("node", "cluster")
IDLE_S = 10.0
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
CALLER = """
import json, os, sys, time
import layerzero as lz
way = sys.argv[1]
if way not in ("node", "cluster"):
    lz.connect()  # before Ray is imported: not to the node's
if way not in ("alone", "floor", "again"):
    import ray
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
if way in ("node", "cluster"):
    lz.connect(cluster="ray") if way == "cluster" else lz.connect()
end = time.monotonic() + 2
while time.monotonic() < end:  # the lane is there
    lz.null()
assert lz.last_report().path == "express", lz.last_report()
print(json.dumps(lz.status()["broker"]["pid"]), flush=True)
for line in sys.stdin:
    count = int(line)
    end = time.monotonic() + 0.1
    while time.monotonic() < end:  # what stood still has done what was due
        lz.null()
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        lz.null()
        times.append(time.perf_counter_ns() - start)
    times.sort()
    print(json.dumps([times[count // 2] / 1e3, times[count * 99 // 100] / 1e3]), flush=True)
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
import json, os, sys
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
agents, brokers = zip(*((one.facts["pid"], one.facts["broker"]["broker"]["pid"]) for one in states))
print(json.dumps([cluster.address, {"agent": agents, "broker": brokers}]), flush=True)
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


Pids = Mapping[str, list[int]]


@contextlib.contextmanager
def nodes(python: Path, *policies: Path) -> Iterator[tuple[str, Pids]]:
    """A Ray cluster with a node, and its agent, for each policy. Its address, and pids by what they are."""
    with subprocess.Popen(
        [python, "-c", NODES, *policies], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address, pids = json.loads(process.stdout.readline())
        of_ray = {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
        for pid in pids["agent"] + pids["broker"]:  # with its workers
            of_ray -= {pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))}
        try:
            yield address, {**pids, "ray": sorted(of_ray)}
        finally:
            process.stdin.close()


class Caller:
    """A program that makes calls when it is told to."""

    def __init__(self, python: Path, way: str, **environ: str) -> None:
        self.way = way
        self._process = subprocess.Popen(
            [python, "-c", CALLER, way],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids = [self._process.pid]
        self.pids.append(self._answer())  # its broker

    def block(self, count: int) -> list[float]:
        """p50 and p99 of so many calls, in us."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        found: list[float] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """These processes stand still meanwhile."""
    found = set(pids)
    try:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)


def sitting(python: Path, folder: Path, rounds: int, count: int) -> Iterator[dict[str, list[float]]]:
    """p50 and p99 of a block of each way, round by round."""
    with contextlib.ExitStack() as stack:

        def caller(way: str, base: Path, **environ: str) -> Caller:
            base.mkdir(mode=0o700, exist_ok=True)
            made = Caller(python, way, LAYERZERO_RUNTIME_DIR=str(base), **environ)
            stack.callback(made.close)
            return made

        alone = caller("alone", folder / "alone")
        before = [alone.block(count) for _ in range(rounds)]
        alone.close()
        address, pids = stack.enter_context(nodes(python, folder / "any.yaml", folder / "other.yaml"))
        callers = [caller(way, folder if way in WITH_AGENTS else folder / way, RAY_ADDRESS=address) for way in WAYS]
        own = pids["broker"].index(callers[-1].pids[1])
        of_node = {pids["agent"][own], pids["broker"][own]}
        everything = {*pids["agent"], *pids["broker"]}.union(*(one.pids for one in callers))
        for number in range(rounds):
            found = {"alone": before[number]}
            for one in random.sample(callers, len(callers)):
                with stopped(everything - {*one.pids} - (of_node if one.way in WITH_AGENTS else set())):
                    found[one.way] = one.block(count)
            yield found


def cpu_s(pids: Iterable[int]) -> float:
    """What these processes have used so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids if psutil.pid_exists(pid))


def idle(pids: Pids) -> dict[str, float]:
    """The part of a core that they use while nothing is asked, by what they are."""
    before = {name: cpu_s(found) for name, found in pids.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_s(found) - before[name]) / IDLE_S for name, found in pids.items()}


def main() -> int:
    options = parser(__doc__, "one sitting of 3 rounds, few calls").parse_args()
    sittings, rounds, count, calls = (1, 3, 3000, 5) if options.quick else (3, 12, 200_000, 20)
    environment = manifest.load(ROOT / "tests" / "clusters" / "ray.toml")
    python = build.ensure(environment, store=settings.load().store).python
    blocks: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="lz-") as name:
        folder = Path(name)
        os.environ.update(
            {**RAY, "LAYERZERO_RUNTIME_DIR": name, "HOME": name, "RAY_TMPDIR": name, "PYTHONPATH": str(ROOT / "src")}
        )
        os.environ["LAYERZERO_STORE"] = str(settings.load().store)
        (folder / "any.yaml").touch()
        (folder / "other.yaml").touch()
        (folder / "no_matmul.yaml").write_text("rules: [{match: {op: matmul}, avoid: ['*']}]\n")
        for _ in range(sittings):
            blocks += sitting(python, folder, rounds, count)
        with nodes(python, folder / "no_matmul.yaml", folder / "any.yaml") as (address, pids):
            used = idle(pids)
            afar = run(python, AFAR, calls, *SIZES, RAY_ADDRESS=address)

    def middle(way: str, which: int) -> float:
        return statistics.median(one[way][which] for one in blocks)

    def ratios(way: str, which: int) -> list[float]:
        return sorted(one[way][which] / one["floor"][which] for one in blocks)

    rows = []
    for way, label in {"alone": "`null` without Ray on the machine", **WAYS}.items():
        p50, p99 = (statistics.median(ratios(way, which)) for which in (0, 1))
        beside = f"p99 {at_most(p99, 1.05) if way in WITH_AGENTS else f'{p99:.2f}'}; p50 {p50:.2f}"
        rows.append([label, f"{middle(way, 0):.2f} us", f"{middle(way, 1):.2f} us", "1" if way == "floor" else beside])
    for n, us, kernel_us, price_us, _ in afar["rows"]:
        parts = f"kernel {kernel_us / 1e3:.2f} ms, price {price_us / 1e3:.2f} ms"
        rows.append([f"`matmul` of {n} x {n} float32 by another node", f"{us / 1e3:.2f} ms", "", parts])
    found = [ratios(way, 1) for way in WAYS][1:]
    spread = ", ".join(f"{one[len(one) // 4]:.2f} to {one[3 * len(one) // 4]:.2f}" for one in found)
    each = [
        statistics.median(one["cluster"][1] / one["floor"][1] for one in blocks[at : at + rounds])
        for at in range(0, len(blocks), rounds)
    ]
    by_sitting = ", ".join(f"{one:.2f}" for one in each)
    cores = {name: f"{part:.1%}" for name, part in used.items()}
    notes = f"""The floor is the second row; ratios are medians of those of {len(blocks)} rounds in {sittings} sittings,
{count:,} calls a block. Ratios of p99, the middle half of the rounds, rows 3 to 6: {spread}.
With `cluster="ray"` by sitting: {by_sitting}. Load average at the end {os.getloadavg()[0]:.1f}.
CPU time while nothing is asked, of a core, of two nodes: agents (actors of Ray's) {cores["agent"]},
their brokers {cores["broker"]}, the other {len(pids["ray"])} processes of Ray {cores["ray"]}.
The way to the other node, on the same machine: {afar["hops_us"]:,.0f} us two hops, {afar["mb_per_s"]:,.0f} MB/s.
A report of such a call:"""
    finish(
        "cluster",
        "Calls on a node of a Ray cluster",
        {"Ray": {"ray": "2.60.0"}},
        ["call", "p50", "p99", "beside the floor; of another node's, its parts"],
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
