"""What a person sees of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero.client.connection.report import html_of_text
from layerzero.client.plans.recording import Step
from layerzero.client.plans.segments import OWN, Segment
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.client.plans.execution_plan import Variant
    from layerzero.client.plans.graph_plan import GraphPlan


@dataclass(frozen=True)
class SlotRow:
    """A slot: `nbytes` at `offset` of the plan's block, needed from step `first` to step `last`; `made_by` names the
    step that fills it."""

    offset: int
    nbytes: int
    first: int
    last: int
    made_by: str


@dataclass(frozen=True)
class Timing:
    """A step's last run: `how` is "chain" (crossed with others), "call" (one by one) or "here" (the caller's own code),
    `us` the kernel's time, or that of the own code; `attempts` failed before."""

    step: int
    name: str
    where: str
    how: str
    kernel_id: str
    us: float
    attempts: int


@dataclass(frozen=True)
class GraphFacts:
    """Of a plan on a GPU. `is_captured`: it has a CUDA graph; `nodes` of it, 0 where that is not known; `calls`: how
    many lz calls are "lifted", "in_process" or in a "worker"; `not_lifted`: a line for each of these; `difference`: of
    the first replay from its calls, relative to the largest number; `is_direct`: there is a graph that works on the
    caller's own memory, too; `failure`: of the last capture; `time_us`: the GPU's time of the last replay, if asked
    for."""

    is_captured: bool
    nodes: int
    nbytes: int
    captures: int
    calls: Mapping[str, int]
    not_lifted: tuple[str, ...]
    difference: float | None
    is_direct: bool
    failure: str
    time_us: float | None

    @classmethod
    def of(cls, plan: GraphPlan) -> GraphFacts:
        nodes = 0 if plan.graph is None else plan.graph.nodes
        names = {step.number: f"{step.name} at {step.where}" for step in plan.program.steps}
        away = {n: one for n, one in plan.served.items() if not one.is_here}
        told = tuple(f"{names[n]}: {one.why or 'not known yet whether it may be lifted'}" for n, one in away.items())
        time_us = plan.time_us()
        calls = Counter(one.path for one in plan.served.values())
        return cls(
            plan.graph is not None,
            nodes,
            plan.nbytes,
            plan.captures,
            calls,
            told,
            plan.difference,
            plan.is_direct,
            plan.failure,
            time_us,
        )

    def lines(self, calls: int, own_steps: int) -> list[str]:
        what = f"{counted(calls, 'lz call')} and {counted(own_steps, 'step')} of own code"
        ways = {"lifted": "lifted", "in_process": "in this process", "worker": "in their worker"}
        shares = ", ".join(f"{self.calls[path]} {way}" for path, way in ways.items() if self.calls.get(path))
        of = f" of {counted(self.nodes, 'node')}" if self.nodes else ""
        head = f"in one CUDA graph{of}" if self.is_captured else "one by one until they settle"
        found = [f"{what} {head}" + (f": {shares}" if shares else "")]
        found += [f"  not lifted: {line}" for line in self.not_lifted[:4]]
        if self.failure:
            found.append(f"the last capture failed, and is tried again: {self.failure}")
        if self.is_captured:
            also = ", another works on the caller's own memory" if self.is_direct else ""
            found.append(f"memory: {self.nbytes} bytes, captured {counted(self.captures, 'time')}{also}")
        if self.difference is not None:
            text = f"differed from its calls by {self.difference:.1e} of the largest number"
            found.append(f"the first replay {text if self.difference else 'was bit equal to its calls'}")
        if self.time_us is not None:
            found.append(f"the last replay took {self.time_us:,.1f} us of the GPU")
        return found


