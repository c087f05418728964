"""Clients: what they do, and what they may not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.backends import ARENA_BYTES, SERVES, SLOT, SLOTS, Signature, route_body
from tests.simulation.model import STREAMS, Call, Channel, Dispatch, GraphSlot, Lane, Stream

from layerzero.broker.core import events as ev
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.shm.ring_words import RingCall
from layerzero.ipc.shm.timeline_words import RUNG, TimelinePoint
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.messages import Decision, Lease, Route, decode
from layerzero.ipc.vocabulary.worker_codes import mark

if TYPE_CHECKING:
    from tests.simulation.world import World

OVERDUE_AGAIN_S = 2.0  # a client reports an overdue call of a lane again after so long
BUSY_S = 12.0  # clients act until then; faults end then
DEADLY = 3  # number of the input that kills the workers it deserves


@dataclass(eq=False)
class Client:
    """A client process, and what the broker knows of its calls in `open`."""

    world: World
    number: int
    identity: bytes
    frames: Channel
    control: Channel
    inbound: Channel
    offered: int = 0  # arenas so far
    arenas: list[int] = field(default_factory=list)  # lent and not retired
    free: list[tuple[int, int]] = field(default_factory=list)
    routes: dict[int, Signature] = field(default_factory=dict)
    needs_digest: set[int] = field(default_factory=set)
    decisions: dict[int, Decision] = field(default_factory=dict)
    is_asleep: bool = False  # it does not watch the clock of its calls on lanes
    leases: dict[int, Lease] = field(default_factory=dict)
    offered_lanes: set[int] = field(default_factory=set)
    open: dict[int, Call] = field(default_factory=dict)
    seq: int = 0
    next_route: int = 1
    has_hung_up: bool = False  # by its own will
    has_left: bool = False  # the broker knows
    left_during: int = -1
    left_open: dict[int, Call] = field(default_factory=dict)  # what was open then
    has_offended: bool = False
    has_gpu: bool = False
    streams: list[Stream] = field(default_factory=lambda: [Stream() for _ in range(STREAMS)])
    pending: dict[TimelinePoint, Call] = field(default_factory=dict)  # on a GPU: the broker has them
    graph_slots: list[GraphSlot] = field(default_factory=lambda: [GraphSlot() for _ in range(3)])
    bound: dict[int, Call] = field(default_factory=dict)  # by graph slot, as the client knows

    def act(self) -> None:
        """Do one thing that a client may do, or rarely one that it may not."""
        if self.has_hung_up:
            return
        rng = self.world.rng
        if self.world.device and (not self.has_gpu or rng.random() < 0.02):
            self.control.send(self.world.gpu_offered, self, not self.has_gpu)
            self.has_gpu = True
        what = rng.random()
        if self.world.device and self.routes and self.free and rng.random() < self.world.graphs:
            self._bind_one()
            return
        if not self.routes or what < 0.08:
            self._define()
        elif not self.free or what < 0.12:
            self.offered += 1
            self.control.send(self.world.arena_offered, self, self.offered)
        elif what < 0.15:
            self._retire()
        elif what < 0.18:
            route = rng.choice(list(self.routes))
            on_rings = [call for stream in self.streams for call in stream.calls.values() if call.on_ring is not None]
            on_lanes = [lane.dispatch.call for lane in self.lanes() if lane.dispatch is not None]
            if not any(call.route == route for call in (*on_rings, *on_lanes)):
                del self.routes[route]
                self.leases.pop(route, None)
                self.frames.send(self.world.from_client, self, ev.RouteForgotten(self.identity, route))
        elif what < 0.19:
            self._offend()
        elif what < 0.20:
            route = rng.choice(list(self.routes))
            op = decode(self.routes[route].body, Route).op
            kernel_id = f"{rng.choice(sorted(SERVES[op]))}.{op}"
            error = BackendError("it failed here") if rng.random() < 0.3 else None
            for _ in range(rng.choice((1, 16))):
                ran = ev.RanInClient(self.identity, route, kernel_id, 1000, error)
                self.frames.send(self.world.from_client, self, ran)
        elif what < 0.225:
            self.world.learn()
        elif what < 0.229:
            self.hang_up()
        else:
            for _ in range(rng.choice((1, 1, 2, 5))):
                self._execute()

    def _define(self) -> None:
        signature = self.world.rng.choice(self.world.signatures)
        number, self.next_route = self.next_route, self.next_route + 1
        self.routes[number] = signature
        self.frames.send(self.world.from_client, self, ev.RouteDefined(self.identity, number, signature.body))

    def _bind_one(self) -> None:
        """Capture a call in a graph that is replayed and then dropped."""
        rng, world = self.world.rng, self.world
        free = [number for number in range(len(self.graph_slots)) if number not in self.bound]
        if not free:
            return
        route = rng.choice(list(self.routes))
        arena, index = self.free.pop(rng.randrange(len(self.free)))
        place = index * 2 * SLOT
        body = wire.pack_refs([wire.Ref(arena, 0, place, SLOT), wire.Ref(arena, 0, place + SLOT, SLOT)])
        call = Call(self, route, self.routes[route], (arena, index), body, 0, world.limits.timeout_s)
        self.seq += 1
        call.seq, call.graph_slot = self.seq, rng.choice(free)
        call.digest = bytes([call.number]) * wire.DIGEST_BYTES if route in self.needs_digest else b""
        self.graph_slots[call.graph_slot] = GraphSlot(binding=call.seq)
        self.bound[call.graph_slot] = call
        event = ev.CallArrived(self.identity, route, call.seq, 0.0, body, call.digest, graph_slot=call.graph_slot)
        self.frames.send(world.from_client, self, event, call)
        for _ in range(rng.randrange(6)):
            world.push(world.now_s + rng.uniform(0.0, 4.0), self._replay, call)
        if rng.random() < 0.8:
            world.push(world.now_s + rng.uniform(0.0, 6.0), self._unbind, call)

    def _is_bound(self, call: Call) -> bool:
        return call.graph_slot is not None and self.bound.get(call.graph_slot) is call and not self.has_hung_up

    def _replay(self, call: Call) -> None:
        if (
            self._is_bound(call)
            and call.has_word
            and call.graph_slot is not None
            and not self.graph_slots[call.graph_slot].is_busy
        ):
            graph_slot = self.graph_slots[call.graph_slot]
            graph_slot.word, graph_slot.is_done, graph_slot.since_s = RUNG, False, self.world.now_s
            for process in self.world.processes.values():
                key = (self.number, call.graph_slot)
                self.world.push(self.world.now_s + self.world.delay_s(), process.serve, key)
            self.world.plan_look()

    def _unbind(self, call: Call) -> None:
        if not self._is_bound(call) or call.graph_slot is None:
            return
        if self.graph_slots[call.graph_slot].is_busy:
            self.world.push(self.world.now_s + 0.5, self._unbind, call)
            return
        self.world.coverage.fates["graph_slot_unbound"] += 1
        del self.bound[call.graph_slot]
        call.is_unbound = True
        self.frames.send(self.world.from_client, self, ev.CallUnbound(self.identity, call.seq))
        if call.has_word:
            self.free.append(call.slot)
        else:  # interrupted: once the broker has answered what came behind it
            self.frames.send(self.inbound.send, self.free.append, call.slot)

    def _graph_slot_failed(self, call: Call) -> None:
        """It ends the waits of its graph itself."""
        if self._is_bound(call) and call.graph_slot is not None:
            self.world.coverage.fates["graph_slot_failed"] += 1
            del self.bound[call.graph_slot]
            self.graph_slots[call.graph_slot] = GraphSlot()
            self.free.append(call.slot)

    def lanes(self) -> list[Lane]:
        return [lane for lane in self.world.lanes.values() if lane.client is self]

    def _execute(self, route: int = 0) -> None:
        if not self.free:
            return
        rng = self.world.rng
        route = route or rng.choice(list(self.routes))
        arena, index = self.free.pop(rng.randrange(len(self.free)))
        place = index * 2 * SLOT
        source = rng.choice(self.arenas)  # an input may lie elsewhere
        body = wire.pack_refs([wire.Ref(source, 0, place, SLOT), wire.Ref(arena, 0, place + SLOT, SLOT)])
        timeout_s = rng.choice((0.0, 0.0, 0.5, 2.0))
        number = rng.choice((0, 1, 2, DEADLY))
        call = Call(self, route, self.routes[route], (arena, index), body, number, timeout_s)
        call.timeout_s = timeout_s or self.world.limits.timeout_s
        if not self._ride(call):
            self.submit(call, timeout_s)

    def _go_on(self, call: Call) -> None:
        """Many call the same op again and again."""
        is_done = self.has_hung_up or self.world.is_calm or call.route not in self.routes
        if not is_done and self.world.rng.random() < self.world.persistence:
            self._execute(call.route)

    def _ride(self, call: Call) -> bool:
        """Put the call on its express lane, if it has a lease and the lane is free."""
        lease, world = self.leases.get(call.route), self.world
        if lease is None or call.route in self.needs_digest:
            return False
        lane = world.lanes[lease.lane]
        if lane.number not in self.offered_lanes:
            if world.rng.random() < world.eagerness:
                self.offered_lanes.add(lane.number)
                self.control.send(world.lane_offered, self, lane)
            return False
        if lane.is_ended and lane.is_usable and world.device and world.rng.random() < 0.3:
            self._put(call, lane, lease)  # it does not see the word before that
            call.after = (lane.number, lane.calls)
            world.coverage.fates["ring_after_end"] += 1
            self.send(call, 0.0)
            return True
        if lane.is_ended or lane.is_broken or (lane.is_usable and lane.epoch != lease.epoch):
            del self.leases[call.route]
            return False
        if world.device:
            if lane.is_usable:
                world.coverage.fates["ring_called"] += 1
                self._put(call, lane, lease)
                call.on_ring = lane.ring[lane.calls]
                world.push(world.now_s, lane.process.pump)
                if world.rng.random() < 0.04:
                    self.hang_up()
            return lane.is_usable
        if not lane.is_usable or lane.dispatch is not None:
            return False
        world.coverage.fates["lane_called"] += 1
        arenas = frozenset((self.number, ref.arena) for ref in wire.unpack_refs(call.body, 2))
        lane.calls += 1
        lane.dispatch = Dispatch(mark(lane.number, lane.calls), 1, call, lease.plan, arenas, lane)
        lane.is_rung = True
        world.push(world.now_s, lane.process.pump)
        world.push(world.now_s + call.timeout_s, self._due_on_lane, lane, lane.calls)
        return True

    def _put(self, call: Call, lane: Lane, lease: Lease) -> None:
        call.timeout_s = self.world.limits.timeout_s
        self._take_point(call)
        assert call.point is not None
        arenas = frozenset((self.number, ref.arena) for ref in wire.unpack_refs(call.body, 2))
        lane.calls += 1
        lane.slots[lane.calls] = RingCall(lane.calls, call.route, lease.plan, call.seq, call.point, call.body)
        if not lane.is_ended:
            lane.ring[lane.calls] = Dispatch(mark(lane.number, lane.calls), 1, call, lease.plan, arenas, lane)

    def ring_ended(self, lane: Lane) -> None:
        """It cannot know which calls the broker has read off the ring."""
        if self.has_hung_up:
            return
        for number, dispatch in lane.ring.items():
            call = dispatch.call
            if not call.has_passed and self.world.rng.random() < 0.5:
                self.world.coverage.fates["ring_again"] += 1
                self.frames.send(self.world.from_client, self, self._event(call, 0.0, (lane.number, number)))

    def leased(self, route: int, lease: Lease) -> None:
        if route in self.routes:
            self.leases[route] = lease

    def lane_added(self, lane: Lane) -> None:
        lane.is_usable = lane.is_open

    def _due_on_lane(self, lane: Lane, number: int) -> None:
        dispatch = lane.dispatch
        if self.has_hung_up or dispatch is None or lane.calls != number or lane.done >= number or lane.is_ended:
            return
        if self.is_asleep and not self.world.is_calm:
            self.world.push(self.world.now_s + BUSY_S, self._due_on_lane, lane, number)
        elif lane.is_rung:
            lane.is_rung, dispatch.is_over = False, True
            self._come_back(lane, "withdrawn")
        else:
            self.frames.send(self.world.lane_overdue, self, lane, number)
            self.world.push(self.world.now_s + OVERDUE_AGAIN_S, self._due_on_lane, lane, number)

    def lane_woken(self, lane: Lane, number: int) -> None:
        """The answer bell rang."""
        dispatch = lane.dispatch
        if self.has_hung_up or dispatch is None or lane.calls != number:
            return
        if lane.done < number:
            if lane.is_ended:
                dispatch.call.after = (lane.number, number)
                self.leases.pop(dispatch.call.route, None)
                self._come_back(lane, "lost")
        elif lane.status == "ran":
            self.world.coverage.fates["lane_ran"] += 1
            lane.dispatch = None
            self.answered(dispatch.call)
        else:
            lane.is_broken |= lane.status == "broken"
            self._come_back(lane, lane.status)

    def _come_back(self, lane: Lane, why: str) -> None:
        """The call did not end well on its lane: the broker shall have it."""
        dispatch = lane.dispatch
        assert dispatch is not None
        self.world.require(dispatch.is_over, "a call comes back from a lane while its worker has it")
        self.world.coverage.fates[f"lane_{why}"] += 1
        lane.dispatch = None
        self.submit(dispatch.call, dispatch.call.timeout_s)

    def submit(self, call: Call, timeout_s: float) -> None:
        call.digest = bytes([call.number]) * wire.DIGEST_BYTES if call.route in self.needs_digest else b""
        self._take_point(call)
        self.send(call, timeout_s)

    def send(self, call: Call, timeout_s: float) -> None:
        self.frames.send(self.world.from_client, self, self._event(call, timeout_s, call.after), call)

    def _take_point(self, call: Call) -> None:
        self.seq += 1
        call.seq = self.seq
        if self.world.device:
            lane = self.world.rng.randrange(self.world.streams)
            stream = self.streams[lane]
            stream.issued += 1
            call.point = TimelinePoint(lane, stream.issued)
            stream.calls[stream.issued] = call
            self.world.push(self.world.now_s + self.world.delay_s(), self.advance, stream)

    def _event(self, call: Call, timeout_s: float, after: tuple[int, int]) -> ev.CallArrived:
        what = (self.identity, call.route, call.seq, timeout_s, call.body, call.digest)
        return ev.CallArrived(*what, after_lane=after[0], after_call=after[1], point=call.point)

    def advance(self, stream: Stream) -> None:
        """The stream goes on: past calls that are done, and to the next one."""
        if self.has_left or (self.has_hung_up and not self.has_offended):
            return
        while True:
            if stream.ready == stream.passed < stream.issued:
                stream.ready += 1
                stream.since_s = self.world.now_s
            if stream.passed == min(stream.done, stream.ready):
                break
            stream.passed += 1
            call = stream.calls.pop(stream.passed)
            call.has_passed = True
            is_lost = self.world.exits > 0 and not call.has_arrived  # the client hears BROKER_LOST
            is_there = call.has_failed or is_lost or self.world.contents.get(call.place) is call
            self.world.require(is_there, "the memory of a call that is done holds another one's result")
            if call.on_ring is not None and not call.has_failed:
                self._ran_on_ring(call)
            self._end(call)
        self.world.pump_gpus()

    def _retire(self) -> None:
        lent = [arena for arena in self.arenas if sum(slot[0] == arena for slot in self.free) == SLOTS]
        if len(lent) == len(self.arenas) and len(self.free) == SLOTS * len(self.arenas) and lent:
            arena = self.world.rng.choice(lent)  # nothing is open: no input lies in it either
            self.arenas.remove(arena)
            self.free = [slot for slot in self.free if slot[0] != arena]
            self.control.send(self.world.arena_retired, self, arena)

    def _offend(self) -> None:
        """Break the protocol in one of the ways that the core has to notice."""
        self.has_hung_up = self.has_offended = True
        identity, world = self.identity, self.world
        route = next(iter(self.routes))
        point = TimelinePoint(0, self.streams[0].issued + world.rng.choice((0, 1))) if world.device else None
        if world.device:  # some offences look like calls that wait for their stream
            world.push(world.now_s + 2.0, self.hang_up)
        match world.rng.randrange(7):
            case 0:
                self.frames.send(world.from_client, self, ev.CallArrived(identity, 999, 0, 0.0, b""))
            case 1:
                self.frames.send(world.from_client, self, ev.RouteDefined(identity, route, route_body()))
            case 2:
                self.frames.send(world.from_client, self, ev.RouteDefined(identity, 999, b"\xc1"))
            case 3:
                self.frames.send(
                    world.from_client, self, ev.CallArrived(identity, route, 0, 0.0, b"short", point=point)
                )
            case 4:
                far = wire.pack_refs([wire.Ref(self.arenas[0], 0, ARENA_BYTES, SLOT)] * 2)
                self.frames.send(world.from_client, self, ev.CallArrived(identity, route, 0, 0.0, far, point=point))
            case 5 if world.lanes:  # another's, perhaps
                self.control.send(world.lane_offered, self, world.rng.choice(list(world.lanes.values())))
            case _:  # perhaps while a call uses it
                self.control.send(world.arena_retired, self, self.arenas[0])

    def hang_up(self) -> None:
        self.has_hung_up = True
        self.control.send(self.world.client_gone, self)

    def answered(self, call: Call) -> None:
        if not self.world.device:
            self.world.require(
                self.world.contents.get(call.place) is call, "the memory of an answered call holds another one's result"
            )
        is_first, call.has_word = not call.has_word, True
        if call.graph_slot is not None:
            self.world.coverage.fates["graph_slot_bound" if is_first else "graph_slot_bound_again"] += 1
            return
        self._end(call)
        if is_first:
            self._go_on(call)

    def _ran_on_ring(self, call: Call) -> None:
        """Nobody tells its client."""
        is_first, call.has_word = not call.has_word, True
        self.world.coverage.fates["ring_ran"] += is_first
        if is_first:
            self.world.push(self.world.now_s, self._go_on, call)

    def _end(self, call: Call) -> None:
        """On a GPU its client must have been told of it, and its stream must have gone on."""
        if self.world.device and (call.has_ended or not (call.has_word and call.has_passed)):
            return
        self.world.require(not call.has_ended, "a call ends twice")
        call.has_ended = True
        self.free.append(call.slot)

    def refused(self, call: Call, error: LayerZeroError) -> None:
        has_gone_on, call.has_word = call.has_word, True
        if call.graph_slot is not None:
            self._graph_slot_failed(call)
            return
        match error.code:
            case "DIGEST_REQUIRED" if not call.digest and not self.has_hung_up and call.route in self.routes:
                self.world.require(not has_gone_on, "a call must show a digest after it was answered")
                call.has_ended = True  # its memory goes to the next one
                self.needs_digest.add(call.route)
                again = Call(self, call.route, call.signature, call.slot, call.body, call.number, call.timeout_s)
                again.after = call.after
                self.submit(again, call.timeout_s)
                return
            case "POISON" if not call.digest and not self.has_hung_up and call.route in self.routes:
                self.needs_digest.add(call.route)
                digest = bytes([call.number]) * wire.DIGEST_BYTES
                event = ev.CallPoisoned(self.identity, call.route, digest)
                self.frames.send(self.world.from_client, self, event)
            case "BROKER_LOST" if not self.has_hung_up and self.world.rng.random() < 0.2:
                self.hang_up()
        self._end(call)
