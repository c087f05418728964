"""broker/io/worker_links.py: what workers are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from layerzero.broker.io.peers import Peer
from layerzero.broker.io.poller import Poller
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.ipc.transport import control
from layerzero.ipc.transport.messages import UnmapLane, Wake

End = tuple[WorkerLinks, Peer, socket.socket]


@pytest.fixture
def end() -> Iterator[End]:
    """A worker's link and the worker's end of it."""
    poller = Poller()
    links = WorkerLinks(poller, lambda event: pytest.fail(str(event)))
    ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    peer = Peer(ours, "worker", b"W", backend="alpha", generation=1)
    poller.watch(ours.fileno(), lambda: None)
    links.add(peer)
    yield links, peer, workers
    peer.close()
    workers.close()
    poller.close()


def test_a_worker_is_woken_by_a_message(end: End) -> None:
    """One of that start, and no other."""
    links, _, workers = end
    links.wake("alpha", 2)
    links.wake("alpha", 1)
    assert control.receive(workers, Wake) == (Wake(), [])
    assert not control.is_readable(workers.fileno())


def test_a_worker_that_reads_nothing_is_not_woken_for_ever(end: End) -> None:
    """It is awake, or it will be: nothing is kept for it, and what it must be told does not end it."""
    links, peer, workers = end
    for _ in range(20_000):
        links.wake("alpha", 1)
    assert not peer.backlog
    links.tell("alpha", 1, UnmapLane(lane=1))
    assert len(peer.backlog) == 1
    links.wake("alpha", 1)
    assert len(peer.backlog) == 1
    workers.close()
    peer.drop_backlog()
    links.wake("alpha", 1)