@dataclass(frozen=True)
class PlanExplanation:
    """What became of a plan. `messages`: how many submissions one run makes for its chained steps, 0 while they go
    one by one, and `waits_for` says why; `at_once`: how many of those are under way at the same time; `peak_bytes`:
    of the slots, `sum_bytes` without sharing, `in_place`: how many results lie where an argument of their step lay;
    `passes`: what was changed, a line each; `choice`: which backend its calls prefer together, and times."""

    phase: str
    arguments: str
    problem: str
    steps: int
    own_steps: int
    messages: int
    at_once: int
    waits_for: str
    peak_bytes: int
    sum_bytes: int
    in_place: int
    copied_bytes: int
    passes: tuple[str, ...]
    notes: tuple[str, ...]
    choice: str
    counters: Mapping[str, Any]
    graph: GraphFacts | None = None

    def __str__(self) -> str:
        lines = [f"{self.phase}: {self.arguments}"]
        if self.problem:
            lines.append(f"  runs as calls, for {self.problem}")
        if self.graph is not None:
            lines += [f"  {line}" for line in self.graph.lines(self.steps, self.own_steps)]
            lines.append(f"  copied in the last run: {self.copied_bytes} bytes")
        elif self.steps:
            together = f", {self.at_once} at once" if self.at_once > 1 else ""
            sent = (
                f"in {counted(self.messages, 'message')}{together}" if self.messages else f"one by one {self.waits_for}"
            )
            lines.append(f"  {counted(self.steps, 'lz call')} {sent}, {counted(self.own_steps, 'step')} of own code")
            over = f", {counted(self.in_place, 'result')} in place" if self.in_place else ""
            lines.append(f"  slots: {self.peak_bytes} bytes, {self.sum_bytes} without sharing{over}")
            lines.append(f"  copied in the last run: {self.copied_bytes} bytes")
        lines += [f"  {line}" for line in (*self.passes, *self.notes, self.choice) if line]
        lines.append(f"  {self.counters['replays']} of {counted(self.counters['runs'], 'run')} replayed")
        lines += [f"    {counted(count, 'run')} not: {why}" for why, count in self.counters["misses"].items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


def explain_plan(variant: Variant, counters: Mapping[str, Any]) -> PlanExplanation:
    if variant.graph is not None:
        return _explain_graph(variant, variant.graph, counters)
    program, frozen = variant.program, variant.frozen
    lz_steps = own = messages = at_once = peak = total = in_place = copied = 0
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if program is not None and frozen is not None:
        lz_steps = sum(step.request is not None for step in program.steps)
        own = sum(not isinstance(item, Segment) and item.request is None for item in frozen.items)
        if frozen.is_linked:
            messages = sum(segment.messages for segment in frozen.segments)
            at_once = max((segment.at_once for segment in frozen.segments), default=0)
        peak, total, in_place = frozen.layout.peak_bytes, frozen.layout.sum_bytes, frozen.layout.in_place
        copied = frozen.copied_bytes
        passes = tuple(program.done)
        rules = sorted({(one.rule, one.place.nbytes) for one in frozen.memory.constants.values()})
        notes = tuple(f"constant of {nbytes} bytes: {rule}" for rule, nbytes in rules[:4])
    choice = "" if variant.choices is None else str(variant.choices)
    if variant.kept is not None and choice:
        notes = (*notes, *variant.kept.notes)
    waits_for = "until leases are there"
    if frozen is not None and any(segment.rests for segment in frozen.segments):
        waits_for = "for some runs: their worker declined them together, or other threads had its lane"
    facts = (
        lz_steps,
        own,
        messages,
        at_once,
        waits_for,
        peak,
        total,
        in_place,
        copied,
        passes,
        notes,
        choice,
        counters,
    )
    return PlanExplanation(variant.phase, variant.label, variant.problem, *facts)


def _explain_graph(variant: Variant, plan: GraphPlan, counters: Mapping[str, Any]) -> PlanExplanation:
    steps, peak = plan.program.steps, plan.nbytes
    own = sum(step.request is None for step in steps)
    facts = (len(steps) - own, own, 0, 0, "", peak, peak, 0, plan.copied_bytes, tuple(plan.program.done), (), "")
    return PlanExplanation(variant.phase, variant.label, variant.problem, *facts, counters, GraphFacts.of(plan))


def slot_rows(variant: Variant) -> list[SlotRow]:
    if variant.frozen is None or variant.program is None:
        return []
    steps = variant.program.steps
    slots = sorted(variant.frozen.layout.slots.values(), key=lambda slot: (slot.first, slot.offset))
    return [SlotRow(s.offset, s.nbytes, s.first, s.last, steps[s.first].name) for s in slots]


def timing_rows(variant: Variant) -> list[Timing]:
    if variant.graph is not None:
        return _graph_timings(variant.graph)
    if variant.frozen is None or variant.program is None:
        return []
    for segment in variant.frozen.segments:
        segment.read_times()
    by_number = {step.number: step for step in variant.program.steps}
    places = {step.number: place for place, step in enumerate(variant.program.steps)}
    runs = sorted(variant.frozen.timings.values(), key=lambda run: places[run.number])
    found = []
    for run in runs:
        step = by_number[run.number]
        found.append(Timing(run.number, step.name, step.where, run.how, run.kernel_id, run.us, run.attempts))
    return found


def _graph_timings(plan: GraphPlan) -> list[Timing]:
    """The graph as a whole, and by what each of its steps is done."""
    us = plan.time_us()
    rows = [] if plan.graph is None else [Timing(-1, "CUDA graph", "", "graph", "", us or 0.0, 0)]
    for step in plan.program.steps:
        served = plan.served.get(step.number)
        how, kernel_id = (OWN, "") if served is None else (served.path, served.kernel_id)
        if step.request is None or served is not None:
            rows.append(Timing(step.number, step.name, step.where, how, kernel_id, 0.0, 0))
    return rows


def mermaid(variant: Variant) -> str:
    """Steps as boxes, arrays as arrows; one frame for each message, or for the CUDA graph."""
    if variant.graph is not None:
        return _graph_chart(variant.graph)
    if variant.program is None or variant.frozen is None:
        return f"flowchart TD\n  none[{variant.phase}: {variant.problem or 'not frozen yet'}]"
    for segment in variant.frozen.segments:
        segment.read_times()
    lines, maker = ["flowchart TD"], dict[int, str]()
    for number in variant.program.recording.inputs:
        maker[number] = f"in{number}"
        lines.append(f"  in{number}([argument {len(maker) - 1}])")
    messages = 0
    for item in variant.frozen.items:
        for name, steps in frames_of(item):
            if name:
                lines.append(f"  subgraph m{messages} [{name}]")
                messages += 1
            lines += [line for step in steps for line in _box(step)]
            if name:
                lines.append("  end")
    shown = {step.number for item in variant.frozen.items for step in _steps_of(item)}
    for step in variant.program.steps:
        sources = {maker[value.number]: None for value in variant.program.reads(step) if value.number in maker}
        if step.number in shown:
            lines += [f"  {source} --> s{step.number}" for source in sources if source != f"s{step.number}"]
        for number in step.made:  # a view is shown as what it is a view of
            found = variant.program.value(number).number
            maker[found] = f"s{step.number}" if step.number in shown else next(iter(sources), "")
    return "\n".join(lines)


def _graph_chart(plan: GraphPlan) -> str:
    program = plan.program
    maker = {number: f"in{number}" for number in program.recording.inputs}
    lines = ["flowchart TD", *(f"  {name}([argument {n}])" for n, name in enumerate(maker.values()))]
    lines.append("  subgraph g [one CUDA graph]" if plan.graph is not None else "  subgraph g [calls]")
    lines += [line for step in program.steps for line in _box(step)]
    lines.append("  end")
    for step in program.steps:
        sources = dict.fromkeys(maker[value.number] for value in program.reads(step) if value.number in maker)
        lines += [f"  {source} --> s{step.number}" for source in sources if source != f"s{step.number}"]
        for number in step.made:
            maker[program.value(number).number] = f"s{step.number}"
    return "\n".join(lines)


def _steps_of(item: Segment | Step) -> list[Step]:
    return item.steps if isinstance(item, Segment) else [item]


def frames_of(item: Segment | Step) -> list[tuple[str, list[Step]]]:
    """Steps that cross together, with what is written on their frame; "" for none."""
    if not isinstance(item, Segment):
        return [("", [item])]
    if not item.is_linked:
        return [("calls", item.steps)]
    found: list[tuple[str, list[Step]]] = []
    for wave in item.waves:
        together = f", {len(wave)} at once" if len(wave) > 1 else ""
        for one in wave:
            numbers = [one] if isinstance(one, int) else one.numbers
            name = "call" if isinstance(one, int) else f"one message{together}"
            found.append((name, [item.steps[number] for number in numbers]))
    return found


def _box(step: Step) -> list[str]:
    shape = "[{}]" if step.request is not None else "[/{}/]"
    return [f"    s{step.number}{shape.format(f'{step.number} {step.name}')}"]


def peak_bytes(variant: Variant) -> int:
    """The memory that a plan has for itself; 0 before it is frozen."""
    if variant.graph is not None:
        return variant.graph.nbytes
    return 0 if variant.frozen is None else variant.frozen.memory.nbytes
