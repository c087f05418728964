"""Metrics of all nodes, for the HTTP server that shows a broker's (client/metrics)."""

from __future__ import annotations

from typing import Any

from layerzero.client.connection import node as nodes
from layerzero.client.metrics.nodes import NodeAnswer, NodesSnapshot
from layerzero.cluster.agent import fleet
from layerzero.cluster.agent.watching import Watch
from layerzero.ipc.version import __version__


class AllNodes:
    """What the server shows: as `client.metrics.serving.Source`. Never waits."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def answer(self, question: str, within_s: float) -> dict[str, Any]:
        """This process is well; and calls would be served where one node has a broker."""
        if question == "ping":
            return {}
        serves = any(one.state == fleet.OK and one.facts["broker"] for one in self._watch.states())
        return {"why": [] if serves else ["no node has a broker that answers"]}

    def snapshot(self) -> NodesSnapshot:
        """Of what each node said last."""
        return NodesSnapshot([_answer_of(one) for one in self._watch.states()], fleet.STATES)


def _answer_of(one: fleet.NodeState) -> NodeAnswer:
    facts = one.facts
    is_readable = facts.get("package") == __version__  # another version may count other things
    return NodeAnswer(
        nodes.short(one.node),
        str(facts.get("host", one.address)),
        one.state,
        int(facts.get("restarts", 0)),
        facts["metrics"] if is_readable else None,
        facts["gpu_bytes"] if is_readable else {},
    )
