"""Leases: which clients may send a route's calls straight to a worker, on which lane, and what became of ended lanes.

Decides nothing about kernels: state.py grants a lease for what it would decide again, and takes all back when that may
have changed. Methods return what must be done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from layerzero.broker import events as ev
from layerzero.broker.records import Client, Route, Worker
from layerzero.ipc.errors import LayerZeroError, ProtocolError
from layerzero.ipc.messages import Lease, encode

SETTLED_CALLS = 3  # a route that one worker answered so often in a row gets a lease
MAX_LOST = 64  # ended lanes remembered per client, until it says which call was on them


@dataclass(eq=False)
class Lane:
    """Between a client and one start of a worker. `routes` holds the leases in force, `kernels` also what earlier ones
    named: a call may be on its way under those."""

    number: int
    client: Client
    worker: Worker
    generation: int
    epoch: int = 0
    is_open: bool = False  # the client has made its page
    routes: dict[int, Route] = field(default_factory=dict)  # by plan
    kernels: dict[int, str] = field(default_factory=dict)  # by route number


@dataclass(frozen=True)
class Lost:
    """What ended a lane, for the call that may have been on it."""

    backend: str
    worker_pid: int
    error: LayerZeroError
    exit_code: int
    phase: str
    is_blamed: bool  # its call was being executed
    is_crash: bool  # the worker died by itself
    kernels: dict[int, str]


class Leases:
    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self.lanes)

    def grant(self, client: Client, route: Route, worker: Worker, plan: int, kernel_id: str) -> Iterator[ev.Action]:
        lane = next((one for one in self._of(client) if one.worker is worker), None)
        if lane is None:
            number = next(self._numbers)
            lane = self.lanes[number] = Lane(number, client, worker, worker.generation)
        lane.routes[plan] = route
        lane.kernels[route.number] = kernel_id
        route.is_leased = True
        yield ev.SendAllow(worker.identity, plan, lane.number)
        lease = Lease(lane=lane.number, plan=plan, epoch=lane.epoch)
        yield ev.SendLease(client.identity, route.number, route.decision, encode(lease))

    def open(self, client: Client, number: int) -> Iterator[ev.Action]:
        """The client has made the lane's page. Raises ProtocolError when it was never told to."""
        lane = self.lanes.get(number)
        if lane is None:  # its worker is gone
            yield ev.EndLane(number)
        elif lane.client is not client or lane.is_open:
            raise ProtocolError(f"lane {number} is not the client's, or is open already")
        else:
            lane.is_open = True
            if lane.epoch:
                yield ev.RevokeLane(number, lane.epoch)
            yield ev.LendLane(lane.worker.backend, lane.generation, client.number, number)

    def revoke(self, lanes: Iterable[Lane] | None = None) -> Iterator[ev.Action]:
        """Take the leases of these lanes back; without any, those of all. The lanes stay open for later ones."""
        for lane in list(self.lanes.values() if lanes is None else lanes):
            if lane.routes:
                for route in lane.routes.values():
                    route.is_leased = False
                lane.routes.clear()
                lane.epoch += 1
                yield ev.RevokeLane(lane.number, lane.epoch)

    def drop_route(self, client: Client, route: Route) -> None:
        """Nobody will call on it any more."""
        for lane in self._of(client):
            lane.kernels.pop(route.number, None)
            for plan in [plan for plan, leased in lane.routes.items() if leased is route]:
                del lane.routes[plan]

    def end_client(self, client: Client) -> Iterator[ev.Action]:
        for lane in list(self._of(client)):
            del self.lanes[lane.number]
            yield ev.TakeBackLane(lane.worker.backend, lane.generation, lane.number)

    def end_worker(
        self, worker: Worker, error: LayerZeroError, event: ev.WorkerExited, executing: int, *, is_crash: bool
    ) -> Iterator[ev.Action]:
        """`executing`: the lane whose call the worker was in, 0 for none. Clients come back with what was on theirs."""
        for lane in [one for one in self.lanes.values() if one.worker is worker]:
            del self.lanes[lane.number]
            for route in lane.routes.values():
                route.is_leased = False
            lost = lane.client.lost
            lost[lane.number] = Lost(
                worker.backend,
                worker.pid,
                error,
                event.exit_code,
                event.phase,
                executing == lane.number,
                is_crash,
                lane.kernels,
            )
            while len(lost) > MAX_LOST:
                del lost[next(iter(lost))]
            yield ev.EndLane(lane.number)

    def _of(self, client: Client) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.client is client]
