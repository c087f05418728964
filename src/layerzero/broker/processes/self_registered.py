"""Joined workers: those of backends whose agents (workers/join.py) register with the broker, mostly from containers.

An agent is to a joined worker what supervisor.py is to others: it starts, watches and kills. Of several agents of a
backend one has the worker, the others stand by. Who is who rests on connections, never on pids: all may be pid 1.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io.peers import Peer
from layerzero.broker.processes import joining
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.supervisor import Exit
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.profiles import ALL, Profile
from layerzero.capabilities.reasons import Reason
from layerzero.envs import functions
from layerzero.envs.build import environ
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.probe import compilation, probe
from layerzero.envs.probe.child import Ended
from layerzero.ipc.errors import Busy, ConfigError, EnvError, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, unwanted
from layerzero.ipc.vocabulary.worker_codes import phase_name

PING_S = 0.5
CONFIRM_S = 1.0  # so long the end of a worker that is killed may take until it counts as unreachable
STALL_S = 1.0  # a look so late says that this process was not running
MAX_AGENTS = 32  # of one backend
MAX_VERDICT_BYTES = 4 << 20


@dataclass(eq=False)
class Agent:
    """A registered agent. It may serve once `record` says that its environment's probe passed."""

    peer: Peer
    backend: str
    env: str  # id of what is installed there; "" where `lz env build` did not make it
    key: str  # of its certificate
    record: ProbeRecord | None = None
    worker: RemoteWorker | None = None
    starts: int = 0
    asked_s: float = math.inf  # when the ping was sent that it has not answered
    next_ping_s: float = 0.0
    is_silent: bool = False
    compiles: bool = False

    @property
    def state(self) -> str:
        """For people."""
        if self.is_silent:
            return "silent"
        if self.record is None:
            return "probing"
        return "ok" if self.record.ok else "failed"

    @property
    def is_usable(self) -> bool:
        return self.record is not None and self.record.ok and not self.is_silent


@dataclass(eq=False)
class RemoteWorker:
    """As supervisor.Process, of a worker that an agent started."""

    backend: str
    generation: int
    agent: Agent
    ticket: bytes
    page_fd: int
    page: memory.ControlPage
    pid: int = 0  # where the agent is: for people only
    has_agent: bool = True
    is_being_killed: bool = False  # the core has asked for it
    was_given_up: bool = False  # nobody has confirmed its end in time
    give_up_s: float = math.inf  # when its end must be confirmed
    code: int = -signal.SIGKILL  # what its end is when its agent, and so all of its namespace, has ended
    stderr_tail: str = ""
    oom: str = ""

    def reap(self) -> Exit:
        executing, phase = self.page.read()
        self.page.close()
        os.close(self.page_fd)
        return Exit(self.code, executing, phase_name(phase), self.stderr_tail, self.oom)


