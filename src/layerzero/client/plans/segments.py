"""Segments: chained steps of a plan that follow each other, sent to their workers as few messages as leases allow.

Steps whose routes have leases on one lane cross as a chain. Where there is no lease, or a chain does not end well,
steps are calls like any other, from the first one that has not ended: what those before it made is whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.express import Lane, Lease, Lost, Ran
from layerzero.client.connection.record import kernel_of
from layerzero.client.plans.memory import Memory, Place, Reach, array_at, put
from layerzero.client.plans.passes import Program
from layerzero.client.plans.recording import Step, Use, Value
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
    """Steps `first` to `first + count` of a segment on one lane."""

    first: int
    lane: Lane
    routes: list[Route]
    leases: list[Lease]
    head: bytes  # of the call's body: its table
    variables: list[int]
    lease: Lease  # of them all, as one call
    note: str  # for the report
    declined: int = 0
    usual_ns: int = 0  # the least that its kernels took
    said: bytes = b""  # each step's time, of the last run


@dataclass(eq=False)
class Segment:
    """`steps` are chained ones, in order; nothing lies between them."""

    session: Session
    program: Program
    memory: Memory
    steps: list[Step]
    table_at: int  # where its tables may lie in the memory
    timings: dict[int, StepRun]
    chains: list[_Chain] = field(default_factory=list)
    is_linked: bool = False
    rests: int = 0  # runs until chains are tried again
    is_held: bool = False  # all steps go one by one for now

    @property
    def messages(self) -> int:
        """How many submissions a run makes for it, while its leases last."""
        return len(self.steps) - sum(len(chain.leases) - 1 for chain in self.chains)

    def run(self, places: Sequence[Place], hold: Any) -> None:
        """`places`: where variables lie in this run. Raises what a call of a step raises."""
        if self.rests:
            self.rests -= 1
        elif not self.is_linked:
            self._link()
        at, ends = 0, iter(() if self.is_held else self.chains)
        chain = next(ends, None)
        while at < len(self.steps):
            if chain is not None and chain.first == at:
                at = self._run_chain(chain, places, hold)
                chain = next(ends, None)
                while chain is not None and chain.first < at:
                    chain = next(ends, None)
            else:
                self.call(at, places)
                at += 1

    # --- one message for many

    def _link(self) -> None:
        """Find the leases of all steps; nothing changes where one of them has none. A step that policy wants in this
        process has none ever."""
        found: list[tuple[Route, Lane, Lease] | None] = []
        policy = overlay.current()
        for step in self.steps:
            specs = tuple(self._spec(arg) for arg in step.args)
            assert step.request is not None
            request = replace(step.request, args=step.args)
            route = self.session.routes.find(self.session.link, request, specs, None, policy)
            place = self.session.lanes.of(route)
            if place is None and route.here is None:
                return
            found.append(None if place is None or route.here is not None else (route, *place))
        at, self.chains, room = 0, [], self.table_at
        while at < len(self.steps):
            count = self._extent(found, at)
            its = [one for one in found[at : at + count] if one is not None]
            if its:
                chain, used = self._chain(at, its, room)
                self.chains.append(chain)
                room += used
            at += count
        self.is_linked = True

    def _extent(self, found: list[tuple[Route, Lane, Lease] | None], first: int) -> int:
        """How many steps from this one on may be one chain, or one that is none."""
        begin = found[first]
        if begin is None:
            return 1
        _, lane, lease = begin
        us, nbytes, variables = 0.0, 0, set[int]()
        for count, (step, one) in enumerate(zip(self.steps[first:], found[first:], strict=True)):
            us += step.kernel_us
            nbytes += self.table_bytes(step)
            variables |= {r.variable for r in self._reaches(step) if r is not None and r.variable is not None}
            is_full = count == MAX_STEPS or nbytes > MAX_TABLE_BYTES or len(variables) > MAX_VARIABLES
            is_other = one is None or one[1] is not lane or one[2].epoch != lease.epoch
            if count and (is_other or is_full or us > MAX_CHAIN_US):
                return count
        return len(self.steps) - first

    @staticmethod
    def table_bytes(step: Step) -> int:
        """At most so many does a step take of its chain's table."""
        return STEP_TABLE_BYTES + REF_BYTES * (len(step.args) + len(step.made))

    def _chain(self, first: int, found: list[tuple[Route, Lane, Lease]], table_at: int) -> tuple[_Chain, int]:
        numbers: dict[int, int] = {}
        rows = []
        for step, (_, _, lease) in zip(self.steps[first : first + len(found)], found, strict=True):
            refs = tuple(self._ref(reach, numbers) for reach in self._reaches(step))
            rows.append(ChainStep(lease.plan, refs, lease.values))
        table, memory = pack_table(rows), self.memory
        memory.block[table_at : table_at + len(table)] = table
        where = Ref(self.session.arena_registry[memory.arena], 0, memory.offset + table_at, len(table))
        routes, lane, leases = [one[0] for one in found], found[0][1], [one[2] for one in found]
        lease = replace(leases[0], plan=CHAIN, values=b"")
        head = pack_chain_call(where, digest_of(table))
        note = f"the last of {len(leases)} calls that crossed as one"
        return _Chain(first, lane, routes, leases, head, list(numbers), lease, note), len(table)

    def _ref(self, reach: Reach | None, numbers: dict[int, int]) -> Ref:
        """`numbers` are the chain's own of the plan's variables."""
        if reach is None:
            return Ref(NO_ARENA, 0, 0, 0)
        if reach.variable is not None:
            return Ref(0, 1 + numbers.setdefault(reach.variable, len(numbers)), reach.offset, reach.nbytes)
        assert reach.arena is not None
        return Ref(self.session.arena_registry[reach.arena], 0, reach.offset, reach.nbytes)

    def _run_chain(self, chain: _Chain, places: Sequence[Place], hold: Any) -> int:
        """Which step comes next."""
        if self.session.shadow.is_on or chain.lane.is_ended or not chain.lane.holds(chain.leases[0]):
            self.unlink()
            self.call(chain.first, places)
            return chain.first + 1
        body = chain.head
        for number in chain.variables:
            arena, offset, nbytes = places[number]
            body += REF.pack(self.session.arena_registry[arena], 0, offset, nbytes)
        start_ns = time.perf_counter_ns()
        end = chain.lane.run_chain(chain.lease, body, chain.lane.default_s, hold, chain.usual_ns)
        if isinstance(end, Ran):
            chain.declined = 0
            self._note_ran(chain, end, start_ns)
            return chain.first + len(chain.leases)
        if end is None:  # it was declined, or another thread is on the lane: none of its steps has run
            chain.declined += 1
            if chain.declined >= MAX_DECLINED:
                self.rests = RESTS
                self.unlink()
            self.call(chain.first, places)
            return chain.first + 1
        self.unlink()
        at = min(end.step, len(chain.leases) - 1)
        for number in range(chain.first, chain.first + at):
            if end.has_run:
                self._note(number, CHAINED, chain.leases[number - chain.first].decision.kernel_id, 0.0, 0)
            else:
                self.call(number, places)
        self.call(chain.first + at, places, after=(chain.lane, chain.leases[at], end.end))
        return chain.first + at + 1

    def _note_ran(self, chain: _Chain, end: Ran, start_ns: int) -> None:
        chain.said, chain.usual_ns = end.said, min(chain.usual_ns or end.kernel_ns, end.kernel_ns)
        plan, decision, now_ns = chain.routes[-1].plan, chain.leases[-1].decision, time.perf_counter_ns()
        self.session.last.record = (plan, (), start_ns, now_ns, end.kernel_ns, (), decision, (), chain.note)

    def read_times(self) -> None:
        """Into `timings`, those of chains that ran since they were read last."""
        for chain in self.chains:
            times = unpack_times(chain.said)
            for number, (ns, lease) in enumerate(zip(times, chain.leases, strict=False), chain.first):
                self._note(number, CHAINED, lease.decision.kernel_id, ns / 1e3, 0)
            chain.said = b""

    def unlink(self) -> None:
        """Leases are looked for anew."""
        self.read_times()
        self.is_linked, self.chains = False, []

    # --- one by one

    def call(self, number: int, places: Sequence[Place], after: Ended | None = None) -> None:
        """Run a step as a call. `after`: it was in a chain that ended so."""
        step = self.steps[number]
        assert step.request is not None
        args = tuple(self.array(self.program.value(arg), places) if isinstance(arg, Use) else arg for arg in step.args)
        request: Request = replace(step.request, args=args)
        try:
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

    def _note(self, number: int, how: str, kernel_id: str, us: float, attempts: int) -> None:
        step = self.steps[number]
        self.timings[step.number] = StepRun(step.number, how, kernel_id, us, attempts)

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
