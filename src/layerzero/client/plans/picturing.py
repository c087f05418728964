"""A plan as a picture: a table for terminals, a page for browsers."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerzero.client.connection.report import time_text
from layerzero.client.plans.recording import Step
from layerzero.client.plans.showing import explain_plan, frames_of, slot_rows, timing_rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from layerzero.client.plans.execution_plan import Variant

HEADINGS = ("message", "step", "what", "of steps", "kernel", "us", "slot", "at")
WIDTH = 160  # columns of a text; a terminal that has fewer wraps it
_STYLE = """
body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}
pre{background:#f4f4f4;padding:1em;overflow-x:auto}
table{border-collapse:collapse}th,td{text-align:left;padding:.2em .8em;border-bottom:1px solid #ddd}
td.n{text-align:right}tr.own{color:#777}tr.first td{border-top:2px solid #888}
.bar{display:inline-block;height:.7em;background:#4a7dbd;margin-right:.4em}
"""


@dataclass(frozen=True)
class _Row:
    frame: str  # of the message that it crosses in; "" for one of the caller's own
    is_first: bool  # of its frame
    step: Step
    sources: str
    kernel: str
    us: float
    slot: str

    def texts(self) -> tuple[str, ...]:
        us = f"{self.us:,.1f}" if self.us else ""
        frame = self.frame if self.is_first else ""
        names = (str(self.step.number), self.step.name)
        return (frame, *names, self.sources, self.kernel, us, self.slot, self.step.where)


def _rows(variant: Variant) -> Iterator[_Row]:
    program, frozen = variant.program, variant.frozen
    if program is None or frozen is None:
        return
    timings = {timing.step: timing for timing in timing_rows(variant)}
    slots = frozen.layout.slots
    maker: dict[int, str] = {}
    for place, number in enumerate(program.recording.inputs):
        maker[program.recording.values[number].storage.number] = f"argument {place}"
    for item in frozen.items:
        for frame, steps in frames_of(item):
            for place, step in enumerate(steps):
                timing = timings.get(step.number)
                reads = dict.fromkeys(maker.get(value.storage.number, "constant") for value in program.reads(step))
                its = [slots[home.number] for home in step.fresh if home.number in slots]
                slot = ", ".join(f"{one.offset}+{one.nbytes}" for one in its)
                kernel = "" if timing is None else timing.kernel_id or "own code"
                yield _Row(
                    frame or "here", not place, step, ", ".join(reads), kernel, timing.us if timing else 0.0, slot
                )
                for home in (*step.fresh, *step.writes):
                    maker[home.number] = str(step.number)


def as_text(variant: Variant, counters: Mapping[str, Any]) -> str:
    """A table of the steps in their order, under the explanation's first line, and the slots' size."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADINGS, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for row in _rows(variant):
        table.add_row(*(text.replace("[", r"\[") for text in row.texts()))
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, color_system=None, highlight=False)
    console.print(str(explain_plan(variant, counters)).splitlines()[0], markup=False)
    if table.row_count:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def as_html(variant: Variant, counters: Mapping[str, Any]) -> str:
    """A page that needs no other file: what `explain` says, the steps with their times, and who has which slot when."""
    told = str(explain_plan(variant, counters))
    rows = list(_rows(variant))
    longest = max((row.us for row in rows), default=0.0) or 1.0
    body = [_line(HEADINGS, "th")]
    for row in rows:
        kind = " ".join(filter(None, ("first" * row.is_first, "own" * (row.step.request is None))))
        cells = [html.escape(text) for text in row.texts()]
        cells[5] = f'<span class="bar" style="width:{80 * row.us / longest:.0f}px"></span>{cells[5]}'
        body.append(f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    slots = [_line(("offset", "bytes", "made by", "from step", "to step"), "th")]
    slots += [_line((s.offset, s.nbytes, s.made_by, s.first, s.last), "td") for s in slot_rows(variant)]
    total = time_text(sum(row.us for row in rows))
    title = html.escape(told.splitlines()[0])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1><pre>{html.escape(told)}</pre><h2>Steps, {total} in all</h2><table>"
        f"{''.join(body)}</table><h2>Slots</h2><table>{''.join(slots)}</table></body></html>"
    )


def _line(cells: Sequence[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
