"""`lz.connect(cluster="ray")`: other nodes serve what this one cannot, or not as fast; their deaths cost no call."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import KILL, fault
from tests.clusters.conftest import Cluster, facts_of, states_of
from tests.process.harness import wait_ended, wait_until

import layerzero as lz
from layerzero.cluster.agent import fleet
from layerzero.cluster.calls.price import Way
from layerzero.cluster.calls.session import ClusterSession
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, NoBackend, Poison

X = np.linspace(-2, 2, 4096, dtype=np.float32)
SILU = X / (1 + np.exp(-X))
A, B = (np.arange(6, dtype=np.float32).reshape(shape) for shape in ((2, 3), (3, 2)))
SHORT = Way(hops_us=1e3, bytes_per_s=1e9)


@pytest.fixture(scope="module", autouse=True)
def session(cluster: Cluster) -> Iterator[ClusterSession]:
    """This process is on the first node, whose kernels take long; the others have matmul, too."""
    found = lz.connect(cluster="ray")
    assert isinstance(found, ClusterSession)
    yield found
    lz.disconnect()


def report() -> Any:
    found = lz.last_report()
    assert found is not None
    return found


def node_of(cluster: Cluster, name: str | None) -> str:
    """The node that a kernel's or backend's name begins with."""
    assert name is not None
    return next(node for node in cluster.nodes if name.startswith(f"{node[:12]}/"))


def test_what_nobody_here_has_is_served_elsewhere(cluster: Cluster) -> None:
    """Arrays may be strided: their elements travel."""
    for a, b in ((A, B), (B.T, A.T)):
        out = lz.matmul(a, b)
        assert np.array_equal(out, a @ b)
    told = report()
    assert told.path == "node"
    assert node_of(cluster, told.kernel_id) != cluster.nodes[0]
    assert told.copied_bytes == A.nbytes + B.nbytes + (B.T @ A.T).nbytes
    assert "two hops" in str(told)
    explained = lz.explain("matmul", A, B)
    assert explained.path == "node"
    assert "two hops" in str(explained)
    assert {node_of(cluster, c.kernel_id) for c in explained.candidates if c.accepted} == set(cluster.nodes[1:])
    assert not [c for c in explained.candidates if c.kernel_id == f"{cluster.nodes[2][:12]}/gamma.matmul"]


def test_what_is_wanted_of_selection_travels_along(cluster: Cluster) -> None:
    """Policy of a thread, and a backend that the call names."""
    with lz.prefer("beta"):
        lz.matmul(A, B)
    assert report().backend.endswith("/beta")
    lz.matmul(A, B, backend="gamma")
    assert report().backend.endswith("/gamma")


def test_a_kernel_that_takes_long_here_gives_way(cluster: Cluster, session: ClusterSession) -> None:
    """Once it is known there: what was never measured there never wins. The way there is said, not measured: on a busy
    machine it may be as long."""
    assert np.allclose(lz.silu(X), SILU, atol=1e-6)
    assert report().path != "node"
    cluster.on(cluster.nodes[1], call_often)
    for other in [one for asked in session.others.rounds() for one in asked]:
        other.way, other.measured_s = SHORT, math.inf
    wait_until(partial(served_elsewhere, session))
    told = report()
    assert node_of(cluster, told.kernel_id) == cluster.nodes[1]
    assert any(c.kernel_id == "alpha.silu" and c.accepted for c in told.candidates)


def call_often() -> None:
    """In a Ray task: until the node's broker knows how long it takes."""
    import numpy as np

    import layerzero as lz

    lz.connect()
    for _ in range(50):
        lz.silu(np.linspace(-2, 2, 4096, dtype=np.float32), backend="alpha")


def served_elsewhere(session: ClusterSession) -> bool:
    session.decisions._stay_until_s.clear()  # else it is looked at after half a minute
    assert np.allclose(lz.silu(X), SILU, atol=1e-6)
    return bool(report().path == "node")


