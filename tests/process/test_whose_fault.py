"""Who breaks the protocol pays for it, and nobody else: peers that say what concerns others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from tests.process.harness import Site, bare_client, wait_until

import layerzero as lz
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Kind

X = np.array([1, 2, 3], np.float32)
# Before it answers, a worker says that it leaves a call of lane LZ_LANE to the broker.
LIAR = (Path(__file__).parents[1] / "backends" / "toy.py").read_text().replace(
    "    def run() -> None:\n        x = read()\n",
    "    def run() -> None:\n"
    "        import gc, zmq\n"
    "        from layerzero.ipc.transport import wire\n"
    "        for dealer in [one for one in gc.get_objects() if isinstance(one, zmq.Socket)]:\n"  # none in the probe
    "            dealer.send(wire.pack(wire.Kind.LEFT, seq=1, aux=int(os.environ['LZ_LANE'])))\n"
    "        x = read()\n",
)  # fmt: skip


def test_a_worker_that_leaves_a_call_of_anothers_lane_is_killed_and_the_client_stays(
    new_site: Callable[..., Site],
) -> None:
    """Its client would lose all its calls for what a stranger says. Lane 1 is of the CPU, and alpha's."""
    assert "LZ_LANE" in LIAR
    site = new_site(standby=0, backoff_s=600, backoff_max_s=600)
    site.add_backend("liar", provider=LIAR, priority=1, env={"LZ_LANE": "1"})
    session = site.connect()
    site.wait_ready("alpha", "liar")

    def lane() -> str | None:
        lz.silu(X)
        report = lz.last_report()
        assert report is not None
        return report.path

    wait_until(lambda: lane() == "express")
    with pytest.raises(lz.LayerZeroError, match="leaves call 1 of lane 1, which is another worker's") as failure:
        lz.silu(X, backend="liar")
    assert failure.value.code == "BAD_MESSAGE"
    assert session.is_alive
    assert site.events("client.dropped") == []
    assert [event["backend"] for event in site.events("worker.exited")] == ["liar"]
    lz.silu(X)


def test_a_worker_that_leaves_a_call_of_its_own_lane_of_the_cpu_is_killed(new_site: Callable[..., Site]) -> None:
    """Such calls are answered on their lane; only those of rings are left to the broker."""
    site = new_site(standby=0, backoff_s=600, backoff_max_s=600)
    site.add_backend("liar", provider=LIAR, env={"LZ_LANE": "1"})
    session = site.connect()
    site.wait_ready("liar")

    def is_caught() -> bool:
        lz.silu(X)
        return bool(site.events("worker.exited"))

    wait_until(is_caught)
    (event,) = site.events("worker.exited")
    assert "lane 1, which is no ring" in event["cause"]
    assert session.is_alive
    assert site.events("client.dropped") == []


def test_a_client_that_is_dropped_is_logged_once(connected: Site) -> None:
    """Two records of one event look like two clients."""
    before = len(connected.events("client.dropped"))
    with zmq.Context() as context:
        sock, dealer = bare_client(connected, context)
        with sock, dealer:
            dealer.send(wire.pack(Kind.EXECUTE, route=999, seq=1))
            assert sock.recv(1 << 16)
    connected.backend("alpha")  # what was logged before this answer is there
    (event,) = connected.events("client.dropped")[before:]
    assert event["detail"] == "call on unknown route 999"
    assert event["pid"] > 0
