"""Kernels for several calls at once: the cheapest choice for a block of ops that feed each other (spec 7.6). Pure.

A kernel that is fastest alone may be a bad choice in a block, when what it returns must be copied or converted for the
next one. broker/selection/blocks.py makes a Block of call signatures; lz.dry_run and lz.compile ask for it.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.ipc.errors import InvalidArgument

MAX_STATES = 500  # states of the search that are kept at a node; a chain of ops needs one per candidate
MAX_WORK = 200_000  # entries of states that one search looks at, about a microsecond each
STEP_WORK = 2_000  # of them between two looks at what else there is to do
MAX_CACHED = 256  # plans


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel that can do a node, and its time there. Of equally fast choices the earlier one wins."""

    kernel_id: str
    us: float


@dataclass(frozen=True, slots=True)
class Node:
    """An op of a block and the kernels that can do it."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """Node `target` reads what node `source` returns. `transform_us`: what has to be done in between, by the pair of
    kernels on both sides; a pair that is not there costs nothing."""

    source: int
    target: int
    transform_us: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fusion:
    """One kernel that does several nodes: a chain in which nobody but the next node reads what a node returns."""

    nodes: tuple[int, ...]
    choice: Choice


@dataclass(frozen=True)
class Block:
    """A block of ops that feed each other, numbered so that an edge leads to a higher number."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    fusions: tuple[Fusion, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidArgument for nodes without a choice, impossible costs, and edges or fusions that lead
        nowhere."""
        count = len(self.nodes)
        for node in self.nodes:
            if not node.choices:
                raise InvalidArgument(f"{node.name}: no kernel can do it, so that there is no plan")
        costs = [choice.us for node in self.nodes for choice in node.choices]
        costs += [us for edge in self.edges for us in edge.transform_us.values()]
        costs += [fusion.choice.us for fusion in self.fusions]
        if not all(0 <= us < math.inf for us in costs):
            raise InvalidArgument("costs are finite and not negative, in microseconds")
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < count:
                raise InvalidArgument(f"edge {edge.source} -> {edge.target}: allowed: from a lower to a higher node")
        readers: dict[int, set[int]] = {}
        for edge in self.edges:
            readers.setdefault(edge.source, set()).add(edge.target)
        for fusion in self.fusions:
            links = list(zip(fusion.nodes, fusion.nodes[1:], strict=False))
            if not links or any(readers.get(a) != {b} for a, b in links):
                raise InvalidArgument(
                    f"{fusion.choice.kernel_id} cannot replace nodes {list(fusion.nodes)}: each but the last must be "
                    "read by the next one alone"
                )

    @property
    def signature(self) -> str:
        """The hash of all that the plan depends on, by which plans are kept."""
        parts = [
            [(node.name, [(c.kernel_id, c.us) for c in node.choices]) for node in self.nodes],
            [(e.source, e.target, sorted(e.transform_us.items())) for e in self.edges],
            [(f.nodes, f.choice.kernel_id, f.choice.us) for f in self.fusions],
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel of a plan and the nodes it does."""

    kernel_id: str
    nodes: tuple[int, ...]
    us: float


@dataclass(frozen=True, slots=True)
class Transform:
    """The work between the chosen kernels on both sides of an edge, and its time."""

    source: int
    target: int
    us: float


@dataclass(frozen=True)
class BlockPlan:
    """The cheapest plan of a block. `runner_up_us`: cost of the second cheapest, None when there is no other.
    `is_exact` is False when the block was too wide to search all plans."""

    steps: tuple[Step, ...]
    cost_us: float
    runner_up_us: float | None
    transforms: tuple[Transform, ...]
    is_exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A kernel and the nodes it does: a node's choice, or a fusion. Equal to itself alone."""

    kernel_id: str
    us: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """The units that lead to a state: the last one, and the way before it. Ways share their beginnings."""

    unit: _Unit
    before: _Way | None


@dataclass(slots=True)
class _Partial:
    """The best way to a state with its cost, and the cost of the second best."""

    us: float
    way: _Way | None
    second_us: float = math.inf


_State = tuple[tuple[int, _Unit], ...]


def plan(block: Block, *, max_states: int = MAX_STATES, max_work: int = MAX_WORK) -> BlockPlan:
    """The cheapest plan of a block, by dynamic programming over its nodes in order. A state is what later nodes can
    see: the kernels whose results are still to be read, and the fusions that reach further. Ways to the same state
    compete; two of them are kept. Where there is more than `max_work` to do, the cheapest states alone go on."""
    steps = plan_in_steps(block, max_states=max_states, max_work=max_work)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: BlockPlan = end.value
            return found


