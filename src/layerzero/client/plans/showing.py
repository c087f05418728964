"""What a person sees of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerzero.client.connection.report import html_of_text
from layerzero.client.plans.recording import Step
from layerzero.client.plans.segments import Segment
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.client.plans.execution_plan import Variant


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

    def __str__(self) -> str:
        lines = [f"{self.phase}: {self.arguments}"]
        if self.problem:
            lines.append(f"  runs as calls, for {self.problem}")
        if self.steps:
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


def slot_rows(variant: Variant) -> list[SlotRow]:
    if variant.frozen is None or variant.program is None:
        return []
    steps = variant.program.steps
    slots = sorted(variant.frozen.layout.slots.values(), key=lambda slot: (slot.first, slot.offset))
    return [SlotRow(s.offset, s.nbytes, s.first, s.last, steps[s.first].name) for s in slots]


def timing_rows(variant: Variant) -> list[Timing]:
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


def mermaid(variant: Variant) -> str:
    """Steps as boxes, arrays as arrows; one frame for each message."""
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
