"""Clients as they come, offer memory, define routes and leave. One that breaks the protocol is dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.compile_waits import CompileWaits
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.gpu_in_flight import GpuInFlight
from layerzero.broker.core.grants import Grants
from layerzero.broker.core.graph_calls import GraphCalls
from layerzero.broker.core.lease_policy import LeasePolicy
from layerzero.broker.core.leases import Leases
from layerzero.broker.core.model import Arena, Client, Route
from layerzero.broker.core.prepared import PreparedCalls
from layerzero.broker.core.release import Release
from layerzero.broker.core.rollout_steps import RolloutSteps
from layerzero.broker.core.stream_order import StreamOrder
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Route as RouteMessage
from layerzero.ipc.transport.messages import decode

MAX_ARENAS = 4096  # of one client; ours keeps far fewer
MAX_ROUTES = 8192  # likewise
MAX_ROUTE_BYTES = 8 << 20  # of all its routes' descriptions; ours have some 300 each


@dataclass(eq=False, kw_only=True)
class ClientLifecycle:
    """`clients` are by identity; this alone adds and removes."""

    clients: dict[bytes, Client]
    engine: Engine
    lifecycle: WorkerLifecycle
    signatures: PreparedCalls
    grants: Grants
    leases: Leases
    lease_policy: LeasePolicy
    points: StreamOrder
    enqueued: GpuInFlight
    graph_slots: GraphCalls
    rollouts: RolloutSteps
    compiling: CompileWaits
    closing: Release
    effects: Effects

    def on_client_joined(self, event: ev.ClientJoined) -> None:
        self.clients[event.identity] = Client(
            event.identity, event.number, process=event.process, program=event.program
        )

    def on_client_left(self, event: ev.ClientLeft) -> None:
        client = self.clients.pop(event.identity, None)
        if client is None:
            return
        client.has_left = True
        self.effects.emit(*self.leases.end_client(client))
        self.closing.tell(self.points.drop_held(client))  # nobody waits for what failed
        for worker in self.lifecycle.workers.values():
            for call in [call for call in worker.waiting if call.client is client]:
                self.closing.close(call)
        for call in self.compiling.take(client):
            self.closing.close(call)
        self.graph_slots.end_client(client)
        self.enqueued.release(client)
        self.closing.finish_leaving(client)

    def drop(self, client: Client, detail: str) -> None:
        self.effects.emit(act.DropClient(client.identity, detail))
        self.on_client_left(ev.ClientLeft(client.identity))

    # --- memory --------------------------------------------------------------------------------------

    def on_arena_offered(self, event: ev.ArenaOffered) -> None:
        client = self.clients[event.identity]
        if event.arena in client.arenas:
            self.drop(client, f"arena {event.arena} offered twice")
            return
        if len(client.arenas) >= MAX_ARENAS:
            self.drop(client, f"more than {MAX_ARENAS} arenas")
            return
        if event.gpu and event.gpu not in client.gpus:
            self.drop(client, f"arena {event.arena} is on {event.gpu}, which the client has not added")
            return
        client.arenas[event.arena] = Arena(event.nbytes, event.gpu)

    def on_arena_given_up(self, event: ev.ArenaGivenUp) -> None:
        client = self.clients.get(event.identity)
        if client is None or event.arena not in client.arenas:
            return
        users = self.closing.users(client, event.arena)
        # The graph slot of a graph that is gone may be unbound a moment later; what a GPU is done with, answered.
        if any(call.graph_slot is None and call.point is None for call in users):
            self.drop(client, f"arena {event.arena} was retired with open calls that use it")
        elif users:
            client.retiring.add(event.arena)
        else:
            self.grants.close_arena(client, event.arena)

    def on_gpu_offered(self, event: ev.GpuOffered) -> None:
        """For the first time, or by another transport: then workers let go of what they had, and may reach it."""
        client = self.clients.get(event.identity)
        if client is None:  # it was cut off a moment ago, since it does not read
            return
        if event.gpu in client.gpus and event.has_new_page:
            if self.points.of(client, event.gpu):
                self.drop(client, f"another timeline page for {event.gpu} while calls on the first are not done")
                return
            self.points.forget(client, event.gpu)
        client.gpus.add(event.gpu)
        lanes = [lane for lane in self.leases.of(client) if lane.gpu == event.gpu]
        self.effects.emit(*self.leases.revoke(lanes))
        self.grants.take_back_gpu(client, event.gpu)

    def on_lane_opened(self, event: ev.LaneOpened) -> None:
        client = self.clients[event.identity]
        try:
            self.effects.emit(*self.leases.open(client, event.lane, event.gpu))
        except ProtocolError as exc:
            self.effects.emit(act.EndLane(event.lane))  # what came with the message is not the lane's page
            self.drop(client, str(exc))

    # --- routes --------------------------------------------------------------------------------------

    def on_route_defined(self, event: ev.RouteDefined) -> None:
        client = self.clients[event.identity]
        if event.route in client.routes or event.route in client.refused_routes:
            self.drop(client, f"route {event.route} defined twice")
            return
        if len(client.routes) + len(client.refused_routes) >= MAX_ROUTES:
            self.drop(client, f"more than {MAX_ROUTES} routes; forget some")
            return
        nbytes = len(event.body)
        if nbytes > wire.MAX_ROUTE_BYTES:
            self.drop(client, f"route {event.route} has {nbytes} bytes; allowed: {wire.MAX_ROUTE_BYTES}")
            return
        if client.route_bytes + nbytes > MAX_ROUTE_BYTES:
            self.drop(client, f"more than {MAX_ROUTE_BYTES} bytes of routes; forget some")
            return
        signature = None if self.engine.rollouts else self.signatures.known.get((event.body, ()))
        if signature is None:
            try:
                spec = CallSpec.parse(event.body)
                missing = self.engine.missing(spec.device)
                if missing is not None:  # its calls shall hear of it, the client's others go on
                    client.refused_routes[event.route] = missing
                    return
                rolled = self.rollouts.rolled(spec, client)
                signature = self.signatures.known.get((event.body, rolled))
                signature = signature or self.signatures.add(event.body, replace(spec, rolled=rolled))
            except LayerZeroError as exc:
                if isinstance(exc, InvalidArgument) and not decode(event.body, RouteMessage).device:
                    client.refused_routes[event.route] = exc  # its calls shall hear of it, too
                else:  # on a GPU streams may wait for its calls, and no client of ours makes such
                    self.drop(client, f"route {event.route}: {exc}")
                return
        signature.users += 1
        client.route_bytes += nbytes
        client.routes[event.route] = Route(event.route, signature, near=event.near)

    def on_route_forgotten(self, event: ev.RouteForgotten) -> None:
        client = self.clients[event.identity]
        client.refused_routes.pop(event.route, None)
        route = client.routes.get(event.route)
        if route is not None:
            self.closing.drop_route(client, route)

    def on_ran_in_client(self, event: ev.RanInClient) -> None:
        """A kernel ran in the client's own process, or failed there. What it tells of a run that it had no leave for,
        or no time, is no time: all clients are served by the fastest."""
        client = self.clients[event.identity]
        route = client.routes.get(event.route)
        if route is None:
            self.drop(client, f"a run on unknown route {event.route}")
            return
        signature = route.signature
        backend = dict(signature.kernels).get(event.kernel_id)
        if backend is None:
            self.drop(client, f"a run of {event.kernel_id!r:.80}, which does not serve route {event.route}")
            return
        grant = route.grant
        if grant is None:
            return
        if event.stays_out:
            client.stays_out.add(backend)
        if event.error is not None:
            facts = {"backend": backend, "kernel_id": event.kernel_id, "cause": event.error.message}
            self.effects.emit(act.Note("client.kernel_failed", {**facts, "client": client.number}))
            return  # its libraries are the client's own; other clients and the workers are not concerned
        if grant.kernel_id == event.kernel_id and grant.covers(event.kernel_ns, self.effects.now_s):
            grant.told_ns += event.kernel_ns
            self.lease_policy.note_time(event.kernel_id, signature.cell, event.kernel_ns, is_clean=True)
