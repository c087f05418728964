"""What is asked of Ray: the cluster's nodes, the actors that are their agents, and questions to those.

Bytes go in and bytes come out: Ray hands `bytes` over as they are, without pickle.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.connection import node as nodes
from layerzero.ipc.errors import EnvError, LayerZeroError, NotConnected, from_wire
from layerzero.ipc.transport.plain import pack_body, unpack_body

NAMESPACE = "layerzero"
AUTO = "auto"  # as Ray has it: RAY_ADDRESS, or the cluster that runs on this machine
LISTENS_S = 10.0  # so long the cluster's head may take to be connected to
ANSWER_S = 15.0  # so long an agent may take to answer a question, or to start
QUESTIONS = "questions"  # the threads of an agent that calls do not keep busy
QUESTION_THREADS, CALL_THREADS = 4, 32


@dataclass(frozen=True)
class Node:
    """One of the cluster's. `address`: of the machine."""

    id: str
    address: str
    is_alive: bool
    labels: Mapping[str, str]

    @property
    def short(self) -> str:
        return nodes.short(self.id)


def attach(address: str = AUTO) -> Any:
    """Ray, with this process part of a cluster; as it is where it is that already. Raises EnvError without Ray,
    NotConnected without a cluster."""
    try:
        import ray
    except ImportError as exc:
        raise EnvError(
            "install Ray: pip install 'layerzero-broker[ray]'",
            cause=str(exc),
            repair="pip install 'layerzero-broker[ray]'",
        ) from exc
    if not ray.is_initialized():
        meant = os.environ.get("RAY_ADDRESS", address) if address == AUTO else address
        try:
            _demand_listener(meant)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as exc:
            raise NotConnected(
                f"no Ray cluster answers at {meant!r:.80}: {exc!s:.500}", repair="ray start --head, or --ray ADDRESS"
            ) from exc
    return ray


def _demand_listener(address: str) -> None:
    """Raises OSError where nobody listens at a HOST:PORT: Ray itself would try for a quarter of an hour."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), LISTENS_S).close()


def nodes_of(ray: Any) -> list[Node]:
    """All that Ray knows of, those that are gone, too."""
    found = [Node(row["NodeID"], row["NodeManagerAddress"], row["Alive"], row["Labels"]) for row in ray.nodes()]
    return sorted(found, key=lambda one: one.id)


def name_of(node: str) -> str:
    """Of the actor that is a node's agent."""
    return f"agent-{node}"


def agent_of(ray: Any, node: str) -> Any | None:
    """The handle of a node's agent; None where it has none."""
    try:
        return ray.get_actor(name_of(node), namespace=NAMESPACE)
    except ValueError:
        return None


def ask(agent: Any, method: str, **params: Any) -> Any:
    """A question to an agent: a reference to its answer, for `answer_of`."""
    return agent.answer.options(concurrency_group=QUESTIONS).remote(pack_body([method, params]))


def answer_of(ray: Any, reference: Any, within_s: float | None = ANSWER_S) -> Any:
    """What an agent has answered. Raises its LayerZeroError, and NotConnected where it is lost or silent."""
    try:
        found = unpack_body(ray.get(reference, timeout=None if within_s is None else max(within_s, 0.0)))
    except ray.exceptions.GetTimeoutError:
        raise NotConnected(f"its agent has not answered within {within_s:.0f} s") from None
    except ray.exceptions.RayError as exc:
        raise NotConnected(f"its agent cannot be reached: {why_lost(exc)}") from exc
    if "error" in found:
        raise from_wire(found["error"])
    return found["value"]


def ready(ray: Any, references: Sequence[Any], within_s: float) -> list[Any]:
    """Those of the references whose answers have come; all of them, or as many as come in time."""
    found, _ = ray.wait(list(references), num_returns=len(references), timeout=within_s)
    return list(found)


def why_lost(exc: BaseException) -> str:
    """What Ray says of an actor that cannot be reached, in a line."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else ''}"[:300]


def ask_all(
    ray: Any, agents: Mapping[str, Any], method: str, within_s: float = ANSWER_S, **params: Any
) -> dict[str, Any | LayerZeroError]:
    """A question to many at once; for each node its answer, or why there is none."""
    references = {node: ask(agent, method, **params) for node, agent in agents.items()}
    until_s = time.monotonic() + within_s
    found: dict[str, Any | LayerZeroError] = {}
    for node, reference in references.items():
        try:
            found[node] = answer_of(ray, reference, until_s - time.monotonic())
        except LayerZeroError as exc:
            found[node] = exc
    return found


def start_agent(ray: Any, cls: type, node: str, arguments: Sequence[bytes]) -> Any:
    """The agent of a node, which has one from now on: there and nowhere else, started again whenever it ends."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=CALL_THREADS,
        concurrency_groups={QUESTIONS: QUESTION_THREADS},
    )(cls)
    return actor.options(
        name=name_of(node),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(*arguments)