def plan_in_steps(
    block: Block, *, max_states: int = MAX_STATES, max_work: int = MAX_WORK
) -> Generator[None, None, BlockPlan]:
    """As `plan`, with room for other things after some milliseconds each."""
    last_reader: dict[int, int] = {}
    incoming: dict[int, list[Edge]] = {}
    for edge in block.edges:
        last_reader[edge.source] = max(edge.target, last_reader.get(edge.source, 0))
        incoming.setdefault(edge.target, []).append(edge)
    options = [[_Unit(c.kernel_id, c.us, (n,)) for c in node.choices] for n, node in enumerate(block.nodes)]
    for fusion in block.fusions:
        options[fusion.nodes[0]].append(_Unit(fusion.choice.kernel_id, fusion.choice.us, fusion.nodes))
    is_exact = True
    states: dict[_State, _Partial] = {(): _Partial(0.0, None)}
    left, since = max_work, 0
    for number in range(len(block.nodes)):
        after: dict[_State, _Partial] = {}
        share = left // (len(block.nodes) - number)
        effort = len(incoming.get(number, ())) + len(next(iter(states))) + 1  # for a state and a unit
        open_to = options[number]
        if effort * len(open_to) > share:  # too much for one state: its cheapest kernels alone
            count = max(share // effort, 1)
            is_exact = is_exact and count >= len(open_to)
            open_to = sorted((unit for unit in open_to if len(unit.nodes) == 1), key=lambda unit: unit.us)[:count]
        fitting = max(share // (effort * len(open_to)), 1)
        if len(states) > fitting:
            is_exact = False
            states = dict(heapq.nsmallest(fitting, states.items(), key=lambda item: item[1].us))
        left = max(left - effort * len(open_to) * len(states), 0)
        for state, partial in states.items():
            since += effort * len(open_to)
            if since > STEP_WORK:
                since = 0
                yield
            alive = dict(state)
            held = alive.get(number)
            read_later = tuple((n, u) for n, u in state if n > number or last_reader.get(n, -1) > number)
            is_read = last_reader.get(number, -1) > number
            for unit in [held] if held is not None else open_to:
                if held is None and any(node in alive for node in unit.nodes):
                    continue  # an earlier fusion does one of the unit's nodes
                added_us = unit.us if held is None else 0.0
                for edge in incoming.get(number, ()):
                    source = alive[edge.source]
                    if source is not unit:
                        added_us += edge.transform_us.get((source.kernel_id, unit.kernel_id), 0.0)
                key = read_later
                if held is None:
                    more = tuple((n, unit) for n in unit.nodes if n > number or is_read)
                    key = read_later + more
                    if len(unit.nodes) > 1 or (key and read_later and read_later[-1][0] > number):
                        key = tuple(sorted(key, key=lambda item: item[0]))
                way = partial.way if held is not None else _Way(unit, partial.way)
                _offer(after, key, _Partial(partial.us + added_us, way, partial.second_us + added_us))
        if len(after) > max_states:
            is_exact = False
            after = dict(heapq.nsmallest(max_states, after.items(), key=lambda item: item[1].us))
        states = after
    best = states[()]
    units: list[_Unit] = []
    way = best.way
    while way is not None:
        units.append(way.unit)
        way = way.before
    units.reverse()
    return BlockPlan(
        _steps(units),
        best.us,
        best.second_us if best.second_us < math.inf else None,
        tuple(_transforms(block, units)),
        is_exact,
    )


def fixed_plan(block: Block, kernels: Sequence[str]) -> BlockPlan:
    """The plan that has these kernels, one per node, with its cost; to compare with `plan`. Raises InvalidArgument for
    a kernel that is no choice for its node."""
    units = []
    for number, (node, kernel_id) in enumerate(zip(block.nodes, kernels, strict=True)):
        us = next((choice.us for choice in node.choices if choice.kernel_id == kernel_id), None)
        if us is None:
            raise InvalidArgument(f"{kernel_id} is no choice for {node.name}")
        units.append(_Unit(kernel_id, us, (number,)))
    transforms = _transforms(block, units)
    cost_us = sum(unit.us for unit in units) + sum(transform.us for transform in transforms)
    return BlockPlan(_steps(units), cost_us, None, tuple(transforms))


def _steps(units: Sequence[_Unit]) -> tuple[Step, ...]:
    return tuple(Step(unit.kernel_id, unit.nodes, unit.us) for unit in units)


def _offer(states: dict[_State, _Partial], key: _State, new: _Partial) -> None:
    """Take a new way to the state `key` among the two cheapest, if it is one; of equally cheap ways the first stays."""
    known = states.get(key)
    if known is None:
        states[key] = new
    elif new.us < known.us:
        new.second_us = min(known.us, new.second_us)
        states[key] = new
    else:
        known.second_us = min(known.second_us, new.us)


def _transforms(block: Block, units: list[_Unit]) -> list[Transform]:
    does = {node: unit for unit in units for node in unit.nodes}
    found = []
    for edge in block.edges:
        source, target = does[edge.source], does[edge.target]
        us = 0.0 if source is target else edge.transform_us.get((source.kernel_id, target.kernel_id), 0.0)
        if us:
            found.append(Transform(edge.source, edge.target, us))
    return found


class Planner:
    """`plan`, remembering the plans of the last blocks."""

    def __init__(self, limit: int = MAX_CACHED) -> None:
        self.hits = self.misses = 0
        self._limit = limit
        self._plans: OrderedDict[str, BlockPlan] = OrderedDict()

    def plan(self, block: Block) -> Generator[None, None, BlockPlan]:
        """The plan, in steps."""
        key = block.signature
        known = self._plans.get(key)
        if known is not None:
            self.hits += 1
            self._plans.move_to_end(key)
            return known
        self.misses += 1
        self._plans[key] = found = yield from plan_in_steps(block)
        if len(self._plans) > self._limit:
            self._plans.popitem(last=False)
        return found
