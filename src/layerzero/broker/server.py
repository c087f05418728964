"""The broker's loop: sockets and processes in, events to the core, its actions out. Puts together the parts that do the
broker's I/O; `Server._perform` says which part does what the core asks for."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from layerzero.broker.client_frames import ClientFrames
from layerzero.broker.configuration import table_source
from layerzero.broker.configuration.policy_source import PolicySource
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.connections import Connections
from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.model import Worker
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import frame_codec
from layerzero.broker.io.authentication import Authentication
from layerzero.broker.io.doorkeeper import LOOK_S, Doorkeeper
from layerzero.broker.io.greeting import Greeting
from layerzero.broker.io.lane_pages import LanePages
from layerzero.broker.io.offers import Offers
from layerzero.broker.io.page_poller import POLL_S, PagePoller
from layerzero.broker.io.poller import Poller, drain_pipe
from layerzero.broker.io.routers import Routers, Unreachable
from layerzero.broker.io.tcp_queries import Remote
from layerzero.broker.io.timeline_pages import TimelinePages
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.lifting.store import LiftStore
from layerzero.broker.processes.compile_jobs import CompileJobs
from layerzero.broker.processes.function_workers import FunctionWorkers
from layerzero.broker.processes.host import free_memory_bytes
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.observers import Observers
from layerzero.broker.processes.probe_jobs import ProbeJobs
from layerzero.broker.processes.registry import AnyWorker, Processes
from layerzero.broker.processes.self_registered import Joined
from layerzero.broker.processes.user_brokers import UserBrokers
from layerzero.broker.queries import function_workers, methods
from layerzero.broker.queries.incremental import IncrementalAnswers
from layerzero.broker.selection.planner import Planner
from layerzero.broker.selection.tuning import Spending
from layerzero.broker.storage.plan_choices import PlanChoices
from layerzero.broker.storage.rollout_file import RolloutFile
from layerzero.broker.storage.stored_times import StoredTimes
from layerzero.broker.worker_frames import WorkerFrames
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.ipc.errors import ConfigError, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.transport.endpoints import Endpoints

STOP_GRACE_S = 5.0
STALL_S = 0.2  # a deadline noticed so late says that this process was not running
CATCH_UP_S = 0.2
IDLE_CHECK_S = 5.0  # is the runtime folder still ours? how long are the logs?
FLUSH_S = 0.02  # between looks at frames that clients had no room for


class Server:
    """One broker. `run()` returns when it was told to stop, or when its last client left and `stays` is off.
    `parts_users`: other users get brokers of their own. Raises ConfigError when it cannot listen where it should."""

    def __init__(
        self,
        settings: Settings,
        endpoints: Endpoints,
        state: BrokerState,
        launcher: Launcher,
        policy: PolicySource,
        gate: Authentication,
        *,
        stays: bool,
        parts_users: bool,
    ) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.state = state
        self.launcher = launcher
        self.planner = Planner()
        self.policy = policy
        self.policy.on_read = self._wake_up
        self.incarnation = os.urandom(8).hex()
        self._lock_id = endpoints.lock_id()
        self.started_s = time.monotonic()
        self.stays = stays
        self.tuning = Spending(time.monotonic())
        self.load_table()
        self._ended, self._kill_at_s = False, math.inf
        self._check_s = self._poll_at_s = 0.0
        self._incremental_answers = IncrementalAnswers(
            partial(methods.begin, self), self._to_client, self._client_failed
        )
        self._from_threads: deque[ev.Event] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = Poller()
        self._poller.watch(self._wake, self._take_from_threads)
        self._remote: Remote | None = None
        if settings.remote:
            self._remote = Remote(settings.remote, settings.keys, self._poller, partial(methods.answer, self))
        self._times = StoredTimes(settings.times, state.engine, launcher, self.post)
        self.perfdb, self.identities = self._times.perfdb, self._times.identities
        self.plan_choices = PlanChoices(settings.plan_choices)
        self.rollout_file = RolloutFile(settings.rollout_file)
        self._probes = ProbeJobs(launcher, self.post)
        self._compilers = CompileJobs(launcher, self.post)
        self._zmq_paths = {side: endpoints.zmq_path(side, self.incarnation) for side in ("client", "worker")}
        self._routers = Routers(
            self._zmq_paths["client"],
            self._zmq_paths["worker"],
            self._poller,
            queue=4 * settings.max_in_flight,
            from_client=self._from_client,
            from_worker=self._from_worker,
            uids=gate.uids if gate.is_shared and not parts_users else (),
        )
        more = [] if self._remote is None else [self._remote.door]
        self._observers = Observers(settings, endpoints)
        self._doorkeeper = Doorkeeper([*self._routers.doors, *more], self._wake_up)
        self._links = WorkerLinks(self._poller, self.handle)
        self.joined = Joined(
            settings,
            launcher,
            handle=self.handle,
            on_end=self._worker_ended,
            on_start=self._joined_starts,
            is_linked=lambda backend, generation: self._links.get(backend, generation) is not None,
            note_change=self._plan_check,
            learn=partial(function_workers.learn_joined, self),
        )
        self.processes = Processes(
            settings, endpoints, launcher, self._poller, self.joined, self.handle, self._worker_ended
        )
        self.users = UserBrokers(endpoints, self._poller, self._plan_check, stays=stays) if parts_users else None
        self._lanes = LanePages()
        self._pages = TimelinePages()
        self._page_poller = PagePoller(state, self.handle, self._links, self._lanes, self._pages, self._stop_if_idle)
        self.lifts = Lifts(
            state,
            self.identities,
            self._links,
            self._pages,
            LiftStore(settings.store / "lifted"),
            self._wake_up,
            self.handle,
            imported=launcher.imported,
            outsiders=[name for name, manifest in launcher.manifests.items() if manifest.source is not None],
            rest_s=settings.rest_s,
        )
        self.function_workers = FunctionWorkers(settings, state, self.processes, self.handle, self.poll_lanes)
        self._offers = Offers(state, self.handle, self._links, self._lanes, self._pages, self._page_poller)
        self._connections = Connections(
            endpoints.control,
            state,
            self._poller,
            self._links,
            self._offers,
            self.lifts,
            self.processes,
            self.joined,
            gate,
            self.users,
            welcome=Greeting(settings, self.incarnation, self._zmq_paths, bool(settings.joined.strip())).welcome,
            forget=self._routers.forget_client,
            handle=self.handle,
            note_change=self._plan_check,
            is_observer=self._observers.has,
        )
        self._client_frames = ClientFrames(state, self._lanes, self._incremental_answers, self.processes.executing)
        self._worker_frames = WorkerFrames(state, self._lanes, self._page_poller, self._connections)
        self.counters = self._offers.counters
        self._perform: dict[type, Callable[[Any], None]] = {
            **{kind: partial(self._send_client, frame_of) for kind, frame_of in frame_codec.TO_CLIENT.items()},
            **{kind: partial(self._send_worker, frame_of) for kind, frame_of in self.processes.to_worker.items()},
            **self._offers.performs(),
            act.Probe: self._probe,
            act.Compile: self._compile,
            act.Spawn: self.processes.spawn,
            act.Kill: lambda action: self.processes.kill(action.backend, action.generation),
            act.StopWorker: self._stop_worker,
            act.DropClient: self._connections.drop_client,
            act.Note: lambda action: log(action.event, **action.facts),
            act.KeepRollouts: lambda action: self.rollout_file.write(action.rollouts),
            act.Exit: self._exit,
        }
        self.handle(ev.RolloutsKept(self.rollout_file.read()))

    def poll_lanes(self) -> None:
        """Count the calls that did not pass through here."""
        self._page_poller.at_lanes()

    def poll_timelines(self) -> None:
        """See which calls GPUs are done with."""
        self._page_poller.at_points()

    # --- the loop ------------------------------------------------------------------------------------

    def run(self, started: Callable[[], None]) -> None:
        """`started` is called when a signal ends it in order, and clients may connect."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.post(ev.ShutdownAsked()))
        # The system may hand a signal to another thread; Python handles it in this one, which may be asleep.
        signalled, signal_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(signal_fd, warn_on_full_buffer=False)
        self._poller.watch(signalled, lambda: drain_pipe(signalled))
        try:
            started()
            while not self._ended:
                self._routers.take()
                if self._remote is not None:
                    self._remote.take()
                now_s = time.monotonic()
                if now_s >= self.state.wakeup_s:
                    if now_s > self.state.wakeup_s + STALL_S:
                        self._catch_up()
                    self._page_poller.at_points()
                    self.handle(ev.Tick(self.processes.executing()))
                elif now_s >= self._page_poller.due_s:
                    self._page_poller.at_points()
                elif now_s >= self._check_s:
                    self._housekeeping(now_s)
                else:
                    self._times.save(now_s)
                    is_busy = self._may_have_input or self._incremental_answers
                    self._poller.wait(0.0 if is_busy else self._timeout_s(now_s))
                    self._look_around(time.monotonic())  # before the calls that woke us
                    self._incremental_answers.go_on()
        finally:
            signal.set_wakeup_fd(-1)
            self._close()
            os.close(signalled)
            os.close(signal_fd)

    @property
    def _may_have_input(self) -> bool:
        return self._routers.may_have_input or (self._remote is not None and self._remote.may_have_input)

    def _catch_up(self) -> None:
        """This process stood still, by SIGSTOP or suspend. Answers that came meanwhile count before deadlines do;
        ZeroMQ's own thread needs a moment to read them."""
        end_s = time.monotonic() + CATCH_UP_S
        while (left_s := end_s - time.monotonic()) > 0:
            self._poller.wait(left_s)
            self._routers.take()

    def _look_around(self, now_s: float) -> None:
        """Once a second while there is anything to do, and before it: has the policy file changed, how much memory is
        left?"""
        if now_s < self._poll_at_s:
            return
        self._poll_at_s = now_s + POLL_S
        self._page_poller.at_lanes()
        self._page_poller.at_rings(self.processes.executing)
        self._page_poller.at_graph_slots()
        self._follow_policy(now_s)
        self.lifts.look()
        self.function_workers.look(now_s)
        if self.state.engine.policy.memory_headroom_bytes is not None:
            engine = self.state.engine
            for device in ("", *self._pages.uuids()):
                engine.note_free_memory(free_memory_bytes(engine.devices[device]), device)

    def _follow_policy(self, now_s: float) -> None:
        """Take what has changed in the policy's files."""
        before = self.policy.problem
        policy = self.policy.refresh(now_s)
        if policy is not None:
            self.handle(ev.PolicyChanged(policy))
            self.load_table()
        if self.policy.problem and self.policy.problem != before:
            log("policy.refused", problem=self.policy.problem)

    def load_table(self) -> None:
        """Take the dispatch table that policy names, or none. One that cannot be used is a problem, and is not used."""
        engine, path = self.state.engine, self.policy.policy.dispatch_table
        self.table_problem, table = "", None
        if path is not None:
            try:
                table = table_source.read(path, engine, self.launcher.env_ids())
            except ConfigError as exc:
                self.table_problem = exc.message
                log("table.refused", problem=self.table_problem)
        engine.set_table(table)

    def _timeout_s(self, now_s: float) -> float:
        if self._ended:
            return 0.0
        look_at_s = self._poll_at_s if self._page_poller.has_silent else math.inf
        look_at_s = now_s + FLUSH_S if self._routers.keeps_frames else look_at_s
        due_s = min(self.state.wakeup_s, self._check_s, self._times.due_s, look_at_s, self._page_poller.due_s)
        return max(due_s - now_s, 0.0)

    def _linger_ends_s(self) -> float:
        """When this broker ends for lack of clients."""
        idle_since_s = self._connections.idle_since_s
        if idle_since_s is None or self.stays or self.state.stopping:
            return math.inf
        return idle_since_s + self.settings.linger_s

    def _plan_check(self) -> None:
        """Note when housekeeping is due next: after a hello that does not come, an idle broker's linger, a stop's
        grace."""
        due_s = min(self._connections.due_s, self.joined.due_s, self._linger_ends_s(), self._kill_at_s)
        look_s = LOOK_S if self._doorkeeper.is_shut else IDLE_CHECK_S
        self._check_s = min(due_s, self.function_workers.due_s, look_s + time.monotonic())

    @property
    def _has_folder(self) -> bool:
        return self.endpoints.lock_id() == self._lock_id

    def _housekeeping(self, now_s: float) -> None:
        if now_s >= self._linger_ends_s():
            self.handle(ev.ShutdownAsked())
        if now_s >= self._kill_at_s:
            self._kill_at_s = math.inf
            self.processes.kill_all()
        self._connections.end_silent(now_s)
        self.processes.bound_logs()
        if not self._has_folder and not self.state.stopping:
            log("runtime_dir.lost", folder=str(self.endpoints.folder))  # nobody finds this broker any more
            self.handle(ev.ShutdownAsked())
        self.joined.look(now_s)
        self.function_workers.look(now_s)
        self._doorkeeper.look()
        self._observers.look()
        self._plan_check()

    # --- events and actions --------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """May raise what nobody has thought of; what others wait for has been done all the same."""
        try:
            actions = self.state.handle(event, time.monotonic())
        except Exception:
            self._carry_out(iter(self.state.effects.actions))  # up to there it has changed its mind for good
            raise
        self._carry_out(iter(actions))

    def _carry_out(self, actions: Iterator[act.Action]) -> None:
        try:
            for action in actions:
                self._perform[type(action)](action)
        except Exception:
            self._carry_out(actions)  # the others
            raise

    def post(self, event: ev.Event) -> None:
        """From another thread or a signal handler: let the loop handle this event."""
        if not self._ended:
            self._from_threads.append(event)
            self._wake_up()

    def _wake_up(self) -> None:
        """From another thread or a signal handler: let the loop look at what threads have done."""
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    def _take_from_threads(self) -> None:
        os.eventfd_read(self._wake)
        if self._doorkeeper.is_shut:
            self._doorkeeper.look()
            self._plan_check()
        self._follow_policy(time.monotonic())
        self.lifts.take_proved()
        while self._from_threads:
            event = self._from_threads.popleft()
            if isinstance(event, ev.ProbeEnded) and event.record is not None:
                self._times.identify(event.backend, event.record.versions)
            self.handle(event)

    def _from_client(self, identity: bytes, frame: bytes) -> None:
        if identity not in self._connections.clients:
            return  # it was dropped, or was never welcomed
        try:
            event = self._client_frames.event_of(identity, frame)
            if event is not None:
                self.handle(event)
        except ProtocolError as exc:
            self._connections.drop_client(act.DropClient(identity, exc.message))
        except Exception as exc:
            self._client_failed(identity, exc)

    def _client_failed(self, identity: bytes, exc: Exception) -> None:
        peer = self._connections.clients.get(identity)
        if peer is not None:  # else it was dropped meanwhile, for what we did not get so far as to do
            self._connections.end_failed(peer, exc)

    def _from_worker(self, identity: bytes, frame: bytes) -> None:
        peer = self._links.of(identity)
        if peer is None:
            return
        try:
            try:
                event = self._worker_frames.event_of(peer, frame)
            except ProtocolError as exc:
                event = ev.WorkerMisbehaved(peer.backend, peer.generation, f"bad message: {exc}")
            if event is not None:
                self.handle(event)
        except Exception as exc:
            self._connections.end_failed(peer, exc)
        if self.state.stopping:
            self._stop_if_idle(self.state.lifecycle.current(peer.backend, peer.generation))

    def _send_client(self, frame_of: Callable[[Any], bytes], action: Any) -> None:
        self._to_client(action.identity, frame_of(action))

    def _send_worker(self, frame_of: Callable[[Any], bytes], action: Any) -> None:
        self._to_worker(action.identity, frame_of(action))

    def _to_client(self, identity: bytes, frame: bytes) -> None:
        try:
            self._routers.send_client(identity, frame)
        except Unreachable as exc:
            peer = self._connections.clients.get(identity)
            if peer is not None:
                log("client.unreachable", client=peer.number, error=str(exc))
                if exc.is_full:
                    self._connections.drop_client(act.DropClient(identity, "it does not read its answers"))

    def _to_worker(self, identity: bytes, frame: bytes) -> None:
        try:
            self._routers.send_worker(identity, frame)
        except Unreachable as exc:  # one that is gone is dying: its exit is about to be seen
            peer = self._links.of(identity)
            if peer is not None and exc.is_full:
                self.handle(ev.WorkerMisbehaved(peer.backend, peer.generation, "it does not read its queue"))

    def _probe(self, action: act.Probe) -> None:
        if action.backend in self.joined.names:  # what an agent's probe has shown comes with its worker's start
            self.post(ev.ProbeEnded(action.backend, None))
        else:
            self._probes.start(action)

    def _compile(self, action: act.Compile) -> None:
        (self.joined.compile if action.backend in self.joined.names else self._compilers.start)(action)

    def _joined_starts(self, backend: str, env: str, record: ProbeRecord) -> None:
        """Certificates and times are those of where the worker runs."""
        self.launcher.note_joined(backend, env)
        self.state.engine.note_env(backend, env)
        self._times.identify(backend, record.versions)
        self.handle(ev.ProbeEnded(backend, None, record))

    # --- ends ----------------------------------------------------------------------------------------

    def _worker_ended(self, process: AnyWorker) -> None:
        self._routers.take_workers()  # what it still said counts
        backend, generation = process.backend, process.generation
        if (peer := self._links.get(backend, generation)) is not None:
            self._connections.close(peer)
        if self.state.unreachable.has_let_go(backend, generation):
            process.reap()
            self.handle(ev.WorkerGone(backend, generation))
            return
        worker = self.state.lifecycle.current(backend, generation)
        self.handle(self.processes.end_of(process, {} if worker is None else self._page_poller.at_what_is_left(worker)))

    def _stop_worker(self, action: act.StopWorker) -> None:
        self._kill_at_s = time.monotonic() + STOP_GRACE_S
        self._plan_check()
        if action.identity:
            self._stop_if_idle(self.state.lifecycle.current(action.backend, action.generation))
        else:
            self.processes.kill(action.backend, action.generation)

    def _stop_if_idle(self, worker: Worker | None) -> None:
        """Not before: when the end of a process is seen, its last answers may still be in ZeroMQ's hands."""
        if worker is not None and not worker.running and not worker.enqueued:
            self._to_worker(worker.identity, frame_codec.STOP)

    def _exit(self, _: act.Exit) -> None:
        self._ended = True

    def _close(self) -> None:
        self._ended = True
        for part in (self._observers, self.processes, self._times, self._lanes):
            part.close()
        self._pages.close_all()
        self._connections.stop_listening()
        self._doorkeeper.close()
        if self._remote is not None:
            self._remote.close()
        self._routers.close()  # the last answers leave before the control sockets say that the broker is gone
        self._connections.close_all()
        self._offers.close()
        for path in (*([self.endpoints.control] if self._has_folder else ()), *self._zmq_paths.values()):
            path.unlink(missing_ok=True)
        self._probes.close()
        self._compilers.close()
        self.lifts.close()
        self.policy.close()
        self._poller.close()
        os.close(self._wake)
