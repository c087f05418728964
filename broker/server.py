"""The broker's loop: sockets and processes in, events to the core, its actions out. All of the broker's I/O but
the worker processes themselves (supervisor.py) and the environments (launcher.py)."""

from __future__ import annotations

import errno
import itertools
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgpack
import zmq

import layerzero
from layerzero.broker import dispatch_table, requests, supervisor
from layerzero.broker import events as ev
from layerzero.broker.compile_jobs import CompileJobs
from layerzero.broker.host import free_memory_bytes
from layerzero.broker.lane_ends import LaneEnds
from layerzero.broker.launcher import Launcher
from layerzero.broker.leases import Lane
from layerzero.broker.order_pages import Gpu, OrderPages, check_handle_fds
from layerzero.broker.peers import HELLO_TIMEOUT_S, LentArena, Peer, check_hello, new_identity, refuse
from layerzero.broker.perf import PerfRow
from layerzero.broker.perf_rows import Identity
from layerzero.broker.perfdb import PerfDB
from layerzero.broker.planner import Planner
from layerzero.broker.policy_source import PolicySource
from layerzero.broker.settings import Settings
from layerzero.broker.state import BrokerState
from layerzero.broker.tuning import Spending
from layerzero.envs.probe import ProbeRecord
from layerzero.ipc import control, memory, messages, sockets, wire
from layerzero.ipc.cuda_handles import ArenaHandle
from layerzero.ipc.endpoints import Endpoints
from layerzero.ipc.errors import (
    BackendError,
    BrokerLost,
    ConfigError,
    CudaGraphUnsafe,
    EnvError,
    InvalidArgument,
    LayerZeroError,
    NoTransport,
    OutputTooSmall,
    ProtocolError,
    from_wire,
)
from layerzero.ipc.logs import log
from layerzero.ipc.order import Turn
from layerzero.ipc.wire import HEADER_BYTES, Kind

BATCH = 64  # messages taken from one socket before the other one gets its turn
MAX_BACKLOG = 8192  # control messages queued for a busy worker
MAX_PASSES = 16  # over both sockets before deaths and deadlines get their turn
STOP_GRACE_S = 5.0
STALL_S = 0.2  # a deadline noticed so late says that this process was not running
CATCH_UP_S = 0.2
FIRST_CLIENT_S = 10.0  # the client that started us gets so long to say hello, whatever the linger
MAX_STRANGERS = 64  # connections that have not said hello
MAX_WORD_BYTES = 1 << 18  # of a worker's answer; it travels on to the client with more around it
IDLE_CHECK_S = 3600.0
LOOK_S = 1.0
AWAITED_LOOK_S = 0.02  # at order pages, while somebody waits for the broker to see a call's end
LOOK_CALLS = 64  # a worker's enqueued calls are looked at each time they are so many more
SAVE_S = 1.0  # measured times are handed to the database so long after the first new one
# pyzmq's enums cost a microsecond a use, and these are used on every message.
_NOBLOCK, _SNDMORE, _RCVMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE)
_EXECUTE, _RAN = int(Kind.EXECUTE), int(Kind.RAN)
# What a worker may say of a call; anything else it says counts as a failed kernel.
WORKER_CODES = frozenset(
    {InvalidArgument.code, OutputTooSmall.code, BackendError.code, NoTransport.code, CudaGraphUnsafe.code}
)


