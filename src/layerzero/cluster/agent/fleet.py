"""All agents of a cluster: started, ended, and what they say of their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.cluster import ray_link
from layerzero.cluster.agent.actor import NodeAgent
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.version import __version__

OK, NO_AGENT, SILENT, LOST = "ok", "no agent", "silent", "NODE_LOST"
STATES = (OK, NO_AGENT, SILENT, LOST)  # of a node
AGAIN = "try again; if it stays like this, lz cluster down, then lz cluster up"
STOP_S = 20.0


@dataclass(frozen=True)
class NodeState:
    """A node as it is now. `facts`: what its agent says (actor.py); empty without an answer. `problem`: why it does not
    serve, and `repair` what helps."""

    node: str
    address: str
    state: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    repair: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "facts": dict(self.facts)}


def up(address: str) -> list[NodeState]:
    """An agent for each node that has none. Returns the state of all nodes, once every agent has said its own."""
    ray = ray_link.attach(address)
    alive = [one for one in ray_link.nodes_of(ray) if one.is_alive]
    agents = {one.id: ray_link.start_agent(ray, NodeAgent, one.id, (one.id.encode(),)) for one in alive}
    return _states(ray, agents, 2 * ray_link.ANSWER_S)


def states(address: str) -> list[NodeState]:
    """Of all nodes that Ray knows."""
    ray = ray_link.attach(address)
    alive = [one.id for one in ray_link.nodes_of(ray) if one.is_alive]
    return _states(ray, {node: ray_link.agent_of(ray, node) for node in alive}, ray_link.ANSWER_S)


def down(address: str) -> list[NodeState]:
    """End all agents with their brokers, which finish what they run. Returns the nodes that had one."""
    ray = ray_link.attach(address)
    nodes = ray_link.nodes_of(ray)
    agents = {one.id: ray_link.agent_of(ray, one.id) for one in nodes}
    found = {node: agent for node, agent in agents.items() if agent is not None}
    alive = {one.id for one in nodes if one.is_alive}
    answers = ray_link.ask_all(ray, {n: a for n, a in found.items() if n in alive}, "stop", STOP_S)
    for agent in found.values():
        ray.kill(agent, no_restart=True)
    by_id = {one.id: one for one in nodes}
    told = []
    for node in found:
        answer = answers.get(node)
        why = answer.message if isinstance(answer, LayerZeroError) else ""
        told.append(NodeState(node, by_id[node].address, OK if node in alive and not why else LOST, problem=why))
    return told


def _states(ray: Any, agents: Mapping[str, Any], within_s: float) -> list[NodeState]:
    answers = ray_link.ask_all(ray, {n: a for n, a in agents.items() if a is not None}, "state", within_s)
    return [state_of(one, answers.get(one.id), has_agent=one.id in answers) for one in ray_link.nodes_of(ray)]


def state_of(node: ray_link.Node, answer: Any | LayerZeroError | None, *, has_agent: bool) -> NodeState:
    """Of a node whose agent has said this; None: nothing."""
    if not node.is_alive:
        return NodeState(node.id, node.address, LOST, problem="Ray has lost it")
    if not has_agent:
        return NodeState(node.id, node.address, NO_AGENT, problem="has no agent", repair="lz cluster up")
    if answer is None or isinstance(answer, LayerZeroError):
        why = "its agent has said nothing yet" if answer is None else answer.message
        return NodeState(node.id, node.address, SILENT, problem=why, repair=AGAIN)
    return NodeState(node.id, node.address, OK, answer, answer["problem"])


def differences(nodes: Sequence[NodeState]) -> list[str]:
    """Where nodes are not alike, one line each: LayerZero itself, and environments, by the ids of their locks."""
    answered = [one for one in nodes if one.facts.get("broker")]
    lines = []
    versions = {one.node: str(one.facts["package"]) for one in answered}
    if len(set(versions.values())) > 1:
        lines.append(f"layerzero: {_by_value(versions)}; repair: install {__version__} everywhere, lz cluster down, up")
    rows = {one.node: {row["name"]: row for row in one.facts["broker"]["backends"]} for one in answered}
    for name in sorted({name for known in rows.values() for name in known}):
        has = {node: _environment(known.get(name)) for node, known in rows.items()}
        if len(set(has.values())) > 1:
            lines.append(f"{name}: {_by_value(has)}; repair: lz env export {name} FILE, lz cluster share FILE")
    return lines


def _environment(row: Mapping[str, Any] | None) -> str:
    """What a node has of a backend, in words that are equal where it is the same."""
    if row is None:
        return "unknown"
    match (row["unavailable"] or {}).get("code"):
        case "NOT_FOR_MACHINE":
            return "not for this machine"
        case "NOT_RUN":
            return "never run"
    env = row.get("env") or "no environment"
    return str(env) if row.get("built") is not False else f"{env} not built"


def _by_value(values: Mapping[str, str]) -> str:
    from layerzero.client.connection.node import short

    alike: dict[str, list[str]] = {}
    for node, value in values.items():
        alike.setdefault(value, []).append(short(node))
    return ", ".join(f"{value} on {_some(found)}" for value, found in sorted(alike.items()))


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
