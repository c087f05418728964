"""Leases: which clients may send a route's calls straight to a worker, on which lane, and what became of ended lanes.

Decides nothing about kernels: settling.py grants a lease for what would be decided again, and takes all back when that
may have changed. Methods return what must be done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.blame import has_begun
from layerzero.broker.core.model import Call, Client, Route, Worker
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.shm.ring_words import SLOTS
from layerzero.ipc.shm.timeline_words import MASK
from layerzero.ipc.transport.messages import Lease, Neighbours, encode
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.ipc.vocabulary.worker_codes import mark

SETTLED_CALLS = 3  # a route that one worker answered so often in a row gets a lease
MAX_LOST = 64  # ended lanes remembered per client; one of the CPU until it says which call was on it
MAX_LEFT = 2 * SLOTS  # calls of a ring that were left to the broker: when so many are known, older ones are forgotten


@dataclass(eq=False)
class Lane:
    """Between a client and one start of a worker, for the CPU or for a GPU, where it is a ring. `routes` and `plans`
    hold the leases in force, `kernels` also what earlier ones named: a call may be on its way under those. All are by
    route number. `told`: the plans that the worker was told of, each with the last dispatch before, and `neighbours` of
    each. `left`: calls of a ring that came to the broker; `begun`: others of it that the GPU or the CPU may be in,
    whether the worker has taken each, and since when that is so."""

    number: int
    client: Client
    worker: Worker
    generation: int
    gpu: str = ""  # UUID
    epoch: int = 0
    is_open: bool = False  # the client has made its page
    routes: dict[int, Route] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)  # routes of equal signatures share one
    kernels: dict[int, str] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    neighbours: dict[int, Neighbourhood | None] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    begun: dict[int, tuple[bool, float]] = field(default_factory=dict)

    def leave(self, call: int) -> None:
        """The worker has left this call of the ring to the broker."""
        self.left.add(call)
        if len(self.left) > MAX_LEFT:
            newest = max(self.left)
            self.left = {one for one in self.left if one > newest - SLOTS}

    def route_of(self, plan: int) -> Route | None:
        """One of the leased routes that `plan` serves."""
        return next((self.routes[number] for number, one in self.plans.items() if one == plan), None)


@dataclass(frozen=True)
class Lost:
    """What ended a lane, for the call that may have been on it, or for those on the ring."""

    backend: str
    worker_pid: int
    error: LayerZeroError
    exit_code: int
    phase: str
    blamed: int  # the call that the worker died in or was killed for, as worker_codes.mark says; 0 for none of a lane
    is_crash: bool  # the worker died by itself
    kernels: dict[int, str]
    is_ring: bool = False
    scanned: int = 0  # the last call that the broker has read off the ring
    begun: int = 0  # the call that the worker was in, as `blamed`

    def has_taken(self, call: int) -> bool:
        """Whether the broker has read this call off the ring. `call`: the low half of its number."""
        return self.is_ring and self.scanned - call & MASK < 1 << 31

    def blames(self, number: int, call: int) -> bool:
        """Whether it was this call of that lane. An earlier one may have ended just before the worker did."""
        return self.blamed == mark(number, call)


class Leases:
    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self.lanes)

    def tell(
        self, call: Call, worker: Worker, plan: int, neighbours: Neighbourhood | None = None
    ) -> Iterator[act.Action]:
        """Let the worker know, once, that calls of this plan, and of its neighbours, may come by a lane. It has just
        answered `call`."""
        lane = self._lane(call, worker)
        if lane is None:
            number = next(self._numbers)
            lane = self.lanes[number] = Lane(number, call.client, worker, worker.generation, call.gpu)
        if plan not in lane.told or lane.neighbours[plan] != neighbours:
            lane.told = {one: since for one, since in lane.told.items() if one in worker.plans}
            lane.neighbours = {one: its for one, its in lane.neighbours.items() if one in lane.told}
            lane.neighbours[plan] = neighbours
            lane.told[plan] = worker.running[-1].dispatch if worker.running else call.dispatch
            body = b"" if neighbours is None else encode(Neighbours(neighbours=neighbours.to_wire()))
            yield act.SendAllow(worker.identity, plan, lane.number, body)

    def grant(
        self, call: Call, worker: Worker, plan: int, route: Route, neighbours: Neighbourhood | None = None
    ) -> Iterator[act.Action]:
        """A lease of `route`, which `plan` serves. The worker has just answered `call`, of the same client and kernel.
        Nothing, when it may have done so before it was told of the plan."""
        client, lane = call.client, self._lane(call, worker)
        if lane is None or call.dispatch <= lane.told[plan]:
            return
        lane.routes[route.number], lane.plans[route.number] = route, plan
        lane.kernels[route.number] = call.kernel_id
        route.is_leased = True
        told = [] if neighbours is None else neighbours.to_wire()
        lease = Lease(lane=lane.number, plan=plan, epoch=lane.epoch, neighbours=told)
        yield act.SendLease(client.identity, route.number, route.decision, encode(lease))

    def _lane(self, call: Call, worker: Worker) -> Lane | None:
        return next((one for one in self.of(call.client) if one.worker is worker and one.gpu == call.gpu), None)

    def open(self, client: Client, number: int, gpu: str = "") -> Iterator[act.Action]:
        """The client has made the lane's page, or its ring. Raises ProtocolError when it was never told to."""
        lane = self.lanes.get(number)
        if lane is None:  # its worker is gone
            yield act.EndLane(number)
        elif lane.client is not client or lane.is_open:
            raise ProtocolError(f"lane {number} is not the client's, or is open already")
        elif lane.gpu != gpu:
            raise ProtocolError(f"lane {number} is of {lane.gpu or 'the CPU'}; it was added for {gpu or 'the CPU'}")
        else:
            lane.is_open = True
            if lane.epoch:
                yield act.RevokeLane(number, lane.epoch)
            yield act.GrantLane(lane.worker.backend, lane.generation, client.number, number, gpu)

    def revoke(self, lanes: Iterable[Lane] | None = None) -> Iterator[act.Action]:
        """Take the leases of these lanes back; without any, those of all. The lanes stay open for later ones."""
        for lane in list(self.lanes.values() if lanes is None else lanes):
            if lane.routes:
                for route in lane.routes.values():
                    route.is_leased = False
                lane.routes.clear()
                lane.plans.clear()
                lane.epoch += 1
                yield act.RevokeLane(lane.number, lane.epoch)

    def drop_route(self, client: Client, route: Route) -> None:
        """Nobody will call on it any more."""
        for lane in self.of(client):
            for known in (lane.routes, lane.plans, lane.kernels):
                known.pop(route.number, None)

    def end_client(self, client: Client) -> Iterator[act.Action]:
        """It has left. A ring goes on until what is on it has ended."""
        for lane in self.of(client):
            if not lane.gpu or not lane.is_open:
                yield from self.end_ring(lane)

    def end_ring(self, lane: Lane) -> Iterator[act.Action]:
        """Its client has left, and nothing is on it."""
        del self.lanes[lane.number]
        yield act.TakeBackLane(lane.worker.backend, lane.generation, lane.number)

    def end_worker(
        self, worker: Worker, error: LayerZeroError, event: ev.WorkerExited, blamed: int, *, is_crash: bool
    ) -> Iterator[act.Action]:
        """`blamed` is what Lost has. Clients come back with what was on their lanes."""
        for lane in self.lanes_to(worker):
            del self.lanes[lane.number]
            for route in lane.routes.values():
                route.is_leased = False
            ring = event.rings.get(lane.number)
            lost = lane.client.lost
            lost[lane.number] = Lost(
                worker.backend,
                worker.pid,
                error,
                event.exit_code,
                event.phase,
                blamed,
                is_crash,
                lane.kernels,
                bool(lane.gpu),
                ring.head if ring is not None else 0,
                event.executing if has_begun(event.executing, event.executing, event.phase, event.exit_code) else 0,
            )
            while len(lost) > MAX_LOST:
                del lost[next(iter(lost))]
            yield act.EndLane(lane.number)

    def of(self, client: Client) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.client is client]

    def lanes_to(self, worker: Worker) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.worker is worker]

    def rings(self, worker: Worker | None = None) -> list[Lane]:
        """Those that their clients have made, to one worker or to all."""
        return [one for one in self.lanes.values() if one.gpu and one.is_open and worker in (None, one.worker)]