class Server:
    """One broker. `run()` returns when it was told to stop, or when its last client left and `stays` is off."""

    def __init__(
        self,
        settings: Settings,
        endpoints: Endpoints,
        state: BrokerState,
        launcher: Launcher,
        policy: PolicySource,
        *,
        stays: bool,
    ) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.state = state
        self.launcher = launcher
        self.planner = Planner()
        self.policy = policy
        self.incarnation = os.urandom(8).hex()
        self.started_s = time.time()
        self.processes: dict[tuple[str, int], supervisor.Process] = {}
        self.peers: dict[int, Peer] = {}
        self.stays = stays
        self._ended = False
        self._idle_since_s: float | None = time.monotonic() + FIRST_CLIENT_S
        self._kill_at_s: float | None = None
        self._check_s = 0.0
        self._numbers = itertools.count(1)
        self._clients: dict[bytes, Peer] = {}
        self._workers: dict[tuple[str, int], Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._arenas_of: dict[int, dict[int, LentArena]] = {}  # by client's number, also after it has left
        self._lanes = LaneEnds()
        self._pages = OrderPages()
        self._looked_s = 0.0  # at all order pages
        self._from_threads: deque[ev.Event] = deque()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="probe")
        self._compilers = CompileJobs(launcher, self.post)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.perfdb = PerfDB(settings.perf_db or settings.store / "perf.db", self._note_times)
        self.tuning = Spending(time.monotonic())
        self.table_problem = ""
        self.load_table()
        self._look_at_s = 0.0
        self._save_at_s = math.inf  # measured times wait for the database until then
        for backend, record in launcher.records().items():
            self._identify(backend, record.versions)
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._on_fd: dict[int, Callable[[], None]] = {}
        # Whether a socket must be asked for input before sleeping: its descriptor woke us, or we sent on it, which may
        # eat the edge that announces input.
        self._ask_front = self._ask_back = True
        self._context = zmq.Context()
        self._front = self._bind("client")
        self._back = self._bind("worker")
        self._listener = control.listen(endpoints.control)
        self._watch(sockets.poll_fd(self._front), self._note_front)
        self._watch(sockets.poll_fd(self._back), self._note_back)
        self._watch(self._listener.fileno(), self._accept)
        self._watch(self._wake, self._take_from_threads)

    def _bind(self, side: str) -> zmq.Socket[bytes]:
        path = self.endpoints.zmq_path(side, self.incarnation)
        sock = sockets.bind_router(self._context, path, 4 * self.settings.max_in_flight)
        return sock

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._on_fd[fd] = handler

    def _note_front(self) -> None:
        self._ask_front = True

    def _note_back(self) -> None:
        self._ask_back = True

    def _unwatch(self, fd: int) -> None:
        self._epoll.unregister(fd)
        del self._on_fd[fd]

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.post(ev.ShutdownAsked()))
        # The system may hand a signal to another thread, and Python handles it in this one, which may be asleep.
        signalled, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        self._watch(signalled, lambda: _drain_pipe(signalled))
        try:
            while not self._ended:
                self._take_frames()
                now_s = time.monotonic()
                if now_s >= self.state.wakeup_s:
                    if now_s > self.state.wakeup_s + STALL_S:
                        self._catch_up()
                    self.look_at_turns()
                    self.handle(ev.Tick({key: process.page.read()[0] for key, process in self.processes.items()}))
                elif now_s >= self._turns_due_s():
                    self.look_at_turns()
                elif now_s >= self._check_s:
                    self._housekeeping(now_s)
                else:
                    self._save_times(now_s)
                    self._wait(0.0 if self._ask_front or self._ask_back else self._timeout_s(now_s))
                    self._look_around(time.monotonic())  # before the calls that woke us
        finally:
            signal.set_wakeup_fd(-1)
            self._close()
            os.close(signalled)
            os.close(signal_fd)

    def _take_frames(self) -> None:
        """Until both sockets are empty, but not for ever: under full load there is always more, and a worker's death
        or a deadline must be seen all the same."""
        for _ in range(MAX_PASSES):
            if not (self._ask_front or self._ask_back):
                return
            if self._ask_front:
                self._ask_front = False
                self._ask_front |= self._drain(self._front, self._from_client)
            if self._ask_back:
                self._ask_back = False
                self._ask_back |= self._drain(self._back, self._from_worker)

    def _wait(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            handler = self._on_fd.get(fd)  # an earlier one may have closed it
            if handler is not None:
                handler()

    def _catch_up(self) -> None:
        """This process stood still, by SIGSTOP or suspend. Answers that came meanwhile count before deadlines do;
        ZeroMQ's own thread needs a moment to read them."""
        end_s = time.monotonic() + CATCH_UP_S
        while (left_s := end_s - time.monotonic()) > 0:
            self._wait(left_s)
            self._take_frames()

    def _look_around(self, now_s: float) -> None:
        """Once a second while there is anything to do, and before it: has the policy file changed, how much memory is
        left?"""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        self.look_at_lanes()
        self.look_at_rings()
        self.look_at_bells()
        before = self.policy.problem
        policy = self.policy.refresh(now_s)
        if policy is not None:
            self.handle(ev.PolicyChanged(policy))
            self.load_table()
        if self.policy.problem and self.policy.problem != before:
            log("policy.refused", problem=self.policy.problem)
        if self.state.engine.policy.memory_headroom_bytes is not None:
            engine = self.state.engine
            for device in ("", *self._pages.uuids()):
                engine.note_free_memory(free_memory_bytes(engine.devices[device]), device)

    def look_at_lanes(self) -> None:
        """Count the calls that did not pass through here."""
        for seen in list(self._lanes.seen()):
            self.handle(seen)

    def look_at_rings(self) -> None:
        looks = self._looks(self.state.leases.rings())
        if looks:
            self.handle(ev.RingsSeen(looks))

    def look_at_bells(self) -> None:
        calls = [call for worker in self.state.workers.values() for call in worker.bells.values()]
        if calls or self.state.bells.is_awaited:
            self.handle(ev.BellsSeen(self._pages.busy_bells(calls)))

    def _looks(self, rings: Iterable[Lane]) -> dict[int, ev.RingLook]:
        looks = {}
        for ring in rings:
            gpu = self._pages.get(ring.client.number, ring.gpu)
            look = self._lanes.look(ring.number, gpu.page) if gpu is not None else None
            if look is not None:
                looks[ring.number] = look
            if ring.client.has_left:
                self._lanes.wake(ring.number)
        return looks

    def look_at_turns(self, *backends: str, has_ended: bool = False) -> None:
        """See which calls GPUs are done with, of these workers or of all; of one that has ended also what it has not
        answered."""
        for name in backends or self.state.workers:
            worker = self.state.workers[name]
            calls = [*worker.enqueued.values(), *(worker.running if has_ended else ())]
            if calls and self._pages:
                done, ready = self._pages.look(calls)
                self.handle(ev.TurnsSeen(name, worker.generation, done, set(ready)))
                if self.state.stopping:
                    self._stop_when_idle(name, worker.identity)
        if backends:
            return
        self._looked_s = time.monotonic()
        reached = self._pages.reached(self.state.turns.held)
        if reached:
            self.handle(ev.TurnsReached(reached))
        if self.state.is_awaited:
            self.look_at_rings()
            self.look_at_bells()

    def _turns_due_s(self) -> float:
        """When to look at order pages next."""
        if not self._pages:
            return math.inf
        is_awaited = self.state.is_awaited
        if not is_awaited and not any(worker.enqueued for worker in self.state.workers.values()):
            return math.inf
        return self._looked_s + (AWAITED_LOOK_S if is_awaited or self.state.stopping else LOOK_S)

    def load_table(self) -> None:
        """Take the dispatch table that policy names, or none. One that cannot be used is a problem, and is not used."""
        engine, path = self.state.engine, self.policy.policy.dispatch_table
        self.table_problem, table = "", None
        if path is not None:
            try:
                text = path.read_text(encoding="utf-8")
                hashes = {name: capability.hash for name, capability in engine.capabilities.items()}
                table = dispatch_table.load(
                    text,
                    str(path),
                    dispatch_table.Hardware.of(engine.device),
                    hashes,
                    self.launcher.env_ids(),
                    layerzero_version=layerzero.__version__,
                )
            except (OSError, UnicodeDecodeError) as exc:
                self.table_problem = f"the dispatch table {path} cannot be read: {exc}"
            except ConfigError as exc:
                self.table_problem = exc.message
        if self.table_problem:
            log("table.refused", problem=self.table_problem)
        engine.set_table(table)

    # --- what was measured -------------------------------------------------------------------------------

    def _identify(self, backend: str, versions: Mapping[str, str]) -> None:
        """Tell the database what times of this backend depend on; it answers with those it has."""
        engine, capability = self.state.engine, self.state.capabilities[backend]
        device = engine.device_for(backend)
        identity = Identity(
            device_uuid=device.device_uuid,
            driver_version=device.driver_version,
            cuda_version=device.cuda_version,
            backend_version=capability.backend_version,
            torch_version=versions.get("torch", ""),
            layerzero_version=layerzero.__version__,
            capabilities_hash=capability.hash,
            env_hash=self.launcher.env_ids().get(backend, ""),
        )
        self.perfdb.identify(backend, identity, capability.kernel_ids)

    def _note_times(self, _: str, rows: list[PerfRow]) -> None:
        """On the thread of the database."""
        if not self._ended:
            self.post(ev.TimesLoaded(rows))

    def _save_times(self, now_s: float) -> None:
        engine = self.state.engine
        if now_s >= self._save_at_s:
            self._save_at_s = math.inf
            self.perfdb.save(engine.perf.take_dirty(), engine.health.take_dirty())
        if self._save_at_s == math.inf and engine.perf.has_dirty:
            self._save_at_s = now_s + SAVE_S

    def _timeout_s(self, now_s: float) -> float:
        if self._ended:
            return 0.0
        has_silent = self._lanes or any(worker.bells for worker in self.state.workers.values())
        look_at_s = self._look_at_s if has_silent else math.inf  # their calls do not wake us
        due_s = min(self.state.wakeup_s, self._check_s, self._save_at_s, look_at_s, self._turns_due_s())
        return max(due_s - now_s, 0.0)

    def _plan_check(self) -> None:
        """Note when housekeeping is due next: after a hello that does not come, an idle broker's linger, a stop's
        grace."""
        due = [peer.since_s + HELLO_TIMEOUT_S for peer in self.peers.values() if not peer.role]
        if self._idle_since_s is not None and not self.stays:
            due.append(self._idle_since_s + self.settings.linger_s)
        if self._kill_at_s is not None:
            due.append(self._kill_at_s)
        self._check_s = min(due, default=IDLE_CHECK_S + time.monotonic())

    def _housekeeping(self, now_s: float) -> None:
        if self._idle_since_s is not None and not self.stays and now_s >= self._idle_since_s + self.settings.linger_s:
            self._idle_since_s = None
            self.handle(ev.ShutdownAsked())
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = None
            for process in self.processes.values():
                supervisor.kill(process)
        for peer in [p for p in self.peers.values() if not p.role and now_s >= p.since_s + HELLO_TIMEOUT_S]:
            self._close_peer(peer)
        self._plan_check()

    def _drain(self, sock: zmq.Socket[bytes], take: Callable[[bytes, bytes], None]) -> bool:
        """Take what is there, up to a batch. True when there may be more."""
        if not sockets.has_input(sock):
            return False
        try:
            for _ in range(BATCH):
                identity = sock.recv(_NOBLOCK)
                frame = sock.recv()
                if not sock.get(_RCVMORE):
                    take(identity, frame)
                else:  # nobody of ours sends several frames
                    sock.recv_multipart()
        except zmq.Again:
            return False
        return True

    def handle(self, event: ev.Event) -> None:
        for action in self.state.handle(event, time.monotonic()):
            self._perform[type(action)](self, action)

    def post(self, event: ev.Event) -> None:
        """From another thread or a signal handler: let the loop handle this event."""
        self._from_threads.append(event)
        os.eventfd_write(self._wake, 1)

    def _take_from_threads(self) -> None:
        os.eventfd_read(self._wake)
        while self._from_threads:
            event = self._from_threads.popleft()
            if isinstance(event, ev.ProbeEnded) and event.record is not None:
                self._identify(event.backend, event.record.versions)
            self.handle(event)

    # --- frames --------------------------------------------------------------------------------------

    def _from_client(self, identity: bytes, frame: bytes) -> None:
        if identity not in self._clients:
            return  # it was dropped, or was never welcomed
        try:
            _, kind, flags, route, seq, attempt, aux, time_us = wire.unpack(frame)
            body = frame[HEADER_BYTES:]
            if kind == _EXECUTE:
                digest = b""
                if flags & wire.HAS_DIGEST:
                    body, digest = body[: -wire.DIGEST_BYTES], body[-wire.DIGEST_BYTES :]
                turn = bell = None
                if flags & wire.HAS_BELL:
                    if len(body) < wire.BELL_BYTES:
                        raise ProtocolError(f"a body of {len(body)} bytes is too short for a bell")
                    (bell,) = wire.BELL.unpack(body[-wire.BELL_BYTES :])
                    body = body[: -wire.BELL_BYTES]
                if flags & wire.HAS_TURN:
                    if len(body) < wire.TURN_BYTES:
                        raise ProtocolError(f"a body of {len(body)} bytes is too short for a turn")
                    turn = Turn(*wire.TURN.unpack(body[-wire.TURN_BYTES :]))
                    body = body[: -wire.TURN_BYTES]
                may_run_here, after_lane = bool(flags & wire.MAY_RUN_HERE), aux if flags & wire.AFTER_LANE else 0
                timeout_s = time_us / 1e6
                event: ev.Event = ev.CallArrived(
                    identity, route, seq, timeout_s, body, digest, may_run_here, after_lane, attempt, turn, bell
                )
            elif kind == Kind.ROUTE:
                event = ev.RouteDefined(identity, route, body)
            elif kind == Kind.FORGET:
                event = ev.RouteForgotten(identity, route)
            elif kind == Kind.UNBIND:
                event = ev.CallUnbound(identity, seq)
            elif kind == Kind.POISONED and len(body) == wire.DIGEST_BYTES:
                event = ev.CallPoisoned(identity, route, body)
            elif kind == Kind.OVERDUE:
                event = ev.LaneOverdue(identity, aux, route, time_us / 1e6, seq)
                try:
                    if self._lanes.has_ended(aux, seq):
                        return  # just now
                except ProtocolError as exc:
                    event.nonsense = str(exc)
            elif kind == Kind.RAN_HERE:
                ran = messages.decode(body, messages.RanHere)
                error = from_wire(ran.error) if ran.error else None
                if ran.kernel_ns < 0:
                    raise ProtocolError(f"a run of {ran.kernel_ns} ns")
                event = ev.RanInClient(identity, route, ran.kernel_id, ran.kernel_ns, error)
            elif kind == Kind.REQUEST:
                self._answer_request(identity, seq, body)
                return
            else:
                raise ProtocolError(f"a client does not send kind {kind} with {len(body)} bytes")
        except ProtocolError as exc:
            self._drop_client(ev.DropClient(identity, str(exc)))
            return
        self.handle(event)

    def _answer_request(self, identity: bytes, seq: int, body: bytes) -> None:
        message = messages.decode(body, messages.Request)
        try:
            answer = requests.answer(self, message.method, message.params)
            frame = wire.pack(Kind.RESPONSE, seq=seq, body=msgpack.packb(answer))
        except LayerZeroError as exc:
            frame = wire.pack(Kind.FAILED, seq=seq, body=messages.encode(messages.Outcome(error=exc.to_wire())))
        self._send_client(identity, frame)

    def _from_worker(self, identity: bytes, frame: bytes) -> None:
        peer = self._by_identity.get(identity)
        if peer is None:
            return
        try:
            _, kind, _, _, dispatch, attempt, aux, kernel_ns = wire.unpack(frame)
            body = frame[HEADER_BYTES:]
            if len(body) > MAX_WORD_BYTES:
                raise ProtocolError(f"{len(body)} bytes in one answer; allowed: {MAX_WORD_BYTES}")
            if kind == _RAN:
                event: ev.Event = ev.CallRan(identity, dispatch, attempt, kernel_ns, body, bool(aux))
                enqueued = len(self.state.workers[peer.backend].enqueued)
                if enqueued and not enqueued % LOOK_CALLS:
                    self.look_at_turns(peer.backend)
            elif kind == Kind.LEFT:
                error = _kernel_error(body) if body else None
                lane = self.state.leases.lanes.get(aux)
                if lane is None or aux not in self._lanes:
                    self.state.stale += 1  # its client is gone
                    return
                try:
                    event = ev.CallLeft(identity, aux, self._lanes.call(aux, dispatch), error)
                except ProtocolError as exc:  # the client has written over it
                    self._drop_client(ev.DropClient(lane.client.identity, str(exc)))
                    return
            elif kind == Kind.RAISED:
                event = ev.CallRaised(identity, dispatch, attempt, _kernel_error(body))
            elif kind == Kind.READY:
                ready = messages.decode(body, messages.Ready)
                self._check_kernels(peer.backend, ready)
                event = ev.WorkerReady(identity, peer.backend, peer.generation, ready.versions)
            else:
                raise ProtocolError(f"a worker does not send kind {kind}")
        except ProtocolError as exc:
            event = ev.WorkerMisbehaved(peer.backend, peer.generation, f"bad message: {exc}")
        self.handle(event)
        if self.state.stopping:
            self._stop_when_idle(peer.backend, identity)

    def _check_kernels(self, backend: str, ready: messages.Ready) -> None:
        claimed = {k.kernel_id for kernels in self.state.capabilities[backend].ops.values() for k in kernels}
        missing = claimed.difference(map(str, ready.kernels))
        if missing:
            raise ProtocolError(f"its provider lacks kernels of its descriptor: {', '.join(sorted(missing))}")

    def _send_client(self, identity: bytes, frame: bytes) -> None:
        try:
            self._ask_front = True
            self._front.send(identity, _SNDMORE | _NOBLOCK)
            self._front.send(frame, _NOBLOCK)
        except zmq.ZMQError as exc:  # gone, or its queue is full: it does not read
            if identity in self._clients:
                log("client.unreachable", client=self._clients[identity].number, error=str(exc))
                if exc.errno == zmq.EAGAIN:
                    self._drop_client(ev.DropClient(identity, "it does not read its answers"))

    def _send_worker(self, identity: bytes, frame: bytes) -> None:
        try:
            self._ask_back = True
            self._back.send(identity, _SNDMORE | _NOBLOCK)
            self._back.send(frame, _NOBLOCK)
        except zmq.ZMQError as exc:  # dying: its exit is about to be seen. A full queue is its fault
            peer = self._by_identity.get(identity)
            if peer is not None and exc.errno == zmq.EAGAIN:
                self.handle(ev.WorkerMisbehaved(peer.backend, peer.generation, "it does not read its queue"))

    # --- control sockets -------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                # Out of descriptors: turn the caller away with the spare one, or its call would wake us for ever.
                log("peer.refused", error="the broker has no file descriptors left; raise its limit (ulimit -n)")
                os.close(self._spare_fd)
                self._listener.accept()[0].close()
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                return
            sock.setblocking(False)
            peer = Peer(sock, since_s=time.monotonic())
            self.peers[sock.fileno()] = peer
            self._watch(sock.fileno(), lambda: self._from_control(peer))
            strangers = [p for p in self.peers.values() if not p.role]
            if len(strangers) > MAX_STRANGERS:
                self._close_peer(strangers[0])
            self._plan_check()

    def _from_control(self, peer: Peer) -> None:
        try:
            if not peer.role:
                hello, fds = control.receive(peer.sock, messages.Hello)
                _close_all(fds)
                self._welcome(peer, hello)
            elif peer.role == "client":
                message, fds = control.receive(
                    peer.sock,
                    messages.AddArena,
                    messages.AddGpu,
                    messages.AddGpuArena,
                    messages.AddLane,
                    messages.RetireArena,
                )
                if isinstance(message, messages.AddArena):
                    self._add_arena(peer, message, fds)
                elif isinstance(message, messages.AddGpu):
                    self._add_gpu(peer, message, fds)
                elif isinstance(message, messages.AddGpuArena):
                    self._add_gpu_arena(peer, message, fds)
                elif isinstance(message, messages.AddLane):
                    self._add_lane(peer, message.lane, message.gpu, fds)
                elif isinstance(message, messages.RetireArena):
                    _close_all(fds)
                    self.look_at_turns()  # what has just ended uses it no more
                    self.handle(ev.ArenaGivenUp(peer.identity, message.arena))
            else:
                if peer.backlog:
                    self._flush(peer)
                control.receive(peer.sock)
        except BlockingIOError:
            return
        except (control.Closed, OSError):
            self._close_peer(peer)
        except LayerZeroError as exc:
            refuse(peer, exc)
            log("peer.refused", role=peer.role, pid=peer.pid, error=exc.message)
            self._close_peer(peer)

    def _welcome(self, peer: Peer, hello: messages.Hello) -> None:
        check_hello(peer, hello, layerzero.__version__)
        fds: tuple[int, ...] = ()
        if hello.role == "worker":
            process = next((p for p in self.processes.values() if p.ticket == hello.ticket), None)
            if process is None or (process.backend, process.generation) in self._workers:
                raise ProtocolError("unknown worker ticket")
            peer.backend, peer.generation = process.backend, process.generation
            self._workers[peer.backend, peer.generation] = peer
            fds = (process.page_fd,)
        elif hello.role == "client":
            if self.state.stopping:
                raise BrokerLost("the broker is shutting down")
        else:
            raise ProtocolError(f"unknown role {hello.role!r:.40}; allowed: client, worker")
        peer.role, peer.identity, peer.number = hello.role, new_identity(), next(self._numbers)
        self._plan_check()
        self._by_identity[peer.identity] = peer
        if peer.role == "client":
            self._clients[peer.identity] = peer
            self._arenas_of[peer.number] = peer.arenas
            self._idle_since_s = None
            self.handle(ev.ClientJoined(peer.identity, peer.number))
        welcome = messages.Welcome(
            protocol=wire.PROTOCOL,
            package=layerzero.__version__,
            broker=self.incarnation,
            broker_pid=os.getpid(),
            endpoint=f"ipc://{self.endpoints.zmq_path(peer.role, self.incarnation)}",
            identity=peer.identity,
            number=peer.number,
            max_in_flight=self.settings.max_in_flight,
            timeout_s=self.settings.timeout_s,
        )
        control.send(peer.sock, welcome, fds)

    def _add_arena(self, peer: Peer, message: messages.AddArena, fds: list[int]) -> None:
        try:
            if len(fds) != 1:
                raise ProtocolError(f"add_arena carries one descriptor, got {len(fds)}")
            memory.check_memfd(fds[0], message.nbytes)
            self._check_number(peer, message.arena)
        except ProtocolError:
            _close_all(fds)
            raise
        self._keep_arena(peer, message.arena, LentArena(fds[0]), message.nbytes)

    def _add_gpu_arena(self, peer: Peer, message: messages.AddGpuArena, fds: list[int]) -> None:
        try:
            handle = ArenaHandle.from_wire(message.handle)
            check_handle_fds(handle, fds)
            if handle.arena != message.arena:
                raise ProtocolError(f"arena {message.arena} comes with the handle of arena {handle.arena}")
            self._check_number(peer, message.arena)
        except ProtocolError:
            _close_all(fds)
            raise
        arena = LentArena(fds[0] if fds else None, handle)
        self._keep_arena(peer, message.arena, arena, handle.nbytes, handle.gpu)

    @staticmethod
    def _check_number(peer: Peer, arena: int) -> None:
        if not peer.last_arena < arena < wire.NO_ARENA:
            raise ProtocolError(f"arena {arena} is out of range; numbers grow, the last was {peer.last_arena}")

    def _keep_arena(self, peer: Peer, number: int, arena: LentArena, nbytes: int, gpu: str = "") -> None:
        peer.last_arena = number
        peer.arenas[number] = arena
        self.handle(ev.ArenaOffered(peer.identity, number, nbytes, gpu))
        if peer.sock.fileno() < 0:  # it was dropped for this one
            peer.arenas.pop(number).close()
            return
        control.send(peer.sock, messages.ArenaAdded(arena=number))

    def _add_gpu(self, peer: Peer, message: messages.AddGpu, fds: list[int]) -> None:
        try:
            gpu = Gpu.of(message, fds)
        except ProtocolError:
            _close_all(fds)
            raise
        refusal: LayerZeroError | None = self.state.engine.missing(message.gpu)
        if refusal is None and self.state.bells.holds(peer.identity, message.gpu):
            text = "calls in captured graphs hold the GPU's memory as it is offered; drop those graphs first"
            refusal = NoTransport(text, rung=gpu.rung, reason=text)
        if refusal is not None:  # nothing is wrong with the client: it goes on without this
            gpu.close()
            control.send(peer.sock, messages.Refused(error=refusal.to_wire()))
            return
        before = self._pages.get(peer.number, message.gpu)
        self.look_at_turns()
        self.handle(ev.GpuOffered(peer.identity, message.gpu, before is None or not gpu.has_page_of(before)))
        if peer.sock.fileno() < 0:  # it was dropped for this one
            gpu.close()
            return
        self._pages.put(peer.number, gpu)
        control.send(peer.sock, messages.GpuAdded(gpu=message.gpu))

    def _add_lane(self, peer: Peer, number: int, gpu: str, fds: list[int]) -> None:
        try:
            self._lanes.add(number, fds, is_ring=bool(gpu))
        except ProtocolError:
            _close_all(fds)
            raise
        self.handle(ev.LaneOpened(peer.identity, number, gpu))
        if peer.sock.fileno() >= 0:
            control.send(peer.sock, messages.LaneAdded(lane=number, is_open=number in self._lanes))

    def _close_peer(self, peer: Peer) -> None:
        fd = peer.sock.fileno()
        if self.peers.pop(fd, None) is None:
            return
        self._unwatch(fd)
        self._by_identity.pop(peer.identity, None)
        peer.drop_backlog()
        peer.sock.close()
        if peer.role == "client":
            del self._clients[peer.identity]
            if not self._clients:
                self._idle_since_s = time.monotonic()
                self._plan_check()
            if not peer.arenas:
                del self._arenas_of[peer.number]
            self.handle(ev.ClientLeft(peer.identity))
        elif peer.role == "worker":
            del self._workers[peer.backend, peer.generation]
            if not self.state.stopping:
                # It is ending, or it hung up and is of no more use; one that is ending keeps its exit code.
                self._kill(ev.Kill(peer.backend, peer.generation))

    # --- processes -----------------------------------------------------------------------------------

    def _worker_ended(self, process: supervisor.Process) -> None:
        if not control.is_readable(process.pidfd):
            return  # an event of another descriptor that had this number before
        while self._drain(self._back, self._from_worker):  # what it still said counts
            pass
        self._unwatch(process.pidfd)
        key = (process.backend, process.generation)
        del self.processes[key]
        peer = self._workers.get(key)
        if peer is not None:
            self._close_peer(peer)
        self.look_at_lanes()
        rings = self.state.leases.rings(self.state.workers[process.backend])
        for ring in rings:  # first: what a client puts after it has seen this, it brings here itself
            self._lanes.tell_end(ring.number)
        self.look_at_turns()  # in which of its calls the GPU was depends on those before them, whoever had these
        self.look_at_turns(process.backend, has_ended=True)
        looks = self._looks(rings)
        self.look_at_bells()
        ended = supervisor.reap(process)
        self.handle(ev.WorkerExited(*key, ended.exit_code, ended.executing, ended.phase, ended.stderr_tail, looks))

    # --- actions -------------------------------------------------------------------------------------

    def _probe(self, action: ev.Probe) -> None:
        def work() -> None:
            error: LayerZeroError | None = None
            record = None
            try:
                record = self.launcher.probe(action.backend)
                error = self.launcher.failure(record)
                if record.failures:
                    _note_failures(record)
            except LayerZeroError as exc:
                error = exc
            except Exception as exc:  # a broken environment may fail in any way; it disables that backend only
                error = EnvError(f"the probe failed: {type(exc).__name__}: {exc}", env=action.backend)
            self.post(ev.ProbeEnded(action.backend, error, record))

        self._threads.submit(work)

    def _compile(self, action: ev.Compile) -> None:
        self._compilers.start(action)

    def _spawn(self, action: ev.Spawn) -> None:
        backend, generation = action.backend, action.generation
        try:
            process = supervisor.spawn(
                backend,
                generation,
                self.launcher.launch(backend),
                control_path=self.endpoints.control,
                log=self.endpoints.worker_log(backend),
                package=layerzero.__version__,
                failpoints=self.settings.failpoints_of(backend),
            )
        except (OSError, LayerZeroError) as exc:
            error = exc if isinstance(exc, LayerZeroError) else EnvError(f"cannot start the worker: {exc}", env=backend)
            self.handle(ev.SpawnFailed(backend, generation, error))
            return
        self.processes[backend, generation] = process
        self._watch(process.pidfd, lambda: self._worker_ended(process))
        log("worker.started", backend=backend, generation=generation, pid=process.pid)
        self.handle(ev.WorkerSpawned(backend, generation, process.pid))

    def _kill(self, action: ev.Kill) -> None:
        process = self.processes.get((action.backend, action.generation))
        if process is not None:
            supervisor.kill(process)

    def _stop_worker(self, action: ev.StopWorker) -> None:
        self._kill_at_s = time.monotonic() + STOP_GRACE_S
        self._plan_check()
        if action.identity:
            self._stop_when_idle(action.backend, action.identity)
        else:
            self._kill(ev.Kill(action.backend, action.generation))

    def _stop_when_idle(self, backend: str, identity: bytes) -> None:
        """Not before: when the end of a process is seen, its last answers may still be in ZeroMQ's hands."""
        worker = self.state.workers[backend]
        if not worker.running and not worker.enqueued:
            self._send_worker(identity, wire.pack(Kind.STOP))

    def _send_prepare(self, action: ev.SendPrepare) -> None:
        self._send_worker(action.identity, wire.pack(Kind.PREPARE, route=action.plan, body=action.body))

    def _send_drop(self, action: ev.SendDrop) -> None:
        self._send_worker(action.identity, wire.pack(Kind.DROP, route=action.plan))

    def _lend_arena(self, action: ev.LendArena) -> None:
        arena = self._arenas_of[action.client][action.arena]
        fds: tuple[int, ...] = () if arena.fd is None else (arena.fd,)
        if arena.handle is not None:
            handle = arena.handle.to_wire()
            message: messages.Message = messages.MapGpuArena(client=action.client, arena=action.arena, handle=handle)
        else:
            message = messages.MapArena(client=action.client, arena=action.arena, nbytes=os.fstat(fds[0]).st_size)
        self._tell_worker(action.backend, action.generation, message, fds)

    def _take_back_arena(self, action: ev.TakeBackArena) -> None:
        message = messages.UnmapArena(client=action.client, arena=action.arena)
        self._tell_worker(action.backend, action.generation, message)

    def _lend_gpu(self, action: ev.LendGpu) -> None:
        message, fds = self._pages.lend(action.client, action.gpu, action.slot)
        self._tell_worker(action.backend, action.generation, message, fds)

    def _take_back_gpu(self, action: ev.TakeBackGpu) -> None:
        message = messages.UnmapGpu(client=action.client, gpu=action.gpu)
        self._tell_worker(action.backend, action.generation, message)

    def _close_gpu(self, action: ev.CloseGpu) -> None:
        self._pages.close(action.client, action.gpu)

    def _fail_turn(self, action: ev.FailTurn) -> None:
        self._pages.fail(action.client, action.gpu, action.turn, action.code)

    def _release_turn(self, action: ev.ReleaseTurn) -> None:
        self._pages.release(action.client, action.gpu, action.turn)

    def _tell_worker(self, backend: str, generation: int, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        peer = self._workers.get((backend, generation))
        if peer is None:
            return  # it has just died; its exit event is on the way
        if not peer.backlog:  # then it goes as it is: a broker without descriptors left must not need more
            try:
                control.send(peer.sock, message, fds)
                return
            except BlockingIOError:
                pass
            except (control.Closed, OSError):
                return  # it is dying: its exit event is on the way
        try:
            peer.backlog.append((message, _dup_all(fds)))
        except OSError as exc:
            self.handle(ev.WorkerMisbehaved(backend, generation, f"what it does not read cannot be kept for it: {exc}"))
            return
        self._flush(peer)
        if len(peer.backlog) > MAX_BACKLOG:
            self.handle(ev.WorkerMisbehaved(backend, generation, "it does not read its control socket"))

    def _flush(self, peer: Peer) -> None:
        """Send a worker what is queued for its control socket, as far as it fits; the rest goes when there is room."""
        while peer.backlog:
            message, fds = peer.backlog[0]
            try:
                control.send(peer.sock, message, fds)
            except BlockingIOError:
                self._epoll.modify(peer.sock, select.EPOLLIN | select.EPOLLOUT)
                return
            except (control.Closed, OSError):
                pass  # it is dying: its exit event is on the way
            peer.backlog.popleft()
            _close_all(list(fds))
        self._epoll.modify(peer.sock, select.EPOLLIN)

    def _send_allow(self, action: ev.SendAllow) -> None:
        self._send_worker(action.identity, wire.pack(Kind.ALLOW, route=action.plan, aux=action.lane))

    def _send_lease(self, action: ev.SendLease) -> None:
        frame = wire.pack(Kind.LEASE, route=action.route, aux=action.decision, body=action.body)
        self._send_client(action.identity, frame)

    def _lend_lane(self, action: ev.LendLane) -> None:
        message = messages.MapLane(client=action.client, lane=action.lane, gpu=action.gpu)
        self._tell_worker(action.backend, action.generation, message, self._lanes.fds(action.lane))

    def _revoke_lane(self, action: ev.RevokeLane) -> None:
        self._lanes.revoke(action.lane, action.epoch)

    def _take_back_lane(self, action: ev.TakeBackLane) -> None:
        self._tell_worker(action.backend, action.generation, messages.UnmapLane(lane=action.lane))
        self._lanes.drop(action.lane)

    def _end_lane(self, action: ev.EndLane) -> None:
        self._lanes.end(action.lane)

    def _close_arena(self, action: ev.CloseArena) -> None:
        arenas = self._arenas_of[action.client]
        arenas.pop(action.arena).close()
        if not arenas and all(peer.number != action.client for peer in self._clients.values()):
            del self._arenas_of[action.client]

    def _run(self, action: ev.Run) -> None:
        body, flags = action.body, 0
        if action.turn is not None:
            body, flags = body + wire.TURN.pack(*action.turn), wire.HAS_TURN
        if action.bell is not None:
            body, flags = body + wire.BELL.pack(action.bell), flags | wire.HAS_BELL
        self._send_worker(
            action.identity,
            wire.pack(
                Kind.RUN,
                flags=flags,
                route=action.plan,
                seq=action.dispatch,
                attempt=action.attempt,
                aux=action.client,
                body=body,
            ),
        )

    def _send_mute(self, action: ev.SendMute) -> None:
        frame = wire.pack(Kind.MUTE, route=action.plan, aux=action.client, seq=action.bell)
        self._send_worker(action.identity, frame)

    def _send_decision(self, action: ev.SendDecision) -> None:
        frame = wire.pack(Kind.DECISION, route=action.route, aux=action.decision, body=action.body)
        self._send_client(action.identity, frame)

    def _answer(self, action: ev.Answer) -> None:
        body, flags = action.body, wire.REPLAYED if action.is_replayed else 0
        if action.attempts:
            flags |= wire.HAS_OUTCOME
            body = messages.encode(messages.Outcome(attempts=action.attempts, result=action.body))
        frame = wire.pack(
            Kind.DONE,
            flags=flags,
            seq=action.seq,
            attempt=action.attempt,
            aux=action.decision,
            time=action.kernel_ns,
            body=body,
        )
        self._send_client(action.identity, frame)

    def _refuse(self, action: ev.Refuse) -> None:
        outcome = messages.Outcome(error=action.error.to_wire(), attempts=action.attempts, candidates=action.candidates)
        body = messages.encode(outcome)
        if len(body) > wire.MAX_MESSAGE_BYTES // 2:  # the verdict must arrive, if need be without its details
            error = type(action.error)(action.error.message[:2000])
            body = messages.encode(messages.Outcome(error=error.to_wire()))
        self._send_client(action.identity, wire.pack(Kind.FAILED, seq=action.seq, body=body))

    def _drop_client(self, action: ev.DropClient) -> None:
        peer = self._clients.get(action.identity)
        if peer is not None:
            refuse(peer, ProtocolError(action.detail))
            log("client.dropped", client=peer.number, pid=peer.pid, detail=action.detail)
            self._close_peer(peer)

    def _note(self, action: ev.Note) -> None:
        log(action.event, **action.facts)

    def _exit(self, _: ev.Exit) -> None:
        self._ended = True

    _perform: dict[type, Callable[[Server, Any], None]] = {
        ev.Run: _run,
        ev.SendMute: _send_mute,
        ev.Answer: _answer,
        ev.Refuse: _refuse,
        ev.SendDecision: _send_decision,
        ev.SendPrepare: _send_prepare,
        ev.SendDrop: _send_drop,
        ev.LendArena: _lend_arena,
        ev.TakeBackArena: _take_back_arena,
        ev.CloseArena: _close_arena,
        ev.LendGpu: _lend_gpu,
        ev.TakeBackGpu: _take_back_gpu,
        ev.CloseGpu: _close_gpu,
        ev.FailTurn: _fail_turn,
        ev.ReleaseTurn: _release_turn,
        ev.SendAllow: _send_allow,
        ev.SendLease: _send_lease,
        ev.LendLane: _lend_lane,
        ev.RevokeLane: _revoke_lane,
        ev.TakeBackLane: _take_back_lane,
        ev.EndLane: _end_lane,
        ev.Probe: _probe,
        ev.Compile: _compile,
        ev.Spawn: _spawn,
        ev.Kill: _kill,
        ev.StopWorker: _stop_worker,
        ev.DropClient: _drop_client,
        ev.Note: _note,
        ev.Exit: _exit,
    }

    def _close(self) -> None:
        for process in list(self.processes.values()):
            supervisor.kill(process)
            supervisor.reap(process)
        while (rows := self.state.engine.perf.take_dirty()) or self.state.engine.health.has_dirty:
            self.perfdb.save(rows, self.state.engine.health.take_dirty())
        self.perfdb.close()
        self._lanes.close()
        self._pages.close_all()
        self._listener.close()
        self._front.close()
        self._back.close()
        self._context.term()  # the last answers leave before the control sockets say that the broker is gone
        for peer in list(self.peers.values()):
            peer.close()
        for path in (
            self.endpoints.control,
            self.endpoints.zmq_path("client", self.incarnation),
            self.endpoints.zmq_path("worker", self.incarnation),
        ):
            path.unlink(missing_ok=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()
        self._epoll.close()
        os.close(self._wake)
        os.close(self._spare_fd)


def _kernel_error(body: bytes) -> LayerZeroError:
    """A worker's word on a failed call, held to what a worker may say."""
    error = from_wire(messages.unpack_body(body))
    if error.code in WORKER_CODES:
        return error
    failure = BackendError(f"{error.code}: {error.message}")
    failure.facts = error.facts
    return failure


def _note_failures(record: ProbeRecord) -> None:
    certified, failed = record.counts
    first = [f"{f['kernel_id']} {f['dtype']} {f['shape_class']}: {f['detail']}" for f in record.failures[:10]]
    log("backend.not_certified", backend=record.env, certified=certified, failed=failed, first=first)


def _drain_pipe(fd: int) -> None:
    with suppress(BlockingIOError):
        os.read(fd, 512)


def _dup_all(fds: Sequence[int]) -> tuple[int, ...]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))  # those before are closed when one fails
    except OSError:
        _close_all(made)
        raise
    return tuple(made)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
