"""Workers of functions: those that nobody has called for long are ended, and start when they are needed again; some are
reserved for one object of a client. Those of any kind end where a GPU's memory budget asks for it (gpu_budget.py)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core import events as ev
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.processes.gpu_budget import GpuBudget
from layerzero.broker.processes.registry import Processes
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION

MAX_RESERVED = 256  # of an environment
FREED_S = 0.05  # between looks at a worker whose object is gone
FIRST_RESERVED = 1001  # numbers below are those of pools


class Reservation(NamedTuple):
    """Who has a worker: a client, by identity. `token` tells it from later ones."""

    identity: bytes
    token: int


class FunctionWorkers:
    """For the broker's own thread. `handle` takes what the core must hear; `poll_lanes` reads what lanes have told."""

    def __init__(
        self,
        settings: Settings,
        state: BrokerState,
        processes: Processes,
        handle: Callable[[ev.Event], None],
        poll_lanes: Callable[[], None],
    ) -> None:
        self._state, self._handle, self._poll_lanes = state, handle, poll_lanes
        self._is_free, self._processes = processes.is_free, processes
        self._reserved: dict[str, Reservation] = {}  # by backend
        self._tokens = itertools.count(1)
        self._freed: set[str] = set()  # whose objects are gone, and that were not seen free since
        self._renewed: dict[str, int] = {}  # generations whose interpreters were built in another state since
        self._rest_s = settings.functions_rest_s or math.inf
        self._uses: dict[str, tuple[tuple[int, int, int], float]] = {}  # and since when they are the same
        self._budget = GpuBudget(settings.gpu_budget_mib << 20, state, processes.is_free, handle)
        self._due_s = math.inf

    @property
    def due_s(self) -> float:
        """When to look next."""
        is_awaited = bool(self._state.lifecycle.succession.successors)
        return min(self._due_s, time.monotonic() + FREED_S if is_awaited else math.inf)

    def look(self, now_s: float) -> None:
        """End what was not called for long. A worker that keeps something for a client, an object for one, stays."""
        self._due_s = math.inf
        self._free_abandoned()
        self._look_at_kept()
        self._budget.look(now_s)
        if self._rest_s == math.inf and not self._freed and not self._renewed:
            return
        self._poll_lanes()
        for backend, worker in self._state.workers.items():
            if worker.state is not WorkerState.READY or worker.is_joined or FUNCTION not in self._ops(backend):
                self._uses.pop(backend, None)
                continue
            is_renewed = self._renewed.get(backend) == worker.generation
            if (backend in self._freed or is_renewed) and self._is_free(backend, worker.generation):
                self._rest(backend)
                if is_renewed:  # it may have been in a call
                    self._due_s = min(self._due_s, now_s + FREED_S)
                continue
            uses = (worker.generation, worker.answered, worker.failed)
            before, since_s = self._uses.get(backend, (None, now_s))
            if uses != before or not self._is_free(backend, worker.generation):
                since_s = now_s
                self._uses[backend] = (uses, now_s)
            elif now_s - since_s >= self._rest_s:
                self._handle(ev.WorkerSpared(backend))
            rest_s = FREED_S if backend in self._freed or is_renewed else max(since_s + self._rest_s - now_s, 1.0)
            self._due_s = min(self._due_s, now_s + rest_s)

    def _look_at_kept(self) -> None:
        """Others wait to take over from these."""
        awaited = self._state.replacements.awaited
        if not awaited:
            return
        kept, busy = set(), set()
        for worker in awaited:
            process = self._processes.get((worker.backend, worker.generation))
            if process is not None and process.page.read_kept():
                kept.add(worker.backend)
            if process is not None and process.page.read()[0]:
                busy.add(worker.backend)
        self._handle(ev.KeptPolled(frozenset(kept), frozenset(busy)))

    def reserve(self, environment: str, identity: bytes) -> tuple[str, int]:
        """A worker of an environment that no other object has, for a client; its name, and a token to free it with.
        Raises InvalidArgument."""
        self._free_abandoned()
        for number in range(FIRST_RESERVED, FIRST_RESERVED + MAX_RESERVED):
            backend = pools.member(environment, number)
            if backend not in self._reserved:
                token = next(self._tokens)
                self._freed.discard(backend)
                self._reserved[backend] = Reservation(identity, token)
                return backend, token
        text = f"{MAX_RESERVED} objects have processes of their own in {environment}, the most that it may have"
        raise InvalidArgument(f'{text}; close() some, or let them share: process="pool"')

    def renew(self, backend: str) -> None:
        """What its worker has imported is no more what it would import: it ends as soon as it has nothing to do and
        keeps nothing for anybody. The next call starts another."""
        worker = self._state.workers[backend]
        if worker.state is WorkerState.READY:
            self._renewed[backend] = worker.generation
            self._due_s = 0.0

    def free(self, backend: str, token: int) -> None:
        """Its object is gone: the worker ends. Nothing where another object has it by now."""
        if backend in self._reserved and self._reserved[backend].token == token:
            del self._reserved[backend]
            worker = self._state.workers.get(backend)
            if worker is None or worker.state not in (WorkerState.PROBING, WorkerState.STARTING, WorkerState.READY):
                return
            if worker.state is WorkerState.READY and self._is_free(backend, worker.generation):
                self._rest(backend)
            else:  # it is about to say so
                self._freed.add(backend)

    def _free_abandoned(self) -> None:
        """What clients had that have left."""
        for backend, its in list(self._reserved.items()):
            if its.identity not in self._state.clients:
                self.free(backend, its.token)

    def _rest(self, backend: str) -> None:
        """Of one that nobody has: lanes to it are taken back first."""
        self._freed.discard(backend)
        self._handle(ev.WorkerSpared(backend))
        self._handle(ev.WorkerSpared(backend))

    def _ops(self, backend: str) -> frozenset[str]:
        return frozenset(self._state.capabilities[backend].ops)
