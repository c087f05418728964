"""The simulator's worlds in which some workers have joined: they come when they like, leave with their containers, and
stand still while their containers are paused, with calls that they go on with when they are resumed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.clients import BUSY_S, Client
from tests.simulation.coverage import Coverage, Violation
from tests.simulation.model import Call, Channel
from tests.simulation.worker_actions import STOP_GRACE_S
from tests.simulation.workers import Process
from tests.simulation.world import World

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import EnvError, LayerZeroError

SILENCE_S = 0.4  # so long an agent may not answer
CONFIRM_S = 0.1  # so long the end of a worker that is killed may take
JOINED_FATES = ("anew", "departed", "late_end", "lost", "paused", "released")
VACANCY = Rejection(Reason.NOT_JOINED, "no worker has joined")


class JoinedProcess(Process):
    """A worker and its agent, in one container. While they are paused nothing of them happens, nor is a kill seen."""

    is_paused = False
    is_departing = False  # its container has ended with it

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._put_off: list[Callable[[], None]] = []
        self._kills: list[int] = []

    def _when_awake(self, do: Callable[..., None], *args: Any) -> bool:
        if self.is_paused and self.is_alive:
            self._put_off.append(functools.partial(do, *args))
            return False
        return True

    def load(self) -> None:
        if self._when_awake(self.load):
            super().load()

    def pump(self) -> None:
        if not self.is_paused:
            super().pump()

    def _end(self, dispatch: Any, fate: str) -> None:
        if self._when_awake(self._end, dispatch, fate):
            if self.is_given_up and self.is_alive:
                self.world.coverage.fates["joined_late_end"] += 1
            super()._end(dispatch, fate)

    def die(self, exit_code: int) -> None:
        if self.is_paused:
            self._kills.append(exit_code)
        else:
            super().die(exit_code)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """It goes on where it was; its agent finds the order to kill it somewhat later."""
        self.is_paused = False
        for do in self._put_off:
            do()
        self._put_off.clear()
        self.pump()
        for code in self._kills:
            self.world.push(self.world.now_s + self.world.delay_s(), self.die, code)
        self._kills.clear()


@dataclass(eq=False)
class JoinedClient(Client):
    """Memory that a lost worker may write to is not used again before it is released."""

    lent: dict[int, tuple[int, int]] = field(default_factory=dict)

    def _end(self, call: Call) -> None:
        super()._end(call)
        if call.is_lent:
            self.free.remove(call.slot)
            self.lent[call.seq] = call.slot

    def refused(self, call: Call, error: LayerZeroError) -> None:
        super().refused(call, error)
        if error.code == "UNREACHABLE" and not self.has_hung_up and call.route in self.routes:
            self._execute(call.route)  # with other memory

    def _retire(self) -> None:
        """Not an arena that a lost worker may write to."""
        used = {arena for arena, _ in self.lent.values()}
        arenas, self.arenas = self.arenas, [arena for arena in self.arenas if arena not in used]
        try:
            super()._retire()
        finally:
            self.arenas += [arena for arena in arenas if arena in used]

    def released(self, seq: int) -> None:
        self.world.require(seq in self.lent, "memory is released that was not lent")
        self.world.coverage.fates["joined_released"] += 1
        self.free.append(self.lent.pop(seq))


class JoinedWorld(World):
    may_have_gpu = False

    def __init__(self, seed: int, state_class: Callable[..., BrokerState] = BrokerState) -> None:
        self.chance = chance = random.Random(seed + 4)
        self.joined = frozenset(name for name in ("alpha", "beta", "gamma") if chance.random() < 0.6) or {"alpha"}
        super().__init__(seed, functools.partial(state_class, joined=self.joined))
        self.compiles = False
        self._idle = dict.fromkeys(self.joined, 0)  # agents that could start a worker
        for backend in sorted(self.joined):  # one seed, one schedule
            self.state.lifecycle.set_unavailable(backend, VACANCY)
            for _ in range(chance.choice((1, 1, 2))):
                self.push(chance.uniform(0.0, 2.0), self._agent_joins, backend)
        for _ in range(chance.choice((1, 2, 4, 8))):
            self.push(chance.uniform(1.0, BUSY_S), self._pause_one)

    def _new_client(self, number: int) -> Client:
        return JoinedClient(self, number, b"C%d" % number, Channel(self), Channel(self), Channel(self))

    def _new_process(self, backend: str, generation: int, pid: int) -> Process:
        make = JoinedProcess if backend in self.joined else Process
        return make(self, backend, generation, pid)

    def run(self) -> Coverage:
        coverage = super().run()
        for client in self.clients.values():
            assert isinstance(client, JoinedClient)
            self.require(not client.lent or client.has_hung_up, f"memory {client.lent} is never released")
        return coverage

    # --- agents and containers

    def _agent_joins(self, backend: str) -> None:
        self._idle[backend] += 1
        self._offer(backend)

    def _offer(self, backend: str) -> None:
        worker = self.state.workers[backend]
        if self._idle[backend] and worker.state is WorkerState.DISABLED and worker.is_vacant:
            self._is_broken.pop(backend, None)
            self._restart_from_s.pop(backend, None)
            self._times_disabled[backend] = 0
            self._times_disabled[backend] = 0
            self.coverage.fates["joined_anew"] += 1
        self._deliver(ev.BackendOffered(backend, None if self._idle[backend] else VACANCY))

    def _pause_one(self) -> None:
        running = [
            p for p in self.processes.values() if isinstance(p, JoinedProcess) and p.is_alive and not p.is_paused
        ]
        if not running or self.is_calm:
            return
        busy = [process for process in running if process.page[0]]
        process = self.chance.choice(busy or running)
        process.pause()
        self.coverage.fates["joined_paused"] += 1
        self.push(self.now_s + SILENCE_S, self._silent, process)
        self.push(self.now_s + self.chance.choice((0.1, 0.6, 3.0)), process.resume)

    def _silent(self, process: JoinedProcess) -> None:
        if process.is_paused and not process.is_over:
            text = "its agent does not answer"
            self._deliver(ev.WorkerMisbehaved(process.backend, process.generation, text, is_silent=True))

    def _give_up(self, process: Process) -> None:
        """Its end was not confirmed in time."""
        if process.is_over or not isinstance(process, JoinedProcess):
            return
        backend = process.backend
        process.is_given_up = True
        process.kill_reason = process.kill_reason or "lost"
        self.coverage.fates["joined_lost"] += 1
        for dispatch in process.sent:
            dispatch.is_over = True  # for the broker
            dispatch.call.fail_on(backend, "lost")
            dispatch.call.is_lent = not dispatch.call.client.has_left
        process.sent.clear()
        self._restart_from_s.pop(backend, None)
        self._deliver(ev.WorkerLost(backend, process.generation))
        self._offer(backend)

    def exited(self, process: Process, exit_code: int, page: tuple[int, str]) -> None:
        if process.is_given_up:
            process.is_confirmed_dead = True
            self._deliver(ev.WorkerGone(process.backend, process.generation))
        else:
            if isinstance(process, JoinedProcess):
                process.is_departing = not process.kill_reason and self.chance.random() < 0.5
            super().exited(process, exit_code, page)
        if isinstance(process, JoinedProcess):
            if process.is_departing:
                self.push(self.now_s + self.chance.uniform(0.1, 2.0), self._agent_joins, process.backend)
                self._offer(process.backend)
            else:
                self._agent_joins(process.backend)

    def _count_exit(self, process: Process, exit_code: int) -> None:
        if isinstance(process, JoinedProcess) and process.is_departing:
            self._restart_from_s.pop(process.backend, None)
            self.coverage.fates["joined_departed"] += 1
        else:
            super()._count_exit(process, exit_code)

    def _exit_event(
        self, process: Process, exit_code: int, page: tuple[int, str], page_poller: Mapping[int, ev.RingSnapshot]
    ) -> ev.WorkerExited:
        event = super()._exit_event(process, exit_code, page, page_poller)
        return replace(event, is_departure=isinstance(process, JoinedProcess) and process.is_departing)

    # --- actions

    def _probe(self, action: act.Probe) -> None:
        if action.backend in self.joined:
            self.push(self.now_s, self._probed, action.backend, False)
        else:
            super()._probe(action)

    def _spawn(self, action: act.Spawn) -> None:
        backend = action.backend
        if backend not in self.joined:
            super()._spawn(action)
        elif self._idle[backend]:
            p_spawn_fails, self._p_spawn_fails = self._p_spawn_fails, 0.0
            self._idle[backend] -= 1
            super()._spawn(action)
            self._p_spawn_fails = p_spawn_fails
        else:
            self._is_broken[backend] = "vacant"
            error = EnvError(VACANCY.detail, env=backend)
            self._handle(ev.SpawnFailed(backend, action.generation, error, vacancy=VACANCY))

    def _kill(self, action: act.Kill) -> None:
        super()._kill(action)
        process = self.processes[action.backend, action.generation]
        self.push(self.now_s + CONFIRM_S, self._give_up, process)

    def _stop(self, action: act.StopWorker) -> None:
        super()._stop(action)
        process = self.processes[action.backend, action.generation]
        self.push(self.now_s + STOP_GRACE_S + CONFIRM_S, self._give_up, process)

    def _reset(self, backend: str) -> None:
        super()._reset(backend)
        if backend in self.joined:
            self._offer(backend)

    def _forget(self, backend: str, rng: random.Random) -> Rejection | None:
        if backend not in self.joined:
            return super()._forget(backend, rng)
        self._times_disabled[backend] = 0
        self._times_disabled[backend] = 0
        if self.state.workers[backend].state in (WorkerState.DISABLED, WorkerState.BACKOFF, WorkerState.ABSENT):
            self._is_broken.pop(backend, None)
            self._restart_from_s.pop(backend, None)
            self._crashes[backend].clear()
        return None

    def _refuse(self, action: act.Refuse) -> None:
        call = self.clients[action.identity].open.get(action.seq)
        if call is not None:
            self.require(action.is_lent == call.is_lent, f"is_lent is {action.is_lent}, which is not true")
        super()._refuse(action)

    def _release_call(self, action: act.ReleaseCall) -> None:
        client = self.clients[action.identity]
        assert isinstance(client, JoinedClient)
        if not client.has_left:
            client.inbound.send(client.released, action.seq)


def run(seed: int, state_class: Callable[..., BrokerState] = BrokerState) -> Coverage:
    """One schedule from start to end. Raises Violation, or whatever the core raises, with the seed in its notes."""
    world = JoinedWorld(seed, state_class)
    try:
        return world.run()
    except Violation:
        raise
    except Exception as exc:
        exc.add_note(f"seed {seed} at {world.now_s:.4f} s, after {world._event}")
        raise