def test_what_cannot_travel_stays(cluster: Cluster) -> None:
    """Memory of the caller's that a kernel writes; and no cluster but Ray's."""
    with pytest.raises(NoBackend):
        lz.matmul(A, B, out=np.empty((2, 2), np.float32))
    with pytest.raises(InvalidArgument, match="'ray'"):
        lz.connect(cluster="nomad")


def test_what_kills_workers_is_not_carried_from_node_to_node(cluster: Cluster) -> None:
    """Two deaths are enough, of all nodes together: else one call would kill the workers of a whole cluster."""
    with pytest.raises(LayerZeroError) as caught:
        lz.silu(np.array([fault(KILL), 0.0], np.float64))
    assert isinstance(caught.value, Poison)
    attempts = caught.value.report.attempts
    assert len([one for one in attempts if one.exit_signal is not None]) == 2
    assert len({node_of(cluster, one.kernel_id) for one in attempts}) == 1


class Load:
    """Threads that call until `with` ends. What became of the calls, and of their attempts."""

    def __init__(self, call: Callable[[], bool], threads: int = 2) -> None:
        self._call = call
        self.right = self.wrong = self.lost = 0
        self.kernel: str | None = None  # that served the last one
        self.outcomes: set[str] = set()
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def some_more(self) -> None:
        """Return when further calls have ended."""
        enough = self.right + 30
        wait_until(lambda: self.right >= enough or self.lost or self.wrong)

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                right = self._call()
            except LayerZeroError as exc:
                self.lost += 1
                self.outcomes.add(f"raised {exc.code}: {exc.message:.300}")
            else:
                self.right, self.wrong = self.right + right, self.wrong + (not right)
                self.kernel = report().kernel_id
                self.outcomes.update(attempt.outcome or "served" for attempt in report().attempts)


def test_deaths_of_other_nodes_cost_no_call(cluster: Cluster) -> None:
    """An agent, a broker and a raylet are killed in the middle of calls: each is answered, and right."""
    with Load(lambda: np.array_equal(lz.matmul(A, B), A @ B)) as load:
        wait_until(partial(killed_an_agent_in_a_call, cluster, load))
        before = facts_of(cluster, node_of(cluster, load.kernel))
        os.kill(before["broker"]["broker"]["pid"], signal.SIGKILL)
        wait_until(lambda: facts_of(cluster, before["node"])["restarts"] > before["restarts"])
        load.some_more()
        victim = node_of(cluster, load.kernel)
        broker = facts_of(cluster, victim)["broker"]["broker"]["pid"]
        cluster.remove(victim)
        load.some_more()
    assert (load.wrong, load.lost) == (0, 0), load.outcomes
    wait_ended(broker)  # with its last client
    wait_until(lambda: states_of(cluster)[victim].state == fleet.LOST)


def killed_an_agent_in_a_call(cluster: Cluster, load: Load) -> bool:
    """Of the node that calls go to, which has another one then: False where none was on its way there."""
    load.some_more()
    before = facts_of(cluster, node_of(cluster, load.kernel))
    os.kill(before["pid"], signal.SIGKILL)
    load.some_more()
    wait_until(lambda: facts_of(cluster, before["node"])["pid"] != before["pid"])
    return "NODE_LOST" in load.outcomes


def test_the_death_of_this_nodes_broker_costs_no_call(session: ClusterSession) -> None:
    """Another node serves calls meanwhile; this node's next broker the later ones."""
    before = session.broker_pid
    with Load(lambda: np.allclose(lz.silu(X[:8]), SILU[:8], atol=1e-6)) as load:
        load.some_more()
        os.kill(before, signal.SIGKILL)
        load.some_more()
        wait_until(lambda: session.broker_pid != before or load.lost)
        load.some_more()
    assert (load.wrong, load.lost) == (0, 0), load.outcomes
