"""Workers as they really are: what they take, how they end, what their GPU does."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.coverage import FATES, GPU_FATES, LANE_ENDS, WRITES
from tests.simulation.model import Channel, Dispatch, Lane

from layerzero.broker.core import events as ev
from layerzero.ipc.errors import (
    BackendError,
    CudaGraphUnsafe,
    InvalidArgument,
    LayerZeroError,
    NoTransport,
    OutputTooSmall,
)
from layerzero.ipc.shm.timeline_words import RUNG, TAKEN
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STICKY_EXIT

if TYPE_CHECKING:
    from tests.simulation.world import World

DEADLY = 3  # number of the input that kills the workers it deserves


class Process:
    """A worker, as it really is. What the broker believes of it is in `lent`, `prepared`, `sent`."""

    def __init__(self, world: World, backend: str, generation: int, pid: int) -> None:
        self.world, self.backend, self.generation, self.pid = world, backend, generation, pid
        self.identity = b"W%d" % pid
        self.is_alive = True
        self.is_confirmed_dead = False
        self.is_given_up = False  # nobody could confirm that (joined.py)
        self.kill_reason = ""
        self.is_told = False  # to exit, since another has taken over
        self.is_too_late = False  # it was killed for not having loaded
        self.killed_during = -1
        self.killed_for = 0  # the mark of a lane's call; 0: for its head
        self.was_ready = False  # the broker got its READY in time
        self.ready_s = 0.0
        self.exit_code: int | None = None
        self.lent: set[tuple[int, int]] = set()
        self.gpus: set[int] = set()  # clients whose GPU it was told of
        self.slot = 0
        self.no_transport: set[int] = set()  # clients whose memory does not reach it
        self.gpu: list[Dispatch] = []  # enqueued and not done
        self.enqueued: dict[int, Dispatch] = {}  # what the broker believes of that
        self.graph_slots: dict[tuple[int, int], Dispatch] = {}  # by client's number
        self.replaying: dict[tuple[int, int], Dispatch] = {}
        self.last_points: dict[tuple[int, int], int] = {}  # enqueued, by client and lane
        self.bound: dict[int, Dispatch] = {}  # what the broker believes
        self.late: Dispatch | None = None  # that it is killed for
        self.prepared: set[int] = set()
        self.sent: deque[Dispatch] = deque()
        self.head_since_s = 0.0
        self._inbox: deque[tuple[str, Any]] = deque()
        self._arenas: set[tuple[int, int]] = set()
        self._given_back: set[tuple[int, int]] = set()  # of those: that go with the graph slots that name them
        self._plans: set[int] = set()
        self._loaded: set[int] = set()  # plans whose kernels have run
        self._current: Dispatch | None = None
        self.page = (0, "idle")
        self.began_s = 0.0  # when it began what the page says
        self.lane_end_s = 0.0  # when it was last done with a lane's call
        self.lanes: dict[int, Lane] = {}  # mapped
        self._allowed: set[tuple[int, int]] = set()
        self._to_broker = Channel(world)
        self._loses_output = False
        self._frames, self._control = Channel(world), Channel(world)

    @property
    def is_over(self) -> bool:
        """For the core."""
        return self.is_confirmed_dead or self.is_given_up

    @property
    def has_renewed(self) -> bool:
        """It ended to begin anew, or since another has taken over, and was not to be killed."""
        is_it = self.exit_code == RENEWAL_EXIT or (self.is_told and self.exit_code == 0)
        return is_it and not self.kill_reason

    @property
    def has_crashed(self) -> bool:
        """It ended by itself, and something may be to blame."""
        return self.kill_reason in ("", "forced") and not self.has_renewed

    @property
    def held(self) -> list[Dispatch]:
        """What it may be in."""
        is_on_ring = self._current is not None and self._current.lane is not None and self.world.device
        return [*self.sent, *self.gpu, *([self._current] if self._current and is_on_ring else [])]

    def send(self, kind: str, value: Any = None) -> None:
        """From the broker, by ZeroMQ."""
        self._frames.send(self._arrived, kind, value)

    def tell(self, kind: str, what: Any) -> None:
        """From the broker, by the control socket."""
        self._control.send(self._told, kind, what)

    def load(self) -> None:
        rng, world = self.world.rng, self.world
        fate = "loads" if world.is_calm else rng.choices(("loads", "dies", "stays"), world.start_weights)[0]
        if fate == "loads":
            self._say(ev.WorkerReady(self.identity, self.backend, self.generation, {"lib": "1"}))
        elif fate == "dies":
            self.die(rng.choice((1, 1, -9)))

    def _say(self, event: ev.Event) -> None:
        self._to_broker.send(self._heard, event)

    def _heard(self, event: ev.Event) -> None:
        if self.is_alive or not self._loses_output:
            self.world.from_worker(self, event)

    def _told(self, kind: str, what: Any) -> None:
        match kind:
            case "map":
                self._arenas.add(what)
                self._given_back.discard(what)
            case "unmap" if self._is_bound(what):  # a graph slot's RUN, or the MUTE of one, is behind it elsewhere
                self._given_back.add(what)
            case "unmap":
                self._arenas.discard(what)
            case "map_lane":
                self.lanes[what.number] = what
            case _:
                self.lanes.pop(what.number, None)
        self.pump()

    def _is_bound(self, arena: tuple[int, int]) -> bool:
        return any(arena in dispatch.arenas for dispatch in self.graph_slots.values())

    def _arrived(self, kind: str, value: Any) -> None:
        self._inbox.append((kind, value))
        self.pump()

    def pump(self) -> None:
        """Take what is there, in the order of each channel; a rung doorbell may come before or after a frame."""
        while self.is_alive and self._current is None:
            rung = [lane for lane in self.lanes.values() if lane.is_rung or lane.done < len(lane.ring)]
            if rung and (not self._inbox or self.world.rng.random() < 0.5):
                lane = self.world.rng.choice(rung)
                if self.world.device:
                    self._take(lane)
                else:
                    self._claim(lane)
                continue
            if not self._inbox:
                return
            kind, value = self._inbox[0]
            if kind == "run":
                if not value.arenas <= self._arenas:
                    return  # its descriptors are on the way, by the other channel
                self._begin(value)
            elif kind == "prepare":
                self._plans.add(value)
            elif kind == "drop":
                self._plans.discard(value)
                self._loaded.discard(value)
            elif kind == "allow":
                self._allowed.add(value)
            elif kind == "mute":
                self.graph_slots.pop(value, None)
                gone = {arena for arena in self._given_back if not self._is_bound(arena)}
                self._given_back -= gone
                self._arenas -= gone
            elif self.gpu:
                return  # it finishes what it has before it stops
            else:
                self.die(0)
            self._inbox.popleft()

    def _claim(self, lane: Lane) -> None:
        lane.is_rung = False
        dispatch = lane.dispatch
        assert dispatch is not None
        if self._knows(lane, dispatch) and dispatch.arenas <= self._arenas:
            self._begin(dispatch)
        else:
            self.world.lane_done(lane, "declined")

    def _knows(self, lane: Lane, dispatch: Dispatch) -> bool:
        """The plan. Else it has been dropped since: a worker hears of it before the client may call."""
        self.world.require((lane.number, dispatch.plan) in self._allowed, "a call of a lane came before its ALLOW")
        return dispatch.plan in self._plans

    def _take(self, lane: Lane) -> None:
        """The next call of a ring."""
        lane.done += 1
        dispatch, world = lane.ring[lane.done], self.world
        dispatch.taken_s = world.now_s
        call = dispatch.call
        world.require(not call.is_done and not call.has_failed, "a call of a ring was ended before its worker took it")
        world.require(call.on_ring is dispatch and not call.dispatches, "a call of a ring is elsewhere, too")
        is_heard = call.client.number in self.gpus and call.client.number not in self.no_transport
        if self._knows(lane, dispatch) and is_heard and dispatch.arenas <= self._arenas:
            self._begin(dispatch)
        else:
            world.coverage.fates["ring_left"] += 1
            self._leave_to_broker(dispatch, None)

    def _leave_to_broker(self, dispatch: Dispatch, error: LayerZeroError | None) -> None:
        lane = dispatch.lane
        assert lane is not None
        dispatch.is_over = True
        number = dispatch.number & 0xFFFF_FFFF
        self._say(ev.CallHandedBack(self.identity, lane.number, lane.slots[number], error))

    def _begin(self, dispatch: Dispatch) -> None:
        world = self.world
        call = dispatch.call
        world.require(dispatch.plan in self._plans, "a worker got a Run without its plan")
        if call.graph_slot is None:
            world.require(call.place not in world.writers, "two live workers write the same memory")
            world.writers[call.place] = self
        self._current = dispatch
        weights = world.weights[self.backend] if dispatch.lane is None else world.lane_weights
        fate = "runs" if world.is_calm else world.rng.choices(FATES, weights)[0]
        if call.number == DEADLY and world.has_deadly_input:
            fate = "dies_running"
        world.coverage.fates[fate] += 1
        if call.client.number in self.no_transport and self.world.device:
            error = NoTransport("GPU memory does not reach the worker", transport="ipc", reason="it is deaf")
            self._say(ev.CallRaised(self.identity, dispatch.number, dispatch.attempt, error))
            self._free()
            return
        if fate == "dies_before":
            self.die(-11)
            return
        self.page, self.began_s = (dispatch.number, "executing"), world.now_s
        if self._is_out_of_order(dispatch):
            world.coverage.fates["point_renewed"] += 1
            self.die(RENEWAL_EXIT)
            return
        if fate == "hangs":
            return
        slow_s = call.timeout_s * world.rng.uniform(0.8, 1.2) if fate == "is_slow" else 0.0
        world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._end, dispatch, fate)

    def _is_out_of_order(self, dispatch: Dispatch) -> bool:
        """To load its kernel might wait for later calls of its lane, which wait for it."""
        point = dispatch.call.point
        if point is None:
            return False
        lane = (dispatch.call.client.number, point.timeline)
        last = self.last_points.get(lane, 0)
        self.last_points[lane] = max(last, point.value)
        return self.world.renews and point.value < last and dispatch.plan not in self._loaded

    def _end(self, dispatch: Dispatch, fate: str) -> None:
        if not self.is_alive:
            return
        world, rng = self.world, self.world.rng
        number, attempt = dispatch.number, dispatch.attempt
        if fate in WRITES:
            self.page = (number, "written")
            dispatch.result = b"%d" % number
            if dispatch.call.graph_slot is not None:
                self._bind(dispatch)
            elif world.device:
                self._enqueue(dispatch)
            else:
                world.contents[dispatch.call.place] = dispatch.call
        if fate == "dies_running":
            self.die(rng.choice((-9, -11, -6, 0, 1)))
        elif fate == "dies_written":
            self.die(-11)
        elif fate == "hangs_up":
            world.kill(self)  # the broker kills one that closes its control socket, and does not tell its core
            return
        elif dispatch.lane is not None and world.device:
            errors: dict[str, LayerZeroError] = {
                "raises": BackendError("kernel raised"),
                "refuses": InvalidArgument("bad id"),
                "too_small": OutputTooSmall("small", needed=[9]),
            }
            if fate in errors:
                world.coverage.fates["ring_raised"] += 1
                self._leave_to_broker(dispatch, errors[fate])
            elif fate in ("sends_garbage", "lies_dispatch", "lies_attempt"):
                self._say(ev.WorkerMisbehaved(self.backend, self.generation, "garbage"))
            self._leave(fate)
        elif dispatch.lane is not None:
            status = LANE_ENDS.get(fate, "ran")
            if status:
                dispatch.is_over = True
                world.lane_done(dispatch.lane, status)
            self._leave(fate)
        else:
            kernel_ns = rng.choice((0, 5000)) if world.device else rng.randrange(1000, 10**6)
            ran = ev.CallRan(self.identity, number, attempt, kernel_ns, dispatch.result or b"")
            match fate:
                case "raises":
                    error: LayerZeroError = BackendError("kernel raised")
                    if dispatch.call.graph_slot is not None and rng.random() < 0.7:
                        error = CudaGraphUnsafe("it cannot be captured")
                        world.coverage.fates["graph_slot_unsafe"] += 1
                    self._say(ev.CallRaised(self.identity, number, attempt, error))
                case "refuses":
                    self._say(ev.CallRaised(self.identity, number, attempt, InvalidArgument("bad id")))
                case "too_small":
                    self._say(ev.CallRaised(self.identity, number, attempt, OutputTooSmall("small", needed=[9])))
                case "sends_garbage":
                    self._say(ev.WorkerMisbehaved(self.backend, self.generation, "garbage"))
                case "lies_dispatch":
                    self._say(replace(ran, dispatch=number + rng.choice((-1, 1, 1000))))
                case "lies_attempt":
                    self._say(replace(ran, attempt=attempt + 1))
                case _:
                    self._say(ran)
                    if fate == "answers_twice":
                        self._say(ran)
            self._leave(fate)

    def _leave(self, fate: str) -> None:
        """The call is answered."""
        rng = self.world.rng
        if fate == "dies_sent":
            self.page = rng.choice((self.page, (0, "idle")))
            self.die(rng.choice((-9, 0)))
        else:
            self._free()
            self.page = (0, "idle")
            self.pump()

    def _bind(self, dispatch: Dispatch) -> None:
        call = dispatch.call
        assert call.graph_slot is not None
        self._loaded.add(dispatch.plan)
        key = (call.client.number, call.graph_slot)
        self.graph_slots[key] = dispatch
        graph_slot = call.client.graph_slots[call.graph_slot]
        if graph_slot.word >= TAKEN and not graph_slot.is_done and graph_slot.binding == dispatch.call.seq:
            self.world.coverage.fates["graph_slot_taken_over"] += 1
            self._replay(key)
        else:
            self.serve(key)

    def serve(self, key: tuple[int, int]) -> None:
        dispatch = self.graph_slots.get(key)
        if self.is_alive and dispatch is not None:
            graph_slot = dispatch.call.client.graph_slots[key[1]]
            if graph_slot.word == RUNG and graph_slot.binding == dispatch.call.seq:
                graph_slot.word, graph_slot.since_s = TAKEN + graph_slot.takings, self.world.now_s
                graph_slot.takings += 1
                self._replay(key)

    def _replay(self, key: tuple[int, int]) -> None:
        world, dispatch = self.world, self.graph_slots[key]
        if not dispatch.arenas <= self._arenas:
            world.require(dispatch.call.client.has_left, "a bound call has lost its memory")
            return
        world.require(dispatch.call.place not in world.writers, "two live workers write the same memory")
        world.writers[dispatch.call.place] = self
        self.replaying[key] = dispatch
        fate = "gpu_runs" if world.is_calm else world.rng.choices(GPU_FATES, world.gpu_weights)[0]
        slow_s = world.limits.timeout_s * world.rng.uniform(0.8, 1.2) if fate == "gpu_is_slow" else 0.0
        if fate != "gpu_hangs":
            world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._replayed, key, dispatch, fate)

    def _replayed(self, key: tuple[int, int], dispatch: Dispatch, fate: str) -> None:
        if not self.is_alive:
            return
        if fate == "gpu_dies":
            self.die(STICKY_EXIT)
            return
        del self.replaying[key]
        del self.world.writers[dispatch.call.place]
        call, graph_slot = dispatch.call, dispatch.call.client.graph_slots[key[1]]
        self.world.contents[call.place] = call
        graph_slot.is_done, graph_slot.since_s = True, self.world.now_s
        if dispatch.number in self.bound:  # else nobody can know it, should this worker die before its answer is read
            call.forgive()
        self.world.coverage.fates["graph_slot_replayed"] += 1

    def _enqueue(self, dispatch: Dispatch) -> None:
        world = self.world
        dispatch.gpu_fate = "gpu_runs" if world.is_calm else world.rng.choices(GPU_FATES, world.gpu_weights)[0]
        world.coverage.fates[dispatch.gpu_fate] += 1
        self._loaded.add(dispatch.plan)
        self.gpu.append(dispatch)
        self.pump_gpu()

    def pump_gpu(self) -> None:
        """Streams go on where inputs are ready."""
        world = self.world
        for dispatch in self.gpu:
            call = dispatch.call
            assert call.point is not None
            if dispatch.has_begun or world.stream(call).ready < call.point.value:
                continue
            dispatch.has_begun = True
            slow_s = call.timeout_s * world.rng.uniform(0.8, 1.2) if dispatch.gpu_fate == "gpu_is_slow" else 0.0
            if dispatch.gpu_fate != "gpu_hangs":
                world.push(world.now_s + world.rng.expovariate(world.pace) + slow_s, self._finish, dispatch)

    def _finish(self, dispatch: Dispatch) -> None:
        if not self.is_alive:
            return
        if dispatch.gpu_fate == "gpu_dies":
            self.die(STICKY_EXIT)
            return
        self.gpu.remove(dispatch)
        del self.world.writers[dispatch.call.place]
        self.world.contents[dispatch.call.place] = dispatch.call
        self.world.point_done(dispatch)
        self.pump()

    def _free(self) -> None:
        if self._current is not None:
            if self._current not in self.gpu and self._current.call.graph_slot is None:
                del self.world.writers[self._current.call.place]
            if self._current.lane is not None:
                self.lane_end_s = self.world.now_s
            self._current = None

    def die(self, exit_code: int) -> None:
        if not self.is_alive:
            return
        self._free()
        for dispatch in (*self.gpu, *self.replaying.values()):
            del self.world.writers[dispatch.call.place]
        self.gpu.clear()
        self.replaying.clear()
        self.is_alive = False
        world = self.world
        self._loses_output = world.rng.random() < 0.3
        is_damaged = world.rng.random() >= 0.98 and exit_code != RENEWAL_EXIT  # one that ends itself is not that ill
        page = (world.rng.randrange(100), "unknown") if is_damaged else self.page
        world.push(world.now_s + world.delay_s(), world.exited, self, exit_code, page)
