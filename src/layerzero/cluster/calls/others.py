"""The other nodes of the cluster, as this process knows them: which have an agent, the way there, what they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.client.connection import node as nodes
from layerzero.client.connection.report import Candidate
from layerzero.cluster import ray_link
from layerzero.cluster.calls.placement import Nodes
from layerzero.cluster.calls.price import Way, way_of
from layerzero.ipc.errors import BackendError, LayerZeroError, NotConnected, OutOfMemory
from layerzero.ipc.logs import log

KNOWN_S = 10.0  # so old may be what is known of which nodes there are
WAY_S = 300.0  # and the way to one
EXPLAIN_S = 5.0
EMPTY_RUNS, LOADED_RUNS, LOADED_BYTES = 5, 3, 1 << 20


@dataclass(eq=False)
class Other:
    """One of them."""

    id: str
    agent: Any
    way: Way | None = None
    measured_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def short(self) -> str:
        return nodes.short(self.id)


class Others:
    """Threads may share it."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.nodes = Nodes(str(ray.get_runtime_context().get_node_id()))
        self._lock = threading.Lock()
        self._known: dict[str, Other] = {}
        self._until_s = 0.0

    def rounds(self) -> Iterator[list[Other]]:
        """Whom to ask about a call, until one serves it (placement.py)."""
        now_s = time.monotonic()
        with self._lock:
            if now_s >= self._until_s:
                try:
                    self._look()
                except (self.ray.exceptions.RayError, RuntimeError) as exc:  # Ray's head is gone: what is known stays
                    log("nodes.unknown", detail=ray_link.why_lost(exc))
                self._until_s = now_s + KNOWN_S
            known, rounds = self._known, list(self.nodes.rounds(now_s))
        for asked in rounds:
            yield [known[node] for node in asked]

    def get(self, node: str) -> Other | None:
        """None of one that has left the cluster."""
        return self._known.get(node)

    def lose(self, other: Other) -> None:
        """A node did not answer: it is left out for a moment, and looked at anew after that."""
        self.nodes.lose(other.id, time.monotonic())
        self._until_s = 0.0
        other.way = None

    def _look(self) -> None:
        alive = {one.id for one in ray_link.nodes_of(self.ray) if one.is_alive} - {self.nodes.own}
        known = {node: one for node, one in self._known.items() if node in alive}
        for node in sorted(alive - known.keys()):
            agent = ray_link.agent_of(self.ray, node)
            if agent is not None:
                known[node] = Other(node, agent)
        self._known = known
        self.nodes.see(self._known)

    def way_to(self, other: Other) -> Way:
        """Measured, or as it was. Raises NotConnected."""
        with other.lock:
            if other.way is None or time.monotonic() - other.measured_s > WAY_S:
                other.way, other.measured_s = self._measured(other), time.monotonic()
            return other.way

    def _measured(self, other: Other) -> Way:
        load = bytes(LOADED_BYTES)
        self._echo(other, load)  # the first one connects
        empty = [self._echo(other, b"") for _ in range(EMPTY_RUNS)]
        loaded = [self._echo(other, load) for _ in range(LOADED_RUNS)]
        return way_of(empty, loaded, 2 * LOADED_BYTES)

    def _echo(self, other: Other, data: bytes) -> float:
        start_s = time.perf_counter()
        try:
            self.ray.get(other.agent.echo.remote(data), timeout=EXPLAIN_S)
        except self.ray.exceptions.RayError as exc:
            self.lose(other)
            raise NotConnected(f"node {other.short} cannot be reached: {ray_link.why_lost(exc)}") from exc
        return time.perf_counter() - start_s

    def explain(self, body: bytes) -> list[tuple[Other, Way, list[Candidate]]]:
        """What others would serve a call with: nodes that answer, with kernels that accept, best first."""
        return next(filter(None, (self._explained(asked, body) for asked in self.rounds())), [])

    def _explained(self, others: Sequence[Other], body: bytes) -> list[tuple[Other, Way, list[Candidate]]]:
        """By these; none that has no kernel for it."""
        asked = [(one, ray_link.ask(one.agent, "explain", route=body)) for one in others]
        until_s = time.monotonic() + EXPLAIN_S
        found = []
        for other, reference in asked:
            try:
                answer = ray_link.answer_of(self.ray, reference, until_s - time.monotonic())
                way = self.way_to(other)
            except NotConnected:
                self.lose(other)
                continue
            except LayerZeroError:
                continue  # it does not know a backend that the caller named, for instance
            if accepted := _accepted(answer["candidates"]):
                found.append((other, way, accepted))
        return found

    def call(
        self, other: Other, head: bytes, memory: Sequence[bytes], results: int, within_s: float | None
    ) -> list[Any]:
        """What the agent has answered (agent/served.py). Raises NotConnected where the node is lost, OutOfMemory where
        Ray has no room for the arrays, BackendError where the agent itself failed."""
        failures = self.ray.exceptions
        try:
            references = other.agent.call.options(num_returns=1 + results).remote(head, *memory)
            found: list[Any] = self.ray.get(references, timeout=within_s)
        except (failures.ObjectStoreFullError, failures.OutOfDiskError) as exc:
            nbytes = sum(map(len, memory))
            raise OutOfMemory(
                f"give Ray's object store more memory: {nbytes:,} bytes do not fit ({ray_link.why_lost(exc)})",
                nbytes=nbytes,
            ) from exc
        except failures.RayTaskError as exc:
            raise BackendError(f"the agent failed, see Ray's log of it: {ray_link.why_lost(exc)}") from exc
        except failures.RayError as exc:
            self.lose(other)
            raise NotConnected(ray_link.why_lost(exc)) from exc
        return found


def _accepted(rows: Sequence[Any]) -> list[Candidate]:
    return [one for one in (Candidate.from_wire(row) for row in rows) if one.accepted]
