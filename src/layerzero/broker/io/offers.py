"""What clients offer over their control sockets (arenas, GPUs, the pages of lanes) and what workers are lent of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import fd_reserve
from layerzero.broker.io.counter_pages import CounterPages
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.io.page_poller import PagePoller
from layerzero.broker.io.peers import Peer
from layerzero.broker.io.timeline_pages import Gpu, TimelinePages, check_handle_fds
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.ipc.cuda.handles import ArenaHandle
from layerzero.ipc.errors import LayerZeroError, NoTransport, OutOfMemory, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, unwanted, wire
from layerzero.ipc.transport.counter_messages import AddCounters, CountersAdded
from layerzero.ipc.transport.messages import AddArena, AddGpu, AddGpuArena, AddLane, RetireArena

KINDS = (AddArena, AddGpu, AddGpuArena, AddLane, RetireArena, AddCounters)


@dataclass(frozen=True)
class _Arena:
    """What came with a client's arena: a memfd, or the handle of GPU memory, with a descriptor by most transports."""

    fd: int | None
    handle: ArenaHandle | None = None

    def close(self) -> None:
        if self.fd is not None:
            unwanted.close_all((self.fd,))


class Offers:
    """Owns the descriptors of arenas; those of GPUs and lanes are `pages`' and `lanes`'. `handle` is the core's."""

    def __init__(
        self,
        state: BrokerState,
        handle: Callable[[ev.Event], None],
        links: WorkerLinks,
        lanes: LanePages,
        pages: TimelinePages,
        page_poller: PagePoller,
    ) -> None:
        self._state = state
        self._handle = handle
        self._links = links
        self._lanes = lanes
        self._pages = pages
        self._page_poller = page_poller
        self.counters = CounterPages(state.engine, handle)
        self._arenas: dict[tuple[int, int], _Arena] = {}  # by client's number, also after it has left, and its own
        self._kept: Counter[int] = Counter()  # how many, by client's number

    # --- what clients bring ----------------------------------------------------------------------------

    def take(self, peer: Peer, message: messages.Message, fds: list[int]) -> None:
        """One of KINDS, with its descriptors. Raises ProtocolError, and OutOfMemory when the broker can keep no more of
        them."""
        if isinstance(message, AddArena):
            self._add_arena(peer, message, fds)
        elif isinstance(message, AddGpu):
            self._add_gpu(peer, message, fds)
        elif isinstance(message, AddGpuArena):
            self._add_gpu_arena(peer, message, fds)
        elif isinstance(message, AddLane):
            self._add_lane(peer, message.lane, message.gpu, fds)
        elif isinstance(message, AddCounters):
            self._add_counters(peer, fds)
        elif isinstance(message, RetireArena):
            unwanted.close_all(fds)
            self._page_poller.at_points()  # what has just ended uses it no more
            self._handle(ev.ArenaGivenUp(peer.identity, message.arena))

    def _add_arena(self, peer: Peer, message: AddArena, fds: list[int]) -> None:
        try:
            if len(fds) != 1:
                raise ProtocolError(f"add_arena carries one descriptor, got {len(fds)}")
            memory.check_arena(fds[0], message.nbytes)
            self._check_number(peer, message.arena)
        except BaseException:  # also for lack of memory for one more map
            unwanted.close_all(fds)
            raise
        self._keep_arena(peer, message.arena, _Arena(fds[0]), message.nbytes)

    def _add_gpu_arena(self, peer: Peer, message: AddGpuArena, fds: list[int]) -> None:
        try:
            handle = ArenaHandle.from_wire(message.handle)
            check_handle_fds(handle, fds)
            if handle.arena != message.arena:
                raise ProtocolError(f"arena {message.arena} comes with the handle of arena {handle.arena}")
            self._check_number(peer, message.arena)
        except BaseException:  # also for lack of memory for one more map
            unwanted.close_all(fds)
            raise
        arena = _Arena(fds[0] if fds else None, handle)
        self._keep_arena(peer, message.arena, arena, handle.nbytes, handle.gpu)

    def _check_number(self, peer: Peer, arena: int) -> None:
        """Raises ProtocolError, OutOfMemory."""
        if not peer.last_arena < arena < wire.NO_ARENA:
            raise ProtocolError(f"arena {arena} is out of range; numbers grow, the last was {peer.last_arena}")
        peer.last_arena = arena
        _demand_room()
        most = fd_reserve.per_client()
        if self._kept[peer.number] >= most:
            raise OutOfMemory(f"the broker keeps {most} arenas for one client, as many as its file descriptors allow")

    def _keep_arena(self, peer: Peer, number: int, arena: _Arena, nbytes: int, gpu: str = "") -> None:
        self._arenas[peer.number, number] = arena
        self._kept[peer.number] += 1
        self._handle(ev.ArenaOffered(peer.identity, number, nbytes, gpu))
        if peer.is_closed:  # it was dropped for this one
            self._close_arena(peer.number, number)
            return
        control.send(peer.sock, messages.ArenaAdded(arena=number))

    def _add_gpu(self, peer: Peer, message: AddGpu, fds: list[int]) -> None:
        try:
            gpu = Gpu.of(message, fds)
        except BaseException:  # also for lack of memory for one more map
            unwanted.close_all(fds)
            raise
        refusal: LayerZeroError | None = self._state.engine.missing(message.gpu)
        if refusal is None and self._state.graph_slots.holds(peer.identity, message.gpu):
            text = "calls in captured graphs hold the GPU's memory as it is offered; drop those graphs first"
            refusal = NoTransport(text, transport=gpu.transport, reason=text)
        if refusal is not None:  # nothing is wrong with the client: it goes on without this
            gpu.close()
            control.send(peer.sock, messages.Refused(error=refusal.to_wire()))
            return
        before = self._pages.get(peer.number, message.gpu)
        self._page_poller.at_points()
        self._handle(ev.GpuOffered(peer.identity, message.gpu, before is None or not gpu.has_page_of(before)))
        if peer.is_closed:  # it was dropped for this one
            gpu.close()
            return
        self._pages.put(peer.number, gpu)
        control.send(peer.sock, messages.GpuAdded(gpu=message.gpu))

    def _add_lane(self, peer: Peer, number: int, gpu: str, fds: list[int]) -> None:
        try:
            _demand_room()
            self._lanes.add(number, fds, is_ring=bool(gpu))
        except BaseException as exc:
            unwanted.close_all(fds)
            if not isinstance(exc, (OSError, OutOfMemory)):
                raise
            log("lane.refused", client=peer.number, error=str(exc))  # no maps or descriptors left: not its fault
            control.send(peer.sock, messages.LaneAdded(lane=number, is_open=False))
            return
        self._handle(ev.LaneOpened(peer.identity, number, gpu))
        try:
            if not peer.is_closed:
                added = messages.LaneAdded(lane=number, is_open=number in self._lanes)
                control.send(peer.sock, added, self._lanes.client_fds(number))
        finally:
            self._lanes.let_go(number)

    def on_client_left(self, client: int) -> None:
        """What it has counted is read for the last time."""
        self.counters.end(client)

    def _add_counters(self, peer: Peer, fds: list[int]) -> None:
        try:
            self.counters.add(peer.number, fds)
        except OSError as exc:  # no maps left: not its fault
            unwanted.close_all(fds)
            raise OutOfMemory(f"the broker cannot map a page of counters: {exc.strerror}") from exc
        except BaseException:
            unwanted.close_all(fds)
            raise
        control.send(peer.sock, CountersAdded())

    # --- what workers are lent -------------------------------------------------------------------------

    def performs(self) -> dict[type, Callable[[Any], None]]:
        """The actions on what was offered: memory, lanes and timeline pages."""
        lanes, pages = self._lanes, self._pages
        return {
            act.CloseGpu: lambda action: pages.close(action.client, action.gpu),
            act.FailTurn: lambda action: pages.fail(action.client, action.gpu, action.point, action.code),
            act.ReleaseTurn: lambda action: pages.release(action.client, action.gpu, action.point),
            act.RevokeLane: lambda action: lanes.revoke(action.lane, action.epoch),
            act.EndLane: lambda action: lanes.end(action.lane),
            act.GrantArena: self.grant_arena,
            act.TakeBackArena: self.take_back_arena,
            act.TellClientLeft: self.tell_client_left,
            act.CloseArena: self.close_arena,
            act.GrantGpu: self.grant_gpu,
            act.TakeBackGpu: self.take_back_gpu,
            act.GrantLane: self.grant_lane,
            act.TakeBackLane: self.take_back_lane,
        }

    def grant_arena(self, action: act.GrantArena) -> None:
        arena = self._arenas[action.client, action.arena]
        fds: tuple[int, ...] = () if arena.fd is None else (arena.fd,)
        if arena.handle is not None:
            handle = arena.handle.to_wire()
            message: messages.Message = messages.MapGpuArena(client=action.client, arena=action.arena, handle=handle)
        else:
            message = messages.MapArena(client=action.client, arena=action.arena, nbytes=os.fstat(fds[0]).st_size)
        self._links.tell(action.backend, action.generation, message, fds)

    def take_back_arena(self, action: act.TakeBackArena) -> None:
        message = messages.UnmapArena(client=action.client, arena=action.arena)
        self._links.tell(action.backend, action.generation, message)

    def tell_client_left(self, action: act.TellClientLeft) -> None:
        self._links.tell(action.backend, action.generation, messages.ClientLeft(client=action.client))

    def close_arena(self, action: act.CloseArena) -> None:
        self._close_arena(action.client, action.arena)

    def _close_arena(self, client: int, arena: int) -> None:
        self._arenas.pop((client, arena)).close()
        self._kept[client] -= 1
        if not self._kept[client]:
            del self._kept[client]

    def grant_gpu(self, action: act.GrantGpu) -> None:
        message, fds = self._pages.lend(action.client, action.gpu, action.slot)
        self._links.tell(action.backend, action.generation, message, fds)

    def take_back_gpu(self, action: act.TakeBackGpu) -> None:
        message = messages.UnmapGpu(client=action.client, gpu=action.gpu)
        self._links.tell(action.backend, action.generation, message)

    def grant_lane(self, action: act.GrantLane) -> None:
        message = messages.MapLane(client=action.client, lane=action.lane, gpu=action.gpu)
        self._links.tell(action.backend, action.generation, message, self._lanes.fds(action.lane))

    def take_back_lane(self, action: act.TakeBackLane) -> None:
        self._links.tell(action.backend, action.generation, messages.UnmapLane(lane=action.lane))
        self._lanes.drop(action.lane)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.counters.close()


def _demand_room() -> None:
    """Raises OutOfMemory."""
    if shortage := fd_reserve.shortage(fd_reserve.for_workers()):
        raise OutOfMemory(shortage)