class Joined:
    """`handle` takes what the core must hear; `on_start` backend, environment and certificate of a worker that starts;
    `on_end` one whose end is confirmed. `is_linked` says whether a worker's own connection is there; `note_change` is
    told when `due_s` may be another. `learn` looks for a backend that the broker does not know yet."""

    def __init__(
        self,
        settings: Settings,
        launcher: Launcher,
        *,
        handle: Callable[[ev.Event], None],
        on_end: Callable[[RemoteWorker], None],
        on_start: Callable[[str, str, ProbeRecord], None],
        is_linked: Callable[[str, int], bool],
        note_change: Callable[[], None],
        learn: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._settings, self._learn = settings, learn
        self._launcher = launcher
        self._handle = handle
        self._on_end = on_end
        self._on_start = on_start
        self._is_linked = is_linked
        self._note_change = note_change
        self._agents: dict[str, list[Agent]] = {}
        self._by_peer: dict[int, Agent] = {}  # by the peer's number
        self._live: dict[tuple[str, int], RemoteWorker] = {}
        self._compiling: dict[str, act.Compile] = {}  # by backend: what is, or shall be when an agent is there
        self._looked_s = time.monotonic()

    @property
    def names(self) -> frozenset[str]:
        """The backends that join, which the broker starts no workers of."""
        return self._launcher.joined

    # --- agents come, speak and go

    def check(self, hello: messages.Hello) -> None:
        """Whether its agent may register. Raises ConfigError, Busy."""
        name = hello.backend
        if name not in self.names:
            self._learn(name)
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise ConfigError(
                f"backend {name!r:.60} does not join this broker; those that do: {known}; lz up --joined NAME,... says "
                "which"
            )
        if len(self._agents.get(name, ())) >= MAX_AGENTS:
            raise Busy(f"{MAX_AGENTS} agents of {name} have registered; no more are taken", limit=MAX_AGENTS)
        if not all(len(text) <= 64 and text.isalnum() for text in (hello.env, hello.source) if text):
            raise ProtocolError(f"env {hello.env!r:.80} and source {hello.source!r:.80} are no ids")

    def add(self, peer: Peer, hello: messages.Hello) -> None:
        """It was welcomed: tell it what to run, and have it probed where that is not known."""
        launcher = self._launcher
        manifest = launcher.manifests[hello.backend]
        key = _certificate_key(hello, manifest)
        record = self._kept_record(hello.backend, key)
        agent = Agent(peer, hello.backend, hello.env, key)
        self._agents.setdefault(hello.backend, []).append(agent)
        self._by_peer[peer.number] = agent
        log("agent.joined", backend=hello.backend, agent=peer.number, pid=peer.pid, env=hello.env, key=key)
        known = launcher.env_ids().get(hello.backend)
        if hello.env != known:
            log("agent.other_environment", backend=hello.backend, has=hello.env, lock=known)
        descriptor, variables = functions.given_to(manifest, hello.backend)
        fd = memory.create_memfd("descriptor", len(descriptor))
        try:
            os.pwrite(fd, descriptor, 0)
            keep = messages.Keep(
                provider=manifest.provider_target,
                environ=variables,
                defaults=environ.worker_environ({}, {}),
                probes=record is None,
                timeout_s=self._settings.start_timeout_s,
                calls=launcher.profile.to_json() or {},
            )
            self._tell(agent, keep, (fd,))
        finally:
            os.close(fd)
        self._note_change()
        if record is not None:
            self._certify(agent, record)
        else:
            self.offer(hello.backend)

    def take(self, peer: Peer) -> None:
        """A message of its. Raises what control.receive raises."""
        agent = self._by_peer[peer.number]
        message, fds = control.receive(
            peer.sock,
            messages.Pong,
            messages.Probed,
            messages.CompiledHere,
            messages.WorkerStarted,
            messages.WorkerEnded,
        )
        try:
            if agent.is_silent:
                log("agent.answers", backend=agent.backend, agent=peer.number)
            agent.is_silent, agent.asked_s = False, math.inf
            if isinstance(message, messages.Probed):
                self._probed(agent, message, fds)
            elif isinstance(message, messages.CompiledHere):
                self._compiled(agent, message)
            elif isinstance(message, messages.WorkerStarted):
                remote = self._remote(agent, message.generation)
                remote.pid = message.pid
                self._handle(ev.WorkerSpawned(remote.backend, remote.generation, message.pid))
            elif isinstance(message, messages.WorkerEnded):
                remote = self._remote(agent, message.generation)
                remote.code, remote.stderr_tail = message.code, message.stderr_tail[-4096:]
                remote.oom = message.oom[:4096]
                self._settle(remote)
        finally:
            unwanted.close_all(fds)
        self.offer(agent.backend)

    def part(self, peer: Peer) -> None:
        """Its connection has closed: it has ended, and its worker has, or is about to."""
        agent = self._by_peer.pop(peer.number, None)
        if agent is None:
            return  # it left before it was told that it is welcome
        self._agents[agent.backend].remove(agent)
        log("agent.parted", backend=agent.backend, agent=peer.number)
        remote = agent.worker
        if remote is not None:
            remote.has_agent = False
            if not self._settle_if_ended(remote):
                self._await_end(remote)
        self.offer(agent.backend)

    def records(self, backend: str) -> list[ProbeRecord]:
        """What the probes of its agents that may serve have shown."""
        return [agent.record for agent in self._agents.get(backend, ()) if agent.is_usable and agent.record]

    def facts(self, backend: str) -> dict[str, object]:
        """For `lz status`."""
        if backend not in self.names:
            return {}
        agents = [
            {
                "number": agent.peer.number,
                "env": agent.env,
                "state": agent.state,
                "serves": agent.worker is not None,
            }
            for agent in self._agents.get(backend, ())
        ]
        return {"agents": agents}

    def close(self) -> None:
        """Nothing is killed here: agents do that when their connections close."""
        for remote in self._live.values():
            remote.reap()
        self._live.clear()

    # --- workers: what the core asks for

    def get(self, key: tuple[str, int]) -> RemoteWorker | None:
        return self._live.get(key)

    def workers(self) -> list[RemoteWorker]:
        return list(self._live.values())

    def start(self, backend: str, generation: int, failpoints: str) -> None:
        """Have a worker started by the agent that has started the fewest."""
        idle = [agent for agent in self._agents.get(backend, ()) if agent.is_usable and agent.worker is None]
        if not idle:
            rejection = self._vacancy(backend)
            error = EnvError(rejection.detail, env=backend, repair=joining.command(backend))
            self._handle(ev.SpawnFailed(backend, generation, error, vacancy=rejection))
            return
        agent = min(idle, key=lambda one: one.starts)
        agent.starts += 1
        assert agent.record is not None
        try:
            page_fd = memory.create_memfd("page", memory.PAGE_BYTES)
        except OSError as exc:
            error = EnvError(f"cannot start the worker: {exc}", env=backend)
            self._handle(ev.SpawnFailed(backend, generation, error))
            return
        page = memory.ControlPage(page_fd, writable=False)
        remote = RemoteWorker(backend, generation, agent, secrets.token_bytes(16), page_fd, page)
        agent.worker = self._live[backend, generation] = remote
        self._on_start(backend, agent.env, agent.record)
        start = messages.StartWorker(generation=generation, ticket=remote.ticket, failpoints=failpoints)
        self._tell(agent, start)

    def compile(self, action: act.Compile) -> None:
        """Have a kernel compiled where the worker is, or will be."""
        self._compiling[action.backend] = action
        self._start_compiling(action.backend)

    def _start_compiling(self, backend: str) -> None:
        action, agents = self._compiling.get(backend), self._agents.get(backend, ())
        usable = [agent for agent in agents if agent.is_usable]
        if action is None or not usable or any(agent.compiles for agent in agents):
            return
        agent = next((one for one in usable if one.worker is not None), usable[0])
        agent.compiles = True
        self._tell(agent, messages.CompileHere(call=action.body, timeout_s=self._settings.compile_timeout_s))

    def _compiled(self, agent: Agent, message: messages.CompiledHere) -> None:
        if not agent.compiles:
            raise ProtocolError("an agent speaks of a compilation that it was not asked for")
        agent.compiles = False
        action = self._compiling.pop(agent.backend)
        code = None if message.is_late else message.code
        ended = Ended(code, b"", message.stderr_tail.encode())
        why = compilation.failure_of(ended, self._settings.compile_timeout_s)
        self._handle(ev.CompileEnded(action.backend, action.unit, why, message.seconds))

    def kill(self, remote: RemoteWorker) -> None:
        """Have it killed. Its end is confirmed by its agent, or by the end of both connections."""
        if not remote.is_being_killed:
            remote.is_being_killed = True
            now_s = time.monotonic()
            remote.give_up_s = now_s if remote.agent.is_silent else now_s + CONFIRM_S
            self._tell(remote.agent, messages.KillWorker(generation=remote.generation))
            self._note_change()

    def hung_up(self, remote: RemoteWorker) -> None:
        """The worker's own connection has closed. Its agent is about to say how it ended."""
        if not self._settle_if_ended(remote):
            self._tell(remote.agent, messages.KillWorker(generation=remote.generation))
            self._await_end(remote)

    # --- time

    @property
    def due_s(self) -> float:
        """When `look` is due."""
        due = [min(agent.next_ping_s, self._answer_due_s(agent)) for agent in self._by_peer.values()]
        return min([*due, *(remote.give_up_s for remote in self._live.values())], default=math.inf)

    def look(self, now_s: float) -> None:
        """Ping agents, find those that do not answer, and workers whose end nobody confirms."""
        stalled_s = now_s - self._looked_s - PING_S
        if stalled_s > STALL_S:  # this process stood still, and their answers may be here
            for agent in self._by_peer.values():
                agent.asked_s += stalled_s
            for remote in self._live.values():
                remote.give_up_s += stalled_s
        self._looked_s = now_s
        for agent in list(self._by_peer.values()):
            if now_s >= self._answer_due_s(agent) and not agent.is_silent:
                self._silence(agent)
            if now_s >= agent.next_ping_s:
                agent.next_ping_s = now_s + PING_S
                if agent.asked_s == math.inf:
                    agent.asked_s = now_s
                    self._tell(agent, messages.Ping(number=agent.starts))
        for remote in list(self._live.values()):
            if now_s >= remote.give_up_s:
                remote.give_up_s = math.inf
                self._give_up(remote)

    def _answer_due_s(self, agent: Agent) -> float:
        return math.inf if agent.is_silent else agent.asked_s + self._settings.joined_silence_s

    def _silence(self, agent: Agent) -> None:
        agent.is_silent = True
        silence_s = self._settings.joined_silence_s
        log("agent.silent", backend=agent.backend, agent=agent.peer.number, silence_s=silence_s)
        remote = agent.worker
        if remote is not None:
            text = f"its agent has not answered for {silence_s:g} s; is its container paused?"
            self._handle(ev.WorkerMisbehaved(remote.backend, remote.generation, text, is_silent=True))
        self.offer(agent.backend)

    def _give_up(self, remote: RemoteWorker) -> None:
        if not remote.is_being_killed:
            text = "its connection has closed, and its agent does not say that it has ended"
            if not remote.has_agent:
                text = "its agent has ended, and it has not"
            self._handle(ev.WorkerMisbehaved(remote.backend, remote.generation, text, is_silent=True))
            return
        remote.was_given_up = True
        log("worker.unreachable", backend=remote.backend, generation=remote.generation)
        self._handle(ev.WorkerLost(remote.backend, remote.generation))

    # --- inner parts

    @staticmethod
    def _remote(agent: Agent, generation: int) -> RemoteWorker:
        if agent.worker is None or agent.worker.generation != generation:
            raise ProtocolError(f"an agent speaks of worker {generation}, which it was not told to start")
        return agent.worker

    def _await_end(self, remote: RemoteWorker) -> None:
        """One of the two connections has closed, so the other is about to."""
        if remote.give_up_s == math.inf and not remote.was_given_up:
            remote.give_up_s = time.monotonic() + CONFIRM_S
            self._note_change()

    def _settle_if_ended(self, remote: RemoteWorker) -> bool:
        """Whether no connection of it or its agent is left. A worker that has not said hello never will: its ticket is
        void from now on, and it has got no memory."""
        if remote.has_agent or self._is_linked(remote.backend, remote.generation):
            return False
        self._settle(remote)
        return True

    def _settle(self, remote: RemoteWorker) -> None:
        """Its end is confirmed."""
        del self._live[remote.backend, remote.generation]
        remote.agent.worker = None
        self._on_end(remote)

    def _probed(self, agent: Agent, message: messages.Probed, fds: list[int]) -> None:
        if agent.record is not None or len(fds) != 1:
            raise ProtocolError("probed comes once, with what the probe wrote")
        info = os.fstat(fds[0])
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_VERDICT_BYTES:
            raise ProtocolError(f"a verdict of {info.st_size} bytes; allowed: a memfd of {MAX_VERDICT_BYTES}")
        out = os.pread(fds[0], MAX_VERDICT_BYTES, 0)
        ended = Ended(None if message.is_late else message.code, out, message.stderr_tail.encode())
        timeout_s = self._settings.start_timeout_s
        repair = joining.command(agent.backend)
        record = probe.judge(ended, agent.backend, agent.key, message.seconds, timeout_s, lambda *_: repair)
        profile = self._launcher.profile
        if profile.hash:
            record = replace(record, profile=profile.name)
        if record.ok and agent.env:
            try:
                probe.keep_record(self._record_path(agent.backend, agent.key, profile), record)
            except OSError as exc:  # it serves all the same, and is probed again when it comes again
                log("probe.not_kept", backend=agent.backend, store=str(self._settings.store), error=str(exc))
        self._certify(agent, record)

    def _certify(self, agent: Agent, record: ProbeRecord) -> None:
        agent.record = record
        certified, failed = record.counts
        facts = {"backend": agent.backend, "agent": agent.peer.number, "certified": certified, "failed": failed}
        log("agent.certified" if record.ok else "agent.not_certified", **facts, cause=record.message)
        self.offer(agent.backend)

    def offer(self, backend: str) -> None:
        """Tell the core whether a worker of this backend can be started, should it have none."""
        can_start = any(agent.is_usable and agent.worker is None for agent in self._agents.get(backend, ()))
        self._handle(ev.BackendOffered(backend, None if can_start else self._vacancy(backend)))
        self._start_compiling(backend)

    def _vacancy(self, backend: str) -> Rejection:
        """Why no worker can be started now."""
        agents = self._agents.get(backend, [])
        failed = [agent.record for agent in agents if agent.record is not None and not agent.record.ok]
        if failed:
            text = f"the probe of a joined worker failed ({failed[0].kind}): {failed[0].message}"
            return Rejection(Reason.BACKEND_IMPORT_FAILED, text, failed[0].repair)
        if any(agent.is_silent for agent in agents):
            return Rejection(Reason.NOT_JOINED, "its joined worker does not answer", "unpause or restart its container")
        if agents:
            return Rejection(
                Reason.NOT_JOINED, "its joined worker is being probed", "wait; lz logs shows the end of it"
            )
        return self._launcher.absence(backend)

    def _kept_record(self, backend: str, key: str) -> ProbeRecord | None:
        """One on all calls is one on those of the profile, too."""
        of_all = probe.cached_record(self._record_path(backend, key))
        return of_all or probe.cached_record(self._record_path(backend, key, self._launcher.profile))

    def _record_path(self, backend: str, key: str, profile: Profile = ALL) -> Path:
        of_profile = f"{probe.OF_PROFILE}{profile.hash}" if profile.hash else ""
        return self._settings.store / "probes" / f"{backend}-{key}{of_profile}.json"

    def _tell(self, agent: Agent, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        """One that has ended is seen by the end of its connection; one that does not read is cut off, which kills its
        worker once it reads again."""
        try:
            control.send(agent.peer.sock, message, fds)
        except (control.Closed, OSError):
            with suppress(OSError):
                agent.peer.sock.shutdown(socket.SHUT_RDWR)


def _certificate_key(hello: messages.Hello, manifest: EnvManifest) -> str:
    """What a joined worker's certificate depends on. One without a record of its environment is probed each time."""
    env = hello.env or secrets.token_hex(16)
    digest = hashlib.sha256(f"joined\0{env}\0{hello.source}\0".encode())
    digest.update(repr(sorted(manifest.env.items())).encode())
    digest.update(hashlib.sha256(manifest.descriptor_path.read_bytes()).digest())
    digest.update(manifest.provider_target.encode())
    return digest.hexdigest()[:16]
