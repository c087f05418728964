"""What workers' frames say, against what the broker knows of the workers, as events for the core."""

from __future__ import annotations

from layerzero.broker.connections import Connections
from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import frame_codec
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.io.page_poller import PagePoller
from layerzero.broker.io.peers import Peer
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.transport import messages

POLL_CALLS = 64  # a worker's enqueued calls are looked at each time they are so many more


class WorkerFrames:
    def __init__(self, state: BrokerState, lanes: LanePages, page_poller: PagePoller, connections: Connections) -> None:
        self._state = state
        self._lanes = lanes
        self._page_poller = page_poller
        self._connections = connections

    def event_of(self, peer: Peer, frame: bytes) -> ev.Event | None:
        """The event that a worker's frame is; None when nobody is concerned any more. Raises ProtocolError."""
        said = frame_codec.of_worker(peer.identity, frame)
        if isinstance(said, ev.CallRan):
            worker = self._state.lifecycle.current(peer.backend, peer.generation)
            if worker is not None and worker.enqueued and not len(worker.enqueued) % POLL_CALLS:
                self._page_poller.at_points_of(worker)
            return said
        if isinstance(said, ev.CallRaised):
            return said
        if isinstance(said, messages.Ready):
            self._check_kernels(peer.backend, said)
            return ev.WorkerReady(peer.identity, peer.backend, peer.generation, said.versions)
        lane = self._state.leases.lanes.get(said.lane)
        if lane is None or said.lane not in self._lanes:
            self._state.lifecycle.stale += 1  # its client is gone
            return None
        if (lane.worker.backend, lane.generation) != (peer.backend, peer.generation):
            raise ProtocolError(f"it leaves call {said.call} of lane {said.lane}, which is another worker's")
        call = self._lanes.call(said.lane, said.call)
        if call is None:
            text = f"it has written over call {said.call} of lane {said.lane}, which was not done"
            self._connections.drop_client(act.DropClient(lane.client.identity, text))
            return None
        return ev.CallHandedBack(peer.identity, said.lane, call, said.error)

    def _check_kernels(self, backend: str, ready: messages.Ready) -> None:
        claimed = {k.kernel_id for kernels in self._state.capabilities[backend].ops.values() for k in kernels}
        missing = claimed.difference(map(str, ready.kernels))
        if missing:
            raise ProtocolError(f"its provider lacks kernels of its descriptor: {', '.join(sorted(missing))}")
