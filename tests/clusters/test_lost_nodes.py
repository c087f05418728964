"""Nodes that are not alike, and one that Ray loses: by the command line, as a person would."""

from __future__ import annotations

import shutil

from tests.clusters.conftest import as_json, cluster_of, states_of
from tests.process.harness import BACKENDS, wait_ended, wait_until

from layerzero.cluster.agent import fleet


def test_what_nodes_do_not_have_in_common_is_told_and_down_leaves_nothing() -> None:
    """One knows three backends, the other two; a lost raylet takes its node's broker with it."""
    with cluster_of() as made:
        few = made.folder / "few"
        few.mkdir()
        for name in ("alpha.toml", "alpha.json", "beta.toml", "beta.json", "toy.py"):
            shutil.copy(BACKENDS / name, few)
        first, second = made.add_node(), made.add_node(LAYERZERO_MANIFEST_DIRS=str(few))
        up = made.lz("cluster", "up", "--ray", made.address, "--json")
        answer = as_json(up)
        assert [one["state"] for one in answer["nodes"]] == ["ok", "ok"], up
        assert any(line.startswith("gamma: ") and "unknown on" in line for line in answer["differences"])
        pids = {one["node"]: one["facts"]["broker"]["broker"]["pid"] for one in answer["nodes"]}
        raylet = made.raylets[second]
        made.cluster.remove_node(raylet, allow_graceful=False)
        wait_ended(pids[second], 30.0)
        wait_until(lambda: states_of(made)[second].state == fleet.LOST, 30.0)
        assert states_of(made)[first].state == fleet.OK
        assert made.lz("cluster", "down", "--ray", made.address).stdout == "1 agent ended\n"
        wait_ended(pids[first], 30.0)
        assert not (made.broker_folder(first) / "agent.lock").exists()
        assert states_of(made)[first].state == fleet.NO_AGENT
