"""What is handed to nodes that are not alike, and what is left when agents end: by the command line, as a person would.
These tests come last, and leave the cluster without agents."""

from __future__ import annotations

from tests.clusters.conftest import Cluster, as_json, facts_of, states_of
from tests.envs.wheels import make_wheel, pack
from tests.process.harness import wait_ended

from layerzero.cluster.agent import fleet
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import load
from layerzero.envs.transfer.transfer import export


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
