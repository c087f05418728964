"""Segments: chained steps of a plan that follow each other, sent to their workers as few messages as leases allow.

Steps whose routes have leases on one lane cross as a chain, and chains of several lanes that do not need each other
cross at the same time. Where there is no lease, or a chain does not end well,
steps are calls like any other, from the first one that has not ended: what those before it made is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from layerzero.client.connection import observing
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.counters import Row
from layerzero.client.connection.express import Lane, Lease, Lost, Ran, Receipt, Stopped
from layerzero.client.connection.overlay import Overlay, Scope, on_top
from layerzero.client.connection.record import kernel_of
from layerzero.client.connection.report import EXPRESS
from layerzero.client.plans.counting import count_steps, counter_rows
from layerzero.client.plans.memory import Memory, Place, Reach, array_at, put
from layerzero.client.plans.passes import Program
from layerzero.client.plans.recording import Step, Use, Value
from layerzero.client.plans.scheduling import Access, dependencies, in_order, waves
from layerzero.client.session.session import Session
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.chains import (
    CHAIN,
    MAX_STEPS,
    MAX_TABLE_BYTES,
    MAX_VARIABLES,
    ChainStep,
    digest_of,
    pack_chain_call,
    pack_table,
    unpack_times,
)
from layerzero.ipc.transport.wire import NO_ARENA, REF, REF_BYTES, Ref

MAX_CHAIN_US = 100_000.0  # by the times of the recorded calls: others wait for their turn meanwhile
MAX_DECLINED, RESTS = 3, 100  # chains in a row; then the segment's steps go one by one for so many runs
STEP_TABLE_BYTES = 16 + 8 * 16  # at most, of a step without its references
CHAINED, CALLED, OWN = "chain", "call", "here"
NO_WISHES: Mapping[int, Overlay] = MappingProxyType({})
Tell: TypeAlias = Callable[..., None]  # of a category, a message and facts
Ended: TypeAlias = tuple[Lane, Lease, "Lost | LayerZeroError"]


@dataclass(frozen=True)
class StepRun:
    """How a step was run last: in a chain, as a call, or in this process (`how`); by which kernel, in how many us of
    it; `attempts` that failed before."""

    number: int
    how: str
    kernel_id: str = ""
    us: float = 0.0
    attempts: int = 0


@dataclass(eq=False)
class _Chain:
    """Steps of a segment, by their numbers there, on one lane."""

    numbers: list[int]
    lane: Lane
    routes: list[Route]
    leases: list[Lease]
    head: bytes  # of the call's body: its table
    variables: list[int]
    lease: Lease  # of them all, as one call
    note: str  # for the report
    rows: list[tuple[Row, int]]  # of counters, and how many of its steps are of each
    declined: int = 0
    usual_ns: int = 0  # the least that its kernels took
    said: bytes = b""  # each step's time, of the last run


@dataclass(eq=False)
class Segment:
    """`steps` are chained ones, in order; nothing lies between them. `waves`: chains, and steps that are none by their
    number, in the order in which they are sent; those of a wave at the same time."""

    session: Session
    program: Program
    memory: Memory
    steps: list[Step]
    table_at: int  # where its tables may lie in the memory
    timings: dict[int, StepRun]
    policy: Overlay | None  # of its calls, whatever is asked for meanwhile
    tell: Tell | None = None
    wishes: Mapping[int, Overlay] = field(default_factory=dict)  # of calls of their own, by the step's number
    waves: list[list[_Chain | int]] = field(default_factory=list)
    is_linked: bool = False
    rests: int = 0  # runs until chains are tried again
    is_held: bool = False  # all steps go one by one for now

    @property
    def chains(self) -> list[_Chain]:
        return [one for wave in self.waves for one in wave if isinstance(one, _Chain)]

    @property
    def messages(self) -> int:
        """How many submissions a run makes for it, while its leases last."""
        return len(self.steps) - sum(len(chain.leases) - 1 for chain in self.chains)

    @property
    def at_once(self) -> int:
        """How many of them are under way at the same time, at most."""
        return max(map(len, self.waves), default=0)

    def run(self, places: Sequence[Place], hold: Any) -> None:
        """`places`: where variables lie in this run. Raises what a call of a step raises."""
        if self.rests:
            self.rests -= 1
        elif not self.is_linked:
            self._link()
        waves = self.waves
        if self.is_held or not waves:
            for number in range(len(self.steps)):
                self.call(number, places)
            return
        for wave in waves:
            first = wave[0]
            if isinstance(first, int):
                self.call(first, places)
            elif len(wave) == 1:
                self._run_chain(first, places, hold)
            else:
                self._run_wave([one for one in wave if isinstance(one, _Chain)], places, hold)

    # --- one message for many

    def _link(self) -> None:
        """Find the leases of all steps; nothing changes where one of them has none. A step that policy wants in this
        process has none ever."""
        found: list[tuple[Route, Lane, Lease] | None] = []
        for step in self.steps:
            specs = tuple(self._spec(arg) for arg in step.args)
            assert step.request is not None
            request = replace(step.request, args=step.args)
            wish = self.wishes.get(step.number)
            policy = self.policy if wish is None else on_top(self.policy, wish)
            route = self.session.routes.find(self.session.link, request, specs, (), policy)
            place = self.session.lanes.of(route)
            if place is None and route.here is None:
                return
            found.append(None if place is None or route.here is not None else (route, *place))
        workers = [None if one is None else (one[1], one[2].epoch) for one in found]
        after = in_order(len(found)) if len(set(workers)) == 1 else dependencies([*map(self._accesses, self.steps)])
        made, room = list[list[_Chain | int]](), self.table_at
        for wave in waves(workers, after, self._room):
            made.append([])
            for group in wave:
                its = [one for one in map(found.__getitem__, group) if one is not None]
                if not its:
                    made[-1].append(group[0])
                    continue
                chain, used = self._chain(group, its, room)
                made[-1].append(chain)
                room += used
        self.waves = made
        self.is_linked = True
        if self.tell is not None:
            kernels = [lease.decision.kernel_id for chain in self.chains for lease in chain.leases]
            waves_of = [[1 if isinstance(one, int) else len(one.leases) for one in wave] for wave in made]
            self.tell("links", f"{len(kernels)} steps in {self.messages} messages", kernels=kernels, waves=waves_of)

    def _room(self) -> Callable[[int], bool]:
        """Takes the steps of one chain, while there is room."""
        us, nbytes, count, variables = 0.0, 0, 0, set[int]()

        def take(number: int) -> bool:
            nonlocal us, nbytes, count
            step = self.steps[number]
            us, nbytes, count = us + step.kernel_us, nbytes + self.table_bytes(step), count + 1
            variables.update(r.variable for r in self._reaches(step) if r is not None and r.variable is not None)
            is_full = count > MAX_STEPS or nbytes > MAX_TABLE_BYTES or len(variables) > MAX_VARIABLES
            return not is_full and us <= MAX_CHAIN_US

        return take

    def _accesses(self, step: Step) -> Iterator[Access]:
        for position, reach in enumerate(self._reaches(step)):
            if reach is not None:
                memory = reach.arena if reach.variable is None else reach.variable
                yield Access(memory, reach.offset, reach.offset + reach.nbytes, position >= len(step.args))

    @staticmethod
    def table_bytes(step: Step) -> int:
        """At most so many does a step take of its chain's table."""
        return STEP_TABLE_BYTES + REF_BYTES * (len(step.args) + len(step.made))

    def _chain(self, group: list[int], found: list[tuple[Route, Lane, Lease]], table_at: int) -> tuple[_Chain, int]:
        numbers: dict[int, int] = {}
        rows = []
        for step, (_, _, lease) in zip(map(self.steps.__getitem__, group), found, strict=True):
            refs = tuple(self._ref(reach, numbers) for reach in self._reaches(step))
            rows.append(ChainStep(lease.plan, refs, lease.values))
        table, memory = pack_table(rows), self.memory
        memory.block[table_at : table_at + len(table)] = table
        where = Ref(self.session.arena_registry[memory.arena], 0, memory.offset + table_at, len(table))
        routes, lane, leases = [one[0] for one in found], found[0][1], [one[2] for one in found]
        lease = replace(leases[0], plan=CHAIN, values=b"")
        head = pack_chain_call(where, digest_of(table))
        note = f"the last of {len(leases)} calls that crossed as one"
        kernels = [(self._op(number), its.decision.kernel_id) for number, its in zip(group, leases, strict=True)]
        rows_of = counter_rows(self.session, kernels, EXPRESS)
        return _Chain(group, lane, routes, leases, head, list(numbers), lease, note, rows_of), len(table)

    def _op(self, number: int) -> str:
        request = self.steps[number].request
        assert request is not None
        return request.op

    def _ref(self, reach: Reach | None, numbers: dict[int, int]) -> Ref:
        """`numbers` are the chain's own of the plan's variables."""
        if reach is None:
            return Ref(NO_ARENA, 0, 0, 0)
        if reach.variable is not None:
            return Ref(0, 1 + numbers.setdefault(reach.variable, len(numbers)), reach.offset, reach.nbytes)
        assert reach.arena is not None
        return Ref(self.session.arena_registry[reach.arena], 0, reach.offset, reach.nbytes)

    def _run_chain(self, chain: _Chain, places: Sequence[Place], hold: Any) -> None:
        if not self._may_send(chain):
            self._call_all(chain, places)
            return
        start_ns, body = time.perf_counter_ns(), self._body(chain, places)
        end = chain.lane.run_chain(chain.lease, body, chain.lane.default_s, hold, chain.usual_ns)
        self._finish(chain, end, start_ns, places)

    def _run_wave(self, wave: list[_Chain], places: Sequence[Place], hold: Any) -> None:
        """All are sent before one is waited for, and have ended before a step of one goes as a call."""
        start_ns, sent, holder = time.perf_counter_ns(), dict[_Chain, Receipt](), object()
        ends: dict[_Chain, Ran | Stopped | None] = {}
        try:
            for chain in wave:
                if self._may_send(chain):
                    body = self._body(chain, places)
                    receipt = chain.lane.begin_chain(holder, chain.lease, body, chain.lane.default_s, hold)
                    if receipt is None:
                        ends[chain] = None
                    else:
                        sent[chain] = receipt
            for chain in wave:
                if chain in sent:
                    receipt = sent.pop(chain)
                    ends[chain] = chain.lane.end_chain(receipt, chain.lease, chain.lane.default_s, chain.usual_ns)
        finally:
            for chain, receipt in sent.items():  # what ended another one ends them all
                chain.lane.give_up(receipt)
            for chain in wave:
                chain.lane.let_go(holder)
        for chain in sorted(wave, key=lambda one: not isinstance(ends.get(one), Ran)):
            if chain in ends:
                self._finish(chain, ends[chain], start_ns, places)
            else:
                self._call_all(chain, places)

    def _may_send(self, chain: _Chain) -> bool:
        is_held = chain.lane.holds(chain.leases[0])
        if not self.session.shadow.is_on and not chain.lane.is_ended and is_held:
            return True
        self.unlink()
        return False

    def _body(self, chain: _Chain, places: Sequence[Place]) -> bytes:
        body = chain.head
        for number in chain.variables:
            arena, offset, nbytes = places[number]
            body += REF.pack(self.session.arena_registry[arena], 0, offset, nbytes)
        return body

    def _call_all(self, chain: _Chain, places: Sequence[Place]) -> None:
        for number in chain.numbers:
            self.call(number, places)

    def _finish(self, chain: _Chain, end: Ran | Stopped | None, start_ns: int, places: Sequence[Place]) -> None:
        """All of a chain's steps have run when this returns."""
        if isinstance(end, Ran):
            chain.declined = 0
            self._note_ran(chain, end, start_ns)
            if observing.recorder is not None:
                observing.recorder.note_chain(self._noted(chain, end, places), start_ns, time.perf_counter_ns())
            return
        if end is None:  # it was declined, or another thread is on the lane: none of its steps has run
            chain.declined += 1
            if chain.declined >= MAX_DECLINED:
                self.rests = RESTS
                if self.tell is not None:
                    self.tell("fallback", f"chains were declined; {RESTS} runs go step by step", steps=chain.numbers)
                self.unlink()
            self._call_all(chain, places)
            return
        self.unlink()
        at = min(end.step, len(chain.leases) - 1)
        for number, lease in zip(chain.numbers[:at], chain.leases, strict=False):
            if end.has_run:
                self._note(number, CHAINED, lease.decision.kernel_id, 0.0, 0)
                kernel = self._op(number), lease.decision.kernel_id
                count_steps(self.session, counter_rows(self.session, [kernel], EXPRESS), 0)
            else:
                self.call(number, places)
        self.call(chain.numbers[at], places, after=(chain.lane, chain.leases[at], end.end))
        for number in chain.numbers[at + 1 :]:
            self.call(number, places)

    def _note_ran(self, chain: _Chain, end: Ran, start_ns: int) -> None:
        chain.said, chain.usual_ns = end.said, min(chain.usual_ns or end.kernel_ns, end.kernel_ns)
        plan, decision, now_ns = chain.routes[-1].plan, chain.leases[-1].decision, time.perf_counter_ns()
        self.session.last.record = (plan, (), start_ns, now_ns, end.kernel_ns, (), decision, (), chain.note)
        count_steps(self.session, chain.rows, now_ns - start_ns)
        if not self.is_linked:  # a chain before it has ended otherwise
            self._read(chain)

    def _noted(self, chain: _Chain, end: Ran, places: Sequence[Place]) -> Iterator[observing.StepNote]:
        """Its steps, for a trace."""
        rows = zip(chain.numbers, chain.routes, chain.leases, unpack_times(end.said), strict=False)
        for number, route, lease, ns in rows:
            step = self.steps[number]
            at = [0 if reach is None else self._address(reach, places) for reach in self._reaches(step)]
            assert step.request is not None
            asked = (step.request.op, tuple(self._spec(arg) for arg in step.args), step.request.params)
            args, made = at[: len(step.args)], at[len(step.args) :]
            yield observing.StepNote(*asked, route.plan, lease.decision, ns, args, made)

    def _address(self, reach: Reach, places: Sequence[Place]) -> int:
        arena, offset = self._at(reach, places)
        return int(arena.address) + offset

    def read_times(self) -> None:
        """Into `timings`, those of chains that ran since they were read last."""
        for chain in self.chains:
            self._read(chain)

    def _read(self, chain: _Chain) -> None:
        times, chain.said = unpack_times(chain.said), b""
        for number, ns, lease in zip(chain.numbers, times, chain.leases, strict=False):
            self._note(number, CHAINED, lease.decision.kernel_id, ns / 1e3, 0)

    def unlink(self) -> None:
        """Leases are looked for anew."""
        self.read_times()
        self.is_linked, self.waves = False, []

    # --- one by one

    def call(self, number: int, places: Sequence[Place], after: Ended | None = None) -> None:
        """Run a step as a call. `after`: it was in a chain that ended so."""
        step = self.steps[number]
        assert step.request is not None
        args = self.arguments(step, places)
        request: Request = replace(step.request, args=args)
        wish = self.wishes.get(step.number)
        try:
            with nullcontext() if wish is None else Scope(wish):
                if after is None:
                    value = self.session.run(request)
                else:
                    lane, lease, end = after
                    left = self.session.leave_lane(request, time.perf_counter_ns(), lane, lease, end)
                    value = self.session.wait(left)
        except LayerZeroError as exc:
            exc.add_note(f"in step {step.number} of a plan, {step.name} at {step.where}")
            raise
        record = self.session.last_record
        results = value if isinstance(value, tuple) else (value,)
        for made, result in zip(step.made, results, strict=True):
            arena, offset = self._at(self.memory.reach(self.program.value(made)), places)
            put(result, arena, offset)
        us = record[4] / 1e3 if isinstance(record, tuple) else 0.0
        attempts = len(record[5]) + len(record[7]) if isinstance(record, tuple) else 0
        self._note(number, CALLED, kernel_of(record)[0], us, attempts)
        if self.tell is not None and after is not None:
            what = f"step {step.number}, {step.name} at {step.where}, did not end in its chain"
            self.tell("fallback", what, step=step.number, kernel_id=kernel_of(record)[0], attempts=attempts)

    def _note(self, number: int, how: str, kernel_id: str, us: float, attempts: int) -> None:
        step = self.steps[number]
        self.timings[step.number] = StepRun(step.number, how, kernel_id, us, attempts)

    def arguments(self, step: Step, places: Sequence[Place]) -> tuple[Any, ...]:
        return tuple(self.array(self.program.value(arg), places) if isinstance(arg, Use) else arg for arg in step.args)

    def array(self, value: Value, places: Sequence[Place]) -> Any:
        arena, offset = self._at(self.memory.reach(value), places)
        assert value.array is not None
        return array_at(arena, offset, value.array.spec, value.array)

    @staticmethod
    def _at(reach: Reach, places: Sequence[Place]) -> tuple[Any, int]:
        if reach.variable is None:
            return reach.arena, reach.offset
        place = places[reach.variable]
        return place.arena, place.offset + reach.offset

    def _spec(self, arg: Any) -> Any:
        return self.program.value(arg).array.spec if isinstance(arg, Use) else None  # type: ignore[union-attr]

    def _reaches(self, step: Step) -> list[Reach | None]:
        args = [self.memory.reach(self.program.value(arg)) if isinstance(arg, Use) else None for arg in step.args]
        return [*args, *(self.memory.reach(self.program.value(made)) for made in step.made)]
