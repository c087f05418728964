"""Execution plans on simulated workers: the client's real plan, layout and segments; lanes, workers and broker are
modelled, on one thread. `run(seed)` makes a program at random, serves its steps by up to three workers, and lets each
chain run, be declined, raise or lose its worker at any step, also while it is made ready, and the broker go at any
moment. Steps of chains that are under way at the same time interleave at random. Raises Violation, with the seed, where

- a result is not what the function gives, bit by bit: so no step reads what is not there yet, or was written over;
- a step that has ended is run again, or one is left out;
- what a dead worker leaves half-written is read;
- a chain that did not end well is brought to the broker another number of times than once;
- a lane is left with a chain on it that nobody waits for, or two are put on one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.simulation.coverage import Violation

from layerzero.client.connection.call import Request
from layerzero.client.connection.counters import Counters
from layerzero.client.connection.express import Lease, Lost, Ran, Stopped
from layerzero.client.plans.frozen import FrozenPlan
from layerzero.client.plans.preparing import prepare
from layerzero.client.plans.recording import record
from layerzero.client.session.session import Session
from layerzero.ipc.errors import BackendError, BrokerLost, LayerZeroError
from layerzero.ipc.transport.chains import digest_of, pack_times, resolve, unpack_chain_call, unpack_table
from layerzero.ipc.transport.wire import REF_BYTES, unpack_refs
from layerzero.ipc.vocabulary.tensors import TensorSpec

N, RUNS, WORKERS = 4, 12, ("alpha", "beta", "gamma")
FATES = ("ran", "declined", "raised", "died", "died_before", "broker_lost", "at_once", "no_lease")
KERNELS: dict[str, Callable[..., Any]] = {
    "silu": lambda a: a / (1 + np.abs(a)),
    "matmul": lambda a, b: a @ b / N,
    "add": np.add,  # which a pass makes of own code
}


class SimulatedSession:
    """As much of a Session as plans use. Its calls always end well; lanes are where things happen."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.link = rng, SimpleNamespace(counters=Counters(None))
        self.shadow, self.last = SimpleNamespace(is_on=False), SimpleNamespace(record=None)
        self.routes = self.lanes = self.arena_registry = self
        self.arenas: list[Any] = []
        self.plans: list[tuple[str, list[TensorSpec]]] = [("", [])]
        self.workers: dict[str, Worker] = {}
        self.is_troubled = False
        self.is_lost = False
        self.fates, self.ended, self.brought, self.stopped = Counter[str](), 0, 0, 0

    def __getitem__(self, arena: Any) -> int:
        if not any(one is arena for one in self.arenas):
            self.arenas.append(arena)
        return next(number for number, one in enumerate(self.arenas) if one is arena)

    # --- calls

    def run(self, request: Request) -> Any:
        if self.is_lost:
            raise BrokerLost("the broker is gone")
        self.ended += 1
        decision = SimpleNamespace(kernel_id=f"{request.backend}.{request.op}", backend=request.backend, lane="express")
        self.last.record = (None, (), 0, 0, 1000, (), decision, (), "")
        return KERNELS[request.op](*request.args)

    @property
    def last_record(self) -> Any:
        return self.last.record

    def leave_lane(self, request: Request, start_ns: int, lane: Worker, lease: Lease, end: Any) -> Request:
        self.brought += 1
        return request

    def wait(self, left: Request) -> Any:
        return self.run(left)

    # --- routes, lanes

    def find(self, link: object, request: Request, specs: Any, out: None, policy: object) -> Any:
        backend = request.backend or WORKERS[0]
        return SimpleNamespace(here=None, op=request.op, specs=list(specs), backend=backend, plan=None)

    def of(self, route: Any) -> tuple[Worker, Lease] | None:
        if self.is_troubled and self.rng.random() < 0.02:
            self.fates["no_lease"] += 1
            return None
        worker = self.workers.get(route.backend)
        if worker is None or worker.is_ended:
            worker = self.workers[route.backend] = Worker(self, route.backend)
        self.plans.append((route.op, route.specs))
        decision: Any = SimpleNamespace(kernel_id=f"{route.backend}.{route.op}", backend=route.backend, lane="express")
        return worker, Lease(1, len(self.plans) - 1, worker.epoch, decision, len(self.plans))

    # --- what runs meanwhile

    def advance(self) -> bool:
        """A step of some chain; False when nothing is under way."""
        busy = [worker for worker in self.workers.values() if worker.steps is not None]
        if busy:
            worker = self.rng.choice(busy)
            assert worker.steps is not None
            if next(worker.steps, self) is self:
                worker.steps = None
        return bool(busy)

    def arrays_of(self, plan: int, body: bytes) -> list[Any]:
        _, specs = self.plans[plan]
        refs = unpack_refs(body, len(body) // REF_BYTES)
        known = [*specs, TensorSpec.contiguous(specs[0].dtype, specs[0].shape)]
        found = []
        for ref, spec in zip(refs, known, strict=True):
            memory = self.arenas[ref.arena].view[ref.offset : ref.offset + ref.nbytes]
            strides = [stride * spec.itemsize for stride in spec.strides]
            found.append(np.ndarray(spec.shape, spec.dtype, memory, strides=strides))
        return found


class Worker:
    """A worker and the client's lane to it."""

    def __init__(self, session: SimulatedSession, name: str) -> None:
        self.session, self.name, self.epoch, self.default_s = session, name, session.rng.randrange(2, 10**6), 30.0
        self.is_ended = False
        self.holder: object = None
        self.steps: Iterator[None] | None = None
        self.end: Ran | Stopped | None = None

    def holds(self, lease: Lease) -> bool:
        return lease.epoch == self.epoch and not self.is_ended

    def run_chain(self, lease: Lease, body: bytes, timeout_s: float, hold: Any, expected_ns: int) -> Any:
        holder = object()
        try:
            receipt = self.begin_chain(holder, lease, body, timeout_s, hold)
            return None if receipt is None else self.end_chain(receipt, lease, timeout_s, expected_ns)
        finally:
            self.let_go(holder)

    def begin_chain(self, holder: object, lease: Lease, body: bytes, timeout_s: float, hold: Any) -> object | None:
        session, rng = self.session, self.session.rng
        if self.holder is not None or self.steps is not None:
            raise Violation("a lane has two chains")
        if session.is_troubled and rng.random() < 0.01:
            self._lose_broker()
        self.holder, self.steps = holder, self._serve(body)
        for _ in range(rng.randrange(4)):
            session.advance()
        return self

    def end_chain(self, receipt: object, lease: Lease, timeout_s: float, expected_ns: int) -> Ran | Stopped | None:
        while self.steps is not None:
            self.session.advance()
            if self.session.is_troubled and self.session.rng.random() < 0.003:
                self._lose_broker()
        return self.end

    def give_up(self, receipt: object) -> None:
        self.steps = None

    def let_go(self, holder: object) -> None:
        if self.holder is holder:
            self.holder = None

    def _lose_broker(self) -> None:
        self.session.is_lost = True
        self.session.fates["broker_lost"] += 1
        raise BrokerLost("the broker is gone")

    def _serve(self, body: bytes) -> Iterator[None]:
        session, rng = self.session, self.session.rng
        chain = unpack_chain_call(body)
        table = bytes(session.arenas[chain.table.arena].view[chain.table.offset :][: chain.table.nbytes])
        if digest_of(table) != chain.digest:
            raise Violation("a chain's table is another one than its digest says")
        steps = unpack_table(table)
        session.fates["at_once"] += sum(one.steps is not None for one in session.workers.values()) > 1
        fate = rng.choices(FATES[:5], [80, 5, 5, 5, 5])[0] if session.is_troubled else "ran"
        session.fates[fate] += 1
        at, self.end = rng.randrange(len(steps)), None
        if fate == "declined":
            return
        if fate == "died_before":
            self._die(at, has_run=False)
            return
        for number, step in enumerate(steps):
            yield
            *inputs, target = session.arrays_of(step.plan, resolve(step, chain.variables))
            if number == at and fate in ("died", "raised"):
                target[...] = np.nan  # half-written
                if fate == "died":
                    self._die(at, has_run=True)
                else:
                    session.stopped += 1
                    self.end = Stopped(at, True, BackendError("it raised"))
                return
            target[...] = KERNELS[session.plans[step.plan][0]](*inputs)
            session.ended += 1
        self.end = Ran(1, 1000 * len(steps), pack_times([1000] * len(steps)))

    def _die(self, at: int, *, has_run: bool) -> None:
        self.is_ended = True
        self.session.stopped += 1
        self.end = Stopped(at, has_run, Lost(1))


def _program(rng: random.Random) -> Callable[..., Any]:
    steps, owned = [], [False, False]  # owned: not memory of the caller's
    for number in range(rng.randint(3, 24)):
        kind = rng.choices(["silu", "matmul", "own", "sum", "in place", "turn"], [10, 8, 2, 1, 2, 2])[0]
        a, b = rng.randrange(number + 2), rng.randrange(number + 2)
        if kind == "in place" and not owned[a]:
            kind = "sum"
        owned.append(owned[a] if kind == "turn" else True)
        steps.append((kind, a, b, rng.choice(WORKERS)))
    outputs = [rng.randrange(2, len(steps) + 2) for _ in range(rng.randint(1, 3))]

    def function(ask: Callable[[str, str, tuple[Any, ...]], Any], x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, a, b, worker in steps:
            if kind in KERNELS:
                args = (values[a],) if kind == "silu" else (values[a], values[b])
                values.append(ask(kind, worker, args))
            elif kind == "in place":
                value = values[a]
                value += values[b]
                values.append(value)
            elif kind == "turn":
                values.append(values[a].T)
            else:
                values.append(np.subtract(values[a], values[b]) if kind == "own" else np.add(values[a], values[b]))
        return [values[number] + 0 for number in outputs]

    return function


def run(seed: int) -> Counter[str]:
    """What became of its chains. Raises Violation."""
    rng = random.Random(seed)
    session = SimulatedSession(rng)
    function = _program(rng)
    try:
        _run(session, function, np.random.default_rng(seed))
    except Violation as exc:
        raise Violation(f"seed {seed}: {exc}") from None
    return session.fates


def _run(session: SimulatedSession, function: Callable[..., Any], numbers: np.random.Generator) -> None:
    from layerzero.client.facade.running import perform

    def planner(*specs: TensorSpec) -> Any:
        raise AssertionError("simulated routes need no plan")

    def by_lz(op: str, backend: str, args: tuple[Any, ...]) -> Any:
        return perform(Request(op, args, {}, planner, backend=backend))

    def plainly(op: str, backend: str, args: tuple[Any, ...]) -> Any:
        return KERNELS[op](*args)

    def arrays() -> list[Any]:
        return list(numbers.standard_normal((2, N, N)))

    real: Any = session
    recordings = [record(real, lambda x, y: function(by_lz, x, y), arrays(), {})[1] for _ in range(2)]
    if recordings[1].problem:
        if "no lz call" in recordings[1].problem:
            return
        raise Violation(recordings[1].problem)
    program = prepare(_session(session), *recordings)
    calls = sum(step.request is not None for step in program.steps)
    frozen = FrozenPlan(_session(session), program)
    for _ in range(2):  # all of it linked, so that it can be laid out for its workers
        frozen.run(arrays())
    frozen = FrozenPlan(_session(session), program, workers=frozen.served())
    for _ in range(RUNS):
        session.is_troubled = True
        given = arrays()
        session.ended = session.brought = session.stopped = 0
        try:
            got = frozen.run(given)
        except LayerZeroError as exc:
            if not session.is_lost:
                raise Violation(f"a run fails: {exc}") from None
            session.is_lost = False
            session.workers.clear()
            if not frozen.is_spoilt:
                raise Violation("the memory of a run that failed is used again") from None
            frozen = FrozenPlan(_session(session), program, workers=frozen.workers)
            continue
        finally:
            if any(w.holder is not None or w.steps is not None for w in session.workers.values()):
                raise Violation("a chain is left on its lane")
        wanted = function(plainly, *given)
        if not all(np.array_equal(one, other) for one, other in zip(got, wanted, strict=True)):
            raise Violation("a result is another one")
        if session.ended != calls:
            raise Violation(f"{calls} calls ended {session.ended} times")
        if session.brought != session.stopped:
            raise Violation(f"{session.stopped} chains stopped, {session.brought} were brought to the broker")


def _session(session: SimulatedSession) -> Session:
    simulated: Any = session
    return simulated  # type: ignore[no-any-return]
