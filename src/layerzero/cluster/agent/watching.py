"""What all nodes do, seen from one place. A thread asks their agents again and again; whoever wants to know reads what
each said last, and waits for none: a node that is lost or silent delays nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from layerzero.cluster import ray_link
from layerzero.cluster.agent import fleet
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.version import __version__

EVERY_S = 1.0  # between two questions to an agent
OLD_S = 10.0  # what a node said so long ago says nothing of now
LOST_S = 600.0  # so long a lost node is shown


@dataclass(frozen=True)
class Said:
    """By an agent, and when."""

    at_s: float
    answer: Any | LayerZeroError


def of_cluster(address: str) -> Watch:
    """One that has begun, and has asked all nodes once. Raises EnvError, NotConnected."""
    watch = Watch(ray_link.attach(address))
    watch.ask()
    watch.begin()
    return watch


class Watch:
    """Of the cluster that this process is part of. `link`: ray_link, or what stands for it."""

    def __init__(self, ray: Any, link: Any = ray_link) -> None:
        self._ray, self._link = ray, link
        self._lock = threading.Lock()
        self._nodes: list[ray_link.Node] = []
        self._agents: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}  # references to answers that are to come, and whose
        self._said: dict[str, Said] = {}
        self._lost_s: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(EVERY_S)  # Ray may be waiting for a head that is gone

    def states(self) -> list[fleet.NodeState]:
        """Each node as it was seen last: `facts` are what its agent's `seen` has (actor.py)."""
        now_s = time.monotonic()
        with self._lock:
            shown = [one for one in self._nodes if one.is_alive or now_s - self._lost_s[one.id] < LOST_S]
            return [self._state(one, now_s) for one in shown]

    def shown(self) -> dict[str, Any]:
        """The states as plain values, without what brokers have counted, and where nodes differ: for the page."""
        states, rows = self.states(), []
        for one in states:
            facts = {name: value for name, value in one.facts.items() if name not in ("metrics", "gpu_bytes")}
            rows.append({**one.to_dict(), "facts": facts})
        return {"nodes": rows, "differences": fleet.differences(states)}

    def _state(self, node: ray_link.Node, now_s: float) -> fleet.NodeState:
        said = self._said.get(node.id)
        has_agent = node.id in self._agents
        found = fleet.state_of(node, None if said is None else said.answer, has_agent=has_agent)
        if found.state == fleet.OK and said is not None and now_s - said.at_s > OLD_S:
            text = f"its agent has said nothing for {now_s - said.at_s:.0f} s"
            return replace(found, state=fleet.SILENT, problem=text, repair=fleet.AGAIN, facts={})
        if found.state == fleet.OK and found.facts["package"] != __version__:
            return replace(found, problem=f"runs layerzero {found.facts['package']}, here {__version__}")
        return found

    def _run(self) -> None:
        while not self._over.is_set():
            due_s = time.monotonic() + EVERY_S
            self.ask()
            self._over.wait(max(due_s - time.monotonic(), 0.0))

    def ask(self) -> None:
        """Look which nodes there are, ask those that owe no answer, and take what comes within EVERY_S."""
        try:
            nodes = self._link.nodes_of(self._ray)
            alive = {one.id for one in nodes if one.is_alive}
            agents = {node: self._agents.get(node) or self._link.agent_of(self._ray, node) for node in alive}
        except (self._ray.exceptions.RayError, RuntimeError) as exc:  # Ray's head is gone: what is known gets old
            log("nodes.unknown", detail=self._link.why_lost(exc))
            return
        found = {node: agent for node, agent in agents.items() if agent is not None}
        with self._lock:
            for node in {one.id for one in nodes} - alive:
                self._lost_s.setdefault(node, time.monotonic())
            self._nodes, self._agents = nodes, found
            self._said = {node: said for node, said in self._said.items() if node in alive}
        self._asked = {reference: node for reference, node in self._asked.items() if node in found}
        waiting = set(self._asked.values())
        for node, agent in found.items():
            if node not in waiting:
                self._asked[self._link.ask(agent, "seen")] = node
        self._take()

    def _take(self) -> None:
        until_s = time.monotonic() + EVERY_S
        while self._asked and (left_s := until_s - time.monotonic()) > 0:
            ready = self._link.ready(self._ray, list(self._asked), left_s)
            if not ready:
                return
            for reference in ready:
                node = self._asked.pop(reference)
                try:
                    answer = self._link.answer_of(self._ray, reference, 0.0)
                except LayerZeroError as exc:
                    answer = exc
                with self._lock:
                    self._said[node] = Said(time.monotonic(), answer)
