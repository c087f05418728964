"""Nodes that are not alike, and one that Ray loses: by the command line, as a person would."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clusters.conftest import Cluster, as_json, cluster_of, states_of
from tests.process.harness import BACKENDS, ROOT, wait_ended, wait_until

from layerzero.cluster.agent import fleet


def _change(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def share_tiny(made: Cluster) -> dict[str, str]:
    """An environment that is made here, handed to all nodes, each of which has a store of its own. Their problems."""
    from tests.envs.wheels import make_wheel, pack

    from layerzero.envs.build.wheelhouse import Wheelhouse
    from layerzero.envs.manifest import load
    from layerzero.envs.transfer.transfer import export

    house = made.folder / "house"
    house.mkdir()
    for name in ("pyzmq", "msgpack"):
        pack(house, name)
    make_wheel(house, "twig", "1.0")
    found = [Wheelhouse(house).wheels(name)[0] for name in ("msgpack", "pyzmq", "twig")]
    lock = "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in found)
    (made.folder / "manifests" / "tiny.cpu.txt").write_text(lock)
    file = made.folder / "tiny.tar.gz"
    export(load(made.folder / "manifests" / "tiny.toml"), file, store=made.folder / "here", wheelhouse=house)
    told = made.lz("cluster", "share", str(file), "--ray", made.address, "--json")
    for node in made.nodes:
        assert list((made.folder / f"store-{made.nodes.index(node)}" / "envs").glob("tiny-*")), told
    return {one["node"]: one["problem"] for one in as_json(told)["nodes"]}


def test_what_nodes_do_not_have_in_common_is_told_and_down_leaves_nothing() -> None:
    """One knows three backends, the other two; a lost raylet takes its node's broker with it."""
    with cluster_of() as made:
        few = made.folder / "few"
        few.mkdir()
        for name in ("alpha.toml", "alpha.json", "beta.toml", "beta.json", "toy.py"):
            shutil.copy(BACKENDS / name, few)
        tiny = made.folder / "manifests"
        tiny.mkdir()
        for name in ("tiny.toml", "tiny.json", "tiny.py"):
            shutil.copy(ROOT / "tests" / "samples" / "manifests" / name, tiny)
        _change(tiny / "tiny.toml", "requirements = []", 'requirements = ["twig"]')
        first, second = (
            made.add_node(
                LAYERZERO_MANIFEST_DIRS=f"{backends}:{tiny}", LAYERZERO_STORE=str(made.folder / f"store-{number}")
            )
            for number, backends in enumerate((BACKENDS, few))
        )
        up = made.lz("cluster", "up", "--ray", made.address, "--json")
        answer = as_json(up)
        assert [one["state"] for one in answer["nodes"]] == ["ok", "ok"], up
        assert any(line.startswith("gamma: ") and "unknown on" in line for line in answer["differences"])
        pids = {one["node"]: one["facts"]["broker"]["broker"]["pid"] for one in answer["nodes"]}
        assert share_tiny(made) == {first: "", second: ""}
        raylet = made.raylets[second]
        made.cluster.remove_node(raylet, allow_graceful=False)
        wait_ended(pids[second], 30.0)
        wait_until(lambda: states_of(made)[second].state == fleet.LOST, 30.0)
        assert states_of(made)[first].state == fleet.OK
        assert made.lz("cluster", "down", "--ray", made.address).stdout == "1 agent ended\n"
        wait_ended(pids[first], 30.0)
        assert not (made.broker_folder(first) / "agent.lock").exists()
        assert states_of(made)[first].state == fleet.NO_AGENT
